//! A range of addresses that was chosen ahead: may it be had?
#![forbid(unsafe_code)]

use super::nodes::{Kind, NIL, NodeId};
use super::{Claim, Segment};
use crate::units::{granule_ceil, granule_floor};
use std::ops::Range;

/// What lies at a range of addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Spot {
    /// Mapped memory that may be taken, from this node on.
    Free(NodeId),
    /// The same, but some has no memory yet.
    Missing(NodeId),
    /// Free memory that other streams may not take yet.
    Unproven,
    /// Something that may not be taken.
    Taken,
}

impl Segment {
    /// What lies at `range`, for `claim` (I5).
    pub(crate) fn spot(&self, range: &Range<u32>, claim: Claim) -> Spot {
        let covers = |id: &NodeId| {
            let node = &self.nodes[*id];
            let usable = matches!(node.kind, Kind::Free | Kind::Unmapped);
            usable && node.start <= range.start && node.end() > range.start
        };
        let Some(first) = self.free_nodes(1).find(covers).or_else(|| self.unmapped.iter().copied().find(covers)) else {
            return Spot::Taken;
        };
        let (mut id, mut missing, mut unproven) = (first, false, false);
        loop {
            let node = &self.nodes[id];
            let within = || granule_floor(node.start.max(range.start))..granule_ceil(node.end().min(range.end));
            match node.kind {
                // Where its stamp has not passed, that of these granules may have.
                Kind::Free if claim.may_take(node) || self.last_use(id, within()) <= claim.horizon => {}
                Kind::Free => unproven = true,
                Kind::Unmapped => missing = true,
                _ => return Spot::Taken,
            }
            if node.end() >= range.end {
                return match (unproven, missing) {
                    (true, _) => Spot::Unproven,
                    (false, true) => Spot::Missing(first),
                    (false, false) => Spot::Free(first),
                };
            }
            id = node.next;
            if id == NIL {
                return Spot::Taken;
            }
        }
    }

    /// The shortest free memory outside `apart` that holds `len` units, for `claim`; the lowest of equals.
    pub(crate) fn find_apart(&self, len: u32, claim: Claim, apart: &Range<u32>) -> Option<NodeId> {
        let fits = |id: &NodeId| {
            let node = &self.nodes[*id];
            claim.may_take(node) && (node.end() <= apart.start || node.start >= apart.end)
        };
        self.free_nodes(len).filter(fits).min_by_key(|id| (self.nodes[*id].len, self.nodes[*id].start))
    }

    /// Makes a range live that [`Self::spot`] found free.
    pub(crate) fn take_spot(&mut self, first: NodeId, range: Range<u32>) -> NodeId {
        let len = range.end - range.start;
        let (live, stamp) = self.carve(first, range, Kind::Live);
        self.note_block(len);
        self.note_taken(len, stamp.epoch);
        live
    }

    /// The last `len` units of the longest run of addresses that has no memory, from a granule on.
    pub(crate) fn last_unmapped(&self, len: u32) -> Option<u32> {
        let unmapped = self.iter().map(|id| &self.nodes[id]).filter(|node| node.kind == Kind::Unmapped);
        let longest = unmapped.max_by_key(|node| (node.len, node.start)).filter(|node| node.len >= len)?;
        Some(longest.end() - len)
    }
}
