//! Requests and frees that need no driver work, but more than the hot path does: they wait for a lock, look for free
//! memory, cut and merge it, or are wrong.
//!
//! Nothing but this and [`super::hot`] sees what a segment has not merged ([`crate::segment::cache`],
//! [`crate::segment::last`]): [`Inner::segment`] merges that first.
#![forbid(unsafe_code)]

use super::inner::{Block, FIRST_POOL, HUGE, Inner, LARGE, SegmentGuard, Slot, Wanted};
use super::space::Located;
use super::streams::{Known, Stream};
use crate::backend::StreamId;
use crate::error::{Error, PointerFault, Result};
use crate::segment::cache::may_cut;
use crate::segment::nodes::{Kind, NodeId};
use crate::segment::{Segment, Stamp};
use crate::units::{MIB, UNIT};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Units that were freed in one epoch and lie free still, from which on the next free closes it.
pub(super) const CLOSE_AFTER: u64 = 64 * MIB / UNIT;

/// Longest request whose length in units has 32 bits.
pub(super) const LONGEST: u64 = u32::MAX as u64 * UNIT;

/// Length in units of a block for so many bytes, at most [`LONGEST`], and how many bytes it has more.
#[inline]
#[expect(clippy::manual_div_ceil, reason = "it cannot overflow, and `div_ceil` takes five instructions more")]
pub(super) const fn units(bytes: u64) -> (u32, u32) {
    let len = (bytes + UNIT - 1) / UNIT;
    let len = if len == 0 { 1 } else { len };
    (len as u32, (len * UNIT - bytes) as u32)
}

impl Inner {
    /// Allocates, whatever the request.
    #[inline(never)]
    pub(super) fn alloc_warm(&self, bytes: u64, align: u64, stream: StreamId) -> Result<Block> {
        let wanted = self.wanted(bytes, align, stream)?;
        if let Some(planned) = &self.planned
            && let Some(block) = self.follow(planned, &wanted)
        {
            return Ok(block);
        }
        let slot = self.slot(wanted.segment);
        let mut segment = slot.segment.lock();
        if let Some(block) = self.take_unmerged(slot, &mut segment, &wanted) {
            return Ok(block);
        }
        if bytes > self.config.small_limit {
            segment = self.settled(slot, segment);
        }
        match self.take_merged(slot, &mut segment, &wanted) {
            Some(block) => Ok(block),
            None => self.alloc_elsewhere(segment, &wanted),
        }
    }

    /// Allocates a small block, where none of its length is kept.
    #[inline(never)]
    pub(super) fn cut_small(
        &self,
        slot: &Slot,
        mut segment: SegmentGuard<'_>,
        bytes: u64,
        stream: StreamId,
        known: Known,
    ) -> Result<Block> {
        let (len, slack) = units(bytes);
        segment.keep_for(known.slot(), self.epochs.passed());
        if let Some((live, start)) = segment.cut_own(len, slack, known.slot()) {
            return Ok(self.enter(slot, live, start, len, bytes));
        }
        segment.flush(self.epochs.passed());
        self.cut_merged(slot, segment, bytes, known.named(stream), known.small())
    }

    /// Allocates a large block, where it is not what was freed just now.
    #[inline(never)]
    pub(super) fn cut_large<'a>(
        &'a self,
        slot: &'a Slot,
        mut segment: SegmentGuard<'a>,
        bytes: u64,
        stream: StreamId,
        known: Known,
    ) -> Result<Block> {
        segment = self.settled(slot, segment);
        segment.merge_last();
        let index = segment.index;
        self.cut_merged(slot, segment, bytes, known.named(stream), index)
    }

    /// The segment after a look at a few blocks that wait, if any do.
    #[inline]
    fn settled<'a>(&'a self, slot: &'a Slot, segment: SegmentGuard<'a>) -> SegmentGuard<'a> {
        if !self.any_pending.load(Relaxed) {
            return segment;
        }
        // A segment's lock comes after the driver lock.
        drop(segment);
        self.settle_few();
        slot.segment.lock()
    }

    /// Allocates a block on a unit of a segment in which nothing is kept unmerged.
    #[inline]
    fn cut_merged(
        &self,
        slot: &Slot,
        mut segment: SegmentGuard<'_>,
        bytes: u64,
        stream: Stream,
        index: u16,
    ) -> Result<Block> {
        let len = units(bytes).0;
        let wanted = Wanted { bytes, len, align: 1, segment: index, stream, pool: false, proof: false, contiguous: 0 };
        match self.take_fitting(slot, &mut segment, &wanted) {
            Some(block) => Ok(block),
            None => self.alloc_elsewhere(segment, &wanted),
        }
    }

    /// Serves a small request from the bins as they are, where that cuts no long piece.
    #[inline]
    fn cut_unflushed(&self, slot: &Slot, segment: &mut Segment, wanted: &Wanted) -> Option<Block> {
        let (len, owner) = (wanted.len, wanted.stream.slot);
        if wanted.align > 1 {
            let found = segment.find_own(len, wanted.align, self.claim(wanted.stream), None)?;
            let fits = may_cut(segment.nodes[found].len, len);
            let live = fits.then(|| segment.take(found, len, wanted.align, owner))?;
            return Some(self.hand_out(slot, segment, live, wanted));
        }
        let (live, start) = segment.cut_own(len, wanted.slack(), owner)?;
        Some(self.enter(slot, live, start, len, wanted.bytes))
    }

    /// Serves a request from what its segment has not merged.
    #[inline]
    fn take_unmerged(&self, slot: &Slot, segment: &mut Segment, wanted: &Wanted) -> Option<Block> {
        let (live, start) = match wanted.segment {
            _ if wanted.align > 1 => return None,
            FIRST_POOL.. => segment.take_kept(wanted.len, wanted.slack(), wanted.stream.slot)?,
            _ => segment.cut_again(wanted.len, wanted.slack(), wanted.stream.slot)?,
        };
        Some(self.enter(slot, live, start, wanted.len, wanted.bytes))
    }

    /// A block came into being that passes a ceiling of its segment's counts.
    #[cold]
    pub(super) fn take_stock(&self, slot: &Slot, segment: SegmentGuard<'_>, block: Block) -> Result<Block> {
        self.peaks.take_stock(&slot.tally, self.tallies());
        drop(segment);
        Ok(block)
    }

    /// Enters and counts a block that came into being: its node, first unit and length. The caller holds the segment's lock.
    #[inline]
    fn enter(&self, slot: &Slot, live: NodeId, start: u32, len: u32, requested: u64) -> Block {
        let block = Block { address: self.space.enter(start, live), bytes: u64::from(len) * UNIT };
        if slot.tally.allocated(block.bytes, requested) {
            self.peaks.take_stock(&slot.tally, self.tallies());
        }
        block
    }

    /// Serves a request that its segment does not, or says why nothing does.
    #[cold]
    fn alloc_elsewhere(&self, segment: SegmentGuard<'_>, wanted: &Wanted) -> Result<Block> {
        drop(segment);
        if let Some(block) = self.take_elsewhere(wanted) {
            return Ok(block);
        }
        // Off the hot path the driver is asked, where it was not: the handle may have been used again.
        let (backend, stream) = (self.driver.backend(), wanted.stream.id);
        if backend.known_stream_key(stream).is_some() {
            let key = backend.stream_key(stream)?;
            if self.own_stream(key, stream)?.slot != wanted.stream.slot {
                let align = u64::from(wanted.align) * UNIT;
                return self.alloc_slow(&self.wanted_of(wanted.bytes, align, stream, Some(key))?);
            }
        }
        self.alloc_slow(wanted)
    }

    /// Serves a request from the bins, as they are where that cuts no long piece, else with all that is kept merged.
    #[inline]
    fn take_merged(&self, slot: &Slot, segment: &mut Segment, wanted: &Wanted) -> Option<Block> {
        if wanted.segment >= FIRST_POOL {
            let passed = self.epochs.passed();
            segment.keep_for(wanted.stream.slot, passed);
            if let Some(block) = self.cut_unflushed(slot, segment, wanted) {
                return Some(block);
            }
            segment.flush(passed);
        } else {
            segment.merge_last();
        }
        self.take_fitting(slot, segment, wanted)
    }

    /// Serves a large request from free memory of the huge segment, or the other way round.
    pub(crate) fn take_elsewhere(&self, wanted: &Wanted) -> Option<Block> {
        let other = match wanted.segment {
            LARGE => HUGE,
            HUGE => LARGE,
            _ => return None,
        };
        // One that does not exist yet has nothing.
        let slot = self.slots[other as usize].get()?;
        let mut segment = slot.segment.lock();
        segment.merge_last();
        self.take_fitting(slot, &mut segment, wanted)
    }

    /// Serves a request from mapped free memory, if there is any at one place. All that the segment kept is merged.
    #[inline]
    pub(crate) fn take_fitting(&self, slot: &Slot, segment: &mut Segment, wanted: &Wanted) -> Option<Block> {
        let claim = self.claim(wanted.stream);
        let edges = (wanted.segment < FIRST_POOL).then_some(&*self.edges);
        let found = segment
            .find_own(wanted.len, wanted.align, claim, edges)
            .or_else(|| segment.find_passed(wanted.len, wanted.align, claim, edges))?;
        let node = &segment.nodes[found];
        let cut = edges.is_some() && node.owner == wanted.stream.slot && segment.index == wanted.segment;
        let cut = cut && node.start.is_multiple_of(wanted.align);
        let live = segment.take(found, wanted.len, wanted.align, wanted.stream.slot);
        if cut {
            segment.note_cut(live);
        } else {
            segment.merge_last();
        }
        Some(self.hand_out(slot, segment, live, wanted))
    }

    /// Enters a live node as a block of the client. It counts where it lies, as its free will: that may be the other large
    /// segment.
    #[inline]
    pub(crate) fn hand_out(&self, slot: &Slot, segment: &mut Segment, live: NodeId, wanted: &Wanted) -> Block {
        let node = &mut segment.nodes[live];
        (node.slack, node.owner) = (wanted.slack(), wanted.stream.slot);
        let start = node.start;
        self.enter(slot, live, start, wanted.len, wanted.bytes)
    }

    /// The live block that starts at an address: where, its segment locked, and its node. What the segment keeps
    /// unmerged stays so.
    #[inline]
    pub(crate) fn live_block(&self, address: u64) -> Result<(Located<'_>, SegmentGuard<'_>, NodeId)> {
        let Some(place) = self.space.locate(address) else { return Err(foreign(address)) };
        let segment = self.slot(place.segment).segment.lock();
        match place.block() {
            Some((_, id)) => Ok((place, segment, id)),
            None => Err(not_live(address, &segment, place.unit())),
        }
    }

    /// Frees a block, whatever it is.
    #[inline(never)]
    pub(super) fn free_warm(&self, address: u64, epoch: u32) -> Result<()> {
        let Some(place) = self.space.locate(address) else { return Err(foreign(address)) };
        let slot = self.slot(place.segment);
        let segment = slot.segment.lock();
        match place.entry() {
            Some(entry) => self.free_unkept(slot, segment, entry, address, epoch),
            None => Err(not_live(address, &segment, place.unit())),
        }
    }

    /// Frees a block that is not simply kept: a large one that was cut last, as if it had not been, or whatever it is.
    #[inline(never)]
    pub(super) fn free_unkept(
        &self,
        slot: &Slot,
        mut segment: SegmentGuard<'_>,
        entry: &AtomicU32,
        address: u64,
        epoch: u32,
    ) -> Result<()> {
        if !self.shrinks_on_calls
            && let Some(kept) = segment.take_back(entry.load(Relaxed), epoch, self.epochs.passed())
        {
            entry.store(0, Relaxed);
            let bytes = u64::from(kept.len) * UNIT;
            slot.tally.freed(bytes, bytes - u64::from(kept.slack));
            drop(segment);
            return if kept.fresh >= CLOSE_AFTER { self.close_after_free() } else { Ok(()) };
        }
        self.free_merging(slot, segment, address, epoch)
    }

    #[inline(never)]
    fn free_merging(&self, slot: &Slot, mut segment: SegmentGuard<'_>, address: u64, epoch: u32) -> Result<()> {
        let Some(place) = self.space.locate(address) else { return Err(foreign(address)) };
        let Some((entry, id)) = place.block() else { return Err(not_live(address, &segment, place.unit())) };
        entry.store(0, Relaxed);
        let node = &segment.nodes[id];
        let (bytes, slack, uses) = (u64::from(node.len) * UNIT, u64::from(node.slack), node.has_uses);
        let stamp = Stamp { owner: node.owner, epoch };
        slot.tally.freed(bytes, bytes - slack);
        if uses {
            segment.suspend(id);
            drop(segment);
            self.suspend(place.segment, id, place.unit(), stamp, None);
            return Ok(());
        }
        // Of earlier frees: memory that is used again by the next request needs no proof.
        let mut fresh = segment.fresh_units(epoch);
        let passed = self.epochs.passed();
        let small = place.segment >= FIRST_POOL;
        if !(small && segment.keep_or_trim(id, epoch, slot.tally.live().0 / UNIT, passed)) {
            segment.merge_last();
            segment.free(id, stamp, passed);
        }
        if self.shrinks_on_calls {
            fresh = segment.fresh_units(epoch);
        }
        drop(segment);
        if fresh >= CLOSE_AFTER { self.close_after_free() } else { Ok(()) }
    }

    /// Counts a free; the caller holds the segment's lock.
    #[inline]
    pub(crate) fn count_free(&self, place: &Located<'_>, bytes: u64, slack: u64) {
        self.slot(place.segment).tally.freed(bytes, bytes - slack);
    }

    /// Much was freed in the open epoch: closes it, and shrinks by the policies that look at it on calls.
    #[cold]
    pub(super) fn close_after_free(&self) -> Result<()> {
        // While a graph is captured none is closed, and every free would come here.
        if !self.pools.announced() {
            self.close_epoch();
            // What has passed meanwhile merges with other streams' memory from now on, and serves them where it lies.
            self.epochs.poll(self.driver.backend());
        }
        // Never by waiting: whoever holds the lock is at work on the same.
        if self.shrinks_on_calls
            && let Some(mut slow) = self.slow.try_lock()
            && !self.shut.load(Relaxed)
        {
            self.housekeep(&mut slow);
            self.shrink(&mut slow);
        }
        Ok(())
    }
}

/// An address outside the heap.
#[cold]
fn foreign(address: u64) -> Error {
    Error::InvalidPointer { address, why: PointerFault::Foreign }
}

/// An address that is no live block's start. A walk says why: only errors pay for it.
#[cold]
fn not_live(address: u64, segment: &Segment, unit: u32) -> Error {
    let covering = segment.iter().find(|id| (segment.nodes[*id].start..segment.nodes[*id].end()).contains(&unit));
    let why = match covering.map(|id| segment.nodes[id].kind) {
        Some(Kind::Live) => PointerFault::Interior,
        _ => PointerFault::Freed,
    };
    Error::InvalidPointer { address, why }
}
