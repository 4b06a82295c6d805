//! Nodes of a segment: its addresses as a doubly linked list in address order.
//!
//! Every address of a span belongs to exactly one node (invariant I1), and the links are indices,
//! so that metadata lies apart from the memory that it describes.
#![forbid(unsafe_code)]

use std::ops::{Index, IndexMut};

/// Index of a node; 0 is no node.
pub(crate) type NodeId = u32;
/// No node.
pub(crate) const NIL: NodeId = 0;

/// What a node's addresses are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    /// A block of the client.
    Live,
    /// Mapped and free; in a bin.
    Free,
    /// Free, but not merged: in the cache of blocks freed of late (see [`super::cache`]).
    Cached,
    /// Freed by the client, waiting for the streams that it was declared used on.
    Pending,
    /// Without memory; granule aligned.
    Unmapped,
    /// Mapped, but its memory was given to another address; granule aligned.
    Zombie,
    /// Mapped, but used through the other mapping of a joined handle; granule aligned.
    Lent,
    /// Claimed by a transaction that is at work on it.
    Busy,
}

/// One range of addresses; positions and lengths in units of 512 B. A live one has no place in bins, nor an age.
///
/// What a free reads comes first: a node may lie on two lines of the machine's cache, and what is only written there is not
/// waited for.
#[derive(Debug, Clone)]
#[repr(C)]
pub(crate) struct Node {
    pub(crate) start: u32,
    pub(crate) len: u32,
    /// Slot of the stream that it was allocated on, or freed by; 0: nobody's.
    pub(crate) owner: u16,
    pub(crate) kind: Kind,
    /// The client declared uses on other streams.
    pub(crate) has_uses: bool,
    /// Bytes of the block that the client did not ask for.
    pub(crate) slack: u32,
    pub(crate) bin_next: NodeId,
    pub(crate) bin_prev: NodeId,
    /// Neighbours in address order; `NIL` at the ends of a span.
    pub(crate) prev: NodeId,
    pub(crate) next: NodeId,
    /// Epoch that was open when the node was freed; 0: nothing to wait for.
    pub(crate) epoch: u32,
    /// When it was freed, in frees of the segment, the lower half of their number: [`super::History::freed_at`].
    pub(crate) age: u32,
}

impl Node {
    pub(crate) const fn new(kind: Kind, start: u32, len: u32) -> Self {
        Self {
            start,
            len,
            prev: NIL,
            next: NIL,
            bin_prev: NIL,
            bin_next: NIL,
            epoch: 0,
            age: 0,
            slack: 0,
            owner: 0,
            kind,
            has_uses: false,
        }
    }

    pub(crate) const fn end(&self) -> u32 {
        self.start + self.len
    }
}

/// All nodes of a segment, in a slab.
#[derive(Debug)]
pub(crate) struct Nodes {
    slab: Vec<Node>,
    /// Forgotten nodes, linked through `bin_next`.
    unused: NodeId,
}

impl Default for Nodes {
    fn default() -> Self {
        // Index 0 is taken by a node that nobody uses, so that NIL needs no branch of its own.
        Self { slab: vec![Node::new(Kind::Busy, 0, 0)], unused: NIL }
    }
}

impl Nodes {
    /// Puts a node in, without links.
    #[inline]
    pub(crate) fn insert(&mut self, node: Node) -> NodeId {
        if self.unused != NIL {
            let id = self.unused;
            self.unused = self[id].bin_next;
            self[id] = node;
            return id;
        }
        if self.slab.len() == self.slab.capacity() {
            // By an eighth, so that little more is held than is in use.
            self.slab.reserve_exact((self.slab.len() / 8).max(64));
        }
        self.slab.push(node);
        (self.slab.len() - 1) as NodeId
    }

    /// Puts `node` into the address order right after `before`.
    #[inline]
    pub(crate) fn insert_after(&mut self, before: NodeId, mut node: Node) -> NodeId {
        let after = self[before].next;
        node.prev = before;
        node.next = after;
        let id = self.insert(node);
        self[before].next = id;
        if after != NIL {
            self[after].prev = id;
        }
        id
    }

    /// Takes a node out of the address order and forgets it.
    #[inline]
    pub(crate) fn unlink(&mut self, id: NodeId) {
        let (prev, next) = (self[id].prev, self[id].next);
        if prev != NIL {
            self[prev].next = next;
        }
        if next != NIL {
            self[next].prev = prev;
        }
        self.remove(id);
    }

    /// Forgets a node.
    #[inline]
    pub(crate) fn remove(&mut self, id: NodeId) {
        debug_assert_ne!(id, NIL);
        // Whoever kept the index of it sees that it covers nothing any more.
        self[id] = Node { bin_next: self.unused, ..Node::new(Kind::Busy, 0, 0) };
        self.unused = id;
    }

    /// Bytes of metadata held.
    pub(crate) fn bytes(&self) -> usize {
        self.slab.capacity() * size_of::<Node>()
    }
}

impl Index<NodeId> for Nodes {
    type Output = Node;
    #[inline]
    fn index(&self, id: NodeId) -> &Node {
        &self.slab[id as usize]
    }
}

impl IndexMut<NodeId> for Nodes {
    #[inline]
    fn index_mut(&mut self, id: NodeId) -> &mut Node {
        &mut self.slab[id as usize]
    }
}
