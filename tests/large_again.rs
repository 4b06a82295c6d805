//! A large block that was allocated last and is freed stays as it is until anything else happens to its segment: every
//! operation sees it merged, and it changes no address.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod support;

use support::{Lab, MS, S0, S1, on_each_backend, sim};
use xseg::units::{GRANULE, KIB, MIB};
use xseg::{Error, PoolId, RegionState, StreamFilter};

on_each_backend!(
    the_same_request_gets_it_again,
    each_operation_sees_it_merged,
    a_declared_use_is_waited_for,
    another_stream_gets_it_when_it_has_passed,
    a_capture_begins_with_it_merged,
);

/// A heap with 64 MiB of memory at one place, of which a block of 24 MiB was cut and freed.
fn kept(make: support::Make) -> (Lab, u64) {
    let lab = make("limit:1GiB");
    drop(lab.heap.alloc(64 * MIB, S0).unwrap());
    let block = lab.heap.alloc_raw(24 * MIB, S0).unwrap();
    lab.heap.free_raw(block).unwrap();
    (lab, block)
}

fn the_same_request_gets_it_again(make: support::Make) {
    let (lab, block) = kept(make);
    for round in 0..3 {
        assert_eq!(lab.heap.alloc_raw(24 * MIB - round, S0).unwrap(), block);
        let size = lab.heap.block_size(block).unwrap();
        assert_eq!(size, (24 * MIB - round, 24 * MIB));
        lab.heap.free_raw(block).unwrap();
        assert!(matches!(lab.heap.free_raw(block), Err(Error::InvalidPointer { .. })), "it is freed once");
    }
    let stats = lab.heap.stats();
    assert_eq!((stats.allocs, stats.frees, stats.live_blocks, stats.allocated, stats.requested), (5, 5, 0, 0, 0));
    assert_eq!((stats.peak_allocated, stats.peak_requested), (64 * MIB, 64 * MIB));
}

fn each_operation_sees_it_merged(make: support::Make) {
    type Operation = fn(&Lab);
    let operations: [(&str, Operation); 8] = [
        ("check", |lab| lab.heap.check().unwrap()),
        ("statistics", |lab| {
            let stats = lab.heap.stats();
            assert_eq!((stats.free, stats.largest_free), (64 * MIB, 64 * MIB));
        }),
        ("layout", |lab| {
            let regions = lab.heap.layout();
            assert_eq!(regions.len(), 1);
            assert_eq!((regions[0].bytes, regions[0].state), (64 * MIB, RegionState::Free));
        }),
        ("a longer request", |lab| {
            drop(lab.heap.alloc(64 * MIB, S0).unwrap());
            assert_eq!(lab.heap.stats().reserved, 64 * MIB, "its memory is what the longer block has");
        }),
        ("an aligned request", |lab| {
            let block = lab.heap.alloc_aligned(24 * MIB, GRANULE, S0).unwrap();
            assert!(block.address().is_multiple_of(GRANULE));
            assert_eq!(lab.heap.stats().largest_free, 40 * MIB);
        }),
        ("a huge request", |lab| {
            drop(lab.heap.alloc(600 * MIB, S0).unwrap());
            lab.heap.check().unwrap();
        }),
        ("trim", |lab| {
            lab.time.advance(MS);
            assert_eq!(lab.heap.trim().reserved, 0);
        }),
        ("the limit", |lab| {
            lab.time.advance(MS);
            assert_eq!(lab.heap.set_limit(0), 0);
        }),
    ];
    for (name, operation) in operations {
        let (lab, _) = kept(make);
        println!("{name}");
        operation(&lab);
        lab.heap.check().unwrap();
    }
}

fn a_declared_use_is_waited_for(make: support::Make) {
    let (lab, block) = kept(make);
    assert_eq!(lab.heap.alloc_raw(24 * MIB, S0).unwrap(), block);
    lab.heap.record_use(block, S1).unwrap();
    lab.work_at(S1, block, 24 * MIB, MS);
    lab.heap.free_raw(block).unwrap();
    let other = lab.heap.alloc_raw(24 * MIB, S0).unwrap();
    assert_ne!(other, block, "its use on the other stream is not done");
    lab.heap.free_raw(other).unwrap();
    lab.time.advance(2 * MS);
    lab.heap.tick();
    assert_eq!(lab.heap.stats().largest_free, 64 * MIB);
    lab.heap.check().unwrap();
}

fn another_stream_gets_it_when_it_has_passed(make: support::Make) {
    let (lab, block) = kept(make);
    assert_eq!(lab.heap.alloc_raw(24 * MIB, S0).unwrap(), block);
    lab.work_at(S0, block, 24 * MIB, 2 * MS);
    lab.heap.free_raw(block).unwrap();
    let theirs = lab.heap.alloc_raw(24 * MIB, S1).unwrap();
    assert!(!(block..block + 64 * MIB).contains(&theirs), "the first stream has not passed the free");
    lab.heap.free_raw(theirs).unwrap();
    lab.time.advance(3 * MS);
    lab.heap.tick();
    lab.heap.tick();
    assert!((block..block + 64 * MIB).contains(&lab.heap.alloc_raw(40 * MIB, S1).unwrap()));
    lab.heap.check().unwrap();
}

fn a_capture_begins_with_it_merged(make: support::Make) {
    let (lab, block) = kept(make);
    lab.heap.begin_capture(PoolId(0, 1), StreamFilter::All).unwrap();
    let captured = lab.heap.alloc_raw(24 * MIB, S0).unwrap();
    assert_ne!(captured, block, "it is the pool's");
    lab.heap.free_raw(captured).unwrap();
    assert_eq!(lab.heap.alloc_raw(24 * MIB, S0).unwrap(), captured);
    lab.heap.free_raw(captured).unwrap();
    lab.heap.end_capture(PoolId(0, 1)).unwrap();
    lab.heap.check().unwrap();
    lab.heap.release_capture(PoolId(0, 1)).unwrap();
}

/// Two heaps get the same requests, and one of them is looked at after each, which merges everything.
#[test]
fn it_changes_no_address() {
    let (lazy, merging) = (sim("limit:8GiB"), sim("limit:8GiB"));
    let mut live: Vec<[u64; 2]> = Vec::new();
    let mut state = 5_u64;
    let mut random = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let mut same = 0;
    let mut before = 0;
    for _ in 0..30_000 {
        if live.is_empty() || (live.len() < 20 && random(2) == 0) {
            // Now and then a huge one, and one that fits where huge ones were.
            let bytes = match random(14) {
                0 => (510 + random(5) * 10) * MIB,
                1 => 300 * MIB,
                _ => (2 + random(3)) * 9 * MIB + random(2) * 700 * KIB,
            };
            let stream = if random(20) == 0 { S1 } else { S0 };
            let got = [&lazy, &merging].map(|lab| lab.heap.alloc_raw(bytes, stream).unwrap());
            same += u32::from(got[0] == before);
            live.push(got);
        } else {
            let at = if random(12) == 0 { random(live.len() as u64) as usize } else { live.len() - 1 };
            let gone = live.remove(at);
            before = gone[0];
            [&lazy, &merging].into_iter().zip(gone).for_each(|(lab, address)| lab.heap.free_raw(address).unwrap());
        }
        assert!(!merging.heap.layout().is_empty());
        assert!(live.last().is_none_or(|got| got[0] == got[1]), "{live:?}");
    }
    assert!(same > 1_000, "{same}");
    let [lazy, merging] = [lazy, merging].map(|lab| lab.heap.stats());
    assert_eq!((lazy.reserved, lazy.free, lazy.largest_free), (merging.reserved, merging.free, merging.largest_free));
}
