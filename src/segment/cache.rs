//! Blocks freed of late, kept as they are for the next request of the same length.
//!
//! A small pool's stream frees and asks for the same lengths again and again. Merging a freed block with its neighbours
//! and cutting it out anew costs several times what the rest of a pair costs, so a short block of the pool's own
//! stream stays a node of its own, in a list by length, newest first. That memory cannot serve another length, so
//! [`Segment::flush`] merges all of it as [`Segment::free`] would have: before anything but the hot path looks at the
//! segment, before a request that nothing fits, before a long piece of free memory is cut, and when it is more than a
//! share of what lives.
#![forbid(unsafe_code)]

use super::nodes::{Kind, NIL, Node, NodeId};
use super::{BINS, SCAN_SMALL, Segment};

/// Longest block that is kept, in units: what small pools serve.
const LONGEST: u32 = 2048;
/// Blocks below this length are short: asked for often, in few lengths. Long ones are merged by themselves when they are
/// too many. A multiple of [`RUN`].
const LONG: u32 = 256;
/// Most that is kept, of short and of long blocks each: this share of the pool's live units, or so many units.
const SHARE: u64 = 16;
const LEAST: u64 = 4096;
/// Free memory of this length and more, and at least twice the request's, is cut only when all that is kept has been
/// merged, in units.
const CUT: u32 = 1024;
const RUN: usize = 64;
const RUNS: usize = LONGEST as usize / RUN + 1;
/// Lengths that have a list, in whole runs.
const LENGTHS: usize = RUNS * RUN;

/// Slot that no stream has, so that no block is this one's: also not one whose stream was retired, which is nobody's by 0.
const NOBODY: u16 = u16::MAX;

/// See the module's text. Of one stream.
#[derive(Debug)]
pub(crate) struct Cache {
    /// Newest block of each length.
    heads: Box<[NodeId; LENGTHS]>,
    /// Runs of [`RUN`] lengths of which some may have a block.
    runs: [bool; RUNS],
    /// Units in short and in long ones.
    units: [u64; 2],
    /// Slot of the stream; [`NOBODY`]: nothing is kept. So it is in large segments, which note when granules were last used
    /// as blocks are merged, and in capture pools.
    owner: u16,
}

/// A block that was freed and kept.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kept {
    pub(crate) len: u32,
    /// Bytes of it that the client had not asked for.
    pub(crate) slack: u32,
    /// Units freed in the same epoch before it that lie free still.
    pub(crate) fresh: u64,
}

/// Place of a length in [`Cache::units`].
#[inline]
const fn kind(len: u32) -> usize {
    (len >= LONG) as usize
}

/// Units that may be kept beside so many live ones.
#[inline]
fn share(live: u64) -> u64 {
    (live / SHARE).max(LEAST)
}

/// May free memory of `found` units be cut for `len` units while blocks are kept unmerged?
pub(crate) fn may_cut(found: u32, len: u32) -> bool {
    found < CUT.max(2 * len)
}

impl Default for Cache {
    fn default() -> Self {
        Self { heads: Box::new([NIL; LENGTHS]), runs: [false; RUNS], units: [0; 2], owner: NOBODY }
    }
}

impl Segment {
    /// A kept block of exactly this length, made live, and its first unit. `slack`: its bytes that nobody asked for.
    #[inline(always)]
    pub(crate) fn take_kept(&mut self, len: u32, slack: u32, owner: u16) -> Option<(NodeId, u32)> {
        let Cache { heads, units, owner: own, .. } = &mut self.cache;
        let head = heads.get_mut(len as usize)?;
        let id = *head;
        if id == NIL || owner != *own {
            return None;
        }
        let node = &mut self.nodes[id];
        *head = node.bin_next;
        node.kind = Kind::Live;
        node.slack = slack;
        let (start, epoch) = (node.start, node.epoch);
        units[kind(len)] -= u64::from(len);
        self.live_blocks += 1;
        self.note_taken(len, epoch);
        Some((id, start))
    }

    /// Keeps a live block that its stream frees, if it may be kept and no more is kept then than may be. With 0 for a
    /// block: nothing. `live`: the pool's live units, with the block's.
    #[inline(always)]
    pub(crate) fn keep(&mut self, id: NodeId, epoch: u32, live: impl Fn() -> u64) -> Option<Kept> {
        self.keep_within(id, epoch, |more, len| more <= LEAST || more <= share(live() - len))
    }

    /// Keeps a live block that its stream frees, if it may be kept, and merges what is kept where that is too much.
    /// `live`: the pool's live units, without the block's.
    pub(crate) fn keep_or_trim(&mut self, id: NodeId, epoch: u32, live: u64, passed: u32) -> bool {
        if self.keep_within(id, epoch, |_, _| true).is_none() {
            return false;
        }
        if self.cache.units[0] > share(live) {
            self.flush(passed);
        } else if self.cache.units[1] > share(live) {
            self.flush_from(LONG, passed);
        }
        true
    }

    /// Keeps a block, if what is kept then of its kind, and its length, may be.
    #[inline(always)]
    fn keep_within(&mut self, id: NodeId, epoch: u32, may: impl Fn(u64, u64) -> bool) -> Option<Kept> {
        let node = &mut self.nodes[id];
        let (len, slack) = (node.len, node.slack);
        let Cache { heads, runs, units, owner } = &mut self.cache;
        let head = heads.get_mut(len as usize)?;
        let units = &mut units[kind(len)];
        let more = *units + u64::from(len);
        if id == NIL || node.owner != *owner || node.has_uses || !may(more, u64::from(len)) {
            return None;
        }
        debug_assert_eq!(node.kind, Kind::Live);
        node.kind = Kind::Cached;
        node.epoch = epoch;
        node.age = self.history.tick();
        node.bin_next = std::mem::replace(head, id);
        runs[len as usize / RUN] = true;
        *units = more;
        self.live_blocks -= 1;
        let fresh = self.note_fresh(len, epoch);
        Some(Kept { len, slack, fresh })
    }

    /// The cache is this stream's from now on, or a capture pool's nobody's: what is kept for another one is merged.
    #[inline]
    pub(crate) fn keep_for(&mut self, owner: u16, passed: u32) {
        let owner = if self.private { NOBODY } else { owner };
        if self.cache.owner != owner {
            self.flush(passed);
            self.cache.owner = owner;
        }
    }

    /// Makes `len` units of the stream's free memory live, of the best fitting block unless all that is kept must be merged
    /// first: the block and its first unit. `slack`: its bytes that nobody asked for.
    #[inline]
    pub(crate) fn cut_own(&mut self, len: u32, slack: u32, owner: u16) -> Option<(NodeId, u32)> {
        let bins = self.bins.get_mut(owner as usize)?.as_mut()?;
        let id = bins.shortest(&self.nodes, len, SCAN_SMALL, BINS)?;
        if !may_cut(self.nodes[id].len, len) {
            return None;
        }
        bins.remove(&mut self.nodes, id);
        let node = &mut self.nodes[id];
        debug_assert!(node.kind == Kind::Free && node.owner == owner);
        let (start, epoch, age, found) = (node.start, node.epoch, node.age, node.len);
        (node.kind, node.len, node.slack) = (Kind::Live, len, slack);
        if found > len {
            let mut rest = Node::new(Kind::Free, start + len, found - len);
            (rest.epoch, rest.age, rest.owner) = (epoch, age, owner);
            let rest = self.nodes.insert_after(id, rest);
            bins.insert(&mut self.nodes, rest);
        }
        self.free_units -= u64::from(len);
        self.note_block(len);
        self.note_taken(len, epoch);
        Some((id, start))
    }

    /// Merges all that is kept with its neighbours.
    #[inline]
    pub(crate) fn flush(&mut self, passed: u32) {
        self.merge_last();
        if self.cache.units != [0; 2] {
            self.flush_from(0, passed);
            self.cache.units[0] = 0;
        }
    }

    /// Merges what is kept of `least` units and more, a multiple of [`RUN`].
    fn flush_from(&mut self, least: u32, passed: u32) {
        for run in least as usize / RUN..RUNS {
            if !std::mem::take(&mut self.cache.runs[run]) {
                continue;
            }
            // Which there are, without a branch for each length.
            let heads = &self.cache.heads[run * RUN..][..RUN];
            let mut lengths = heads.iter().rev().fold(0_u64, |set, head| set << 1 | u64::from(*head != NIL));
            while lengths != 0 {
                let head = &mut self.cache.heads[run * RUN + lengths.trailing_zeros() as usize];
                let mut id = std::mem::replace(head, NIL);
                while id != NIL {
                    let next = self.nodes[id].bin_next;
                    self.nodes[id].kind = Kind::Free;
                    self.coalesce::<false>(id, passed);
                    id = next;
                }
                lengths &= lengths - 1;
            }
        }
        self.cache.units[1] = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::super::Stamp;
    use super::*;

    /// A small pool with memory, all of it free.
    fn pool(granules: u32) -> Segment {
        let mut segment = Segment::default();
        segment.add_span(0, granules << 12);
        let node = segment.heads[0];
        segment.nodes[node].kind = Kind::Busy;
        segment.free(node, Stamp { owner: 1, epoch: 0 }, 0);
        segment.keep_for(1, 0);
        segment
    }

    fn take(segment: &mut Segment, len: u32) -> NodeId {
        if let Some((id, _)) = segment.take_kept(len, 0, 1) {
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
        assert!(blocks.iter().all(|id| segment.keep_or_trim(*id, 3, 0, 0)));
        assert_eq!((segment.live_blocks, segment.fresh_units(3)), (0, 215));
        assert_eq!(take(&mut segment, 7), blocks[2], "the newest first");
        assert_eq!((segment.live_blocks, segment.fresh_units(3)), (1, 208));
        assert_eq!(segment.take_kept(8, 0, 1), None);
        assert!(segment.keep(blocks[2], 3, || 7).is_some());
        segment.flush(0);
        segment.check().unwrap();
        let all: Vec<_> = segment.iter().map(|id| (segment.nodes[id].len, segment.stamp(id))).collect();
        assert_eq!(all, [(1 << 12, stamp)]);
    }

    #[test]
    fn only_the_pools_own_stream_keeps_and_takes() {
        let mut segment = pool(1);
        let (own, other) = (take(&mut segment, 4), take(&mut segment, 4));
        segment.nodes[other].owner = 2;
        assert!(segment.keep(other, 1, || 8).is_none() && !segment.keep_or_trim(other, 1, 4, 0));
        assert!(segment.keep(own, 1, || 8).is_some());
        assert_eq!(segment.take_kept(4, 0, 2), None);
        segment.keep_for(2, 0);
        assert_eq!(segment.take_kept(4, 0, 2), None, "what was kept for the other is merged");
        segment.free(other, Stamp { owner: 1, epoch: 1 }, 0);
        segment.check().unwrap();
        segment.private = true;
        let block = take(&mut segment, 4);
        segment.keep_for(1, 0);
        assert!(segment.keep(block, 1, || 4).is_none(), "a capture pool keeps nothing");
        segment.disown(1);
        assert!(segment.keep(block, 1, || 4).is_none(), "nor what a retired stream leaves there");
    }

    #[test]
    fn a_large_segment_keeps_nothing_also_of_retired_streams() {
        let mut segment = pool(1);
        segment.cache = Cache::default();
        let block = take(&mut segment, 4);
        assert!(segment.keep(block, 1, || 4).is_none());
        segment.disown(1);
        assert!(segment.keep(block, 1, || 4).is_none());
    }

    #[test]
    fn no_more_is_kept_than_a_granule_or_a_share() {
        let mut segment = pool(5);
        let short: Vec<NodeId> = (0..33).map(|_| take(&mut segment, 128)).collect();
        let long: Vec<NodeId> = (0..5).map(|_| take(&mut segment, 1024)).collect();
        let rest = segment.free_units();
        for id in short[..32].iter().chain(&long[..4]) {
            assert!(segment.keep(*id, 1, || 1 << 14).is_some());
        }
        assert_eq!(segment.free_units(), rest, "a granule of each is kept");
        assert!(segment.keep(long[4], 1, || 1024 + 4096 * 16).is_none(), "no more without trimming");
        assert!(segment.keep_or_trim(long[4], 1, 4096 * 16, 0));
        assert_eq!(segment.free_units(), rest + 5 * 1024, "more than that of long ones is merged");
        assert!(segment.keep_or_trim(short[32], 1, 0, 0));
        assert_eq!(segment.longest_free(), 5 << 12, "more than that of short ones: everything");
        segment.check().unwrap();
    }
}
