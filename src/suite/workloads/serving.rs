//! Serving, generation, and training by turns with it.

use super::model::{LARGE, MEDIUM, Model, SMALL};
use super::script::{Id, Script};
use crate::units::MIB;
use rand::RngExt;
use rand_distr::{Distribution, LogNormal, Poisson};

/// One request under way: its cache in each layer group, and how many tokens it holds and will hold.
#[derive(Debug)]
struct Request {
    cache: Vec<Id>,
    tokens: u64,
    room: u64,
    end: u64,
}

/// Layers whose caches one block holds.
const GROUP: u64 = 8;
/// Tokens by which a cache grows.
const GROWTH: u64 = 256;

fn cache(model: &Model, script: &mut Script, room: u64, stream: u64) -> Vec<Id> {
    script.alloc_all((0..model.layers / GROUP).map(|_| GROUP * model.cache(room)), stream)
}

impl Request {
    fn start(model: &Model, script: &mut Script, prompt: u64, answer: u64, stream: u64) -> Self {
        let room = prompt.next_multiple_of(GROWTH);
        let cache = cache(model, script, room, stream);
        model.forward_only(script, prompt, stream);
        Self { cache, tokens: prompt, room, end: prompt + answer }
    }

    /// Appends `tokens`; a full cache is copied into a larger one, block by block.
    fn grow(&mut self, model: &Model, script: &mut Script, tokens: u64, stream: u64) {
        self.tokens += tokens;
        if self.tokens > self.room {
            self.room = self.tokens.next_multiple_of(GROWTH);
            for id in &mut self.cache {
                let larger = script.alloc(GROUP * model.cache(self.room), stream);
                script.free(std::mem::replace(id, larger));
            }
        }
    }
}

/// Requests that come at random, whose caches grow as they are answered.
pub(super) fn growing_cache(script: &mut Script, rounds: u64) -> Result<(), String> {
    script.alloc_all(LARGE.weights(), 0);
    serve(script, &LARGE, 80 * rounds, 20, 0)
}

fn serve(script: &mut Script, model: &Model, steps: u64, most: usize, stream: u64) -> Result<(), String> {
    let arrivals = Poisson::new(0.9).map_err(|error| error.to_string())?;
    let prompts = LogNormal::new(6.5, 0.8).map_err(|error| error.to_string())?;
    let answers = LogNormal::new(5.7, 0.7).map_err(|error| error.to_string())?;
    let mut requests: Vec<Request> = Vec::new();
    for _ in 0..steps {
        let come = arrivals.sample(&mut script.rng) as usize;
        for _ in 0..come.min(most.saturating_sub(requests.len())) {
            let prompt = (prompts.sample(&mut script.rng) as u64).clamp(16, 8192);
            let answer = (answers.sample(&mut script.rng) as u64).clamp(16, 2048);
            requests.push(Request::start(model, script, prompt, answer, stream));
        }
        let logits = script.alloc(model.logits(requests.len() as u64), stream);
        model.forward_only(script, 1 + requests.len() as u64, stream);
        requests.iter_mut().for_each(|request| request.grow(model, script, 32, stream));
        script.free(logits);
        let (done, going) = requests.into_iter().partition::<Vec<_>, _>(|request| request.tokens >= request.end);
        requests = going;
        script.free_all(done.into_iter().flat_map(|request| request.cache));
        script.pause(3000);
    }
    script.free_all(requests.into_iter().flat_map(|request| request.cache));
    Ok(())
}

/// Reinforcement learning: answers are generated with growing caches, all of that goes, then the model is
/// trained on them.
pub(super) fn generate_then_train(script: &mut Script, rounds: u64) {
    MEDIUM.trainable(script, 0);
    for _ in 0..2 * rounds {
        let lengths: Vec<u64> = (0..16).map(|_| script.rng.random_range(200..=2000)).collect();
        let mut requests: Vec<Request> =
            lengths.iter().map(|length| Request::start(&MEDIUM, script, 128, *length, 0)).collect();
        while let Some(longest) = requests.iter().map(|request| request.end.saturating_sub(request.tokens)).max()
            && longest > 0
        {
            for request in requests.iter_mut().filter(|request| request.tokens < request.end) {
                request.grow(&MEDIUM, script, 128, 0);
            }
            script.workspace(MEDIUM.logits(16), 0);
        }
        script.free_all(requests.into_iter().flat_map(|request| request.cache));
        script.pause(10_000);
        for batch in lengths.chunks(4) {
            let longest = batch.iter().max().copied().unwrap_or(0);
            MEDIUM.train(script, 4 * (128 + longest), 0);
        }
    }
}

/// Inference of a large model with bursts of long prompts.
pub(super) fn large_inference(script: &mut Script, rounds: u64) {
    script.alloc_all(LARGE.weights(), 0);
    for _ in 0..30 * rounds {
        let prompt = 128 * script.rng.random_range(4..=96);
        let cache = cache(&LARGE, script, prompt, 0);
        for _ in 0..LARGE.layers {
            LARGE.forward_only(script, prompt, 0);
        }
        let answers = script.rng.random_range(1..=64);
        script.workspace(LARGE.logits(answers), 0);
        script.free_all(cache);
        script.pause(5000);
    }
}

/// A small training run and a server on one card, on streams of their own.
pub(super) fn mixed(script: &mut Script, rounds: u64) -> Result<(), String> {
    SMALL.trainable(script, 0);
    script.alloc_all(MEDIUM.weights(), 1);
    for _ in 0..4 * rounds {
        let tokens = 512 * script.rng.random_range(2..=8);
        SMALL.train(script, tokens, 0);
        serve(script, &MEDIUM, 12, 8, 1)?;
        let shared = script.rng.random_range(8..=96) * MIB;
        script.workspace(shared, 0);
    }
    Ok(())
}
