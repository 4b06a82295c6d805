//! Executing a plan: the one place where handles are created, mapped, moved and released.
//!
//! A transaction claims its addresses under the segments' locks (nodes become `Busy`), works with only
//! the driver lock held, and then commits or gives everything back. When a driver call fails, handles
//! created for it are released, and handles that had moved stay where they are, free as before.
#![forbid(unsafe_code)]

use super::inner::{Block, Inner, SegmentGuard, Slow, Wanted};
use crate::error::DriverError;
use crate::physical::{HandleId, Zombie};
use crate::plan::{Fill, Placement, Source, Supply, Victim};
use crate::segment::nodes::{Kind, NodeId};
use crate::segment::{Claim, Segment, Stamp};
use crate::units::{GRANULE, UNITS_PER_GRANULE};
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

/// A victim whose addresses are claimed.
#[derive(Debug, Clone, Copy)]
struct Held {
    victim: Victim,
    node: NodeId,
    stamp: Stamp,
    /// What became of it.
    done: bool,
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
        // Growth past the block's end claims those addresses too.
        let mut range = placement.claim.clone();
        for fill in &supply.fills {
            range.end = range.end.max((fill.at + fill.granules) * UNITS_PER_GRANULE);
        }
        let (target, stamp) = segment.carve(placement.first, range.clone(), Kind::Busy);
        let moved = supply.fills.iter().filter_map(|fill| match fill.source {
            Source::Move(victim) => Some(victim),
            _ => None,
        });
        let mut held: Vec<Held> = Vec::new();
        let mut stale = false;
        for victim in supply.release.iter().copied().chain(moved) {
            let claimed =
                if victim.segment == wanted.segment { claim_victim(&mut segment, claim, &victim) } else { None };
            match claimed {
                Some((node, stamp)) => held.push(Held { victim, node, stamp, done: false }),
                None if victim.segment != wanted.segment => {
                    held.push(Held { victim, node: 0, stamp: Stamp::default(), done: false });
                }
                None => stale = true,
            }
        }
        drop(segment);
        for one in held.iter_mut().filter(|one| one.node == 0) {
            match claim_victim(&mut self.segment(one.victim.segment), claim, &one.victim) {
                Some((node, stamp)) => (one.node, one.stamp) = (node, stamp),
                None => stale = true,
            }
        }
        held.retain(|one| one.node != 0);
        let mut created = Vec::new();
        let moves = supply.fills.iter().any(|fill| matches!(fill.source, Source::Move(_)));
        let _range = self.nvtx.range(if moves { c"xseg move" } else { c"xseg grow" });
        let worked = if stale { Ok(()) } else { self.work(slow, supply, &mut held, &mut created) };
        if stale || worked.is_err() {
            for id in created {
                self.destroy_handle(slow, id);
            }
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
            segment.restore(target, stamp, passed, |granule| slow.physical.mapped.contains(granule));
            return worked.err().map_or(Outcome::Stale, Outcome::Failed);
        }
        let mut node = target;
        if placement.block.start > range.start {
            let rest = segment.split_off(node, placement.block.start - range.start);
            segment.free(node, stamp, passed);
            node = rest;
        }
        if placement.block.end < range.end {
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
                    if let Err(error) = self.map_handle(slow, id, fill) {
                        slow.physical.put_cached(id);
                        return Err(error);
                    }
                }
                Source::Create => {
                    let id = self.create_handle(slow, fill.granules)?;
                    created.push(id);
                    self.map_handle(slow, id, fill)?;
                }
                Source::Move(victim) => {
                    let one = held.iter_mut().find(|one| one.victim == victim && !one.done);
                    let one =
                        one.ok_or_else(|| DriverError::new(crate::error::DriverCall::Map, "a victim is missing"))?;
                    self.move_handle(slow, one, fill)?;
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

    fn token(slow: &Slow, id: HandleId) -> (crate::backend::PhysicalAllocation, u64) {
        let handle = slow.physical.handle(id);
        handle.map_or((crate::backend::PhysicalAllocation(0), 0), |h| (h.token, u64::from(h.granules) * GRANULE))
    }

    /// Maps an unmapped handle for blocks to use.
    pub(crate) fn map_handle(&self, slow: &mut Slow, id: HandleId, fill: &Fill) -> Result<(), DriverError> {
        let (token, bytes) = Self::token(slow, id);
        self.driver.map(self.space.address(fill.at * UNITS_PER_GRANULE), token, bytes)?;
        slow.physical.mapped_at(id, fill.at);
        Ok(())
    }

    /// Moves an idle handle: at once where its use has passed, else by a second mapping.
    fn move_handle(&self, slow: &mut Slow, one: &mut Held, fill: &Fill) -> Result<(), DriverError> {
        let victim = one.victim;
        let (token, bytes) = Self::token(slow, victim.handle);
        let from = self.space.address(victim.home * UNITS_PER_GRANULE);
        let to = self.space.address(fill.at * UNITS_PER_GRANULE);
        if one.stamp.epoch <= self.epochs.passed() {
            self.driver.relocate(from, to, token, bytes)?;
            slow.physical.unmapped(victim.home..victim.home + victim.granules);
        } else {
            self.driver.map(to, token, bytes)?;
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
        let home = slow.physical.handle(id).and_then(|handle| handle.home);
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
        if slow.physical.zombie.contains(one.victim.home) {
            segment.nodes[one.node].kind = Kind::Zombie;
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
    let node = &segment.nodes[victim.node];
    let range = victim.home * UNITS_PER_GRANULE..(victim.home + victim.granules) * UNITS_PER_GRANULE;
    let first = if node.kind == Kind::Free && node.start <= range.start && node.end() >= range.end {
        victim.node
    } else {
        // An earlier claim may have cut the node that the plan saw.
        segment.free_nodes(UNITS_PER_GRANULE).find(|id| {
            let node = &segment.nodes[*id];
            node.start <= range.start && node.end() >= range.end
        })?
    };
    let epoch = segment.last_use(first, victim.home..victim.home + victim.granules);
    if !claim.may_take(&segment.nodes[first]) && epoch > claim.horizon {
        return None;
    }
    let (node, stamp) = segment.carve(first, range, Kind::Busy);
    Some((node, Stamp { epoch, ..stamp }))
}
