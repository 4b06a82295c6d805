//! What the heap does at its bounds: the limit, out-of-memory errors, pins, trim, warm-up.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod support;

use std::sync::Arc;
use std::time::Duration;
use support::{MS, Random, S1, S2, out_of_memory, sim, sim_with};
use xseg::backend::host::{HostBackend, HostOptions};
use xseg::backend::sim::SimOptions;
use xseg::backend::timeline::Timeline;
use xseg::units::{GIB, GRANULE, MIB, UNIT};
use xseg::{Allocation, Error, PoolId, StreamFilter, StreamId};

#[test]
fn an_out_of_memory_error_says_what_stands_in_the_way() {
    let lab = sim("limit:64MiB");
    let keep = lab.alloc(40 * MIB, S1);
    let error = lab.heap.alloc(32 * MIB, S2);
    let text = error.as_ref().unwrap_err().to_string();
    let fields = out_of_memory(error);
    assert_eq!((fields.requested, fields.stream, fields.limit), (32 * MIB, 2, 64 * MIB));
    assert_eq!((fields.allocated, fields.waiting, fields.pinned, fields.zombie), (40 * MIB, 0, 0, 0));
    assert_eq!(fields.free, fields.reserved - fields.allocated);
    assert_eq!(fields.driver, None);
    for part in ["32.000 MiB", "stream 2", "limit 64.000 MiB", "live 40.000 MiB"] {
        assert!(text.contains(part), "{text}");
    }
    let stats = lab.heap.stats();
    assert_eq!((stats.ooms, stats.host_waits, stats.live_blocks), (1, 0, 1));
    lab.check();
    // The heap goes on: the rest of the limit can be had to the byte.
    let rest = lab.alloc(24 * MIB, S2);
    assert_eq!(lab.reserved(), 64 * MIB);
    drop((keep, rest));
    lab.ends_with(0);
}

#[test]
fn an_out_of_memory_error_counts_what_waits_and_what_is_partly_live() {
    let lab = sim("limit:64MiB,wait_limit:1ms");
    let (a, b) = (lab.alloc(32 * MIB, S1), lab.alloc(32 * MIB - 512 * UNIT, S1));
    lab.work(S1, &a, Duration::from_secs(3));
    drop(a);
    let fields = out_of_memory(lab.heap.alloc(32 * MIB, S2));
    assert_eq!(fields.waiting, 32 * MIB + 512 * UNIT - fields.partly_live, "freed on stream 1, whose work goes on");
    assert!(fields.partly_live < GRANULE);
    assert_eq!(fields.free, 32 * MIB + 512 * UNIT);
    assert!((32 * MIB..33 * MIB).contains(&fields.largest_free), "{}", fields.largest_free);
    drop(b);
    lab.ends_with(0);
}

#[test]
fn a_request_beyond_the_limit_fails_at_once() {
    let lab = sim("limit:64MiB");
    let block = lab.alloc(16 * MIB, S1);
    lab.work(S1, &block, Duration::from_secs(5));
    drop(block);
    let before = lab.time.now();
    for bytes in [64 * MIB + 1, GIB, 600 * GIB] {
        let fields = out_of_memory(lab.heap.alloc(bytes, S2));
        assert_eq!((fields.requested, fields.limit), (bytes, 64 * MIB));
        let said = fields.to_string();
        assert!(said.ends_with("by capture pools); raise `limit`, or use a smaller batch"), "{said}");
    }
    assert_eq!(lab.time.now(), before, "no wait can make room for it");
    assert_eq!(lab.heap.stats().host_waits, 0);
    lab.check();
    drop(lab.alloc(64 * MIB, S1));
}

#[test]
fn a_request_beyond_the_address_space_says_so() {
    let lab = sim_with("reserve:4GiB", SimOptions { reserve_max: Some(4 * GIB), ..SimOptions::default() });
    let block = lab.alloc(5 * MIB, S1);
    for bytes in [10 * GIB, 1 << 45, u64::MAX - 5, u64::MAX] {
        match lab.heap.alloc(bytes, S1) {
            Err(Error::AddressSpace { requested, reserved }) => {
                assert_eq!(requested, bytes);
                assert!(reserved >= 4 * GIB);
            }
            other => panic!("{bytes}: {other:?}"),
        }
    }
    lab.check();
    drop(block);
    lab.ends_with(0);
}

#[test]
fn the_limit_is_respected_exactly() {
    let lab = sim("limit:150MiB,handle_max:16MiB");
    let limit = 150 * MIB;
    let mut random = Random(5);
    let mut live: Vec<Allocation> = Vec::new();
    let mut refused = 0;
    for _ in 0..3000 {
        if random.below(9) < 5 || live.is_empty() {
            let shift = 12 + random.below(14);
            let bytes = random.below(1 << shift);
            match lab.heap.alloc(bytes, [S1, S2][random.below(2) as usize]) {
                Ok(block) => live.push(block),
                Err(error) => {
                    out_of_memory::<()>(Err(error));
                    refused += 1;
                }
            }
        } else {
            drop(live.swap_remove(random.below(live.len() as u64) as usize));
        }
        assert!(lab.sim().memory_in_use() <= limit);
    }
    let stats = lab.heap.stats();
    assert!(stats.peak_reserved <= limit && stats.peak_reserved > 140 * MIB, "{}", stats.peak_reserved);
    assert!(refused > 10 && stats.handles_moved > 10, "the run was under pressure");
    lab.check();
    drop(live);
    // All of it in one piece, and not a granule more.
    let whole = lab.alloc(limit, S1);
    out_of_memory(lab.heap.alloc(1, S1));
    drop(whole);
    lab.ends_with(0);
}

#[test]
fn a_limit_is_rounded_down_to_granules() {
    let lab = sim("");
    assert_eq!(lab.heap.limit(), u64::MAX);
    lab.heap.set_limit(7 * MIB + 5);
    assert_eq!(lab.heap.limit(), 6 * MIB);
    drop(lab.alloc(6 * MIB, S1));
    out_of_memory(lab.heap.alloc(6 * MIB + 1, S1));
}

#[test]
fn lowering_the_limit_gives_idle_memory_back_and_keeps_live_blocks() {
    let lab = sim("handle_max:16MiB,growth:exact");
    let live: Vec<Allocation> = (0..4).map(|_| lab.alloc(16 * MIB, S1)).collect();
    drop(lab.alloc(64 * MIB, S1));
    assert_eq!(lab.reserved(), 128 * MIB);
    assert_eq!(lab.heap.set_limit(96 * MIB), 96 * MIB);
    assert_eq!(lab.heap.set_limit(32 * MIB), 64 * MIB, "live blocks stay");
    lab.check();
    let fields = out_of_memory(lab.heap.alloc(2 * MIB, S1));
    assert_eq!((fields.limit, fields.reserved), (32 * MIB, 64 * MIB));
    let mut live = live;
    live.truncate(2);
    assert_eq!(lab.heap.set_limit(32 * MIB), 32 * MIB);
    lab.heap.set_limit(u64::MAX);
    let more = lab.alloc(100 * MIB, S1);
    assert_eq!(lab.reserved(), 132 * MIB);
    drop((more, live));
    lab.ends_with(0);
}

#[test]
fn below_what_is_live_nothing_new_is_created() {
    let lab = sim("handle_max:32MiB");
    let mut blocks: Vec<Allocation> = (0..4).map(|_| lab.alloc(32 * MIB, S1)).collect();
    lab.heap.set_limit(64 * MIB);
    let created = lab.heap.stats().bytes_created;
    // 32 MiB in one handle lie idle, but 64 MiB must go before anything may come.
    drop(blocks.pop());
    for bytes in [512, 3 * MIB, 20 * MIB] {
        match lab.heap.alloc(bytes, S2) {
            Ok(block) => drop(block),
            Err(error) => drop(out_of_memory::<()>(Err(error))),
        }
        lab.check();
        assert_eq!(lab.heap.stats().bytes_created, created, "after {bytes}");
        assert!(lab.reserved() <= 128 * MIB);
    }
    blocks.clear();
    lab.ends_with(0);
}

#[test]
fn a_full_device_is_as_a_limit_and_names_the_driver() {
    let lab = sim_with("limit:1GiB", SimOptions { total: Some(64 * MIB), ..SimOptions::default() });
    let block = lab.alloc(48 * MIB, S1);
    let fields = out_of_memory(lab.heap.alloc(32 * MIB, S1));
    assert!(fields.driver.as_ref().is_some_and(|error| error.out_of_memory), "{fields:?}");
    lab.check();
    // What was created on the way is used or given back.
    let rest = lab.alloc(16 * MIB, S1);
    drop((block, rest));
    drop(lab.alloc(64 * MIB, S2));
    lab.ends_with(0);
}

#[test]
fn free_bytes_beside_live_ones_in_a_handle_are_said() {
    // One handle of 16 MiB, since the limit is far when it is made.
    let lab = sim("limit:64GiB,handle_max:16MiB,growth:exact");
    drop(lab.alloc(16 * MIB, S1));
    let block = lab.alloc(4 * MIB, S1);
    assert_eq!(lab.heap.set_limit(0), 16 * MIB);
    let fields = out_of_memory(lab.heap.alloc(16 * MIB, S1));
    assert_eq!((fields.free, fields.partly_live, fields.waiting), (12 * MIB, 12 * MIB, 0));
    lab.heap.pin(block.address(), 4 * MIB).unwrap();
    assert_eq!(out_of_memory(lab.heap.alloc(16 * MIB, S1)).pinned, 0, "what is pinned is not free");
    lab.heap.unpin(block.address(), 4 * MIB).unwrap();
    drop(block);
    lab.ends_with(0);
}

#[test]
fn the_systems_limit_on_mappings_is_an_error_of_its_own() {
    let options = HostOptions { vma_budget: Some(24), timeline: Some(Timeline::default()), ..HostOptions::default() };
    let device = Arc::new(HostBackend::new(options).unwrap());
    let heap =
        xseg::Heap::builder().conf("handle_max:2MiB,growth:exact").and_then(|b| b.backend(device.clone()).build());
    let heap = heap.unwrap();
    // Handles out of order in the file: every one is a mapping of its own.
    let mut live: Vec<Allocation> = Vec::new();
    let error = (0..200).find_map(|number| {
        match heap.alloc(2 * MIB, S1) {
            Ok(block) => live.push(block),
            Err(error) => return Some(error),
        }
        if number % 2 == 0 {
            heap.alloc(600 * 1024, StreamId(number)).map(|block| live.push(block)).err()
        } else {
            None
        }
    });
    match error {
        Some(Error::MappingLimit { used, budget: 24 }) => assert!(used >= 20, "{used}"),
        other => panic!("{other:?} after {} blocks", live.len()),
    }
    heap.check().unwrap();
    drop((live, heap));
    assert!(device.leaks().is_empty());
}

#[test]
fn what_no_block_can_hold_is_out_of_memory_under_a_limit() {
    let lab = sim("limit:64MiB");
    let sizes = [1 << 40, 1 << 41, (1 << 41) + 1, 1 << 45, 1 << 63, u64::MAX - GRANULE + 1, u64::MAX];
    for bytes in sizes {
        let fields = out_of_memory(lab.heap.alloc(bytes, S1));
        assert_eq!((fields.requested, fields.limit), (bytes, 64 * MIB));
        // In whole granules, as far as there are any.
        let fields = out_of_memory(lab.heap.alloc_contiguous(bytes, S1));
        assert_eq!(fields.requested, bytes.checked_next_multiple_of(GRANULE).unwrap_or(bytes));
    }
    assert_eq!(lab.heap.stats().ooms, 2 * 7);
    for bytes in [(1 << 41) - 511, 1 << 41, 1 << 45, 1 << 63, u64::MAX] {
        let heap = sim("").heap;
        for error in [heap.alloc(bytes, S1).unwrap_err(), heap.alloc_contiguous(bytes, S1).unwrap_err()] {
            assert!(matches!(error, Error::AddressSpace { .. }), "{error:?}");
            assert!(error.to_string().ends_with("one has less than 2 TiB"), "{error}");
        }
    }
    lab.ends_with(0);
}

#[test]
fn pinned_memory_stays_where_it_is() {
    let lab = sim("limit:64MiB,handle_max:16MiB");
    let mut blocks: Vec<Allocation> = (0..4).map(|_| lab.alloc(16 * MIB, S1)).collect();
    let (third, first) = (blocks.remove(2), blocks.remove(0));
    let at = first.address();
    lab.heap.pin(at, 16 * MIB).unwrap();
    lab.heap.pin(at, 16 * MIB).unwrap();
    drop((first, third));
    assert_eq!(lab.heap.stats().pinned, 16 * MIB);
    let fields = out_of_memory(lab.heap.alloc(32 * MIB, S1));
    assert_eq!((fields.pinned, fields.free), (16 * MIB, 32 * MIB));
    lab.heap.trim();
    assert!(lab.reserved() >= 48 * MIB, "the pinned handle is not given back");
    // The pin holds the backing, not the block: its addresses can be had again.
    let again = lab.alloc(16 * MIB, S1);
    assert_eq!(again.address(), at);
    drop(again);
    lab.heap.unpin(at, 16 * MIB).unwrap();
    out_of_memory(lab.heap.alloc(32 * MIB, S1));
    lab.heap.unpin(at, 16 * MIB).unwrap();
    drop(lab.alloc(32 * MIB, S1));
    drop(blocks);
    lab.ends_with(0);
}

#[test]
fn pins_that_make_no_sense_are_errors() {
    let lab = sim("");
    let block = lab.alloc(4 * MIB, S1);
    let at = block.address();
    assert!(matches!(lab.heap.pin(at, GIB), Err(Error::InvalidArgument(_))), "no memory behind the rest");
    assert!(matches!(lab.heap.unpin(at, 4 * MIB), Err(Error::InvalidArgument(_))), "never pinned");
    lab.heap.pin(at, 4 * MIB).unwrap();
    assert!(matches!(lab.heap.unpin(at, MIB), Err(Error::InvalidArgument(_))), "another range");
    assert!(matches!(lab.heap.pin(at, u64::MAX), Err(Error::InvalidPointer { .. })));
    assert_eq!(lab.heap.stats().pinned, 4 * MIB);
    lab.heap.unpin(at, 4 * MIB).unwrap();
    assert_eq!(lab.heap.stats().pinned, 0);
    drop(block);
    lab.ends_with(0);
}

#[test]
fn trim_gives_back_what_has_passed_down_to_keep() {
    let time = Timeline::default();
    let options = SimOptions { timeline: time.clone(), ..SimOptions::default() };
    let lab = sim_with("keep:32MiB,handle_max:16MiB", options);
    let (a, b) = (lab.alloc(64 * MIB, S1), lab.alloc(64 * MIB, S2));
    lab.work(S1, &a, 10 * MS);
    drop(a);
    let report = lab.heap.trim();
    assert_eq!((report.released, report.reserved), (0, 128 * MIB), "work of stream 1 uses it");
    time.advance(10 * MS);
    let report = lab.heap.trim();
    assert_eq!((report.released, report.reserved), (64 * MIB, 64 * MIB));
    assert_eq!(lab.sim().memory_in_use(), 64 * MIB);
    drop(b);
    let report = lab.heap.trim();
    assert_eq!((report.released, report.reserved), (32 * MIB, 32 * MIB));
    let stats = lab.heap.stats();
    assert_eq!((stats.bytes_trimmed, stats.handles_trimmed), (96 * MIB, 6));
    lab.ends_with(32 * MIB);
}

#[test]
fn warm_up_maps_memory_at_start_for_any_stream() {
    let lab = sim("warmup:100MiB,growth:exact");
    let stats = lab.heap.stats();
    assert_eq!((stats.reserved, stats.allocated, stats.peak_allocated), (100 * MIB, 0, 0));
    assert_eq!(stats.largest_free, 100 * MIB);
    let blocks = (lab.alloc(60 * MIB, S1), lab.alloc(40 * MIB, S2));
    assert_eq!(lab.heap.stats().driver_calls, stats.driver_calls, "nothing is created or mapped any more");
    drop(blocks);
    lab.ends_with(0);
}

#[test]
fn a_warm_up_beyond_the_limit_is_refused() {
    let device = Arc::new(xseg::backend::sim::SimBackend::new(SimOptions::default()));
    let built = xseg::Heap::builder().conf("limit:64MiB,warmup:128MiB").and_then(|b| b.backend(device.clone()).build());
    assert!(matches!(built, Err(Error::OutOfMemory(_) | Error::Config(_))), "{built:?}");
    assert_eq!(device.counts(), (0, 0, 0));
}

/// A recording that is refused leaves no stream that the heap did not know, no use of its pool, and takes no segment for good.
#[test]
fn a_refused_capture_leaves_nothing() {
    let lab = sim("limit:64MiB");
    let named = |streams: std::ops::Range<u64>| StreamFilter::Streams(streams.map(StreamId).collect());
    let knows = |stream| !matches!(lab.heap.retire_stream(StreamId(stream)), Err(Error::DeadStream { .. }));
    drop(lab.alloc(4096, S1));
    for number in 0..10_000 {
        let pool = PoolId(7, number);
        let error = lab.heap.begin_capture(pool, named(10..5010)).unwrap_err();
        assert!(
            matches!(&error, Error::InvalidArgument(why) if why.starts_with("these are 5000 streams more than the 1 "))
        );
        assert_eq!((lab.heap.capture_uses(pool), lab.heap.stats().capture_pools), (0, 0));
    }
    drop(lab.alloc(4096, S2));
    // One that was retired, after those that are new.
    lab.heap.retire_stream(S2).unwrap();
    let retired = StreamFilter::Streams(vec![StreamId(10), StreamId(11), S2]);
    assert!(matches!(lab.heap.begin_capture(PoolId(1, 1), retired), Err(Error::DeadStream { stream: 2, .. })));
    // A pool that is recorded to, and a filter that takes nothing.
    lab.heap.begin_pool(PoolId(1, 1), named(1..2)).unwrap();
    for refused in [named(12..14), named(0..0)] {
        assert!(matches!(lab.heap.begin_capture(PoolId(1, 1), refused), Err(Error::InvalidArgument(_))));
    }
    assert!(matches!(lab.heap.begin_pool(PoolId(1, 2), named(0..0)), Err(Error::InvalidArgument(_))));
    assert!((10..14).all(|stream| !knows(stream)));
    assert_eq!((lab.heap.capture_uses(PoolId(1, 1)), lab.heap.capture_uses(PoolId(1, 2))), (1, 0));
    lab.heap.end_capture(PoolId(1, 1)).unwrap();
    lab.heap.release_capture(PoolId(1, 1)).unwrap();
    // All that there is room for can still be had: of 4096 segments the first stream and the pool have three, and the retired one's is free.
    assert!(lab.heap.begin_pool(PoolId(1, 1), named(10..4104)).is_err());
    lab.heap.begin_pool(PoolId(1, 1), named(10..4103)).unwrap();
    assert_eq!(lab.alloc(4096, StreamId(4102)).len(), 4096);
    assert!(matches!(lab.heap.alloc(4096, StreamId(4103)), Err(Error::DeadStream { .. })));
    drop(lab.alloc(4096, S1));
    lab.heap.end_capture(PoolId(1, 1)).unwrap();
    lab.heap.release_capture(PoolId(1, 1)).unwrap();
    lab.check();
}
