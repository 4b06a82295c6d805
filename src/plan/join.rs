//! Memory that nothing else can use: the idle ends of partly live handles.
//!
//! A handle cannot be split, so what lies idle in one that is partly live serves only requests that fit there. But it can be
//! mapped a second time. A run of addresses may begin with the idle end of one such handle and end with the idle start of
//! another, since what is live of them lies outside the run then, at addresses that are not usable. All between are whole
//! handles.
#![forbid(unsafe_code)]

use super::source::{self, Terms};
use super::{End, Fill, Placement, Source, Supply, Victim};
use crate::physical::Physical;
use crate::segment::{Claim, Segment};
use crate::units::{UNITS_PER_GRANULE, granule_ceil, granule_floor};
use std::cmp::Reverse;
use std::ops::Range;

/// Ends of each kind that are tried one after the other.
const TRIES: usize = 4;

/// Idle ends of partly live handles of a segment that the claim may take; none of a capture pool's (I11), of a pinned handle's,
/// or of one that is joined already.
pub(crate) fn ends(index: u16, segment: &Segment, physical: &Physical, claim: Claim) -> Vec<End> {
    let mut found = Vec::new();
    if segment.private {
        return found;
    }
    for id in segment.free_nodes(UNITS_PER_GRANULE) {
        let node = &segment.nodes[id];
        let idle = granule_ceil(node.start)..granule_floor(node.end());
        if idle.is_empty() {
            continue;
        }
        let mut end = |granule: u32, last: bool| {
            let page = physical.page(granule);
            let handle = physical.handle(page.handle)?;
            let home = granule - page.offset;
            let part = home.max(idle.start)..(home + handle.granules).min(idle.end);
            let outer = if last { part.start == home } else { part.end == home + handle.granules };
            let whole = part.end - part.start == handle.granules;
            if whole || !outer || handle.joined || physical.pinned.any(home..home + handle.granules) {
                return None;
            }
            let epoch = segment.last_use(id, part.clone());
            if !claim.may_take(node) && epoch > claim.horizon {
                return None;
            }
            let whole = Victim {
                handle: page.handle,
                granules: handle.granules,
                home,
                segment: index,
                node: id,
                age: segment.history.freed_at(node.age),
                epoch,
                releasable: false,
            };
            found.push(End { whole, from: part.start - home, to: part.end - home });
            Some(())
        };
        end(idle.start, false);
        end(idle.end - 1, true);
    }
    found
}

/// As [`source::supply`], with an idle end at the start of what is missing, an idle start at its end, or both: as few as are
/// enough, and the longest of them.
pub(crate) fn supply<C: Iterator<Item = (u32, usize)>>(
    placement: &Placement,
    cached: impl Fn() -> C,
    victims: &[Victim],
    ends: &[End],
    terms: Terms,
) -> Option<Supply> {
    let (first, last) = (placement.missing.first()?, placement.missing.last()?);
    let whole: u64 = victims.iter().map(|victim| u64::from(victim.granules)).sum();
    let stored: u64 = cached().map(|(granules, count)| u64::from(granules) * count as u64).sum();
    let most = whole + stored + terms.budget;
    let tails = longest(ends.iter().filter(|end| end.from > 0), first, placement.before);
    let heads = longest(ends.iter().filter(|end| end.from == 0), last, placement.room);
    let tails = if first.start == granule_floor(placement.block.start) { tails } else { Vec::new() };
    let heads = if last.end == granule_ceil(placement.block.end) { heads } else { Vec::new() };
    let with = |tail: Option<&End>, head: Option<&End>| {
        let mut rest = placement.clone();
        let mut joined = Vec::new();
        if let Some(end) = head {
            let run = rest.missing.last_mut()?;
            run.end -= used(end, run);
            rest.room = 0;
            joined.push(Fill { at: run.end, granules: end.whole.granules, source: Source::Join(*end) });
        }
        if let Some(end) = tail {
            let run = rest.missing.first_mut()?;
            let len = used(end, run);
            // The other end may have left less of the run, so that more of this one's handle lies before it.
            if len == 0 || end.whole.granules - len > placement.before {
                return None;
            }
            run.start += len;
            let at = run.start - end.whole.granules;
            joined.push(Fill { at, granules: end.whole.granules, source: Source::Join(*end) });
        }
        rest.missing.retain(|run| !run.is_empty());
        if rest.missing() > most {
            return None;
        }
        let mut supply = source::supply(&rest, cached(), victims, terms)?;
        // Last, so that few calls can fail after them.
        supply.fills.append(&mut joined);
        Some(supply)
    };
    let one = tails.iter().map(|tail| (Some(*tail), None)).chain(heads.iter().map(|head| (None, Some(*head))));
    let two = tails.iter().flat_map(|tail| heads.iter().map(|head| (Some(*tail), Some(*head))));
    let two = two.filter(|(tail, head)| tail.map(|end| end.whole.handle) != head.map(|end| end.whole.handle));
    one.chain(two).find_map(|(tail, head)| with(tail, head))
}

/// Granules of an end that a run takes.
fn used(end: &End, run: &Range<u32>) -> u32 {
    end.len().min(run.end - run.start)
}

/// The ends that serve most of a run beside which `room` granules of addresses have no memory; of those that serve all of it the
/// shortest, of equals the longest idle.
fn longest<'a>(ends: impl Iterator<Item = &'a End>, run: &Range<u32>, room: u32) -> Vec<&'a End> {
    let mut fit: Vec<&End> = ends.filter(|end| end.whole.granules - used(end, run) <= room).collect();
    fit.sort_unstable_by_key(|end| {
        (Reverse(used(end, run)), end.len(), end.whole.age, end.whole.segment, end.whole.home)
    });
    fit.truncate(TRIES);
    fit
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::PhysicalAllocation;
    use crate::physical::Join;
    use crate::segment::Stamp;
    use crate::segment::nodes::Kind;
    use std::sync::Arc;

    const TERMS: Terms =
        Terms { budget: 0, handle_max: 32, moves: true, rechunk: true, step: 1, passed: 0, stale: None, shared: false };

    /// Ten granules of which the first, or the last, `idle` are.
    fn end(handle: u32, idle: u32, first: bool) -> End {
        let whole = Victim {
            handle,
            granules: 10,
            home: handle * 100,
            segment: 0,
            node: handle,
            age: handle.into(),
            epoch: 0,
            releasable: false,
        };
        if first { End { whole, from: 0, to: idle } } else { End { whole, from: 10 - idle, to: 10 } }
    }

    fn victim(handle: u32, granules: u32) -> Victim {
        Victim { granules, releasable: true, ..end(handle, 1, true).whole }
    }

    /// A block of `len` granules at 1000 without any memory.
    fn placement(len: u32, before: u32, room: u32) -> Placement {
        let (block, run) = (1000 * UNITS_PER_GRANULE..(1000 + len) * UNITS_PER_GRANULE, 1000..1000 + len);
        Placement { first: 1, block: block.clone(), claim: block, missing: Vec::from([run]), room, before }
    }

    fn plan(place: &Placement, victims: &[Victim], ends: &[End], budget: u64) -> Option<Vec<(u32, u32, Option<u32>)>> {
        let supply = supply(place, std::iter::empty, victims, ends, Terms { budget, ..TERMS })?;
        let joined = |source| if let Source::Join(end) = source { Some(end.whole.handle) } else { None };
        Some(supply.fills.iter().map(|fill| (fill.at, fill.granules, joined(fill.source))).collect())
    }

    #[test]
    fn one_end_where_that_is_enough_and_two_where_not() {
        let ends = [end(1, 4, false), end(2, 7, false), end(3, 6, true), end(4, 2, true)];
        // The end of 2 behind the block's start, three of its granules before it.
        assert_eq!(plan(&placement(8, 9, 9), &[], &ends, 1), Some(vec![(1007, 1, None), (997, 10, Some(2))]));
        assert_eq!(plan(&placement(13, 9, 9), &[], &ends, 0), Some(vec![(1007, 10, Some(3)), (997, 10, Some(2))]));
        assert_eq!(plan(&placement(14, 9, 9), &[], &ends, 0), None);
        // Whole handles between.
        let idle = [victim(5, 3), victim(6, 2)];
        let fills = [(1007, 3, None), (1010, 2, None), (1012, 10, Some(3)), (997, 10, Some(2))];
        assert_eq!(plan(&placement(18, 9, 9), &idle, &ends, 0), Some(fills.to_vec()));
    }

    #[test]
    fn the_shortest_end_that_is_longer_than_the_block() {
        let ends = [end(1, 9, false), end(2, 5, false), end(3, 8, false)];
        assert_eq!(plan(&placement(4, 9, 0), &[], &ends, 0), Some(vec![(994, 10, Some(2))]));
        let heads = [end(1, 9, true), end(2, 5, true)];
        assert_eq!(plan(&placement(4, 0, 6), &[], &heads, 0), Some(vec![(1000, 10, Some(2))]));
    }

    #[test]
    fn what_is_live_of_a_handle_needs_addresses_beside_the_block() {
        let ends = [end(1, 7, false), end(2, 6, true)];
        assert_eq!(plan(&placement(7, 2, 9), &[], &ends, 0), None);
        assert_eq!(plan(&placement(6, 2, 4), &[], &ends, 0), Some(vec![(1000, 10, Some(2))]));
        assert_eq!(plan(&placement(6, 2, 3), &[], &ends, 0), None);
        // Where the other end takes most of the run, less of this one lies in it, and more before it.
        let long = [end(1, 9, false), end(2, 9, true)];
        assert_eq!(plan(&placement(10, 1, 1), &[], &long, 0), None);
        assert_eq!(plan(&placement(10, 9, 1), &[], &long, 0), Some(vec![(1001, 10, Some(2)), (991, 10, Some(1))]));
        let mut mapped = placement(8, 9, 9);
        mapped.block.start -= UNITS_PER_GRANULE;
        assert_eq!(plan(&mapped, &[], &[end(1, 9, false)], 0), None, "memory lies before what is missing");
    }

    #[test]
    fn a_handle_is_joined_once() {
        let both = [end(1, 4, false), end(1, 5, true)];
        assert_eq!(plan(&placement(9, 9, 9), &[], &both, 0), None);
        assert_eq!(plan(&placement(9, 9, 9), &[], &both, 4).map(|fills| fills.len()), Some(2));
    }

    /// Handles of four granules side by side; of 2..9 and 10..11 the memory is free.
    fn world(stamp: Stamp) -> (Segment, Physical) {
        let mut segment = Segment::large(Arc::default(), Arc::default());
        let mut physical = Physical::default();
        segment.add_span(0, 16 * UNITS_PER_GRANULE);
        for handle in 0..4 {
            let id = physical.created(PhysicalAllocation(u64::from(handle) + 7), 4);
            physical.mapped_at(id, handle * 4);
        }
        for (range, free) in [(0..2, false), (2..9, true), (9..10, false), (10..11, true), (11..16, false)] {
            let first = segment.iter().find(|id| segment.nodes[*id].end() > range.start * UNITS_PER_GRANULE).unwrap();
            let units = range.start * UNITS_PER_GRANULE..range.end * UNITS_PER_GRANULE;
            let (node, _) = segment.carve(first, units, Kind::Busy);
            if free {
                segment.free(node, stamp, 0);
            } else {
                segment.nodes[node].kind = Kind::Live;
                segment.note_block(1);
            }
        }
        (segment, physical)
    }

    #[test]
    fn ends_are_the_idle_parts_of_partly_live_handles() {
        let (segment, mut physical) = world(Stamp { owner: 1, epoch: 5 });
        let found = |physical: &Physical, owner, horizon| {
            let mut found: Vec<_> = ends(0, &segment, physical, Claim { owner, horizon })
                .iter()
                .map(|end| (end.whole.handle, end.granules_at(end.whole.home), end.whole.epoch))
                .collect();
            found.sort_unstable_by_key(|one| one.1.start);
            found
        };
        // Handle 2 is idle as a whole, and 10..11 in the middle of handle 3.
        let all = [(1, 2..4, 5), (3, 8..9, 5)];
        assert_eq!(found(&physical, 1, 0), all);
        assert_eq!(found(&physical, 2, 5), all);
        assert_eq!(found(&physical, 2, 4), []);
        physical.pinned.set(0..1, true);
        assert_eq!(found(&physical, 1, 0), all[1..]);
        physical.pinned.set(0..1, false);
        let (handle, at, used) = (1, 100, 2..4);
        physical.joined(Join { handle, granules: 4, at, used, segment: 0, shadow: 1, home_segment: 0, lent: 2 });
        physical.check().unwrap();
        assert_eq!(found(&physical, 1, 0), all[1..], "it is joined already");
        physical.parted(0, 3);
        physical.check().unwrap();
        assert_eq!(found(&physical, 1, 0), all);
        let (mut private, physical) = world(Stamp::default());
        private.private = true;
        assert!(ends(0, &private, &physical, Claim { owner: 1, horizon: 9 }).is_empty());
    }
}
