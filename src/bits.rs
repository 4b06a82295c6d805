//! `PageSet`: a set of granules as a bitmap, with scans that work a word at a time.
//!
//! Single bits and ranges go through `bitvec`; the scans read the raw words, since
//! `BitSlice::iter_ones` is eight to ten times slower (design.md, section "Costs").
#![forbid(unsafe_code)]

use bitvec::prelude::{BitVec, Lsb0};
use std::ops::Range;

/// A growable set of granule indices.
#[derive(Debug, Clone, Default)]
pub(crate) struct PageSet {
    bits: BitVec<u64, Lsb0>,
}

impl PageSet {
    /// Makes room for indices below `len`; new ones are absent. The length is a multiple of 64.
    pub(crate) fn grow(&mut self, len: u32) {
        let len = (len as usize).next_multiple_of(64);
        if len > self.bits.len() {
            self.bits.resize(len, false);
        }
    }

    /// Is `index` in the set?
    pub(crate) fn contains(&self, index: u32) -> bool {
        self.bits.get(index as usize).is_some_and(|bit| *bit)
    }

    /// Puts every index of `range` in (`true`) or out (`false`).
    pub(crate) fn set(&mut self, range: Range<u32>, value: bool) {
        if value {
            self.grow(range.end);
        }
        let end = (range.end as usize).min(self.bits.len());
        let start = (range.start as usize).min(end);
        self.bits[start..end].fill(value);
    }

    /// Number of indices of `range` that are in the set.
    pub(crate) fn count(&self, range: Range<u32>) -> u32 {
        let end = (range.end as usize).min(self.bits.len());
        let start = (range.start as usize).min(end);
        self.bits[start..end].count_ones() as u32
    }

    /// Is any index of `range` in the set?
    pub(crate) fn any(&self, range: Range<u32>) -> bool {
        self.next(range.start).is_some_and(|index| index < range.end)
    }

    /// First index at or after `from` that is in the set.
    pub(crate) fn next(&self, from: u32) -> Option<u32> {
        let words = self.bits.as_raw_slice();
        let mut index = from as usize / 64;
        let mut word = *words.get(index)? & (u64::MAX << (from % 64));
        while word == 0 {
            index += 1;
            word = *words.get(index)?;
        }
        Some((index * 64) as u32 + word.trailing_zeros())
    }

    /// Indices of the set in ascending order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        let mut from = 0;
        std::iter::from_fn(move || {
            let index = self.next(from)?;
            from = index + 1;
            Some(index)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_and_scans() {
        let mut set = PageSet::default();
        set.set(3..5, true);
        set.set(200..201, true);
        assert_eq!(set.iter().collect::<Vec<_>>(), [3, 4, 200]);
        assert_eq!(set.count(0..1000), 3);
        assert!(set.any(4..5) && !set.any(5..200));
        set.set(0..1000, false);
        assert_eq!(set.next(0), None);
        assert!(!set.contains(5000));
    }

    #[test]
    fn agrees_with_a_plain_set() {
        let mut set = PageSet::default();
        let mut plain = std::collections::BTreeSet::new();
        let mut seed = 7u64;
        for _ in 0..2000 {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let start = (seed >> 33) as u32 % 700;
            let end = start + (seed >> 50) as u32 % 80;
            let value = seed & (1 << 20) != 0;
            set.set(start..end, value);
            for index in start..end {
                if value {
                    plain.insert(index)
                } else {
                    plain.remove(&index)
                };
            }
        }
        assert!(set.iter().eq(plain.iter().copied()));
        assert_eq!(set.count(100..300) as usize, plain.range(100..300).count());
    }
}
