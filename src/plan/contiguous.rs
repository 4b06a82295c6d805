//! Memory for a request that wants one handle of its own.
#![forbid(unsafe_code)]

use super::{Fill, Placement, Source, Supply, Victim};
use crate::segment::{Claim, Segment};
use crate::units::UNITS_PER_GRANULE;
use std::ops::Range;

/// What a plan may do; sizes in granules.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Terms {
    /// Memory that may be created.
    pub(crate) budget: u64,
    /// An idle handle of the right size may move.
    pub(crate) moves: bool,
    /// Idle handles may be released to create the one.
    pub(crate) release: bool,
}

/// A run of addresses without memory, as long as the handle; the placement's one missing run.
pub(crate) fn addresses(segment: &mut Segment, granules: u32, claim: Claim) -> Option<Placement> {
    let request = super::place::Request { len: granules * UNITS_PER_GRANULE, align: UNITS_PER_GRANULE, claim };
    let whole = |missing: &[Range<u32>]| matches!(missing, [run] if run.end - run.start == granules);
    super::place::Places::of(segment, request).iter().find(|place| whole(&place.missing))
}

/// The placement on an idle handle where it lies.
pub(crate) fn in_place(victim: &Victim) -> Placement {
    let range = victim.home * UNITS_PER_GRANULE..(victim.home + victim.granules) * UNITS_PER_GRANULE;
    Placement { first: victim.node, block: range.clone(), claim: range, missing: Vec::new(), room: 0, before: 0 }
}

/// One handle of `granules` at `at`: from the cache, new, moved, or created in place of idle ones, whose epoch
/// is at most `passed`. `None` when the terms do not give it.
pub(crate) fn supply(
    at: u32,
    granules: u32,
    cached: impl Iterator<Item = (u32, usize)>,
    victims: &[Victim],
    terms: Terms,
    passed: u32,
) -> Option<Supply> {
    let one = |source| Supply { fills: vec![Fill { at, granules, source }], ..Supply::default() };
    let cached: Vec<(u32, usize)> = cached.collect();
    if cached.iter().any(|(size, _)| *size == granules) {
        return Some(one(Source::Cached));
    }
    if terms.budget >= u64::from(granules) {
        return Some(one(Source::Create));
    }
    let moved = victims.iter().filter(|victim| terms.moves && victim.granules == granules);
    if let Some(victim) = moved.min_by_key(|victim| (victim.age, victim.segment, victim.home)) {
        return Some(one(Source::Move(*victim)));
    }
    if !terms.release {
        return None;
    }
    let mut out = one(Source::Create);
    let mut short = u64::from(granules) - terms.budget;
    let sizes = cached.iter().flat_map(|(size, count)| std::iter::repeat_n(*size, *count));
    for size in sizes {
        if short > 0 {
            out.drop_cached.push(size);
            short = short.saturating_sub(u64::from(size));
        }
    }
    let mut idle: Vec<&Victim> = victims.iter().filter(|v| v.releasable && v.epoch <= passed).collect();
    // The smallest that is enough by itself, else the largest first: few are given up.
    idle.sort_unstable_by_key(|victim| (victim.granules, victim.age, victim.segment, victim.home));
    while short > 0 {
        let enough = idle.iter().position(|victim| u64::from(victim.granules) >= short);
        let victim = if let Some(index) = enough { idle.remove(index) } else { idle.pop()? };
        out.release.push(*victim);
        short = short.saturating_sub(u64::from(victim.granules));
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn victim(handle: u32, granules: u32, epoch: u32) -> Victim {
        Victim {
            handle,
            granules,
            home: handle * 100,
            segment: 0,
            node: handle,
            age: handle.into(),
            epoch,
            releasable: true,
        }
    }

    const ALL: Terms = Terms { budget: 0, moves: true, release: true };

    #[test]
    fn the_cheapest_source_of_the_very_size() {
        let list = [victim(1, 8, 0), victim(2, 4, 9), victim(3, 4, 0)];
        let source = |cached: &[(u32, usize)], terms| {
            supply(7, 4, cached.iter().copied(), &list, terms, 5).map(|supply| supply.fills[0].source)
        };
        assert_eq!(source(&[(2, 1), (4, 1)], Terms { budget: 9, ..ALL }), Some(Source::Cached));
        assert_eq!(source(&[(2, 1)], Terms { budget: 4, ..ALL }), Some(Source::Create));
        assert_eq!(source(&[(2, 1)], Terms { budget: 3, ..ALL }), Some(Source::Move(list[1])));
        assert_eq!(source(&[], Terms { moves: false, release: false, ..ALL }), None);
    }

    #[test]
    fn few_handles_are_given_up_and_only_passed_ones() {
        let release = |granules, budget, list: &[Victim], cached: &[(u32, usize)]| {
            let terms = Terms { budget, moves: false, release: true };
            let supply = supply(0, granules, cached.iter().copied(), list, terms, 5)?;
            Some((supply.drop_cached, supply.release.iter().map(|victim| victim.handle).collect::<Vec<_>>()))
        };
        let list = [victim(1, 16, 0), victim(2, 4, 0), victim(3, 2, 0), victim(4, 64, 6)];
        assert_eq!(release(4, 1, &list, &[]), Some((vec![], vec![2])));
        assert_eq!(release(19, 0, &list, &[]), Some((vec![], vec![1, 2])));
        assert_eq!(release(19, 0, &list, &[(1, 2)]), Some((vec![1, 1], vec![1, 3])));
        assert_eq!(release(23, 0, &list, &[]), None);
    }
}
