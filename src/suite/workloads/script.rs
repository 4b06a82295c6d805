//! Writing a trace by calls, with a clock and a seeded source of chance.

use crate::trace::Trace;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use std::fmt::Write;

/// Trace time between two events, in microseconds: what a framework needs for an operator or so.
const STEP_US: u64 = 10;

/// A block of a [`Script`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Id(u32);

/// A trace in the making, in the text form that all traces are read from.
#[derive(Debug)]
pub(super) struct Script {
    text: String,
    next: u32,
    time_us: u64,
    /// Chance. `ChaCha8` gives the same numbers on every machine.
    pub(super) rng: ChaCha8Rng,
}

impl Script {
    pub(super) fn new(seed: u64) -> Self {
        Self { text: String::new(), next: 0, time_us: 0, rng: ChaCha8Rng::seed_from_u64(seed) }
    }

    fn line(&mut self, arguments: std::fmt::Arguments<'_>) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.text, "{arguments},{}", self.time_us);
        self.time_us += STEP_US;
    }

    /// Allocates `bytes` on `stream`.
    pub(super) fn alloc(&mut self, bytes: u64, stream: u64) -> Id {
        let id = self.next;
        self.next += 1;
        self.line(format_args!("a,{id},{bytes},{stream}"));
        Id(id)
    }

    /// Allocates one block for each size.
    pub(super) fn alloc_all(&mut self, sizes: impl IntoIterator<Item = u64>, stream: u64) -> Vec<Id> {
        sizes.into_iter().map(|bytes| self.alloc(bytes, stream)).collect()
    }

    /// The client frees a block.
    pub(super) fn free(&mut self, id: Id) {
        self.line(format_args!("f,{}", id.0));
    }

    /// Frees blocks in this order.
    pub(super) fn free_all(&mut self, ids: impl IntoIterator<Item = Id>) {
        ids.into_iter().for_each(|id| self.free(id));
    }

    /// Work on another stream uses a block.
    pub(super) fn used(&mut self, id: Id, stream: u64) {
        self.line(format_args!("u,{},{stream}", id.0));
    }

    /// A block that is allocated and freed at once: an operator's workspace.
    pub(super) fn workspace(&mut self, bytes: u64, stream: u64) {
        let id = self.alloc(bytes, stream);
        self.free(id);
    }

    /// Lets time pass.
    pub(super) fn pause(&mut self, microseconds: u64) {
        self.time_us += microseconds;
    }

    /// The trace.
    ///
    /// # Errors
    /// What the reader of traces says: a generator that writes no valid trace is a defect.
    pub(super) fn build(self, name: &str) -> Result<Trace, String> {
        Trace::from_bytes(name, self.text.as_bytes()).map_err(|error| format!("the workload {name}: {error}"))
    }
}
