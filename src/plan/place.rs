//! Choosing addresses: the place in a hole that misses the least memory.
//!
//! A hole is a maximal run of free nodes that the request may take and nodes without memory. Within
//! it the block may start where a node starts or end where a node ends.
#![forbid(unsafe_code)]

use super::Placement;
use crate::segment::nodes::{Kind, NIL, NodeId};
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
    /// Every candidate of a segment, ranked.
    pub(crate) fn of(segment: &Segment, request: Request) -> Self {
        let mut places = Self { len: request.len, ..Self::default() };
        let mut first = 0;
        let mut end = u32::MAX;
        for id in segment.iter() {
            let node = &segment.nodes[id];
            let usable = match node.kind {
                Kind::Free => request.claim.may_take(node),
                Kind::Unmapped => true,
                _ => false,
            };
            // Spans may lie side by side by number and yet in different reservations: a hole ends with its span.
            if !usable || node.start != end || node.prev == NIL {
                places.close(first, request);
                first = places.pieces.len();
            }
            if usable {
                let last = node.next == NIL;
                let mapped = node.kind == Kind::Free;
                places.pieces.push(Piece { node: id, start: node.start, end: node.end(), mapped, last });
            }
            end = node.end();
        }
        places.close(first, request);
        places.ranked.sort_unstable_by_key(|(score, size, start, _)| (*score, *size, *start));
        places
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
    pub(crate) fn iter(&self) -> impl Iterator<Item = Placement> + '_ {
        self.ranked.iter().map(|(_, _, start, hole)| at(&self.pieces[hole.clone()], *start, self.len))
    }

    /// No hole holds the request.
    pub(crate) fn is_empty(&self) -> bool {
        self.ranked.is_empty()
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
    let mut placement = Placement { first: 0, block: start..end, claim: start..end, missing: Vec::new(), room: 0 };
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
