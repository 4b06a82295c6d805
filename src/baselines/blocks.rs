//! Blocks side by side in segments, with the free ones in order of size: what best fit needs.

use super::SubjectError;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// What a block is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// Memory that nobody uses.
    Free,
    /// The client's, or waiting for events after its free.
    Used,
    /// Addresses without memory.
    Unmapped,
    /// Mapped, but the memory serves at another address now.
    Zombie,
}

/// A range of one segment. Sizes in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Block {
    pub(super) size: u64,
    /// Start of its segment: blocks of two segments never join.
    pub(super) segment: u64,
    /// The list that it is free in (a stream, a pool).
    pub(super) list: u64,
    pub(super) state: State,
    /// When the work before its last free is done.
    pub(super) passed: Duration,
}

impl Block {
    /// A whole segment.
    pub(super) fn segment(start: u64, size: u64, list: u64, state: State) -> Self {
        Self { size, segment: start, list, state, passed: Duration::ZERO }
    }
}

/// All blocks of an allocator.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    all: BTreeMap<u64, Block>,
    /// List, size, address.
    free: BTreeSet<(u64, u64, u64)>,
    /// List, address.
    unmapped: BTreeSet<(u64, u64)>,
}

impl Blocks {
    pub(super) fn get(&self, address: u64) -> Option<&Block> {
        self.all.get(&address)
    }

    /// The live block at `address`.
    pub(super) fn live(&self, address: u64) -> Result<Block, SubjectError> {
        match self.all.get(&address) {
            Some(block) if block.state == State::Used => Ok(*block),
            _ => Err(SubjectError::Other(format!("{address:#x} is not a live block"))),
        }
    }

    /// Adds a block, or replaces the one at its address.
    pub(super) fn put(&mut self, address: u64, block: Block) {
        self.remove(address);
        match block.state {
            State::Free => _ = self.free.insert((block.list, block.size, address)),
            State::Unmapped => _ = self.unmapped.insert((block.list, address)),
            State::Used | State::Zombie => {}
        }
        self.all.insert(address, block);
    }

    /// Takes a block out altogether.
    pub(super) fn remove(&mut self, address: u64) -> Option<Block> {
        let block = self.all.remove(&address)?;
        match block.state {
            State::Free => _ = self.free.remove(&(block.list, block.size, address)),
            State::Unmapped => _ = self.unmapped.remove(&(block.list, address)),
            State::Used | State::Zombie => {}
        }
        Some(block)
    }

    /// The block after this one in its segment.
    pub(super) fn next(&self, address: u64) -> Option<(u64, Block)> {
        let block = self.all.get(&address)?;
        let after = address + block.size;
        self.all.get(&after).filter(|next| next.segment == block.segment).map(|next| (after, *next))
    }

    /// The block before this one in its segment.
    pub(super) fn previous(&self, address: u64) -> Option<(u64, Block)> {
        let block = self.all.get(&address)?;
        let (&at, before) = self.all.range(..address).next_back()?;
        (before.segment == block.segment && at + before.size == address).then_some((at, *before))
    }

    /// Free blocks of a list with at least `size`, smallest first, then by address.
    pub(super) fn fitting(&self, list: u64, size: u64) -> impl Iterator<Item = u64> + '_ {
        self.free.range((list, size, 0)..=(list, u64::MAX, u64::MAX)).map(|(_, _, address)| *address)
    }

    /// The free block with the lowest address that has at least `size`.
    pub(super) fn first_fit(&self, size: u64) -> Option<u64> {
        self.free.range((0, size, 0)..).map(|(_, _, address)| *address).min()
    }

    /// The block with the highest address.
    pub(super) fn last(&self) -> Option<(u64, Block)> {
        self.all.iter().next_back().map(|(address, block)| (*address, *block))
    }

    /// Free blocks of all lists, by list and size.
    pub(super) fn free_blocks(&self) -> Vec<u64> {
        self.free.iter().map(|(_, _, address)| *address).collect()
    }

    /// Unmapped blocks of a list by address.
    pub(super) fn unmapped(&self, list: u64) -> impl Iterator<Item = u64> + '_ {
        self.unmapped.range((list, 0)..=(list, u64::MAX)).map(|(_, address)| *address)
    }

    /// Takes a free block for use; what is beyond `size` stays free if `split` allows that remainder.
    /// The size taken.
    pub(super) fn take(&mut self, address: u64, size: u64, split: impl Fn(u64) -> bool) -> u64 {
        let Some(mut block) = self.remove(address) else { return 0 };
        let rest = block.size.saturating_sub(size);
        if rest > 0 && split(rest) {
            block.size = size;
            self.put(address + size, Block { size: rest, state: State::Free, ..block });
        }
        self.put(address, Block { state: State::Used, ..block });
        block.size
    }

    /// Gives a block the state `state` and joins it with neighbours of the same list and state; where
    /// the joined block starts.
    pub(super) fn settle(&mut self, address: u64, state: State) -> u64 {
        let Some(block) = self.remove(address) else { return address };
        let (mut start, mut joined) = (address, Block { state, ..block });
        self.put(start, joined);
        let same = |other: &Block| other.state == state && other.list == block.list;
        if let Some((at, next)) = self.next(start).filter(|(_, next)| same(next)) {
            self.remove(at);
            joined.size += next.size;
            joined.passed = joined.passed.max(next.passed);
            self.put(start, joined);
        }
        if let Some((at, before)) = self.previous(start).filter(|(_, before)| same(before)) {
            self.remove(start);
            joined.size += before.size;
            joined.passed = joined.passed.max(before.passed);
            start = at;
            self.put(start, joined);
        }
        start
    }

    /// [`Blocks::settle`] for a free block whose last work is done at `passed`.
    pub(super) fn settle_free(&mut self, address: u64, passed: Duration) -> u64 {
        if let Some(block) = self.all.get_mut(&address) {
            block.passed = passed;
        }
        self.settle(address, State::Free)
    }

    /// Moves a free block of at least `size` to another list, and leaves what is beyond `size` where it was.
    pub(super) fn hand_over(&mut self, address: u64, size: u64, list: u64) {
        let Some(block) = self.remove(address) else { return };
        if block.size > size {
            self.put(address + size, Block { size: block.size - size, ..block });
        }
        self.put(address, Block { size: block.size.min(size), list, ..block });
    }

    /// The free block that holds all of this range.
    pub(super) fn free_around(&self, address: u64, size: u64) -> Option<(u64, Block)> {
        let (&at, block) = self.all.range(..=address).next_back()?;
        (block.state == State::Free && at + block.size >= address + size).then_some((at, *block))
    }

    /// Cuts exactly this range out of the free block around it, for use; whether there was one.
    pub(super) fn carve(&mut self, address: u64, size: u64) -> bool {
        let Some((at, block)) = self.free_around(address, size) else { return false };
        self.remove(at);
        for (start, end, state) in [
            (at, address, State::Free),
            (address, address + size, State::Used),
            (address + size, at + block.size, State::Free),
        ] {
            if start < end {
                self.put(start, Block { size: end - start, state, ..block });
            }
        }
        true
    }

    /// Is the block all of its segment?
    pub(super) fn is_whole(&self, address: u64) -> bool {
        self.next(address).is_none() && self.previous(address).is_none()
    }

    /// Drops every segment that is one free block, and tells `release` its start.
    pub(super) fn drop_whole(&mut self, mut release: impl FnMut(u64)) {
        for at in self.free_blocks() {
            if self.is_whole(at) {
                self.remove(at);
                release(at);
            }
        }
    }
}
