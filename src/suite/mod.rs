//! The defragmentation suite: what would each way of managing GPU memory do with this workload?
//!
//! `xseg bench` and `cargo bench --bench defrag` run it. [`run`] measures every allocator on every workload;
//! [`report`] says what was found. All but times is the same in each run with one seed.
#![forbid(unsafe_code)]

pub(crate) mod classic;
mod effort;
mod measure;
pub(crate) mod moving;
mod picture;
pub(crate) mod real;
pub(crate) mod report;
mod row;
#[cfg(test)]
mod tests;
pub(crate) mod workloads;

use crate::config::{BackendChoice, Config, SizeOrShare};
use crate::replay::{self, least};
use crate::subjects::{self, Opened, Request, subject_for};
use crate::units::{GRANULE, round_down, round_up};
use effort::Effort;
use measure::Run;
use row::Measures;
pub(crate) use row::Row;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;
use workloads::Workload;

/// Name of the row that the report is about.
pub(crate) const OWN: &str = "xseg";
/// Name of the row of xseg on host memory, really remapped and verified.
pub(crate) const HOST: &str = "xseg-host";
/// Steps of peak requested in a quick search for the least limit: half a per cent each.
const QUICK_STEPS: u64 = 200;

/// Every allocator of the suite, in the order of reports.
pub(crate) fn allocators() -> Vec<&'static str> {
    let mut names = subjects::names();
    names.insert(1, HOST);
    names
}

/// How the least limit is searched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Least {
    /// As `xseg least` does: to 0.05 % of peak requested, and the next 20 steps complete too.
    Full,
    /// By halving, to 0.5 %.
    Quick,
    /// Not at all.
    No,
}

/// What to run.
pub(crate) struct Options {
    pub(crate) workloads: Vec<Workload>,
    pub(crate) allocators: Vec<String>,
    /// xseg's policy; backend and limit are the suite's.
    pub(crate) config: Config,
    /// The limit for a peak, where a workload has none of its own.
    pub(crate) limit: Box<dyn Fn(u64) -> u64 + Sync>,
    /// Lag of the simulated device.
    pub(crate) lag: Duration,
    pub(crate) least: Least,
    /// Threads.
    pub(crate) jobs: usize,
}

/// What is told on the way. Any thread calls.
pub(crate) trait Progress: Sync {
    /// So much work is ahead, in a unit of its own: what counts are shares of it.
    fn length(&self, work: u64);
    /// So much of it is done.
    fn done(&self, work: u64);
    /// What is going on.
    fn doing(&self, what: &str);
}

/// One allocator on one workload: the row, and what only drawings need.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Measured {
    pub(crate) row: Row,
    pub(crate) plenty: Option<Run>,
    pub(crate) limited: Option<Run>,
}

/// Runs every allocator on every workload; rows by workload in the given order, allocators too.
///
/// # Errors
/// An allocator that cannot be opened, in a sentence that says what to do.
pub(crate) fn run(options: &Options, progress: &dyn Progress) -> Result<Vec<Measured>, String> {
    let pairs = options.workloads.iter().enumerate();
    let mut jobs: Vec<(usize, &Workload, usize, &String)> = pairs
        .flat_map(|(number, workload)| {
            options.allocators.iter().enumerate().map(move |(a, name)| (number, workload, a, name))
        })
        .collect();
    let effort = |workload: &Workload, name: &str| {
        Effort::new(progress, name, workload.trace.events.len() as u64, options.least)
    };
    // Long ones first, so that no thread is left alone with one at the end.
    jobs.sort_by_key(|(_, workload, _, name)| std::cmp::Reverse(effort(workload, name).total()));
    progress.length(jobs.iter().map(|(_, workload, _, name)| effort(workload, name).total()).sum());
    let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let results = Mutex::new(Vec::new());
    let work = || {
        while !failed.load(Relaxed)
            && let Some((number, workload, allocator, name)) = jobs.get(next.fetch_add(1, Relaxed))
        {
            progress.doing(&format!("{} with {name}", workload.name()));
            let effort = effort(workload, name);
            let done = one(options, workload, name, &effort);
            failed.fetch_or(done.is_err(), Relaxed);
            if let Ok(mut results) = results.lock() {
                results.push((*number, *allocator, done));
            }
            effort.done();
        }
    };
    std::thread::scope(|scope| {
        // No more threads than pairs, whatever was asked for.
        for _ in 1..options.jobs.min(jobs.len()) {
            scope.spawn(work);
        }
        work();
    });
    let mut results = results.into_inner().map_err(|_| "a thread of the suite panicked".to_owned())?;
    results.sort_by_key(|(workload, allocator, _)| (*workload, *allocator));
    results.into_iter().map(|(.., done)| done).collect()
}

/// One pair.
fn one(options: &Options, workload: &Workload, allocator: &str, effort: &Effort<'_>) -> Result<Measured, String> {
    let trace = &workload.trace;
    let peak = trace.peak_requested();
    let limit = workload.limit.unwrap_or_else(|| (options.limit)(peak)).max(GRANULE);
    if allocator == HOST {
        let replay = |limit, kind| -> Result<Measures, String> {
            let opened = open(options, workload, OWN, limit, kind)?;
            let measures = Measures::of_outcome(peak, &replayed(workload, opened));
            effort.ran();
            Ok(measures)
        };
        // Without a limit next to nothing is remapped: stamps there would only fill the machine's memory.
        let (plenty, limited) = (replay(None, Kind::Host)?, replay(Some(limit), Kind::Verified)?);
        let row = Row::new(workload, allocator, "host", limit, plenty, limited);
        return Ok(Measured { row, plenty: None, limited: None });
    }
    let measured = |limit| -> Result<Run, String> {
        let run = measure::run(trace, open(options, workload, allocator, limit, Kind::Watched)?);
        effort.ran();
        Ok(run)
    };
    let (plenty, limited) = (measured(None)?, measured(Some(limit))?);
    let [all, some] = [&plenty, &limited].map(|run| Measures::of_run(run.peak_requested(), run));
    let mut row = Row::new(workload, allocator, "sim", limit, all, some);
    let completes = |limit| -> Result<bool, String> {
        let opened = open(options, workload, allocator, Some(limit), Kind::Plain)?;
        let completed = replayed(workload, opened).completed();
        effort.tried();
        Ok(completed)
    };
    match options.least {
        Least::Full => row.set_least(least::search(peak, completes)?, 1.0 / least::STEPS_PER_PEAK as f64),
        Least::Quick => row.set_least(quick_least(peak, completes)?, 1.0 / QUICK_STEPS as f64),
        Least::No => {}
    }
    Ok(Measured { row, plenty: Some(plenty), limited: Some(limited) })
}

fn replayed(workload: &Workload, mut opened: Opened) -> replay::Outcome {
    let mut options = replay::Options { clock: opened.clock, device: opened.device, progress: None };
    replay::replay(&workload.trace, &mut *opened.subject, &mut options)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Only whether it completes counts.
    Plain,
    /// Everything is measured.
    Watched,
    /// On host memory, really mapped.
    Host,
    /// The same, every stamp checked.
    Verified,
}

fn open(
    options: &Options,
    workload: &Workload,
    allocator: &str,
    limit: Option<u64>,
    kind: Kind,
) -> Result<Opened, String> {
    let mut config = options.config.clone();
    let host = matches!(kind, Kind::Host | Kind::Verified);
    config.backend = if host { BackendChoice::Host } else { BackendChoice::Sim };
    config.limit = limit.map(SizeOrShare::Bytes);
    config.check().map_err(|error| error.to_string())?;
    subject_for(&Request {
        allocator,
        config,
        lag: options.lag,
        verify: kind == Kind::Verified,
        fault: None,
        watch: kind == Kind::Watched,
        one_stream: workload.trace.streams.len() == 1,
    })
}

/// The least limit to half a per cent, by halving up to four times the peak; `None` if that is not enough.
fn quick_least(peak: u64, mut completes: impl FnMut(u64) -> Result<bool, String>) -> Result<Option<u64>, String> {
    let limit = |step: u64| {
        let bytes = peak + (peak / QUICK_STEPS) * step;
        // Not below the peak itself, whatever its granules.
        round_down(bytes, GRANULE).max(round_up(peak, GRANULE).unwrap_or(bytes))
    };
    let (mut low, mut high) = (0, 3 * QUICK_STEPS);
    if !completes(limit(high))? {
        return Ok(None);
    }
    // Most need little more than the peak: narrow down from there.
    for step in [QUICK_STEPS / 10, QUICK_STEPS / 2] {
        if low < step && step < high {
            if completes(limit(step))? {
                high = step;
                break;
            }
            low = step + 1;
        }
    }
    while low < high {
        let middle = u64::midpoint(low, high);
        if completes(limit(middle))? {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    Ok(Some(limit(high)))
}
