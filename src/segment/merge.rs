//! Free memory whose stamps allow more, or less, than when it was freed.
#![forbid(unsafe_code)]

use super::nodes::{Kind, NIL, NodeId};
use super::{Segment, Stamp, merged};

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
                    id = self.coalesce(id, passed);
                    any = true;
                } else {
                    id = next;
                }
            }
        }
        any
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Segment, Stamp};
    use crate::segment::nodes::Kind;

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
}
