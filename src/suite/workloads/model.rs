//! The tensors of a transformer: what a step of training or serving allocates, in bytes.

use super::script::{Id, Script};

/// Bytes of a number in bf16 and in fp32.
const BF16: u64 = 2;
const FP32: u64 = 4;

/// A decoder.
#[derive(Debug, Clone, Copy)]
pub(super) struct Model {
    pub(super) layers: u64,
    pub(super) hidden: u64,
    /// Width of the feed-forward part.
    pub(super) inner: u64,
    pub(super) heads: u64,
    pub(super) vocabulary: u64,
}

/// About 0.4 billion parameters.
pub(super) const SMALL: Model = Model { layers: 24, hidden: 1024, inner: 4096, heads: 16, vocabulary: 50_304 };
/// About 1.1 billion parameters.
pub(super) const MEDIUM: Model = Model { layers: 22, hidden: 2048, inner: 5632, heads: 32, vocabulary: 32_000 };
/// About 8 billion parameters.
pub(super) const LARGE: Model = Model { layers: 32, hidden: 4096, inner: 14_336, heads: 32, vocabulary: 128_256 };

impl Model {
    /// Weights of one layer in bf16.
    pub(super) fn layer_weights(&self) -> [u64; 6] {
        let (h, f) = (self.hidden, self.inner);
        [h, h * 3 * h, h * h, h, h * f, f * h].map(|count| count * BF16)
    }

    /// All weights in bf16, tensor by tensor.
    pub(super) fn weights(&self) -> Vec<u64> {
        let ends = [self.vocabulary * self.hidden * BF16, self.hidden * BF16];
        let layers = (0..self.layers).flat_map(|_| self.layer_weights());
        ends.into_iter().chain(layers).collect()
    }

    /// Logits of `tokens` in fp32.
    pub(super) fn logits(&self, tokens: u64) -> u64 {
        tokens * self.vocabulary * FP32
    }

    /// What enters and leaves a layer.
    pub(super) fn stream_of_tokens(&self, tokens: u64) -> u64 {
        tokens * self.hidden * BF16
    }

    /// Keys and values of `tokens` in one layer, with as many heads for them as a quarter of all.
    pub(super) fn cache(&self, tokens: u64) -> u64 {
        2 * tokens * self.hidden / 4 * BF16
    }

    /// Activations that one layer keeps for its backward pass.
    fn kept(&self, tokens: u64) -> [u64; 8] {
        let (h, f) = (tokens * self.hidden * BF16, tokens * self.inner * BF16);
        [h, 3 * h, h, tokens * self.heads * FP32, h, h, f, f]
    }

    /// The forward pass of one layer; what it keeps.
    pub(super) fn forward(&self, script: &mut Script, tokens: u64, stream: u64) -> Vec<Id> {
        let mut kept = Vec::new();
        for (number, bytes) in self.kept(tokens).into_iter().enumerate() {
            if number == 2 || number == 6 {
                script.workspace(self.stream_of_tokens(tokens), stream);
            }
            kept.push(script.alloc(bytes, stream));
        }
        kept
    }

    /// The forward pass of one layer that keeps nothing.
    pub(super) fn forward_only(&self, script: &mut Script, tokens: u64, stream: u64) {
        let (h, f) = (tokens * self.hidden * BF16, tokens * self.inner * BF16);
        for sizes in [[h, 3 * h, h], [h, f, f]] {
            let ids = script.alloc_all(sizes, stream);
            script.free_all(ids);
        }
    }

    /// The backward pass of one layer: gradients flow, what was kept goes, `weights` get gradients.
    pub(super) fn backward(
        &self,
        script: &mut Script,
        kept: Vec<Id>,
        tokens: u64,
        weights: &[u64],
        stream: u64,
    ) -> Vec<Id> {
        let mut gradients = Vec::new();
        let mut weights = weights.iter();
        for (id, bytes) in kept.into_iter().zip(self.kept(tokens)).rev() {
            let flowing = script.alloc(bytes, stream);
            script.free(id);
            gradients.extend(weights.next().map(|bytes| script.alloc(*bytes, stream)));
            script.free(flowing);
        }
        gradients
    }

    /// Logits, loss and their gradients.
    pub(super) fn loss(&self, script: &mut Script, tokens: u64, stream: u64) {
        let logits = script.alloc(self.logits(tokens), stream);
        let probabilities = script.alloc(self.logits(tokens), stream);
        script.workspace(tokens * FP32, stream);
        script.free(logits);
        script.workspace(self.stream_of_tokens(tokens), stream);
        script.free(probabilities);
    }

    /// One step of training; the gradients are freed at its end.
    pub(super) fn train(&self, script: &mut Script, tokens: u64, stream: u64) {
        let input = script.alloc(self.stream_of_tokens(tokens), stream);
        let layers: Vec<Vec<Id>> = (0..self.layers).map(|_| self.forward(script, tokens, stream)).collect();
        self.loss(script, tokens, stream);
        let mut gradients = Vec::new();
        for kept in layers.into_iter().rev() {
            gradients.extend(self.backward(script, kept, tokens, &self.layer_weights(), stream));
        }
        script.free(input);
        self.optimise(script, stream);
        script.free_all(gradients);
        script.pause(20_000);
    }

    /// Temporaries of an optimiser that goes through the weights tensor by tensor.
    fn optimise(&self, script: &mut Script, stream: u64) {
        for bytes in self.layer_weights().repeat(self.layers as usize) {
            script.workspace(bytes * FP32 / BF16, stream);
        }
    }

    /// Weights and, in fp32, two moments of each.
    pub(super) fn trainable(&self, script: &mut Script, stream: u64) -> Vec<Id> {
        let weights = self.weights();
        let mut all = script.alloc_all(weights.iter().copied(), stream);
        for bytes in weights {
            all.extend(script.alloc_all([bytes * FP32 / BF16; 2], stream));
        }
        all
    }
}
