//! Choosing memory: cached handles, new ones, idle ones from elsewhere, re-chunked ones.
#![forbid(unsafe_code)]

use super::{Fill, Placement, Source, Supply, Victim};
use crate::physical::Physical;
use crate::segment::nodes::Kind;
use crate::segment::{Claim, Segment};
use crate::units::{UNITS_PER_GRANULE, granule_ceil, granule_floor};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;

/// Smaller idle handles are not moved before memory is created.
const STALE_GRANULES: u32 = 4;

/// What a plan may do. Sizes in granules.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Terms {
    /// Memory that may be created.
    pub(crate) budget: u64,
    /// Largest handle to create.
    pub(crate) handle_max: u32,
    /// Idle handles may move.
    pub(crate) moves: bool,
    /// Idle handles may be released to create smaller ones.
    pub(crate) rechunk: bool,
    /// Growth is at least this, where addresses and budget allow.
    pub(crate) step: u32,
    /// Epoch up to which all streams have passed: memory freed later is not released.
    pub(crate) passed: u32,
    /// Idle memory of this age or older moves before new memory is created.
    pub(crate) stale: Option<u64>,
    /// Other streams want memory too: what only this one may take yet goes first.
    pub(crate) shared: bool,
}

/// Whole idle handles of a segment that the claim may take, without those behind `keep`; none of a capture
/// pool's (I11).
pub(crate) fn victims(
    index: u16,
    segment: &Segment,
    physical: &Physical,
    claim: Claim,
    keep: Range<u32>,
) -> Vec<Victim> {
    if segment.private { Vec::new() } else { idle_handles(index, segment, physical, claim, keep) }
}

/// As [`victims`], also of a capture pool's segment: what may be used where it lies.
pub(crate) fn idle_handles(
    index: u16,
    segment: &Segment,
    physical: &Physical,
    claim: Claim,
    keep: Range<u32>,
) -> Vec<Victim> {
    let mut found = Vec::new();
    for id in segment.free_nodes(UNITS_PER_GRANULE) {
        let node = &segment.nodes[id];
        debug_assert_eq!(node.kind, Kind::Free);
        let idle = granule_ceil(node.start)..granule_floor(node.end());
        let mut granule = idle.start;
        while granule < idle.end {
            let page = physical.page(granule);
            let Some(handle) = physical.handle(page.handle) else {
                granule += 1;
                continue;
            };
            let range = granule - page.offset..granule - page.offset + handle.granules;
            granule = range.end;
            let whole = range.start >= idle.start && range.end <= idle.end;
            let kept = range.start < keep.end && keep.start < range.end;
            if !whole || kept || physical.pinned.any(range.clone()) {
                continue;
            }
            // A part of a block that may not be taken may have passed all the same.
            let epoch = segment.last_use(id, range.clone());
            if claim.may_take(node) || epoch <= claim.horizon {
                found.push(Victim {
                    handle: page.handle,
                    granules: handle.granules,
                    home: range.start,
                    segment: index,
                    node: id,
                    age: segment.history.freed_at(node.age),
                    epoch,
                    releasable: handle.zombies == 0,
                });
            }
        }
    }
    found
}

/// Chooses memory for what a placement misses; `None` when the terms do not give enough.
pub(crate) fn supply(
    placement: &Placement,
    cached: impl Iterator<Item = (u32, usize)>,
    victims: &[Victim],
    terms: Terms,
) -> Option<Supply> {
    let mut runs = Runs(placement.missing.clone());
    let mut fills = Vec::new();
    let mut cache: BTreeMap<u32, usize> = cached.collect();
    for (&granules, count) in cache.iter_mut().rev() {
        while *count > 0
            && let Some(at) = runs.take(granules)
        {
            *count -= 1;
            fills.push(Fill { at, granules, source: Source::Cached });
        }
    }
    let mut out = Supply { fills, ..Supply::default() };
    let mut budget = terms.budget;
    let missing = runs.missing();
    if missing > budget {
        let (mut need, mut drop_cached) = (missing - budget, Vec::new());
        if terms.rechunk {
            for (&granules, &count) in cache.iter().rev() {
                for _ in 0..count {
                    if need > 0 {
                        drop_cached.push(granules);
                        budget += u64::from(granules);
                        need = need.saturating_sub(u64::from(granules));
                    }
                }
            }
        }
        out.drop_cached = drop_cached;
        if need > 0 {
            let freed = gather(victims, need, terms, &mut runs, &mut out)
                .or_else(|| overhang(victims, need, placement.room, terms, &mut runs, &mut out));
            budget += freed?;
        }
        if runs.missing() > budget {
            return None;
        }
    } else if let Some(age) = terms.stale.filter(|_| terms.moves) {
        let mut stale: Vec<&Victim> =
            victims.iter().filter(|v| v.freed_by(age) && v.granules >= STALE_GRANULES).collect();
        stale.sort_unstable_by_key(|victim| (victim.age, victim.segment, victim.home));
        for victim in stale {
            if let Some(at) = runs.take(victim.granules) {
                out.fills.push(Fill { at, granules: victim.granules, source: Source::Move(*victim) });
            }
        }
    }
    let grown = placement.missing.last().map_or(0, |run| run.end);
    for mut run in runs.0 {
        let len = run.end - run.start;
        // A little more than asked serves the next request at the same price.
        if run.end == grown && missing <= terms.budget && (1..terms.step).contains(&len) {
            let more = (terms.step - len).min(placement.room);
            if len + more == terms.step && missing + u64::from(more) <= budget {
                run.end += more;
            }
        }
        while run.start < run.end {
            let granules = (run.end - run.start).min(terms.handle_max);
            out.fills.push(Fill { at: run.start, granules, source: Source::Create });
            run.start += granules;
        }
    }
    Some(out)
}

/// Takes idle handles until `need` granules are found: those that fit where memory is missing move there, others
/// are released. Returns the granules of those.
///
/// Few and large ones, but not larger than needed; among equals the longest idle.
fn gather(victims: &[Victim], need: u64, terms: Terms, runs: &mut Runs, out: &mut Supply) -> Option<u64> {
    let releasable = |victim: &Victim| terms.rechunk && victim.releasable && victim.epoch <= terms.passed;
    let mut left: Vec<&Victim> = victims.iter().filter(|victim| terms.moves || releasable(victim)).collect();
    // The order is total, so that equal runs plan alike.
    left.sort_unstable_by_key(|v| {
        let others = terms.shared && v.epoch <= terms.passed;
        (Reverse(u64::from(v.granules).min(need)), others, v.age, v.segment, v.home)
    });
    loop {
        let mut taken: Vec<&Victim> = Vec::new();
        let mut sum = 0;
        for victim in &left {
            if sum >= need {
                break;
            }
            sum += u64::from(victim.granules);
            taken.push(victim);
        }
        if sum < need {
            return None;
        }
        taken.sort_by_key(|victim| Reverse(victim.granules));
        let mut trial = runs.clone();
        let (mut fills, mut release, mut useless) = (Vec::new(), Vec::new(), Vec::new());
        for victim in taken {
            if terms.moves
                && let Some(at) = trial.take(victim.granules)
            {
                fills.push(Fill { at, granules: victim.granules, source: Source::Move(*victim) });
            } else if releasable(victim) {
                release.push(*victim);
            } else {
                useless.push(*victim);
            }
        }
        if useless.is_empty() {
            *runs = trial;
            let freed = release.iter().map(|victim| u64::from(victim.granules)).sum();
            out.fills.append(&mut fills);
            out.release = release;
            return Some(freed);
        }
        left.retain(|victim| !useless.contains(victim));
    }
}

/// As [`gather`], where handles that may not be released fit nowhere as they are: up to `room` granules after the
/// last run may be backed too, so that the last handle hangs over the block's end and its rest is free memory there.
fn overhang(victims: &[Victim], need: u64, room: u32, terms: Terms, runs: &mut Runs, out: &mut Supply) -> Option<u64> {
    let mut longer = runs.clone();
    let last = longer.0.last_mut()?;
    let end = last.end;
    last.end += room;
    let freed = gather(victims, need, terms, &mut longer, out)?;
    let last = longer.0.last_mut()?;
    last.end = end.max(last.start);
    *runs = longer;
    Some(freed)
}

/// What is missing still: runs of granules.
#[derive(Debug, Clone)]
struct Runs(Vec<Range<u32>>);

impl Runs {
    fn missing(&self) -> u64 {
        self.0.iter().map(|run| u64::from(run.end - run.start)).sum()
    }

    /// Cuts `granules` off the front of the shortest run that holds them.
    fn take(&mut self, granules: u32) -> Option<u32> {
        let fits = self.0.iter_mut().filter(|run| run.end - run.start >= granules);
        let run = fits.min_by_key(|run| run.end - run.start)?;
        let at = run.start;
        run.start += granules;
        Some(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn placement(run: Range<u32>) -> Placement {
        Placement { first: 1, block: 0..1, claim: 0..1, missing: vec![run], room: 100, before: 0 }
    }

    fn victim(handle: u32, granules: u32, age: u64) -> Victim {
        Victim { handle, granules, home: handle * 100, segment: 0, node: handle, age, epoch: 0, releasable: true }
    }

    const TERMS: Terms =
        Terms { budget: 0, handle_max: 32, moves: true, rechunk: true, step: 1, passed: 0, stale: None, shared: false };

    fn created(supply: &Supply) -> Vec<u32> {
        supply.fills.iter().filter(|fill| fill.source == Source::Create).map(|fill| fill.granules).collect()
    }

    fn moved(supply: &Supply) -> Vec<u32> {
        let handle = |fill: &Fill| if let Source::Move(victim) = fill.source { Some(victim.handle) } else { None };
        supply.fills.iter().filter_map(handle).collect()
    }

    #[test]
    fn creates_the_largest_handles_and_a_rest() {
        let terms = Terms { budget: 100, ..TERMS };
        let supply = supply(&placement(0..37), std::iter::empty(), &[], terms).unwrap();
        assert_eq!(created(&supply), [32, 5]);
    }

    #[test]
    fn growth_is_rounded_up_where_addresses_and_budget_allow() {
        let terms = Terms { budget: 100, step: 32, ..TERMS };
        let grown = |room, budget| {
            let place = Placement { room, ..placement(0..5) };
            created(&supply(&place, std::iter::empty(), &[], Terms { budget, ..terms }).unwrap())
        };
        assert_eq!(grown(27, 100), [32]);
        assert_eq!(grown(26, 100), [5]);
        assert_eq!(grown(27, 31), [5]);
    }

    #[test]
    fn moves_few_large_handles_and_no_more_than_are_needed() {
        let list = [victim(1, 4, 9), victim(2, 4, 3), victim(3, 16, 1), victim(4, 1, 0)];
        let place = placement(0..21);
        // One granule may be created; the cached one counts; of the two of four the longest idle goes.
        let supply = supply(&place, [(1, 1)].into_iter(), &list, Terms { budget: 1, ..TERMS }).unwrap();
        assert_eq!(supply.fills[0].source, Source::Cached);
        assert_eq!(moved(&supply), [3, 2]);
        assert!(created(&supply).is_empty());
    }

    #[test]
    fn what_does_not_fit_is_rechunked() {
        let list = [victim(1, 3, 0), victim(2, 2, 1), victim(3, 2, 2)];
        let supply = supply(&placement(0..4), std::iter::empty(), &list, TERMS).unwrap();
        assert_eq!((moved(&supply), created(&supply)), (vec![1], vec![1]));
        assert_eq!(supply.release, [list[1]]);
    }

    #[test]
    fn rechunks_only_passed_handles() {
        let mut big = victim(3, 16, 1);
        big.epoch = 5;
        let place = Placement { room: 0, ..placement(0..2) };
        assert_eq!(supply(&place, std::iter::empty(), &[big], Terms { passed: 4, ..TERMS }), None);
        let supply = supply(&place, std::iter::empty(), &[big], Terms { passed: 5, ..TERMS }).unwrap();
        assert_eq!(supply.release, [big]);
        assert_eq!(supply.fills, [Fill { at: 0, granules: 2, source: Source::Create }]);
    }

    #[test]
    fn a_handle_that_neither_fits_nor_may_go_does_not_hide_others() {
        let mut big = victim(3, 16, 1);
        big.epoch = 5;
        let list = [big, victim(1, 1, 7), victim(2, 1, 8)];
        let supply = supply(&placement(0..2), std::iter::empty(), &list, TERMS).unwrap();
        assert_eq!((moved(&supply), supply.release.len()), (vec![1, 2], 0));
    }

    #[test]
    fn memory_that_no_other_stream_may_take_yet_goes_first_where_there_are_others() {
        let list = [victim(1, 4, 1), Victim { epoch: 5, ..victim(2, 4, 9) }];
        let first = |shared| {
            let terms = Terms { passed: 4, shared, ..TERMS };
            moved(&supply(&placement(0..4), std::iter::empty(), &list, terms).unwrap())
        };
        assert_eq!((first(false), first(true)), (vec![1], vec![2]));
    }

    #[test]
    fn a_handle_that_may_not_be_released_hangs_over_the_end_where_nothing_fits() {
        let list = [Victim { epoch: 5, ..victim(1, 8, 0) }, Victim { epoch: 5, ..victim(2, 4, 0) }];
        let terms = Terms { passed: 4, ..TERMS };
        let plan = |room| {
            let place = Placement { room, ..placement(0..10) };
            supply(&place, std::iter::empty(), &list, terms)
        };
        assert_eq!(plan(1), None);
        let supply = plan(2).unwrap();
        let fills: Vec<_> = supply.fills.iter().map(|fill| (fill.at, fill.granules)).collect();
        assert_eq!((fills, created(&supply)), (vec![(0, 8), (8, 4)], vec![]));
    }

    #[test]
    fn stale_memory_moves_before_any_is_created() {
        let list = [victim(1, 8, 10), victim(2, 8, 90), victim(3, 2, 1)];
        let terms = Terms { budget: 100, stale: Some(50), ..TERMS };
        let supply = supply(&placement(0..12), std::iter::empty(), &list, terms).unwrap();
        assert_eq!((moved(&supply), created(&supply)), (vec![1], vec![4]));
    }
}
