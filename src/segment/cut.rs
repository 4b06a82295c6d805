//! Cutting nodes for transactions, and giving back what they leave.
#![forbid(unsafe_code)]

use super::nodes::{Kind, NIL, NodeId};
use super::{Segment, Stamp};
use crate::units::{UNITS_PER_GRANULE, granule_ceil, granule_floor};
use std::ops::Range;

impl Segment {
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
                match self.nodes[id].kind {
                    Kind::Free => self.bin_insert(id),
                    _ => self.unmapped.push(id),
                }
                id = rest;
            }
            if self.nodes[id].end() > range.end {
                let mut rest = self.nodes[id].clone();
                rest.len = rest.end() - range.end;
                rest.start = range.end;
                self.nodes[id].len = range.end - self.nodes[id].start;
                let rest = self.nodes.insert_after(id, rest);
                match self.nodes[rest].kind {
                    Kind::Free => self.bin_insert(rest),
                    _ => self.unmapped.push(rest),
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
        self.unmapped.push(id);
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
}
