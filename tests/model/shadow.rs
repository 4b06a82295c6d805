//! A shadow of the heap that knows every byte's owner, by the physical memory behind it.
//!
//! What it asserts of each new block, whatever address it has: no live block shares its memory; uses that
//! were declared of that memory have completed; uses that were not declared have completed too, unless the
//! memory was the asking stream's own (its order is the client's business) or the stream waits on the
//! device. That queued work never loses its mapping is the simulated device's part.

use crate::support::Lab;
use std::collections::BTreeSet;
use std::time::Duration;
use xseg::backend::sim::SimBackend;
use xseg::backend::{EventScope, PhysicalAllocation, StreamId};
use xseg::units::{GRANULE, UNIT};
use xseg::{Allocation, Error, Stats};

/// Memory of a handle: (handle, offset, bytes).
pub(crate) type Piece = (PhysicalAllocation, u64, u64);

fn overlap(a: &[Piece], b: &[Piece]) -> bool {
    a.iter().any(|x| b.iter().any(|y| x.0 == y.0 && x.1 < y.1 + y.2 && y.1 < x.1 + x.2))
}

#[derive(Debug)]
pub(crate) struct Live {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) size: u64,
    pub(crate) owner: StreamId,
    pieces: Vec<Piece>,
    /// Streams that the client declared.
    declared: Vec<StreamId>,
    /// Work queued on it: (stream, done at).
    work: Vec<(StreamId, Duration)>,
}

/// Work on memory whose block was freed.
#[derive(Debug)]
struct Use {
    pieces: Vec<Piece>,
    owner: StreamId,
    stream: StreamId,
    done: Duration,
    declared: bool,
}

#[derive(Debug)]
struct Pin {
    address: u64,
    bytes: u64,
    pieces: Vec<Piece>,
}

/// See the module's text.
pub(crate) struct Shadow<'a> {
    lab: &'a Lab,
    pub(crate) live: Vec<Live>,
    uses: Vec<Use>,
    pins: Vec<Pin>,
    /// Reserved memory may exceed the limit only by what was there when it was lowered.
    bound: u64,
    limit: u64,
    /// Policy: idle memory is in granules, all of which may be had.
    fine: bool,
    /// Policy: a GPU-side wait may stand in for a completed event.
    gpu_waits: bool,
    /// Largest handle that was asked for, in bytes.
    largest_handle: u64,
    pub(crate) served: u64,
    pub(crate) refused: u64,
}

impl<'a> Shadow<'a> {
    pub(crate) fn new(lab: &'a Lab, fine: bool, gpu_waits: bool) -> Self {
        let limit = lab.heap.limit();
        Self {
            lab,
            live: Vec::new(),
            uses: Vec::new(),
            pins: Vec::new(),
            bound: limit,
            limit,
            fine,
            gpu_waits,
            largest_handle: 0,
            served: 0,
            refused: 0,
        }
    }

    fn sim(&self) -> &'a SimBackend {
        self.lab.sim()
    }

    pub(crate) fn alloc(&mut self, bytes: u64, align: u64, stream: StreamId) {
        match self.lab.heap.alloc_aligned(bytes, align, stream) {
            Ok(block) => self.enter(block, bytes, align, UNIT, stream),
            Err(error) => {
                self.refuse(&error, bytes, stream);
                self.refusal_is_right(bytes, align);
            }
        }
    }

    /// On one handle, which there may not be although there is memory.
    pub(crate) fn alloc_contiguous(&mut self, bytes: u64, stream: StreamId) {
        let size = bytes.max(1).next_multiple_of(GRANULE);
        (self.fine, self.largest_handle) = (false, self.largest_handle.max(size));
        match self.lab.heap.alloc_contiguous(bytes, stream) {
            Ok(block) => {
                let handles = self.sim().resolve(block.address(), block.size()).map(|pieces| pieces.len());
                assert_eq!(handles, Some(1));
                self.enter(block, bytes, GRANULE, GRANULE, stream);
            }
            Err(error) => self.refuse(&error, bytes, stream),
        }
    }

    fn refuse(&mut self, error: &Error, bytes: u64, stream: StreamId) {
        let Error::OutOfMemory(fields) = error else { panic!("{error}") };
        assert_eq!((fields.requested, fields.stream), (bytes, stream.0));
        self.refused += 1;
    }

    /// A block that was handed out at a multiple of `align`, rounded up to `unit`.
    fn enter(&mut self, block: Allocation, bytes: u64, align: u64, unit: u64, stream: StreamId) {
        self.served += 1;
        let (address, size) = (block.address(), block.size());
        assert_eq!((block.len(), address % align.max(UNIT), size), (bytes, 0, bytes.max(1).next_multiple_of(unit)));
        assert_eq!(block.into_raw(), address);
        let pieces = self.sim().resolve(address, size).expect("a block has memory throughout");
        for other in &self.live {
            assert!(address + size <= other.address || other.address + other.size <= address, "blocks overlap");
            assert!(!overlap(&pieces, &other.pieces), "{address:#x} and {:#x} share memory", other.address);
        }
        let now = self.lab.time.now();
        self.uses.retain(|one| one.done > now);
        let starts = self.lab.time.completion(EventScope::Stream(stream));
        for one in self.uses.iter().filter(|one| overlap(&one.pieces, &pieces)) {
            let ordered = one.stream == stream || one.owner == stream || (self.gpu_waits && starts >= one.done);
            assert!(ordered && !one.declared, "memory of {address:#x} for {stream:?} is still in use: {one:?}");
        }
        let (declared, work) = (Vec::new(), Vec::new());
        self.live.push(Live { address, bytes, size, owner: stream, pieces, declared, work });
    }

    /// With handles of one granule all idle memory can be had, once the waits are over.
    fn refusal_is_right(&self, bytes: u64, align: u64) {
        if !self.fine {
            return;
        }
        let held = self.live.iter().map(|one| &one.pieces).chain(self.pins.iter().map(|pin| &pin.pieces));
        let held: BTreeSet<_> = held.flatten().flat_map(|piece| granules(*piece)).collect();
        // A stream's small blocks lie apart, so that they may need a granule of their own.
        let need = (bytes + align).div_ceil(GRANULE) + 1;
        let room = (self.limit / GRANULE).saturating_sub(held.len() as u64);
        assert!(room < need, "refused {bytes} bytes with {room} granules not in use: {:?}", self.lab.heap.stats());
    }

    pub(crate) fn work(&mut self, which: usize, stream: StreamId, length: Duration) {
        let one = &mut self.live[which];
        self.lab.work_at(stream, one.address, one.size, length);
        one.work.push((stream, self.lab.time.completion(EventScope::Stream(stream))));
    }

    pub(crate) fn declare(&mut self, which: usize, stream: StreamId) {
        let one = &mut self.live[which];
        match self.lab.heap.record_use(one.address, stream) {
            Ok(()) if one.owner != stream => one.declared.push(stream),
            other => other.unwrap(),
        }
    }

    pub(crate) fn free(&mut self, which: usize) {
        let one = self.live.swap_remove(which);
        assert_eq!(self.lab.heap.block_size(one.address).unwrap(), (one.bytes, one.size));
        let pieces = self.sim().resolve(one.address, one.size);
        assert_eq!(pieces.as_ref(), Some(&one.pieces), "the memory of a live block changed");
        self.lab.heap.free_raw(one.address).unwrap();
        for (stream, done) in one.work {
            let declared = one.declared.contains(&stream);
            self.uses.push(Use { pieces: one.pieces.clone(), owner: one.owner, stream, done, declared });
        }
        assert!(matches!(self.lab.heap.free_raw(one.address), Err(Error::InvalidPointer { .. })));
    }

    pub(crate) fn pin(&mut self, which: usize) {
        let (address, bytes) = (self.live[which].address, self.live[which].size);
        self.lab.heap.pin(address, bytes).unwrap();
        // Whole granules are pinned.
        let start = address / GRANULE * GRANULE;
        let bytes_pinned = (address + bytes).next_multiple_of(GRANULE) - start;
        let pieces = self.sim().resolve(start, bytes_pinned).unwrap();
        self.pins.push(Pin { address, bytes, pieces });
    }

    pub(crate) fn unpin(&mut self, which: usize) {
        if !self.pins.is_empty() {
            let pin = self.pins.swap_remove(which % self.pins.len());
            self.lab.heap.unpin(pin.address, pin.bytes).unwrap();
        }
    }

    pub(crate) fn set_limit(&mut self, bytes: u64) {
        let left = self.lab.heap.set_limit(bytes);
        self.limit = bytes;
        self.bound = bytes.max(left);
    }

    /// The stream ends; its blocks live on and may be freed, its work goes on.
    pub(crate) fn retire(&mut self, stream: StreamId) {
        match self.lab.heap.retire_stream(stream) {
            Ok(()) | Err(Error::DeadStream { .. }) => {}
            Err(error) => panic!("{error}"),
        }
        // Nobody relies on its order any more.
        for one in &mut self.live {
            if one.owner == stream {
                one.owner = StreamId(u64::MAX);
            }
        }
        for one in &mut self.uses {
            if one.owner == stream {
                one.owner = StreamId(u64::MAX);
            }
        }
    }

    /// What holds after every step; `deep` walks the heap.
    pub(crate) fn check(&mut self, deep: bool) {
        assert_eq!(self.sim().violations(), Vec::<String>::new());
        let reserved = self.sim().memory_in_use();
        assert!(reserved <= self.bound, "{reserved} reserved, limit {}", self.limit);
        self.bound = self.limit.max(reserved);
        if !deep {
            return;
        }
        self.lab.check();
        let stats = self.lab.heap.stats();
        let size: u64 = self.live.iter().map(|one| one.size).sum();
        let bytes: u64 = self.live.iter().map(|one| one.bytes).sum();
        assert_eq!((stats.allocated, stats.requested, stats.live_blocks), (size, bytes, self.live.len() as u64));
        assert!(stats.peak_allocated >= size && stats.bytes_copied == 0);
        for pin in &self.pins {
            let start = pin.address / GRANULE * GRANULE;
            let bytes = pin.pieces.iter().map(|piece| piece.2).sum();
            let pieces = self.sim().resolve(start, bytes).map(|pieces| joined(&pieces));
            assert_eq!(pieces, Some(joined(&pin.pieces)), "pinned memory at {:#x} changed", pin.address);
        }
    }

    /// Frees all, waits, trims: `keep` bytes may stay.
    pub(crate) fn finish(mut self, keep: u64, handle_max: u64) -> Stats {
        while !self.live.is_empty() {
            self.free(self.live.len() / 2);
        }
        while !self.pins.is_empty() {
            self.unpin(0);
        }
        self.check(true);
        // Twice: the first may be what closes the last epoch, whose event has a lag.
        for _ in 0..2 {
            self.lab.time.advance(Duration::from_secs(600));
            self.lab.heap.tick();
        }
        let before = self.lab.reserved();
        self.lab.heap.trim();
        self.check(true);
        let stats = self.lab.heap.stats();
        assert_eq!((stats.live_blocks, stats.pending, stats.zombie, stats.pinned), (0, 0, 0, 0));
        let most = keep.max(1) + handle_max.max(self.largest_handle);
        assert!(stats.reserved >= keep.min(before) && stats.reserved < most, "{stats:?}");
        assert!(keep > 0 || stats.reserved == 0, "{stats:?}");
        stats
    }
}

/// Pieces that follow each other in a handle as one.
fn joined(pieces: &[Piece]) -> Vec<Piece> {
    let mut out: Vec<Piece> = Vec::new();
    for piece in pieces {
        match out.last_mut() {
            Some(last) if last.0 == piece.0 && last.1 + last.2 == piece.1 => last.2 += piece.2,
            _ => out.push(*piece),
        }
    }
    out
}

fn granules((handle, offset, bytes): Piece) -> impl Iterator<Item = (u64, u64)> {
    (offset / GRANULE..(offset + bytes).div_ceil(GRANULE)).map(move |granule| (handle.0, granule))
}
