//! The hot path: requests and frees that need no driver work.
//!
//! Each takes one lock, a segment's, and shares no line that anyone writes with the hot path of another segment. No driver
//! call, event, clock, hash map or heap allocation. Nothing but this sees what a small pool keeps unmerged
//! ([`crate::segment::cache`]): [`Inner::segment`] merges that first.
#![forbid(unsafe_code)]

use super::inner::{Block, FIRST_POOL, HUGE, Inner, LARGE, SegmentGuard, Slot, Wanted};
use super::space::Located;
use crate::backend::StreamId;
use crate::config::Shrink;
use crate::error::{Error, PointerFault, Result};
use crate::segment::cache::may_cut;
use crate::segment::nodes::{Kind, NodeId};
use crate::segment::{Segment, Stamp};
use crate::units::{MIB, UNIT};
use std::sync::atomic::Ordering::Relaxed;

/// Bytes that were freed in one epoch and lie free still, from which on the next free closes it.
const CLOSE_AFTER: u64 = 64 * MIB;

impl Inner {
    /// Allocates. The hot path: one lock, one look-up by length, one table entry.
    #[inline]
    pub(crate) fn alloc(&self, bytes: u64, align: u64, stream: StreamId) -> Result<Block> {
        match self.alloc_kept(bytes, align, stream) {
            Ok(block) => Ok(block),
            Err(key) => self.alloc_cut(bytes, align, stream, key),
        }
    }

    /// Serves a small request from what its pool keeps: nothing of this can fail, so that anything unusual is left to
    /// [`Self::alloc_cut`], with the stream's identity if it was asked for.
    #[inline]
    fn alloc_kept(&self, bytes: u64, align: u64, stream: StreamId) -> Result<Block, Option<u64>> {
        if bytes > self.config.small_limit || align != UNIT || self.shut.load(Relaxed) || self.pools.any_recording() {
            return Err(None);
        }
        let key = self.stream_key(stream).map_err(|_| None)?;
        let stream = self.streams.known(key).ok_or(Some(key))?;
        let slot = self.slots[stream.small as usize].get().ok_or(Some(key))?;
        let len = bytes.max(1).div_ceil(UNIT) as u32;
        let mut segment = slot.segment.lock();
        let live = segment.take_kept(len, stream.slot).ok_or(Some(key))?;
        let rounded = u64::from(len) * UNIT;
        let node = &mut segment.nodes[live];
        node.slack = (rounded - bytes) as u32;
        let address = self.space.enter(node.start, live);
        self.count(slot, rounded, bytes);
        Ok(Block { address, bytes: rounded })
    }

    /// Counts a block that came into being; the caller holds the segment's lock.
    #[inline]
    fn count(&self, slot: &Slot, bytes: u64, requested: u64) {
        if slot.tally.allocated(bytes, requested) {
            self.peaks.take_stock(&slot.tally, self.tallies());
        }
    }

    /// Serves a request from the bins, or by the slow path.
    fn alloc_cut(&self, bytes: u64, align: u64, stream: StreamId, key: Option<u64>) -> Result<Block> {
        let wanted = self.wanted_of(bytes, align, stream, key)?;
        if let Some(planned) = &self.planned
            && let Some(block) = self.follow(planned, &wanted)
        {
            return Ok(block);
        }
        let slot = self.slot(wanted.segment);
        let mut segment = slot.segment.lock();
        if let Some(block) = self.take_uncached(&mut segment, &wanted) {
            return Ok(block);
        }
        drop(segment);
        if let Some(block) = self.take_elsewhere(&wanted) {
            return Ok(block);
        }
        // Off the hot path the driver is asked, where it was not: the handle may have been used again.
        let backend = self.driver.backend();
        if backend.known_stream_key(stream).is_some() {
            let key = backend.stream_key(stream)?;
            if self.streams.get(key, stream)?.slot != wanted.stream.slot {
                return self.alloc_slow(&self.wanted_of(bytes, align, stream, Some(key))?);
            }
        }
        self.alloc_slow(&wanted)
    }

    /// Serves a request from the bins, as they are where that cuts no long piece, else with all that is kept merged.
    #[inline]
    fn take_uncached(&self, segment: &mut Segment, wanted: &Wanted) -> Option<Block> {
        if wanted.segment >= FIRST_POOL {
            let (passed, claim) = (self.epochs.passed(), self.claim(wanted.stream));
            segment.keep_for(wanted.stream.slot, passed);
            let found = segment.find_own(wanted.len, wanted.align, claim, None);
            if let Some(id) = found.filter(|id| may_cut(segment.nodes[*id].len, wanted.len)) {
                let live = segment.take(id, wanted.len, wanted.align, wanted.stream.slot);
                return Some(self.hand_out(segment, live, wanted));
            }
            segment.flush(passed);
        }
        self.take_fitting(segment, wanted)
    }

    /// Serves a large request from free memory of the huge segment, or the other way round.
    pub(crate) fn take_elsewhere(&self, wanted: &Wanted) -> Option<Block> {
        let other = match wanted.segment {
            LARGE => HUGE,
            HUGE => LARGE,
            _ => return None,
        };
        // One that does not exist yet has nothing.
        let mut segment = self.slots[other as usize].get()?.segment.lock();
        self.take_fitting(&mut segment, wanted)
    }

    /// Serves a request from mapped free memory, if there is any at one place.
    #[inline]
    pub(crate) fn take_fitting(&self, segment: &mut Segment, wanted: &Wanted) -> Option<Block> {
        let claim = self.claim(wanted.stream);
        let edges = (wanted.segment < FIRST_POOL).then_some(&*self.edges);
        let found = segment
            .find_own(wanted.len, wanted.align, claim, edges)
            .or_else(|| segment.find_passed(wanted.len, wanted.align, claim, edges))?;
        let live = segment.take(found, wanted.len, wanted.align, wanted.stream.slot);
        Some(self.hand_out(segment, live, wanted))
    }

    /// Enters a live node as a block of the client.
    #[inline]
    pub(crate) fn hand_out(&self, segment: &mut Segment, live: NodeId, wanted: &Wanted) -> Block {
        let bytes = u64::from(wanted.len) * UNIT;
        let node = &mut segment.nodes[live];
        node.slack = (bytes - wanted.bytes) as u32;
        node.owner = wanted.stream.slot;
        let start = node.start;
        let address = self.space.enter(start, live);
        // The block may lie in the other large segment: it counts where it lies, as its free will.
        self.count(self.slot(segment.index), bytes, wanted.bytes);
        Block { address, bytes }
    }

    /// The live block that starts at an address: where, its segment locked, and its node. What the segment keeps
    /// unmerged stays so.
    #[inline]
    pub(crate) fn live_block(&self, address: u64) -> Result<(Located<'_>, SegmentGuard<'_>, NodeId)> {
        let Some(place) = self.space.locate(address) else {
            return Err(Error::InvalidPointer { address, why: PointerFault::Foreign });
        };
        let segment = self.slot(place.segment).segment.lock();
        match place.node() {
            0 => Err(Error::InvalidPointer { address, why: pointer_fault(&segment, place.unit) }),
            id => Ok((place, segment, id)),
        }
    }

    /// Frees by address. Never waits; one lock.
    pub(crate) fn free(&self, address: u64) -> Result<()> {
        self.free_at(address, self.epochs.open())
    }

    /// Frees a block that no work was ever queued on.
    pub(crate) fn free_as_new(&self, address: u64) -> Result<()> {
        self.free_at(address, 0)
    }

    #[inline]
    fn free_at(&self, address: u64, epoch: u32) -> Result<()> {
        let Some(place) = self.space.locate(address) else {
            return Err(Error::InvalidPointer { address, why: PointerFault::Foreign });
        };
        let slot = self.slot(place.segment);
        let mut segment = slot.segment.lock();
        let id = place.node();
        if id == 0 {
            return Err(Error::InvalidPointer { address, why: pointer_fault(&segment, place.unit) });
        }
        place.clear();
        let node = &segment.nodes[id];
        let bytes = u64::from(node.len) * UNIT;
        let stamp = Stamp { owner: node.owner, epoch };
        slot.tally.freed(bytes, bytes - u64::from(node.slack));
        if node.has_uses {
            segment.suspend(id);
            drop(segment);
            self.suspend(place.segment, id, place.unit, stamp, None);
            return Ok(());
        }
        // Of earlier frees: memory that is used again by the next request needs no proof.
        let mut fresh = segment.fresh_units(epoch);
        let passed = self.epochs.passed();
        if !segment.keep(id, stamp, passed) {
            segment.free(id, stamp, passed);
        }
        if self.shrinks_on_calls() {
            fresh = segment.fresh_units(epoch);
        }
        drop(segment);
        if fresh * UNIT >= CLOSE_AFTER {
            self.close_after_free();
        }
        Ok(())
    }

    /// Counts a free; the caller holds the segment's lock.
    #[inline]
    pub(crate) fn count_free(&self, place: &Located<'_>, bytes: u64, slack: u64) {
        self.slot(place.segment).tally.freed(bytes, bytes - slack);
    }

    /// The policy looks at what is idle after large frees.
    #[inline]
    fn shrinks_on_calls(&self) -> bool {
        matches!(self.config.shrink, Shrink::Idle(_) | Shrink::Watermark(_))
    }

    /// Much was freed in the open epoch: closes it, and shrinks by the policies that look at it on calls.
    #[cold]
    fn close_after_free(&self) {
        // While a graph is captured none is closed, and every free would come here.
        if !self.pools.announced() {
            self.close_epoch();
            // What has passed meanwhile merges with other streams' memory from now on, and serves them where it lies.
            self.epochs.poll(self.driver.backend());
        }
        // Never by waiting: whoever holds the lock is at work on the same.
        if self.shrinks_on_calls()
            && let Some(mut slow) = self.slow.try_lock()
            && !self.shut.load(Relaxed)
        {
            self.housekeep(&mut slow);
            self.shrink(&mut slow);
        }
    }
}

/// Why a unit is no live block's start. A walk: only errors pay for it.
#[cold]
fn pointer_fault(segment: &Segment, unit: u32) -> PointerFault {
    let covering = segment.iter().find(|id| (segment.nodes[*id].start..segment.nodes[*id].end()).contains(&unit));
    match covering.map(|id| segment.nodes[id].kind) {
        Some(Kind::Live) => PointerFault::Interior,
        _ => PointerFault::Freed,
    }
}
