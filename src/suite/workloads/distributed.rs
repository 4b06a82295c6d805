//! Training across GPUs, seen from one of them: collectives and transfers on streams of their own.

use super::model::MEDIUM;
use super::script::{Id, Script};
use crate::units::MIB;
use rand::RngExt;
use std::collections::{HashMap, VecDeque};

const COMPUTE: u64 = 0;
const COMMUNICATE: u64 = 1;

/// `ZeRO` stage 3: each layer's weights are gathered from unequal shards just before their use, one layer
/// ahead, and released after it; gradients are scattered.
pub(super) fn zero3(script: &mut Script, rounds: u64) {
    let model = MEDIUM;
    // Shards of very different sizes, as wrapping by modules makes them.
    let layers: Vec<u64> = (0..model.layers)
        .map(|layer| {
            let plain: u64 = model.layer_weights().iter().sum();
            plain * (1 + layer % 4) / 2 + script.rng.random_range(0..64) * 1024
        })
        .collect();
    script.alloc_all(layers.iter().map(|bytes| bytes / 8 * 7), COMPUTE);
    for step in 0..4 * rounds {
        let tokens = 512 * (8 + step % 3 * 2);
        let mut kept: Vec<Vec<Id>> = Vec::new();
        let mut gathered: VecDeque<Id> = VecDeque::new();
        let forward: Vec<usize> = (0..layers.len()).collect();
        for (at, &layer) in forward.iter().enumerate() {
            while gathered.len() < 2
                && let Some(&next) = forward.get(at + gathered.len())
            {
                gathered.push_back(script.alloc(layers[next], COMMUNICATE));
            }
            kept.push(model.forward(script, tokens, COMPUTE));
            if let Some(weights) = gathered.pop_front() {
                script.used(weights, COMPUTE);
                script.free(weights);
            }
            script.pause(200 + layer as u64);
        }
        model.loss(script, tokens, COMPUTE);
        for (layer, kept) in kept.into_iter().enumerate().rev() {
            let weights = script.alloc(layers[layer], COMMUNICATE);
            script.used(weights, COMPUTE);
            model.backward(script, kept, tokens, &[], COMPUTE);
            let gradient = script.alloc(layers[layer], COMPUTE);
            let shard = script.alloc(layers[layer] / 8, COMMUNICATE);
            script.used(gradient, COMMUNICATE);
            script.free(weights);
            script.free(gradient);
            script.free(shard);
        }
        script.pause(20_000);
    }
}

/// A pipeline with virtual stages, one forward and one backward: four stages of two chunks each, seen from
/// the first stage, whose warm-up is the longest.
pub(super) fn pipeline(script: &mut Script, rounds: u64) {
    const STAGES: usize = 4;
    const CHUNKS: usize = 2;
    const BATCHES: usize = 12;
    let model = MEDIUM;
    script.alloc_all(model.weights().into_iter().take(2 + 6 * 12), COMPUTE);
    for step in 0..2 * rounds {
        // Micro batches go in groups of one for each stage, group by group through the chunks.
        let order: Vec<(usize, usize)> = (0..BATCHES / STAGES)
            .flat_map(|group| (0..CHUNKS).flat_map(move |chunk| (0..STAGES).map(move |i| (chunk, group * STAGES + i))))
            .collect();
        let tokens = 2048 + 256 * (step % 3);
        let warm_up = (STAGES - 1) * 2 + (CHUNKS - 1) * STAGES;
        let mut live: HashMap<(usize, usize), Vec<Vec<Id>>> = HashMap::new();
        let mut backward = order.iter().map(|(chunk, batch)| (CHUNKS - 1 - chunk, *batch));
        for (number, &unit) in order.iter().enumerate() {
            forward_unit(script, &mut live, unit, tokens);
            if number >= warm_up
                && let Some(unit) = backward.next()
            {
                backward_unit(script, &mut live, unit, tokens);
            }
        }
        for unit in backward {
            backward_unit(script, &mut live, unit, tokens);
        }
        script.pause(20_000);
    }
}

type Live = HashMap<(usize, usize), Vec<Vec<Id>>>;

fn forward_unit(script: &mut Script, live: &mut Live, unit: (usize, usize), tokens: u64) {
    let received = script.alloc(MEDIUM.stream_of_tokens(tokens), COMMUNICATE);
    script.used(received, COMPUTE);
    let mut kept: Vec<Vec<Id>> = (0..6).map(|_| MEDIUM.forward(script, tokens, COMPUTE)).collect();
    let sent = script.alloc(MEDIUM.stream_of_tokens(tokens), COMPUTE);
    script.used(sent, COMMUNICATE);
    script.free(sent);
    kept.push(vec![received]);
    live.insert(unit, kept);
}

fn backward_unit(script: &mut Script, live: &mut Live, unit: (usize, usize), tokens: u64) {
    let received = script.alloc(MEDIUM.stream_of_tokens(tokens), COMMUNICATE);
    script.used(received, COMPUTE);
    // Each unit's forward comes before its backward, so it is there.
    let mut kept = live.remove(&unit).unwrap_or_default();
    let input = kept.pop().unwrap_or_default();
    for kept in kept.into_iter().rev() {
        MEDIUM.backward(script, kept, tokens, &[], COMPUTE);
    }
    script.free_all(input);
    script.free(received);
}

/// The same work on two streams by turns; then one of them goes quiet.
pub(super) fn quiet_stream(script: &mut Script, rounds: u64) {
    let work = |script: &mut Script, stream: u64| {
        let sizes: Vec<u64> = (0..24).map(|_| script.rng.random_range(4..=48) * MIB).collect();
        let ids = script.alloc_all(sizes, stream);
        script.free_all(ids);
        script.pause(8000);
    };
    for turn in 0..8 * rounds {
        work(script, turn % 2);
    }
    for _ in 0..24 * rounds {
        work(script, 0);
    }
}
