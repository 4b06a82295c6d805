//! Where handles begin and end, readable without the driver lock.
//!
//! The hot path asks how many handles a cut would open; the page table that knows is behind the driver
//! lock. A bit says that a handle begins or ends before that granule. Bits are only meaningful beside
//! memory that is mapped: whoever holds the segment's lock of such a granule sees the bits of its handle,
//! since they were written before that memory was given to the segment.
#![forbid(unsafe_code)]

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Granules that unit numbers of 32 bits can name.
const GRANULES: usize = 1 << 20;

/// See the module's text. Zeroed memory, touched where handles are.
pub(crate) struct Edges(Box<[AtomicU64]>);

impl Default for Edges {
    fn default() -> Self {
        Self((0..GRANULES / 64).map(|_| AtomicU64::new(0)).collect())
    }
}

impl fmt::Debug for Edges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Edges").finish_non_exhaustive()
    }
}

impl Edges {
    /// Notes that one handle lies behind these granules. Callers hold the driver lock.
    pub(crate) fn set_handle(&self, range: Range<u32>) {
        for edge in [range.start, range.end] {
            if let Some(word) = self.0.get(edge as usize / 64) {
                word.fetch_or(1 << (edge % 64), Relaxed);
            }
        }
        let mut at = range.start + 1;
        while at < range.end {
            let stop = (at / 64 * 64 + 64).min(range.end);
            if let Some(word) = self.0.get(at as usize / 64) {
                word.fetch_and(!ones(at % 64, stop - at), Relaxed);
            }
            at = stop;
        }
    }

    /// First granule of the handle behind a mapped granule.
    pub(crate) fn start(&self, granule: u32) -> u32 {
        let mut index = granule as usize / 64;
        let mut word = self.word(index) & ones(0, granule % 64 + 1);
        while word == 0 {
            if index == 0 {
                return 0;
            }
            index -= 1;
            word = self.word(index);
        }
        index as u32 * 64 + word.ilog2()
    }

    /// First granule after the handle behind a mapped granule.
    pub(crate) fn end(&self, granule: u32) -> u32 {
        let from = granule + 1;
        let mut index = from as usize / 64;
        let mut word = self.word(index) & (u64::MAX << (from % 64));
        while word == 0 {
            index += 1;
            if index >= self.0.len() {
                return GRANULES as u32;
            }
            word = self.word(index);
        }
        index as u32 * 64 + word.trailing_zeros()
    }

    fn word(&self, index: usize) -> u64 {
        self.0.get(index).map_or(0, |word| word.load(Relaxed))
    }
}

/// `count` ones from bit `from`; `from + count` is at most 64.
const fn ones(from: u32, count: u32) -> u64 {
    if count == 0 { 0 } else { (u64::MAX >> (64 - count)) << from }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edges_agree_with_a_plain_list_of_handles() {
        let edges = Edges::default();
        let mut owner = vec![0u32; 1000];
        let mut seed = 5u64;
        for id in 1..4000u32 {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let start = (seed >> 40) as u32 % 900;
            let range = start..start + 1 + (seed >> 20) as u32 % 90;
            // Whole handles go before a new one takes their place.
            for granule in range.clone() {
                let gone = owner[granule as usize];
                if gone != 0 {
                    owner.iter_mut().filter(|o| **o == gone).for_each(|o| *o = 0);
                }
            }
            owner[range.start as usize..range.end as usize].fill(id);
            edges.set_handle(range);
            for granule in (0..1000u32).filter(|g| owner[*g as usize] != 0) {
                let mine = owner[granule as usize];
                let first = owner.iter().position(|o| *o == mine).unwrap() as u32;
                let end = owner.iter().rposition(|o| *o == mine).unwrap() as u32 + 1;
                assert_eq!((edges.start(granule), edges.end(granule)), (first, end));
            }
        }
    }
}
