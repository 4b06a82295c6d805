//! A segment: address ranges cut into nodes, with its free blocks in bins.
//!
//! The segment knows which addresses are live, free, without memory or given away; which handle lies
//! behind an address is the page table's business ([`crate::physical`]). All methods are called with
//! the segment's lock held; none calls the driver.
#![forbid(unsafe_code)]

pub(crate) mod bins;
mod merge;
pub(crate) mod nodes;

use crate::edges::Edges;
use crate::units::{UNITS_PER_GRANULE, granule_ceil, granule_floor};
use crate::used::Used;
use bins::Bins;
use nodes::{Kind, NIL, Node, NodeId, Nodes};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

/// Free blocks of one bin that a search looks at, and bins that it goes through.
const SCAN: usize = 32;
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

/// What happened so far. Relaxed: nothing is ordered by it.
#[derive(Debug, Default)]
pub(crate) struct History {
    /// Frees: the age of idle memory.
    clock: AtomicU32,
    /// Units that blocks were given, and that blocks gave back.
    taken: AtomicU64,
    freed: AtomicU64,
}

impl History {
    pub(crate) fn now(&self) -> u32 {
        self.clock.load(Relaxed)
    }

    /// Units given to blocks and given back by them.
    pub(crate) fn churn(&self) -> (u64, u64) {
        (self.taken.load(Relaxed), self.freed.load(Relaxed))
    }
}

/// See the module's text.
#[derive(Debug, Default)]
pub(crate) struct Segment {
    pub(crate) nodes: Nodes,
    bins: Vec<Option<Box<Bins>>>,
    /// First node of each span.
    heads: Vec<NodeId>,
    /// Large segments share theirs.
    pub(crate) history: Arc<History>,
    /// Of large segments: when each granule was last used.
    used: Option<Arc<Used>>,
    /// Units in free nodes.
    free_units: u64,
    /// Units freed since an epoch was closed.
    pub(crate) freed_units: u64,
    /// Live blocks.
    pub(crate) live_blocks: u64,
    /// It belongs to a capture pool: nothing in it is ever moved, released or given to others (I11).
    pub(crate) private: bool,
}

impl Segment {
    /// A large segment, with what it shares with the others.
    pub(crate) fn large(history: Arc<History>, used: Arc<Used>) -> Self {
        Self { history, used: Some(used), ..Self::default() }
    }

    /// Notes a block of `len` units that came into being.
    pub(crate) fn note_block(&mut self, len: u32) {
        self.live_blocks += 1;
        self.history.taken.fetch_add(u64::from(len), Relaxed);
    }

    /// Adds addresses without memory; they never merge with others.
    pub(crate) fn add_span(&mut self, start: u32, len: u32) {
        let id = self.nodes.insert(Node::new(Kind::Unmapped, start, len));
        self.heads.push(id);
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

    /// Units in free nodes.
    pub(crate) fn free_units(&self) -> u64 {
        self.free_units
    }

    /// Length of the longest free node, in units.
    pub(crate) fn longest_free(&self) -> u32 {
        self.bins.iter().flatten().map(|bins| bins.longest(&self.nodes)).max().unwrap_or(0)
    }

    fn bin_insert(&mut self, id: NodeId) {
        let owner = self.nodes[id].owner as usize;
        if owner >= self.bins.len() {
            self.bins.resize_with(owner + 1, || None);
        }
        self.free_units += u64::from(self.nodes[id].len);
        self.bins[owner].get_or_insert_default().insert(&mut self.nodes, id);
    }

    fn bin_remove(&mut self, id: NodeId) {
        self.free_units -= u64::from(self.nodes[id].len);
        if let Some(bins) = self.bins.get_mut(self.nodes[id].owner as usize).and_then(Option::as_mut) {
            bins.remove(&mut self.nodes, id);
        }
    }

    /// Best fitting free block of the claim's own stream. `align` in units, a power of two. With `edges`, of blocks
    /// about as long the one that opens least of handles that lie idle.
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

    fn find_in(&self, owner: u16, len: u32, align: u32, claim: Claim, edges: Option<&Edges>) -> Option<NodeId> {
        let bins = self.bins.get(owner as usize)?.as_ref()?;
        let accept = |id: NodeId| {
            let node = &self.nodes[id];
            let fits = node.start.next_multiple_of(align) - node.start <= node.len - len;
            (fits && claim.may_take(node)).then(|| match edges {
                Some(edges) => opened(edges, node, len),
                None => u64::from(node.len),
            })
        };
        bins.best(&self.nodes, len, SCAN, BINS, accept).or_else(|| {
            if align > 1 { bins.best(&self.nodes, len.checked_add(align)?, SCAN, BINS, accept) } else { None }
        })
    }

    /// Makes `len` units of a free node live, from its first aligned unit.
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
        live
    }

    /// Turns a live, pending or busy node into free memory and merges it with its neighbours.
    pub(crate) fn free(&mut self, id: NodeId, stamp: Stamp, passed: u32) -> NodeId {
        let clock = self.history.clock.fetch_add(1, Relaxed).wrapping_add(1);
        let node = &mut self.nodes[id];
        if node.kind == Kind::Live {
            self.live_blocks -= 1;
        }
        if matches!(node.kind, Kind::Live | Kind::Pending) {
            self.history.freed.fetch_add(u64::from(node.len), Relaxed);
        }
        node.kind = Kind::Free;
        node.owner = stamp.owner;
        node.epoch = stamp.epoch;
        node.age = clock;
        node.has_uses = false;
        self.freed_units += u64::from(node.len);
        if let Some(used) = &self.used {
            used.note(granule_floor(node.start)..granule_ceil(node.end()), stamp.epoch);
        }
        self.coalesce(id, passed)
    }

    /// A block with declared uses was freed: it waits for the streams that use it.
    pub(crate) fn suspend(&mut self, id: NodeId) {
        debug_assert_eq!(self.nodes[id].kind, Kind::Live);
        self.nodes[id].kind = Kind::Pending;
        self.live_blocks -= 1;
    }

    /// Merges a free node that is in no bin with its free neighbours where the stamps allow, and bins it.
    fn coalesce(&mut self, id: NodeId, passed: u32) -> NodeId {
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
            node.age = node.age.max(age);
        }
        self.bin_insert(id);
        id
    }

    /// Unlinks `gone`, whose addresses `id` takes over.
    fn absorb(&mut self, id: NodeId, gone: NodeId) {
        if let Some(head) = self.heads.iter_mut().find(|head| **head == gone) {
            *head = id;
        }
        self.nodes.unlink(gone);
    }

    pub(crate) fn stamp(&self, id: NodeId) -> Stamp {
        Stamp { owner: self.nodes[id].owner, epoch: self.nodes[id].epoch }
    }

    /// Makes one node of `kind` out of a range that consists of free and unmapped nodes, beginning in
    /// `first`. Returns it with the latest stamp of the memory that it swallowed.
    pub(crate) fn carve(&mut self, first: NodeId, range: Range<u32>, kind: Kind) -> (NodeId, Stamp) {
        let mut stamp = Stamp::default();
        let mut id = first;
        let mut carved = NIL;
        while id != NIL && self.nodes[id].start < range.end {
            debug_assert!(
                matches!(self.nodes[id].kind, Kind::Free | Kind::Unmapped),
                "I6: only free addresses are claimed"
            );
            if self.nodes[id].kind == Kind::Free {
                self.bin_remove(id);
                if self.nodes[id].epoch >= stamp.epoch {
                    stamp = self.stamp(id);
                }
            }
            if self.nodes[id].start < range.start {
                // The front stays what it was; go on with the rest as a node of its own.
                let mut rest = self.nodes[id].clone();
                rest.len = rest.end() - range.start;
                rest.start = range.start;
                self.nodes[id].len = range.start - self.nodes[id].start;
                let rest = self.nodes.insert_after(id, rest);
                if self.nodes[id].kind == Kind::Free {
                    self.bin_insert(id);
                }
                id = rest;
            }
            if self.nodes[id].end() > range.end {
                let mut rest = self.nodes[id].clone();
                rest.len = rest.end() - range.end;
                rest.start = range.end;
                self.nodes[id].len = range.end - self.nodes[id].start;
                let rest = self.nodes.insert_after(id, rest);
                if self.nodes[rest].kind == Kind::Free {
                    self.bin_insert(rest);
                }
            }
            let next = self.nodes[id].next;
            if carved == NIL {
                carved = id;
            } else {
                self.nodes[carved].len += self.nodes[id].len;
                self.absorb(carved, id);
            }
            id = next;
        }
        let node = &mut self.nodes[carved];
        node.kind = kind;
        (node.epoch, node.owner) = (stamp.epoch, stamp.owner);
        node.has_uses = false;
        debug_assert_eq!((node.start, node.end()), (range.start, range.end));
        (carved, stamp)
    }

    /// Cuts `at` units off the front of a node that is in no bin; returns the rest as a new node.
    pub(crate) fn split_off(&mut self, id: NodeId, at: u32) -> NodeId {
        let mut rest = self.nodes[id].clone();
        debug_assert!(at > 0 && at < rest.len);
        rest.start += at;
        rest.len -= at;
        self.nodes[id].len = at;
        self.nodes.insert_after(id, rest)
    }

    /// Makes a busy or zombie node unmapped and merges it with unmapped neighbours.
    pub(crate) fn make_unmapped(&mut self, id: NodeId) {
        let node = &mut self.nodes[id];
        node.kind = Kind::Unmapped;
        (node.owner, node.epoch) = (0, 0);
        for neighbour in [self.nodes[id].prev, self.nodes[id].next] {
            if neighbour != NIL && self.nodes[neighbour].kind == Kind::Unmapped {
                let (start, len) = (self.nodes[neighbour].start, self.nodes[neighbour].len);
                self.absorb(id, neighbour);
                let node = &mut self.nodes[id];
                node.start = node.start.min(start);
                node.len += len;
            }
        }
    }

    /// Gives a busy node back as what its granules are by now: free where `mapped`, else unmapped.
    pub(crate) fn restore(&mut self, id: NodeId, stamp: Stamp, passed: u32, mapped: impl Fn(u32) -> bool) {
        let mut id = id;
        loop {
            let (start, end) = (self.nodes[id].start, self.nodes[id].end());
            let state = mapped(granule_floor(start));
            let mut granule = granule_floor(start) + 1;
            while granule < granule_ceil(end) && mapped(granule) == state {
                granule += 1;
            }
            let stop = (granule * UNITS_PER_GRANULE).min(end);
            let rest = (stop < end).then(|| self.split_off(id, stop - start));
            if state {
                self.free(id, stamp, passed);
            } else {
                self.make_unmapped(id);
            }
            match rest {
                Some(rest) => id = rest,
                None => return,
            }
        }
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

    /// What shares granules with live blocks, for statistics. A walk.
    pub(crate) fn shared_granules(&self, small: bool) -> Shared {
        let mut out = Shared::default();
        let mut counted = u32::MAX;
        let mut live_in_granule: (u32, u32) = (u32::MAX, 0);
        let close = |state: &mut (u32, u32), out: &mut Shared| {
            if small && state.0 != u32::MAX && state.1 > 0 && state.1 < UNITS_PER_GRANULE / 4 {
                out.pinned_by_small += 1;
            }
        };
        for id in self.iter() {
            let node = &self.nodes[id];
            match node.kind {
                Kind::Pending => out.pending_units += u64::from(node.len),
                Kind::Free => {
                    // Parts at the ends that do not fill a granule.
                    let head = (granule_ceil(node.start) * UNITS_PER_GRANULE).min(node.end()) - node.start;
                    let tail = node.end() - (granule_floor(node.end()) * UNITS_PER_GRANULE).max(node.start);
                    let whole = granule_ceil(node.start) > granule_floor(node.end());
                    out.free_units += u64::from(if whole { node.len } else { head + tail });
                }
                Kind::Live => {
                    for granule in granule_floor(node.start)..granule_ceil(node.end()) {
                        if granule != counted {
                            close(&mut live_in_granule, &mut out);
                            live_in_granule = (granule, 0);
                            counted = granule;
                        }
                        let from = node.start.max(granule * UNITS_PER_GRANULE);
                        let to = node.end().min((granule + 1) * UNITS_PER_GRANULE);
                        live_in_granule.1 += to - from;
                    }
                }
                _ => {}
            }
        }
        close(&mut live_in_granule, &mut out);
        out
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

    /// Checks invariants I1 to I4 (tests, and debug builds on the slow path).
    pub(crate) fn check(&self) -> Result<(), String> {
        let mut free = 0u64;
        let mut live = 0u64;
        for &head in &self.heads {
            let mut prev = NIL;
            let mut id = head;
            while id != NIL {
                let node = &self.nodes[id];
                if node.prev != prev || (prev != NIL && self.nodes[prev].end() != node.start) || node.len == 0 {
                    return Err(format!("node {id} at unit {} does not follow its neighbour", node.start));
                }
                match node.kind {
                    Kind::Free => free += u64::from(node.len),
                    Kind::Live => live += 1,
                    Kind::Unmapped | Kind::Zombie
                        if !node.start.is_multiple_of(UNITS_PER_GRANULE)
                            || !node.len.is_multiple_of(UNITS_PER_GRANULE) =>
                    {
                        return Err(format!("{:?} node {id} is not granule aligned", node.kind));
                    }
                    Kind::Unmapped if prev != NIL && self.nodes[prev].kind == Kind::Unmapped => {
                        return Err(format!("unmapped nodes {prev} and {id} are not merged"));
                    }
                    _ => {}
                }
                prev = id;
                id = node.next;
            }
        }
        let binned: u64 = self
            .bins
            .iter()
            .flatten()
            .flat_map(|bins| bins.at_least(&self.nodes, 1))
            .map(|id| u64::from(self.nodes[id].len))
            .sum();
        if free != self.free_units || binned != free {
            return Err(format!("free units: list {free}, counter {}, bins {binned}", self.free_units));
        }
        if live != self.live_blocks {
            return Err(format!("live blocks: list {live}, counter {}", self.live_blocks));
        }
        Ok(())
    }
}

/// See [`Segment::shared_granules`].
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Shared {
    /// Free units in granules that hold live blocks too.
    pub(crate) free_units: u64,
    /// Units of blocks that wait for declared uses.
    pub(crate) pending_units: u64,
    /// Granules that small blocks hold with less than a quarter of their bytes live.
    pub(crate) pinned_by_small: u64,
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
