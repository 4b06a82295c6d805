//! Choosing memory: cached handles, new ones, idle ones from elsewhere, re-chunked ones.
#![forbid(unsafe_code)]

use super::{Fill, Placement, Source, Supply, Victim};
use crate::backend::cost;
use crate::physical::Physical;
use crate::policy::floor_pow2;
use crate::segment::nodes::Kind;
use crate::segment::{Claim, Segment};
use crate::units::{GRANULE, UNITS_PER_GRANULE, granule_ceil, granule_floor};
use std::collections::BTreeMap;
use std::ops::Range;

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
    /// The last run may grow up to a multiple of this, where addresses and budget allow.
    pub(crate) step: u32,
}

/// Handles that `granules` take when cut into powers of two of at most `max`.
pub(crate) const fn pieces(granules: u32, max: u32) -> u32 {
    granules / max + (granules % max).count_ones()
}

/// Modelled nanoseconds of backing runs of granules with handles of powers of two.
pub(crate) fn price(missing: &[Range<u32>], handle_max: u32) -> u64 {
    let per_handle = cost::grow_nanos(GRANULE);
    missing.iter().map(|run| u64::from(pieces(run.end - run.start, handle_max)) * per_handle).sum()
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
    for id in segment.free_nodes(UNITS_PER_GRANULE, claim) {
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
            if whole && !kept && !physical.pinned.any(range.clone()) {
                found.push(Victim {
                    handle: page.handle,
                    granules: handle.granules,
                    home: range.start,
                    segment: index,
                    node: id,
                    age: node.age,
                    epoch: node.epoch,
                    releasable: handle.zombies == 0,
                    around: idle.end - idle.start,
                });
            }
        }
    }
    found
}

/// Chooses memory for what a placement misses. `victims` are whole idle handles; those whose epoch is
/// at most `passed` may be released. `None` when the terms do not give enough.
pub(crate) fn supply(
    placement: &Placement,
    cached: impl Iterator<Item = (u32, usize)>,
    mut victims: Vec<Victim>,
    terms: Terms,
    passed: u32,
) -> Option<Supply> {
    let mut out = Supply::default();
    let mut cache: BTreeMap<u32, usize> = cached.collect();
    let mut budget = terms.budget;
    // Longest idle first; the order is total, so that equal runs plan alike.
    victims.sort_unstable_by_key(|victim| (victim.age, victim.segment, victim.home));
    let mut used = vec![false; victims.len()];
    let last = placement.missing.len().wrapping_sub(1);
    for (index, run) in placement.missing.iter().enumerate() {
        let mut at = run.start;
        while at < run.end {
            let rest = run.end - at;
            let fill = |granules, source| Fill { at, granules, source };
            if let Some((&granules, count)) = cache.range_mut(..=rest).next_back() {
                *count -= 1;
                if *count == 0 {
                    cache.remove(&granules);
                }
                out.fills.push(fill(granules, Source::Cached));
                at += granules;
                continue;
            }
            let most = u32::try_from(budget).unwrap_or(u32::MAX).min(terms.handle_max);
            if most > 0 {
                let mut granules = floor_pow2(u64::from(rest.min(most)));
                // Growth beyond the request pays where addresses follow and memory is plenty.
                if index == last && terms.step > 1 && rest < terms.step {
                    let stepped = floor_pow2(u64::from(terms.step.min(most)));
                    if stepped >= rest && stepped - rest <= placement.room {
                        granules = stepped;
                    }
                }
                budget -= u64::from(granules);
                out.fills.push(fill(granules, Source::Create));
                at += granules;
                continue;
            }
            if terms.moves {
                let choice = (0..victims.len())
                    .filter(|i| !used[*i] && victims[*i].granules <= rest)
                    .max_by_key(|i| (victims[*i].granules, std::cmp::Reverse(*i)));
                if let Some(choice) = choice {
                    used[choice] = true;
                    let victim = victims[choice];
                    out.fills.push(fill(victim.granules, Source::Move(victim)));
                    at += victim.granules;
                    continue;
                }
            }
            if !terms.rechunk {
                return None;
            }
            // Nothing fits: give a larger handle up and create what is missing in its stead.
            if let Some((&granules, count)) = cache.iter_mut().next() {
                *count -= 1;
                if *count == 0 {
                    cache.remove(&granules);
                }
                out.drop_cached.push(granules);
                budget += u64::from(granules);
                continue;
            }
            let choice = (0..victims.len())
                .filter(|i| !used[*i] && victims[*i].epoch <= passed && victims[*i].releasable)
                .min_by_key(|i| (victims[*i].granules < rest, victims[*i].granules, *i))?;
            used[choice] = true;
            out.release.push(victims[choice]);
            budget += u64::from(victims[choice].granules);
        }
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn placement(run: Range<u32>) -> Placement {
        Placement { first: 1, block: 0..1, claim: 0..1, missing: vec![run], room: 100 }
    }

    fn victim(handle: u32, granules: u32, age: u32) -> Victim {
        Victim {
            handle,
            granules,
            home: handle * 100,
            segment: 0,
            node: handle,
            age,
            epoch: 0,
            releasable: true,
            around: granules,
        }
    }

    const TERMS: Terms = Terms { budget: 0, handle_max: 32, moves: true, rechunk: true, step: 1 };

    #[test]
    fn creates_in_falling_sizes() {
        let terms = Terms { budget: 100, ..TERMS };
        let supply = supply(&placement(0..37), std::iter::empty(), Vec::new(), terms, 0).unwrap();
        let sizes: Vec<u32> = supply.fills.iter().map(|fill| fill.granules).collect();
        assert_eq!(sizes, [32, 4, 1]);
    }

    #[test]
    fn moves_the_longest_idle_of_the_largest_that_fit() {
        let list = vec![victim(1, 4, 9), victim(2, 4, 3), victim(3, 16, 1)];
        let supply = supply(&placement(0..5), [(1, 1)].into_iter(), list, TERMS, 0).unwrap();
        assert_eq!(supply.fills[0].source, Source::Cached);
        assert_eq!(supply.fills[1], Fill { at: 1, granules: 4, source: Source::Move(victim(2, 4, 3)) });
    }

    #[test]
    fn rechunks_only_passed_handles() {
        let mut big = victim(3, 16, 1);
        big.epoch = 5;
        let place = placement(0..2);
        assert_eq!(supply(&place, std::iter::empty(), vec![big], TERMS, 4), None);
        let supply = supply(&place, std::iter::empty(), vec![big], TERMS, 5).unwrap();
        assert_eq!(supply.release, [big]);
        assert_eq!(supply.fills, [Fill { at: 0, granules: 2, source: Source::Create }]);
    }
}
