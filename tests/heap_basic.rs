//! Allocating and freeing: sizes, alignment, ownership, wrong pointers, determinism.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod support;

use support::{Lab, Random, S0, S1, S2, host, sim};
use xseg::error::PointerFault;
use xseg::units::{GIB, GRANULE, KIB, MIB, UNIT, round_up};
use xseg::{Allocation, Error, Heap};

#[track_caller]
fn fault_of(result: Result<(), Error>, at: u64) -> PointerFault {
    match result {
        Err(Error::InvalidPointer { address, why }) if address == at => why,
        other => panic!("an invalid pointer was expected, not {other:?}"),
    }
}

#[test]
fn blocks_of_all_sizes_are_apart_and_counted() {
    let lab = sim("");
    let sizes = [0, 1, 511, 512, 513, 100 * KIB, MIB - 1, MIB, MIB + 1, GRANULE, 3 * MIB + 7, 64 * MIB, GIB + 1];
    let blocks: Vec<Allocation> = sizes.iter().map(|bytes| lab.alloc(*bytes, S1)).collect();
    for (block, bytes) in blocks.iter().zip(sizes) {
        let rounded = round_up(bytes.max(1), UNIT).unwrap();
        assert_eq!((block.len(), block.size(), block.stream()), (bytes, rounded, S1));
        assert_eq!(block.is_empty(), bytes == 0);
        assert_eq!(block.address() % UNIT, 0);
        assert_eq!(lab.heap.block_size(block.address()).unwrap(), (bytes, rounded));
    }
    let mut ranges: Vec<(u64, u64)> = blocks.iter().map(|b| (b.address(), b.address() + b.size())).collect();
    ranges.sort_unstable();
    assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{ranges:x?}");
    let stats = lab.heap.stats();
    assert_eq!(stats.requested, sizes.iter().sum::<u64>());
    assert_eq!(stats.allocated, blocks.iter().map(Allocation::size).sum::<u64>());
    assert_eq!((stats.live_blocks, stats.allocs, stats.frees), (13, 13, 0));
    assert_eq!(stats.free, stats.reserved - stats.allocated);
    lab.check();
    drop(blocks);
    let after = lab.heap.stats();
    assert_eq!((after.frees, after.peak_allocated, after.peak_requested), (13, stats.allocated, stats.requested));
    lab.ends_with(0);
}

#[test]
fn size_zero_is_a_block_of_its_own() {
    let lab = sim("");
    let (a, b) = (lab.alloc(0, S1), lab.alloc(0, S1));
    assert_ne!(a.address(), b.address());
    assert_eq!((a.len(), a.size(), a.is_empty()), (0, 512, true));
    let raw = a.into_raw();
    lab.heap.free_raw(raw).unwrap();
    assert_eq!(fault_of(lab.heap.free_raw(raw), raw), PointerFault::Freed);
    drop(b);
    lab.ends_with(0);
}

#[test]
fn alignment_is_kept_at_every_power_of_two() {
    let lab = sim("");
    let mut blocks = Vec::new();
    for bytes in [512, 5 * KIB, MIB + 512, 2 * MIB, 9 * MIB + 512] {
        for shift in 9..=21 {
            // An odd neighbour, so that the next free unit is not aligned by chance.
            blocks.push(lab.alloc(512 * 3, S1));
            blocks.push(lab.alloc(MIB + 512, S1));
            let block = lab.heap.alloc_aligned(bytes, 1 << shift, S1).unwrap();
            assert_eq!(block.address() % (1 << shift), 0, "{bytes} at {}", 1 << shift);
            blocks.push(block);
        }
    }
    lab.check();
    // Holes of the freed blocks are reused with alignment too.
    let mut index = 0;
    blocks.retain(|_| {
        index += 1;
        index % 3 != 0
    });
    for shift in 9..=21 {
        let block = lab.heap.alloc_aligned(3 * MIB, 1 << shift, S1).unwrap();
        assert_eq!(block.address() % (1 << shift), 0);
        blocks.push(block);
    }
    lab.check();
    for align in [1, 2, 256] {
        assert_eq!(lab.heap.alloc_aligned(100, align, S1).unwrap().address() % 512, 0);
    }
    drop(blocks);
    lab.ends_with(0);
}

#[test]
fn a_wrong_alignment_is_an_error_that_names_it() {
    let lab = sim("");
    for align in [0, 3, 513, 4 * MIB] {
        match lab.heap.alloc_aligned(1024, align, S1) {
            Err(Error::InvalidArgument(why)) => assert!(why.contains(&align.to_string()), "{why}"),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(lab.heap.stats().allocs, 0);
}

#[test]
fn wrong_pointers_are_told_apart_and_harm_nothing() {
    let lab = sim("");
    let large = lab.alloc(5 * MIB, S1);
    let small = lab.alloc(700, S1);
    let gone = lab.alloc(3 * MIB, S1).into_raw();
    lab.heap.free_raw(gone).unwrap();
    let before = lab.heap.stats();
    assert_eq!(fault_of(lab.heap.free_raw(gone), gone), PointerFault::Freed);
    for inside in [large.address() + 1, large.address() + 512, large.address() + 5 * MIB - 1, small.address() + 512] {
        assert_eq!(fault_of(lab.heap.free_raw(inside), inside), PointerFault::Interior);
        assert_eq!(fault_of(lab.heap.record_use(inside, S2), inside), PointerFault::Interior);
        assert_eq!(fault_of(lab.heap.block_size(inside).map(drop), inside), PointerFault::Interior);
    }
    assert!(matches!(lab.heap.retire_stream(S2), Err(Error::DeadStream { stream: 2, .. })), "it was never used");
    for foreign in [0, 1, 512, 1 << 30, u64::MAX, u64::MAX - 511] {
        assert_eq!(fault_of(lab.heap.free_raw(foreign), foreign), PointerFault::Foreign);
        assert_eq!(fault_of(lab.heap.pin(foreign, 512), foreign), PointerFault::Foreign);
        assert!(matches!(lab.heap.pin(foreign, 0), Err(Error::InvalidArgument(_))), "a range of nothing");
    }
    let unused = large.address() + GIB;
    assert_eq!(fault_of(lab.heap.free_raw(unused), unused), PointerFault::Freed);
    let other = sim("");
    let theirs = host("");
    let foreign = theirs.alloc(MIB, S1);
    assert_eq!(fault_of(other.heap.free_raw(foreign.address()), foreign.address()), PointerFault::Foreign);
    let after = lab.heap.stats();
    assert_eq!((after.allocated, after.live_blocks, after.free), (before.allocated, 2, before.free));
    assert_eq!(after.frees, 1);
    lab.check();
    drop((large, small));
    lab.ends_with(0);
}

#[test]
fn a_block_is_freed_when_its_last_owner_goes() {
    let lab = sim("");
    let block = lab.alloc(4 * MIB, S1);
    assert_eq!(lab.heap.stats().allocated, 4 * MIB);
    let moved = block;
    drop(moved);
    assert_eq!(lab.heap.stats().allocated, 0);
    // A bare address outlives the handle that gave it.
    let raw = lab.alloc(4 * MIB, S1).into_raw();
    assert_eq!(lab.heap.stats().allocated, 4 * MIB);
    let other: Heap = lab.heap.clone();
    std::thread::spawn(move || other.free_raw(raw)).join().unwrap().unwrap();
    assert_eq!(lab.heap.stats().allocated, 0);
    let raw = lab.heap.alloc_raw(100, S1).unwrap();
    assert_eq!(lab.heap.block_size(raw).unwrap(), (100, 512));
    lab.heap.free_raw(raw).unwrap();
    lab.ends_with(0);
}

#[test]
fn own_memory_is_reused_at_once_and_in_place() {
    let lab = sim("");
    for bytes in [512, 700 * KIB, 6 * MIB] {
        let first = lab.alloc(bytes, S1);
        let address = first.address();
        lab.work(S1, &first, support::MS);
        drop(first);
        let calls = lab.heap.stats().driver_calls;
        let again = lab.alloc(bytes, S1);
        assert_eq!(again.address(), address);
        assert_eq!(lab.heap.stats().driver_calls, calls);
    }
    lab.ends_with(0);
}

#[test]
fn freed_neighbours_become_one_range() {
    let lab = sim("limit:64MiB");
    for order in [[0, 1, 2, 3], [3, 2, 1, 0], [0, 2, 1, 3], [1, 3, 0, 2]] {
        let mut blocks: Vec<Option<Allocation>> = (0..4).map(|_| Some(lab.alloc(16 * MIB, S1))).collect();
        for index in order {
            blocks[index] = None;
            lab.check();
        }
        let before = lab.heap.stats();
        assert_eq!(before.largest_free, 64 * MIB);
        let whole = lab.alloc(64 * MIB, S1);
        let after = lab.heap.stats();
        assert_eq!(after.driver_calls, before.driver_calls, "one free range serves it");
        drop(whole);
    }
}

#[test]
fn growth_stops_before_memory_that_is_there() {
    let lab = sim("growth:step=16MiB");
    drop(lab.alloc(16 * MIB, S1));
    lab.heap.trim();
    // Addresses without memory, then free memory that the work of stream 1 keeps, then nothing.
    let (a, b) = (lab.alloc(8 * MIB, S1), lab.alloc(8 * MIB, S1));
    lab.work(S1, &b, support::MS);
    drop(a);
    lab.heap.trim();
    drop(b);
    let whole = lab.alloc(16 * MIB, S1);
    lab.check();
    drop(whole);
    lab.ends_with(0);
}

/// A run of allocations and frees on three streams; offsets from the first block.
fn offsets(lab: &Lab) -> Vec<i64> {
    let mut random = Random(77);
    let first = lab.alloc(MIB + 1, S0);
    let mut live: Vec<Allocation> = Vec::new();
    let mut out = Vec::new();
    for step in 0..1500 {
        if random.below(5) < 3 || live.is_empty() {
            let shift = random.below(26);
            let bytes = random.below(1 << shift) + 1;
            match lab.heap.alloc(bytes, [S0, S1, S2][random.below(3) as usize]) {
                Ok(block) => {
                    out.push(block.address().wrapping_sub(first.address()) as i64);
                    live.push(block);
                }
                Err(Error::OutOfMemory(_)) => out.push(i64::MIN),
                Err(error) => panic!("{error}"),
            }
        } else {
            drop(live.swap_remove(random.below(live.len() as u64) as usize));
        }
        if step % 200 == 0 {
            lab.heap.tick();
            lab.time.advance(support::MS);
        }
    }
    lab.check();
    out
}

#[test]
fn the_same_calls_give_the_same_offsets_wherever_the_system_puts_the_heap() {
    let conf = "limit:192MiB,reserve:16GiB";
    let (one, two, elsewhere) = (offsets(&sim(conf)), offsets(&sim(conf)), offsets(&host(conf)));
    assert!(one.iter().filter(|offset| **offset == i64::MIN).count() < one.len() / 2, "most requests are served");
    assert!(one == two, "two runs differ");
    assert!(one == elsewhere, "runs on sim and host differ");
}
