//! Patterns from public reports that made other allocators fail or waste memory, exact and small.
//!
//! Addresses: `pt#N` is issue N of pytorch/pytorch.

use super::script::Script;
use crate::units::{GIB, KIB, MIB};
use rand::RngExt;

/// 4 × 16 MiB; the first and third go; 32 MiB.
pub(super) fn two_gaps(script: &mut Script, _: u64) {
    let ids = script.alloc_all([16 * MIB; 4], 0);
    script.free(ids[0]);
    script.free(ids[2]);
    script.alloc(32 * MIB, 0);
}

/// 100 times 91 MiB, 45.5 MiB, and 2 MiB that stay; then the first two go (pt#123548).
pub(super) fn survivors(script: &mut Script, _: u64) {
    for _ in 0..100 {
        let large = script.alloc_all([91 * MIB, 91 * MIB / 2], 0);
        script.alloc(2 * MIB, 0);
        script.free_all(large);
        script.pause(1000);
    }
}

/// One block of 550 MiB, freed; then blocks of 110 MiB (pt#123548).
pub(super) fn one_then_many(script: &mut Script, _: u64) {
    script.workspace(550 * MIB, 0);
    script.alloc_all([110 * MIB; 8], 0);
}

/// 2 MiB, then 512 KiB (developer log of PyTorch).
pub(super) fn just_above(script: &mut Script, _: u64) {
    script.alloc_all([2 * MIB, 512 * KIB], 0);
}

/// 8 times two new streams with 1 GiB each (vllm-project/vllm#52950).
pub(super) fn new_streams(script: &mut Script, _: u64) {
    for round in 0..8 {
        let ids = [script.alloc(GIB, 2 * round + 1), script.alloc(GIB, 2 * round + 2)];
        script.free_all(ids);
        script.pause(50_000);
    }
}

/// 60 GiB, freed, then 70 GiB (pt#159674).
pub(super) fn larger_next(script: &mut Script, _: u64) {
    script.workspace(60 * GIB, 0);
    script.pause(50_000);
    script.workspace(70 * GIB, 0);
}

/// +10, +1, −10, +4, +11 GiB (document of `OpenVM`'s VPMM).
pub(super) fn vpmm_document(script: &mut Script, _: u64) {
    let first = script.alloc(10 * GIB, 0);
    script.alloc(GIB, 0);
    script.free(first);
    script.alloc_all([4 * GIB, 11 * GIB], 0);
}

/// Blocks of 16 KiB, 128 to a granule, of which every 8th stays (ovg-project/kvcached#359).
pub(super) fn small_survivors(script: &mut Script, _: u64) {
    let ids = script.alloc_all([16 * KIB; 128 * 32], 0);
    script.free_all(ids.into_iter().enumerate().filter(|(number, _)| number % 8 != 0).map(|(_, id)| id));
    script.alloc(48 * MIB, 0);
}

/// 300 GB of churn with live about 63 % of the limit, then 132,870,728 B (rapidsai/rmm#1245).
pub(super) fn long_churn(script: &mut Script, _: u64) {
    const LIVE: u64 = 10 * GIB / 100 * 63;
    let (mut live, mut bytes, mut total) = (Vec::new(), 0u64, 0u64);
    while total < 300_000_000_000 {
        let size = script.rng.random_range(1..=256 * MIB);
        while bytes + size > LIVE {
            let (id, size) = live.swap_remove(script.rng.random_range(0..live.len()));
            script.free(id);
            bytes -= size;
        }
        live.push((script.alloc(size, 0), size));
        bytes += size;
        total += size;
    }
    script.alloc(132_870_728, 0);
}

/// Blocks of 648 MiB used on side streams when they are freed (pt#71616).
pub(super) fn side_streams(script: &mut Script, _: u64) {
    for round in 0..12 {
        let id = script.alloc(648 * MIB, 0);
        script.used(id, 1 + round % 3);
        script.free(id);
        script.pause(10_000);
    }
}

/// 200 × 56 MiB that come and go at once (vllm-project/vllm#43020).
pub(super) fn come_and_go(script: &mut Script, _: u64) {
    (0..200).for_each(|_| script.workspace(56 * MIB, 0));
}

/// Large blocks with bulk frees, 50 rounds (ovg-project/kvcached#437).
pub(super) fn bulk_frees(script: &mut Script, _: u64) {
    let mut live = Vec::new();
    for round in 0..50 {
        let sizes: Vec<u64> = (0..12).map(|_| script.rng.random_range(32..=160) * MIB).collect();
        live.extend(script.alloc_all(sizes, 0));
        if round % 3 == 2 {
            let keep = live.split_off(live.len() - 4);
            script.free_all(std::mem::replace(&mut live, keep));
        }
    }
}
