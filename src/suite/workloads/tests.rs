//! Generators: valid, repeatable, and with the property that each is named for.

use super::*;
use crate::trace::Action;
use std::collections::{BTreeSet, HashMap};

fn make(name: &str) -> Workload {
    CATALOGUE.iter().find(|entry| entry.name == name).unwrap().make(1, 1).unwrap()
}

/// Sizes of blocks in order of birth.
fn sizes(trace: &Trace) -> Vec<u64> {
    trace.blocks.iter().map(|block| block.bytes).collect()
}

/// Bytes live after each event.
fn live(trace: &Trace) -> Vec<u64> {
    let mut live = 0;
    let after = trace.events.iter().map(|event| {
        let bytes = trace.blocks[event.block as usize].bytes;
        match event.action {
            Action::Alloc => live += bytes,
            Action::Free => live -= bytes,
            Action::Use(_) => {}
        }
        live
    });
    after.collect()
}

fn uses(trace: &Trace) -> usize {
    trace.events.iter().filter(|event| matches!(event.action, Action::Use(_))).count()
}

#[test]
fn the_same_seed_gives_the_same_trace_and_another_one_does_not() {
    let chance = [
        "train-small",
        "train-varlen",
        "checkpointing",
        "moe-skew",
        "lora-offload",
        "generate-train",
        "zero3",
        "serve-kv",
    ];
    for entry in CATALOGUE {
        let (one, again, other) = (entry.make(1, 1).unwrap(), entry.make(1, 1).unwrap(), entry.make(2, 1).unwrap());
        assert_eq!(one.trace, again.trace, "{}", entry.name);
        assert_eq!(one.name(), entry.name);
        if chance.contains(&entry.name) || ["infer-large", "mixed", "quiet-stream", "churn-98"].contains(&entry.name) {
            assert_ne!(one.trace.blocks, other.trace.blocks, "{}", entry.name);
        }
        // What the suite needs of each: blocks, no notes of the reader, a limit that the peak fits in.
        assert!(one.trace.notes.is_empty(), "{}: {:?}", entry.name, one.trace.notes);
        assert!(one.trace.peak_requested() > 0 && one.limit.is_none_or(|limit| limit >= one.trace.peak_requested()));
    }
}

#[test]
fn names_are_unique_and_more_rounds_are_longer() {
    let names: BTreeSet<&str> = CATALOGUE.iter().map(|entry| entry.name).collect();
    assert_eq!(names.len(), CATALOGUE.len());
    for entry in CATALOGUE.iter().filter(|entry| entry.origin == Origin::Generated) {
        let (short, long) = (entry.make(1, 1).unwrap(), entry.make(1, 2).unwrap());
        assert!(long.trace.events.len() * 2 > short.trace.events.len() * 3, "{}", entry.name);
        assert!((1000..30_000).contains(&short.trace.events.len()), "{}: {}", entry.name, short.trace.events.len());
    }
}

#[test]
fn steps_of_one_shape_repeat_and_varying_ones_do_not() {
    let repeats = |name: &str, steps: usize| {
        let trace = make(name).trace;
        let all = sizes(&trace);
        // What is never freed comes first; the steps share the rest.
        let resident = trace.live_at_end() as usize;
        let step = (all.len() - resident) / steps;
        (all.len() - resident).is_multiple_of(steps)
            && all[resident..].chunks(step).all(|chunk| chunk == &all[resident..][..step])
    };
    assert!(repeats("train-fixed", 6));
    assert!(!repeats("train-varlen", 8) && !repeats("train-small", 8));
}

#[test]
fn one_more_is_a_little_larger_in_every_second_step() {
    let all = sizes(&make("n-plus-one").trace);
    let steps: Vec<u64> = all.chunks(150).map(|step| step.iter().sum()).collect();
    assert_eq!(steps.len(), 18);
    for pair in steps.chunks(2) {
        let ratio = pair[1] as f64 / pair[0] as f64;
        assert!(ratio > 1.0 && ratio < 1.05, "{ratio}");
    }
    assert!(steps[0] == steps[2] && steps[0] != steps[6], "the same sizes thrice, then others");
}

#[test]
fn checkpointing_keeps_less_and_allocates_more_than_plain_training() {
    let (kept, plain) = (make("checkpointing").trace, make("train-varlen").trace);
    let resident = |trace: &Trace| sizes(trace)[..trace.live_at_end() as usize].iter().sum::<u64>();
    // Activations at the peak, over the bytes of a stream of tokens: with all layers kept, 22 layers' worth.
    let layers = |trace: &Trace| (trace.peak_requested() - resident(trace)) as f64;
    assert_eq!(resident(&kept), resident(&plain));
    let tokens = |trace: &Trace| {
        let after = &sizes(trace)[trace.live_at_end() as usize..];
        *after.iter().max().unwrap() as f64 / 32_000.0 / 4.0
    };
    assert!(layers(&kept) / tokens(&kept) < 0.5 * layers(&plain) / tokens(&plain));
}

#[test]
fn experts_are_skewed() {
    let trace = make("moe-skew").trace;
    let after = &sizes(&trace)[trace.live_at_end() as usize..];
    // The first block of each triple holds an expert's tokens: 2 KiB a token, and a multiple of 64 tokens.
    let mut first_layer: Vec<u64> = after[1..1 + 4 * 16].chunks(4).map(|expert| expert[0] / 2048).collect();
    first_layer.sort_unstable();
    let (most, sum) = (first_layer[15], first_layer.iter().sum::<u64>());
    assert_eq!(sum, 16 * 1024);
    assert!(most > 3 * sum / 16 && first_layer[0] < sum / 32, "{first_layer:?}");
}

#[test]
fn offload_and_gathering_use_blocks_on_other_streams() {
    for (name, streams) in [("lora-offload", 2), ("zero3", 2), ("pipeline-1f1b", 2), ("s13-side-streams", 4)] {
        let trace = make(name).trace;
        assert_eq!(trace.streams.len(), streams, "{name}");
        assert!(uses(&trace) >= 10, "{name}");
    }
    let gathered: BTreeSet<u64> = {
        let trace = make("zero3").trace;
        trace.blocks.iter().filter(|block| trace.streams[block.stream as usize] == 1).map(|block| block.bytes).collect()
    };
    let (least, most) = (gathered.first().unwrap(), gathered.last().unwrap());
    assert!(gathered.len() > 20 && most > &(2 * least), "shards are unequal");
}

#[test]
fn the_first_stage_of_a_pipeline_holds_many_micro_batches() {
    let trace = make("pipeline-1f1b").trace;
    let after = live(&trace);
    let resident: u64 = sizes(&trace)[..trace.live_at_end() as usize].iter().sum();
    let peak = trace.peak_requested() - resident;
    // One unit: 6 layers for one micro batch.
    let unit = 6 * 2048 * (2 * 2048 * (1 + 3 + 1 + 1 + 1) + 4 * 32 + 2 * 2 * 5632);
    assert!(peak > 9 * unit, "{} units", peak / unit);
    assert_eq!(after.last(), Some(&resident), "every forward has its backward");
}

#[test]
fn caches_grow_by_steps_and_are_replaced() {
    let trace = make("serve-kv").trace;
    let step = 8 * super::model::LARGE.cache(256);
    // A block is allocated and the next event frees one that is a step smaller.
    let grown = trace.events.windows(2).filter(|pair| {
        let (new, old) = (trace.blocks[pair[0].block as usize].bytes, trace.blocks[pair[1].block as usize].bytes);
        pair[0].action == Action::Alloc && pair[1].action == Action::Free && new == old + step
    });
    assert!(grown.count() > 100);
}

#[test]
fn generation_and_training_take_turns() {
    let trace = make("generate-train").trace;
    let (resident, after) = (sizes(&trace)[..trace.live_at_end() as usize].iter().sum::<u64>(), live(&trace));
    // Between the phases nothing but the model is live.
    let breaks = after.windows(2).filter(|pair| pair[0] != resident && pair[1] == resident).count();
    assert!(breaks >= 4, "{breaks}");
}

#[test]
fn one_stream_goes_quiet() {
    let trace = make("quiet-stream").trace;
    let of = |stream| trace.events.iter().rposition(|event| trace.stream_of(event.block) == stream).unwrap();
    assert_eq!(trace.streams, [0, 1]);
    assert!(of(1) < trace.events.len() / 2 && of(0) == trace.events.len() - 1);
}

#[test]
fn holes_lie_between_live_blocks_of_their_size() {
    let trace = make("holes").trace;
    // After the first 256 births every second block goes, in order.
    let frees: Vec<u32> = trace.events[256..256 + 128].iter().map(|event| event.block).collect();
    assert_eq!(frees, (0..256).step_by(2).collect::<Vec<u32>>());
    assert_eq!(sizes(&trace)[256], 2 * sizes(&trace)[0]);
}

#[test]
fn churn_fills_the_limit() {
    let workload = make("churn-98");
    let limit = workload.limit.unwrap() as f64;
    let after = live(&workload.trace);
    let half = &after[after.len() / 2..];
    let full = half.iter().filter(|live| **live as f64 / limit > 0.95).count();
    assert!(full * 2 > half.len(), "{full} of {}", half.len());
    assert!((0.975..0.985).contains(&(workload.trace.peak_requested() as f64 / limit)));
}

#[test]
fn scenarios_are_what_was_reported() {
    let trace = make("s01-two-gaps").trace;
    assert_eq!((sizes(&trace), trace.events.len()), (vec![16 * MIB, 16 * MIB, 16 * MIB, 16 * MIB, 32 * MIB], 7));
    let peaks: HashMap<&str, u64> = CATALOGUE
        .iter()
        .filter(|entry| entry.origin == Origin::Scenario)
        .map(|entry| (entry.name, entry.make(1, 1).unwrap().trace.peak_requested()))
        .collect();
    assert_eq!(peaks["s01-two-gaps"], 64 * MIB);
    assert_eq!(peaks["s02-survivors"], 100 * 2 * MIB + 91 * MIB + 91 * MIB / 2);
    assert_eq!(peaks["s06-new-streams"], 2 * GIB);
    assert_eq!(peaks["s07-larger-next"], 70 * GIB);
    assert_eq!(peaks["s08-vpmm"], 16 * GIB);
    let churn = make("s12-long-churn").trace;
    assert!(sizes(&churn).iter().sum::<u64>() > 300_000_000_000);
    assert_eq!(sizes(&churn).last(), Some(&132_870_728));
}
