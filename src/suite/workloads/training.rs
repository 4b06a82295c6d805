//! Training on one GPU.

use super::model::{MEDIUM, Model, SMALL};
use super::script::{Id, Script};
use crate::units::MIB;
use rand::RngExt;
use rand_distr::{Distribution, LogNormal, Zipf};

/// Steps of the same shape.
pub(super) fn fixed(script: &mut Script, rounds: u64) {
    MEDIUM.trainable(script, 0);
    for _ in 0..6 * rounds {
        MEDIUM.train(script, 8 * 1024, 0);
    }
}

/// A small model with small batches.
pub(super) fn small(script: &mut Script, rounds: u64) {
    SMALL.trainable(script, 0);
    for _ in 0..8 * rounds {
        let tokens = 2 * 8 * script.rng.random_range(48..=64);
        SMALL.train(script, tokens, 0);
    }
}

/// Batches padded to their longest text, whose lengths are log-normal.
pub(super) fn varying(script: &mut Script, rounds: u64) -> Result<(), String> {
    let lengths = LogNormal::new(6.3, 0.5).map_err(|error| error.to_string())?;
    MEDIUM.trainable(script, 0);
    for _ in 0..8 * rounds {
        let longest = (0..8).map(|_| lengths.sample(&mut script.rng)).fold(0.0, f64::max);
        MEDIUM.train(script, 8 * (longest as u64).clamp(64, 2048), 0);
    }
    Ok(())
}

/// Activations of 50 layers, all a little larger in every second step; then the same with other sizes.
pub(super) fn one_more(script: &mut Script, rounds: u64) {
    for round in 0..3 * rounds {
        let batch = [40, 56, 48][round as usize % 3];
        for _ in 0..3 {
            for batch in [batch, batch + 1] {
                let kept: Vec<Id> = (0..50)
                    .flat_map(|layer| [batch * MIB + layer % 3 * MIB / 2, batch * MIB / 4, batch * 8 * 1024])
                    .map(|bytes| script.alloc(bytes, 0))
                    .collect();
                script.free_all(kept.into_iter().rev());
                script.pause(5000);
            }
        }
    }
}

/// A step that keeps only what enters each layer and computes the rest again.
fn checkpointed(model: &Model, script: &mut Script, tokens: u64) {
    let mut inputs: Vec<Id> = Vec::new();
    for _ in 0..model.layers {
        inputs.push(script.alloc(model.stream_of_tokens(tokens), 0));
        model.forward_only(script, tokens, 0);
    }
    model.loss(script, tokens, 0);
    let mut gradients = Vec::new();
    for input in inputs.into_iter().rev() {
        let kept = model.forward(script, tokens, 0);
        gradients.extend(model.backward(script, kept, tokens, &model.layer_weights(), 0));
        script.free(input);
    }
    script.free_all(gradients);
    script.pause(20_000);
}

/// Gradient checkpointing, with batches of varying length.
pub(super) fn checkpointing(script: &mut Script, rounds: u64) {
    MEDIUM.trainable(script, 0);
    for _ in 0..5 * rounds {
        let tokens = 64 * script.rng.random_range(96..=256);
        checkpointed(&MEDIUM, script, tokens);
    }
}

/// Experts with Zipf-distributed shares of the tokens: another one is the busiest in each step.
pub(super) fn experts(script: &mut Script, rounds: u64) -> Result<(), String> {
    const EXPERTS: usize = 16;
    const TOKENS: u64 = 16 * 1024;
    let rank = Zipf::new(EXPERTS as f64, 1.1).map_err(|error| error.to_string())?;
    const LAYERS: usize = 8;
    let (hidden, inner) = (1024u64, 2816u64);
    script.alloc_all((0..LAYERS * EXPERTS).map(|_| 3 * hidden * inner * 2), 0);
    for step in 0..5 * rounds as usize {
        let mut kept: Vec<Vec<Id>> = Vec::new();
        for layer in 0..LAYERS {
            let mut tokens = [0u64; EXPERTS];
            // In groups of 64, so that a step draws hundreds of times and not thousands.
            for _ in 0..TOKENS / 64 {
                let drawn = rank.sample(&mut script.rng) as usize - 1;
                tokens[(drawn + step + layer) % EXPERTS] += 64;
            }
            let mut ids = vec![script.alloc(TOKENS * hidden * 2, 0)];
            for tokens in tokens.into_iter().filter(|tokens| *tokens > 0) {
                ids.extend(script.alloc_all([tokens * hidden * 2, tokens * inner * 2, tokens * inner * 2], 0));
                script.workspace(tokens * hidden * 2, 0);
            }
            kept.push(ids);
        }
        for ids in kept.into_iter().rev() {
            for id in ids.into_iter().rev() {
                script.workspace(hidden * inner * 2, 0);
                script.free(id);
            }
        }
        script.pause(10_000);
    }
    Ok(())
}

/// Frozen weights with small adapters, whose optimiser lives on the host: its state comes in buckets, is
/// used and goes, and every fourth layer's activations wait on the host between the passes.
pub(super) fn lora(script: &mut Script, rounds: u64) {
    let model = MEDIUM;
    script.alloc_all(model.weights(), 0);
    let adapters: Vec<u64> = (0..model.layers).flat_map(|_| [16 * model.hidden * 2; 4]).collect();
    script.alloc_all(adapters.iter().copied(), 0);
    for _ in 0..5 * rounds {
        let tokens = 128 * script.rng.random_range(32..=64);
        let mut layers: Vec<Option<Vec<Id>>> = Vec::new();
        for layer in 0..model.layers {
            let kept = model.forward(script, tokens, 0);
            if layer % 4 == 3 {
                // Copied out on stream 1, then freed.
                kept.iter().for_each(|id| script.used(*id, 1));
                script.free_all(kept);
                layers.push(None);
            } else {
                layers.push(Some(kept));
            }
        }
        model.loss(script, tokens, 0);
        let mut gradients = Vec::new();
        for layer in layers.into_iter().rev() {
            let kept = layer.unwrap_or_else(|| model.forward(script, tokens, 1));
            gradients.extend(model.backward(script, kept, tokens, &adapters[..4], 0));
        }
        for bucket in 0..6 {
            let bytes = (24 + 4 * (bucket % 3)) * MIB;
            let ids = script.alloc_all([bytes, bytes, bytes / 2], 1);
            ids.iter().for_each(|id| script.used(*id, 0));
            script.free_all(ids);
        }
        script.free_all(gradients);
        script.pause(20_000);
    }
}
