//! What is told of one allocator: one JSON object a line.

use super::PeersError;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::Path;

/// One line. Sizes in bytes; other units stand in the names.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Line {
    /// The first: what is measured.
    Program(About),
    /// A pattern of allocations and frees.
    Pairs(Pairs),
    /// One replay of a trace.
    Replay(Replay),
    /// The least memory in which a trace completes.
    Least(Least),
    /// What was not run.
    Skipped(Skipped),
}

/// What is measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct About {
    /// The allocator.
    pub allocator: String,
    /// Its version and settings.
    pub about: String,
    /// Time of one reading of the clock, by which each timed call is too long.
    pub clock_ns: f64,
    /// Versions of CUDA and the like.
    #[serde(flatten)]
    pub more: Map<String, Value>,
}

/// A pattern of allocations and frees.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Pairs {
    /// The allocator.
    pub allocator: String,
    /// `pair`, `churn`, `live` or `threads`.
    pub pattern: String,
    /// What one operation is: `pair`, `alloc` or `free`.
    pub operation: String,
    /// Size of a block; 0 where sizes are random.
    pub bytes: u64,
    /// Blocks live at once on a thread.
    pub live: u64,
    /// Threads at work at once.
    pub threads: u64,
    /// Streams that they share.
    pub streams: u64,
    /// Operations of one sample, of all threads together.
    pub operations: u64,
    /// Samples.
    pub samples: u64,
    /// Bytes that one sample asks for: the same for every allocator where `operations` is.
    pub requested_bytes: u64,
    /// Time of a sample over its operations: the median.
    pub median_ns: f64,
    /// The least.
    pub min_ns: f64,
}

/// Which replay it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Run {
    /// With all memory of the device.
    Plenty,
    /// With little left free.
    Limited,
    /// A search for the least.
    Least,
}

/// One replay of a trace. A refused request is left out and the replay goes on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Replay {
    /// The allocator.
    pub allocator: String,
    /// The trace.
    pub trace: String,
    /// Which replay.
    pub run: Run,
    /// Events of the trace.
    pub events: u64,
    /// Those that were run.
    pub events_run: u64,
    /// All were run and none was refused.
    pub completed: bool,
    /// It was ended early: it took too long, or too many requests were refused.
    pub cut_short: bool,
    /// Requests refused for lack of memory.
    pub ooms: u64,
    /// Event of the first, counted from 0.
    pub first_oom_event: Option<u64>,
    /// Most bytes live at once, by the trace.
    pub trace_peak_requested_bytes: u64,
    /// The same, of what was served.
    pub peak_requested_bytes: u64,
    /// Most bytes in blocks, as the allocator rounds them; 0 where it does not say.
    pub peak_allocated_bytes: u64,
    /// Most physical memory.
    pub peak_reserved_bytes: u64,
    /// Free memory of the device before it.
    pub left_free_bytes: u64,
    /// From the first to the last event, with two readings of the clock for each.
    pub wall_ms: f64,
    /// Inside the allocator's calls, with one reading of the clock each.
    pub calls_ms: f64,
    /// One allocation: the median.
    pub alloc_p50_us: f64,
    /// 99 of 100 take no longer.
    pub alloc_p99_us: f64,
    /// The longest.
    pub alloc_max_us: f64,
    /// Counters of the allocator's own.
    #[serde(flatten)]
    pub more: Map<String, Value>,
}

/// The least memory in which a trace completes: free memory of the device, the rest filled with a ballast.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Least {
    /// The allocator.
    pub allocator: String,
    /// The trace.
    pub trace: String,
    /// Most bytes live at once.
    pub trace_peak_requested_bytes: u64,
    /// The least that was found by halving; `None` where the search did not end.
    pub least_bytes: Option<u64>,
    /// The least that was seen to be enough.
    pub enough_bytes: Option<u64>,
    /// How fine the search was.
    pub step_bytes: u64,
    /// Replays that it took.
    pub tries: u64,
    /// Inside the allocator's calls, in the least.
    pub calls_ms: f64,
    /// The search did not end.
    pub cut_short: bool,
}

/// What was not run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Skipped {
    /// The allocator.
    pub allocator: String,
    /// The trace.
    pub trace: String,
    /// Which replay.
    pub run: Run,
    /// Why.
    pub why: String,
}

impl Line {
    /// The allocator that it is about.
    #[must_use]
    pub fn allocator(&self) -> &str {
        match self {
            Self::Program(line) => &line.allocator,
            Self::Pairs(line) => &line.allocator,
            Self::Replay(line) => &line.allocator,
            Self::Least(line) => &line.allocator,
            Self::Skipped(line) => &line.allocator,
        }
    }
}

impl Replay {
    /// Peak reserved in times the trace's peak requested.
    #[must_use]
    pub fn reserved_factor(&self) -> f64 {
        self.peak_reserved_bytes as f64 / self.trace_peak_requested_bytes.max(1) as f64
    }
}

impl Least {
    /// The least in times peak requested, if it was found.
    #[must_use]
    pub fn factor(&self) -> Option<f64> {
        self.least_bytes.map(|least| least as f64 / self.trace_peak_requested_bytes.max(1) as f64)
    }
}

/// The lines of a text; `from` names it in errors.
pub(super) fn parse(from: &str, text: &str) -> Result<Vec<Line>, PeersError> {
    let wrong = |line, why: serde_json::Error| PeersError::Line { from: from.to_owned(), line, why: why.to_string() };
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    lines.map(|(at, line)| serde_json::from_str(line).map_err(|why| wrong(at + 1, why))).collect()
}

/// The lines of a file: as the program prints them, or inside a report of the device suite.
///
/// # Errors
/// When the file cannot be read or holds no such lines.
pub fn read(path: &Path) -> Result<Vec<Line>, PeersError> {
    let text = std::fs::read_to_string(path).map_err(|source| PeersError::File { path: path.to_owned(), source })?;
    let from = path.display().to_string();
    let lines = match serde_json::from_str::<Value>(&text) {
        Ok(report) if report["sections"].is_array() => {
            let sections = report["sections"].as_array().into_iter().flatten();
            let found = sections.filter_map(|section| section["lines"].as_array()).flatten().enumerate();
            let wrong =
                |line, why: serde_json::Error| PeersError::Line { from: from.clone(), line, why: why.to_string() };
            found
                .map(|(at, line)| Line::deserialize(line).map_err(|why| wrong(at + 1, why)))
                .collect::<Result<Vec<Line>, _>>()?
        }
        _ => parse(&from, &text)?,
    };
    if lines.is_empty() {
        return Err(PeersError::Nothing { path: path.to_owned() });
    }
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the program printed them.
    const PRINTED: &str = include_str!("../../tests/data/peers.jsonl");

    #[test]
    fn what_the_program_prints_is_read_and_kept_whole() {
        let lines = parse("test", PRINTED).unwrap();
        assert_eq!(lines.len(), PRINTED.lines().count());
        for (line, text) in lines.iter().zip(PRINTED.lines()) {
            let (own, printed) = (serde_json::to_value(line).unwrap(), serde_json::from_str::<Value>(text).unwrap());
            // Numbers may be written in other ways, such as 28 and 28.0.
            let fields = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
            let (mut one, mut two) = (fields(&own), fields(&printed));
            one.sort();
            two.sort();
            assert_eq!(one, two);
            for (name, value) in printed.as_object().unwrap() {
                assert_eq!(own[name].as_f64(), value.as_f64(), "{name}");
                assert_eq!(own[name].as_str(), value.as_str(), "{name}");
            }
        }
    }

    #[test]
    fn a_report_holds_lines_in_its_sections() {
        let folder = tempfile::tempdir().unwrap();
        let lines = parse("test", PRINTED).unwrap();
        let report = serde_json::json!({"gpu": "g", "sections": [{"name": "facts"}, {"lines": &lines[..2]}, {"lines": &lines[2..]}]});
        let path = folder.path().join("report.json");
        std::fs::write(&path, serde_json::to_string_pretty(&report).unwrap()).unwrap();
        assert_eq!(read(&path).unwrap(), lines);
        let plain = folder.path().join("lines");
        std::fs::write(&plain, PRINTED).unwrap();
        assert_eq!(read(&plain).unwrap(), lines);
        std::fs::write(&path, "{\"sections\": []}").unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("holds no figures"));
        std::fs::write(&plain, "{\"kind\": \"program\"}\n").unwrap();
        assert!(read(&plain).unwrap_err().to_string().starts_with("line 1 of"));
    }
}
