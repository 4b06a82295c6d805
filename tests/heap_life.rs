//! Streams that end, heaps that end, declared uses, and the order of what other streams may have.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod support;

use std::sync::Arc;
use std::time::Duration;
use support::{Lab, MS, S1, S2, out_of_memory, sim, sim_with};
use xseg::backend::EventScope;
use xseg::backend::sim::{SimBackend, SimOptions};
use xseg::units::{GIB, GRANULE, KIB, MIB};
use xseg::{Allocation, Error, Heap, PoolId, StreamFilter, StreamId};

const S3: StreamId = StreamId(3);

#[test]
fn a_retired_stream_is_an_error_and_its_memory_is_everybodys() {
    let lab = sim("limit:64MiB");
    let (kept, freed) = (lab.alloc(16 * MIB, S1), lab.alloc(48 * MIB, S1));
    lab.work(S1, &freed, 5 * MS);
    drop(freed);
    assert!(matches!(lab.heap.retire_stream(StreamId(0)), Err(Error::InvalidArgument(_))), "nobody can destroy it");
    lab.heap.retire_stream(S1).unwrap();
    let dead = |result: Result<(), Error>| matches!(result, Err(Error::DeadStream { stream: 1, .. }));
    assert!(dead(lab.heap.alloc(512, S1).map(drop)));
    assert!(dead(lab.heap.record_use(kept.address(), S1)));
    assert!(dead(lab.heap.retire_stream(S1)));
    assert!(matches!(lab.heap.retire_stream(S3), Err(Error::DeadStream { stream: 3, .. })), "never seen");
    lab.check();
    // Its work goes on: stream 2 gets other memory first, and this when the work is done.
    let calls = lab.heap.stats().driver_calls.create;
    lab.time.advance(5 * MS);
    let taken = lab.alloc(48 * MIB, S2);
    assert_eq!(lab.heap.stats().driver_calls.create, calls);
    lab.check();
    drop((kept, taken));
    lab.ends_with(0);
}

#[test]
fn a_new_stream_in_the_place_of_a_retired_one_inherits_nothing() {
    // The new stream may get the old one's number inside the heap; memory still in use must not come with it.
    for declared in [false, true] {
        let lab = sim("limit:32MiB,wait_limit:1ms");
        let block = lab.alloc(32 * MIB, S1);
        if declared {
            block.record_use(S3).unwrap();
            lab.work(S3, &block, 2 * MS);
        }
        lab.work(S1, &block, Duration::from_secs(9));
        drop(block);
        lab.heap.retire_stream(S1).unwrap();
        lab.time.advance(3 * MS);
        lab.heap.tick();
        let fields = out_of_memory(lab.heap.alloc(32 * MIB, S2));
        assert_eq!(fields.waiting, 32 * MIB, "declared: {declared}");
        lab.time.advance(Duration::from_secs(9));
        drop(lab.alloc(32 * MIB, S2));
        lab.ends_with(0);
    }
}

#[test]
fn many_streams_come_and_go() {
    let lab = sim("limit:64MiB");
    for number in 0..10_000 {
        let stream = StreamId(100 + number);
        let block = lab.alloc(20 * MIB, stream);
        let small = lab.alloc(3 * KIB, stream);
        lab.work(stream, &block, MS);
        drop((block, small));
        lab.heap.retire_stream(stream).unwrap();
        lab.time.advance(MS);
    }
    assert!(lab.heap.stats().peak_reserved <= 24 * MIB);
    lab.ends_with(0);
}

#[test]
fn a_declared_use_holds_the_block_back_from_its_own_stream_too() {
    let lab = sim("");
    for bytes in [4 * KIB, 8 * MIB] {
        let block = lab.alloc(bytes, S1);
        let at = block.address();
        block.record_use(S2).unwrap();
        block.record_use(S2).unwrap();
        block.record_use(S1).unwrap();
        lab.work(S2, &block, 10 * MS);
        drop(block);
        assert_eq!(lab.heap.stats().pending, bytes);
        let other = lab.alloc(bytes, S1);
        assert_ne!(other.address(), at);
        lab.check();
        lab.time.advance(10 * MS);
        lab.heap.tick();
        assert_eq!(lab.heap.stats().pending, 0);
        let again = lab.alloc(bytes, S1);
        assert_eq!(again.address(), at);
    }
    lab.ends_with(0);
}

#[test]
fn a_declared_use_waits_for_that_stream_alone() {
    let lab = sim("limit:32MiB");
    let (a, b) = (lab.alloc(16 * MIB, S1), lab.alloc(16 * MIB, S1));
    a.record_use(S2).unwrap();
    b.record_use(S3).unwrap();
    lab.work(S2, &a, MS);
    lab.work(S3, &b, Duration::from_secs(1));
    drop((a, b));
    lab.time.advance(MS);
    let again = lab.alloc(16 * MIB, S1);
    assert_eq!(lab.time.now(), MS, "nothing waited for stream 3");
    assert_eq!(lab.heap.stats().pending, 16 * MIB);
    drop(again);
    lab.ends_with(0);
}

#[test]
fn a_block_whose_declared_uses_have_ended_is_taken_before_a_longer_one_is_cut() {
    let lab = sim("");
    for bytes in [2 * MIB, 64 * MIB] {
        let (longer, between) = (lab.alloc(4 * bytes, S1), lab.alloc(16 * MIB, S1));
        let (block, after) = (lab.alloc(bytes, S1), lab.alloc(16 * MIB, S1));
        let (at, cut) = (block.address(), longer.address());
        block.record_use(S2).unwrap();
        lab.work(S2, &block, 10 * MS);
        drop((block, longer));
        // No call looks after what waits but these requests themselves.
        let early = lab.alloc(bytes, S1);
        assert_ne!(early.address(), at, "its use has not ended");
        assert!((cut..cut + 4 * bytes).contains(&early.address()));
        lab.time.advance(10 * MS);
        let again = lab.alloc(bytes, S1);
        assert_eq!(again.address(), at);
        lab.check();
        drop((between, after, early, again));
        lab.heap.trim();
    }
    lab.ends_with(0);
}

#[test]
fn an_undeclared_use_holds_other_streams_back_but_not_its_own() {
    let lab = sim("limit:64MiB");
    let block = lab.alloc(32 * MIB, S1);
    let at = block.address();
    // `side.wait_stream(main)`, then read on the side, then `del`.
    lab.work(S3, &block, 10 * MS);
    drop(block);
    let other = lab.alloc(32 * MIB, S2);
    assert_ne!(other.address(), at, "stream 3 reads it still");
    let own = lab.alloc(32 * MIB, S1);
    assert_eq!(own.address(), at, "the client ordered its own stream");
    drop((own, other));
    lab.time.advance(10 * MS);
    let theirs = lab.alloc(64 * MIB, S2);
    assert_eq!(lab.heap.stats().host_waits, 0);
    drop(theirs);
    lab.ends_with(0);
}

#[test]
fn without_context_events_known_streams_are_asked_one_by_one() {
    let lab = sim_with("limit:32MiB,wait_limit:1ms", SimOptions { context_events: false, ..SimOptions::default() });
    drop((lab.alloc(512, S2), lab.alloc(512, S3)));
    lab.ends_with(0);
    let block = lab.alloc(32 * MIB, S1);
    lab.work(S3, &block, Duration::from_secs(2));
    drop(block);
    assert_eq!(out_of_memory(lab.heap.alloc(32 * MIB, S2)).waiting, 32 * MIB);
    lab.time.advance(Duration::from_secs(2));
    drop(lab.alloc(32 * MIB, S2));
    lab.ends_with(0);
}

/// Blocks short enough for a small pool to keep unmerged, in every kind of segment.
#[test]
fn what_a_retired_stream_left_stays_mapped_until_its_work_is_done() {
    for (conf, bytes) in [("", MIB + 8 * KIB), (",small_limit:0", 4 * KIB), ("", 4 * KIB)] {
        let lab = sim(&format!("limit:64MiB,handle_max:2MiB{conf}"));
        drop(lab.alloc(16 * MIB, S1));
        lab.time.advance(MS);
        lab.heap.tick();
        let block = lab.heap.alloc_raw(bytes, S1).unwrap();
        lab.work_at(S1, block, bytes, 10 * MS);
        lab.heap.retire_stream(S1).unwrap();
        lab.heap.free_raw(block).unwrap();
        assert_eq!(lab.heap.trim().reserved, GRANULE, "{conf}, {bytes} bytes");
        lab.check();
        lab.time.advance(10 * MS);
        assert_eq!(lab.heap.trim().reserved, 0);
        lab.check();
    }
}

/// A heap whose stream 2 was retired with 10 ms of work on a block that stream 1 has freed since.
fn retired_with_work(conf: &str) -> Lab {
    let lab = sim_with(conf, SimOptions { context_events: false, ..SimOptions::default() });
    let block = lab.alloc(32 * MIB, S1);
    block.record_use(S2).unwrap();
    let read = lab.alloc(32 * MIB, S1);
    lab.work(S2, &read, 10 * MS);
    drop(block);
    lab.heap.retire_stream(S2).unwrap();
    drop(read);
    lab
}

#[test]
fn without_context_events_a_retired_streams_work_counts_on() {
    let lab = retired_with_work("limit:64MiB,wait_limit:1ms");
    assert_eq!(out_of_memory(lab.heap.alloc(32 * MIB, S3)).waiting, 64 * MIB);
    lab.heap.trim();
    lab.check();
    lab.ends_with(0);
}

#[test]
fn a_wait_goes_for_the_oldest_epoch_first() {
    let lab = retired_with_work("limit:64MiB");
    let started = std::time::Instant::now();
    drop(lab.alloc(32 * MIB, S3));
    assert!((10 * MS..20 * MS).contains(&lab.time.now()), "{:?}", lab.time.now());
    assert!(started.elapsed() < Duration::from_secs(5), "it spun");
    lab.ends_with(0);
}

#[test]
fn a_wait_on_the_device_covers_retired_streams() {
    let lab = retired_with_work("limit:64MiB,cross_stream:wait");
    // The declared block is not waited for on the device, so that one of 32 MiB is left.
    let block = lab.alloc(32 * MIB, S3);
    assert_eq!((lab.heap.stats().gpu_waits, lab.heap.stats().host_waits), (1, 0));
    assert!(lab.time.completion(EventScope::Stream(S3)) >= 10 * MS);
    drop(block);
    lab.ends_with(0);
}

#[test]
fn moved_memory_keeps_its_old_address_until_its_use_has_passed() {
    let lab = sim("limit:64MiB,handle_max:16MiB");
    let mut blocks: Vec<Option<Allocation>> = (0..4).map(|_| Some(lab.alloc(16 * MIB, S1))).collect();
    for index in [0, 2] {
        lab.work(S1, blocks[index].as_ref().unwrap(), 10 * MS);
        blocks[index] = None;
    }
    let joined = lab.alloc(32 * MIB, S1);
    let stats = lab.heap.stats();
    assert_eq!((stats.host_waits, stats.reserved, stats.zombie), (0, 64 * MIB, stats.bytes_moved));
    assert!(stats.handles_moved >= 1);
    lab.check();
    lab.time.advance(20 * MS);
    lab.heap.tick();
    assert_eq!(lab.heap.stats().zombie, 0);
    drop((blocks, joined));
    lab.ends_with(0);
}

#[test]
fn shut_down_releases_all_and_later_calls_are_harmless() {
    let lab = sim("");
    let blocks = [lab.alloc(20 * MIB, S1), lab.alloc(3 * KIB, S2), lab.alloc(0, S1), lab.alloc(GIB, S2)];
    let waiting = lab.alloc(2 * MIB, S1);
    waiting.record_use(S2).unwrap();
    blocks[0].record_use(S2).unwrap();
    lab.work(S2, &waiting, 100 * MS);
    drop(waiting);
    let raw = lab.alloc(5 * MIB, S1).into_raw();
    lab.heap.shut_down();
    assert_eq!(lab.sim().counts(), (0, 0, 0));
    assert_eq!(lab.time.now(), 100 * MS, "it waited for the device");
    assert!(matches!(lab.heap.alloc(512, S1), Err(Error::ShutDown)));
    assert!(matches!(lab.heap.alloc_raw(GIB, S1), Err(Error::ShutDown)));
    let nothing = || {
        let stats = lab.heap.stats();
        assert_eq!((stats.reserved, stats.allocated, stats.requested, stats.live_blocks), (0, 0, 0, 0));
        assert_eq!((stats.free, stats.largest_free, stats.pending, stats.frees), (0, 0, 0, stats.allocs));
    };
    nothing();
    lab.heap.free_raw(raw).unwrap();
    drop(blocks);
    lab.heap.tick();
    assert_eq!(lab.heap.trim().released, 0);
    assert_eq!(lab.heap.set_limit(MIB), 0);
    assert!(matches!(lab.heap.pin(raw, 512), Err(Error::InvalidArgument(_) | Error::ShutDown)));
    lab.heap.retire_stream(S1).unwrap();
    lab.heap.shut_down();
    nothing();
    assert_eq!(lab.sim().violations(), Vec::<String>::new());
}

#[test]
fn dropping_the_last_clone_ends_the_heap_with_its_live_blocks() {
    let device = Arc::new(SimBackend::new(SimOptions::default()));
    let heap = Heap::builder().backend(device.clone()).build().unwrap();
    let clone = heap.clone();
    let raw = heap.alloc(20 * MIB, S1).unwrap().into_raw();
    drop(heap);
    assert_eq!(device.memory_in_use(), 64 * MIB, "the clone goes on, with its first growth step");
    clone.free_raw(raw).unwrap();
    let owned = clone.alloc(70 * MIB, S1).unwrap();
    let _ = clone.alloc(MIB, S2).unwrap().into_raw();
    drop(clone);
    assert!(device.memory_in_use() >= 70 * MIB, "a block keeps the heap");
    drop(owned);
    assert_eq!(device.counts(), (0, 0, 0));
}

#[test]
fn a_heap_that_could_not_be_built_leaves_nothing() {
    let options = SimOptions { reserve_max: Some(MIB), ..SimOptions::default() };
    let device = Arc::new(SimBackend::new(options));
    let built = Heap::builder().backend(device.clone()).build();
    assert!(matches!(built, Err(Error::Driver(_) | Error::AddressSpace { .. })), "{built:?}");
    assert_eq!((device.counts(), device.violations().len()), ((0, 0, 0), 0));
    // A policy that no text can say.
    let mut config = xseg::Config::default();
    config.small_limit = MIB + 1;
    let built = Heap::builder().config(config).backend(device.clone()).build();
    assert!(matches!(&built, Err(Error::Config(why)) if why.contains("small_limit")), "{built:?}");
    assert_eq!((device.counts(), device.violations().len()), ((0, 0, 0), 0));
}

/// Uses the heap when it is dropped.
struct AtItsEnd(Heap);

impl Drop for AtItsEnd {
    fn drop(&mut self) {
        self.0.tick();
        assert_eq!(self.0.stats().live_blocks, 0);
    }
}

#[test]
fn what_the_clients_functions_own_may_use_the_heap_as_it_ends() {
    let (done, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let lab = sim("limit:64MiB");
        let pool = PoolId(1, 1);
        let (filter, callback) = (AtItsEnd(lab.heap.clone()), AtItsEnd(lab.heap.clone()));
        let takes = move |stream: StreamId| stream == S1 && filter.0.limit() > 0;
        lab.heap.begin_pool(pool, StreamFilter::Matching(Arc::new(takes))).unwrap();
        lab.heap.on_out_of_memory(Box::new(move |bytes| bytes > callback.0.limit()));
        drop(lab.alloc(MIB, S1));
        lab.heap.end_capture(pool).unwrap();
        lab.heap.release_capture(pool).unwrap();
        lab.heap.shut_down();
        done.send(()).unwrap();
    });
    ended.recv_timeout(Duration::from_secs(10)).expect("no lock is held while they are dropped");
}
