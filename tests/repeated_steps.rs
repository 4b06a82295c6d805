//! A step that repeats an earlier one asks nothing of the driver (counts, not times).
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::path::Path;
use support::Random;
use xseg::trace::{Action, Trace};
use xseg::units::MIB;
use xseg::{Allocation, Heap, StreamId};

/// Steps until nothing new has to be made, and steps in all.
const SETTLED: usize = 3;
const STEPS: usize = 20;

/// Driver calls of each of 20 equal steps, each one whole gpt2 trace after which everything is freed.
fn calls_by_step(conf: &str) -> Vec<u64> {
    let trace = Trace::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("traces/gpt2.trace.xz")).unwrap();
    let limit = trace.peak_requested() / 100 * 102;
    let heap = Heap::builder().conf(&conf.replace("LIMIT", &limit.to_string())).unwrap().build().unwrap();
    let mut seen = heap.stats().driver_calls.total();
    let mut calls = Vec::new();
    for _ in 0..STEPS {
        let mut live: Vec<Option<Allocation>> = trace.blocks.iter().map(|_| None).collect();
        for event in &trace.events {
            let block = event.block as usize;
            match event.action {
                Action::Alloc => {
                    let stream = StreamId(trace.stream_of(event.block));
                    live[block] = Some(heap.alloc(trace.blocks[block].bytes.max(1), stream).unwrap());
                }
                Action::Free => drop(live[block].take().unwrap()),
                Action::Use(_) => {}
            }
        }
        drop(live);
        let now = heap.stats().driver_calls.total();
        calls.push(now - seen);
        seen = now;
    }
    heap.check().unwrap();
    calls
}

#[test]
fn equal_steps_make_no_driver_calls() {
    for conf in ["backend:sim", "backend:sim,limit:LIMIT", "backend:sim,slack:5%"] {
        let calls = calls_by_step(conf);
        assert!(calls[0] > 100, "{conf}: {calls:?}");
        assert!(calls[SETTLED..].iter().all(|calls| *calls == 0), "{conf}: {calls:?}");
    }
}

/// A step of blocks up to 48 MiB, several times up to 0.7 to 1.2 GiB and down again, as (number, bytes); 0 bytes: it is freed.
fn scattering_step(seed: u64) -> Vec<(usize, u64)> {
    let mut random = Random(seed * 7919 + 13);
    let (mut step, mut live, mut number) = (Vec::new(), Vec::<(usize, u64)>::new(), 0);
    let peak = 1200 * MIB;
    for _ in 0..1 + random.below(5) {
        let unit = 1 << random.below(9);
        let target = peak * (60 + random.below(41)) / 100;
        let low = peak * random.below(60) / 100;
        let mut sum: u64 = live.iter().map(|block| block.1).sum();
        loop {
            let bytes = ((1 + random.below(64)) * unit * MIB / 16).clamp(MIB + 1, 500 * MIB);
            if sum + bytes > target {
                break;
            }
            step.push((number, bytes));
            live.push((number, bytes));
            number += 1;
            sum += bytes;
            if random.below(4) == 0 && live.len() > 1 {
                let gone = live.swap_remove(random.below(live.len() as u64) as usize);
                step.push((gone.0, 0));
                sum -= gone.1;
            }
        }
        let order = random.below(3);
        while sum > low && !live.is_empty() {
            let at = match order {
                0 => live.len() - 1,
                1 => 0,
                _ => random.below(live.len() as u64) as usize,
            };
            let gone = live.remove(at);
            step.push((gone.0, 0));
            sum -= gone.1;
        }
    }
    step.extend(live.iter().map(|block| (block.0, 0)));
    step
}

#[test]
fn what_lies_scattered_in_each_step_is_made_once() {
    for seed in [7, 11, 26] {
        let heap = Heap::builder().conf("backend:sim,handle_max:2MiB").unwrap().build().unwrap();
        let (step, mut live) = (scattering_step(seed), Vec::<Option<Allocation>>::new());
        let (mut moved, mut calls) = (Vec::new(), Vec::new());
        for _ in 0..40 {
            let before = heap.stats();
            for (number, bytes) in &step {
                live.resize_with(live.len().max(number + 1), || None);
                live[*number] = (*bytes > 0).then(|| heap.alloc(*bytes, StreamId(1)).unwrap());
            }
            let after = heap.stats();
            moved.push(after.handles_moved - before.handles_moved);
            calls.push(after.driver_calls.total() - before.driver_calls.total());
        }
        heap.check().unwrap();
        assert!(moved.iter().sum::<u64>() > 100, "{seed}: {moved:?}");
        assert!(calls[10..].iter().all(|calls| *calls == 0), "{seed}: {calls:?} {moved:?}");
    }
}
