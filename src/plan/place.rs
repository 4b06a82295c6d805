//! Choosing addresses: the place in a hole that misses the least memory.
//!
//! A hole is a maximal run of free nodes that the request may take and nodes without memory. Within
//! it the block may start where a node starts or end where a node ends.
#![forbid(unsafe_code)]

use super::Placement;
use crate::segment::nodes::{Kind, NIL, Node, NodeId};
use crate::segment::{Claim, Segment};
use crate::units::{UNITS_PER_GRANULE, granule_ceil, granule_floor};
use std::ops::Range;

/// A request of a segment: lengths in units.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Request {
    pub(crate) len: u32,
    /// A power of two, at most a granule.
    pub(crate) align: u32,
    pub(crate) claim: Claim,
}

/// One node of a hole.
#[derive(Debug, Clone, Copy)]
struct Piece {
    node: NodeId,
    start: u32,
    end: u32,
    mapped: bool,
    /// The last node of its span.
    last: bool,
}

/// Places for a request, the one that misses least first: each missing granule and each run of them counts
/// one, a start in addresses that were never used half; among equals the smaller hole, then the lower address.
#[derive(Debug, Default)]
pub(crate) struct Places {
    pieces: Vec<Piece>,
    /// (score, size of the hole, start, pieces of the hole)
    ranked: Vec<(u64, u32, u32, Range<usize>)>,
    len: u32,
}

impl Places {
    /// Every candidate of a segment, ranked. Looks at the runs that can hold the request, where those are known without
    /// a walk over all nodes.
    pub(crate) fn of(segment: &mut Segment, request: Request) -> Self {
        let seeds = segment.run_seeds(request.len, request.claim);
        let mut places = Self { len: request.len, ..Self::default() };
        match seeds {
            Some(seeds) => places.around(segment, request, &seeds),
            None => places.walk(segment, request),
        }
        places.ranked.sort_unstable_by_key(|(score, size, start, _)| (*score, *size, *start));
        places
    }

    /// The holes that these nodes, in address order, are part of.
    fn around(&mut self, segment: &Segment, request: Request, seeds: &[NodeId]) {
        let mut done = 0;
        for seed in seeds.iter().copied().filter(|id| usable(&segment.nodes[*id], request)) {
            if segment.nodes[seed].start < done {
                continue;
            }
            let mut id = seed;
            while segment.nodes[id].prev != NIL && usable(&segment.nodes[segment.nodes[id].prev], request) {
                id = segment.nodes[id].prev;
            }
            let first = self.pieces.len();
            while id != NIL && usable(&segment.nodes[id], request) {
                self.add(segment, id);
                done = segment.nodes[id].end();
                id = segment.nodes[id].next;
            }
            self.close(first, request);
        }
    }

    /// All holes.
    fn walk(&mut self, segment: &Segment, request: Request) {
        let mut first = 0;
        let mut end = u32::MAX;
        for id in segment.iter() {
            let node = &segment.nodes[id];
            let usable = usable(node, request);
            // Spans may lie side by side by number and yet in different reservations: a hole ends with its span.
            if !usable || node.start != end || node.prev == NIL {
                self.close(first, request);
                first = self.pieces.len();
            }
            if usable {
                self.add(segment, id);
            }
            end = node.end();
        }
        self.close(first, request);
    }

    fn add(&mut self, segment: &Segment, id: NodeId) {
        let node = &segment.nodes[id];
        let (mapped, last) = (node.kind == Kind::Free, node.next == NIL);
        self.pieces.push(Piece { node: id, start: node.start, end: node.end(), mapped, last });
    }

    /// Ranks the candidates of the hole that ends with the last piece.
    fn close(&mut self, first: usize, request: Request) {
        let hole = &self.pieces[first..];
        let (Some(front), Some(back)) = (hole.first(), hole.last()) else { return };
        let size = back.end - front.start;
        if size < request.len {
            self.pieces.truncate(first);
            return;
        }
        // Beyond the last memory of a span lie addresses that were never used.
        let used = hole.iter().rev().find(|piece| piece.mapped).map_or(front.start, |piece| piece.end);
        for start in candidates(hole, request) {
            let place = at(hole, start, request.len);
            let fresh = u64::from(back.last && start >= used);
            self.ranked.push((
                2 * (place.missing() + place.missing.len() as u64) + fresh,
                size,
                start,
                first..self.pieces.len(),
            ));
        }
    }

    /// The places, best first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Placement> + Clone + '_ {
        self.ranked.iter().map(|(_, _, start, hole)| at(&self.pieces[hole.clone()], *start, self.len))
    }

    /// No hole holds the request.
    pub(crate) fn is_empty(&self) -> bool {
        self.ranked.is_empty()
    }
}

/// The placement of a request at `start`, on usable nodes from `first` on.
pub(crate) fn exactly(segment: &Segment, first: NodeId, start: u32, request: Request) -> Option<Placement> {
    let mut places = Places { len: request.len, ..Places::default() };
    let (mut id, mut end) = (first, start);
    while id != NIL && end <= start + request.len && usable(&segment.nodes[id], request) {
        places.add(segment, id);
        end = segment.nodes[id].end();
        id = segment.nodes[id].next;
    }
    (end >= start + request.len).then(|| at(&places.pieces, start, request.len))
}

/// A place in the shortest run of addresses without memory that has so many granules before and after the block; the lowest of
/// equals.
pub(crate) fn roomy(segment: &Segment, request: Request, before: u32, after: u32) -> Option<Placement> {
    let granules = before.checked_add(granule_ceil(request.len))?.checked_add(after)?;
    let len = granules.checked_mul(UNITS_PER_GRANULE)?;
    let fits = segment.unmapped_nodes().filter(|id| segment.nodes[*id].len >= len);
    let node = fits.min_by_key(|id| (segment.nodes[*id].len, segment.nodes[*id].start))?;
    let (start, end) = (segment.nodes[node].start, segment.nodes[node].end());
    let hole = [Piece { node, start, end, mapped: false, last: false }];
    Some(at(&hole, start + before * UNITS_PER_GRANULE, request.len))
}

/// May the request lie on this node?
fn usable(node: &Node, request: Request) -> bool {
    match node.kind {
        Kind::Free => request.claim.may_take(node),
        Kind::Unmapped => true,
        _ => false,
    }
}

/// Starts worth looking at in a hole: at each node's start and before each node's end.
fn candidates(hole: &[Piece], request: Request) -> Vec<u32> {
    let (low, high) = (hole[0].start, hole[hole.len() - 1].end);
    let fits = |start: &u32| *start >= low && u64::from(*start) + u64::from(request.len) <= u64::from(high);
    let mut starts: Vec<u32> = Vec::with_capacity(2 * hole.len());
    for piece in hole {
        starts.push(piece.start.next_multiple_of(request.align));
        if piece.end - low >= request.len {
            let mut start = piece.end - request.len;
            start -= start % request.align;
            if hole.iter().any(|other| !other.mapped && (other.start..other.end).contains(&start)) {
                start -= start % UNITS_PER_GRANULE;
            }
            starts.push(start);
        }
    }
    starts.retain(fits);
    starts.sort_unstable();
    starts.dedup();
    starts
}

/// The placement at `start` of a hole.
fn at(hole: &[Piece], start: u32, len: u32) -> Placement {
    let end = start + len;
    let mut placement =
        Placement { first: 0, block: start..end, claim: start..end, missing: Vec::new(), room: 0, before: 0 };
    for piece in hole.iter().filter(|piece| piece.end > start) {
        if piece.start >= end {
            // Growth goes on from the last missing run, never over memory that lies between.
            if !piece.mapped
                && piece.start == granule_ceil(end) * UNITS_PER_GRANULE
                && placement.missing.last().is_some_and(|run| run.end * UNITS_PER_GRANULE == piece.start)
            {
                placement.room = (piece.end - piece.start) / UNITS_PER_GRANULE;
            }
            break;
        }
        if placement.first == 0 {
            placement.first = piece.node;
            if !piece.mapped {
                placement.before = granule_floor(start) - piece.start / UNITS_PER_GRANULE;
            }
        }
        if !piece.mapped {
            let run = granule_floor(piece.start.max(start))..granule_ceil(piece.end.min(end));
            placement.claim.end = placement.claim.end.max(run.end * UNITS_PER_GRANULE);
            placement.claim.start = placement.claim.start.min(run.start * UNITS_PER_GRANULE);
            placement.room = (piece.end - run.end * UNITS_PER_GRANULE) / UNITS_PER_GRANULE;
            placement.missing.push(run);
        } else {
            placement.room = 0;
        }
    }
    placement
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::segment::Stamp;

    /// Two spans with live, free and unmapped nodes in some order.
    fn segment(mut seed: u64) -> Segment {
        let mut segment = Segment::default();
        for span in 0..2_u32 {
            segment.add_span(span * 40 * UNITS_PER_GRANULE, 40 * UNITS_PER_GRANULE);
        }
        for at in 0..80 {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let range = at * UNITS_PER_GRANULE..(at + 1) * UNITS_PER_GRANULE;
            let first = segment.iter().find(|id| segment.nodes[*id].end() > range.start);
            let kind = if seed >> 40 & 1 == 0 { Kind::Live } else { Kind::Busy };
            if seed >> 50 & 3 == 0 {
                continue;
            }
            let (node, _) = segment.carve(first.unwrap(), range, kind);
            match kind {
                Kind::Live => segment.note_block(1),
                _ if seed >> 45 & 3 == 0 => segment.make_unmapped(node),
                _ => drop(segment.free(node, Stamp { owner: 1, epoch: 0 }, 0)),
            }
        }
        segment
    }

    #[test]
    fn a_roomy_place_lies_in_the_shortest_run_with_room_at_both_ends() {
        let mut segment = Segment::default();
        for (start, granules) in [(0, 20), (20, 12), (32, 12), (44, 9)] {
            segment.add_span(start * UNITS_PER_GRANULE, granules * UNITS_PER_GRANULE);
        }
        let place = |len, before, after| {
            let request = Request { len, align: 1, claim: Claim { owner: 1, horizon: 0 } };
            let place = roomy(&segment, request, before, after)?;
            assert_eq!((place.block.end - place.block.start, place.missing.len()), (len, 1));
            Some((place.missing[0].clone(), place.before, place.room))
        };
        let len = 3 * UNITS_PER_GRANULE + 1;
        assert_eq!(place(len, 3, 4), Some((23..27, 3, 5)), "the lower of two equals");
        assert_eq!(place(len, 3, 2), Some((47..51, 3, 2)));
        assert_eq!(place(len, 8, 8), Some((8..12, 8, 8)));
        assert_eq!(place(len, 8, 9), None);
        assert_eq!(place(len, u32::MAX, 9), None);
    }

    #[test]
    fn the_runs_that_are_looked_at_are_all_that_can_hold_the_request() {
        let mut found = 0;
        for seed in 0..500 {
            let mut segment = segment(seed);
            segment.check().unwrap();
            for len in [1, 100, UNITS_PER_GRANULE, 3 * UNITS_PER_GRANULE + 7, 9 * UNITS_PER_GRANULE] {
                let request = Request { len, align: 1, claim: Claim { owner: 1, horizon: 0 } };
                let mut walked = Places { len, ..Places::default() };
                walked.walk(&segment, request);
                walked.ranked.sort_unstable_by_key(|(score, size, start, _)| (*score, *size, *start));
                let places = Places::of(&mut segment, request);
                assert!(places.iter().eq(walked.iter()), "seed {seed}, {len} units");
                found += places.ranked.len();
            }
        }
        assert!(found > 5000, "{found} places");
    }
}
