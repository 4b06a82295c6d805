//! A step that repeats an earlier one asks nothing of the driver (counts, not times).
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;
use xseg::trace::{Action, Trace};
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
