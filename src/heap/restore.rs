//! Blocks of capture pools that live again where they lay, for checkpoints of a pool.
#![forbid(unsafe_code)]

use super::captures::PoolId;
use super::inner::Inner;
use crate::backend::StreamId;
use crate::error::{Error, Result};
use crate::segment::nodes::{Kind, NIL};
use crate::units::{GRANULE, UNIT};

impl Inner {
    /// Makes a block of a capture pool live again at its place, all of which is free by now.
    pub(crate) fn restore_block(&self, pool: PoolId, address: u64, sizes: (u64, u64), stream: StreamId) -> Result<()> {
        let (requested, bytes) = sizes;
        let refused = |why: &str| {
            Error::InvalidArgument(format!("a block of {bytes} bytes at {address:#x} cannot live again: {why}"))
        };
        // Rounding takes a granule at most (`alloc_contiguous`), and a node has 32 bits for it.
        let rounded = bytes.checked_sub(requested);
        if bytes == 0 || !bytes.is_multiple_of(UNIT) || rounded.is_none_or(|rounded| rounded > GRANULE) {
            return Err(refused("no block has these sizes"));
        }
        let place = self.space.locate(address).filter(|place| place.entry().is_some());
        let place = place.ok_or_else(|| refused("it is outside of the heap"))?;
        let mut wanted = self.wanted_of(bytes, UNIT, stream, None)?;
        (wanted.bytes, wanted.segment, wanted.pool) = (requested, place.segment, true);
        let mut segment = self.segment(place.segment);
        // While the segment is private the pool has it, and its memory stays (I11).
        if !segment.private || self.pools.owner(place.segment).is_none_or(|(owner, _)| owner != pool) {
            return Err(refused("the capture pool is gone, or has other memory"));
        }
        // Units are counted in 32 bits, which a length of the caller's may pass.
        let end = place.unit().checked_add(wanted.len).ok_or_else(|| refused("the pool has no addresses there"))?;
        let range = place.unit()..end;
        let claim = self.claim(wanted.stream);
        let holds = |id: &u32| (segment.nodes[*id].start..segment.nodes[*id].end()).contains(&range.start);
        let first = segment.iter().find(holds).ok_or_else(|| refused("the pool has no addresses there"))?;
        let mut id = first;
        loop {
            let node = &segment.nodes[id];
            if node.kind != Kind::Free || !claim.may_take(node) {
                return Err(refused("not all of it is free for its stream"));
            }
            if node.end() >= range.end {
                break;
            }
            id = node.next;
            if id == NIL {
                return Err(refused("the pool has no addresses there"));
            }
        }
        let (live, _) = segment.carve(first, range, Kind::Live);
        segment.note_block(wanted.len);
        self.hand_out(self.slot(wanted.segment), &mut segment, live, &wanted);
        Ok(())
    }
}
