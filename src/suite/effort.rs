//! How much work each pair is, so that a bar can say what time is left.

use super::{HOST, Least, OWN, Progress};
use std::cell::Cell;

/// Tenths of a microsecond an event, of the two measured runs and of a full search, on one core of a server;
/// what counts is how they compare (medians of the shipped traces, release build).
fn tenths(allocator: &str) -> (u64, u64) {
    match allocator {
        HOST => (280, 0),
        OWN => (10, 60),
        "gmlake" | "vpmm" => (20, 150),
        "torch-expandable" => (12, 110),
        "cuda-malloc-async" | "first-fit" | "torch-native" | "tf-bfc" => (10, 95),
        _ => (7, 45),
    }
}

/// Replays of a search, roughly, and the share of a full one's work.
fn tries(least: Least) -> (u64, u64, u64) {
    match least {
        Least::Full => (25, 1, 1),
        Least::Quick => (9, 1, 3),
        Least::No => (1, 0, 1),
    }
}

/// The work of one pair, told bit by bit. In tenths of a microsecond.
pub(super) struct Effort<'a> {
    progress: &'a dyn Progress,
    runs: u64,
    search: u64,
    one_try: u64,
    told: Cell<u64>,
}

impl<'a> Effort<'a> {
    pub(super) fn new(progress: &'a dyn Progress, allocator: &str, events: u64, least: Least) -> Self {
        let (runs, search) = tenths(allocator);
        let (count, share, of) = tries(least);
        let search = events * search * share / of;
        Self { progress, runs: events * runs, search, one_try: search.div_ceil(count), told: Cell::new(0) }
    }

    /// All of it.
    pub(super) fn total(&self) -> u64 {
        self.runs + self.search
    }

    /// One of the two measured runs is done.
    pub(super) fn ran(&self) {
        self.tell(self.runs / 2);
    }

    /// One replay of the search is done; more than were reckoned with add nothing.
    pub(super) fn tried(&self) {
        self.tell(self.one_try);
    }

    /// The pair is done.
    pub(super) fn done(&self) {
        self.tell(self.total());
    }

    fn tell(&self, work: u64) {
        let told = self.told.get();
        let work = work.min(self.total() - told);
        self.told.set(told + work);
        self.progress.done(work);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suite::tests::Told;

    #[test]
    fn what_is_told_adds_up_to_the_total_whatever_the_search_takes() {
        for (allocator, least, tries) in [
            (OWN, Least::Full, 3),
            (OWN, Least::Full, 300),
            (HOST, Least::Full, 0),
            ("slab", Least::Quick, 7),
            ("vpmm", Least::No, 0),
        ] {
            let told = Told::default();
            let effort = Effort::new(&told, allocator, 1001, least);
            effort.ran();
            effort.ran();
            (0..tries).for_each(|_| effort.tried());
            effort.done();
            assert_eq!(told.so_far(), effort.total(), "{allocator}");
        }
        let total = |allocator, least| Effort::new(&Told::default(), allocator, 1000, least).total();
        assert!(total(OWN, Least::Full) > total(OWN, Least::Quick));
        assert!(total(OWN, Least::Quick) > total(OWN, Least::No));
        assert!(total(HOST, Least::No) > total("buddy", Least::Full), "really mapped, every stamp checked");
    }
}
