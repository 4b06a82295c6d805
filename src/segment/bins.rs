//! Index of free blocks by length: two levels of bitmaps over linked lists, O(1) in every operation.
//!
//! Lengths below 32 units have a bin each; above, every power of two is cut into 32 bins, so that a
//! bin's lengths differ by at most 3 %. Links live in the nodes (see [`super::nodes`]).
#![forbid(unsafe_code)]

use super::nodes::{NIL, Node, NodeId, Nodes};

const SUB_BITS: u32 = 5;
const SUBS: usize = 1 << SUB_BITS;
const LEVELS: usize = 28;

/// Free blocks of one owner in one segment.
#[derive(Debug)]
pub(crate) struct Bins {
    levels: u32,
    subs: [u32; LEVELS],
    heads: [NodeId; LEVELS * SUBS],
}

/// Level and sub-bin of a length.
#[inline]
const fn bin_of(len: u32) -> (usize, usize) {
    // The first two powers of two share a level.
    let log = (len | (SUBS as u32 - 1)).ilog2();
    ((log - (SUB_BITS - 1)) as usize, ((len >> log.saturating_sub(SUB_BITS)) as usize) & (SUBS - 1))
}

impl Default for Bins {
    fn default() -> Self {
        Self { levels: 0, subs: [0; LEVELS], heads: [NIL; LEVELS * SUBS] }
    }
}

impl Bins {
    /// Adds a free block.
    #[inline]
    pub(crate) fn insert(&mut self, nodes: &mut Nodes, id: NodeId) {
        let (level, sub) = bin_of(nodes[id].len);
        let head = std::mem::replace(&mut self.heads[level * SUBS + sub], id);
        nodes[id].bin_prev = NIL;
        nodes[id].bin_next = head;
        // Where there is none, of the node that nobody uses: cheaper than a branch that is often mispredicted.
        nodes[head].bin_prev = id;
        self.subs[level] |= 1 << sub;
        self.levels |= 1 << level;
    }

    /// Takes a block out; its length must be the one it was inserted with.
    #[inline]
    pub(crate) fn remove(&mut self, nodes: &mut Nodes, id: NodeId) {
        let (prev, next, len) = (nodes[id].bin_prev, nodes[id].bin_next, nodes[id].len);
        nodes[next].bin_prev = prev;
        if prev != NIL {
            nodes[prev].bin_next = next;
            return;
        }
        let (level, sub) = bin_of(len);
        debug_assert_eq!(self.heads[level * SUBS + sub], id, "I4: a free block is in the bin of its length");
        self.heads[level * SUBS + sub] = next;
        if next == NIL {
            self.subs[level] &= !(1 << sub);
            if self.subs[level] == 0 {
                self.levels &= !(1 << level);
            }
        }
    }

    /// First non-empty bin at or after (level, sub).
    #[inline]
    fn next_bin(&self, level: usize, sub: usize) -> Option<(usize, usize)> {
        if level >= LEVELS {
            return None;
        }
        let subs = if sub < SUBS { self.subs[level] & (u32::MAX << sub) } else { 0 };
        if subs != 0 {
            return Some((level, subs.trailing_zeros() as usize));
        }
        let levels = self.levels & (u32::MAX.checked_shl(level as u32 + 1).unwrap_or(0));
        if levels == 0 {
            return None;
        }
        let level = levels.trailing_zeros() as usize;
        Some((level, self.subs[level].trailing_zeros() as usize))
    }

    /// The shortest block of at least `len` units (of the lowest address among equals) of the first bin that has one, looking at
    /// no more than `scan` blocks of a bin and `bins` bins.
    #[inline]
    pub(crate) fn shortest(&self, nodes: &Nodes, len: u32, scan: usize, bins: usize) -> Option<NodeId> {
        let (mut level, mut sub) = bin_of(len);
        for _ in 0..bins {
            (level, sub) = self.next_bin(level, sub)?;
            let (mut best, mut top) = (NIL, u64::MAX);
            let mut id = self.heads[level * SUBS + sub];
            for _ in 0..scan {
                // Behind the last one comes the node that nobody uses, of no length, again and again.
                let node = &nodes[id];
                let key = u64::from(node.len) << 32 | u64::from(node.start);
                // No branch that depends on how blocks happen to lie.
                let better = (node.len >= len) & (key < top);
                (best, top) = if better { (id, key) } else { (best, top) };
                id = node.bin_next;
            }
            if best != NIL {
                return Some(best);
            }
            sub += 1;
        }
        None
    }

    /// The block of at least `len` units that `fits`, with the lowest `score` (lowest address among equals) of the
    /// first bin that has one, looking at no more than `scan` blocks of a bin and `bins` bins. One that is alone is not
    /// asked for its score.
    #[inline]
    pub(crate) fn best(
        &self,
        nodes: &Nodes,
        len: u32,
        scan: usize,
        bins: usize,
        fits: impl Fn(&Node) -> bool,
        score: impl Fn(&Node) -> u64,
    ) -> Option<NodeId> {
        let (mut level, mut sub) = bin_of(len);
        for _ in 0..bins {
            (level, sub) = self.next_bin(level, sub)?;
            let mut best = NIL;
            let mut top = None;
            let mut id = self.heads[level * SUBS + sub];
            for _ in 0..scan {
                if id == NIL {
                    break;
                }
                let node = &nodes[id];
                if node.len >= len && fits(node) {
                    if best == NIL {
                        best = id;
                    } else {
                        let key = (score(node), node.start);
                        let old = top.unwrap_or_else(|| (score(&nodes[best]), nodes[best].start));
                        (best, top) = if key < old { (id, Some(key)) } else { (best, Some(old)) };
                    }
                }
                id = node.bin_next;
            }
            if best != NIL {
                return Some(best);
            }
            sub += 1;
        }
        None
    }

    /// Longest block's length, to within its bin (exact for the bin's members looked at).
    pub(crate) fn longest(&self, nodes: &Nodes) -> u32 {
        if self.levels == 0 {
            return 0;
        }
        let level = 31 - self.levels.leading_zeros() as usize;
        let sub = 31 - self.subs[level].leading_zeros() as usize;
        let mut id = self.heads[level * SUBS + sub];
        let mut longest = 0;
        while id != NIL {
            longest = longest.max(nodes[id].len);
            id = nodes[id].bin_next;
        }
        longest
    }

    /// Blocks of at least `len` units, longest bins first.
    pub(crate) fn at_least<'a>(&'a self, nodes: &'a Nodes, len: u32) -> impl Iterator<Item = NodeId> + 'a {
        let floor = bin_of(len);
        let bins = (0..LEVELS)
            .rev()
            .filter(|level| self.levels & (1 << level) != 0)
            .flat_map(|level| (0..SUBS).rev().map(move |sub| (level, sub)));
        bins.take_while(move |bin| *bin >= floor)
            .filter(|(level, sub)| self.subs[*level] & (1 << sub) != 0)
            .flat_map(move |(level, sub)| {
                let mut id = self.heads[level * SUBS + sub];
                std::iter::from_fn(move || {
                    let found = (id != NIL).then_some(id)?;
                    id = nodes[found].bin_next;
                    Some(found)
                })
            })
            .filter(move |id| nodes[*id].len >= len)
    }
}

#[cfg(test)]
mod tests {
    use super::super::nodes::Kind;
    use super::*;

    #[test]
    fn bins_are_ordered_by_length() {
        let mut last = (0, 0);
        for len in (1..5000).chain([1 << 20, (1 << 20) + (1 << 14), 1 << 31, u32::MAX]) {
            let bin = bin_of(len);
            assert!(bin >= last, "{len}");
            assert!(bin.0 < LEVELS && bin.1 < SUBS);
            last = bin;
        }
    }

    #[test]
    fn best_fit_agrees_with_a_sorted_list() {
        let mut nodes = Nodes::default();
        let mut bins = Bins::default();
        let mut plain: Vec<(u32, u32, NodeId)> = Vec::new();
        let mut seed = 11u64;
        for round in 0..3000u32 {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let len = 1 + (seed >> 40) as u32 % 9000;
            if seed & 1 == 0 || plain.is_empty() {
                let id = nodes.insert(Node::new(Kind::Free, round * 10_000, len));
                bins.insert(&mut nodes, id);
                plain.push((len, round * 10_000, id));
            } else {
                let (_, _, id) = plain.swap_remove((seed >> 20) as usize % plain.len());
                bins.remove(&mut nodes, id);
                nodes.remove(id);
            }
            let want = plain.iter().filter(|block| block.0 >= len).min().map(|block| block.2);
            let got = bins.best(&nodes, len, usize::MAX, usize::MAX, |_| true, |node| u64::from(node.len));
            assert_eq!(got, want);
            assert_eq!(bins.longest(&nodes), plain.iter().map(|block| block.0).max().unwrap_or(0));
            assert_eq!(bins.at_least(&nodes, len).count(), plain.iter().filter(|block| block.0 >= len).count());
        }
    }
}
