//! What is live, counted where it lives.
//!
//! Each segment counts its own blocks and bytes under its lock, in plain stores to a line of its own; whoever wants the
//! sum adds them up. A sum's *peak* cannot be added up afterwards, so each segment also has a ceiling: below it no peak
//! can be passed, since the ceilings of all segments together are never more than the highest sum that was noted. A
//! segment that passes its ceiling takes stock: it notes the sum, if it is a new peak, and gets what room there is below
//! it. So a peak costs a look at all segments when it is passed, and nothing afterwards.
//!
//! Where several threads allocate at the same time from segments of their own, taking room from each other would never
//! end; then each keeps its room, and what it may grow to counts as live in the peak.
#![forbid(unsafe_code)]

use parking_lot::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Times that stock was taken by another thread than before, in excess of times by the same, from which on threads
/// count as allocating side by side.
const APART: u32 = 64;

/// Bytes of one kind, live in one segment.
#[derive(Debug, Default)]
struct Level {
    live: AtomicU64,
    ceiling: AtomicU64,
}

impl Level {
    fn room(&self) -> u64 {
        self.ceiling.load(Relaxed).saturating_sub(self.live.load(Relaxed))
    }
}

/// Of one segment; written by whoever holds its lock, ceilings by whoever takes stock.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    allocated: Level,
    requested: Level,
    allocs: AtomicU64,
}

/// Adds without an atomic exchange: the caller holds the segment's lock.
#[inline]
fn add(counter: &AtomicU64, by: u64) -> u64 {
    let now = counter.load(Relaxed).wrapping_add(by);
    counter.store(now, Relaxed);
    now
}

impl Tally {
    /// A block came into being. True: a ceiling is passed, stock must be taken ([`Peaks::take_stock`]).
    #[inline]
    pub(crate) fn allocated(&self, bytes: u64, requested: u64) -> bool {
        add(&self.allocs, 1);
        let allocated = add(&self.allocated.live, bytes);
        let requested = add(&self.requested.live, requested);
        allocated > self.allocated.ceiling.load(Relaxed) || requested > self.requested.ceiling.load(Relaxed)
    }

    /// A block was freed.
    #[inline]
    pub(crate) fn freed(&self, bytes: u64, requested: u64) {
        add(&self.allocated.live, bytes.wrapping_neg());
        add(&self.requested.live, requested.wrapping_neg());
    }

    /// Bytes in live blocks, and as they were asked for.
    pub(crate) fn live(&self) -> (u64, u64) {
        (self.allocated.live.load(Relaxed), self.requested.live.load(Relaxed))
    }

    /// Allocations so far.
    pub(crate) fn allocs(&self) -> u64 {
        self.allocs.load(Relaxed)
    }
}

#[derive(Debug, Default)]
struct State {
    allocated: u64,
    requested: u64,
    /// Of `allocated`, before the last reset.
    earlier: u64,
    /// Who took stock last, and how often the thread changed of late.
    thread: usize,
    changes: u32,
}

/// The peaks of a heap. The innermost lock.
#[derive(Debug, Default)]
pub(crate) struct Peaks(Mutex<State>);

impl Peaks {
    /// `own` passed a ceiling; `all` are the heap's tallies, with `own`.
    #[cold]
    pub(crate) fn take_stock<'a>(&self, own: &'a Tally, all: impl Iterator<Item = &'a Tally> + Clone) {
        thread_local!(static MARK: u8 = const { 0 });
        self.take_stock_as(MARK.with(|mark| std::ptr::from_ref(mark) as usize), own, all);
    }

    fn take_stock_as<'a>(&self, thread: usize, own: &'a Tally, all: impl Iterator<Item = &'a Tally> + Clone) {
        let mut state = self.0.lock();
        let same = state.thread == thread;
        state.changes = if same { state.changes.saturating_sub(1) } else { (state.changes + 1).min(2 * APART) };
        state.thread = thread;
        let apart = state.changes >= APART;
        let others = all.filter(|tally| !std::ptr::eq(*tally, own));
        let levels = others.clone().map(|tally| &tally.allocated);
        state.allocated = stock(&own.allocated, levels, state.allocated, apart);
        state.requested = stock(&own.requested, others.map(|tally| &tally.requested), state.requested, apart);
    }

    /// Most bytes live at once: rounded, and as they were asked for.
    pub(crate) fn most(&self) -> (u64, u64) {
        let state = self.0.lock();
        // Both are bounds where threads allocate side by side; what was asked for is never more than what was given.
        (state.allocated, state.requested.min(state.allocated))
    }

    /// Most rounded bytes live at once, whatever was reset.
    pub(crate) fn most_ever(&self) -> u64 {
        let state = self.0.lock();
        state.earlier.max(state.allocated)
    }

    /// Sets the peaks to what is live now.
    pub(crate) fn reset<'a>(&self, all: impl Iterator<Item = &'a Tally>) {
        let mut state = self.0.lock();
        state.earlier = state.earlier.max(state.allocated);
        (state.allocated, state.requested) = (0, 0);
        for tally in all {
            for level in [&tally.allocated, &tally.requested] {
                level.ceiling.store(level.live.load(Relaxed), Relaxed);
            }
            let (allocated, requested) = tally.live();
            state.allocated += allocated;
            state.requested += requested;
        }
    }
}

/// Shares out the room below a peak, which is raised if it is passed; the peak from now on.
fn stock<'a>(own: &Level, others: impl Iterator<Item = &'a Level> + Clone, peak: u64, apart: bool) -> u64 {
    let mine = own.live.load(Relaxed);
    let sum = others.clone().map(|level| level.live.load(Relaxed)).fold(mine, u64::saturating_add);
    if apart {
        let kept = others.map(Level::room).sum::<u64>();
        let peak = peak.max(sum.saturating_add(kept));
        own.ceiling.store(mine + (peak - sum - kept), Relaxed);
        return peak;
    }
    let peak = peak.max(sum);
    let mut room = peak - sum;
    for level in others {
        // Half of what the others have stays with them, so that taking turns comes to rest.
        let kept = (level.room() / 2).min(room);
        room -= kept;
        level.ceiling.store(level.live.load(Relaxed) + kept, Relaxed);
    }
    own.ceiling.store(mine + room, Relaxed);
    peak
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peaks_of_one_thread_are_exact_whatever_the_segments() {
        let tallies: Vec<Tally> = (0..5).map(|_| Tally::default()).collect();
        let peaks = Peaks::default();
        let mut live: Vec<(usize, u64)> = Vec::new();
        let (mut sum, mut most, mut ever) = (0, 0, 0);
        let mut seed = 17u64;
        let mut stocks = 0;
        for round in 0..200_000 {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            if !(seed >> 20).is_multiple_of(2) && !live.is_empty() || live.len() > 300 {
                let (at, bytes) = live.swap_remove((seed >> 33) as usize % live.len());
                tallies[at].freed(2 * bytes, bytes);
                sum -= bytes;
            } else {
                let (at, bytes) = ((seed >> 40) as usize % 5, (seed >> 50) + 1);
                if tallies[at].allocated(2 * bytes, bytes) {
                    peaks.take_stock(&tallies[at], tallies.iter());
                    stocks += 1;
                }
                live.push((at, bytes));
                sum += bytes;
                most = most.max(sum);
                ever = ever.max(sum);
            }
            if round % 70_000 == 69_999 {
                assert_eq!(peaks.most(), (2 * most, most));
                peaks.reset(tallies.iter());
                most = sum;
            }
            assert_eq!((peaks.most(), peaks.most_ever()), ((2 * most, most), 2 * ever), "round {round}");
        }
        assert!(stocks < 30_000, "stock was taken {stocks} times");
    }

    #[test]
    fn threads_side_by_side_leave_each_other_their_room() {
        let tallies: Vec<Tally> = (0..4).map(|_| Tally::default()).collect();
        let peaks = Peaks::default();
        let mut stocks = 0;
        // Turn by turn, so that no two are ever seen live at once.
        for round in 0..1000 {
            let tally = &tallies[round % 4];
            if tally.allocated(100, 100) {
                peaks.take_stock_as(round % 4 + 1, tally, tallies.iter());
                stocks += 1;
            }
            tally.freed(100, 100);
        }
        assert!((4..100).contains(&stocks), "stock was taken {stocks} times");
        // At most what each thread's own most add up to.
        assert_eq!(peaks.most(), (400, 400));
    }
}
