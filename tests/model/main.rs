//! Random sequences of calls against a shadow model (see [`shadow`]).
//!
//! `XSEG_MODEL_CASES` sets the number of sequences (100), `XSEG_MODEL_STEPS` their length (120),
//! `XSEG_MODEL_SEED` where they start. For the long run, in a release build: 10000 and 200.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod shadow;
#[path = "../support/mod.rs"]
mod support;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestError, TestRng, TestRunner};
use shadow::Shadow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;
use support::sim_with;
use xseg::StreamId;
use xseg::backend::sim::SimOptions;
use xseg::units::{GRANULE, KIB, MIB};

/// One call. Blocks are named by position among those that live, streams by place.
#[derive(Debug, Clone)]
enum Op {
    Alloc {
        bytes: u64,
        align: u64,
        stream: usize,
    },
    /// On one handle.
    Contiguous {
        bytes: u64,
        stream: usize,
    },
    Free {
        which: usize,
    },
    /// The newest block is freed and asked for again, so often, with work on its stream in between.
    Again {
        times: usize,
        micros: u64,
    },
    /// Work on a block, on any stream: the client told the heap of it or not.
    Work {
        which: usize,
        stream: usize,
        micros: u64,
    },
    /// As PyTorch's `record_stream`, with work.
    Declare {
        which: usize,
        stream: usize,
        micros: u64,
    },
    Advance {
        micros: u64,
    },
    Trim,
    Tick,
    Limit {
        mib: u64,
    },
    Pin {
        which: usize,
    },
    Unpin {
        which: usize,
    },
    /// The stream ends, and a new one takes its place.
    Retire {
        stream: usize,
    },
}

/// The policy of a sequence.
#[derive(Debug, Clone)]
struct Policy {
    limit: u64,
    /// Made at start, when the limit is far: handles are large then.
    warmup: u64,
    handle_max: u64,
    defrag: &'static str,
    cross_stream: &'static str,
    shrink: &'static str,
    growth: &'static str,
    keep: u64,
    small_limit: u64,
    /// Some blocks are on one handle, so that handles are not all of a granule.
    contiguous: bool,
    context_events: bool,
    lag: u64,
}

impl Policy {
    fn conf(&self) -> String {
        format!(
            "reserve:8GiB,limit:64GiB,warmup:{}MiB,handle_max:{}MiB,\
             defrag:{},cross_stream:{},shrink:{},growth:{},keep:{}MiB,small_limit:{}K",
            self.warmup,
            self.handle_max,
            self.defrag,
            self.cross_stream,
            self.shrink,
            self.growth,
            self.keep,
            self.small_limit
        )
    }
}

fn policies() -> impl Strategy<Value = Policy> {
    let sizes = (
        40_u64..500,
        0_u64..3,
        prop::sample::select(vec![2_u64, 2, 4, 16, 64]),
        prop::sample::select(vec![0_u64, 0, 24]),
        prop::sample::select(vec![1024_u64, 1024, 1024, 64, 0]),
    );
    let words = (
        prop::sample::select(vec!["on_pressure", "on_pressure", "eager", "off"]),
        prop::sample::select(vec!["passed", "passed", "passed", "off", "wait"]),
        prop::sample::select(vec!["oom", "never", "idle=300us", "watermark=50%"]),
        prop::sample::select(vec!["exact", "step=16MiB", "geometric=1.2"]),
    );
    (sizes, words, (prop::bool::weighted(0.8), prop::bool::weighted(0.3)), prop::sample::select(vec![0_u64, 0, 400]))
        .prop_map(
            |(
                (limit, warm, handle_max, keep, small_limit),
                (defrag, cross_stream, shrink, growth),
                (context_events, contiguous),
                lag,
            )| Policy {
                limit: limit / 2 * 2,
                warmup: limit / 2 * warm,
                handle_max,
                defrag,
                cross_stream,
                shrink,
                growth,
                keep,
                small_limit,
                contiguous,
                context_events,
                lag,
            },
        )
}

fn sizes() -> impl Strategy<Value = u64> {
    prop_oneof![
        1 => Just(0_u64),
        6 => (0_u32..11, 0_u64..1024).prop_map(|(shift, fine)| (1 << shift) * fine),
        6 => (1_u64..32).prop_map(|granules| granules * GRANULE),
        8 => MIB..64 * MIB,
        3 => (1_u64..64).prop_map(|n| n * 32 * KIB),
        // About what small pools serve at most.
        3 => (0_u64..200).prop_map(|n| MIB - 40 * KIB + n * 512),
    ]
}

fn ops() -> impl Strategy<Value = Op> {
    let which = 0_usize..1000;
    let stream = 0_usize..4;
    let align = prop::sample::select(vec![512_u64, 512, 512, 4096, 65_536, GRANULE]);
    let micros = prop_oneof![1_u64..50, 50_u64..3000];
    prop_oneof![
        30 => (sizes(), align, stream.clone()).prop_map(|(bytes, align, stream)| Op::Alloc { bytes, align, stream }),
        3 => (sizes(), stream.clone()).prop_map(|(bytes, stream)| Op::Contiguous { bytes, stream }),
        26 => which.clone().prop_map(|which| Op::Free { which }),
        8 => (1_usize..4, micros.clone()).prop_map(|(times, micros)| Op::Again { times, micros }),
        20 => (which.clone(), stream.clone(), micros.clone())
            .prop_map(|(which, stream, micros)| Op::Work { which, stream, micros }),
        6 => (which.clone(), stream.clone(), micros.clone())
            .prop_map(|(which, stream, micros)| Op::Declare { which, stream, micros }),
        8 => micros.prop_map(|micros| Op::Advance { micros }),
        2 => Just(Op::Trim),
        3 => Just(Op::Tick),
        2 => prop_oneof![4 => 8_u64..500, 1 => Just(65_536)].prop_map(|mib| Op::Limit { mib }),
        1 => which.clone().prop_map(|which| Op::Pin { which }),
        2 => which.prop_map(|which| Op::Unpin { which }),
        1 => stream.prop_map(|stream| Op::Retire { stream }),
    ]
}

/// Runs a sequence; what it did, for the test that the sequences reach what they are for.
fn run(policy: &Policy, ops: &[Op]) -> (xseg::Stats, u64, u64) {
    let time = xseg::backend::timeline::Timeline::new(Duration::from_micros(policy.lag));
    let options = SimOptions { timeline: time, context_events: policy.context_events, ..SimOptions::default() };
    let lab = sim_with(&policy.conf(), options);
    // Idle memory of other streams is out of reach with `off`, and a limit on waits would leave some waiting.
    let fine = policy.handle_max == 2 && policy.cross_stream != "off";
    let mut shadow = Shadow::new(&lab, fine, policy.cross_stream == "wait");
    shadow.set_limit(policy.limit * MIB);
    let mut streams: Vec<StreamId> = (1..5).map(StreamId).collect();
    // Without events of the whole context, the heap knows only the streams that it has seen.
    for stream in &streams {
        shadow.alloc(0, 512, *stream);
    }
    let mut next = 5;
    for (number, op) in ops.iter().enumerate() {
        let live = shadow.live.len();
        match *op {
            Op::Alloc { bytes, align, stream } => shadow.alloc(bytes, align, streams[stream]),
            Op::Contiguous { bytes, stream } if policy.contiguous => shadow.alloc_contiguous(bytes, streams[stream]),
            Op::Free { which } if live > 0 => shadow.free(which % live),
            Op::Again { times, micros } if live > 0 => {
                for _ in 0..times {
                    let Some(last) = shadow.live.last() else { break };
                    let (bytes, owner) = (last.bytes, last.owner);
                    shadow.free(shadow.live.len() - 1);
                    if streams.contains(&owner) {
                        shadow.alloc(bytes, 512, owner);
                    }
                    // None on streams that have ended, nor by a stream that the heap has not seen.
                    let newest = shadow.live.len().wrapping_sub(1);
                    if let Some(owner) = shadow.live.last().map(|one| one.owner).filter(|owner| streams.contains(owner))
                    {
                        shadow.work(newest, owner, Duration::from_micros(micros));
                    }
                }
            }
            Op::Work { which, stream, micros } if live > 0 => {
                shadow.work(which % live, streams[stream], Duration::from_micros(micros));
            }
            Op::Declare { which, stream, micros } if live > 0 => {
                shadow.declare(which % live, streams[stream]);
                shadow.work(which % live, streams[stream], Duration::from_micros(micros));
            }
            Op::Advance { micros } => lab.time.advance(Duration::from_micros(micros)),
            Op::Trim => drop(lab.heap.trim()),
            Op::Tick => lab.heap.tick(),
            Op::Limit { mib } => shadow.set_limit(mib / 2 * 2 * MIB),
            Op::Pin { which } if live > 0 => shadow.pin(which % live),
            Op::Unpin { which } => shadow.unpin(which),
            Op::Retire { stream } => {
                shadow.retire(streams[stream]);
                streams[stream] = StreamId(next);
                next += 1;
                shadow.alloc(0, 512, streams[stream]);
            }
            _ => {}
        }
        shadow.check(number % 8 == 7);
    }
    let counts = (shadow.served, shadow.refused);
    let stats = shadow.finish(policy.keep * MIB, policy.handle_max * MIB);
    (stats, counts.0, counts.1)
}

/// Takes out what a failing sequence fails without, in halves, quarters and so on.
fn shortened(policy: &Policy, mut ops: Vec<Op>) -> Vec<Op> {
    let started = std::time::Instant::now();
    let fails = |ops: &[Op]| {
        catch_unwind(AssertUnwindSafe(|| {
            let _ = run(policy, ops);
        }))
        .is_err()
    };
    let mut part = ops.len().div_ceil(2);
    while part > 0 && started.elapsed() < Duration::from_secs(30) {
        let mut at = 0;
        while at < ops.len() {
            let mut fewer = ops.clone();
            fewer.drain(at..(at + part).min(ops.len()));
            if fails(&fewer) {
                ops = fewer;
            } else {
                at += part;
            }
        }
        part /= 2;
    }
    ops
}

fn number(name: &str, default: u32) -> u32 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

#[test]
fn random_sequences_agree_with_the_shadow() {
    let cases = number("XSEG_MODEL_CASES", 100);
    let steps = number("XSEG_MODEL_STEPS", 120) as usize;
    let seed = number("XSEG_MODEL_SEED", 1);
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 0, ..Config::default() };
    let mut bytes = [0; 32];
    bytes[..4].copy_from_slice(&seed.to_le_bytes());
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes));
    let totals = std::cell::Cell::new([0_u64; 9]);
    let outcome = runner.run(&(policies(), vec(ops(), steps)), |(policy, ops)| {
        let (stats, served, refused) = run(&policy, &ops);
        let now = [
            served,
            refused,
            stats.handles_moved,
            stats.handles_rechunked,
            stats.handles_trimmed,
            stats.host_waits,
            stats.gpu_waits,
            stats.handles_joined,
            stats.driver_calls.total(),
        ];
        totals.set(std::array::from_fn(|i| totals.get()[i] + now[i]));
        Ok(())
    });
    if let Err(TestError::Fail(why, (policy, ops))) = &outcome {
        panic!("{why}\n{policy:?}\n{:?}", shortened(policy, ops.clone()));
    }
    outcome.unwrap();
    println!(
        "served, refused, moved, re-chunked, trimmed, host waits, GPU waits, joined, driver calls: {:?}",
        totals.get()
    );
    // The sequences reach every rung, and few requests fail.
    assert!(totals.get().iter().all(|total| *total > 0));
    assert!(totals.get()[1] * 2 < totals.get()[0]);
}
