//! Replaying a trace against an allocator.
//!
//! Each event moves the clock to its time, calls the allocator, and, in a verified replay, queues work on
//! the [`Device`]. A replay ends with its last event or with the first allocation that fails.
#![deny(unsafe_code)]

mod access;
mod device;
#[cfg(feature = "cuda")]
pub(crate) mod gpu;
pub mod least;
mod report;
mod stamp;
mod subject;
#[cfg(test)]
mod tests;

pub use device::{AccessFault, Device, Findings, MemoryAccess, Verifier};
pub use report::Report;
pub use stamp::{Piece, STAMP};
pub use subject::{Backing, DriverCalls, Figures, Gauge, MappedRange, Subject, SubjectError};

use crate::backend::timeline::Timeline;
use crate::trace::{Action, Trace};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Events between two calls of [`Options::progress`].
const PROGRESS_EVERY: usize = 1 << 14;

/// What a replay runs with besides the allocator.
#[derive(Default)]
pub struct Options<'a> {
    /// The clock of the allocator's backend, if it is virtual.
    pub clock: Option<Timeline>,
    /// The device that stamps and checks, in a verified replay. A [`Device`]'s clock is `clock`.
    pub device: Option<Arc<dyn Verifier>>,
    /// Called now and then with the number of events done.
    pub progress: Option<&'a mut dyn FnMut(usize)>,
}

impl std::fmt::Debug for Options<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Options").field("clock", &self.clock).field("device", &self.device).finish_non_exhaustive()
    }
}

/// How a replay went.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Outcome {
    /// Events that were run, the failed one not counted.
    pub events_run: usize,
    /// Why it ended early, if it did.
    pub stopped: Option<SubjectError>,
    /// The allocator's figures after the last event.
    pub figures: Figures,
    /// Free bytes in handles that live blocks hold, when the allocator last refused a request, where it knows.
    pub locked: Option<u64>,
    /// Driver time of giving everything back.
    pub teardown: Duration,
    /// Why giving everything back failed, if it did.
    pub teardown_error: Option<SubjectError>,
    /// Time from the first to the last event on the machine's clock.
    pub wall: Duration,
    /// In a verified replay.
    pub findings: Option<Findings>,
}

impl Outcome {
    /// Were all events run?
    #[must_use]
    pub fn completed(&self) -> bool {
        self.stopped.is_none()
    }

    /// Allocations that failed for lack of memory (0 or 1: it ends the replay).
    #[must_use]
    pub fn ooms(&self) -> u64 {
        u64::from(matches!(self.stopped, Some(SubjectError::OutOfMemory(_))))
    }
}

/// Replays `trace` against `subject`, then has it give everything back. One thread; blocks until done.
pub fn replay(trace: &Trace, subject: &mut dyn Subject, options: &mut Options<'_>) -> Outcome {
    let mut addresses = vec![0u64; trace.blocks.len()];
    let start = Instant::now();
    let (events_run, stopped) = match options.device.clone() {
        Some(device) => run_verified(trace, subject, options, &mut addresses, &*device),
        None => run(trace, subject, options, &mut addresses),
    };
    let wall = start.elapsed();
    let (figures, locked) = (subject.figures(), subject.locked());
    let findings = options.device.as_ref().map(|device| {
        device.run_all();
        device.findings()
    });
    let teardown_error = subject.finish().err();
    let teardown = subject.figures().driver_nanos.saturating_sub(figures.driver_nanos);
    let teardown = Duration::from_nanos(teardown);
    Outcome { events_run, stopped, figures, locked, teardown, teardown_error, wall, findings }
}

/// Runs the events; how many, and what ended them early.
fn run(
    trace: &Trace,
    subject: &mut dyn Subject,
    options: &mut Options<'_>,
    addresses: &mut [u64],
) -> (usize, Option<SubjectError>) {
    let mut time = 0;
    for (number, event) in trace.events.iter().enumerate() {
        if event.time_us != time {
            time = event.time_us;
            move_clock(options, time);
        }
        report_progress(options, number);
        let block = event.block as usize;
        let done = match event.action {
            Action::Alloc => {
                let allocated = subject.alloc(trace.blocks[block].bytes, trace.stream_of(event.block));
                allocated.map(|address| addresses[block] = address)
            }
            Action::Free => subject.free(addresses[block]),
            Action::Use(stream) => subject.record_use(addresses[block], trace.streams[stream as usize]),
        };
        if let Err(error) = done {
            return (number, Some(error));
        }
    }
    (trace.events.len(), None)
}

/// As [`run`], with stamps. What lives at the end is checked as if it were freed then.
fn run_verified(
    trace: &Trace,
    subject: &mut dyn Subject,
    options: &mut Options<'_>,
    addresses: &mut [u64],
    device: &dyn Verifier,
) -> (usize, Option<SubjectError>) {
    let mut users: Vec<Vec<u32>> = vec![Vec::new(); trace.blocks.len()];
    let mut live = vec![false; trace.blocks.len()];
    let mut result = (trace.events.len(), None);
    for (number, event) in trace.events.iter().enumerate() {
        move_clock(options, event.time_us);
        device.run_due();
        report_progress(options, number);
        let (id, block) = (event.block, event.block as usize);
        let (bytes, own) = (trace.blocks[block].bytes, trace.stream_of(id));
        let done = match event.action {
            Action::Alloc => subject.alloc(bytes, own).map(|address| {
                addresses[block] = address;
                live[block] = true;
                device.stamp(id, address, bytes, own);
            }),
            Action::Free => {
                live[block] = false;
                device.check(id, addresses[block], bytes, own);
                for user in std::mem::take(&mut users[block]) {
                    device.check(id, addresses[block], bytes, trace.streams[user as usize]);
                }
                subject.free(addresses[block])
            }
            Action::Use(stream) => {
                let user = trace.streams[stream as usize];
                // A program that uses a block elsewhere has made that stream wait for the block's own.
                device.order_after(user, own);
                if user != own && !users[block].contains(&stream) {
                    users[block].push(stream);
                }
                subject.record_use(addresses[block], user)
            }
        };
        // The call may have waited, which moves the clock.
        device.run_due();
        if let Err(error) = done {
            result = (number, Some(error));
            break;
        }
    }
    for (block, _) in live.iter().enumerate().filter(|(_, live)| **live) {
        device.check(block as u32, addresses[block], trace.blocks[block].bytes, trace.stream_of(block as u32));
    }
    result
}

fn move_clock(options: &Options<'_>, time_us: u64) {
    if let Some(clock) = &options.clock {
        clock.advance_to(Duration::from_micros(time_us));
    }
}

fn report_progress(options: &mut Options<'_>, number: usize) {
    if number.is_multiple_of(PROGRESS_EVERY)
        && let Some(progress) = &mut options.progress
    {
        progress(number);
    }
}
