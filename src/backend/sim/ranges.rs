//! Ranges of addresses: which are accessible, and until when which are in use.

use std::collections::BTreeMap;

/// A set of addresses as runs that never touch. All operations are logarithmic in the runs.
#[derive(Debug, Default)]
pub(super) struct Runs(BTreeMap<u64, u64>);

impl Runs {
    /// Adds a range that may overlap nothing in the set, or only whole runs.
    pub(super) fn add(&mut self, mut start: u64, mut end: u64) {
        while let Some((&at, &stop)) = self.0.range(..=end).next_back().filter(|(_, stop)| **stop >= start) {
            self.0.remove(&at);
            start = start.min(at);
            end = end.max(stop);
        }
        self.0.insert(start, end);
    }

    /// Takes a range out.
    pub(super) fn remove(&mut self, start: u64, end: u64) {
        while let Some((&at, &stop)) = self.0.range(..end).next_back().filter(|(_, stop)| **stop > start) {
            self.0.remove(&at);
            if at < start {
                self.0.insert(at, start);
            }
            if stop > end {
                self.0.insert(end, stop);
            }
        }
    }

    /// Is every address of the range in the set?
    pub(super) fn covers(&self, start: u64, end: u64) -> bool {
        start >= end || self.0.range(..=start).next_back().is_some_and(|(_, stop)| *stop >= end)
    }
}

/// When the last queued use of each address ends, in nanoseconds.
///
/// Ranges do not overlap; one that is used again is replaced, so each call makes at most two more.
#[derive(Debug, Default)]
pub(super) struct Uses {
    /// Start → end, until.
    ranges: BTreeMap<u64, (u64, u64)>,
    /// Size at which what has passed is dropped.
    sweep_at: usize,
}

impl Uses {
    /// Notes a use until `until`; later uses of the same addresses stay.
    pub(super) fn add(&mut self, start: u64, end: u64, until: u64, now: u64) {
        if start >= end || until <= now {
            return;
        }
        if self.ranges.len() >= self.sweep_at {
            self.ranges.retain(|_, (_, at)| *at > now);
            self.sweep_at = 2 * self.ranges.len() + 64;
        }
        let over: Vec<(u64, u64, u64)> = self
            .ranges
            .range(..end)
            .rev()
            .map(|(&at, &(stop, then))| (at, stop, then))
            .take_while(|(_, stop, _)| *stop > start)
            .collect();
        // What is new on the left of the pieces that stay later, from the right end on.
        let mut right = end;
        for (at, stop, then) in over {
            if then > until {
                if stop < right {
                    self.ranges.insert(stop, (right, until));
                }
                right = at.min(right);
                continue;
            }
            self.ranges.remove(&at);
            if at < start {
                self.ranges.insert(at, (start, then));
            }
            if stop > end {
                self.ranges.insert(end, (stop, then));
            }
        }
        if start < right {
            self.ranges.insert(start, (right, until));
        }
    }

    /// End of the last use in the range that has not passed by `now`.
    pub(super) fn last_use(&self, start: u64, end: u64, now: u64) -> Option<u64> {
        let over = self.ranges.range(..end).rev().take_while(|(_, (stop, _))| *stop > start);
        over.map(|(_, (_, until))| *until).max().filter(|until| *until > now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_join_and_split() {
        let mut runs = Runs::default();
        runs.add(0, 10);
        runs.add(20, 30);
        assert!(!runs.covers(0, 30));
        runs.add(10, 20);
        assert!(runs.covers(0, 30) && !runs.covers(0, 31));
        runs.remove(5, 6);
        assert!(runs.covers(0, 5) && runs.covers(6, 30) && !runs.covers(4, 7));
    }

    #[test]
    fn uses_agree_with_an_array() {
        // Every address on its own is the plain model that the ranges must agree with.
        let (mut uses, mut model) = (Uses::default(), [0u64; 64]);
        let mut seed = 7u64;
        let mut next = |n: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % n
        };
        for now in 0..4000 {
            let (start, until) = (next(60), now + next(40));
            let end = start + 1 + next(64 - start);
            uses.add(start, end, until, now);
            model[start as usize..end as usize].iter_mut().for_each(|at| *at = (*at).max(until));
            let (from, to) = (next(32), 33 + next(31));
            let want = model[from as usize..to as usize].iter().copied().max().filter(|at| *at > now);
            assert_eq!(uses.last_use(from, to, now), want);
            assert!(uses.ranges.len() <= 64);
        }
    }
}
