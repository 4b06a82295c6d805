//! Cutting nodes for transactions, and giving back what they leave.
#![forbid(unsafe_code)]

use super::nodes::{Kind, NIL, NodeId};
use super::{Segment, Stamp, merged};
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

    /// Parts a range at the start or the end of a busy node from it, as a node of `kind` that nobody owns. The part, and what is
    /// left of the node.
    pub(crate) fn part_off(&mut self, id: NodeId, range: Range<u32>, kind: Kind) -> (NodeId, Option<NodeId>) {
        let (start, end) = (self.nodes[id].start, self.nodes[id].end());
        debug_assert!(range.start == start || range.end == end);
        let (part, rest) = if range == (start..end) {
            (id, None)
        } else if range.start == start {
            (id, Some(self.split_off(id, range.end - start)))
        } else {
            (self.split_off(id, range.start - start), Some(id))
        };
        self.set_aside(part, kind);
        (part, rest)
    }

    /// Makes a busy node one that is mapped and not usable: lent or a zombie.
    pub(crate) fn set_aside(&mut self, id: NodeId, kind: Kind) {
        let node = &mut self.nodes[id];
        (node.kind, node.owner, node.epoch) = (kind, 0, 0);
    }

    /// Makes one zombie out of a lent node and the range beside it, if that is free memory that could be one block: with the
    /// stamp of its last use.
    pub(crate) fn end_join(&mut self, lent: NodeId, range: Range<u32>, passed: u32) -> Option<Stamp> {
        let mut first =
            if self.nodes[lent].start < range.start { self.nodes[lent].next } else { self.nodes[lent].prev };
        while self.nodes[first].start > range.start {
            first = self.nodes[first].prev;
        }
        let (mut id, mut stamp) = (first, None::<Stamp>);
        loop {
            let node = &self.nodes[id];
            if id == NIL || node.kind != Kind::Free {
                return None;
            }
            let part = granule_floor(node.start.max(range.start))..granule_ceil(node.end().min(range.end));
            let here = Stamp { owner: node.owner, epoch: self.last_use(id, part) };
            stamp = Some(stamp.map_or(Some(here), |stamp| merged(stamp, here, passed))?);
            if node.end() >= range.end {
                break;
            }
            id = node.next;
        }
        let (busy, _) = self.carve(first, range, Kind::Busy);
        let (start, len) = (self.nodes[busy].start, self.nodes[busy].len);
        self.absorb(lent, busy);
        let node = &mut self.nodes[lent];
        (node.start, node.len, node.kind) = (node.start.min(start), node.len + len, Kind::Zombie);
        stamp
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    const G: u32 = UNITS_PER_GRANULE;

    /// A second mapping of eight granules, of which the first three (or the last, with `tail`) are used, as nodes: the one
    /// that is not usable, and the range of the others. Two granules beside it are a block.
    fn joined(tail: bool) -> (Segment, NodeId, Range<u32>) {
        let mut segment = Segment::large(Arc::default(), Arc::default());
        segment.add_span(0, 12 * G);
        let first = segment.iter().next().unwrap_or(NIL);
        let range = if tail { 0..10 * G } else { 2 * G..12 * G };
        let (target, _) = segment.carve(first, range.clone(), Kind::Busy);
        let aside = if tail { 0..5 * G } else { 7 * G..12 * G };
        let (lent, rest) = segment.part_off(target, aside, Kind::Lent);
        let rest = rest.unwrap_or(NIL);
        segment.nodes[rest].kind = Kind::Live;
        segment.note_block(5 * G);
        segment.check().unwrap_or_else(|why| panic!("{why}"));
        (segment, lent, if tail { 5 * G..8 * G } else { 4 * G..7 * G })
    }

    /// Frees a range of the block as a node of its own.
    fn free(segment: &mut Segment, range: Range<u32>, stamp: Stamp) {
        let find = |segment: &Segment| segment.iter().find(|id| segment.nodes[*id].end() > range.start).unwrap_or(NIL);
        let mut id = find(segment);
        if segment.nodes[id].start < range.start {
            id = segment.split_off(id, range.start - segment.nodes[id].start);
            segment.live_blocks += 1;
        }
        if segment.nodes[id].end() > range.end {
            segment.split_off(id, range.end - range.start);
            segment.live_blocks += 1;
        }
        segment.free(id, stamp, 0);
    }

    #[test]
    fn a_join_ends_when_all_that_it_used_is_free_and_could_be_one_block() {
        for tail in [false, true] {
            let (mut segment, lent, used) = joined(tail);
            assert_eq!(segment.end_join(lent, used.clone(), 9), None, "it is live");
            free(&mut segment, used.start..used.start + G, Stamp { owner: 1, epoch: 4 });
            assert_eq!(segment.end_join(lent, used.clone(), 9), None, "two thirds of it are live");
            free(&mut segment, used.start + G..used.end, Stamp { owner: 2, epoch: 6 });
            assert_eq!(segment.end_join(lent, used.clone(), 3), None, "two streams wait for each other");
            assert_eq!(segment.end_join(lent, used, 4), Some(Stamp { owner: 2, epoch: 6 }));
            let node = &segment.nodes[lent];
            let range = if tail { 0..8 * G } else { 4 * G..12 * G };
            assert_eq!((node.kind, node.start..node.end()), (Kind::Zombie, range));
            segment.check().unwrap_or_else(|why| panic!("{why}"));
            segment.make_unmapped(lent);
            segment.check().unwrap_or_else(|why| panic!("{why}"));
        }
    }

    #[test]
    fn a_part_may_be_all_of_a_node() {
        let (mut segment, ..) = joined(true);
        let last = segment.iter().last().unwrap_or(NIL);
        let (busy, _) = segment.carve(last, 10 * G..12 * G, Kind::Busy);
        assert_eq!(segment.part_off(busy, 10 * G..12 * G, Kind::Zombie), (busy, None));
        assert_eq!(segment.nodes[busy].kind, Kind::Zombie);
    }
}
