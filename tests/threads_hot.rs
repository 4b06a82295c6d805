//! Threads on the hot path alone: small blocks on own and shared streams, freed by others, counted while at work.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod support;

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc;
use std::thread;
use support::{S0, sim};
use xseg::units::KIB;
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

fn all_at_once(stream_of: fn(u64) -> StreamId) {
    let lab = sim("limit:256MiB");
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
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
        stop.store(true, Relaxed);
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
