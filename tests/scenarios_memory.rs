//! Allocation patterns from public reports that made other allocators fail or waste memory: one stream.
//! Each is a function over a maker of heaps, so that it runs on every backend.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod support;

use support::{Lab, Make, Random, S1, on_each_backend, out_of_memory, sim_with};
use xseg::backend::sim::SimOptions;
use xseg::error::PointerFault;
use xseg::units::{GIB, GRANULE, KIB, MIB};
use xseg::{Allocation, Error};

on_each_backend! {
    freed_blocks_apart_serve_a_larger_one,
    a_survivor_in_each_round_does_not_add_up,
    smaller_blocks_fit_where_a_large_one_was,
    two_mebibytes_and_a_half_take_two_granules,
    batches_that_grow_by_one_settle,
    batches_that_grow_by_one_fit_a_tight_limit,
    batches_that_grow_by_one_stay_small_when_eager,
    a_pool_serves_a_larger_request_than_it_held,
    growth_after_a_large_free_stays_within_the_sum,
    nothing_moves_while_there_is_room,
    one_small_block_of_eight_is_reported,
    churn_leaves_room_for_one_more_block,
    bulk_frees_keep_the_books_right,
    size_zero_is_defined,
    wrong_frees_are_errors,
    offsets_repeat,
    live_blocks_at_exit,
}

/// 1: PyTorch developer log, 2026-06-01.
fn freed_blocks_apart_serve_a_larger_one(make: Make) {
    for conf in ["limit:64MiB", "defrag:eager"] {
        let lab = make(conf);
        let mut blocks: Vec<Option<Allocation>> = (0..4).map(|_| Some(lab.alloc(16 * MIB, S1))).collect();
        assert_eq!(lab.reserved(), 64 * MIB);
        (blocks[0], blocks[2]) = (None, None);
        let joined = lab.alloc(32 * MIB, S1);
        let stats = lab.heap.stats();
        assert_eq!((stats.reserved, stats.allocated, stats.bytes_copied), (64 * MIB, 64 * MIB, 0), "{conf}");
        lab.check();
        drop((joined, blocks));
        lab.ends_with(0);
    }
}

/// 2: pt#123548. PyTorch went from 220 to 14,060 MiB.
fn a_survivor_in_each_round_does_not_add_up(make: Make) {
    let figure = 200 * MIB + 136 * MIB + MIB / 2;
    let limit = format!("limit:{}", figure.next_multiple_of(GRANULE));
    for (conf, most) in [("growth:exact", figure + 4 * GRANULE), (limit.as_str(), figure + GRANULE)] {
        let lab = make(conf);
        let mut kept = Vec::new();
        for _ in 0..100 {
            let (a, b) = (lab.alloc(91 * MIB, S1), lab.alloc(45 * MIB + MIB / 2, S1));
            kept.push(lab.alloc(2 * MIB, S1));
            drop((a, b));
        }
        lab.check();
        let reserved = lab.reserved();
        assert!((200 * MIB..=most).contains(&reserved), "{conf}: {} MiB", reserved / MIB);
        drop(kept);
        lab.ends_with(0);
    }
}

/// 3: pt#123548.
fn smaller_blocks_fit_where_a_large_one_was(make: Make) {
    for limit in [550, 660, 1000] {
        let lab = make(&format!("limit:{limit}MiB"));
        drop(lab.alloc(550 * MIB, S1));
        let mut blocks = Vec::new();
        for _ in 0..limit / 110 {
            blocks.push(lab.alloc(110 * MIB, S1));
        }
        out_of_memory(lab.heap.alloc(110 * MIB, S1));
        lab.check();
        drop(blocks);
        lab.ends_with(0);
    }
}

/// 4: PyTorch developer log. PyTorch takes 22 MiB.
fn two_mebibytes_and_a_half_take_two_granules(make: Make) {
    for conf in ["limit:4MiB", "growth:exact"] {
        let lab = make(conf);
        let blocks = (lab.alloc(2 * MIB, S1), lab.alloc(512 * KIB, S1));
        assert_eq!(lab.reserved(), 2 * GRANULE);
        drop(blocks);
        lab.ends_with(0);
    }
}

/// One training step with a batch of `n`: 50 layers forward with activations, then back.
fn step(lab: &Lab, n: u64) {
    let mut activations = Vec::new();
    for layer in 0..50 {
        let bytes = n * (6_400_003 + layer * 127_031);
        let workspace = lab.alloc(bytes / 2, S1);
        activations.push(lab.alloc(bytes, S1));
        drop(workspace);
    }
    while let Some(activation) = activations.pop() {
        let gradient = lab.alloc(activation.len(), S1);
        drop(activation);
        drop(gradient);
    }
}

/// Batches of a step after the other; a round has a few sizes, and they come again.
const ROUNDS: [[u64; 4]; 5] = [[8, 9, 6, 7], [9, 10, 7, 8], [6, 9, 10, 7], [10, 7, 8, 6], [7, 10, 8, 9]];

fn rounds(lab: &Lab) {
    ROUNDS.iter().flatten().for_each(|n| step(lab, *n));
    lab.check();
    assert_eq!(lab.heap.stats().ooms, 0);
}

/// Most bytes that live at once in the largest step.
fn need_of_the_largest_step(make: Make) -> u64 {
    let lab = make("");
    step(&lab, 10);
    lab.heap.stats().peak_allocated
}

/// 5: pull request 96995 of PyTorch.
fn batches_that_grow_by_one_settle(make: Make) {
    let lab = make("");
    ROUNDS[..2].iter().flatten().for_each(|n| step(&lab, *n));
    let reserved = lab.reserved();
    rounds(&lab);
    assert_eq!(lab.reserved(), reserved, "no growth after the second round of sizes");
    lab.ends_with(0);
}

/// 5, with a limit of 1.02 × the largest step's need.
fn batches_that_grow_by_one_fit_a_tight_limit(make: Make) {
    let need = need_of_the_largest_step(make);
    let limit = need + need / 50;
    let lab = make(&format!("limit:{limit}"));
    rounds(&lab);
    assert!(lab.heap.stats().peak_reserved <= limit);
    lab.ends_with(0);
}

/// 5, with `defrag:eager`.
fn batches_that_grow_by_one_stay_small_when_eager(make: Make) {
    let need = need_of_the_largest_step(make);
    let lab = make("defrag:eager");
    rounds(&lab);
    let peak = lab.heap.stats().peak_reserved;
    assert!(peak <= need + need / 20, "{:.4} of the need", peak as f64 / need as f64);
    lab.ends_with(0);
}

/// 7: pt#159674.
fn a_pool_serves_a_larger_request_than_it_held(make: Make) {
    let lab = make("limit:80GiB");
    drop(lab.alloc(60 * GIB, S1));
    let block = lab.alloc(70 * GIB, S1);
    assert!(lab.reserved() <= 80 * GIB);
    lab.check();
    drop(block);
    lab.ends_with(0);
}

/// 8: document of the openvm stark-backend's VPMM.
fn growth_after_a_large_free_stays_within_the_sum(make: Make) {
    for conf in ["limit:16GiB", "defrag:eager"] {
        let lab = make(conf);
        let ten = lab.alloc(10 * GIB, S1);
        let one = lab.alloc(GIB, S1);
        drop(ten);
        let rest = (lab.alloc(4 * GIB, S1), lab.alloc(11 * GIB, S1));
        let stats = lab.heap.stats();
        assert_eq!((stats.allocated, stats.bytes_copied), (16 * GIB, 0));
        assert!(stats.peak_reserved <= 16 * GIB + 16 * GIB / 100, "{conf}: {}", stats.peak_reserved);
        lab.check();
        drop((one, rest));
        lab.ends_with(0);
    }
}

/// Frees every second of 8 blocks of 16 MiB, then asks for 32 MiB twice.
fn scattered(lab: &Lab) -> Vec<Allocation> {
    let mut blocks: Vec<Allocation> = (0..8).map(|_| lab.alloc(16 * MIB, S1)).collect();
    let mut index = 0;
    blocks.retain(|_| {
        index += 1;
        index % 2 == 0
    });
    blocks.extend((0..2).map(|_| lab.alloc(32 * MIB, S1)));
    blocks
}

/// 9: antgroup/glake#12 and #22.
fn nothing_moves_while_there_is_room(make: Make) {
    let roomy = make("limit:1GiB");
    let blocks = scattered(&roomy);
    let stats = roomy.heap.stats();
    assert_eq!((stats.handles_moved, stats.bytes_moved, stats.handles_joined, stats.bytes_rechunked), (0, 0, 0, 0));
    assert_eq!(stats.reserved, 192 * MIB);
    drop(blocks);
    roomy.ends_with(0);

    let tight = make("limit:128MiB");
    let blocks = scattered(&tight);
    let stats = tight.heap.stats();
    assert_eq!(stats.reserved, 128 * MIB);
    // What moved and what was made anew from idle memory is what growth would have added.
    assert!(stats.handles_moved > 0);
    assert_eq!(stats.bytes_moved + (stats.bytes_created - 128 * MIB), 64 * MIB);
    drop(blocks);
    tight.ends_with(0);
}

/// 10: ovg-project/kvcached#359.
fn one_small_block_of_eight_is_reported(make: Make) {
    let lab = make("limit:128MiB");
    let mut blocks: Vec<Allocation> = (0..64 * 128).map(|_| lab.alloc(16 * KIB, S1)).collect();
    assert_eq!((lab.reserved(), lab.heap.stats().pinned_by_small), (128 * MIB, 0));
    let mut index = 0;
    blocks.retain(|_| {
        index += 1;
        index % 8 == 0
    });
    let stats = lab.heap.stats();
    assert_eq!((stats.live_blocks, stats.allocated), (1024, 16 * MIB));
    assert_eq!(stats.pinned_by_small, 64, "granules that small blocks hold");
    assert_eq!(stats.partly_live_granules, 112 * MIB);
    let fields = out_of_memory(lab.heap.alloc(2 * MIB, S1));
    assert_eq!((fields.partly_live, fields.free), (112 * MIB, 112 * MIB));
    drop(blocks);
    lab.ends_with(0);
}

/// 12: rapidsai/rmm#1245.
fn churn_leaves_room_for_one_more_block(make: Make) {
    let limit = 2 * GIB;
    let lab = make("limit:2GiB");
    let mut random = Random(1245);
    let mut live: Vec<Allocation> = Vec::new();
    let (mut total, mut held) = (0, 0);
    while total < 300_000_000_000_u64 {
        let shift = 10 + random.below(18);
        let bytes = random.below(1 << shift) + 1;
        while held + bytes > limit / 100 * 63 {
            let block = live.swap_remove(random.below(live.len() as u64) as usize);
            held -= block.size();
        }
        let block = lab.alloc(bytes, S1);
        total += bytes;
        held += block.size();
        live.push(block);
    }
    assert!(held > limit / 2);
    let last = lab.alloc(132_870_728, S1);
    assert_eq!(lab.heap.stats().ooms, 0);
    lab.check();
    drop((last, live));
    lab.ends_with(0);
}

/// 17: ovg-project/kvcached#437.
fn bulk_frees_keep_the_books_right(make: Make) {
    let lab = make("limit:12GiB");
    let mut random = Random(437);
    let mut live: Vec<Allocation> = Vec::new();
    for round in 0..50 {
        while lab.heap.stats().allocated < 10 * GIB {
            live.push(lab.alloc((20 + random.below(500)) * MIB + random.below(4096), S1));
        }
        lab.check();
        live.retain(|_| random.below(10) < if round % 5 == 4 { 0 } else { 4 });
        lab.check();
        if round % 7 == 0 {
            lab.heap.trim();
            lab.check();
        }
    }
    drop(live);
    lab.ends_with(0);
}

/// 18: pt#159892.
fn size_zero_is_defined(make: Make) {
    let lab = make("");
    let block = lab.alloc(0, S1);
    assert_eq!((block.len(), block.size()), (0, 512));
    let raw = lab.heap.alloc_raw(0, S1).unwrap();
    assert_ne!(raw, block.address());
    lab.heap.free_raw(raw).unwrap();
    drop(block);
    lab.ends_with(0);
}

/// 19: pt#142127.
fn wrong_frees_are_errors(make: Make) {
    let lab = make("");
    let block = lab.alloc(6 * MIB, S1);
    let gone = lab.alloc(6 * MIB, S1).into_raw();
    lab.heap.free_raw(gone).unwrap();
    let cases = [
        (gone, PointerFault::Freed),
        (block.address() + 2 * MIB, PointerFault::Interior),
        (block.address() + (1 << 45), PointerFault::Foreign),
        (0x1000, PointerFault::Foreign),
    ];
    for (at, fault) in cases {
        assert_eq!(lab.heap.free_raw(at), Err(Error::InvalidPointer { address: at, why: fault }));
    }
    lab.check();
    assert_eq!(lab.heap.stats().allocated, 6 * MIB);
    drop(block);
    lab.ends_with(0);
}

/// 20: node-llama-cpp pull 610, lupine#574. A device that grants no more than 32 GiB at once.
#[test]
fn a_refused_reservation_is_halved_and_said() {
    let lab = sim_with("", SimOptions { reserve_max: Some(32 * GIB), ..SimOptions::default() });
    let notes = lab.heap.notes();
    assert!(notes.iter().any(|note| note.contains("refused")), "{notes:?}");
    assert_eq!(lab.heap.stats().driver_calls.reserve, 1, "only the one that succeeded counts");
    // When it is full, another is added.
    let blocks: Vec<Allocation> = (0..7).map(|_| lab.alloc(10 * GIB, S1)).collect();
    assert!(lab.heap.stats().driver_calls.reserve >= 2);
    lab.check();
    drop(blocks);
    lab.ends_with(0);
}

/// 23: pt#183451. Addresses of the system differ from heap to heap on `host`.
fn offsets_repeat(make: Make) {
    let run = || {
        let lab = make("limit:512MiB");
        let mut random = Random(183_451);
        let mut live: Vec<Allocation> = Vec::new();
        let mut base = None;
        let mut out = Vec::new();
        for _ in 0..800 {
            if random.below(9) < 5 || live.is_empty() {
                let shift = 9 + random.below(18);
                if let Ok(block) = lab.heap.alloc(random.below(1 << shift), S1) {
                    out.push(block.address().wrapping_sub(*base.get_or_insert(block.address())));
                    live.push(block);
                }
            } else {
                drop(live.swap_remove(random.below(live.len() as u64) as usize));
            }
        }
        (out, lab.heap.stats().driver_calls)
    };
    assert!(run() == run());
}

/// 24: reports on vLLM's cumem.
fn live_blocks_at_exit(make: Make) {
    let lab = make("");
    let kept = lab.alloc(100 * MIB, S1);
    let raw = lab.alloc(MIB, S1).into_raw();
    lab.heap.shut_down();
    assert!(matches!(lab.heap.alloc(512, S1), Err(Error::ShutDown)));
    lab.heap.free_raw(raw).unwrap();
    drop(kept);
    assert_eq!(lab.heap.stats().reserved, 0);
    // And without shutting down: the heap ends with a live block.
    let other = make("");
    assert!(other.alloc(100 * MIB, S1).into_raw() > 0);
}
