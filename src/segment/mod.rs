//! A segment: address ranges cut into nodes, with its free blocks in bins.
//!
//! The segment knows which addresses are live, free, without memory or given away; which handle lies
//! behind an address is the page table's business ([`crate::physical`]). All methods are called with
//! the segment's lock held; none calls the driver.
#![forbid(unsafe_code)]

pub(crate) mod bins;
pub(crate) mod cache;
mod cut;
mod history;
mod last;
mod merge;
pub(crate) mod nodes;
pub(crate) mod spot;
mod survey;

use crate::edges::Edges;
use crate::units::{UNITS_PER_GRANULE, granule_ceil, granule_floor};
use crate::used::Used;
use bins::Bins;
use cache::Cache;
use history::younger;
use last::LastCut;
use nodes::{Kind, NIL, Node, NodeId, Nodes};
use std::ops::Range;
use std::sync::Arc;

pub(crate) use history::History;

/// Free blocks of one bin that a search looks at, in the large segments and in small pools, and bins that it goes through.
const SCAN: usize = 32;
const SCAN_SMALL: usize = 3;
const BINS: usize = 4;

/// Whose free memory a request may take.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Claim {
    /// Slot of the asking stream.
    pub(crate) owner: u16,
    /// Memory freed in this epoch or before is free for this stream, whoever freed it.
    pub(crate) horizon: u32,
}

impl Claim {
    /// May the claim take this free node (rule 1 of the brief, invariant I5)?
    pub(crate) fn may_take(self, node: &Node) -> bool {
        node.owner == self.owner || node.epoch <= self.horizon
    }
}

/// Stamp of memory that was freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Stamp {
    /// Slot of the stream whose order protects it; 0: nobody's.
    pub(crate) owner: u16,
    /// Epoch that was open at the free; 0: nothing to wait for.
    pub(crate) epoch: u32,
}

/// See the module's text.
#[derive(Debug, Default)]
pub(crate) struct Segment {
    pub(crate) nodes: Nodes,
    bins: Vec<Option<Box<Bins>>>,
    /// First node of each span.
    heads: Vec<NodeId>,
    /// Nodes that were without memory at some time, all that are among them.
    unmapped: Vec<NodeId>,
    /// Large segments share theirs.
    pub(crate) history: Arc<History>,
    /// Of large segments: when each granule was last used.
    used: Option<Arc<Used>>,
    /// Units in free nodes.
    free_units: u64,
    /// Units that were freed in the epoch `fresh_epoch` and lie free still: what closing it would prove.
    fresh_units: u64,
    fresh_epoch: u32,
    /// Free blocks of a small pool that are not merged yet; only the hot path sees them.
    cache: Cache,
    /// The last cut of a large segment, and whether it was taken back; only the hot path sees that.
    last: LastCut,
    /// Live blocks.
    pub(crate) live_blocks: u64,
    /// Its number in the heap.
    pub(crate) index: u16,
    /// It belongs to a capture pool: nothing in it is ever moved, released or given to others (I11).
    pub(crate) private: bool,
}

impl Segment {
    /// A large segment, with what it shares with the others.
    pub(crate) fn large(history: Arc<History>, used: Arc<Used>) -> Self {
        Self { history, used: Some(used), ..Self::default() }
    }

    pub(crate) fn numbered(self, index: u16) -> Self {
        Self { index, ..self }
    }

    /// Notes a block of `len` units that came into being.
    pub(crate) fn note_block(&mut self, len: u32) {
        self.live_blocks += 1;
        self.history.note_taken(len);
    }

    /// Notes a free of `len` units. What was freed in that epoch before and lies free still.
    #[inline]
    fn note_freed(&mut self, len: u32, epoch: u32) -> u64 {
        self.history.note_freed(len);
        self.note_fresh(len, epoch)
    }

    /// As [`Self::note_freed`], for memory that is kept for the next request: it counts as neither given nor given back.
    #[inline]
    fn note_fresh(&mut self, len: u32, epoch: u32) -> u64 {
        if epoch != self.fresh_epoch {
            (self.fresh_epoch, self.fresh_units) = (epoch, 0);
        }
        let fresh = self.fresh_units;
        self.fresh_units += u64::from(len);
        fresh
    }

    /// Notes that `len` units freed in `epoch` are in use again.
    fn note_taken(&mut self, len: u32, epoch: u32) {
        // A mask, since a branch on this is often mispredicted.
        let fresh = u64::from(len) & u64::from(epoch == self.fresh_epoch).wrapping_neg();
        self.fresh_units = self.fresh_units.saturating_sub(fresh);
    }

    /// Units freed in `epoch` that lie free still, unless they were merged with others and taken as those.
    pub(crate) fn fresh_units(&self, epoch: u32) -> u64 {
        if epoch == self.fresh_epoch { self.fresh_units } else { 0 }
    }

    /// Adds addresses without memory; they never merge with others.
    pub(crate) fn add_span(&mut self, start: u32, len: u32) {
        let id = self.nodes.insert(Node::new(Kind::Unmapped, start, len));
        self.heads.push(id);
        self.unmapped.push(id);
    }

    /// A node of each run of free and unmapped nodes that may hold `len` units and that `claim` may take; `None` where only
    /// a walk tells, since free neighbours of several streams are nodes of their own. Forgets what is mapped by now.
    pub(crate) fn run_seeds(&mut self, len: u32, claim: Claim) -> Option<Vec<NodeId>> {
        let nodes = &self.nodes;
        self.unmapped.retain(|id| nodes[*id].kind == Kind::Unmapped);
        self.unmapped.sort_unstable();
        self.unmapped.dedup();
        if self.bins.iter().flatten().count() > 1 {
            return None;
        }
        let mut seeds = self.unmapped.clone();
        seeds.extend(self.free_nodes(len).filter(|id| claim.may_take(&self.nodes[*id])));
        seeds.sort_unstable_by_key(|id| self.nodes[*id].start);
        Some(seeds)
    }

    /// Nodes in address order, span by span.
    pub(crate) fn iter(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.heads.iter().flat_map(move |&head| {
            let mut id = head;
            std::iter::from_fn(move || {
                let found = (id != NIL).then_some(id)?;
                id = self.nodes[found].next;
                Some(found)
            })
        })
    }

    /// Nodes without memory.
    pub(crate) fn unmapped_nodes(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.unmapped.iter().copied().filter(|id| self.nodes[*id].kind == Kind::Unmapped)
    }

    /// Units in free nodes.
    pub(crate) fn free_units(&self) -> u64 {
        self.free_units
    }

    /// Length of the longest free node, in units.
    pub(crate) fn longest_free(&self) -> u32 {
        self.bins.iter().flatten().map(|bins| bins.longest(&self.nodes)).max().unwrap_or(0)
    }

    #[inline]
    fn bin_insert(&mut self, id: NodeId) {
        let owner = self.nodes[id].owner as usize;
        if owner >= self.bins.len() {
            self.bins.resize_with(owner + 1, || None);
        }
        self.free_units += u64::from(self.nodes[id].len);
        self.bins[owner].get_or_insert_default().insert(&mut self.nodes, id);
    }

    #[inline]
    fn bin_remove(&mut self, id: NodeId) {
        self.free_units -= u64::from(self.nodes[id].len);
        if let Some(bins) = self.bins.get_mut(self.nodes[id].owner as usize).and_then(Option::as_mut) {
            bins.remove(&mut self.nodes, id);
        }
    }

    /// Best fitting free block of the claim's own stream. `align` in units, a power of two. With `edges`, of blocks
    /// about as long the one that opens least of handles that lie idle.
    #[inline]
    pub(crate) fn find_own(&self, len: u32, align: u32, claim: Claim, edges: Option<&Edges>) -> Option<NodeId> {
        self.find_in(claim.owner, len, align, claim, edges)
    }

    /// Best fitting free block of any other stream that the claim may take.
    pub(crate) fn find_passed(&self, len: u32, align: u32, claim: Claim, edges: Option<&Edges>) -> Option<NodeId> {
        (0..self.bins.len() as u16)
            .filter(|owner| *owner != claim.owner)
            .filter_map(|owner| self.find_in(owner, len, align, claim, edges))
            .min_by_key(|id| (self.nodes[*id].len, self.nodes[*id].start))
    }

    #[inline]
    fn find_in(&self, owner: u16, len: u32, align: u32, claim: Claim, edges: Option<&Edges>) -> Option<NodeId> {
        let bins = self.bins.get(owner as usize)?.as_ref()?;
        let fits = |node: &Node| (node.start.wrapping_neg() & (align - 1)) <= node.len - len && claim.may_take(node);
        let score = |node: &Node| match edges {
            Some(edges) => opened(edges, node, len),
            None => u64::from(node.len),
        };
        let scan = if edges.is_some() { SCAN } else { SCAN_SMALL };
        bins.best(&self.nodes, len, scan, BINS, fits, score).or_else(|| {
            if align > 1 { bins.best(&self.nodes, len.checked_add(align)?, scan, BINS, fits, score) } else { None }
        })
    }

    /// Makes `len` units of a free node live, from its first aligned unit.
    #[inline]
    pub(crate) fn take(&mut self, id: NodeId, len: u32, align: u32, owner: u16) -> NodeId {
        self.bin_remove(id);
        let node = &self.nodes[id];
        debug_assert!(node.kind == Kind::Free && node.len >= len);
        let (epoch, age, old_owner, start, end) = (node.epoch, node.age, node.owner, node.start, node.end());
        let at = start.next_multiple_of(align);
        let mut live = id;
        if at > start {
            self.nodes[id].len = at - start;
            self.bin_insert(id);
            live = self.nodes.insert_after(id, Node::new(Kind::Live, at, len));
        }
        let node = &mut self.nodes[live];
        node.kind = Kind::Live;
        node.len = len;
        node.owner = owner;
        if at + len < end {
            let mut rest = Node::new(Kind::Free, at + len, end - at - len);
            (rest.epoch, rest.age, rest.owner) = (epoch, age, old_owner);
            let rest = self.nodes.insert_after(live, rest);
            self.bin_insert(rest);
        }
        self.note_block(len);
        self.note_taken(len, epoch);
        live
    }

    /// Turns a live, pending or busy node into free memory and merges it with its neighbours.
    #[inline]
    pub(crate) fn free(&mut self, id: NodeId, stamp: Stamp, passed: u32) -> NodeId {
        let clock = self.history.tick();
        let node = &mut self.nodes[id];
        if node.kind == Kind::Live {
            self.live_blocks -= 1;
        }
        let (client, len) = (matches!(node.kind, Kind::Live | Kind::Pending), node.len);
        node.kind = Kind::Free;
        node.owner = stamp.owner;
        node.epoch = stamp.epoch;
        node.age = clock;
        node.has_uses = false;
        if client {
            self.note_freed(len, stamp.epoch);
        }
        self.note_used(id);
        self.coalesce::<true>(id, passed)
    }

    /// Notes when the granules of a free node were last used, in a large segment.
    #[inline]
    fn note_used(&self, id: NodeId) {
        if let Some(used) = &self.used {
            let node = &self.nodes[id];
            used.note(granule_floor(node.start)..granule_ceil(node.end()), node.epoch);
        }
    }

    /// A block with declared uses was freed: it waits for the streams that use it.
    pub(crate) fn suspend(&mut self, id: NodeId) {
        debug_assert_eq!(self.nodes[id].kind, Kind::Live);
        self.merge_last();
        self.nodes[id].kind = Kind::Pending;
        self.live_blocks -= 1;
    }

    /// Merges a free node that is in no bin with its free neighbours where the stamps allow, and bins it. `NEWEST`: nothing
    /// in the segment was freed after it.
    #[inline]
    fn coalesce<const NEWEST: bool>(&mut self, id: NodeId, passed: u32) -> NodeId {
        for neighbour in [self.nodes[id].prev, self.nodes[id].next] {
            if neighbour == NIL || self.nodes[neighbour].kind != Kind::Free {
                continue;
            }
            let (mine, other) = (self.stamp(id), self.stamp(neighbour));
            let Some(stamp) = merged(mine, other, passed) else { continue };
            self.bin_remove(neighbour);
            let (start, len, age) = {
                let node = &self.nodes[neighbour];
                (node.start, node.len, node.age)
            };
            self.absorb(id, neighbour);
            let node = &mut self.nodes[id];
            node.start = node.start.min(start);
            node.len += len;
            (node.owner, node.epoch) = (stamp.owner, stamp.epoch);
            if !NEWEST {
                node.age = younger(node.age, age);
            }
        }
        self.bin_insert(id);
        id
    }

    /// Unlinks `gone`, whose addresses `id` takes over.
    #[inline]
    fn absorb(&mut self, id: NodeId, gone: NodeId) {
        if self.nodes[gone].prev == NIL
            && let Some(head) = self.heads.iter_mut().find(|head| **head == gone)
        {
            *head = id;
        }
        self.nodes.unlink(gone);
    }

    pub(crate) fn stamp(&self, id: NodeId) -> Stamp {
        Stamp { owner: self.nodes[id].owner, epoch: self.nodes[id].epoch }
    }

    /// Free nodes of at least `len` units, whoever may take them.
    pub(crate) fn free_nodes(&self, len: u32) -> impl Iterator<Item = NodeId> + '_ {
        self.bins.iter().flatten().flat_map(move |bins| bins.at_least(&self.nodes, len))
    }

    /// Epoch of the last use of some granules of a free node: its stamp, or less where more is known.
    pub(crate) fn last_use(&self, id: NodeId, granules: Range<u32>) -> u32 {
        let epoch = self.nodes[id].epoch;
        self.used.as_ref().map_or(epoch, |used| used.latest(granules).min(epoch))
    }

    /// Everything that `owner` owns becomes nobody's: its order protects nothing any more.
    pub(crate) fn disown(&mut self, owner: u16) {
        let ids: Vec<NodeId> = self.iter().filter(|id| self.nodes[*id].owner == owner).collect();
        for id in ids {
            let free = self.nodes[id].kind == Kind::Free;
            if free {
                self.bin_remove(id);
            }
            self.nodes[id].owner = 0;
            if free {
                self.bin_insert(id);
            }
        }
    }
}

/// Stamp of two free neighbours as one block, if they may be one.
fn merged(a: Stamp, b: Stamp, passed: u32) -> Option<Stamp> {
    let later = if a.epoch >= b.epoch { a } else { b };
    let earlier = if a.epoch >= b.epoch { b } else { a };
    (a.owner == b.owner || earlier.epoch <= passed).then_some(later)
}

/// What taking `len` units from a free block's start costs in tightness: four times the units of idle handles that
/// become partly live, and what is left of the block. Nothing where the block is taken whole.
fn opened(edges: &Edges, node: &Node, len: u32) -> u64 {
    if node.len == len {
        return 0;
    }
    let handle = |granule: u32| {
        let (start, end) = (edges.start(granule), edges.end(granule));
        let idle = start * UNITS_PER_GRANULE >= node.start && end * UNITS_PER_GRANULE <= node.end();
        (start, end, idle)
    };
    let (start, end, idle) = handle(granule_floor(node.start));
    let low = if idle { start } else { end };
    let (start, end, idle) = handle(granule_ceil(node.start + len) - 1);
    let high = if idle { end } else { start };
    4 * u64::from(high.saturating_sub(low)) * u64::from(UNITS_PER_GRANULE) + u64::from(node.len - len)
}
