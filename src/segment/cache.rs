//! Blocks freed of late, kept as they are for the next request of the same length.
//!
//! A small pool's stream frees and asks for the same lengths again and again. Merging a freed block with its neighbours
//! and cutting it out anew costs several times what the rest of a pair costs, so a short block of the pool's own
//! stream stays a node of its own, in a list by length, newest first. That memory cannot serve another length, so
//! [`Segment::flush`] merges all of it as [`Segment::free`] would have: before anything but the hot path looks at the
//! segment, before a request that nothing fits, before a long piece of free memory is cut, and when it is more than a
//! share of what lives.
#![forbid(unsafe_code)]

use super::nodes::{Kind, NIL, NodeId};
use super::{Segment, Stamp};

/// Longest block that is kept, in units: what small pools serve.
const LONGEST: u32 = 2048;
/// Blocks below this length are short: asked for often, in few lengths. Long ones are merged by themselves when they are
/// too many. A multiple of 64.
const LONG: u32 = 256;
/// Most that is kept, of short and of long blocks each: this share of the pool's live units, or so many units.
const SHARE: u64 = 16;
const LEAST: u64 = 4096;
/// Free memory of this length and more, and at least twice the request's, is cut only when all that is kept has been
/// merged, in units.
const CUT: u32 = 1024;
const WORDS: usize = LONGEST as usize / 64 + 1;

/// See the module's text. Of one stream.
#[derive(Debug)]
pub(crate) struct Cache {
    /// Newest block of each length; nothing for segments that keep none.
    heads: Box<[NodeId]>,
    /// Lengths with a block.
    lengths: [u64; WORDS],
    short_units: u64,
    long_units: u64,
    /// Slot of the stream.
    owner: u16,
}

impl Cache {
    fn units(&mut self, len: u32) -> &mut u64 {
        if len < LONG { &mut self.short_units } else { &mut self.long_units }
    }
}

/// May free memory of `found` units be cut for `len` units while blocks are kept unmerged?
pub(crate) fn may_cut(found: u32, len: u32) -> bool {
    found < CUT.max(2 * len)
}

impl Default for Cache {
    fn default() -> Self {
        Self { heads: Box::default(), lengths: [0; WORDS], short_units: 0, long_units: 0, owner: 0 }
    }
}

impl Segment {
    /// Lets the segment, a small pool, keep freed blocks.
    pub(crate) fn with_cache(mut self) -> Self {
        self.cache.heads = vec![NIL; LONGEST as usize + 1].into_boxed_slice();
        self
    }

    /// A kept block of exactly this length, made live.
    #[inline]
    pub(crate) fn take_kept(&mut self, len: u32, owner: u16) -> Option<NodeId> {
        let head = self.cache.heads.get_mut(len as usize)?;
        let id = *head;
        if id == NIL || owner != self.cache.owner {
            return None;
        }
        let node = &mut self.nodes[id];
        *head = node.bin_next;
        if *head == NIL {
            self.cache.lengths[len as usize / 64] &= !(1 << (len % 64));
        }
        node.kind = Kind::Live;
        let epoch = node.epoch;
        *self.cache.units(len) -= u64::from(len);
        self.note_block(len);
        self.note_taken(len, epoch);
        Some(id)
    }

    /// Keeps a live block that its stream frees, if it may be kept.
    #[inline]
    pub(crate) fn keep(&mut self, id: NodeId, stamp: Stamp, passed: u32) -> bool {
        let node = &mut self.nodes[id];
        let len = node.len;
        let Some(head) = self.cache.heads.get_mut(len as usize) else { return false };
        if stamp.owner != self.cache.owner || self.private {
            return false;
        }
        debug_assert_eq!(node.kind, Kind::Live);
        node.kind = Kind::Cached;
        node.epoch = stamp.epoch;
        node.age = self.history.tick();
        node.bin_next = std::mem::replace(head, id);
        self.cache.lengths[len as usize / 64] |= 1 << (len % 64);
        *self.cache.units(len) += u64::from(len);
        self.live_blocks -= 1;
        self.note_freed(len, stamp.epoch);
        let (taken, freed) = self.history.churn();
        let most = (taken.saturating_sub(freed) / SHARE).max(LEAST);
        if self.cache.short_units > most {
            self.flush(passed);
        } else if self.cache.long_units > most {
            self.flush_from(LONG, passed);
        }
        true
    }

    /// The cache is this stream's from now on: what is kept for another one is merged.
    #[inline]
    pub(crate) fn keep_for(&mut self, owner: u16, passed: u32) {
        if self.cache.owner != owner {
            self.flush(passed);
            self.cache.owner = owner;
        }
    }

    /// Merges all that is kept with its neighbours.
    #[inline]
    pub(crate) fn flush(&mut self, passed: u32) {
        if self.cache.short_units + self.cache.long_units > 0 {
            self.flush_from(0, passed);
            self.cache.short_units = 0;
        }
    }

    /// Merges what is kept of `least` units and more, a multiple of 64.
    fn flush_from(&mut self, least: u32, passed: u32) {
        for word in least as usize / 64..WORDS {
            let mut lengths = std::mem::take(&mut self.cache.lengths[word]);
            while lengths != 0 {
                let len = word * 64 + lengths.trailing_zeros() as usize;
                lengths &= lengths - 1;
                let mut id = std::mem::replace(&mut self.cache.heads[len], NIL);
                while id != NIL {
                    let next = self.nodes[id].bin_next;
                    self.nodes[id].kind = Kind::Free;
                    self.coalesce(id, passed);
                    id = next;
                }
            }
        }
        self.cache.long_units = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A small pool with memory, all of it free.
    fn pool(granules: u32) -> Segment {
        let mut segment = Segment::default().with_cache();
        segment.add_span(0, granules << 12);
        let node = segment.heads[0];
        segment.nodes[node].kind = Kind::Busy;
        segment.free(node, Stamp { owner: 1, epoch: 0 }, 0);
        segment.keep_for(1, 0);
        segment
    }

    fn take(segment: &mut Segment, len: u32) -> NodeId {
        if let Some(id) = segment.take_kept(len, 1) {
            return id;
        }
        let claim = super::super::Claim { owner: 1, horizon: 0 };
        let found = segment.find_own(len, 1, claim, None).unwrap();
        segment.take(found, len, 1, 1)
    }

    #[test]
    fn kept_blocks_serve_their_length_and_are_merged_by_a_flush() {
        let mut segment = pool(1);
        let blocks = [1, 7, 7, 200].map(|len| take(&mut segment, len));
        let stamp = Stamp { owner: 1, epoch: 3 };
        assert!(blocks.iter().all(|id| segment.keep(*id, stamp, 0)));
        assert_eq!((segment.live_blocks, segment.fresh_units(3)), (0, 215));
        assert_eq!(take(&mut segment, 7), blocks[2], "the newest first");
        assert_eq!((segment.live_blocks, segment.fresh_units(3)), (1, 208));
        assert_eq!(segment.take_kept(8, 1), None);
        assert!(segment.keep(blocks[2], stamp, 0));
        segment.flush(0);
        segment.check().unwrap();
        let all: Vec<_> = segment.iter().map(|id| (segment.nodes[id].len, segment.stamp(id))).collect();
        assert_eq!(all, [(1 << 12, stamp)]);
    }

    #[test]
    fn only_the_pools_own_stream_keeps_and_takes() {
        let mut segment = pool(1);
        let (own, other) = (take(&mut segment, 4), take(&mut segment, 4));
        assert!(!segment.keep(other, Stamp { owner: 2, epoch: 1 }, 0));
        assert!(segment.keep(own, Stamp { owner: 1, epoch: 1 }, 0));
        assert_eq!(segment.take_kept(4, 2), None);
        segment.keep_for(2, 0);
        assert_eq!(segment.take_kept(4, 2), None, "what was kept for the other is merged");
        segment.free(other, Stamp { owner: 1, epoch: 1 }, 0);
        segment.check().unwrap();
        segment.private = true;
        let block = take(&mut segment, 4);
        segment.keep_for(1, 0);
        assert!(!segment.keep(block, Stamp { owner: 1, epoch: 1 }, 0), "a capture pool keeps nothing");
    }

    #[test]
    fn no_more_is_kept_than_a_granule_or_a_share() {
        let mut segment = pool(5);
        let short: Vec<NodeId> = (0..33).map(|_| take(&mut segment, 128)).collect();
        let long: Vec<NodeId> = (0..5).map(|_| take(&mut segment, 1024)).collect();
        let rest = segment.free_units();
        let stamp = Stamp { owner: 1, epoch: 1 };
        for id in short[..32].iter().chain(&long[..4]) {
            assert!(segment.keep(*id, stamp, 0));
        }
        assert_eq!(segment.free_units(), rest, "a granule of each is kept");
        assert!(segment.keep(long[4], stamp, 0));
        assert_eq!(segment.free_units(), rest + 5 * 1024, "more than that of long ones is merged");
        assert!(segment.keep(short[32], stamp, 0));
        assert_eq!(segment.longest_free(), 5 << 12, "more than that of short ones: everything");
        segment.check().unwrap();
    }
}
