//! One workload through one allocator, with everything measured on the way.
//!
//! A refused request does not end the run: its block is left out, the next events go on. What a call
//! costs has two parts that are kept apart: its **stall** (driver time, by the frozen model where there is no GPU,
//! and waiting for the device by the virtual clock), the same in each run, and the time of the **machine**.

use super::picture::Picture;
use crate::replay::{Figures, SubjectError};
use crate::subjects::Opened;
use crate::trace::{Action, Trace};
use serde::Serialize;
use std::time::{Duration, Instant};

/// Points of a curve over time.
const SAMPLES: usize = 150;
/// Refused requests after which a run ends: each may cost a flush of everything.
const REFUSED_MAX: u64 = 10_000;

/// Memory at one moment; the most since the moment before. Sizes in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Sample {
    pub(crate) time_us: u64,
    pub(crate) requested: u64,
    pub(crate) allocated: u64,
    pub(crate) reserved: u64,
}

/// Values at some shares of all, in one unit.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub(crate) struct Quantiles {
    pub(crate) p50: f64,
    pub(crate) p90: f64,
    pub(crate) p99: f64,
    pub(crate) p999: f64,
    pub(crate) max: f64,
}

impl Quantiles {
    /// Of values in nanoseconds, in units of `unit` nanoseconds; the values end up sorted.
    pub(crate) fn of(values: &mut [u64], unit: f64) -> Self {
        values.sort_unstable();
        // The smallest value that at least this share of all does not exceed.
        let at = |share: f64| {
            let rank = (share * values.len() as f64).ceil() as usize;
            values.get(rank.saturating_sub(1)).map_or(0.0, |value| *value as f64 / unit)
        };
        Self { p50: at(0.5), p90: at(0.9), p99: at(0.99), p999: at(0.999), max: at(1.0) }
    }
}

/// The allocation with the longest stall: what it asked for, and what the stall is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub(crate) struct Longest {
    pub(crate) event: u64,
    pub(crate) requested_bytes: u64,
    /// How much more memory existed after it.
    pub(crate) grown_bytes: u64,
    pub(crate) waited_ns: u64,
    pub(crate) driver_ns: u64,
}

/// How a run went.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Run {
    /// The allocator's own figures after the last event.
    pub(crate) figures: Figures,
    /// Driver time of giving everything back.
    pub(crate) teardown: Duration,
    /// Requests that were refused for lack of memory, and the event of the first.
    pub(crate) refused: u64,
    pub(crate) first_refused: Option<usize>,
    /// A failure that is no lack of memory.
    pub(crate) failure: Option<String>,
    /// Stall of one allocation, in microseconds.
    pub(crate) stall_us: Quantiles,
    /// The longest of them; `None` if there was no allocation.
    pub(crate) longest: Option<Longest>,
    /// The machine's time of one allocation, in nanoseconds.
    pub(crate) machine_ns: Quantiles,
    /// Median of it over the allocations without a stall, in nanoseconds; `None` if each had one.
    pub(crate) hot_path_ns: Option<f64>,
    /// The machine's time of all calls of the allocator.
    pub(crate) wall: Duration,
    pub(crate) samples: Vec<Sample>,
    /// When the most bytes were live.
    pub(crate) at_peak: Option<Picture>,
    /// When the first request was refused.
    pub(crate) at_refusal: Option<Picture>,
}

impl Run {
    /// Most bytes live at once in it: less than the trace's where requests were refused.
    pub(crate) fn peak_requested(&self) -> u64 {
        self.samples.iter().map(|sample| sample.requested).max().unwrap_or(0)
    }
}

/// The first event after which the most bytes are live.
fn peak_event(trace: &Trace) -> usize {
    let mut live = 0u64;
    for (number, event) in trace.events.iter().enumerate() {
        let bytes = trace.blocks[event.block as usize].bytes;
        match event.action {
            Action::Alloc => live += bytes,
            Action::Free => live -= bytes,
            Action::Use(_) => {}
        }
        if live == trace.peak_requested() {
            return number;
        }
    }
    trace.events.len()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Not allocated (yet, any more, or at all).
    Absent,
    Live(u64),
}

struct Runner<'a> {
    trace: &'a Trace,
    opened: Opened,
    blocks: Vec<State>,
    stalls: Vec<u64>,
    longest: Option<Longest>,
    machine: Vec<u64>,
    /// Machine times of allocations without a stall.
    hot: Vec<u64>,
    wall: Duration,
    requested: u64,
    bucket: Sample,
    samples: Vec<Sample>,
}

/// Runs all of `trace`. One thread; blocks until done.
pub(crate) fn run(trace: &Trace, opened: Opened) -> Run {
    let allocations = trace.blocks.len();
    let mut runner = Runner {
        trace,
        opened,
        blocks: vec![State::Absent; allocations],
        stalls: Vec::with_capacity(allocations),
        longest: None,
        machine: Vec::with_capacity(allocations),
        hot: Vec::new(),
        wall: Duration::ZERO,
        requested: 0,
        bucket: Sample::default(),
        samples: Vec::new(),
    };
    let peak = peak_event(trace);
    let stride = trace.events.len().div_ceil(SAMPLES).max(1);
    let (mut refused, mut first_refused, mut failure) = (0, None, None);
    let (mut at_peak, mut at_refusal) = (None, None);
    for number in 0..trace.events.len() {
        match runner.event(number) {
            Ok(()) => {}
            Err(SubjectError::OutOfMemory(_)) => {
                refused += 1;
                if first_refused.is_none() {
                    first_refused = Some(number);
                    at_refusal = Some(runner.picture());
                }
                if refused == REFUSED_MAX {
                    break;
                }
            }
            Err(SubjectError::Other(why)) => {
                failure = Some(format!("event {number}: {why}"));
                break;
            }
        }
        if number == peak {
            at_peak = Some(runner.picture());
        }
        // The first one too: a curve begins where the trace does.
        if number == 0 || number % stride == stride - 1 || number + 1 == trace.events.len() {
            runner.sample(trace.events[number].time_us);
        }
    }
    let Runner { mut opened, longest, mut stalls, mut machine, mut hot, wall, samples, .. } = runner;
    let figures = opened.subject.figures();
    if let Err(error) = opened.subject.finish() {
        failure.get_or_insert(error.to_string());
    }
    let teardown = opened.subject.figures().driver_nanos.saturating_sub(figures.driver_nanos);
    Run {
        figures,
        teardown: Duration::from_nanos(teardown),
        refused,
        first_refused,
        failure,
        stall_us: Quantiles::of(&mut stalls, 1e3),
        longest,
        machine_ns: Quantiles::of(&mut machine, 1.0),
        hot_path_ns: (!hot.is_empty()).then(|| Quantiles::of(&mut hot, 1.0).p50),
        wall,
        samples,
        at_peak,
        at_refusal,
    }
}

impl Runner<'_> {
    fn event(&mut self, number: usize) -> Result<(), SubjectError> {
        let event = self.trace.events[number];
        let block = event.block as usize;
        if let Some(clock) = &self.opened.clock {
            clock.advance_to(Duration::from_micros(event.time_us));
        }
        let bytes = self.trace.blocks[block].bytes;
        match (event.action, self.blocks[block]) {
            (Action::Alloc, _) => {
                let address = self.alloc(number, bytes, self.trace.stream_of(event.block))?;
                self.blocks[block] = State::Live(address);
                self.requested += bytes;
            }
            // Of a block that was refused.
            (_, State::Absent) => return Ok(()),
            (Action::Free, State::Live(address)) => {
                self.blocks[block] = State::Absent;
                self.requested -= bytes;
                let start = Instant::now();
                let done = self.opened.subject.free(address);
                self.wall += start.elapsed();
                done?;
            }
            (Action::Use(stream), State::Live(address)) => {
                self.opened.subject.record_use(address, self.trace.streams[stream as usize])?;
            }
        }
        self.look();
        Ok(())
    }

    fn alloc(&mut self, number: usize, bytes: u64, stream: u64) -> Result<u64, SubjectError> {
        let now = |opened: &Opened| opened.clock.as_ref().map_or(Duration::ZERO, |clock| clock.now());
        let (before, time) = (self.opened.subject.gauge(), now(&self.opened));
        let start = Instant::now();
        let done = self.opened.subject.alloc(bytes, stream);
        let took = start.elapsed();
        let after = self.opened.subject.gauge();
        let waited_ns = nanos(now(&self.opened).saturating_sub(time));
        let driver_ns = after.driver_nanos.saturating_sub(before.driver_nanos);
        let stall = waited_ns + driver_ns;
        if self.longest.is_none_or(|longest| longest.waited_ns + longest.driver_ns < stall) {
            let grown_bytes = after.reserved.saturating_sub(before.reserved);
            self.longest =
                Some(Longest { event: number as u64, requested_bytes: bytes, grown_bytes, waited_ns, driver_ns });
        }
        self.wall += took;
        self.stalls.push(stall);
        self.machine.push(nanos(took));
        if stall == 0 && done.is_ok() {
            self.hot.push(nanos(took));
        }
        done
    }

    /// Keeps the most of each quantity for the next sample.
    fn look(&mut self) {
        let gauge = self.opened.subject.gauge();
        self.bucket.requested = self.bucket.requested.max(self.requested);
        self.bucket.allocated = self.bucket.allocated.max(gauge.allocated);
        self.bucket.reserved = self.bucket.reserved.max(gauge.reserved);
    }

    fn sample(&mut self, time_us: u64) {
        self.look();
        self.samples.push(Sample { time_us, ..std::mem::take(&mut self.bucket) });
    }

    fn picture(&self) -> Picture {
        let live = self.blocks.iter().zip(&self.trace.blocks).filter_map(|(state, block)| match state {
            State::Live(address) => Some((*address, block.bytes)),
            State::Absent => None,
        });
        let mut live: Vec<(u64, u64)> = live.collect();
        live.sort_unstable();
        Picture::new(&self.opened.subject.ranges(), &live)
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
