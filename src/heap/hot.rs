//! The hot path: requests and frees that need no driver work.
//!
//! Each takes one lock, a segment's, and shares no line that anyone writes with the hot path of another segment. No driver
//! call, event, clock, hash map or heap allocation. What is here serves nearly all of them: a small block of a length that
//! its stream freed of late, by the thread that had the pool last. Nothing of it can fail, and it calls nothing, so that the
//! compiler need not save registers for it; anything else goes on in [`super::warm`].
#![forbid(unsafe_code)]

use super::inner::{Block, HUGE, HUGE_BYTES, Inner, LARGE, SegmentGuard, Slot};
use super::warm::{CLOSE_AFTER, LONGEST, units};
use crate::backend::StreamId;
use crate::error::Result;
use crate::segment::nodes::NodeId;
use crate::units::UNIT;
use std::sync::OnceLock;
use std::sync::atomic::Ordering::Relaxed;

impl Inner {
    /// Allocates. One lock, one look-up by length, one table entry.
    #[inline]
    pub(crate) fn alloc(&self, bytes: u64, align: u64, stream: StreamId) -> Result<Block> {
        if bytes > self.config.small_limit {
            return self.alloc_large(bytes, align, stream);
        }
        'warm: {
            if align != UNIT || !self.pools.none_recording() {
                break 'warm;
            }
            let Some(known) = self.streams.lasting(stream) else { break 'warm };
            let Some(slot) = self.slots.get(known.small() as usize).and_then(OnceLock::get) else { break 'warm };
            let Some(mut segment) = slot.segment.enter() else { break 'warm };
            let (len, slack) = units(bytes);
            let Some(found) = segment.take_kept(len, slack, known.slot()) else {
                return self.cut_small(slot, segment, bytes, stream, known);
            };
            return self.give(slot, segment, found, len, bytes);
        }
        self.alloc_warm(bytes, align, stream)
    }

    /// As [`Self::alloc`], for a large block: one that was freed just now.
    #[inline(never)]
    fn alloc_large(&self, bytes: u64, align: u64, stream: StreamId) -> Result<Block> {
        'warm: {
            if align != UNIT || !self.pools.none_recording() || bytes > LONGEST || self.planned.is_some() {
                break 'warm;
            }
            let Some(known) = self.streams.lasting(stream) else { break 'warm };
            let index = if bytes < HUGE_BYTES { LARGE } else { HUGE };
            let Some(slot) = self.slots.get(index as usize).and_then(OnceLock::get) else { break 'warm };
            let Some(mut segment) = slot.segment.enter() else { break 'warm };
            let (len, slack) = units(bytes);
            let Some(found) = segment.cut_again(len, slack, known.slot()) else {
                return self.cut_large(slot, segment, bytes, stream, known);
            };
            return self.give(slot, segment, found, len, bytes);
        }
        self.alloc_warm(bytes, align, stream)
    }

    /// Enters and counts a block that was made live: its node and first unit, and its length.
    #[inline(always)]
    fn give(
        &self,
        slot: &Slot,
        segment: SegmentGuard<'_>,
        (live, start): (NodeId, u32),
        len: u32,
        bytes: u64,
    ) -> Result<Block> {
        let address = self.space.enter(start, live);
        let block = Block { address, bytes: u64::from(len) * UNIT };
        if slot.tally.allocated(block.bytes, bytes) {
            return self.take_stock(slot, segment, block);
        }
        Ok(block)
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
        'warm: {
            let Some(place) = self.space.locate_first(address) else { break 'warm };
            let Some(slot) = self.slots.get(place.segment as usize).and_then(OnceLock::get) else { break 'warm };
            if self.shrinks_on_calls {
                break 'warm;
            }
            let Some(mut segment) = slot.segment.enter() else { break 'warm };
            let Some(entry) = place.entry() else { break 'warm };
            let live = || slot.tally.live().0 / UNIT;
            let Some(kept) = segment.keep(entry.load(Relaxed), epoch, live) else {
                return self.free_unkept(slot, segment, entry, address, epoch);
            };
            entry.store(0, Relaxed);
            let bytes = u64::from(kept.len) * UNIT;
            slot.tally.freed(bytes, bytes - u64::from(kept.slack));
            drop(segment);
            if kept.fresh >= CLOSE_AFTER {
                return self.close_after_free();
            }
            return Ok(());
        }
        self.free_warm(address, epoch)
    }
}
