//! The device's side of a verified replay: stamps written and checked in device time.
//!
//! A block is stamped by work that is queued when it is allocated, on its stream, and checked by work that
//! is queued when it is freed, on its stream and on each stream that it was used on. Work is done
//! in order of its stream, at the latest one lag after it was queued, which is when an event recorded with it
//! completes. Where a run has several streams, each is by turns slow (done at the last moment) and
//! fast (done at once), so that memory which changes stream too early is overwritten before it is checked.
//! A run with one stream is always slow: memory that is unmapped or moved too early is gone when it is used.
#![forbid(unsafe_code)]

use super::stamp::{Piece, Stamped, mix};
use crate::backend::timeline::Timeline;
use parking_lot::Mutex;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// An access that did not happen.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("no access to {address:#x}: {reason}")]
pub struct AccessFault {
    /// First address that could not be reached.
    pub address: u64,
    /// Why.
    pub reason: String,
}

crate::error::debug_is_the_sentence!(AccessFault);

/// Device memory by address, where an unmapped address is an error and no crash. Any thread may call.
pub trait MemoryAccess: Send + Sync {
    /// Writes all pieces, in order.
    ///
    /// # Errors
    /// A piece is not mapped; pieces before it may have been written.
    fn write(&self, pieces: &[Piece]) -> Result<(), AccessFault>;

    /// Fills all pieces.
    ///
    /// # Errors
    /// A piece is not mapped; pieces before it may have been filled.
    fn read(&self, pieces: &mut [Piece]) -> Result<(), AccessFault>;
}

/// The device's side of a verified replay: work that is queued when the replay allocates and frees. Streams are
/// the trace's.
pub trait Verifier: fmt::Debug {
    /// Queues the stamping of a block on its stream. `id` names the block's life, never used before.
    fn stamp(&self, id: u32, address: u64, bytes: u64, stream: u64);

    /// Queues the check of a block on a stream.
    fn check(&self, id: u32, address: u64, bytes: u64, stream: u64);

    /// Later work of `stream` comes after all work queued so far on `other`: the program made it wait.
    fn order_after(&self, stream: u64, other: u64);

    /// Called before and after each event of the replay.
    fn run_due(&self);

    /// Does all work: the device is waited for.
    fn run_all(&self);

    /// What was found so far.
    fn findings(&self) -> Findings;
}

/// What a verification found.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Findings {
    /// Stamps read and compared.
    pub stamps_checked: u64,
    /// Stamps that were not what was written, and stamps that could not be written or read.
    pub mismatches: u64,
    /// The first few mismatches, in words.
    pub examples: Vec<String>,
}

/// Mismatches that are put in words.
const EXAMPLES: usize = 5;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Work {
    Stamp,
    Check,
}

/// Work in the order in which it is done.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Queued {
    due: Duration,
    number: u64,
    work: Work,
    id: u32,
    address: u64,
    bytes: u64,
}

#[derive(Debug, Default)]
struct State {
    queue: BinaryHeap<Reverse<Queued>>,
    /// When the last work queued on a stream is done.
    busy: HashMap<u64, Duration>,
    queued: u64,
    findings: Findings,
}

/// See the module's text. Shared by the replay, which queues, and the backend, whose waits move the clock.
#[derive(Clone)]
pub struct Device {
    clock: Timeline,
    lag: Duration,
    one_stream: bool,
    memory: Arc<dyn MemoryAccess>,
    state: Arc<Mutex<State>>,
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("lag", &self.lag).field("state", &self.state).finish_non_exhaustive()
    }
}

impl Device {
    /// A device whose work reaches `memory` and is done by `clock`, one lag of it after it was queued.
    /// `one_stream`: the run has no other.
    #[must_use]
    pub fn new(clock: &Timeline, memory: Arc<dyn MemoryAccess>, one_stream: bool) -> Self {
        Self { clock: clock.clone(), lag: clock.lag(), one_stream, memory, state: Arc::default() }
    }

    /// Later work of `stream` comes after all events recorded so far: the allocator made it wait.
    pub fn hold(&self, stream: u64) {
        let end = self.clock.now() + self.lag;
        let mut state = self.state.lock();
        let busy = state.busy.entry(stream).or_default();
        *busy = end.max(*busy);
    }

    /// Does the work that is due. To be called whenever the clock has moved.
    pub fn run_due(&self) {
        self.run_until(self.clock.now());
    }

    fn queue(&self, work: Work, block: Stamped, stream: u64) {
        let now = self.clock.now();
        let mut state = self.state.lock();
        let state = &mut *state;
        let earliest = if self.is_slow(stream, now) { now + self.lag } else { now };
        let busy = state.busy.entry(stream).or_default();
        *busy = earliest.max(*busy);
        state.queued += 1;
        let Stamped { id, address, bytes } = block;
        state.queue.push(Reverse(Queued { due: *busy, number: state.queued, work, id, address, bytes }));
        self.run(state, now);
    }

    /// Streams change pace every four lags, each by its own hash.
    fn is_slow(&self, stream: u64, now: Duration) -> bool {
        let turn = now.as_nanos() / (4 * self.lag.as_nanos()).max(1);
        self.one_stream || mix(mix(stream ^ 0x5bd1) ^ turn as u64) & 1 == 0
    }

    fn run_until(&self, time: Duration) {
        self.run(&mut self.state.lock(), time);
    }

    fn run(&self, state: &mut State, time: Duration) {
        while state.queue.peek().is_some_and(|Reverse(next)| next.due <= time) {
            let Some(Reverse(next)) = state.queue.pop() else { return };
            let block = Stamped { id: next.id, address: next.address, bytes: next.bytes };
            match next.work {
                Work::Stamp => self.write(&mut state.findings, block),
                Work::Check => self.compare(&mut state.findings, block),
            }
        }
    }

    fn write(&self, findings: &mut Findings, block: Stamped) {
        let pieces: Vec<Piece> = block.pieces().collect();
        if self.memory.write(&pieces).is_ok() {
            return;
        }
        // One bad piece must not hide the others.
        for piece in pieces {
            if let Err(fault) = self.memory.write(&[piece]) {
                findings.mismatch(block, piece.address, || format!("cannot be stamped: {}", fault.reason));
            }
        }
    }

    fn compare(&self, findings: &mut Findings, block: Stamped) {
        let expected: Vec<Piece> = block.pieces().collect();
        let blank = |piece: &Piece| Piece { bytes: [0; super::stamp::STAMP], ..*piece };
        let mut found: Vec<Piece> = expected.iter().map(blank).collect();
        findings.stamps_checked += expected.len() as u64;
        let whole = self.memory.read(&mut found).is_ok();
        for (expected, found) in expected.iter().zip(&mut found) {
            if !whole {
                *found = blank(expected);
                if let Err(fault) = self.memory.read(std::slice::from_mut(found)) {
                    findings.mismatch(block, expected.address, || format!("cannot be read: {}", fault.reason));
                    continue;
                }
            }
            if expected.bytes() != found.bytes() {
                findings.mismatch(block, expected.address, || match found.bytes().iter().all(|byte| *byte == 0) {
                    true => "holds zeros".to_owned(),
                    false => "holds something else".to_owned(),
                });
            }
        }
    }
}

impl Verifier for Device {
    fn stamp(&self, id: u32, address: u64, bytes: u64, stream: u64) {
        self.queue(Work::Stamp, Stamped { id, address, bytes }, stream);
    }

    fn check(&self, id: u32, address: u64, bytes: u64, stream: u64) {
        self.queue(Work::Check, Stamped { id, address, bytes }, stream);
    }

    fn order_after(&self, stream: u64, other: u64) {
        let mut state = self.state.lock();
        let end = state.busy.get(&other).copied().unwrap_or_default();
        let busy = state.busy.entry(stream).or_default();
        *busy = end.max(*busy);
    }

    fn run_due(&self) {
        Device::run_due(self);
    }

    fn run_all(&self) {
        self.run_until(Duration::MAX);
    }

    fn findings(&self) -> Findings {
        self.state.lock().findings.clone()
    }
}

impl Findings {
    /// Counts mismatches, with one example for all of them.
    #[cfg(feature = "cuda")]
    pub(super) fn found(&mut self, count: u64, example: String) {
        self.mismatches += count;
        if self.examples.len() < EXAMPLES {
            self.examples.push(example);
        }
    }

    /// Counts a mismatch of a block; the first few are put in words.
    pub(super) fn mismatch(&mut self, block: Stamped, address: u64, what: impl FnOnce() -> String) {
        self.mismatches += 1;
        if self.examples.len() < EXAMPLES {
            let (id, offset) = (block.id, address - block.address);
            self.examples.push(format!(
                "block {id} at {:#x} of {} bytes: offset {offset} {}",
                block.address,
                block.bytes,
                what()
            ));
        }
    }
}
