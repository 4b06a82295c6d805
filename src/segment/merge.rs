//! Free memory whose stamps allow more, or less, than when it was freed.
#![forbid(unsafe_code)]

use super::nodes::{Kind, NIL, NodeId};
use super::{Claim, Segment, Stamp, merged};
use crate::units::{UNITS_PER_GRANULE, granule_ceil, granule_floor};
use std::ops::Range;

impl Segment {
    /// Gives all free memory one stamp, later than its own: something used it after it was freed.
    pub(crate) fn restamp(&mut self, stamp: Stamp) {
        let free: Vec<NodeId> = self.iter().filter(|id| self.nodes[*id].kind == Kind::Free).collect();
        for id in free {
            self.bin_remove(id);
            (self.nodes[id].owner, self.nodes[id].epoch) = (stamp.owner, stamp.epoch);
            self.bin_insert(id);
        }
    }

    /// Merges free neighbours of different streams whose frees have passed by now, so that a handle that
    /// both cover lies in one node again. A walk. Says whether any were merged.
    pub(crate) fn merge_passed(&mut self, passed: u32) -> bool {
        let mut any = false;
        for index in 0..self.heads.len() {
            let mut id = self.heads[index];
            while id != NIL {
                let next = self.nodes[id].next;
                let both = next != NIL && self.nodes[id].kind == Kind::Free && self.nodes[next].kind == Kind::Free;
                if both && merged(self.stamp(id), self.stamp(next), passed).is_some() {
                    self.bin_remove(id);
                    id = self.coalesce::<false>(id, passed);
                    any = true;
                } else {
                    id = next;
                }
            }
        }
        any
    }

    /// Parts the shortest run of granules that holds `len` units and has passed for `claim` from the free node whose stamp hides it:
    /// a node has the stamp of what was freed last of all that merged into it, mostly by another stream. A walk over
    /// the long nodes that the claim may not take. Says whether there was any.
    pub(crate) fn part_passed(&mut self, len: u32, claim: Claim) -> bool {
        let mut best: Option<(NodeId, Range<u32>)> = None;
        for id in self.free_nodes(len).filter(|id| !claim.may_take(&self.nodes[*id])) {
            let (mut at, end) = (granule_ceil(self.nodes[id].start), granule_floor(self.nodes[id].end()));
            while at < end {
                let passed = |granule: &u32| self.last_use(id, *granule..granule + 1) <= claim.horizon;
                let from = (at..end).find(passed).unwrap_or(end);
                let to = (from..end).find(|granule| !passed(granule)).unwrap_or(end);
                at = to;
                let key = |run: &Range<u32>| (run.end - run.start, run.start);
                let fits = u64::from(to - from) * u64::from(UNITS_PER_GRANULE) >= u64::from(len);
                if fits && best.as_ref().is_none_or(|(_, run)| key(&(from..to)) < key(run)) {
                    best = Some((id, from..to));
                }
            }
        }
        let Some((id, run)) = best else { return false };
        let epoch = self.last_use(id, run.clone());
        self.bin_remove(id);
        let mut part = id;
        let front = run.start * UNITS_PER_GRANULE - self.nodes[id].start;
        if front > 0 {
            part = self.split_off(id, front);
            self.bin_insert(id);
        }
        let units = (run.end - run.start) * UNITS_PER_GRANULE;
        if units < self.nodes[part].len {
            let rest = self.split_off(part, units);
            self.bin_insert(rest);
        }
        self.nodes[part].epoch = epoch;
        self.bin_insert(part);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Claim, Segment, Stamp};
    use crate::segment::nodes::Kind;
    use std::sync::Arc;

    #[test]
    fn neighbours_of_two_streams_merge_when_both_have_passed() {
        let mut segment = Segment::default();
        segment.add_span(0, 3 << 12);
        let mut node = segment.heads[0];
        segment.nodes[node].kind = Kind::Busy;
        for (owner, epoch) in [(1, 5), (2, 6), (1, 9)] {
            let rest = (segment.nodes[node].len > 1 << 12).then(|| segment.split_off(node, 1 << 12));
            segment.free(node, Stamp { owner, epoch }, 0);
            node = rest.unwrap_or(node);
        }
        assert!(!segment.merge_passed(4));
        assert_eq!(segment.iter().count(), 3);
        assert!(segment.merge_passed(6));
        segment.check().unwrap();
        let whole: Vec<_> = segment.iter().map(|id| (segment.nodes[id].len, segment.stamp(id))).collect();
        assert_eq!(whole, [(3 << 12, Stamp { owner: 1, epoch: 9 })]);
        assert!(!segment.merge_passed(9));
    }

    /// A large segment of free granules, freed one after the other by these streams in these epochs, as one node.
    fn granules(frees: &[(u16, u32)]) -> Segment {
        let mut segment = Segment::large(Arc::default(), Arc::default());
        segment.add_span(0, (frees.len() as u32) << 12);
        let mut node = segment.heads[0];
        segment.nodes[node].kind = Kind::Busy;
        for (at, (owner, epoch)) in frees.iter().enumerate() {
            let rest = (at + 1 < frees.len()).then(|| segment.split_off(node, 1 << 12));
            segment.free(node, Stamp { owner: *owner, epoch: *epoch }, u32::MAX);
            node = rest.unwrap_or(node);
        }
        assert_eq!(segment.iter().count(), 1);
        segment
    }

    fn nodes(segment: &Segment) -> Vec<(u32, u32, Stamp)> {
        let of = |id| (segment.nodes[id].start >> 12, segment.nodes[id].len >> 12, segment.stamp(id));
        segment.iter().map(of).collect()
    }

    #[test]
    fn the_shortest_run_that_has_passed_and_fits_is_parted() {
        let frees = [(1, 9), (1, 2), (1, 3), (1, 4), (2, 9), (1, 5), (1, 3), (2, 9)];
        let claim = Claim { owner: 1, horizon: 5 };
        let hidden = Stamp { owner: 2, epoch: 9 };
        let mut segment = granules(&frees);
        assert!(!segment.part_passed(3 * 4096 + 1, claim), "no run is so long");
        assert!(!segment.part_passed(1, Claim { owner: 2, horizon: 5 }), "the node is its own");
        assert!(!segment.part_passed(1, Claim { owner: 1, horizon: 1 }), "nothing has passed");
        assert_eq!(nodes(&segment), [(0, 8, hidden)]);
        assert!(segment.part_passed(4097, claim));
        let part = |epoch| Stamp { owner: 2, epoch };
        assert_eq!(nodes(&segment), [(0, 5, hidden), (5, 2, part(5)), (7, 1, hidden)]);
        segment.check().unwrap();
        assert!(segment.find_passed(2 << 12, 1, claim, None).is_some());
        assert!(segment.part_passed(3 << 12, claim));
        assert_eq!(nodes(&segment)[..3], [(0, 1, hidden), (1, 3, part(4)), (4, 1, hidden)]);
        segment.check().unwrap();
        assert!(!segment.part_passed(1, claim), "all that has passed is nodes of its own");
        // From the first granule to the last.
        let mut whole = granules(&[(1, 2), (1, 3), (2, 9)]);
        assert!(whole.part_passed(1, claim));
        assert_eq!(nodes(&whole), [(0, 2, part(3)), (2, 1, hidden)]);
        whole.check().unwrap();
    }
}
