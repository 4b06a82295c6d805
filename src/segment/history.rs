//! What happened to a segment so far: frees, which are the clock of idle memory, and what blocks were given and gave back.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// An age that seems ahead of the clock by less than this is another thread's free that this one has not seen counted.
const AHEAD: u32 = 1 << 16;

/// What happened so far. Relaxed: nothing is ordered by it. Written in plain stores under the lock of a segment; the two
/// that share one may lose a count to each other, which makes memory look a little younger. On lines of its own, since
/// each small pool has one.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct History {
    /// Frees. Nodes keep the lower half of it: the age of idle memory.
    clock: AtomicU64,
    /// Units that blocks were given, and that blocks gave back.
    taken: AtomicU64,
    freed: AtomicU64,
}

impl History {
    /// Frees so far.
    pub(crate) fn now(&self) -> u64 {
        self.clock.load(Relaxed)
    }

    /// Counts a free; the age of what it freed.
    #[inline]
    pub(super) fn tick(&self) -> u32 {
        let now = self.clock.load(Relaxed).wrapping_add(1);
        self.clock.store(now, Relaxed);
        now as u32
    }

    /// When memory of this age was freed. For memory that has lain idle for 2^32 frees it is later than it was, which
    /// costs nothing but its turn among what is idle.
    pub(crate) fn freed_at(&self, age: u32) -> u64 {
        let now = self.now();
        match age.wrapping_sub(now as u32) {
            ahead @ ..AHEAD => now + u64::from(ahead),
            behind => now.saturating_sub(u64::from(behind.wrapping_neg())),
        }
    }

    /// Units given to blocks and given back by them.
    pub(crate) fn churn(&self) -> (u64, u64) {
        (self.taken.load(Relaxed), self.freed.load(Relaxed))
    }

    #[inline]
    pub(super) fn note_taken(&self, units: u32) {
        add(&self.taken, units);
    }

    #[inline]
    pub(super) fn note_freed(&self, units: u32) {
        add(&self.freed, units);
    }

    /// Sets the clock.
    #[cfg(test)]
    pub(crate) fn set_now(&self, frees: u64) {
        self.clock.store(frees, Relaxed);
    }
}

/// Adds without an atomic exchange: the caller holds the segment's lock.
#[inline]
fn add(counter: &AtomicU64, units: u32) {
    counter.store(counter.load(Relaxed) + u64::from(units), Relaxed);
}

/// The later of two ages, also where the lower half of the clock turned between them; right for ages of the same 2^31 frees.
#[inline]
pub(super) fn younger(a: u32, b: u32) -> u32 {
    if b.wrapping_sub(a).cast_signed() > 0 { b } else { a }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TURN: u64 = 1 << 32;

    #[test]
    fn ages_keep_their_order_where_the_clock_turns() {
        for turns in [1, 5] {
            let history = History::default();
            history.set_now(turns * TURN - 4);
            let ages: Vec<u32> = (0..8).map(|_| history.tick()).collect();
            assert_eq!((ages[2], ages[3], ages[7]), (u32::MAX, 0, 4));
            let freed: Vec<u64> = ages.iter().map(|age| history.freed_at(*age)).collect();
            assert_eq!(freed, (turns * TURN - 3..=turns * TURN + 4).collect::<Vec<_>>());
            assert!(
                ages.windows(2)
                    .all(|pair| younger(pair[0], pair[1]) == pair[1] && younger(pair[1], pair[0]) == pair[1])
            );
        }
    }

    #[test]
    fn in_the_first_turn_an_age_is_its_time() {
        let history = History::default();
        assert_eq!(history.freed_at(0), 0);
        history.set_now(100);
        assert_eq!([0, 1, 99, 100].map(|age| history.freed_at(age)), [0, 1, 99, 100]);
        assert_eq!(history.freed_at(103), 103, "that another thread counted");
        history.set_now(TURN - 1);
        assert_eq!([1 << 17, u32::MAX].map(|age| history.freed_at(age)), [1 << 17, TURN - 1]);
    }
}
