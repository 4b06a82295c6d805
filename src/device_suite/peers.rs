//! Other allocators as they are, beside xseg in the same run.

use super::Suite;
use super::pairs::{self, Ground, THREADS};
use super::replay::traces;
use super::report::{Cell, Section, Table};
use std::path::PathBuf;
use xseg::backend::Backend;
use xseg::peers::{Limits, Line, OWN, Pairs, Program, Run, Texts, gpu, own};
use xseg::units::{GIB, KIB, MIB, human};
use xseg::{Config, Error, Heap};

/// The program of other allocators, and what its replays are given.
#[derive(Debug, Default)]
pub(crate) struct Peers {
    pub(crate) program: Option<PathBuf>,
    /// Only these; all if empty.
    pub(crate) allocators: Vec<String>,
    pub(crate) limits: Limits,
}

impl Peers {
    fn started(&self, section: &mut Section) -> Option<(Program, Vec<String>)> {
        let Some(path) = &self.program else {
            section
                .text
                .push("Only xseg: no --peers names the program that `benches/peers/run.sh --build` builds.".into());
            return None;
        };
        let program = Program::new(path);
        match program.allocators() {
            Ok(names) => {
                let (asked, left_out): (Vec<String>, Vec<String>) =
                    names.into_iter().partition(|name| self.allocators.is_empty() || self.allocators.contains(name));
                if !left_out.is_empty() {
                    section.text.push(format!("Left out, as asked: {}.", left_out.join(", ")));
                }
                Some((program, asked))
            }
            Err(error) => {
                section.check("the program of other allocators runs", error, false);
                None
            }
        }
    }
}

/// Adds what one allocator told; a failure is a failed check.
fn told(section: &mut Section, name: &str, told: Result<xseg::peers::Told, xseg::peers::PeersError>) {
    match told {
        Ok(told) => {
            section.lines.extend(told.lines);
            if let Some(failure) = told.failure {
                section.check(&format!("{name} is measured to the end"), failure, false);
            }
        }
        Err(error) => section.check(&format!("{name} is measured"), error, false),
    }
}

/// What is measured, from the first lines.
fn abouts(section: &mut Section) {
    let about = |line: &Line| match line {
        Line::Program(line) => {
            Some(format!("{}: {} (a clock reading takes {:.0} ns).", line.allocator, line.about, line.clock_ns))
        }
        _ => None,
    };
    let all: Vec<String> = section.lines.iter().filter_map(about).collect();
    section.text.extend(all);
}

/// Allocators in the order of their lines.
fn names(lines: &[Line]) -> Vec<&str> {
    let mut names = Vec::new();
    for line in lines {
        if !names.contains(&line.allocator()) {
            names.push(line.allocator());
        }
    }
    names
}

/// Measures pairs through the heap and through every other allocator.
///
/// # Errors
/// When the driver refuses a call.
pub(crate) fn pairs(suite: &Suite) -> Result<Section, Error> {
    let mut section = Section::default();
    section.text.push(
        "Nanoseconds an operation, and beside them how many times xseg's: the median of samples of many operations without a clock reading inside, then the least of them. Each \
         allocator is warm; threads have streams that were created, all else is on the default stream. No pattern needs driver work after its first sample, but cuda-malloc's, whose every call is driver work."
            .into(),
    );
    let mut streams = Vec::new();
    for _ in 0..THREADS {
        streams.push(suite.backend.create_stream()?);
    }
    let heap = Heap::builder().config(Config::default()).backend(suite.backend.clone()).build()?;
    section.lines.push(own::about(""));
    let ground = Ground { heap: &heap, streams: std::array::from_fn(|number| streams[number]), quick: suite.quick };
    let measured = pairs::measure(&ground);
    drop(heap);
    suite.backend.quiesce()?;
    for stream in streams {
        // SAFETY: created above; the device is idle and the heap that knew it is gone.
        unsafe { suite.backend.destroy_stream(stream) }?;
    }
    section.lines.extend(measured?);
    if let Some((program, allocators)) = suite.peers.started(&mut section) {
        for name in allocators {
            told(&mut section, &name, program.pairs(&name, suite.quick));
        }
    }
    abouts(&mut section);
    let tables = [
        pairs_table(&section.lines, "median", |line| line.median_ns),
        pairs_table(&section.lines, "least", |line| line.min_ns),
    ];
    section.tables.extend(tables);
    pairs_checks(&mut section);
    Ok(section)
}

/// What a pattern is called.
fn pattern(line: &Pairs) -> String {
    let bytes = match line.bytes {
        bytes if bytes >= MIB => format!("{} MiB", bytes / MIB),
        bytes if bytes >= KIB => format!("{} KiB", bytes / KIB),
        bytes => format!("{bytes} B"),
    };
    match line.pattern.as_str() {
        "pair" => format!("pair of {bytes}"),
        "churn" => format!("pair, random sizes up to 1 MiB, {} live", line.live),
        "live" => format!(
            "{}, {} live, {}",
            line.operation,
            line.live,
            if line.operation == "alloc" { "in order" } else { "scattered" }
        ),
        _ => {
            let streams = if line.threads == 1 {
                ""
            } else if line.streams == 1 {
                " on one stream"
            } else {
                " on own streams"
            };
            format!("pair of {bytes}, {} threads{streams}, time over all pairs", line.threads)
        }
    }
}

fn of<'a>(lines: &'a [Line], name: &str) -> Vec<&'a Pairs> {
    let one = |line: &'a Line| match line {
        Line::Pairs(pairs) if pairs.allocator == name => Some(pairs),
        _ => None,
    };
    lines.iter().filter_map(one).collect()
}

/// Allocators that told of pairs.
fn with_pairs(lines: &[Line]) -> Vec<&str> {
    names(lines).into_iter().filter(|name| !of(lines, name).is_empty()).collect()
}

fn pairs_table(lines: &[Line], what: &str, time: fn(&Pairs) -> f64) -> Table {
    let names = with_pairs(lines);
    let columns = names.iter().flat_map(|name| {
        let ratio = (*name != OWN).then(|| format!("{name} / xseg"));
        std::iter::once(format!("{name} ns, {what}")).chain(ratio)
    });
    let columns: Vec<String> = std::iter::once("operation".to_owned()).chain(columns).collect();
    let mut table = Table::new(&columns.iter().map(String::as_str).collect::<Vec<_>>());
    for own in of(lines, OWN) {
        let mut cells: Vec<Cell> = vec![pattern(own).as_str().into()];
        for name in &names {
            let found = of(lines, name).into_iter().find(|line| pattern(line) == pattern(own));
            cells.push(found.map_or_else(|| "–".into(), |line| time(line).into()));
            if *name != OWN {
                cells.push(found.map_or_else(|| "–".into(), |line| (time(line) / time(own)).into()));
            }
        }
        table.row(cells);
    }
    table
}

/// What is asked of the hot path, and that all were asked for the same.
fn pairs_checks(section: &mut Section) {
    let lines = std::mem::take(&mut section.lines);
    let own = of(&lines, OWN);
    for name in with_pairs(&lines).into_iter().filter(|name| *name != OWN) {
        let theirs = of(&lines, name);
        let same = own.iter().filter(|line| line.bytes == 0).all(|line| {
            let asked = |line: &Pairs| (line.operations, line.requested_bytes);
            theirs.iter().any(|their| pattern(their) == pattern(line) && asked(their) == asked(line))
        });
        section.check(
            &format!("{name} was asked for what xseg was asked for"),
            if same { "the same" } else { "not the same" },
            same,
        );
        let least = match name {
            "torch-native" => 10.0,
            "torch-expandable" => 15.0,
            _ => continue,
        };
        for mine in own.iter().filter(|line| line.pattern == "pair") {
            let wanted = if mine.bytes <= MIB { least } else { 6.0 };
            let Some(their) = theirs.iter().find(|their| pattern(their) == pattern(mine)) else { continue };
            let times = their.median_ns / mine.median_ns;
            let what = format!("{}: at least {wanted} times faster than {name}", pattern(mine));
            section.check(&what, format!("{times:.1} times"), times >= wanted);
        }
    }
    let threads = |threads: usize, streams: u64| {
        let found = own
            .iter()
            .find(|line| line.pattern == "threads" && line.threads == threads as u64 && line.streams == streams);
        found.map(|line| 1e3 / line.median_ns)
    };
    if let (Some(one), Some(apart), Some(together)) =
        (threads(1, 1), threads(THREADS, THREADS as u64), threads(THREADS, 1))
    {
        let found = format!("{apart:.1} M pairs/s, {:.1} times one thread's", apart / one);
        section.check(
            "8 threads on own streams: 100 M pairs/s, or 5 times one thread",
            found,
            apart >= 100.0 || apart >= 5.0 * one,
        );
        section.check("8 threads on one stream: 2 M pairs/s", format!("{together:.1} M pairs/s"), together >= 2.0);
    }
    section.lines = lines;
}

/// Replays the traces through the heap and through every other allocator.
///
/// # Errors
/// When the driver refuses a call.
pub(crate) fn replays(suite: &Suite) -> Result<Section, Error> {
    let mut section = Section::default();
    let limits = &suite.peers.limits;
    section.text.push(format!(
        "The traces, allocations and frees alone, each call timed; no kernels run. Plenty: all of the card. Little: a plain allocation leaves {} times \
         peak requested and {} free; xseg's limit is set to the former. Least: the least free memory in which a trace completes, by halving, in steps of \
         0.05 % of its peak (xseg's limit is what is free). Calls: time inside the allocator, a clock reading in each. A refused request is left out.",
        limits.factor,
        human(limits.extra)
    ));
    let traces = traces(suite)?;
    let traces: Vec<_> = traces.iter().collect();
    section.lines.extend(gpu::replays(&suite.backend, &traces, &Config::default(), limits)?);
    if let Some((program, allocators)) = suite.peers.started(&mut section) {
        match Texts::write(&traces) {
            Ok(texts) => {
                for name in allocators {
                    let limits = limits.of(&name);
                    told(&mut section, &name, program.replays(&name, &limits, &texts));
                }
            }
            Err(error) => section.check("the traces are written for the program", error, false),
        }
    }
    abouts(&mut section);
    let tables = [
        memory_table(&section.lines),
        time_table(&section.lines, Run::Plenty),
        time_table(&section.lines, Run::Limited),
    ];
    section.tables.extend(tables);
    let own_runs = section.lines.iter().filter_map(|line| match line {
        Line::Replay(run) if run.allocator == OWN => {
            Some((format!("{} with {:?} memory", run.trace, run.run).to_lowercase(), run.completed, run.ooms))
        }
        _ => None,
    });
    for (what, completed, ooms) in own_runs.collect::<Vec<_>>() {
        section.check(&format!("xseg completes {what}"), format!("{ooms} refused"), completed);
    }
    Ok(section)
}

/// Names of traces in the order of their lines.
fn trace_names(lines: &[Line]) -> Vec<&str> {
    let mut names = Vec::new();
    for line in lines {
        let name = match line {
            Line::Replay(line) => &line.trace,
            Line::Least(line) => &line.trace,
            _ => continue,
        };
        if !names.contains(&name.as_str()) {
            names.push(name);
        }
    }
    names
}

fn memory_table(lines: &[Line]) -> Table {
    let mut table = Table::new(&[
        "trace",
        "allocator",
        "peak requested GiB",
        "plenty: peak allocated GiB",
        "plenty: peak reserved GiB",
        "plenty: reserved / requested",
        "little: left free / requested",
        "little: requests refused",
        "least / requested",
        "least: calls ms",
    ]);
    let dash = || Cell::from("–");
    let gib = |bytes: u64| Cell::from(bytes as f64 / GIB as f64);
    for trace in trace_names(lines) {
        for name in names(lines) {
            let run = |wanted| {
                lines.iter().find_map(|line| match line {
                    Line::Replay(run) if run.trace == trace && run.allocator == name && run.run == wanted => Some(run),
                    _ => None,
                })
            };
            let least = lines.iter().find_map(|line| match line {
                Line::Least(least) if least.trace == trace && least.allocator == name => Some(least),
                _ => None,
            });
            let (plenty, limited) = (run(Run::Plenty), run(Run::Limited));
            let Some(any) = plenty.or(limited) else { continue };
            let whole = plenty.filter(|run| run.completed);
            let refused = limited.map_or_else(dash, |run| match run.cut_short {
                true if run.ooms == 0 => Cell::from("cut short"),
                true => Cell::from(format!("{} and more", run.ooms).as_str()),
                false => run.ooms.into(),
            });
            table.row([
                trace.into(),
                name.into(),
                gib(any.trace_peak_requested_bytes),
                whole.filter(|run| run.peak_allocated_bytes > 0).map_or_else(dash, |run| gib(run.peak_allocated_bytes)),
                whole.map_or_else(dash, |run| gib(run.peak_reserved_bytes)),
                whole.map_or_else(dash, |run| run.reserved_factor().into()),
                limited.map_or_else(dash, |run| {
                    (run.left_free_bytes as f64 / run.trace_peak_requested_bytes as f64).into()
                }),
                refused,
                least.map_or_else(dash, |least| match (least.factor(), least.enough_bytes) {
                    (Some(factor), _) => Cell::from(format!("{factor:.4}").as_str()),
                    (None, Some(_)) => Cell::from("no time"),
                    (None, None) => dash(),
                }),
                least.filter(|least| least.least_bytes.is_some()).map_or_else(dash, |least| least.calls_ms.into()),
            ]);
        }
    }
    table
}

fn time_table(lines: &[Line], wanted: Run) -> Table {
    let run = if wanted == Run::Plenty { "plenty" } else { "little" };
    let columns: Vec<String> =
        ["wall ms", "calls ms", "calls / xseg's", "alloc p50 µs", "alloc p99 µs", "alloc max µs", "events run %"]
            .iter()
            .map(|column| format!("{run}: {column}"))
            .collect();
    let columns: Vec<&str> = ["trace", "allocator"].into_iter().chain(columns.iter().map(String::as_str)).collect();
    let mut table = Table::new(&columns);
    for trace in trace_names(lines) {
        let runs = lines.iter().filter_map(|line| match line {
            Line::Replay(run) if run.trace == trace && run.run == wanted => Some(run),
            _ => None,
        });
        let runs: Vec<_> = runs.collect();
        let own = runs.iter().find(|run| run.allocator == OWN && run.completed).map(|run| run.calls_ms);
        for run in runs {
            let ratio =
                own.filter(|_| run.completed).map_or_else(|| Cell::from("–"), |own| (run.calls_ms / own).into());
            table.row([
                trace.into(),
                run.allocator.as_str().into(),
                run.wall_ms.into(),
                run.calls_ms.into(),
                ratio,
                run.alloc_p50_us.into(),
                run.alloc_p99_us.into(),
                run.alloc_max_us.into(),
                (100.0 * run.events_run as f64 / run.events.max(1) as f64).into(),
            ]);
        }
    }
    table
}
