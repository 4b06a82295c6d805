//! Allocation patterns from public reports that made other allocators fail or waste memory: several
//! streams, with work queued. Each is a function over a maker of heaps, so that it runs on every backend.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use support::{Lab, MS, Make, Random, S1, S2, on_each_backend, out_of_memory};
use xseg::units::{GIB, GRANULE, KIB, MIB};
use xseg::{Allocation, StreamId};

const SECOND: Duration = Duration::from_secs(1);

on_each_backend! {
    new_streams_reuse_what_old_ones_freed,
    two_streams_by_turns_take_no_more_than_one,
    a_younger_event_frees_its_block_before_an_older_one,
    a_request_waits_for_what_is_enough,
    an_epoch_is_waited_for_before_later_ones,
    a_late_free_beside_old_memory_hides_nothing,
    a_late_free_of_another_stream_hides_nothing_either,
    waiting_is_the_last_step,
    waits_end_with_an_error,
    blocks_come_and_go_under_queued_work,
}

/// 6: vllm-project/vllm#52950. PyTorch climbs from 2 to 16 GiB.
fn new_streams_reuse_what_old_ones_freed(make: Make) {
    for conf in ["", "limit:2GiB"] {
        let lab = make(conf);
        for round in 0..8 {
            let (one, two) = (StreamId(10 + 2 * round), StreamId(11 + 2 * round));
            let blocks = (lab.alloc(GIB, one), lab.alloc(GIB, two));
            lab.work(one, &blocks.0, MS);
            lab.work(two, &blocks.1, MS);
            drop(blocks);
            assert_eq!(lab.reserved(), 2 * GIB, "{conf}, round {round}");
            lab.time.advance(MS);
        }
        assert_eq!(lab.heap.stats().host_waits, 0);
        lab.ends_with(0);
    }
}

/// Blocks of many sizes on the streams that `turn` names; peak reserved memory.
fn turns(lab: &Lab, turn: impl Fn(u64) -> StreamId) -> u64 {
    let mut random = Random(2039);
    let mut live: Vec<Allocation> = Vec::new();
    for step in 0..3000 {
        while live.len() > 40 || (random.below(2) == 0 && live.len() > 20) {
            drop(live.swap_remove(random.below(live.len() as u64) as usize));
        }
        let shift = 11 + random.below(15);
        live.push(lab.alloc(random.below(1 << shift), turn(step)));
    }
    lab.check();
    lab.heap.stats().peak_reserved
}

/// 11: rapidsai/rmm#2039.
fn two_streams_by_turns_take_no_more_than_one(make: Make) {
    let alone = make("");
    let one = turns(&alone, |_| S1);
    alone.ends_with(0);
    let lab = make("");
    // By turns of 100, and stream 2 is quiet from step 1500 on.
    let two = turns(&lab, |step| if step < 1500 && step / 100 % 2 == 1 { S2 } else { S1 });
    assert!(two <= one + 6 * GRANULE, "{} MiB on one stream, {} on two", one / MIB, two / MIB);
    lab.ends_with(0);
}

/// 13: pt#71616.
fn a_younger_event_frees_its_block_before_an_older_one(make: Make) {
    let lab = make("limit:1944MiB");
    let blocks: Vec<Allocation> = (0..3).map(|_| lab.alloc(648 * MIB, S1)).collect();
    for (number, block) in blocks.iter().enumerate() {
        let side = StreamId(20 + number as u64);
        block.record_use(side).unwrap();
        // The oldest is the slowest.
        lab.work(side, block, if number == 0 { 100 * SECOND } else { MS });
    }
    let second = blocks[1].address();
    for block in blocks {
        drop(block);
        lab.heap.tick();
    }
    lab.time.advance(MS);
    let again = lab.alloc(648 * MIB, S1);
    assert_eq!(again.address(), second);
    let stats = lab.heap.stats();
    assert_eq!((lab.time.now(), stats.host_waits, stats.pending), (MS, 0, 648 * MIB));
    drop(again);
    lab.ends_with(0);
}

/// 14: pt#189504 and pt#171771, blocks with declared uses.
fn a_request_waits_for_what_is_enough(make: Make) {
    let lab = make("limit:96MiB");
    let lengths = [90 * SECOND, 40 * MS, 2 * SECOND];
    let blocks: Vec<Allocation> = (0..3).map(|_| lab.alloc(32 * MIB, S1)).collect();
    for (number, (block, length)) in blocks.iter().zip(lengths).enumerate() {
        let side = StreamId(20 + number as u64);
        block.record_use(side).unwrap();
        lab.work(side, block, length);
    }
    drop(blocks);
    let first = lab.alloc(32 * MIB, S1);
    let waited = lab.time.now();
    assert!((40 * MS..200 * MS).contains(&waited), "{waited:?} for an event at 40 ms");
    assert_eq!(lab.heap.stats().host_waits, 1);
    let second = lab.alloc(32 * MIB, S1);
    let waited = lab.time.now();
    assert!((2 * SECOND..4 * SECOND).contains(&waited), "{waited:?} for an event at 2 s");
    assert_eq!((lab.heap.stats().host_waits, lab.heap.stats().ooms), (2, 0));
    drop((first, second));
    lab.ends_with(0);
}

/// 14, for blocks freed on another stream: an epoch is enough, the work queued after it is not waited for.
fn an_epoch_is_waited_for_before_later_ones(make: Make) {
    let lab = make("limit:66MiB");
    // Apart, since neighbours of one stream merge, and keep the later stamp.
    let (early, between, late) = (lab.alloc(32 * MIB, S1), lab.alloc(2 * MIB, S1), lab.alloc(32 * MIB, S1));
    lab.work(S1, &early, 5 * MS);
    drop(early);
    lab.heap.tick();
    lab.work(S1, &late, 100 * SECOND);
    drop(late);
    let block = lab.alloc(32 * MIB, S2);
    assert!((5 * MS..50 * MS).contains(&lab.time.now()), "{:?}", lab.time.now());
    assert_eq!(lab.heap.stats().host_waits, 1);
    lab.check();
    drop((block, between));
    lab.ends_with(0);
}

/// Two frees of one stream merge and keep the later stamp; what lies idle longer has passed all the same.
fn a_late_free_beside_old_memory_hides_nothing(make: Make) {
    let lab = make("limit:64MiB");
    let (early, late) = (lab.alloc(48 * MIB, S1), lab.alloc(16 * MIB, S1));
    lab.work(S1, &early, MS);
    drop(early);
    lab.heap.tick();
    lab.time.advance(2 * MS);
    lab.work(S1, &late, 2 * SECOND);
    drop(late);
    let block = lab.alloc(48 * MIB, S2);
    let stats = lab.heap.stats();
    // It is used where it lies.
    assert_eq!((lab.time.now(), stats.host_waits, stats.bytes_moved, stats.reserved), (2 * MS, 0, 0, 64 * MIB));
    // The rest is in use still: only by waiting can stream 2 have it.
    drop(lab.alloc(16 * MIB, S2));
    assert_eq!(lab.heap.stats().host_waits, 1);
    lab.check();
    drop(block);
    lab.ends_with(0);
}

/// A stream's own memory, idle for long, merges with what another stream frees and that one's device work still uses: it stays
/// at hand, also a part of it, and no other memory is made.
fn a_late_free_of_another_stream_hides_nothing_either(make: Make) {
    let lab = make("growth:exact");
    let (mine, theirs) = (lab.alloc(48 * MIB, S1), lab.alloc(16 * MIB, S2));
    let address = mine.address();
    lab.work(S1, &mine, MS);
    drop(mine);
    lab.heap.tick();
    lab.time.advance(2 * MS);
    lab.heap.tick();
    lab.work(S2, &theirs, SECOND);
    drop(theirs);
    for _ in 0..3 {
        let blocks = (lab.alloc(20 * MIB, S1), lab.alloc(28 * MIB, S1));
        assert_eq!((blocks.0.address(), blocks.1.address()), (address, address + 20 * MIB));
        lab.work(S1, &blocks.0, MS);
        lab.check();
    }
    let stats = lab.heap.stats();
    assert_eq!((stats.reserved, stats.bytes_moved, stats.host_waits), (64 * MIB, 0, 0));
    // What the other stream uses is nobody's yet.
    let more = (lab.alloc(48 * MIB, S1), lab.alloc(16 * MIB, S1));
    assert_eq!(lab.reserved(), 80 * MIB);
    drop(more);
    lab.ends_with(0);
}

/// 14: what costs no waiting comes first.
fn waiting_is_the_last_step(make: Make) {
    let lab = make("limit:96MiB");
    let other = lab.alloc(32 * MIB, S1);
    let mine: Vec<Allocation> = (0..4).map(|_| lab.alloc(16 * MIB, S2)).collect();
    lab.work(S1, &other, SECOND);
    drop(other);
    // Stream 2's own memory in pieces: moved, not waited for.
    let mut index = 0;
    let kept: Vec<Allocation> = mine
        .into_iter()
        .filter(|_| {
            index += 1;
            index % 2 == 0
        })
        .collect();
    let joined = lab.alloc(32 * MIB, S2);
    assert_eq!((lab.time.now(), lab.heap.stats().host_waits), (Duration::ZERO, 0));
    // Then the callbacks, then a wait.
    let asked = Arc::new(AtomicU64::new(0));
    let (count, time) = (asked.clone(), lab.time.clone());
    lab.heap.on_out_of_memory(Box::new(move |_| {
        assert_eq!(time.now(), Duration::ZERO, "asked before anything is waited for");
        count.fetch_add(1, Relaxed);
        false
    }));
    let last = lab.alloc(32 * MIB, S2);
    assert_eq!((asked.load(Relaxed), lab.heap.stats().host_waits), (1, 1));
    assert!(lab.time.now() >= SECOND);
    lab.check();
    drop((kept, joined, last));
    lab.ends_with(0);
}

/// 14: a wait has a limit, and the error then says what it waited for.
fn waits_end_with_an_error(make: Make) {
    let lab = make("limit:64MiB,wait_limit:50ms");
    let block = lab.alloc(64 * MIB, S1);
    lab.work(S1, &block, 100 * SECOND);
    drop(block);
    let fields = out_of_memory(lab.heap.alloc(MIB + 1, S2));
    assert_eq!((fields.waiting, fields.free), (64 * MIB, 64 * MIB));
    let waited = lab.time.now();
    assert!((50 * MS..100 * MS).contains(&waited), "{waited:?} of at most 50 ms");
    lab.check();
    // For its own stream it is free all the time.
    drop(lab.alloc(64 * MIB, S1));
    lab.ends_with(0);
}

/// 15: vllm-project/vllm#43020 and pt#196258.
fn blocks_come_and_go_under_queued_work(make: Make) {
    for (conf, live_at_once) in [("", 3), ("limit:300MiB", 3), ("limit:180MiB,shrink:idle=1ms", 2)] {
        let lab = make(conf);
        let mut live = std::collections::VecDeque::new();
        for number in 0..200_u64 {
            let stream = StreamId(1 + number % 4);
            let block = lab.alloc(56 * MIB, stream);
            lab.work(stream, &block, 7 * MS);
            // Read on a side stream that the heap is not told of.
            lab.work(StreamId(77), &block, 2 * MS);
            if number % 3 == 0 {
                block.record_use(StreamId(1 + (number + 1) % 4)).unwrap();
                lab.work(StreamId(1 + (number + 1) % 4), &block, 3 * MS);
            }
            live.push_back(block);
            if live.len() > live_at_once - 1 {
                live.pop_front();
            }
            if number % 5 == 0 {
                lab.heap.trim();
            }
            if number % 8 == 0 {
                lab.time.advance(MS);
                lab.heap.tick();
            }
            lab.check();
        }
        drop(live);
        let small = lab.alloc(4 * KIB, S1);
        lab.heap.trim();
        assert!(lab.reserved() >= 56 * MIB, "the last block's work goes on");
        drop(small);
        lab.ends_with(0);
    }
}
