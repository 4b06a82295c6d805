//! Threads on the hot path alone: small blocks on own and shared streams, freed by others, counted while at work.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod support;

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc;
use std::thread;
use support::{S0, sim};
use xseg::units::{KIB, MIB};
use xseg::{Error, StreamId};

const THREADS: u64 = 4;
const ROUNDS: u64 = 4_000;

/// Allocates on `stream`, frees half itself, and hands the other half on.
fn work(lab: &support::Lab, stream: StreamId, next: &mpsc::Sender<u64>, mine: &mpsc::Receiver<u64>) {
    for round in 0..ROUNDS {
        let bytes = (round % 40 + 1) * KIB;
        let (own, given) = (lab.heap.alloc_raw(bytes, stream).unwrap(), lab.heap.alloc_raw(bytes, stream).unwrap());
        next.send(given).unwrap();
        lab.heap.free_raw(own).unwrap();
        if let Ok(other) = mine.try_recv() {
            lab.heap.free_raw(other).unwrap();
        }
    }
}

/// Ends the thread that watches, also where an assertion fails, so that the scope ends.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

fn all_at_once(stream_of: fn(u64) -> StreamId) {
    // All that is handed on has room, should those who are to free it not run for long.
    let lab = sim("limit:1GiB");
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let stopped = Stop(&stop);
        let (senders, receivers): (Vec<_>, Vec<_>) = (0..THREADS).map(|_| mpsc::channel()).unzip();
        let watch = scope.spawn(|| {
            while !stop.load(Relaxed) {
                let stats = lab.heap.stats();
                assert!(stats.peak_reserved <= stats.limit);
                assert!(stats.peak_allocated >= stats.allocated && stats.peak_requested >= stats.requested);
                lab.heap.trim();
                thread::yield_now();
            }
        });
        let workers: Vec<_> = receivers
            .into_iter()
            .enumerate()
            .map(|(number, mine)| {
                let (lab, next) = (&lab, senders[(number + 1) % senders.len()].clone());
                scope.spawn(move || {
                    work(lab, stream_of(number as u64), &next, &mine);
                    mine
                })
            })
            .collect();
        drop(senders);
        // What was handed on and not taken is freed by whoever is left.
        let left: Vec<_> = workers.into_iter().map(|worker| worker.join().unwrap()).collect();
        for address in left.iter().flat_map(|mine| mine.try_iter()) {
            lab.heap.free_raw(address).unwrap();
        }
        drop(stopped);
        watch.join().unwrap();
    });
    lab.check();
    let stats = lab.heap.stats();
    assert_eq!((stats.allocated, stats.requested, stats.live_blocks), (0, 0, 0));
    assert_eq!((stats.allocs, stats.frees), (2 * THREADS * ROUNDS, 2 * THREADS * ROUNDS));
    assert!(stats.peak_allocated >= 80 * KIB && stats.peak_allocated >= stats.peak_requested);
    lab.ends_with(0);
}

#[test]
fn threads_on_own_streams() {
    all_at_once(StreamId);
}

#[test]
fn threads_on_one_stream() {
    all_at_once(|_| S0);
}

/// Streams come and go while others are looked up.
#[test]
fn streams_are_entered_and_retired_while_others_allocate() {
    let lab = sim("limit:256MiB");
    thread::scope(|scope| {
        for number in 0..2 {
            let heap = &lab.heap;
            scope.spawn(move || {
                for round in 0..200 {
                    let stream = StreamId(1000 + 2 * round + number);
                    let block = heap.alloc_raw(4 * KIB, stream).unwrap();
                    heap.free_raw(block).unwrap();
                    heap.retire_stream(stream).unwrap();
                    assert!(matches!(heap.alloc_raw(4 * KIB, stream), Err(Error::DeadStream { .. })));
                }
            });
        }
        scope.spawn(|| (0..20_000).for_each(|_| lab.heap.free_raw(lab.heap.alloc_raw(KIB, S0).unwrap()).unwrap()));
    });
    lab.check();
    lab.ends_with(0);
}

/// Two threads free the same block at once: one succeeds.
#[test]
fn a_block_is_freed_once_however_many_try() {
    let lab = sim("limit:256MiB");
    for _ in 0..200 {
        let block = lab.heap.alloc_raw(4 * KIB, S0).unwrap();
        let freed: usize = thread::scope(|scope| {
            let tries: Vec<_> = (0..2).map(|_| scope.spawn(|| usize::from(lab.heap.free_raw(block).is_ok()))).collect();
            tries.into_iter().map(|one| one.join().unwrap()).sum()
        });
        assert_eq!(freed, 1);
    }
    lab.ends_with(0);
}

/// Threads that all live at once, more than can own locks.
#[test]
fn more_threads_than_there_are_seats() {
    const MANY: u64 = 1100;
    // Enough for all at once: one that ran out would leave the others waiting for it.
    let lab = sim("limit:8GiB");
    let all_there = std::sync::Barrier::new(MANY as usize);
    let pairs = |count: u64, stream: StreamId| {
        for bytes in (0..count).map(|round| if round % 4 == 0 { 3 * MIB } else { 4 * KIB }) {
            lab.heap.free_raw(lab.heap.alloc_raw(bytes, stream).unwrap()).unwrap();
        }
    };
    thread::scope(|scope| {
        for number in 0..MANY {
            let (pairs, all_there) = (&pairs, &all_there);
            let work = move || {
                pairs(70, StreamId(number % 7));
                all_there.wait();
                pairs(80, StreamId(number % 7));
            };
            thread::Builder::new().stack_size(256 << 10).spawn_scoped(scope, work).unwrap();
        }
    });
    lab.check();
    let stats = lab.heap.stats();
    assert_eq!((stats.allocs, stats.frees), (MANY * 150, MANY * 150));
    lab.ends_with(0);
}

/// A thread that ends frees and allocates in destructors that run before and after its seat is given back.
#[test]
fn threads_that_end_use_the_heap_until_the_last() {
    struct Last(RefCell<Option<(xseg::Heap, u64)>>);
    impl Drop for Last {
        fn drop(&mut self) {
            let Some((heap, block)) = self.0.take() else { return };
            heap.free_raw(block).unwrap();
            for bytes in [4 * KIB, 20 * MIB].into_iter().cycle().take(200) {
                heap.free_raw(heap.alloc_raw(bytes, S0).unwrap()).unwrap();
            }
        }
    }
    thread_local! {
        static EARLIER: Last = const { Last(RefCell::new(None)) };
        static LATER: Last = const { Last(RefCell::new(None)) };
    }
    let lab = sim("limit:256MiB");
    for round in 0..60 {
        thread::scope(|scope| {
            let work = || {
                scope.spawn(|| {
                    // Registered before the seat is taken, so that it ends after that, or the other way round.
                    if round % 2 == 0 {
                        EARLIER.with(|_| ());
                    }
                    (0..150).for_each(|_| lab.heap.free_raw(lab.heap.alloc_raw(4 * KIB, S0).unwrap()).unwrap());
                    for last in [&EARLIER, &LATER] {
                        let block = lab.heap.alloc_raw(4 * KIB, S0).unwrap();
                        last.with(|last| last.0.replace(Some((lab.heap.clone(), block))));
                    }
                })
            };
            // The end of the scope does not wait for destructors, but joining does.
            let threads: Vec<_> = (0..3).map(|_| work()).collect();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
    }
    lab.check();
    let stats = lab.heap.stats();
    assert_eq!((stats.allocs, stats.frees), (60 * 3 * (150 + 2 + 400), 60 * 3 * (150 + 2 + 400)));
    lab.ends_with(0);
}
