//! Several threads at once: nothing is lost, the limit holds, and one that waits keeps nobody else.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod support;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Barrier, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};
use support::{Lab, Random, S1, S2, host, out_of_memory, sim};
use xseg::backend::host::{HostBackend, HostOptions};
use xseg::units::{KIB, MIB};
use xseg::{Allocation, Error, Heap, PoolId, StreamFilter, StreamId};

const THREADS: u64 = 4;

/// Allocations and frees of own and others' blocks, on an own stream and a shared one. The number of
/// requests served.
fn churn(lab: &Lab, number: u64, pool: &Mutex<Vec<Allocation>>, until: Instant) -> u64 {
    let mut random = Random(number + 1);
    let own = StreamId(10 + number);
    let mut mine: Vec<Allocation> = Vec::new();
    let mut served = 0;
    while Instant::now() < until {
        for _ in 0..50 {
            match random.below(16) {
                0..=6 => {
                    let shift = 9 + random.below(16);
                    let stream = if random.below(3) == 0 { S1 } else { own };
                    match lab.heap.alloc(random.below(1 << shift), stream) {
                        Ok(block) => {
                            served += 1;
                            mine.push(block);
                        }
                        Err(error) => drop(out_of_memory::<()>(Err(error))),
                    }
                }
                7..=9 if !mine.is_empty() => drop(mine.swap_remove(random.below(mine.len() as u64) as usize)),
                // Into the pool, and another's out of it.
                10..=12 if !mine.is_empty() => pool.lock().unwrap().push(mine.swap_remove(0)),
                13 => {
                    let other = pool.lock().unwrap().pop();
                    if let Some(block) = other {
                        if random.below(4) == 0 {
                            block.record_use(own).unwrap();
                        }
                        drop(block);
                    }
                }
                14 if random.below(20) == 0 => drop(lab.heap.trim()),
                14 => lab.time.advance(Duration::from_micros(20)),
                _ if random.below(10) == 0 => drop(lab.heap.stats()),
                _ => {
                    if let Some(block) = mine.last() {
                        lab.work(own, block, Duration::from_micros(10));
                    }
                }
            }
            while mine.len() > 60 {
                drop(mine.swap_remove(0));
            }
        }
        while pool.lock().unwrap().len() > 40 {
            let block = pool.lock().unwrap().pop();
            drop(block);
        }
    }
    served
}

fn many_threads(lab: Lab, limit: u64) {
    let pool = Mutex::new(Vec::new());
    let until = Instant::now() + Duration::from_millis(1200);
    let stop = AtomicBool::new(false);
    let served: u64 = thread::scope(|scope| {
        let watch = scope.spawn(|| {
            while !stop.load(Relaxed) {
                assert!(lab.heap.stats().reserved <= limit);
                thread::yield_now();
            }
        });
        let workers: Vec<_> = (0..THREADS)
            .map(|number| {
                scope.spawn({
                    let (lab, pool) = (&lab, &pool);
                    move || churn(lab, number, pool, until)
                })
            })
            .collect();
        let served = workers.into_iter().map(|worker| worker.join().unwrap()).sum();
        stop.store(true, Relaxed);
        watch.join().unwrap();
        served
    });
    let kept = pool.into_inner().unwrap();
    lab.check();
    let stats = lab.heap.stats();
    let held: u64 = kept.iter().map(Allocation::size).sum();
    assert_eq!((stats.allocated, stats.live_blocks), (held, kept.len() as u64));
    assert_eq!((stats.allocs, stats.frees), (served, served - kept.len() as u64));
    assert!(served > 2000 && stats.handles_moved > 10, "{served} requests, {} moves", stats.handles_moved);
    assert!(stats.peak_reserved <= limit);
    drop(kept);
    lab.ends_with(0);
}

#[test]
fn four_threads_under_a_limit_on_sim() {
    many_threads(sim("limit:320MiB,handle_max:16MiB,growth:exact"), 320 * MIB);
}

#[test]
fn four_threads_under_a_limit_on_host() {
    many_threads(host("limit:320MiB,handle_max:16MiB,growth:exact"), 320 * MIB);
}

/// Blocks of one thread hold their bytes while others allocate, free and move memory around them.
#[test]
fn no_thread_writes_to_anothers_block() {
    let device = Arc::new(HostBackend::new(HostOptions::default()).unwrap());
    let heap = Heap::builder().conf("limit:96MiB,growth:exact").unwrap().backend(device.clone()).build().unwrap();
    let until = Instant::now() + Duration::from_millis(1000);
    let streams: Vec<StreamId> = (0..THREADS).map(|_| device.create_stream().unwrap()).collect();
    let checked: u64 = thread::scope(|scope| {
        let workers: Vec<_> = (0..THREADS)
            .map(|number| {
                let (heap, device, stream) = (&heap, &device, streams[number as usize]);
                scope.spawn(move || {
                    let mut random = Random(number + 77);
                    let mut live: Vec<(Allocation, u64)> = Vec::new();
                    let mut checked = 0;
                    while Instant::now() < until {
                        let bytes = random.below(if random.0.is_multiple_of(3) { 12 * MIB } else { 200 * KIB }) + 16;
                        if let Ok(block) = heap.alloc(bytes, stream) {
                            let mark = random.next();
                            device.write(block.address(), &mark.to_le_bytes()).unwrap();
                            device.write(block.address() + bytes - 8, &mark.to_le_bytes()).unwrap();
                            live.push((block, mark));
                        }
                        if live.len() > 12 || random.below(3) == 0 {
                            let Some((block, mark)) = live.pop() else { continue };
                            for at in [block.address(), block.address() + block.len() - 8] {
                                let mut found = [0; 8];
                                device.read(at, &mut found).unwrap();
                                assert_eq!(u64::from_le_bytes(found), mark, "at {at:#x}");
                            }
                            checked += 1;
                        }
                    }
                    checked
                })
            })
            .collect();
        workers.into_iter().map(|worker| worker.join().unwrap()).sum()
    });
    assert!(checked > 500, "{checked} blocks");
    heap.check().unwrap();
    drop(heap);
    assert!(device.leaks().is_empty(), "{}", device.leaks());
}

/// A thread that waits for the device holds no lock: others allocate, free, trim and read statistics,
/// and one of their frees ends the wait.
#[test]
fn a_thread_that_waits_keeps_nobody_else() {
    let device = Arc::new(HostBackend::new(HostOptions::default()).unwrap());
    let heap = Heap::builder().conf("limit:64MiB,growth:exact").unwrap().backend(device.clone()).build().unwrap();
    let (busy, asking) = (device.create_stream().unwrap(), device.create_stream().unwrap());
    let held = heap.alloc(60 * MIB, busy).unwrap();
    let (open, gate) = mpsc::channel::<()>();
    device
        .launch(busy, move || {
            let _ = gate.recv();
        })
        .unwrap();
    drop(held);
    let started = Arc::new(Barrier::new(2));
    let waiting = thread::spawn({
        let (heap, started) = (heap.clone(), started.clone());
        move || {
            started.wait();
            heap.alloc(32 * MIB, asking).map(drop)
        }
    });
    started.wait();
    let from = Instant::now();
    let mut rounds = 0;
    let slowest = AtomicU64::new(0);
    while from.elapsed() < Duration::from_millis(300) {
        let round = Instant::now();
        let (own, small) = (heap.alloc(MIB, busy).unwrap(), heap.alloc(4 * KIB, asking).unwrap());
        drop((own, small));
        heap.tick();
        heap.trim();
        assert_eq!(heap.stats().ooms, 0);
        slowest.fetch_max(u64::try_from(round.elapsed().as_millis()).unwrap(), Relaxed);
        rounds += 1;
    }
    assert!(!waiting.is_finished(), "the work on the busy stream goes on");
    assert!(rounds > 20 && slowest.load(Relaxed) < 200, "{rounds} rounds, {slowest:?} ms the slowest");
    open.send(()).unwrap();
    waiting.join().unwrap().unwrap();
    assert_eq!(heap.stats().host_waits, 1);
    drop(heap);
    assert!(device.leaks().is_empty(), "{}", device.leaks());
}

/// A heap that is shut down while others use it: they get errors, and nothing is left.
#[test]
fn shutting_down_under_use_leaves_nothing() {
    for round in 0..20 {
        let lab = sim("limit:128MiB,growth:exact");
        thread::scope(|scope| {
            for number in 0..3 {
                let heap = &lab.heap;
                scope.spawn(move || {
                    let mut random = Random(round * 10 + number + 1);
                    let mut live: Vec<Allocation> = Vec::new();
                    loop {
                        match heap.alloc(random.below(8 * MIB), StreamId(number)) {
                            Ok(block) => {
                                block.record_use(S2).unwrap();
                                live.push(block);
                            }
                            Err(Error::ShutDown) => return,
                            Err(error) => drop(out_of_memory::<()>(Err(error))),
                        }
                        if live.len() > 6 {
                            live.clear();
                        }
                    }
                });
            }
            thread::sleep(Duration::from_millis(5));
            lab.heap.shut_down();
        });
        assert_eq!(lab.sim().leftovers(), Vec::<String>::new());
    }
}

/// All memory that may exist is a block that was freed and waits for a stream, which stands until the sender is dropped.
fn stuck(conf: &str, pool: Option<PoolId>) -> (Heap, StreamId, mpsc::Sender<()>) {
    let device = Arc::new(HostBackend::new(HostOptions::default()).unwrap());
    let heap = Heap::builder().conf(conf).unwrap().backend(device.clone()).build().unwrap();
    let (own, other) = (device.create_stream().unwrap(), device.create_stream().unwrap());
    if let Some(pool) = pool {
        heap.begin_pool(pool, StreamFilter::All).unwrap();
    }
    let block = heap.alloc(64 * MIB, own).unwrap();
    if let Some(pool) = pool {
        heap.end_capture(pool).unwrap();
    }
    let (gate, opened) = mpsc::channel();
    device.launch(other, move || assert!(opened.recv().is_err())).unwrap();
    block.record_use(other).unwrap();
    drop(block);
    (heap, own, gate)
}

/// One that waits for a block leaves it to others to wait for.
#[test]
fn two_threads_wait_for_one_block() {
    let (heap, own, gate) = stuck("limit:64MiB,growth:exact,wait_limit:60s", None);
    thread::scope(|scope| {
        let waiting: Vec<_> = (0..2).map(|_| scope.spawn(|| heap.alloc(32 * MIB, own))).collect();
        while heap.stats().host_waits < 2 && !waiting.iter().any(thread::ScopedJoinHandle::is_finished) {
            thread::yield_now();
        }
        drop(gate);
        let served: Vec<_> = waiting.into_iter().map(|one| one.join().unwrap()).collect();
        assert!(served.iter().all(Result::is_ok), "{served:?}");
    });
    heap.check().unwrap();
    assert_eq!(heap.stats().ooms, 0);
}

/// A capture pool stays as long as a block of it waits, also while a thread waits for that.
#[test]
fn a_pool_has_the_block_that_a_thread_waits_for() {
    let pool = PoolId(3, 3);
    let (heap, own, gate) = stuck("limit:64MiB,growth:exact,wait_limit:60s", Some(pool));
    thread::scope(|scope| {
        let waiting = scope.spawn(|| heap.alloc(32 * MIB, own));
        while heap.stats().host_waits < 1 {
            thread::yield_now();
        }
        heap.release_capture(pool).unwrap();
        for _ in 0..300 {
            assert_eq!(heap.stats().capture_pools, 1);
            thread::yield_now();
        }
        drop(gate);
        assert_eq!(waiting.join().unwrap().unwrap().size(), 32 * MIB);
    });
    heap.check().unwrap();
    assert_eq!((heap.stats().capture_pools, heap.stats().reserved), (0, 64 * MIB));
}
