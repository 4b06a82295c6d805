//! The yardstick: a best-fit allocator of the shape that PyTorch's has.
//!
//! Free blocks in an ordered set by stream, size and address, one for small requests and one for large;
//! blocks in use in a hash map by address; neighbours linked; everything behind one lock. It splits, merges
//! and rounds as PyTorch does, counts bytes, and gets addresses from a counter, so that it never calls a driver.

use std::collections::{BTreeSet, HashMap};
use std::sync::Mutex;

const UNIT: u64 = 512;
const SMALL: u64 = 1 << 20;
const SMALL_SEGMENT: u64 = 2 << 20;
const LARGE_SEGMENT: u64 = 20 << 20;
const LARGE: u64 = 10 << 20;
const NONE: usize = usize::MAX;

#[derive(Clone)]
struct Block {
    address: u64,
    size: u64,
    stream: u64,
    prev: usize,
    next: usize,
    small: bool,
    live: bool,
}

/// Stream, size, address, and the block's place.
type Free = BTreeSet<(u64, u64, u64, usize)>;

#[derive(Default)]
struct State {
    blocks: Vec<Block>,
    unused: Vec<usize>,
    free: [Free; 2],
    live: HashMap<u64, usize>,
    next_address: u64,
    allocated: u64,
    peak: u64,
}

/// See the file's text. Any thread.
#[derive(Default)]
pub(crate) struct Tree(Mutex<State>);

impl State {
    fn insert(&mut self, block: Block) -> usize {
        match self.unused.pop() {
            Some(at) => {
                self.blocks[at] = block;
                at
            }
            None => {
                self.blocks.push(block);
                self.blocks.len() - 1
            }
        }
    }

    fn key(&self, at: usize) -> (u64, u64, u64, usize) {
        let block = &self.blocks[at];
        (block.stream, block.size, block.address, at)
    }

    fn segment(&mut self, size: u64, stream: u64, small: bool) -> usize {
        let bytes = match size {
            _ if small => SMALL_SEGMENT,
            size if size < LARGE => LARGE_SEGMENT,
            size => size.next_multiple_of(2 << 20),
        };
        let address = (1 << 40) + self.next_address;
        self.next_address += bytes + (2 << 20);
        self.insert(Block { address, size: bytes, stream, prev: NONE, next: NONE, small, live: false })
    }

    /// Joins `at` with a free neighbour, which leaves the set.
    fn merge(&mut self, at: usize, other: usize) {
        if other == NONE || self.blocks[other].live {
            return;
        }
        let key = self.key(other);
        self.free[usize::from(self.blocks[at].small)].remove(&key);
        let gone = self.blocks[other].clone();
        if gone.address < self.blocks[at].address {
            (self.blocks[at].address, self.blocks[at].prev) = (gone.address, gone.prev);
            if gone.prev != NONE {
                self.blocks[gone.prev].next = at;
            }
        } else {
            self.blocks[at].next = gone.next;
            if gone.next != NONE {
                self.blocks[gone.next].prev = at;
            }
        }
        self.blocks[at].size += gone.size;
        self.unused.push(other);
    }
}

impl Tree {
    /// Allocates; the address.
    pub(crate) fn alloc(&self, bytes: u64, stream: u64) -> u64 {
        let mut state = self.0.lock().expect("no thread panics");
        let size = bytes.max(1).next_multiple_of(UNIT);
        let small = size <= SMALL;
        let set = usize::from(small);
        let found = state.free[set].range((stream, size, 0, 0)..).next().filter(|key| key.0 == stream).copied();
        let at = match found {
            Some(key) => {
                state.free[set].remove(&key);
                key.3
            }
            None => state.segment(size, stream, small),
        };
        let rest = state.blocks[at].size - size;
        if if small { rest >= UNIT } else { rest > SMALL } {
            let (address, next) = (state.blocks[at].address + size, state.blocks[at].next);
            let left = state.insert(Block { address, size: rest, stream, prev: at, next, small, live: false });
            if next != NONE {
                state.blocks[next].prev = left;
            }
            (state.blocks[at].size, state.blocks[at].next) = (size, left);
            let key = state.key(left);
            state.free[set].insert(key);
        }
        let block = &mut state.blocks[at];
        block.live = true;
        let (address, size) = (block.address, block.size);
        state.live.insert(address, at);
        state.allocated += size;
        state.peak = state.peak.max(state.allocated);
        address
    }

    /// Frees by address.
    pub(crate) fn free(&self, address: u64) {
        let mut state = self.0.lock().expect("no thread panics");
        let at = state.live.remove(&address).expect("a live block");
        state.blocks[at].live = false;
        state.allocated -= state.blocks[at].size;
        let (prev, next) = (state.blocks[at].prev, state.blocks[at].next);
        state.merge(at, prev);
        state.merge(at, next);
        let (key, set) = (state.key(at), usize::from(state.blocks[at].small));
        state.free[set].insert(key);
    }
}
