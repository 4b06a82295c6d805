//! Capture pools: what allocations of captured streams get, and that their memory is nobody else's.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use support::{Lab, MS, Make, S1, S2, on_each_backend, out_of_memory};
use xseg::units::{GRANULE, KIB, MIB};
use xseg::{Allocation, PoolId, Region, RegionState, StreamFilter, StreamId};

const POOL: PoolId = PoolId(0, 1);
const OTHER: PoolId = PoolId(1, 0);
const S3: StreamId = StreamId(3);

on_each_backend! {
    a_graph_replays_after_pressure_moved_all_else,
    a_released_pool_ends_with_its_last_block,
    replays_hold_the_memory_of_a_released_pool,
    captures_beside_busy_threads_stay_whole,
    pools_count_their_uses,
    filters_choose_the_pool,
    memory_of_another_stream_needs_proof,
    a_capture_that_nobody_announced_stays_whole,
    an_end_that_comes_early_is_covered,
    a_pool_without_a_capture_lets_epochs_pass,
    a_new_pool_takes_the_place_of_an_old_one,
    a_device_that_must_be_quiet_is_not_waited_for,
    declared_uses_of_a_capture_end_after_it,
    blocks_of_a_pool_live_again_where_they_lay,
}

fn on(stream: StreamId) -> StreamFilter {
    StreamFilter::Streams(vec![stream])
}

/// Opens a recording and captures `body`'s work on a stream.
fn captured<T>(lab: &Lab, pool: PoolId, stream: StreamId, body: impl FnOnce() -> T) -> (T, support::Graph) {
    lab.heap.begin_capture(pool, on(stream)).unwrap();
    lab.begin_capture(stream);
    let made = body();
    let graph = lab.end_capture(stream);
    lab.heap.end_capture(pool).unwrap();
    (made, graph)
}

/// 22: pt#159594. Pressure during a capture and after it, by all that may move, trim and wait.
fn a_graph_replays_after_pressure_moved_all_else(make: Make) {
    let lab = make("limit:96MiB,growth:exact");
    // Ordinary memory in pieces: every second block of 8 MiB is free.
    let mut ordinary: Vec<Allocation> = (0..12).map(|_| lab.alloc(8 * MIB, S1)).collect();
    for (number, block) in ordinary.iter().enumerate() {
        lab.set_word(block, 100 + number as u64);
    }
    let mut number = 0;
    ordinary.retain(|_| {
        number += 1;
        number % 2 == 0
    });
    let (blocks, graph) = captured(&lab, POOL, S1, || {
        let input = lab.alloc(2 * MIB, S1);
        // Scattered free memory moves into the pool: nothing can be created at the limit.
        let scratch = lab.alloc(16 * MIB, S1);
        lab.capture_step(S1, &input, &scratch);
        lab.heap.tick();
        let output = lab.alloc(4 * KIB, S1);
        lab.capture_step(S1, &scratch, &output);
        drop(scratch);
        lab.heap.trim();
        // Freed inside: used again inside.
        let again = lab.alloc(16 * MIB, S1);
        lab.capture_step(S1, &output, &again);
        drop(again);
        // Others go on meanwhile, under pressure too.
        let beside = lab.alloc(16 * MIB, S2);
        lab.work(S2, &beside, MS);
        drop(beside);
        lab.heap.tick();
        (input, output)
    });
    let moved = lab.heap.stats().handles_moved;
    assert!(moved > 0, "the capture made pages move");
    let captured = lab.heap.stats().captured;
    assert!((18 * MIB..=24 * MIB).contains(&captured), "{captured}");
    lab.check();

    // All that is left is taken; the pool's free memory is not.
    lab.time.advance(MS);
    let left = 96 * MIB - captured - 48 * MIB;
    let fields = out_of_memory(lab.heap.alloc(left + GRANULE, S2));
    assert!(fields.captured >= 16 * MIB, "{fields:?}");
    assert!(fields.to_string().contains("is kept by capture pools"), "{fields}");
    let all: Vec<Allocation> = (0..left / (2 * MIB)).map(|_| lab.alloc(2 * MIB, S2)).collect();
    lab.heap.set_limit(32 * MIB);
    lab.heap.trim();
    lab.heap.set_limit(96 * MIB);
    assert_eq!(lab.heap.stats().captured, captured);
    all.iter().for_each(|block| lab.set_word(block, 7));
    for round in 0..3u64 {
        lab.set_word(&blocks.0, round);
        lab.replay(&graph, S3);
        lab.expect_word(&blocks.1, round + 2);
        lab.time.advance(10 * MS);
    }
    all.iter().for_each(|block| lab.expect_word(block, 7));
    for (index, block) in ordinary.iter().enumerate() {
        lab.expect_word(block, 101 + 2 * index as u64);
    }
    drop((all, ordinary));
    // The graph's inputs and outputs are freed before it: their memory is the pool's all the same.
    drop(blocks);
    lab.time.advance(MS);
    lab.heap.trim();
    assert_eq!(lab.reserved(), captured);
    lab.replay(&graph, S1);
    lab.time.advance(10 * MS);
    lab.heap.release_capture(POOL).unwrap();
    let whole = lab.alloc(96 * MIB, S1);
    lab.check();
    drop(whole);
    lab.ends_with(0);
}

fn a_released_pool_ends_with_its_last_block(make: Make) {
    let lab = make("limit:64MiB");
    let ((kept, small), graph) = captured(&lab, POOL, S1, || {
        let (scratch, kept) = (lab.alloc(20 * MIB, S1), lab.alloc(20 * MIB, S1));
        lab.capture_step(S1, &kept, &scratch);
        drop(scratch);
        (kept, lab.alloc(KIB, S1))
    });
    lab.heap.tick();
    lab.heap.tick();
    // The replay's work on the scratch memory comes long after that was freed.
    lab.replay(&graph, S2);
    assert_eq!((lab.heap.stats().captured, lab.heap.stats().capture_pools), (42 * MIB, 1));
    lab.heap.release_capture(POOL).unwrap();
    lab.heap.trim();
    assert_eq!(lab.heap.stats().captured, 42 * MIB, "blocks are live");
    assert_eq!(
        lab.heap.release_capture(POOL).unwrap_err().to_string(),
        "invalid argument: there is no capture pool (0, 1)"
    );
    drop(kept);
    drop(small);
    lab.heap.tick();
    let stats = lab.heap.stats();
    assert_eq!((stats.captured, stats.capture_pools, stats.reserved), (0, 0, 42 * MIB));
    // Not before every stream has passed: sim notes it as a violation.
    lab.heap.trim();
    assert_eq!(lab.reserved(), 42 * MIB);
    lab.time.advance(5 * MS);
    let calls = lab.heap.stats().driver_calls.create;
    let block = lab.alloc(20 * MIB, S2);
    assert_eq!(lab.heap.stats().driver_calls.create, calls, "the handles are used again");
    lab.check();
    drop(block);
    lab.ends_with(0);
}

/// Freed and passed long ago, and yet in use: a replay came after.
fn replays_hold_the_memory_of_a_released_pool(make: Make) {
    let lab = make("limit:64MiB");
    let (_, graph) = captured(&lab, POOL, S1, || {
        let (input, scratch) = (lab.alloc(4 * MIB, S1), lab.alloc(4 * MIB, S1));
        lab.capture_step(S1, &input, &scratch);
    });
    lab.heap.tick();
    lab.heap.tick();
    lab.replay(&graph, S2);
    lab.heap.release_capture(POOL).unwrap();
    lab.heap.trim();
    let stats = lab.heap.stats();
    assert_eq!((stats.capture_pools, stats.reserved), (0, 8 * MIB));
    lab.time.advance(10 * MS);
    lab.ends_with(0);
}

/// No event over all streams slips in between the look for captures and the begin of one.
fn captures_beside_busy_threads_stay_whole(make: Make) {
    let lab = make("limit:256MiB");
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for stream in [S2, S3] {
            let (heap, done) = (lab.heap.clone(), &done);
            scope.spawn(move || {
                while !done.load(Relaxed) {
                    drop(heap.alloc(64 * MIB, stream).unwrap());
                    heap.tick();
                }
            });
        }
        for round in 0..300 {
            let (block, _) = captured(&lab, PoolId(7, round), S1, || lab.alloc(2 * MIB, S1));
            lab.heap.release_capture(PoolId(7, round)).unwrap();
            drop(block);
        }
        done.store(true, Relaxed);
    });
    lab.ends_with(0);
}

fn pools_count_their_uses(make: Make) {
    let lab = make("limit:64MiB");
    let heap = &lab.heap;
    let text = |result: xseg::Result<()>| result.unwrap_err().to_string();
    assert!(text(heap.end_capture(POOL)).contains("no allocations go to capture pool (0, 1)"));
    assert!(text(heap.release_capture(POOL)).contains("there is no capture pool"));
    heap.retain_capture(POOL).unwrap();
    heap.begin_capture(POOL, StreamFilter::All).unwrap();
    assert!(text(heap.begin_capture(POOL, StreamFilter::All)).contains("already"));
    assert_eq!(heap.capture_uses(POOL), 2, "a refused call changes nothing");
    let block = lab.alloc(2 * MIB, S1);
    heap.release_capture(POOL).unwrap();
    heap.release_capture(POOL).unwrap();
    drop(block);
    heap.tick();
    assert_eq!((heap.capture_uses(POOL), heap.stats().captured), (0, 2 * MIB), "allocations still go there");
    heap.end_capture(POOL).unwrap();
    heap.tick();
    assert_eq!((heap.stats().captured, heap.stats().capture_pools), (0, 0));
    // A pool that is released with live blocks comes back to life.
    let (block, _) = captured(&lab, POOL, S1, || lab.alloc(2 * MIB, S1));
    heap.release_capture(POOL).unwrap();
    captured(&lab, POOL, S1, || assert_ne!(lab.alloc(2 * MIB, S1).address(), block.address()));
    assert_eq!(heap.capture_uses(POOL), 1);
    drop(block);
    heap.tick();
    assert_eq!(heap.stats().captured, 4 * MIB);
    heap.release_capture(POOL).unwrap();
    lab.ends_with(0);
}

fn filters_choose_the_pool(make: Make) {
    let lab = make("limit:64MiB");
    let asked = Arc::new(AtomicU64::new(0));
    let count = asked.clone();
    let matching = StreamFilter::Matching(Arc::new(move |stream| {
        count.fetch_add(1, Relaxed);
        stream == S2
    }));
    drop((lab.alloc(2 * MIB, S1), lab.alloc(2 * MIB, S2)));
    lab.heap.begin_pool(POOL, matching).unwrap();
    lab.heap.begin_pool(OTHER, StreamFilter::Streams(vec![S2, S3])).unwrap();
    let blocks = [S1, S2, S3].map(|stream| lab.alloc(4 * MIB, stream));
    assert_eq!(asked.load(Relaxed), 3);
    assert_eq!((lab.heap.stats().captured, lab.heap.stats().capture_pools), (8 * MIB, 2));
    drop(blocks);
    lab.heap.end_capture(POOL).unwrap();
    lab.heap.release_capture(POOL).unwrap();
    assert_eq!(lab.heap.stats().captured, 4 * MIB);
    // The second recording takes the stream now.
    drop(lab.alloc(4 * MIB, S2));
    lab.heap.tick();
    assert_eq!((asked.load(Relaxed), lab.heap.stats().capture_pools), (3, 1));
    lab.heap.end_capture(OTHER).unwrap();
    lab.heap.release_capture(OTHER).unwrap();
    lab.ends_with(0);
}

/// A graph may be replayed on any stream: its pool takes ordinary memory only when all have passed, also what
/// its own stream freed, and within a capture one stream's free memory is not another's.
fn memory_of_another_stream_needs_proof(make: Make) {
    let lab = make("limit:32MiB,wait_limit:0s");
    let ordinary = lab.alloc(32 * MIB, S1);
    lab.work(S1, &ordinary, 10 * MS);
    drop(ordinary);
    lab.heap.begin_capture(POOL, StreamFilter::Streams(vec![S1, S2])).unwrap();
    lab.begin_capture(S1);
    let fields = out_of_memory(lab.heap.alloc(8 * MIB, S1));
    assert_eq!(fields.free, 32 * MIB);
    lab.time.advance(10 * MS);
    let block = lab.alloc(8 * MIB, S1);
    let address = block.address();
    drop(block);
    let forked = lab.alloc(8 * MIB, S2);
    assert_ne!(forked.address(), address);
    assert_eq!(lab.alloc(8 * MIB, S1).address(), address);
    lab.check();
    lab.end_capture(S1);
    lab.heap.end_capture(POOL).unwrap();
    drop(forked);
    lab.heap.release_capture(POOL).unwrap();
    lab.ends_with(0);
}

fn a_capture_that_nobody_announced_stays_whole(make: Make) {
    let lab = make("limit:32MiB");
    let block = lab.alloc(8 * MIB, S1);
    lab.begin_capture(S1);
    // The slow path sees the capture; from then on nothing records an event over all streams.
    let big = lab.alloc(20 * MIB, S1);
    drop(block);
    lab.heap.tick();
    lab.heap.trim();
    drop(big);
    let other = lab.alloc(4 * MIB, S2);
    lab.end_capture(S1);
    lab.heap.tick();
    drop(other);
    // Epochs go on.
    drop(lab.alloc(32 * MIB, S2));
    lab.check();
    lab.ends_with(0);
}

fn an_end_that_comes_early_is_covered(make: Make) {
    let lab = make("limit:32MiB");
    lab.heap.begin_capture(POOL, on(S1)).unwrap();
    lab.begin_capture(S1);
    let block = lab.alloc(8 * MIB, S1);
    lab.heap.end_capture(POOL).unwrap();
    lab.heap.tick();
    drop(block);
    lab.heap.trim();
    lab.end_capture(S1);
    lab.heap.release_capture(POOL).unwrap();
    lab.ends_with(0);
}

/// pt#175015: a pool that is no capture's does not stop what captures stop.
fn a_pool_without_a_capture_lets_epochs_pass(make: Make) {
    let lab = make("limit:32MiB,wait_limit:0s");
    lab.heap.begin_pool(POOL, on(S1)).unwrap();
    let block = lab.alloc(8 * MIB, S2);
    lab.work(S2, &block, MS);
    drop(block);
    lab.heap.tick();
    lab.time.advance(MS);
    drop(lab.alloc(32 * MIB, S3));
    lab.heap.end_capture(POOL).unwrap();
    lab.heap.release_capture(POOL).unwrap();
    lab.ends_with(0);
}

fn a_new_pool_takes_the_place_of_an_old_one(make: Make) {
    let lab = make("limit:64MiB");
    let mut addresses = Vec::new();
    for round in 1..=5000 {
        let pool = PoolId(0, round);
        let (address, _) = captured(&lab, pool, S1, || lab.alloc(2 * MIB, S1).address());
        lab.heap.release_capture(pool).unwrap();
        addresses.push(address);
    }
    addresses.dedup();
    assert_eq!(addresses.len(), 1, "captures find the same addresses again, and none are used up");
    assert_eq!(lab.reserved(), 2 * MIB);
    lab.ends_with(0);
}

fn a_device_that_must_be_quiet_is_not_waited_for(make: Make) {
    let lab = make("limit:32MiB,remap:quiesce,wait_limit:0s,growth:exact");
    let (one, two) = (lab.alloc(8 * MIB, S2), lab.alloc(8 * MIB, S1));
    lab.work(S2, &one, 10 * MS);
    lab.heap.begin_capture(POOL, on(S1)).unwrap();
    assert_eq!(lab.time.now(), 10 * MS, "the last wait before the capture");
    lab.begin_capture(S1);
    lab.work(S2, &one, 10 * MS);
    drop((one, two));
    let block = lab.alloc(16 * MIB, S1);
    // No page moves while kernels may run, and none is given back.
    let fields = out_of_memory(lab.heap.alloc(16 * MIB, S1));
    assert_eq!((fields.reserved, fields.free), (32 * MIB, 16 * MIB));
    lab.heap.trim();
    lab.heap.set_limit(16 * MIB);
    assert_eq!((lab.reserved(), lab.time.now()), (32 * MIB, 10 * MS));
    lab.heap.set_limit(32 * MIB);
    lab.end_capture(S1);
    lab.heap.end_capture(POOL).unwrap();
    drop(block);
    lab.heap.release_capture(POOL).unwrap();
    drop(lab.alloc(32 * MIB, S1));
    lab.ends_with(0);
}

fn declared_uses_of_a_capture_end_after_it(make: Make) {
    let lab = make("limit:32MiB");
    let (address, _) = captured(&lab, POOL, S1, || {
        let block = lab.alloc(8 * MIB, S1);
        // Stream 2 does not capture: it has an event. Stream 1 captures and has none.
        block.record_use(S2).unwrap();
        lab.work(S2, &block, MS);
        let forked = lab.alloc(2 * MIB, S2);
        forked.record_use(S1).unwrap();
        let address = block.address();
        drop((block, forked));
        lab.time.advance(MS);
        lab.heap.tick();
        assert_eq!(lab.heap.stats().pending, 2 * MIB);
        assert_eq!(lab.alloc(8 * MIB, S1).address(), address);
        address
    });
    lab.heap.tick();
    lab.heap.tick();
    assert_eq!(lab.heap.stats().pending, 0);
    captured(&lab, POOL, S1, || assert_eq!(lab.alloc(8 * MIB, S1).address(), address));
    // One use for each capture.
    lab.heap.release_capture(POOL).unwrap();
    assert_eq!(lab.heap.capture_uses(POOL), 1);
    lab.heap.release_capture(POOL).unwrap();
    lab.ends_with(0);
}

/// A checkpoint of a pool: what was live then is live again, at the same addresses, whatever was there meanwhile.
fn blocks_of_a_pool_live_again_where_they_lay(make: Make) {
    let lab = make("limit:256MiB");
    let live = |pool: PoolId| -> Vec<Region> {
        let layout = lab.heap.layout();
        layout.into_iter().filter(|one| one.state == RegionState::Live && one.pool == Some(pool)).collect()
    };
    let restore = |block: &Region, pool: PoolId| {
        lab.heap.restore_block(pool, block.address, (block.requested, block.bytes), block.stream.unwrap())
    };
    lab.heap.begin_pool(POOL, on(S1)).unwrap();
    let sizes = [700, 3 * MIB + 100, 40 * KIB, 8 * MIB, 512, 2 * MIB];
    let first: Vec<Allocation> = sizes.iter().map(|size| lab.alloc(*size, S1)).collect();
    let checkpoint = live(POOL);
    assert_eq!(checkpoint.len(), sizes.len());
    let stats = lab.heap.stats();
    // Nothing lives twice.
    assert!(restore(&checkpoint[0], POOL).is_err());
    drop(first);
    let other: Vec<Allocation> = [5 * MIB, 900, 6 * MIB, 100 * KIB].iter().map(|size| lab.alloc(*size, S1)).collect();
    assert!(checkpoint.iter().any(|block| restore(block, POOL).is_err()), "something new lies there");
    let half: Vec<u64> = live(POOL).iter().map(|block| block.address).collect();
    drop(other);
    // What could be restored beside the new blocks goes with them.
    live(POOL).iter().for_each(|block| lab.heap.free_raw(block.address).unwrap());
    assert!(!half.is_empty() && live(POOL).is_empty());
    for round in 0..3 {
        let mut order = checkpoint.clone();
        order.rotate_left(round * 2);
        order.iter().for_each(|block| restore(block, POOL).unwrap());
        lab.heap.check().unwrap();
        assert_eq!(live(POOL), checkpoint);
        let now = lab.heap.stats();
        assert_eq!(
            (now.allocated, now.requested, now.live_blocks),
            (stats.allocated, stats.requested, stats.live_blocks)
        );
        // New blocks of the pool lie elsewhere.
        let new = lab.alloc(4 * MIB, S1);
        let apart =
            |block: &Region| new.address() + 4 * MIB <= block.address || block.address + block.bytes <= new.address();
        assert!(checkpoint.iter().all(apart));
        drop(new);
        checkpoint.iter().for_each(|block| lab.heap.free_raw(block.address).unwrap());
        lab.heap.check().unwrap();
    }
    lab.heap.end_capture(POOL).unwrap();
    let ordinary = lab.alloc(MIB, S1);
    let elsewhere = lab.heap.layout().into_iter().find(|one| one.address == ordinary.address()).unwrap();
    assert!(restore(&elsewhere, POOL).is_err() && restore(&checkpoint[0], OTHER).is_err());
    assert!(lab.heap.restore_block(POOL, checkpoint[0].address, (600, 512), S1).is_err());
    // No rounding adds so much; of 4 GiB and more the count of requested bytes would be wrong from then on.
    let requested = lab.heap.stats().requested;
    assert!(lab.heap.restore_block(POOL, checkpoint[3].address, (1, 8 * MIB), S1).is_err());
    // Lengths that addresses cannot be added to, in units of 32 bits.
    for units in [u64::from(u32::MAX), u64::from(u32::MAX) - 16 * MIB / 512] {
        assert!(lab.heap.restore_block(POOL, checkpoint[3].address, (units * 512, units * 512), S1).is_err());
    }
    assert_eq!(lab.heap.stats().requested, requested);
    lab.heap.release_capture(POOL).unwrap();
    assert!(restore(&checkpoint[0], POOL).is_err(), "the pool is gone");
    lab.heap.check().unwrap();
}
