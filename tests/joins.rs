//! Idle ends of partly live handles, used at second mappings: what is joined, where, and when it ends.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod support;

use std::collections::BTreeMap;
use std::sync::Arc;
use support::{Lab, MS, Make, Random, S1, S2, on_each_backend, out_of_memory, sim};
use xseg::backend::fault::{FaultPlan, FaultRule, FaultyBackend};
use xseg::backend::sim::{SimBackend, SimOptions};
use xseg::backend::{DriverCalls, StreamId};
use xseg::error::DriverCall;
use xseg::units::{GRANULE, MIB};
use xseg::{Allocation, Error, Heap, PoolId, StreamFilter};

const CONF: &str = "reserve:8GiB,small_limit:0,growth:exact,wait_limit:1ms";

/// Two handles of 64 MiB, the first live in its first 10 MiB and the second in its last, and one of 2 MiB between them. They and
/// `beside` are all that may exist.
struct Two {
    first: Allocation,
    between: Allocation,
    last: Allocation,
}

const ALL: u64 = 130 * MIB;
const IDLE: u64 = 54 * MIB;

fn two(heap: &Heap, beside: u64) -> Two {
    let one = |bytes| heap.alloc_contiguous(bytes, S1).unwrap();
    let (a, between, b) = (one(64 * MIB), one(2 * MIB), one(64 * MIB));
    let (a_at, b_at) = (a.address(), b.address());
    let live = |bytes| heap.alloc(bytes, S1).unwrap();
    drop(a);
    let first = live(10 * MIB);
    let rest = live(IDLE);
    drop(b);
    let front = live(IDLE);
    let last = live(10 * MIB);
    drop((rest, front));
    assert_eq!((first.address(), last.address()), (a_at, b_at + IDLE));
    heap.set_limit(ALL + beside);
    assert_eq!(heap.stats().reserved, ALL + beside);
    Two { first, between, last }
}

impl Two {
    fn mark(&self, lab: &Lab) {
        lab.set_word(&self.first, 11);
        lab.set_word(&self.between, 12);
        lab.set_word(&self.last, 13);
    }

    #[track_caller]
    fn expect(&self, lab: &Lab) {
        lab.expect_word(&self.first, 11);
        lab.expect_word(&self.between, 12);
        lab.expect_word(&self.last, 13);
    }
}

fn calls(heap: &Heap, before: DriverCalls) -> (u64, u64, u64, u64) {
    let now = heap.stats().driver_calls;
    assert_eq!(now.map - before.map, now.set_access - before.set_access);
    (now.create - before.create, now.map - before.map, now.unmap - before.unmap, now.release - before.release)
}

#[track_caller]
fn joins(heap: &Heap) -> (u64, u64, u64) {
    let stats = heap.stats();
    (stats.handles_joined, stats.bytes_joined, stats.joins_ended)
}

on_each_backend!(
    two_idle_ends_make_one_block,
    the_joined_part_may_go_last,
    what_is_used_ends_as_a_zombie,
    an_end_and_whole_handles_make_one_block,
    huge_requests_join_ends_of_large_blocks,
    streams_wait_for_each_other,
    pinned_memory_stays,
    random_blocks_under_a_tight_limit_keep_their_contents,
);

fn two_idle_ends_make_one_block(make: Make) {
    let lab = make(CONF);
    let two = two(&lab.heap, 0);
    two.mark(&lab);
    let before = lab.heap.stats().driver_calls;
    let block = lab.alloc(2 * IDLE, S1);
    lab.check();
    assert_eq!(calls(&lab.heap, before), (0, 2, 0, 0), "two mappings, and nothing else");
    assert_eq!(joins(&lab.heap), (2, 2 * IDLE, 0));
    let stats = lab.heap.stats();
    assert_eq!((stats.reserved, stats.free, stats.zombie, stats.handles_moved), (ALL, 0, 0, 0));
    // The first handle's live part lies before the block, where it is not usable.
    assert!(block.address() >= two.last.address() + 10 * MIB);
    lab.set_word(&block, 14);
    let all = lab.heap.alloc(GRANULE, S1);
    assert_eq!(out_of_memory(all).allocated, ALL, "every byte of the limit is live");
    two.expect(&lab);
    lab.expect_word(&block, 14);
    // The joined part goes first: each handle is one again, and the rest of it free where it was.
    drop(block);
    lab.heap.tick();
    lab.check();
    assert_eq!(joins(&lab.heap), (2, 2 * IDLE, 2));
    assert_eq!(calls(&lab.heap, before), (0, 2, 2, 0));
    assert_eq!(lab.heap.stats().free, 2 * IDLE);
    let at_home = lab.alloc(IDLE, S1);
    assert_eq!(at_home.address(), two.first.address() + 10 * MIB);
    two.expect(&lab);
    drop(at_home);
    let Two { first, between, last } = two;
    drop((first, last));
    lab.heap.trim();
    assert_eq!(lab.reserved(), 2 * MIB);
    drop(between);
    lab.ends_with(0);
}

fn the_joined_part_may_go_last(make: Make) {
    let lab = make(CONF);
    let Two { first, between, last } = two(&lab.heap, 0);
    let block = lab.alloc(2 * IDLE, S1);
    lab.set_word(&block, 14);
    drop((first, last, between));
    lab.heap.trim();
    lab.check();
    // Neither is a victim nor goes back while its other part is live elsewhere.
    assert_eq!((lab.reserved(), joins(&lab.heap).2), (128 * MIB, 0));
    let home = lab.alloc(10 * MIB, S1);
    assert_eq!(lab.heap.stats().handles_joined, 2, "what was live is free where it lies");
    lab.expect_word(&block, 14);
    drop(home);
    drop(block);
    lab.ends_with(0);
    assert_eq!(joins(&lab.heap), (2, 2 * IDLE, 2));
}

fn what_is_used_ends_as_a_zombie(make: Make) {
    let lab = make(CONF);
    let two = two(&lab.heap, 0);
    let block = lab.alloc(2 * IDLE, S1);
    let before = lab.heap.stats().driver_calls;
    lab.work(S1, &block, 3 * MS);
    drop(block);
    lab.heap.tick();
    lab.check();
    // The second mappings are unmapped when their last use has passed; the stream's order holds at home at once.
    assert_eq!((joins(&lab.heap).2, lab.heap.stats().zombie), (2, 128 * MIB));
    let again = lab.alloc(IDLE, S1);
    assert_eq!(again.address(), two.first.address() + 10 * MIB);
    assert_eq!(calls(&lab.heap, before), (0, 0, 0, 0));
    // Another stream has to wait for both.
    out_of_memory(lab.heap.alloc(IDLE, S2));
    lab.time.advance(4 * MS);
    let other = lab.alloc(IDLE, S2);
    lab.check();
    assert_eq!((calls(&lab.heap, before), lab.heap.stats().zombie), ((0, 0, 2, 0), 0));
    drop((again, other, two.first, two.between, two.last));
    lab.ends_with(0);
}

fn an_end_and_whole_handles_make_one_block(make: Make) {
    let lab = make(CONF);
    let whole = lab.heap.alloc_contiguous(26 * MIB, S1).unwrap();
    let apart = lab.heap.alloc_contiguous(2 * MIB, S1).unwrap();
    let two = two(&lab.heap, 28 * MIB);
    drop(whole);
    two.mark(&lab);
    lab.set_word(&apart, 15);
    // One end is enough.
    let block = lab.alloc(80 * MIB, S1);
    lab.check();
    let stats = lab.heap.stats();
    assert_eq!((stats.handles_joined, stats.bytes_joined, stats.handles_moved), (1, IDLE, 1));
    assert_eq!((stats.reserved, stats.bytes_created), (ALL + 28 * MIB, ALL + 28 * MIB));
    lab.set_word(&block, 16);
    two.expect(&lab);
    drop(block);
    // Both, and the whole handle between them.
    let block = lab.alloc(26 * MIB + 2 * IDLE, S1);
    lab.check();
    assert_eq!(joins(&lab.heap), (3, 3 * IDLE, 1));
    lab.set_word(&block, 17);
    two.expect(&lab);
    lab.expect_word(&apart, 15);
    lab.expect_word(&block, 17);
    drop((block, two.first, two.between, two.last, apart));
    lab.ends_with(0);
}

fn huge_requests_join_ends_of_large_blocks(make: Make) {
    let lab = make(CONF);
    let whole = lab.heap.alloc_contiguous(480 * MIB, S1).unwrap();
    let two = two(&lab.heap, 480 * MIB);
    two.mark(&lab);
    drop(whole);
    let block = lab.alloc(480 * MIB + 2 * IDLE, S1);
    lab.check();
    assert_eq!((joins(&lab.heap), lab.reserved()), ((2, 2 * IDLE, 0), ALL + 480 * MIB));
    two.expect(&lab);
    drop(block);
    lab.heap.tick();
    lab.check();
    assert_eq!(joins(&lab.heap).2, 2);
    drop((two.first, two.between, two.last));
    lab.ends_with(0);
}

fn streams_wait_for_each_other(make: Make) {
    let lab = make(CONF);
    let two = two(&lab.heap, 0);
    let rest = lab.alloc(IDLE, S1);
    lab.work(S1, &rest, 3 * MS);
    drop(rest);
    // The first handle's end is the stream's own still, which has not passed.
    out_of_memory(lab.heap.alloc(2 * IDLE, S2));
    assert_eq!(joins(&lab.heap).0, 0);
    let own = lab.alloc(2 * IDLE, S1);
    lab.check();
    assert_eq!(joins(&lab.heap), (2, 2 * IDLE, 0));
    drop(own);
    lab.time.advance(4 * MS);
    let other = lab.alloc(2 * IDLE, S2);
    lab.check();
    assert_eq!(joins(&lab.heap), (4, 4 * IDLE, 2));
    lab.work(S2, &other, 3 * MS);
    drop(other);
    // What another stream used at the second mapping is another's at home, too.
    out_of_memory(lab.heap.alloc(IDLE, S1));
    lab.time.advance(4 * MS);
    drop(lab.alloc(IDLE, S1));
    lab.check();
    drop((two.first, two.between, two.last));
    lab.ends_with(0);
}

fn pinned_memory_stays(make: Make) {
    let lab = make(CONF);
    let two = two(&lab.heap, 0);
    lab.heap.pin(two.first.address(), 10 * MIB).unwrap();
    out_of_memory(lab.heap.alloc(2 * IDLE, S1));
    lab.heap.unpin(two.first.address(), 10 * MIB).unwrap();
    let block = lab.alloc(2 * IDLE, S1);
    let address = block.address();
    lab.heap.pin(address + 8 * MIB, 4 * MIB).unwrap();
    drop(block);
    lab.heap.trim();
    lab.check();
    assert_eq!(joins(&lab.heap), (2, 2 * IDLE, 1), "the address of the first handle's end is held");
    lab.heap.unpin(address + 8 * MIB, 4 * MIB).unwrap();
    lab.heap.tick();
    lab.check();
    assert_eq!(joins(&lab.heap).2, 2);
    drop((two.first, two.between, two.last));
    lab.ends_with(0);
}

/// Random blocks of three streams, with the device behind, of which every granule's first word is set and looked at.
fn random_blocks_under_a_tight_limit_keep_their_contents(make: Make) {
    let mut joined = 0;
    for seed in 1..=6 {
        let lab = make("reserve:8GiB,small_limit:0,growth:exact,wait_limit:100ms");
        let mut random = Random(seed * 77);
        // Handles of 2 to 32 MiB, as there are where limits were far when memory was made.
        let sizes: Vec<u64> = (0..14).map(|_| GRANULE << random.below(5)).collect();
        let handles: Vec<_> = sizes.iter().map(|size| lab.heap.alloc_contiguous(*size, S1).unwrap()).collect();
        drop(handles);
        lab.heap.set_limit(sizes.iter().sum());
        let mut live: Vec<(Allocation, BTreeMap<u64, u64>)> = Vec::new();
        let mut word = seed << 32;
        for step in 0..700 {
            let stream = StreamId(1 + random.below(3));
            match random.below(12) {
                0..=5 => {
                    let shift = 1 + random.below(5);
                    let bytes = (1 + random.below(1 << shift)) * GRANULE - 512 * random.below(3);
                    // Large handles come back with blocks that want one.
                    let block = match random.below(4) {
                        0 => lab.heap.alloc_contiguous(bytes, stream),
                        _ => lab.heap.alloc(bytes, stream),
                    };
                    if let Ok(block) = block {
                        let end = block.address() + block.size();
                        let words = (block.address()..end).step_by(GRANULE as usize);
                        let words: BTreeMap<u64, u64> = words.zip(word..).collect();
                        word += words.len() as u64;
                        for (address, word) in &words {
                            lab.set_word_at(*address, *word);
                        }
                        lab.work(stream, &block, MS * random.below(3) as u32);
                        live.push((block, words));
                    }
                }
                6..=9 if !live.is_empty() => {
                    let (block, words) = live.swap_remove(random.below(live.len() as u64) as usize);
                    for (address, word) in words {
                        lab.expect_word_at(address, word);
                    }
                    drop(block);
                }
                10 => lab.time.advance(MS),
                _ if step % 7 == 0 => drop(lab.heap.trim()),
                _ => lab.heap.tick(),
            }
            lab.check();
        }
        for (address, word) in live.iter().flat_map(|(_, words)| words) {
            lab.expect_word_at(*address, *word);
        }
        joined += lab.heap.stats().handles_joined;
        drop(live);
        lab.ends_with(0);
    }
    assert!(joined > 20, "{joined} ends were joined");
}

#[test]
fn nothing_is_joined_where_that_is_off_or_nothing_may_move() {
    for conf in ["joins:off", "defrag:off"] {
        let lab = sim(&format!("{CONF},{conf}"));
        let two = two(&lab.heap, 0);
        out_of_memory(lab.heap.alloc(2 * IDLE, S1));
        assert_eq!(joins(&lab.heap), (0, 0, 0));
        drop((two.first, two.between, two.last));
        lab.ends_with(0);
    }
}

#[test]
fn captures_take_and_give_no_ends() {
    let lab = sim(CONF);
    let two = two(&lab.heap, 0);
    let pool = PoolId(0, 1);
    lab.heap.begin_capture(pool, StreamFilter::All).unwrap();
    out_of_memory(lab.heap.alloc(2 * IDLE, S1));
    lab.heap.end_capture(pool).unwrap();
    lab.heap.release_capture(pool).unwrap();
    assert_eq!(joins(&lab.heap), (0, 0, 0));
    drop(lab.alloc(2 * IDLE, S1));
    lab.check();
    assert_eq!(joins(&lab.heap).0, 2);
    drop((two.first, two.between, two.last));
    lab.ends_with(0);
}

/// Shutting down with joined blocks live leaves nothing mapped: the device checks that.
#[test]
fn a_heap_ends_with_joined_blocks_live() {
    let lab = sim(CONF);
    let two = two(&lab.heap, 0);
    let block = lab.alloc(2 * IDLE, S1);
    lab.heap.shut_down();
    let addresses = [two.first, two.between, two.last, block].map(Allocation::into_raw);
    assert!(lab.heap.free_raw(addresses[0]).is_ok());
}

/// Each call of a join fails, and so does what undoes it.
#[test]
fn a_join_that_fails_gives_everything_back() {
    let mut failed = 0;
    for call in [DriverCall::Map, DriverCall::SetAccess] {
        for (k, undone) in [(1, true), (2, true), (1, false), (2, false)] {
            let sim = Arc::new(SimBackend::new(SimOptions::default()));
            let faulty = Arc::new(FaultyBackend::new(sim.clone()));
            let heap = Heap::builder().conf(CONF).unwrap().backend(faulty.clone()).build().unwrap();
            let two = two(&heap, 0);
            let check = || {
                heap.check().unwrap();
                assert_eq!(sim.violations(), Vec::<String>::new());
                assert_eq!(sim.memory_in_use(), heap.stats().reserved);
            };
            let before = sim.mapping_count();
            // Calls are map, set_access, map, set_access; a set_access that failed is followed by its map's undoing.
            let first = 2 * k - u64::from(call == DriverCall::Map);
            let rule = if undone { FaultRule::At(first) } else { FaultRule::From(first) };
            faulty.arm(FaultPlan::new(rule, false));
            match heap.alloc(2 * IDLE, S1) {
                Err(Error::Driver(error)) => assert_eq!(error.call, call),
                other => panic!("{call} {k}: {other:?}"),
            }
            failed += 1;
            faulty.disarm();
            heap.tick();
            check();
            assert_eq!(sim.mapping_count(), before);
            let stats = heap.stats();
            assert_eq!((stats.handles_joined, stats.zombie, stats.free), (stats.joins_ended, 0, 2 * IDLE));
            // All of it can be joined again.
            let block = heap.alloc(2 * IDLE, S1).unwrap();
            check();
            drop((block, two.first, two.between, two.last));
            heap.tick();
            heap.trim();
            check();
            assert_eq!(heap.stats().reserved, 0);
        }
    }
    assert_eq!(failed, 8);
}

/// As the random blocks above, while each n-th call of the driver is refused.
#[test]
fn random_joins_survive_refused_calls() {
    let (mut joined, mut refused) = (0, 0);
    for (seed, rule) in (1..40).zip([3, 5, 7, 11, 17].into_iter().cycle().map(FaultRule::Every)) {
        let sim = Arc::new(SimBackend::new(SimOptions::default()));
        let faulty = Arc::new(FaultyBackend::new(sim.clone()));
        let conf = "reserve:8GiB,small_limit:0,growth:exact,wait_limit:1ms";
        let heap = Heap::builder().conf(conf).unwrap().backend(faulty.clone()).build().unwrap();
        let mut random = Random(seed * 91);
        let handles: Vec<_> = (0..10).map(|_| heap.alloc_contiguous(GRANULE << random.below(5), S1).unwrap()).collect();
        drop(handles);
        heap.set_limit(heap.stats().reserved);
        faulty.arm(FaultPlan::new(rule, seed % 2 == 0));
        let mut live = Vec::new();
        for _ in 0..300 {
            let bytes = (1 + random.below(24)) * GRANULE;
            let block = match random.below(8) {
                0 | 1 => heap.alloc_contiguous(bytes, S1),
                2..=4 => heap.alloc(bytes, S1),
                5 | 6 if !live.is_empty() => {
                    drop(live.swap_remove(random.below(live.len() as u64) as usize));
                    continue;
                }
                _ => {
                    heap.tick();
                    continue;
                }
            };
            match block {
                Ok(block) => live.push(block),
                Err(Error::OutOfMemory(_)) => {}
                Err(Error::Driver(_)) => refused += 1,
                Err(other) => panic!("{other:?}"),
            }
            heap.check().unwrap();
            assert_eq!(sim.violations(), Vec::<String>::new());
        }
        faulty.disarm();
        joined += heap.stats().handles_joined;
        drop(live);
        for _ in 0..2 {
            heap.tick();
            heap.trim();
        }
        heap.check().unwrap();
        let stats = heap.stats();
        assert_eq!((stats.reserved, stats.zombie, stats.handles_joined), (0, 0, stats.joins_ended));
    }
    assert!(joined > 20 && refused > 20, "{joined} ends were joined, {refused} requests failed");
}
