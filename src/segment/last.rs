//! The last cut of a large segment, taken back and made again without merging.
//!
//! Cutting a large block out and merging it again costs several times what the rest of a pair costs, most of all noting
//! when each of its granules was last used. Where the block that was cut last is freed and nothing else happened to the
//! segment meanwhile, free memory is afterwards what it was before, so that the same request would be served in the same
//! place. So that block is *taken back*: it stays a node of its own, and a request of its length and stream gets it again.
//! Anything else merges it first, as [`Segment::free`] would have when it was freed: placement, stamps and ages are the
//! same as without this, to the last unit.
#![forbid(unsafe_code)]

use super::cache::Kept;
use super::nodes::{Kind, NIL, NodeId};
use super::{Segment, Stamp, merged};

/// See the module's text.
#[derive(Debug, Default)]
pub(crate) struct LastCut {
    /// The block, if nothing but its free has happened since.
    node: NodeId,
    /// It was freed, and is not merged.
    taken_back: bool,
    /// The last epoch that had passed then.
    passed: u32,
}

impl Segment {
    /// Notes that a block was cut off the front of free memory of its own stream.
    #[inline]
    pub(crate) fn note_cut(&mut self, id: NodeId) {
        debug_assert!(!self.last.taken_back, "merged before anything was cut");
        self.last.node = id;
    }

    /// Takes a cut back: the block is free. `None`, and nothing is done, where it was not the last one, or where its free
    /// memory would not be what it was before.
    #[inline]
    pub(crate) fn take_back(&mut self, id: NodeId, epoch: u32, passed: u32) -> Option<Kept> {
        if id == NIL || self.last.node != id {
            return None;
        }
        let node = &self.nodes[id];
        debug_assert_eq!(node.kind, Kind::Live);
        let (len, slack, owner) = (node.len, node.slack, node.owner);
        let merges = |neighbour: NodeId| {
            let free = self.nodes[neighbour].kind == Kind::Free;
            free && merged(Stamp { owner, epoch }, self.stamp(neighbour), passed).is_some()
        };
        // What follows is the rest that the cut left, if it is the stream's: nothing else of that stream was free there.
        if node.has_uses || merges(node.prev) || (self.nodes[node.next].owner != owner && merges(node.next)) {
            return None;
        }
        let node = &mut self.nodes[id];
        (node.kind, node.epoch, node.age) = (Kind::Cached, epoch, self.history.tick());
        (self.last.taken_back, self.last.passed) = (true, passed);
        self.live_blocks -= 1;
        let fresh = self.note_freed(len, epoch);
        Some(Kept { len, slack, fresh })
    }

    /// Makes the cut that was taken back again, if it gives a block of this length and stream: the block and its first
    /// unit. `slack`: its bytes that nobody asked for.
    #[inline]
    pub(crate) fn cut_again(&mut self, len: u32, slack: u32, owner: u16) -> Option<(NodeId, u32)> {
        let id = self.last.node;
        let node = &mut self.nodes[id];
        if !self.last.taken_back || node.len != len || node.owner != owner {
            return None;
        }
        (node.kind, node.slack) = (Kind::Live, slack);
        let (start, epoch, age, next) = (node.start, node.epoch, node.age, node.next);
        self.last.taken_back = false;
        self.note_block(len);
        self.note_taken(len, epoch);
        // The rest would have been one block with it meanwhile. Where the lower half of the clock turned between the two it keeps
        // its own age, which is when it was freed itself.
        let rest = &mut self.nodes[next];
        if rest.kind == Kind::Free && rest.owner == owner {
            (rest.epoch, rest.age) = (rest.epoch.max(epoch), rest.age.max(age));
        }
        Some((id, start))
    }

    /// Merges what was taken back. What happens next is no free of the block that was cut last.
    #[inline]
    pub(crate) fn merge_last(&mut self) {
        let id = std::mem::replace(&mut self.last.node, NIL);
        if std::mem::take(&mut self.last.taken_back) {
            self.nodes[id].kind = Kind::Free;
            self.note_used(id);
            self.coalesce::<true>(id, self.last.passed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Claim;
    use super::super::nodes::Node;
    use super::*;
    use crate::edges::Edges;
    use crate::units::{UNITS_PER_GRANULE, granule_ceil, granule_floor};
    use std::sync::Arc;

    const GRANULES: u32 = 48;

    fn segment() -> Segment {
        let mut segment = Segment::large(Arc::default(), Arc::default());
        segment.add_span(0, GRANULES * UNITS_PER_GRANULE);
        let all = segment.heads[0];
        segment.nodes[all].kind = Kind::Busy;
        segment.free(all, Stamp { owner: 1, epoch: 0 }, 0);
        segment
    }

    fn edges() -> Edges {
        let edges = Edges::default();
        (0..GRANULES / 4).for_each(|handle| edges.set_handle(handle * 4..handle * 4 + 4));
        edges
    }

    /// What [`super::super`] offers without taking back: node and first unit.
    fn cut(segment: &mut Segment, edges: &Edges, len: u32, claim: Claim) -> Option<(NodeId, u32)> {
        let found =
            segment.find_own(len, 1, claim, Some(edges)).or_else(|| segment.find_passed(len, 1, claim, Some(edges)))?;
        let own = segment.nodes[found].owner == claim.owner;
        let live = segment.take(found, len, 1, claim.owner);
        if own {
            segment.note_cut(live);
        } else {
            segment.merge_last();
        }
        Some((live, segment.nodes[live].start))
    }

    fn everything(segment: &Segment) -> Vec<(u32, u32, Kind, Stamp, u32, u32)> {
        // Whole ones: those that a live block shares do not go anywhere, and its free will be noted.
        let granules = |node: &Node| granule_ceil(node.start)..granule_floor(node.end()).max(granule_ceil(node.start));
        let of = |id| {
            let node = &segment.nodes[id];
            // Of live ones stamp and age mean nothing.
            let (stamp, age, used) = match node.kind {
                Kind::Free => (segment.stamp(id), node.age, segment.last_use(id, granules(node))),
                _ => (Stamp::default(), 0, 0),
            };
            (node.start, node.len, node.kind, stamp, age, used)
        };
        segment.iter().map(of).collect()
    }

    /// Frees in mostly the reverse order, by two streams, with epochs that close and pass: every address, stamp, age and last
    /// use is what it is where every free merges at once.
    #[test]
    fn placement_is_the_same_as_with_merging_at_once() {
        let edges = edges();
        let (mut again, mut backs) = (0, 0);
        for seed in 0..60_u64 {
            let (mut lazy, mut plain) = (segment(), segment());
            let mut live: Vec<(NodeId, NodeId, u16)> = Vec::new();
            let (mut epoch, mut passed) = (1, 0);
            let mut state = seed;
            let mut random = |below: u64| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 33) % below
            };
            for step in 0..2000 {
                let choice = random(100);
                if choice < 50 {
                    let len = (1 + random(3) as u32) * 4500;
                    let owner = if random(6) == 0 { 2 } else { 1 };
                    let claim = Claim { owner, horizon: passed };
                    let mine = lazy.cut_again(len, 0, owner).inspect(|_| again += 1).or_else(|| {
                        lazy.merge_last();
                        cut(&mut lazy, &edges, len, claim)
                    });
                    let theirs = cut(&mut plain, &edges, len, claim);
                    plain.merge_last();
                    assert_eq!(mine.map(|found| found.1), theirs.map(|found| found.1), "seed {seed}, step {step}");
                    if let (Some(mine), Some(theirs)) = (mine, theirs) {
                        live.push((mine.0, theirs.0, owner));
                    }
                } else if choice < 97 && !live.is_empty() {
                    let at = if random(10) == 0 { random(live.len() as u64) as usize } else { live.len() - 1 };
                    let (mine, theirs, owner) = live.remove(at);
                    match lazy.take_back(mine, epoch, passed) {
                        Some(kept) => {
                            backs += 1;
                            assert_eq!((kept.len, kept.fresh), (plain.nodes[theirs].len, plain.fresh_units(epoch)));
                        }
                        None => {
                            lazy.merge_last();
                            lazy.free(mine, Stamp { owner, epoch }, passed);
                        }
                    }
                    plain.free(theirs, Stamp { owner, epoch }, passed);
                } else if choice < 99 {
                    epoch += 1;
                    passed = passed.max(epoch - 1 - random(3).min(u64::from(epoch - 1)) as u32);
                } else {
                    lazy.flush(passed);
                    lazy.check().unwrap();
                    assert_eq!(everything(&lazy), everything(&plain), "seed {seed}, step {step}");
                    // Also the order in which a search comes to them.
                    let order = |segment: &Segment| -> Vec<u32> {
                        segment.free_nodes(1).map(|id| segment.nodes[id].start).collect()
                    };
                    assert_eq!(order(&lazy), order(&plain), "seed {seed}, step {step}");
                }
                assert_eq!(lazy.fresh_units(epoch), plain.fresh_units(epoch));
                assert_eq!(lazy.history.churn(), plain.history.churn());
                assert_eq!(lazy.live_blocks, plain.live_blocks);
            }
        }
        assert!(again > 2_000 && backs > again, "{again} of {backs}");
    }

    #[test]
    fn only_the_last_cut_is_taken_back_and_anything_else_forgets_it() {
        let (mut segment, edges) = (segment(), edges());
        let claim = Claim { owner: 1, horizon: 0 };
        let [first, second] = [3000, 4000].map(|len| cut(&mut segment, &edges, len, claim).unwrap().0);
        assert!(segment.take_back(first, 1, 0).is_none() && segment.take_back(NIL, 1, 0).is_none());
        segment.nodes[second].has_uses = true;
        assert!(segment.take_back(second, 1, 0).is_none(), "it must wait for another stream");
        segment.nodes[second].has_uses = false;
        let kept = segment.take_back(second, 7, 0).unwrap();
        assert_eq!((kept.len, kept.fresh, segment.live_blocks, segment.fresh_units(7)), (4000, 0, 1, 4000));
        assert_eq!(segment.cut_again(4001, 0, 1), None, "another length");
        assert_eq!(segment.cut_again(4000, 0, 2), None, "another stream");
        assert_eq!(segment.cut_again(4000, 5, 1), Some((second, 3000)));
        assert_eq!((segment.nodes[second].slack, segment.fresh_units(7)), (5, 0));
        assert_eq!(segment.cut_again(4000, 0, 1), None, "it is in use");
        // The rest that the cut leaves has the stamp that it would have if they had been merged.
        let rest = segment.nodes[second].next;
        assert_eq!(segment.stamp(rest), Stamp { owner: 1, epoch: 7 });
        assert!(segment.take_back(second, 9, 0).is_some());
        segment.suspend(first);
        assert_eq!(segment.cut_again(4000, 0, 1), None, "something else happened");
        let nodes: Vec<_> = segment.iter().map(|id| (segment.nodes[id].kind, segment.stamp(id).epoch)).collect();
        assert_eq!(nodes, [(Kind::Pending, 0), (Kind::Free, 9)]);
        segment.check().unwrap();
    }
}
