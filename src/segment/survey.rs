//! Walks over a whole segment: what shares granules with live blocks, and whether the invariants hold.
#![forbid(unsafe_code)]

use super::Segment;
use super::nodes::{Kind, NIL};
use crate::units::{UNITS_PER_GRANULE, granule_ceil, granule_floor};

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

impl Segment {
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
                    Kind::Unmapped | Kind::Zombie | Kind::Lent
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
