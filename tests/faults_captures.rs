//! Captures, blocks on one handle and frees behind events while every driver call or event fails in turn; and
//! what a request costs during a capture.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod support;

use std::sync::Arc;
use std::time::Duration;
use support::{Book, Random, S1, S2, book};
use xseg::backend::fault::{FaultPlan, FaultRule, FaultyBackend};
use xseg::backend::sim::{SimBackend, SimGraph, SimOptions};
use xseg::backend::timeline::Timeline;
use xseg::backend::{Backend, EventScope};
use xseg::error::DriverCall;
use xseg::units::{KIB, MIB};
use xseg::{Allocation, ClientEvent, Error, Heap, PoolId, StreamFilter, StreamId};

const MICRO: Duration = Duration::from_micros(1);
const CAPTURED: StreamId = StreamId(7);

struct Rig {
    heap: Heap,
    faulty: Arc<FaultyBackend<SimBackend>>,
    sim: Arc<SimBackend>,
    time: Timeline,
    book: Book,
}

fn build(plan: FaultPlan) -> Result<Rig, Error> {
    let time = Timeline::default();
    let sim = Arc::new(SimBackend::new(SimOptions { timeline: time.clone(), ..SimOptions::default() }));
    let faulty = Arc::new(FaultyBackend::new(sim.clone()));
    faulty.arm(plan);
    let (book, told) = book();
    let conf = "limit:96MiB,handle_max:16MiB,reserve:64GiB,wait_limit:2ms,growth:exact";
    let builder = Heap::builder().conf(conf)?.backend(faulty.clone()).on_mapping(told);
    Ok(Rig { heap: builder.build()?, faulty, sim, time, book })
}

/// A pool with what was captured into it.
struct Captured {
    pool: PoolId,
    graphs: Vec<SimGraph>,
    blocks: Vec<Allocation>,
}

#[derive(Debug, Default)]
struct Seen {
    refused: u64,
    out_of_memory: u64,
    replays: u64,
    captures: u64,
    contiguous: u64,
    after: u64,
}

impl Rig {
    #[track_caller]
    fn check(&self) {
        self.heap.check().unwrap();
        assert_eq!(self.sim.violations(), Vec::<String>::new());
        assert_eq!(self.sim.memory_in_use(), self.heap.stats().reserved);
        assert_eq!(self.book.lock().unwrap().len(), self.sim.mapping_count(), "the callbacks tell every mapping");
    }

    fn note<T>(&self, seen: &mut Seen, result: Result<T, Error>) -> Option<T> {
        match result {
            Ok(made) => return Some(made),
            Err(Error::OutOfMemory(_)) => seen.out_of_memory += 1,
            Err(Error::Driver(_) | Error::AddressSpace { .. }) => seen.refused += 1,
            Err(other) => panic!("an error that nobody can act on: {other:?}"),
        }
        self.check();
        None
    }

    /// A capture with allocations, frees, and others' allocations beside it.
    fn capture(&self, seen: &mut Seen, random: &mut Random, into: &mut Captured) {
        let begun = self.heap.begin_capture(into.pool, StreamFilter::Streams(vec![CAPTURED]));
        if self.note(seen, begun).is_none() {
            return;
        }
        self.sim.begin_capture(CAPTURED).unwrap();
        for _ in 0..random.below(8) + 1 {
            let bytes = (random.below(24) + 1) * 256 * KIB;
            let made = if random.below(6) == 0 {
                self.heap.alloc_contiguous(bytes, CAPTURED)
            } else {
                self.heap.alloc(bytes, CAPTURED)
            };
            if let Some(block) = self.note(seen, made) {
                self.sim.queue_work(CAPTURED, block.address(), block.size(), 20 * MICRO).unwrap();
                if random.below(4) == 0 {
                    block.record_use(StreamId(2 + random.below(6))).unwrap();
                }
                if random.below(3) > 0 {
                    into.blocks.push(block);
                }
            }
            match random.below(5) {
                0 => drop(self.heap.alloc((random.below(30) + 1) * MIB, S1)),
                1 => self.heap.tick(),
                2 => drop(self.heap.trim()),
                _ => self.time.advance(30 * MICRO),
            }
        }
        // Whatever failed: nothing invalidated the capture.
        into.graphs.push(self.sim.end_capture(CAPTURED).unwrap());
        self.heap.end_capture(into.pool).unwrap();
        seen.captures += 1;
    }
}

fn mixed(rig: &Rig) -> Seen {
    let mut seen = Seen::default();
    let mut random = Random(2211);
    let mut live: Vec<Allocation> = Vec::new();
    let mut pools: Vec<Captured> = Vec::new();
    for step in 0..500u64 {
        let stream = StreamId(1 + random.below(3));
        match random.below(16) {
            0..=4 => {
                let made = rig.heap.alloc((random.below(40) + 1) * 256 * KIB, stream);
                if let Some(block) = rig.note(&mut seen, made) {
                    rig.sim.queue_work(stream, block.address(), block.size(), 100 * MICRO).unwrap();
                    live.push(block);
                }
            }
            5..=7 if !live.is_empty() => drop(live.swap_remove(random.below(live.len() as u64) as usize)),
            8 if !live.is_empty() => {
                let block = live.swap_remove(random.below(live.len() as u64) as usize);
                rig.sim.queue_work(S2, block.address(), block.size(), 200 * MICRO).unwrap();
                let Ok(event) = rig.sim.record(EventScope::Stream(S2)) else { continue };
                let address = block.into_raw();
                match rig.heap.free_after(address, ClientEvent(event.0)) {
                    Ok(()) => seen.after += 1,
                    Err(error) => {
                        rig.note(&mut seen, Err::<(), _>(error));
                        rig.heap.free_raw(address).expect("the block lives on");
                    }
                }
                rig.sim.recycle(event);
            }
            9 => {
                let made = rig.heap.alloc_contiguous((random.below(8) + 1) * MIB, stream);
                if let Some(block) = rig.note(&mut seen, made) {
                    seen.contiguous += 1;
                    let behind = rig.sim.resolve(block.address(), block.size()).unwrap();
                    assert_eq!((behind.len(), behind[0].1), (1, 0), "one handle from its start");
                    live.push(block);
                }
            }
            10 => {
                let number = random.below(3);
                if !pools.iter().any(|one| one.pool == PoolId(9, number)) {
                    pools.push(Captured { pool: PoolId(9, number), graphs: Vec::new(), blocks: Vec::new() });
                }
                let into = pools.iter_mut().find(|one| one.pool == PoolId(9, number)).unwrap();
                rig.capture(&mut seen, &mut random, into);
            }
            11 | 12 => {
                for graph in pools.iter().flat_map(|one| &one.graphs) {
                    rig.sim.replay(graph, stream).unwrap();
                    seen.replays += 1;
                }
            }
            13 if step % 7 == 0 && !pools.is_empty() => {
                let gone = pools.swap_remove(random.below(pools.len() as u64) as usize);
                for _ in &gone.graphs {
                    rig.heap.release_capture(gone.pool).unwrap();
                }
            }
            14 => rig.time.advance(150 * MICRO),
            _ => drop(rig.heap.trim()),
        }
        if step % 16 == 0 {
            rig.check();
        }
    }
    drop(live);
    for one in pools {
        one.graphs.iter().for_each(|_| rig.heap.release_capture(one.pool).unwrap());
    }
    rig.check();
    seen
}

/// Ends a run: everything comes back.
fn finish(rig: Rig) {
    rig.time.advance(Duration::from_secs(60));
    for _ in 0..3 {
        rig.heap.tick();
        rig.heap.trim();
    }
    let stats = rig.heap.stats();
    assert_eq!((stats.live_blocks, stats.pending, stats.zombie, stats.capture_pools, stats.captured), (0, 0, 0, 0, 0));
    assert_eq!(stats.reserved, 0);
    rig.check();
    let book = rig.book.clone();
    drop(rig);
    assert!(book.lock().unwrap().is_empty());
}

fn run(plan: FaultPlan) -> (u64, Option<Seen>) {
    let Ok(rig) = build(plan) else { return (0, None) };
    let seen = mixed(&rig);
    let calls = rig.faulty.counted();
    rig.faulty.disarm();
    finish(rig);
    (calls, Some(seen))
}

#[test]
fn the_run_is_one_worth_failing() {
    let (calls, seen) = run(FaultPlan::default());
    let seen = seen.unwrap();
    assert!(calls > 500, "{calls}");
    assert!(seen.captures > 20 && seen.replays > 50 && seen.contiguous > 10 && seen.after > 10, "{seen:?}");
    assert_eq!(seen.refused, 0);
}

fn sweep(plan: impl Fn(FaultRule) -> FaultPlan, least: u64) {
    let (calls, _) = run(plan(FaultRule::Never));
    assert!(calls > 300, "{calls}");
    let mut refused = 0;
    for k in 1..=calls {
        refused += run(plan(FaultRule::At(k))).1.map_or(0, |seen| u64::from(seen.refused > 0));
    }
    assert!(refused >= least, "{refused} of {calls}");
    for n in [3, 7, 20] {
        run(plan(FaultRule::Every(n)));
    }
}

#[test]
fn the_kth_call_is_refused() {
    sweep(|rule| FaultPlan::new(rule, false), 30);
}

#[test]
fn the_kth_call_runs_out_of_memory() {
    sweep(|rule| FaultPlan::new(rule, true), 0);
}

#[test]
fn events_fail() {
    let events = |rule| FaultPlan { rule, events: true, only: Some(DriverCall::Event), ..FaultPlan::default() };
    let (calls, _) = run(events(FaultRule::Never));
    assert!(calls > 500, "{calls}");
    for k in (1..=calls).step_by((calls / 200).max(1) as usize) {
        run(events(FaultRule::At(k)));
    }
    for n in [2, 3, 10] {
        run(events(FaultRule::Every(n)));
    }
}

/// 25: pt#162186, where each allocation of a capture polled everything. Events looked at by a request.
#[test]
fn a_request_of_a_capture_costs_the_same_however_many_blocks_wait() {
    const REQUESTS: u64 = 40;
    let per_request = |waiting: u64, streams: u64| {
        let rig = build(FaultPlan::default()).unwrap();
        rig.heap.set_limit(16 << 30);
        for number in 0..waiting {
            let block = rig.heap.alloc(MIB, S1).unwrap();
            let stream = StreamId(100 + number % streams);
            block.record_use(stream).unwrap();
            rig.sim.queue_work(stream, block.address(), MIB, Duration::from_secs(1)).unwrap();
        }
        rig.heap.begin_capture(PoolId(0, 1), StreamFilter::Streams(vec![CAPTURED])).unwrap();
        rig.sim.begin_capture(CAPTURED).unwrap();
        let before = rig.heap.stats().slow_allocs;
        rig.faulty.clear_log();
        let blocks: Vec<Allocation> = (0..REQUESTS).map(|_| rig.heap.alloc(4 * MIB, CAPTURED).unwrap()).collect();
        let asked = rig.faulty.log().iter().filter(|entry| entry.call == DriverCall::Event).count() as u64;
        assert_eq!(rig.heap.stats().slow_allocs - before, REQUESTS, "each took the slow path");
        rig.sim.end_capture(CAPTURED).unwrap();
        rig.heap.end_capture(PoolId(0, 1)).unwrap();
        rig.heap.release_capture(PoolId(0, 1)).unwrap();
        drop(blocks);
        finish(rig);
        asked / REQUESTS
    };
    let (few, many) = (per_request(40, 20), per_request(1500, 500));
    assert!(few <= 20 && many <= few, "{few} with 40 waiting, {many} with 1500");
}
