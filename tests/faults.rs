//! Every driver call of a mixed run fails in turn: a typed error or full recovery, and nothing is lost.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod support;

use std::sync::Arc;
use std::time::Duration;
use support::{Random, S1, S2};
use xseg::backend::StreamId;
use xseg::backend::fault::{FaultPlan, FaultRule, FaultyBackend};
use xseg::backend::sim::{SimBackend, SimOptions};
use xseg::backend::timeline::Timeline;
use xseg::error::DriverCall;
use xseg::units::{KIB, MIB, UNIT};
use xseg::{Allocation, Error, Heap, Stats};

const MICRO: Duration = Duration::from_micros(1);
const LIMIT: u64 = 160 * MIB;

/// A heap on a simulated device that fails by plan. When the last of it goes, the device checks that
/// nothing was left behind and no rule broken.
struct Rig {
    heap: Heap,
    faulty: Arc<FaultyBackend<SimBackend>>,
    sim: Arc<SimBackend>,
    time: Timeline,
}

fn build(conf: &str, plan: FaultPlan) -> Result<Rig, (Error, Arc<SimBackend>)> {
    let time = Timeline::default();
    let sim = Arc::new(SimBackend::new(SimOptions { timeline: time.clone(), ..SimOptions::default() }));
    let faulty = Arc::new(FaultyBackend::new(sim.clone()));
    faulty.arm(plan);
    match Heap::builder().conf(conf).unwrap().backend(faulty.clone()).build() {
        Ok(heap) => Ok(Rig { heap, faulty, sim, time }),
        Err(error) => Err((error, sim)),
    }
}

impl Rig {
    #[track_caller]
    fn check(&self) {
        self.heap.check().unwrap();
        assert_eq!(self.sim.violations(), Vec::<String>::new());
        assert_eq!(self.sim.memory_in_use(), self.heap.stats().reserved);
        assert!(self.sim.memory_in_use() <= LIMIT);
    }
}

/// What a run saw.
#[derive(Debug, Default)]
struct Seen {
    errors: Vec<Error>,
    /// Failures of the driver that were no lack of memory.
    refused: usize,
}

impl Seen {
    /// An error is one of those that the documentation names, and the heap is whole.
    fn note(&mut self, rig: &Rig, error: Error) {
        match &error {
            Error::OutOfMemory(fields) => assert!(fields.requested > 0 && fields.reserved <= LIMIT),
            Error::Driver(_) => self.refused += 1,
            Error::AddressSpace { .. } => {}
            other => panic!("an error that nobody can act on: {other:?}"),
        }
        rig.check();
        self.errors.push(error);
    }
}

/// Growth, moves, re-chunking, trims, declared uses and streams with work queued, under a limit.
fn mixed(rig: &Rig) -> Seen {
    let mut seen = Seen::default();
    let mut random = Random(4711);
    let mut live: Vec<Allocation> = Vec::new();
    // All memory in large handles (their size goes by the limit) that idle, then small blocks that need it
    // in small ones.
    match rig.heap.alloc(LIMIT, S1) {
        Ok(block) => drop(block),
        Err(error) => seen.note(rig, error),
    }
    rig.heap.set_limit(LIMIT);
    for _ in 0..12 {
        match rig.heap.alloc(700 * KIB, S2) {
            Ok(block) => live.push(block),
            Err(error) => seen.note(rig, error),
        }
    }
    for step in 0..900 {
        let stream = StreamId(1 + random.below(3));
        match random.below(20) {
            0..=9 => {
                let shift = 12 + random.below(14);
                match rig.heap.alloc(random.below(1 << shift) + (1 << shift) / 2, stream) {
                    Ok(block) => {
                        let length = MICRO * (random.below(400) as u32 + 1);
                        rig.sim.queue_work(stream, block.address(), block.size(), length).unwrap();
                        live.push(block);
                    }
                    Err(error) => seen.note(rig, error),
                }
            }
            10..=15 if !live.is_empty() => drop(live.swap_remove(random.below(live.len() as u64) as usize)),
            16 if !live.is_empty() => {
                let block = live.swap_remove(random.below(live.len() as u64) as usize);
                block.record_use(stream).unwrap();
                rig.sim.queue_work(stream, block.address(), block.size(), 50 * MICRO).unwrap();
            }
            17 if step % 5 == 0 => drop(rig.heap.trim()),
            18 => rig.time.advance(150 * MICRO),
            _ => rig.heap.tick(),
        }
        if step % 90 == 89 {
            rig.heap.set_limit(if step % 180 == 89 { LIMIT / 2 } else { LIMIT });
        }
        if step % 16 == 0 {
            rig.check();
        }
    }
    // Everything that lives can be freed.
    for block in live {
        let address = block.into_raw();
        rig.heap.free_raw(address).unwrap();
    }
    rig.check();
    seen
}

/// Ends a run: all memory can be given back, at the second try where the first was made to fail.
fn finish(rig: Rig) -> Stats {
    rig.time.advance(Duration::from_secs(60));
    for _ in 0..2 {
        rig.heap.tick();
        rig.heap.trim();
    }
    let stats = rig.heap.stats();
    assert_eq!((stats.live_blocks, stats.allocated, stats.pending, stats.zombie, stats.reserved), (0, 0, 0, 0, 0));
    rig.check();
    stats
}

const CONF: &str = "limit:16GiB,handle_max:16MiB,reserve:8GiB,wait_limit:20ms,growth:exact,shrink:never";

/// The run with one plan; says how many calls were counted.
fn run(plan: FaultPlan) -> (u64, Option<(Stats, Seen)>) {
    match build(CONF, plan) {
        Ok(rig) => {
            let faulty = rig.faulty.clone();
            let seen = mixed(&rig);
            let stats = finish(rig);
            (faulty.counted(), Some((stats, seen)))
        }
        Err((error, sim)) => {
            assert!(matches!(error, Error::Driver(_) | Error::AddressSpace { .. }), "{error:?}");
            assert_eq!(sim.leftovers(), Vec::<String>::new());
            (0, None)
        }
    }
}

/// The run without faults: what the sweeps below go through.
#[test]
fn the_mixed_run_is_one_worth_failing() {
    let (calls, outcome) = run(FaultPlan::default());
    let (stats, seen) = outcome.unwrap();
    assert!(calls >= 400, "{calls} driver calls");
    let kinds = [stats.handles_moved, stats.handles_rechunked, stats.handles_trimmed, stats.host_waits, stats.ooms];
    assert!(kinds.iter().all(|count| *count > 0), "{kinds:?}");
    assert_eq!((seen.refused, seen.errors.len() as u64), (0, stats.ooms));
}

fn sweep(out_of_memory: bool) {
    let (calls, outcome) = run(FaultPlan::default());
    let plain = outcome.unwrap().1.errors.len();
    let (mut refused, mut recovered) = (0, 0);
    for k in 1..=calls {
        let (_, outcome) = run(FaultPlan::new(FaultRule::At(k), out_of_memory));
        let Some((_, seen)) = outcome else { continue };
        refused += usize::from(seen.refused > 0);
        recovered += usize::from(seen.errors.len() <= plain);
    }
    // Some failures reach the client, most are made good (a trim or a reap is done later).
    assert!(refused > 50 || out_of_memory, "{refused} of {calls}");
    assert!(recovered > 50, "{recovered} of {calls}");
}

#[test]
fn the_kth_call_is_refused() {
    sweep(false);
}

#[test]
fn the_kth_call_runs_out_of_memory() {
    sweep(true);
}

#[test]
fn each_nth_call_is_refused() {
    for n in [3, 5, 7, 11, 23, 50] {
        for out_of_memory in [false, true] {
            let plan = FaultPlan::new(FaultRule::Every(n), out_of_memory);
            let Ok(rig) = build(CONF, plan) else { continue };
            let seen = mixed(&rig);
            assert!(rig.faulty.injected() > 5 && !seen.errors.is_empty());
            rig.faulty.disarm();
            finish(rig);
        }
    }
}

#[test]
fn the_device_has_no_more_memory_from_the_kth_call_on() {
    for k in (1..200).step_by(13) {
        let only = Some(DriverCall::Create);
        let plan = FaultPlan { only, ..FaultPlan::new(FaultRule::From(k), true) };
        let rig = build(CONF, plan).unwrap_or_else(|(error, _)| panic!("{error}"));
        let seen = mixed(&rig);
        assert_eq!(seen.refused, 0, "lack of memory is an out-of-memory error");
        rig.faulty.disarm();
        finish(rig);
    }
}

#[test]
fn events_fail() {
    let events = |rule| FaultPlan { rule, events: true, only: Some(DriverCall::Event), ..FaultPlan::default() };
    let (calls, _) = run(events(FaultRule::Never));
    assert!(calls > 300, "{calls} operations on events");
    for k in (1..=calls).step_by((calls / 250).max(1) as usize) {
        let (_, outcome) = run(events(FaultRule::At(k)));
        assert_eq!(outcome.unwrap().1.refused, 0, "an event that is missing costs time, not the request");
    }
    for n in [2, 3, 10] {
        let rig = build(CONF, events(FaultRule::Every(n))).unwrap_or_else(|(error, _)| panic!("{error}"));
        assert_eq!(mixed(&rig).refused, 0);
        rig.faulty.disarm();
        finish(rig);
    }
}

/// Scenario 16: pt#188008, PaddlePaddle/Paddle#79479. A block of four handles, each of its calls failing.
#[test]
fn a_growth_that_fails_half_way_is_rolled_back() {
    for call in [DriverCall::Create, DriverCall::Map, DriverCall::SetAccess] {
        for k in 1..=4 {
            let rig = build("limit:160MiB,handle_max:16MiB,growth:exact", FaultPlan::default())
                .unwrap_or_else(|(error, _)| panic!("{error}"));
            let kept = rig.heap.alloc(20 * MIB, S1).unwrap();
            let before = (rig.sim.handle_count(), rig.sim.mapping_count());
            rig.faulty.arm(FaultPlan { only: Some(call), ..FaultPlan::new(FaultRule::At(k), false) });
            match rig.heap.alloc(56 * MIB, S2) {
                Err(Error::Driver(error)) => assert_eq!(error.call, call),
                other => panic!("{call} {k}: {other:?}"),
            }
            assert_eq!((rig.sim.handle_count(), rig.sim.mapping_count()), before, "{call} {k}");
            rig.check();
            rig.faulty.disarm();
            let again = rig.heap.alloc(140 * MIB, S2).unwrap();
            assert_eq!(again.size() % UNIT, 0);
            drop((kept, again));
            finish(rig);
        }
    }
}

/// A request that is served by moving handles, each call of which fails.
#[test]
fn a_move_that_fails_leaves_all_memory_usable() {
    let mut failed = 0;
    for call in [DriverCall::Map, DriverCall::SetAccess, DriverCall::Unmap] {
        for (k, busy) in (1..=4).flat_map(|k| [(k, false), (k, true)]) {
            let rig = build("limit:64MiB,handle_max:8MiB,growth:exact", FaultPlan::default())
                .unwrap_or_else(|(error, _)| panic!("{error}"));
            let mut blocks: Vec<Option<Allocation>> =
                (0..4).map(|_| Some(rig.heap.alloc(16 * MIB, S1).unwrap())).collect();
            for index in [0, 2] {
                let block = blocks[index].take().unwrap();
                if busy {
                    // Then the old addresses stay mapped for a while.
                    rig.sim.queue_work(S1, block.address(), block.size(), 100 * MICRO).unwrap();
                }
            }
            rig.faulty.arm(FaultPlan { only: Some(call), ..FaultPlan::new(FaultRule::At(k), false) });
            match rig.heap.alloc(32 * MIB, S1) {
                Ok(block) => drop(block),
                Err(Error::Driver(error)) => {
                    assert_eq!(error.call, call);
                    failed += 1;
                }
                Err(other) => panic!("{call} {k}: {other:?}"),
            }
            rig.faulty.disarm();
            rig.check();
            drop(rig.heap.alloc(32 * MIB, S1).unwrap());
            drop(blocks);
            finish(rig);
        }
    }
    assert!(failed >= 8, "{failed} requests met the fault");
}
