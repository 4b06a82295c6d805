//! Executing a plan: the one place where handles are created, mapped, moved and released.
//!
//! A transaction claims its addresses under the segments' locks (nodes become `Busy`), works with only
//! the driver lock held, and then commits or gives everything back. When a driver call fails, handles
//! created for it are released, and handles that had moved stay where they are, free as before.
#![forbid(unsafe_code)]

use super::inner::{Block, Inner, SegmentGuard, Slow, Wanted};
use super::joins::{part_joined, part_left};
use crate::error::DriverError;
use crate::physical::{Handle, HandleId, Zombie};
use crate::plan::{Fill, Placement, Source, Supply, Victim};
use crate::segment::nodes::{Kind, NIL, NodeId};
use crate::segment::{Claim, Segment, Stamp};
use crate::units::{GRANULE, UNITS_PER_GRANULE};
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

/// How a transaction ended.
#[derive(Debug)]
pub(crate) enum Outcome {
    Done(Block),
    /// Another thread took something that the plan counted on: plan again.
    Stale,
    /// A driver call failed; everything is as before.
    Failed(DriverError),
}

/// A victim whose addresses are claimed, or a handle of which an idle end is.
#[derive(Debug, Clone)]
pub(super) struct Held {
    pub(super) victim: Victim,
    /// What is claimed.
    granules: Range<u32>,
    pub(super) node: NodeId,
    stamp: Stamp,
    /// What became of it.
    pub(super) done: bool,
}

impl Held {
    /// What a source takes from elsewhere; nothing is claimed yet.
    fn of(victim: Victim, granules: Range<u32>) -> Self {
        Self { victim, granules, node: NIL, stamp: Stamp::default(), done: false }
    }

    fn claim(&mut self, segment: &mut Segment, claim: Claim) -> bool {
        let claimed = claim_granules(segment, claim, self.victim.node, self.granules.clone());
        (self.node, self.stamp) = claimed.unwrap_or((NIL, Stamp::default()));
        claimed.is_some()
    }
}

impl Inner {
    /// Runs a plan. `segment` is the locked segment of the request, in which the placement was found.
    pub(crate) fn execute(
        &self,
        slow: &mut Slow,
        mut segment: SegmentGuard<'_>,
        wanted: &Wanted,
        placement: &Placement,
        supply: &Supply,
    ) -> Outcome {
        let claim = self.claim_elsewhere(wanted);
        // Growth past the block's end claims those addresses too, and so do whole handles that are joined.
        let mut range = placement.claim.clone();
        for fill in &supply.fills {
            range.start = range.start.min(fill.at * UNITS_PER_GRANULE);
            range.end = range.end.max((fill.at + fill.granules) * UNITS_PER_GRANULE);
        }
        let (target, stamp) = segment.carve(placement.first, range.clone(), Kind::Busy);
        let whole = |victim: Victim| Held::of(victim, victim.home..victim.home + victim.granules);
        let taken = supply.fills.iter().filter_map(|fill| match fill.source {
            Source::Move(victim) => Some(whole(victim)),
            Source::Join(end) => Some(Held::of(end.whole, end.granules_at(end.whole.home))),
            Source::Cached | Source::Create => None,
        });
        let mut held: Vec<Held> = supply.release.iter().copied().map(whole).chain(taken).collect();
        let mut stale = false;
        for one in held.iter_mut().filter(|one| one.victim.segment == wanted.segment) {
            stale |= !one.claim(&mut segment, claim);
        }
        drop(segment);
        for one in held.iter_mut().filter(|one| one.victim.segment != wanted.segment) {
            stale |= !one.claim(&mut self.segment(one.victim.segment), claim);
        }
        held.retain(|one| one.node != NIL);
        let mut created = Vec::new();
        let moves = supply.fills.iter().any(|fill| matches!(fill.source, Source::Move(_) | Source::Join(_)));
        let _range = self.nvtx.range(if moves { c"xseg move" } else { c"xseg grow" });
        let worked = if stale { Ok(()) } else { self.work(slow, wanted, supply, &mut held, &mut created) };
        if stale || worked.is_err() {
            for id in created {
                self.destroy_handle(slow, id);
            }
            self.undo_joins(slow);
        }
        for one in &held {
            self.settle(slow, one);
        }
        // Memory moved here is as unproven as the latest of its stamps.
        let latest = held.iter().filter(|one| one.done).map(|one| one.stamp.epoch).max().unwrap_or(0).max(stamp.epoch);
        let stamp = Stamp { owner: wanted.stream.slot, epoch: latest };
        let passed = self.epochs.passed();
        let mut segment = self.segment(wanted.segment);
        if stale || worked.is_err() {
            for node in part_left(slow, &mut segment, target) {
                segment.restore(node, stamp, passed, |granule| slow.physical.mapped.contains(granule));
            }
            return worked.err().map_or(Outcome::Stale, Outcome::Failed);
        }
        let Some(mut node) = part_joined(slow, &mut segment, target) else { return Outcome::Stale };
        let (start, end) = (segment.nodes[node].start, segment.nodes[node].end());
        if placement.block.start > start {
            let rest = segment.split_off(node, placement.block.start - start);
            segment.free(node, stamp, passed);
            node = rest;
        }
        if placement.block.end < end {
            let rest = segment.split_off(node, placement.block.end - placement.block.start);
            segment.free(rest, stamp, passed);
        }
        segment.nodes[node].kind = Kind::Live;
        segment.note_block(wanted.len);
        Outcome::Done(self.hand_out(self.slot(wanted.segment), &mut segment, node, wanted))
    }

    /// The driver calls of a plan, in order; on failure `created` holds what must go.
    fn work(
        &self,
        slow: &mut Slow,
        wanted: &Wanted,
        supply: &Supply,
        held: &mut [Held],
        created: &mut Vec<HandleId>,
    ) -> Result<(), DriverError> {
        for one in held.iter_mut().filter(|one| supply.release.contains(&one.victim)) {
            self.unmap_home(slow, &one.victim)?;
            one.done = true;
            self.release_handle(slow, one.victim.handle)?;
            self.counters.handles_rechunked.fetch_add(1, Relaxed);
            self.counters.bytes_rechunked.fetch_add(u64::from(one.victim.granules) * GRANULE, Relaxed);
        }
        for &granules in &supply.drop_cached {
            if let Some(id) = slow.physical.take_cached(granules) {
                self.release_handle(slow, id)?;
            }
        }
        for fill in &supply.fills {
            match fill.source {
                Source::Cached => {
                    let id = slow.physical.take_cached(fill.granules);
                    let id =
                        id.ok_or_else(|| DriverError::new(crate::error::DriverCall::Map, "the cached handle is gone"))?;
                    if let Err(error) = self.map_handle(slow, id, fill, wanted.segment) {
                        // Else it is cached when that mapping is gone.
                        if slow.physical.handle(id).is_some_and(|handle| handle.zombies == 0) {
                            slow.physical.put_cached(id);
                        }
                        return Err(error);
                    }
                }
                Source::Create => {
                    let id = self.create_handle(slow, fill.granules)?;
                    created.push(id);
                    self.map_handle(slow, id, fill, wanted.segment)?;
                }
                Source::Move(victim) => {
                    let one = held.iter_mut().find(|one| one.victim == victim && !one.done);
                    let one =
                        one.ok_or_else(|| DriverError::new(crate::error::DriverCall::Map, "a victim is missing"))?;
                    self.move_handle(slow, one, fill, wanted.segment)?;
                }
                Source::Join(end) => {
                    let one = held.iter_mut().find(|one| one.victim == end.whole && !one.done);
                    let one = one
                        .ok_or_else(|| DriverError::new(crate::error::DriverCall::Map, "a handle's end is missing"))?;
                    self.join_handle(slow, one, &end, fill.at, wanted.segment)?;
                }
            }
        }
        Ok(())
    }

    /// Creates a handle, within the limit.
    pub(crate) fn create_handle(&self, slow: &mut Slow, granules: u32) -> Result<HandleId, DriverError> {
        let bytes = u64::from(granules) * GRANULE;
        debug_assert!(
            slow.physical.reserved().saturating_add(bytes) <= slow.limit,
            "I3: the limit is respected exactly"
        );
        let token = self.driver.create(bytes)?;
        self.counters.bytes_created.fetch_add(bytes, Relaxed);
        Ok(slow.physical.created(token, granules))
    }

    pub(super) fn token(slow: &Slow, id: HandleId) -> (crate::backend::PhysicalAllocation, u64) {
        let handle = slow.physical.handle(id);
        handle.map_or((crate::backend::PhysicalAllocation(0), 0), |h| (h.token, u64::from(h.granules) * GRANULE))
    }

    /// Maps an unmapped handle for blocks of a segment to use.
    fn map_handle(&self, slow: &mut Slow, id: HandleId, fill: &Fill, segment: u16) -> Result<(), DriverError> {
        let (token, bytes) = Self::token(slow, id);
        let mapped = self.driver.map(self.space.address(fill.at * UNITS_PER_GRANULE), token, bytes);
        if mapped.is_err() {
            self.note_left(slow, id, fill.at, segment);
            return mapped;
        }
        slow.physical.mapped_at(id, fill.at);
        Ok(())
    }

    /// Notes what a refused map or move has left mapped, as undoing it was refused too: nobody used it, and it may not be
    /// accessible. It is unmapped with the zombies.
    fn note_left(&self, slow: &mut Slow, handle: HandleId, at: u32, segment: u16) {
        if self.driver.is_mapped(self.space.address(at * UNITS_PER_GRANULE)) {
            let granules = slow.physical.handle(handle).map_or(0, |handle| handle.granules);
            slow.physical.stillborn(Zombie { handle, at, granules, epoch: 0, segment, node: NIL });
        }
    }

    /// Moves an idle handle to a segment: at once where its use has passed, else by a second mapping.
    fn move_handle(&self, slow: &mut Slow, one: &mut Held, fill: &Fill, segment: u16) -> Result<(), DriverError> {
        let victim = one.victim;
        let (token, bytes) = Self::token(slow, victim.handle);
        let from = self.space.address(victim.home * UNITS_PER_GRANULE);
        let to = self.space.address(fill.at * UNITS_PER_GRANULE);
        let at_once = one.stamp.epoch <= self.epochs.passed();
        let moved =
            if at_once { self.driver.relocate(from, to, token, bytes) } else { self.driver.map(to, token, bytes) };
        if moved.is_err() {
            self.note_left(slow, victim.handle, fill.at, segment);
            return moved;
        }
        if at_once {
            slow.physical.unmapped(victim.home..victim.home + victim.granules);
        } else {
            slow.physical.left_behind(Zombie {
                handle: victim.handle,
                at: victim.home,
                granules: victim.granules,
                epoch: one.stamp.epoch,
                segment: victim.segment,
                node: one.node,
            });
        }
        slow.physical.mapped_at(victim.handle, fill.at);
        one.done = true;
        self.counters.handles_moved.fetch_add(1, Relaxed);
        self.counters.bytes_moved.fetch_add(bytes, Relaxed);
        Ok(())
    }

    /// Unmaps a handle whose use has passed from its home.
    pub(crate) fn unmap_home(&self, slow: &mut Slow, victim: &Victim) -> Result<(), DriverError> {
        let (_, bytes) = Self::token(slow, victim.handle);
        self.driver.unmap(self.space.address(victim.home * UNITS_PER_GRANULE), bytes)?;
        slow.physical.unmapped(victim.home..victim.home + victim.granules);
        slow.physical.take_home(victim.handle);
        Ok(())
    }

    /// Releases an unmapped handle; if the driver refuses, it goes to the cache.
    pub(crate) fn release_handle(&self, slow: &mut Slow, id: HandleId) -> Result<(), DriverError> {
        let (token, bytes) = Self::token(slow, id);
        match self.driver.release(token, bytes) {
            Ok(()) => {
                slow.physical.released(id);
                Ok(())
            }
            Err(error) => {
                slow.physical.put_cached(id);
                Err(error)
            }
        }
    }

    /// Takes back a handle that was created for a transaction that failed.
    fn destroy_handle(&self, slow: &mut Slow, id: HandleId) {
        let (_, bytes) = Self::token(slow, id);
        let Some(&Handle { home, zombies, .. }) = slow.physical.handle(id) else { return };
        if zombies > 0 {
            // It goes to the cache with its last mapping.
            return;
        }
        if let Some(home) = home {
            // A refusal here leaves the handle mapped: it stays with the heap as free memory.
            if self.driver.unmap(self.space.address(home * UNITS_PER_GRANULE), bytes).is_err() {
                return;
            }
            let granules = (bytes / GRANULE) as u32;
            slow.physical.unmapped(home..home + granules);
            slow.physical.take_home(id);
        }
        // A refusal leaves it in the cache, for the next request.
        let _ = self.release_handle(slow, id);
    }

    /// Gives a victim's addresses their new state.
    fn settle(&self, slow: &Slow, one: &Held) {
        let mut segment = self.segment(one.victim.segment);
        if slow.physical.zombie.contains(one.granules.start) {
            segment.nodes[one.node].kind = Kind::Zombie;
            return;
        }
        if slow.physical.lent.contains(one.granules.start) {
            segment.set_aside(one.node, Kind::Lent);
            return;
        }
        segment.restore(one.node, one.stamp, self.epochs.passed(), |granule| slow.physical.mapped.contains(granule));
    }

    /// Unmaps zombies, and imports that were ended, whose use has passed.
    pub(crate) fn reap(&self, slow: &mut Slow) {
        let passed = self.epochs.passed();
        self.end_imports(slow, passed);
        let mut index = 0;
        while index < slow.physical.zombies.len() {
            let zombie = slow.physical.zombies[index];
            let bytes = u64::from(zombie.granules) * GRANULE;
            if zombie.epoch > passed
                || self.driver.unmap(self.space.address(zombie.at * UNITS_PER_GRANULE), bytes).is_err()
            {
                index += 1;
                continue;
            }
            slow.physical.zombies.swap_remove(index);
            slow.physical.buried(&zombie);
            self.segment(zombie.segment).make_unmapped(zombie.node);
        }
    }
}

/// Claims the addresses of a victim, if they are still free for the claim.
pub(crate) fn claim_victim(segment: &mut Segment, claim: Claim, victim: &Victim) -> Option<(NodeId, Stamp)> {
    claim_granules(segment, claim, victim.node, victim.home..victim.home + victim.granules)
}

/// Claims granules that a plan saw in the free node `seen`.
fn claim_granules(segment: &mut Segment, claim: Claim, seen: NodeId, granules: Range<u32>) -> Option<(NodeId, Stamp)> {
    let node = &segment.nodes[seen];
    let range = granules.start * UNITS_PER_GRANULE..granules.end * UNITS_PER_GRANULE;
    let first = if node.kind == Kind::Free && node.start <= range.start && node.end() >= range.end {
        seen
    } else {
        // An earlier claim may have cut the node that the plan saw.
        segment.free_nodes(UNITS_PER_GRANULE).find(|id| {
            let node = &segment.nodes[*id];
            node.start <= range.start && node.end() >= range.end
        })?
    };
    let epoch = segment.last_use(first, granules);
    if !claim.may_take(&segment.nodes[first]) && epoch > claim.horizon {
        return None;
    }
    let (node, stamp) = segment.carve(first, range, Kind::Busy);
    Some((node, Stamp { epoch, ..stamp }))
}
