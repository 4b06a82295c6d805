//! Joining the idle ends of partly live handles by a second mapping, and ending that.
#![forbid(unsafe_code)]

use super::execute::Held;
use super::inner::{FIRST_POOL, Inner, SegmentGuard, Slow, Wanted};
use super::ladder::{Found, PLACES};
use crate::error::{DriverError, Result};
use crate::physical::Join;
use crate::plan::place::{self, Places, Request};
use crate::plan::source::Terms;
use crate::plan::{End, Placement, Supply, Victim, join};
use crate::segment::Segment;
use crate::segment::nodes::{Kind, NIL, NodeId};
use crate::units::{GRANULE, UNITS_PER_GRANULE, granule_ceil, granule_floor};
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

impl Inner {
    /// Idle ends of handles of the large segments that the request may use at a second mapping. A segment that another thread is
    /// at work on is left out.
    fn ends(&self, slow: &Slow, own: &Segment, wanted: &Wanted) -> Vec<End> {
        let claim = self.claim_elsewhere(wanted);
        let mut found = join::ends(wanted.segment, own, &slow.physical, claim);
        for index in (0..FIRST_POOL).filter(|index| *index != wanted.segment) {
            if let Some(other) = self.try_segment(index) {
                found.extend(join::ends(index, &other, &slow.physical, claim));
            }
        }
        found
    }

    /// Finds addresses and memory for a large request with the idle ends of partly live handles.
    pub(super) fn plan_joined<'a>(
        &'a self,
        slow: &mut Slow,
        mut segment: SegmentGuard<'a>,
        wanted: &Wanted,
        cap: u64,
    ) -> Result<Found<'a>> {
        let terms = self.terms(slow, wanted, cap);
        let large = wanted.segment < FIRST_POOL && wanted.contiguous == 0;
        // What a capture takes stays where it is, and takes nothing with it (I11).
        if !self.config.joins || !large || wanted.pool || wanted.proof || !terms.moves || wanted.bytes > cap {
            return Ok(Found::Nothing);
        }
        let ends = self.ends(slow, &segment, wanted);
        let Some(longest) = ends.iter().map(|end| end.whole.granules).max() else { return Ok(Found::Nothing) };
        let request = Request { len: wanted.len, align: wanted.align, claim: self.claim(wanted.stream) };
        let mut beside = place::roomy(&segment, request, longest, longest);
        if beside.is_none() {
            drop(segment);
            let room = u64::from(2 * longest + 2) * GRANULE;
            // Where there are no more addresses the holes are left, and the error is that of memory.
            let _ = self.add_span(wanted.segment, wanted.bytes, wanted.bytes + room);
            segment = self.segment(wanted.segment);
            beside = place::roomy(&segment, request, longest, longest);
        }
        let places = Places::of(&mut segment, request);
        let victims = self.victims(slow, &segment, wanted, 0..0);
        for placement in places.iter().take(PLACES).chain(beside) {
            if let Some(supply) = with_ends(&placement, slow, &victims, &ends, terms) {
                return Ok(Found::Plan(segment, placement, supply));
            }
        }
        Ok(Found::Nothing)
    }

    /// Maps a handle a second time, for its idle end.
    pub(super) fn join_handle(
        &self,
        slow: &mut Slow,
        held: &mut Held,
        end: &End,
        at: u32,
        segment: u16,
    ) -> Result<(), DriverError> {
        let Victim { handle, granules, .. } = end.whole;
        let (token, bytes) = Self::token(slow, handle);
        let address = self.space.address(at * UNITS_PER_GRANULE);
        let mapped = self.driver.map(address, token, bytes);
        // What is not accessible and could not be unmapped is there all the same.
        if mapped.is_err() && !self.driver.is_mapped(address) {
            return mapped;
        }
        slow.physical.joined(Join {
            handle,
            granules,
            at,
            used: end.from..end.to,
            segment,
            shadow: NIL,
            home_segment: end.whole.segment,
            lent: held.node,
        });
        held.done = true;
        self.counters.handles_joined.fetch_add(1, Relaxed);
        self.counters.bytes_joined.fetch_add(u64::from(end.len()) * GRANULE, Relaxed);
        mapped
    }

    /// Undoes what a failed transaction joined: nobody used it, and it is unmapped with the zombies.
    pub(super) fn undo_joins(&self, slow: &mut Slow) {
        while let Some(index) = slow.physical.joins.iter().position(|join| join.shadow == NIL) {
            slow.physical.parted(index, 0);
            self.counters.joins_ended.fetch_add(1, Relaxed);
        }
    }

    /// Ends joins of which all that was used is free: the handle is one again at its home, and the second mapping a zombie. No
    /// driver call.
    pub(crate) fn end_joins(&self, slow: &mut Slow) {
        let passed = self.epochs.passed();
        let mut index = 0;
        while let Some(join) = slow.physical.joins.get(index) {
            let used = join.used_granules();
            let range = used.start * UNITS_PER_GRANULE..used.end * UNITS_PER_GRANULE;
            // Something outside may hold the address.
            let pinned = slow.physical.pinned.any(join.at..join.at + join.granules);
            let ended = if pinned { None } else { self.segment(join.segment).end_join(join.shadow, range, passed) };
            let Some(stamp) = ended else {
                index += 1;
                continue;
            };
            let join = slow.physical.parted(index, stamp.epoch);
            self.segment(join.home_segment).free(join.lent, stamp, passed);
            self.counters.joins_ended.fetch_add(1, Relaxed);
        }
    }
}

/// Memory for a placement that uses ends outside of it.
fn with_ends(placement: &Placement, slow: &Slow, victims: &[Victim], ends: &[End], terms: Terms) -> Option<Supply> {
    let keep = granule_floor(placement.claim.start)..granule_ceil(placement.claim.end);
    let apart = |range: Range<u32>| range.start >= keep.end || range.end <= keep.start;
    let victims: Vec<Victim> = victims.iter().filter(|one| apart(one.home..one.home + one.granules)).copied().collect();
    let ends: Vec<End> = ends.iter().filter(|end| apart(end.granules_at(end.whole.home))).copied().collect();
    join::supply(placement, || slow.physical.cached(), &victims, &ends, terms)
}

/// Parts from a transaction's range what lies of its second mappings beyond the end that is used there. What is left of the
/// range, if anything is.
pub(super) fn part_joined(slow: &mut Slow, segment: &mut Segment, target: NodeId) -> Option<NodeId> {
    let mut left = Some(target);
    let mut part = |range: Range<u32>| {
        let units = range.start * UNITS_PER_GRANULE..range.end * UNITS_PER_GRANULE;
        let (part, rest) = segment.part_off(left.unwrap_or(NIL), units, Kind::Lent);
        left = rest;
        part
    };
    for join in slow.physical.joins.iter_mut().filter(|join| join.shadow == NIL) {
        join.shadow = part(join.shadow_granules());
    }
    left
}

/// Parts from a failed transaction's range the mappings in it that are zombies: second ones that were undone, and what could not be
/// undone. The nodes that are left of the range.
pub(super) fn part_left(slow: &mut Slow, segment: &mut Segment, target: NodeId) -> Vec<NodeId> {
    let mut left = vec![target];
    for zombie in slow.physical.zombies.iter_mut().filter(|zombie| zombie.node == NIL) {
        let (start, end) = (zombie.at * UNITS_PER_GRANULE, (zombie.at + zombie.granules) * UNITS_PER_GRANULE);
        let holds = |id: &NodeId| segment.nodes[*id].start <= start && segment.nodes[*id].end() >= end;
        let Some(index) = left.iter().position(holds) else { continue };
        let mut id = left.swap_remove(index);
        if segment.nodes[id].start < start {
            left.push(id);
            id = segment.split_off(id, start - segment.nodes[id].start);
        }
        if segment.nodes[id].end() > end {
            left.push(segment.split_off(id, end - start));
        }
        segment.set_aside(id, Kind::Zombie);
        zombie.node = id;
    }
    left
}
