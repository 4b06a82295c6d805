//! What is measured: an allocator behind two calls, and patterns of pairs of them.

use crate::tree::Tree;
use std::time::{Duration, Instant};
use xseg::units::{MIB, UNIT};
use xseg::{Heap, StreamId};

/// An allocator under measurement.
pub(crate) trait Subject: Sync {
    fn alloc(&self, bytes: u64, stream: u64) -> u64;
    fn free(&self, address: u64);
    /// Bytes of its own tables, where it counts them.
    fn metadata(&self) -> Option<u64> {
        None
    }
}

impl Subject for Heap {
    fn alloc(&self, bytes: u64, stream: u64) -> u64 {
        self.alloc_raw(bytes, StreamId(stream)).expect("a heap without a limit")
    }
    fn free(&self, address: u64) {
        self.free_raw(address).expect("a live block");
    }
    fn metadata(&self) -> Option<u64> {
        Some(self.stats().metadata_bytes)
    }
}

impl Subject for Tree {
    fn alloc(&self, bytes: u64, stream: u64) -> u64 {
        Tree::alloc(self, bytes, stream)
    }
    fn free(&self, address: u64) {
        Tree::free(self, address);
    }
}

/// Numbers that look random, the same in every run.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 32
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        (self.next() * end) >> 32
    }

    /// A size of 512 B to 1 MiB, each power of two as often as the others.
    pub(crate) fn size(&mut self) -> u64 {
        let units = (MIB / UNIT) as f64;
        let exponent = self.next() as f64 / 2_f64.powi(32);
        units.powf(exponent) as u64 * UNIT
    }
}

/// The same size again and again.
pub(crate) fn repeated(subject: &impl Subject, bytes: u64, stream: u64, pairs: u64) -> Duration {
    let start = Instant::now();
    for _ in 0..pairs {
        subject.free(subject.alloc(bytes, stream));
    }
    start.elapsed()
}

/// Live blocks in the background, and pairs among them.
pub(crate) struct Population<'a, S> {
    subject: &'a S,
    live: Vec<u64>,
    sizes: Vec<u64>,
    picks: Vec<u32>,
    at: usize,
}

/// Sizes and picks are worked out before the clock runs, and used by turns.
const TURNS: usize = 1 << 16;
/// Blocks that one step allocates and then frees in reverse.
pub(crate) const STEP: usize = 64;

impl<'a, S: Subject> Population<'a, S> {
    /// `count` live blocks on stream 0, as long churn leaves them.
    pub(crate) fn new(subject: &'a S, count: usize) -> Self {
        let mut random = Random(count as u64);
        let live = (0..count).map(|_| subject.alloc(random.size(), 0)).collect();
        let sizes = (0..TURNS).map(|_| random.size()).collect();
        let picks = (0..TURNS).map(|_| random.below(count as u64) as u32).collect();
        let mut population = Self { subject, live, sizes, picks, at: 0 };
        population.churn(count as u64 / 2);
        population
    }

    /// Frees a block at random and allocates one of a random size.
    pub(crate) fn churn(&mut self, pairs: u64) -> Duration {
        let start = Instant::now();
        for _ in 0..pairs {
            self.at = (self.at + 1) % TURNS;
            let place = &mut self.live[self.picks[self.at] as usize];
            self.subject.free(*place);
            // Another turn for the size, so that a place does not always get the same.
            *place = self.subject.alloc(self.sizes[(self.at * 7 + place.count_ones() as usize) % TURNS], 0);
        }
        start.elapsed()
    }

    /// Steps: the same blocks each time, freed in reverse. `pairs` in whole steps.
    pub(crate) fn steps(&mut self, pairs: u64) -> Duration {
        let mut held = [0; STEP];
        let start = Instant::now();
        for _ in 0..pairs / STEP as u64 {
            for (place, bytes) in held.iter_mut().zip(&self.sizes) {
                *place = self.subject.alloc(*bytes, 0);
            }
            held.iter().rev().for_each(|address| self.subject.free(*address));
        }
        start.elapsed()
    }

    /// The last block freed is the next one allocated.
    pub(crate) fn last_in_first_out(&mut self, pairs: u64) -> Duration {
        repeated(self.subject, 64 << 10, 0, pairs)
    }
}

impl<S> Drop for Population<'_, S> {
    fn drop(&mut self) {
        // The subject goes with everything in it: freeing a million blocks one by one takes longer.
        self.live.clear();
    }
}

/// `threads` threads at once, on a stream each or all on stream 0: time for `pairs` pairs of each.
pub(crate) fn threads(subject: &impl Subject, threads: u64, shared: bool, pairs: u64) -> Duration {
    let start = Instant::now();
    std::thread::scope(|scope| {
        for number in 0..threads {
            scope.spawn(move || {
                let stream = if shared { 0 } else { number };
                for _ in 0..pairs {
                    subject.free(subject.alloc(64 << 10, stream));
                }
            });
        }
    });
    start.elapsed()
}
