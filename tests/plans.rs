//! Plans made ahead: a heap that follows one, leaves it and takes it up again, and files that are no plans.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod support;

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;
use support::{Lab, Random, S0, S1, S2, on_each_backend, sim};
use xseg::backend::sim::SimOptions;
use xseg::backend::timeline::Timeline;
use xseg::trace::{Action, Trace};
use xseg::units::{GRANULE, MIB};
use xseg::{Allocation, Error, Heap, Plan, RecordedBlock, StreamId};

/// A training run of equal steps: parameters, in the first step their states, and in each step blocks that pile up and go in
/// reverse order. The middle and the end of each step are told.
fn run(steps: usize, mut event: impl FnMut(Step)) {
    let mut number = 0;
    let mut born = |event: &mut dyn FnMut(Step), bytes: u64| {
        event(Step::Alloc(number, bytes));
        number += 1;
        number - 1
    };
    for _ in 0..12 {
        born(&mut event, 8 * MIB + 300);
    }
    for step in 0..steps {
        let saved: Vec<u32> = (0..36).map(|at| born(&mut event, (3 + at % 3 * 5) * MIB)).collect();
        let logits = born(&mut event, 130 * MIB);
        event(Step::Middle(step));
        let mut gradients = Vec::new();
        event(Step::Free(logits));
        for (at, block) in saved.into_iter().enumerate().rev() {
            let scratch = born(&mut event, 20 * MIB);
            event(Step::Free(block));
            if at % 3 == 0 {
                gradients.push(born(&mut event, 8 * MIB + 300));
            }
            event(Step::Free(scratch));
        }
        if step == 0 {
            for _ in 0..12 {
                born(&mut event, 16 * MIB + 600);
            }
        }
        gradients.into_iter().for_each(|block| event(Step::Free(block)));
        event(Step::End(step));
    }
}

enum Step {
    Alloc(u32, u64),
    Free(u32),
    Middle(usize),
    End(usize),
}

/// The run as a trace, on stream 0.
fn recorded(steps: usize) -> Trace {
    let (mut text, mut time) = (String::new(), 0);
    run(steps, |event| {
        time += 10;
        match event {
            Step::Alloc(block, bytes) => text += &format!("a,{block},{bytes},0,{time}\n"),
            Step::Free(block) => text += &format!("f,{block},{time}\n"),
            Step::Middle(_) | Step::End(_) => {}
        }
    });
    Trace::from_bytes("run", text.as_bytes()).unwrap()
}

fn plan_of(trace: &Trace) -> Plan {
    Plan::of(&trace.large_blocks(Duration::from_millis(100))).unwrap().0
}

/// A folder with the plan of a trace, and the setting that names it.
fn planned(trace: &Trace) -> (tempfile::TempDir, String) {
    planned_of(&trace.large_blocks(Duration::from_millis(100)))
}

fn planned_of(recorded: &[RecordedBlock]) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.plan");
    let mut text = Vec::new();
    Plan::of(recorded).unwrap().0.write(&mut text).unwrap();
    std::fs::write(&path, text).unwrap();
    let conf = format!("plan:{}", path.display());
    (folder, conf)
}

fn shipped(name: &str) -> Trace {
    Trace::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("traces").join(format!("{name}.trace.xz"))).unwrap()
}

/// Runs the steps on a heap; `middle` and `end` are called in the middle and at the end of each.
fn follow(lab: &Lab, steps: usize, mut middle: impl FnMut(usize), mut end: impl FnMut(usize)) {
    let mut live: HashMap<u32, Allocation> = HashMap::new();
    run(steps, |event| match event {
        Step::Alloc(block, bytes) => drop(live.insert(block, lab.alloc(bytes, S0))),
        Step::Free(block) => drop(live.remove(&block).unwrap()),
        Step::Middle(step) => middle(step),
        Step::End(step) => {
            lab.check();
            end(step);
        }
    });
}

/// The least limit, to two granules beyond the peak of what is live.
fn tight(trace: &Trace) -> u64 {
    trace.peak_requested().next_multiple_of(GRANULE) + GRANULE
}

fn a_step_that_repeats_is_followed_for_ever_in_hardly_more_than_is_live(make: support::Make) {
    let trace = recorded(3);
    let (_folder, plan) = planned(&trace);
    let lab = make(&format!("{plan},limit:{}", tight(&trace)));
    let mut seen = Vec::new();
    follow(
        &lab,
        12,
        |_| {},
        |_| {
            let stats = lab.heap.stats();
            seen.push((stats.planned, stats.driver_calls.total(), stats.handles_moved));
        },
    );
    // Of the first step all blocks, with the parameters and their states.
    assert_eq!(seen[0].0, 12 + 37 + 36 + 12 + 12);
    for pair in seen.windows(2) {
        assert_eq!(pair[1].0 - pair[0].0, 37 + 36 + 12, "every block of a step lies where the plan says");
    }
    // The states of the first step are there in the second.
    assert!(
        seen[1..].iter().all(|step| step.1 == seen[1].1),
        "and no later step asks anything of the driver: {seen:?}"
    );
    let stats = lab.heap.stats();
    assert_eq!((stats.planned_elsewhere, stats.handles_moved, stats.host_waits), (0, 0, 0));
    assert!(stats.peak_reserved - stats.peak_requested < 2 * GRANULE, "{stats:?}");
}

fn strangers_in_a_step_are_kept_apart_and_many_end_it_until_the_next(make: support::Make) {
    let trace = recorded(3);
    let (_folder, plan) = planned(&trace);
    let lab = make(&format!("{plan},limit:{}", tight(&trace) * 3 / 2));
    let (mut seen, mut held) = (Vec::new(), Vec::new());
    let middle = |step| match step {
        // Few, which live on over some steps.
        4 => held.extend((0..3).map(|at| lab.alloc((4 + at) * MIB, S0))),
        // Many, as of an evaluation.
        6 => drop((0..60).map(|at| lab.alloc((2 + at) * MIB, S0)).map(drop)),
        _ => {}
    };
    follow(&lab, 12, middle, |_| seen.push(lab.heap.stats()));
    let in_step: Vec<u64> = seen.windows(2).map(|pair| pair[1].planned - pair[0].planned).collect();
    assert_eq!(in_step[..5], [85; 5], "few strangers change nothing: {in_step:?}");
    assert!(in_step[6..].iter().all(|planned| *planned == 85), "after many it is followed again: {in_step:?}");
    assert_eq!(held.len(), 3);
}

fn a_run_of_other_sizes_goes_on_by_the_ordinary_rules(make: support::Make) {
    let (_folder, plan) = planned(&shipped("gpt2"));
    let trace = recorded(3);
    let lab = make(&format!("{plan},limit:{}", trace.peak_requested() / 10 * 11));
    follow(&lab, 4, |_| {}, |_| {});
    assert_eq!(lab.heap.stats().planned, 0);
}

fn a_plan_is_as_good_as_none_for_whatever_a_program_does(make: support::Make) {
    let trace = recorded(3);
    let (_folder, plan) = planned(&trace);
    for seed in 1..8 {
        let mut random = Random(seed);
        let lab = make(&format!("{plan},limit:2GiB"));
        let mut live: Vec<Allocation> = Vec::new();
        // Pieces of the run, in random order, on several streams, among requests of any size.
        let sizes: Vec<u64> = trace.blocks.iter().map(|block| block.bytes).collect();
        let mut at = 0;
        for turn in 0..1500 {
            if random.below(40) == 0 {
                at = random.below(sizes.len() as u64) as usize;
            }
            let noise = random.below(30) == 0;
            let bytes = if noise { 1 + random.below(40 * MIB) } else { sizes[at % sizes.len()] };
            at += usize::from(!noise);
            let stream = [S0, S0, S0, S1, S2][random.below(5) as usize];
            match lab.heap.alloc(bytes, stream) {
                Ok(block) => {
                    if random.below(8) == 0 {
                        block.record_use(StreamId(7)).unwrap();
                    }
                    live.push(block);
                }
                Err(Error::OutOfMemory(_)) => live.truncate(live.len() / 2),
                Err(error) => panic!("{error}"),
            }
            while live.len() > 60 || random.below(5) == 0 && !live.is_empty() {
                drop(live.swap_remove(random.below(live.len() as u64) as usize));
            }
            lab.time.advance(Duration::from_micros(random.below(200)));
            if turn % 50 == 0 {
                lab.check();
                let mut ranges: Vec<_> = live.iter().map(|one| (one.address(), one.address() + one.size())).collect();
                ranges.sort_unstable();
                assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0), "blocks overlap");
                assert!(lab.heap.stats().reserved <= 2048 * MIB);
            }
            if turn % 400 == 399 {
                lab.heap.trim();
            }
        }
        drop(live);
        lab.ends_with(0);
    }
}

on_each_backend!(
    a_step_that_repeats_is_followed_for_ever_in_hardly_more_than_is_live,
    strangers_in_a_step_are_kept_apart_and_many_end_it_until_the_next,
    a_run_of_other_sizes_goes_on_by_the_ordinary_rules,
    a_plan_is_as_good_as_none_for_whatever_a_program_does,
);

/// As `tests/repeated_steps.rs` has it: the whole gpt2 trace again and again, everything freed after each.
#[test]
fn twenty_equal_steps_of_gpt2_in_a_thousandth_more_than_is_live() {
    let trace = shipped("gpt2");
    let mut text = String::new();
    let offset = trace.events.last().unwrap().time_us + 1;
    for step in 0..3 {
        let (first, time) = (step * trace.blocks.len() as u64, step * offset);
        let mut live: Vec<u32> = Vec::new();
        for event in &trace.events {
            let (id, time) = (first + u64::from(event.block), time + event.time_us);
            match event.action {
                Action::Alloc => {
                    live.push(event.block);
                    text += &format!("a,{id},{},0,{time}\n", trace.blocks[event.block as usize].bytes);
                }
                Action::Free => {
                    live.retain(|block| *block != event.block);
                    text += &format!("f,{id},{time}\n");
                }
                Action::Use(_) => {}
            }
        }
        live.iter().for_each(|block| text += &format!("f,{},{}\n", first + u64::from(*block), time + offset - 1));
    }
    let steps = Trace::from_bytes("steps", text.as_bytes()).unwrap();
    let (_, found) = Plan::of(&steps.large_blocks(Duration::ZERO)).unwrap();
    assert_eq!((found.before, found.rounds, u64::from(found.period)), (0, 3, 2218));
    assert!(found.top - found.peak <= found.peak / 1000);
    let (_folder, plan) = planned(&steps);
    let lab = sim(&format!("{plan},limit:{}", trace.peak_requested() / 1000 * 1001));
    let mut calls = Vec::new();
    for _ in 0..20 {
        let mut live: Vec<Option<Allocation>> = trace.blocks.iter().map(|_| None).collect();
        for event in &trace.events {
            let block = event.block as usize;
            match event.action {
                Action::Alloc => live[block] = Some(lab.alloc(trace.blocks[block].bytes.max(1), S0)),
                Action::Free => drop(live[block].take().unwrap()),
                Action::Use(_) => {}
            }
        }
        drop(live);
        lab.check();
        calls.push(lab.heap.stats().driver_calls.total());
    }
    assert_eq!(lab.heap.stats().planned, 20 * 2218);
    assert_eq!(calls[0], calls[19], "no driver call after the first step");
    // Without the plan the limit is too low.
    let without = sim(&format!("limit:{}", trace.peak_requested() / 1000 * 1001));
    let mut live: Vec<Option<Allocation>> = trace.blocks.iter().map(|_| None).collect();
    let refused = trace.events.iter().find_map(|event| {
        let block = event.block as usize;
        if event.action == Action::Alloc {
            match without.heap.alloc(trace.blocks[block].bytes.max(1), S0) {
                Ok(allocation) => live[block] = Some(allocation),
                Err(error) => return Some(error),
            }
        } else {
            live[block] = None;
        }
        None
    });
    assert!(matches!(refused, Some(Error::OutOfMemory(_))), "{refused:?}");
}

#[test]
fn threads_that_share_a_plan_leave_the_heap_sound() {
    let trace = recorded(3);
    let (_folder, plan) = planned(&trace);
    let lab = sim(&format!("{plan},limit:8GiB"));
    std::thread::scope(|scope| {
        for stream in [S0, S1, S2] {
            let (heap, trace) = (&lab.heap, &trace);
            scope.spawn(move || {
                for _ in 0..3 {
                    let mut live: HashMap<u32, Allocation> = HashMap::new();
                    for event in &trace.events {
                        match event.action {
                            Action::Alloc => {
                                let bytes = trace.blocks[event.block as usize].bytes;
                                live.insert(event.block, heap.alloc(bytes, stream).unwrap());
                            }
                            Action::Free => drop(live.remove(&event.block)),
                            Action::Use(_) => {}
                        }
                    }
                }
            });
        }
    });
    lab.ends_with(0);
}

/// Two streams that take each other's memory: as long as the device lags less than the plan allowed for, every block lies in
/// its place; if it lags more, they go on by the ordinary rules.
#[test]
fn two_streams_follow_a_plan_with_proof_alone() {
    let (mut text, mut time, mut number) = (String::new(), 0, 0);
    for _ in 0..12 {
        for stream in [0, 1] {
            let blocks = number..number + 10;
            for block in blocks.clone() {
                text += &format!("a,{block},{},{stream},{time}\n", 33 * MIB + 512);
            }
            time += 60_000;
            blocks.for_each(|block| text += &format!("f,{block},{time}\n"));
            time += 60_000;
            number += 10;
        }
    }
    let trace = Trace::from_bytes("two", text.as_bytes()).unwrap();
    let recorded = trace.large_blocks(Duration::from_millis(50));
    let (_, found) = Plan::of(&recorded).unwrap();
    assert!(found.top < 12 * 34 * MIB, "both streams share the addresses: {found:?}");
    let (_folder, plan) = planned_of(&recorded);
    for (lag, all) in [(0, true), (20, true), (400, false)] {
        let time = Timeline::new(Duration::from_millis(lag));
        let options = SimOptions { timeline: time.clone(), ..SimOptions::default() };
        let lab = support::sim_with(&plan, options);
        let mut live: HashMap<u32, Allocation> = HashMap::new();
        for event in &trace.events {
            if time.now() < Duration::from_micros(event.time_us) {
                // The last frees before a pause are proven from here on.
                lab.heap.tick();
            }
            time.advance_to(Duration::from_micros(event.time_us));
            let stream = StreamId(trace.stream_of(event.block));
            match event.action {
                Action::Alloc => {
                    let block = lab.alloc(trace.blocks[event.block as usize].bytes, stream);
                    lab.work(stream, &block, Duration::from_micros(1));
                    live.insert(event.block, block);
                }
                Action::Free => drop(live.remove(&event.block)),
                Action::Use(_) => {}
            }
        }
        lab.check();
        let stats = lab.heap.stats();
        assert_eq!(stats.planned_elsewhere == 0, all, "{lag} ms behind: {stats:?}");
        assert_eq!(stats.planned + stats.planned_elsewhere, 240, "{lag} ms behind");
        assert_eq!(stats.host_waits, 0);
    }
}

#[test]
fn the_policy_holds_for_planned_memory_too() {
    let trace = recorded(3);
    let (_folder, plan) = planned(&trace);
    // Below what is live the limit is respected, and the error is the ordinary one.
    let lab = sim(&format!("{plan},limit:{}", trace.peak_requested() / 2 / GRANULE * GRANULE));
    let mut live = Vec::new();
    let refused = loop {
        let bytes = trace.blocks[live.len()].bytes;
        match lab.heap.alloc(bytes, S0) {
            Ok(block) => live.push(block),
            Err(error) => break error,
        }
    };
    assert!(matches!(refused, Error::OutOfMemory(_)), "{refused}");
    lab.check();
    // A lowered limit, a slack, and no moves at all.
    for conf in
        ["slack:5%", "defrag:eager", "defrag:off", "remap:quiesce", "cross_stream:off", "growth:exact,handle_max:2MiB"]
    {
        let lab = sim(&format!("{plan},{conf}"));
        follow(&lab, 4, |_| {}, |_| {});
        let stats = lab.heap.stats();
        assert!(stats.planned > 300, "{conf}: {}", stats.planned);
        let slack = if conf == "slack:5%" { 1.05 } else { 1.02 };
        assert!(stats.peak_reserved as f64 <= stats.peak_requested as f64 * slack, "{conf}: {stats:?}");
    }
}

fn refused(text: &[u8]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bad.plan");
    std::fs::write(&path, text).unwrap();
    match Heap::builder().conf(&format!("backend:sim,plan:{}", path.display())).unwrap().build() {
        Err(Error::Plan { path: named, why }) if named == path => why,
        other => panic!("{other:?}"),
    }
}

#[test]
fn files_that_are_no_plans_are_refused_with_what_to_do() {
    let missing = Heap::builder().conf("backend:sim,plan:/nowhere/at/all").unwrap().build();
    let Err(Error::Plan { why, .. }) = &missing else { panic!("{missing:?}") };
    assert!(why.contains("/nowhere/at/all") && why.contains("xseg plan TRACE -o FILE"), "{why}");
    let folder = tempfile::tempdir().unwrap();
    let as_file = Heap::builder().conf(&format!("backend:sim,plan:{}", folder.path().display())).unwrap().build();
    assert!(matches!(as_file, Err(Error::Plan { .. })), "{as_file:?}");
    for (text, says) in [
        (&b""[..], "is no plan"),
        (b"a,0,33554432,0,0\n", "is no plan"),
        (b"\x80\x04\x95", "is no plan"),
        (b"xseg plan 2\nblocks 1 step 1 top 9\n", "version `2`"),
        (b"xseg plan 1\nblocks 4000000 step 0 top 4294967296\n4096 0 1 0\n", "says 4000000 blocks and holds 1"),
        (b"xseg plan 1\nblocks 99999999999 step 0 top 9\n", "out of range"),
        (b"xseg plan 1\nblocks 2 step 2 top 9000\n4096 0 2 0\n4096 0 2 4095\n", "blocks 0 and 1 of the plan overlap"),
        (b"xseg plan 1\nblocks 1 step 1 top 4096\n4096 0 1 \xff\n", "line 3"),
    ] {
        let why = refused(text);
        assert!(why.contains(says) && why.contains("xseg plan"), "{why}");
    }
    let mut whole = Vec::new();
    plan_of(&recorded(3)).write(&mut whole).unwrap();
    let why = refused(&whole[..whole.len() / 2]);
    assert!(why.contains("make it anew"), "{why}");
}
