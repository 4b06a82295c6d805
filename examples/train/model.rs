//! A small transformer that learns the next byte of a text: forward, backward, Adam. It knows nothing
//! of where its memory comes from.

use super::maths::{Maths, Product, Result, Shape, Step};

/// What is learned: the bytes of a text.
const TEXT: &[u8] = include_bytes!("../../LICENSE-APACHE");
/// Tokens are ASCII.
const VOCABULARY: usize = 128;

/// What is trained, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) steps: usize,
    pub(crate) layers: usize,
    pub(crate) width: usize,
    pub(crate) heads: usize,
    /// Sequences of a batch.
    pub(crate) batch: usize,
    /// Longest sequence; each batch has its own length from a quarter of it upwards.
    pub(crate) longest: usize,
    pub(crate) seed: u64,
}

/// A batch: each sequence and what follows each of its tokens.
#[derive(Debug)]
pub(crate) struct Batch {
    pub(crate) length: usize,
    tokens: Vec<f32>,
    targets: Vec<f32>,
}

/// The `SplitMix64` sequence.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        word ^ (word >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    /// Uniform, mean 0, with this standard deviation.
    fn spread(&mut self, deviation: f32) -> f32 {
        let unit = (self.next() >> 40) as f32 / (1u32 << 24) as f32;
        (2.0 * unit - 1.0) * deviation * 3f32.sqrt()
    }
}

impl Plan {
    /// The batch of a step, always the same one.
    pub(crate) fn batch_of(&self, step: usize) -> Batch {
        let mut random = Random(self.seed ^ (step as u64) << 32);
        let least = (self.longest / 4).max(1);
        let length = least + random.below(self.longest - least + 1);
        let (mut tokens, mut targets) = (Vec::new(), Vec::new());
        for _ in 0..self.batch {
            let at = random.below(TEXT.len() - length);
            tokens.extend(TEXT[at..at + length].iter().map(|byte| f32::from(*byte)));
            targets.extend(TEXT[at + 1..=at + length].iter().map(|byte| f32::from(*byte)));
        }
        Batch { length, tokens, targets }
    }
}

/// A trained tensor with its moments.
pub(crate) struct Tensor<B> {
    pub(crate) weights: B,
    moments: [B; 2],
    count: usize,
}

/// Places of a layer's tensors after those of the layers before it.
const GAIN_1: usize = 0;
const QKV: usize = 1;
const MIX: usize = 2;
const GAIN_2: usize = 3;
const UP: usize = 4;
const DOWN: usize = 5;
const PER_LAYER: usize = 6;
/// The tables of tokens and of places, and the last gain, come before the layers.
const TABLE: usize = 0;
const PLACES: usize = 1;
const GAIN: usize = 2;
const SHARED: usize = 3;

/// The model on a device.
pub(crate) struct Model<'a, M: Maths> {
    maths: &'a M,
    plan: Plan,
    pub(crate) tensors: Vec<Tensor<M::Buffer>>,
}

/// What the forward pass of a layer leaves for the backward pass.
struct Trail<B> {
    x: B,
    scale_1: B,
    normed_1: B,
    qkv: B,
    chances: B,
    mixed: B,
    middle: B,
    scale_2: B,
    normed_2: B,
    hidden: B,
}

fn layer(number: usize, tensor: usize) -> usize {
    SHARED + PER_LAYER * number + tensor
}

impl<'a, M: Maths> Model<'a, M> {
    /// Tensors filled by the plan's seed.
    pub(crate) fn new(maths: &'a M, plan: Plan) -> Result<Self> {
        let wide = plan.width;
        let square = (wide * wide, Some((wide as f32).recip().sqrt()));
        let gain = (wide, None);
        let mut shapes = vec![(VOCABULARY * wide, Some(0.05)), (plan.longest * wide, Some(0.05)), gain];
        for _ in 0..plan.layers {
            shapes.extend([
                gain,
                (3 * square.0, square.1),
                square,
                gain,
                (4 * square.0, square.1),
                (4 * square.0, Some((4.0 * wide as f32).recip().sqrt())),
            ]);
        }
        let mut random = Random(plan.seed);
        let mut tensors = Vec::new();
        for (count, deviation) in shapes {
            let first: Vec<f32> =
                (0..count).map(|_| deviation.map_or(1.0, |deviation| random.spread(deviation))).collect();
            let moments = [maths.zeros(count)?, maths.zeros(count)?];
            tensors.push(Tensor { weights: maths.upload(&first)?, moments, count });
        }
        Ok(Self { maths, plan, tensors })
    }

    fn weights(&self, index: usize) -> &M::Buffer {
        &self.tensors[index].weights
    }

    fn shape(&self, batch: &Batch) -> Shape {
        Shape { rows: batch.tokens.len(), width: self.plan.width, length: batch.length, vocabulary: VOCABULARY }
    }

    /// `C = op(A) op(B)` of whole matrices, into a new buffer.
    fn product(
        &self,
        [rows, columns, inner]: [usize; 3],
        transposed: [bool; 2],
        a: &M::Buffer,
        b: &M::Buffer,
    ) -> Result<M::Buffer> {
        let mut out = self.maths.alloc(rows * columns)?;
        self.maths.multiply(&Product::new(rows, columns, inner, transposed), a, b, &mut out)?;
        Ok(out)
    }

    /// `x + A B`, into a new buffer.
    fn added(&self, x: &M::Buffer, [rows, inner]: [usize; 2], a: &M::Buffer, b: &M::Buffer) -> Result<M::Buffer> {
        let mut out = self.maths.alloc(rows * self.plan.width)?;
        self.maths.copy(x, &mut out)?;
        let product = Product { beta: 1.0, ..Product::new(rows, self.plan.width, inner, [false; 2]) };
        self.maths.multiply(&product, a, b, &mut out)?;
        Ok(out)
    }

    /// The products of attention: for each sequence, one for each head. `C` and `A` or `B` are columns of
    /// `matrix`-shaped buffers or squares of scores, as `sides` says for A, B and C.
    fn attention(
        &self,
        batch: &Batch,
        product: Product,
        sides: [Side; 3],
        a: &M::Buffer,
        b: &M::Buffer,
        c: &mut M::Buffer,
    ) -> Result<()> {
        let (length, head) = (batch.length, self.plan.width / self.plan.heads);
        for sequence in 0..self.plan.batch {
            let mut product = Product { count: self.plan.heads, ..product };
            for (place, side) in sides.into_iter().enumerate() {
                (product.first[place], product.lead[place], product.stride[place]) = match side {
                    Side::Columns { first, of } => (sequence * length * of + first, of, head),
                    Side::Scores => (sequence * self.plan.heads * length * length, length, length * length),
                };
            }
            self.maths.multiply(&product, a, b, c)?;
        }
        Ok(())
    }

    /// The three column ranges of `qkv`, and the columns of a matrix as wide as the model.
    fn sides(&self) -> [Side; 4] {
        let wide = self.plan.width;
        let part = |first: usize| Side::Columns { first: first * wide, of: 3 * wide };
        [part(0), part(1), part(2), Side::Columns { first: 0, of: wide }]
    }

    fn forward_layer(&self, batch: &Batch, number: usize, x: M::Buffer) -> Result<(Trail<M::Buffer>, M::Buffer)> {
        let (maths, shape) = (self.maths, self.shape(batch));
        let Shape { rows, width, length, .. } = shape;
        let weights = |tensor| self.weights(layer(number, tensor));
        let (mut normed_1, mut scale_1) = (maths.alloc(rows * width)?, maths.alloc(rows)?);
        maths.norm(shape, &x, weights(GAIN_1), &mut normed_1, &mut scale_1)?;
        let qkv = self.product([rows, 3 * width, width], [false; 2], &normed_1, weights(QKV))?;

        let head = width / self.plan.heads;
        let squares = rows * self.plan.heads;
        let [q, k, v, own] = self.sides();
        let mut chances = maths.alloc(squares * length)?;
        let scores =
            Product { alpha: (head as f32).recip().sqrt(), ..Product::new(length, length, head, [false, true]) };
        self.attention(batch, scores, [q, k, Side::Scores], &qkv, &qkv, &mut chances)?;
        maths.softmax(squares, length, &mut chances)?;
        let mut mixed = maths.alloc(rows * width)?;
        let mix = Product::new(length, head, length, [false; 2]);
        self.attention(batch, mix, [Side::Scores, v, own], &chances, &qkv, &mut mixed)?;

        let middle = self.added(&x, [rows, width], &mixed, weights(MIX))?;
        let (mut normed_2, mut scale_2) = (maths.alloc(rows * width)?, maths.alloc(rows)?);
        maths.norm(shape, &middle, weights(GAIN_2), &mut normed_2, &mut scale_2)?;
        let mut hidden = self.product([rows, 4 * width, width], [false; 2], &normed_2, weights(UP))?;
        maths.relu(rows * 4 * width, &mut hidden)?;
        let out = self.added(&middle, [rows, 4 * width], &hidden, weights(DOWN))?;
        let trail = Trail { x, scale_1, normed_1, qkv, chances, mixed, middle, scale_2, normed_2, hidden };
        Ok((trail, out))
    }

    /// Turns the gradient of the layer's output into that of its input; gives those of its tensors.
    fn backward_layer(
        &self,
        batch: &Batch,
        number: usize,
        trail: Trail<M::Buffer>,
        dx: &mut M::Buffer,
    ) -> Result<[M::Buffer; PER_LAYER]> {
        let (maths, shape) = (self.maths, self.shape(batch));
        let Shape { rows, width, length, .. } = shape;
        let weights = |tensor| self.weights(layer(number, tensor));
        let (left, right) = ([true, false], [false, true]);

        let mut dhidden = self.product([rows, 4 * width, width], right, dx, weights(DOWN))?;
        let down = self.product([4 * width, width, rows], left, &trail.hidden, dx)?;
        maths.relu_back(rows * 4 * width, &trail.hidden, &mut dhidden)?;
        drop(trail.hidden);
        let up = self.product([width, 4 * width, rows], left, &trail.normed_2, &dhidden)?;
        let dnormed = self.product([rows, width, 4 * width], right, &dhidden, weights(UP))?;
        drop((dhidden, trail.normed_2));
        let mut gain_2 = maths.alloc(width)?;
        let forward = [&trail.middle, weights(GAIN_2), &trail.scale_2];
        maths.norm_back(shape, forward, &dnormed, dx, &mut gain_2)?;
        drop((dnormed, trail.middle));

        let dmixed = self.product([rows, width, width], right, dx, weights(MIX))?;
        let mix = self.product([width, width, rows], left, &trail.mixed, dx)?;
        drop(trail.mixed);
        let head = width / self.plan.heads;
        let squares = rows * self.plan.heads;
        let [q, k, v, own] = self.sides();
        let mut dqkv = maths.alloc(rows * 3 * width)?;
        let mut dscores = maths.alloc(squares * length)?;
        let by_value = Product::new(length, length, head, right);
        self.attention(batch, by_value, [own, v, Side::Scores], &dmixed, &trail.qkv, &mut dscores)?;
        let transposed = Product::new(length, head, length, left);
        self.attention(batch, transposed, [Side::Scores, own, v], &trail.chances, &dmixed, &mut dqkv)?;
        maths.softmax_back(squares, length, &trail.chances, &mut dscores)?;
        drop((trail.chances, dmixed));
        let alpha = (head as f32).recip().sqrt();
        let by_key = Product { alpha, ..Product::new(length, head, length, [false; 2]) };
        self.attention(batch, by_key, [Side::Scores, k, q], &dscores, &trail.qkv, &mut dqkv)?;
        let by_query = Product { alpha, ..transposed };
        self.attention(batch, by_query, [Side::Scores, q, k], &dscores, &trail.qkv, &mut dqkv)?;
        drop((dscores, trail.qkv));

        let qkv = self.product([width, 3 * width, rows], left, &trail.normed_1, &dqkv)?;
        drop(trail.normed_1);
        let dnormed = self.product([rows, width, 3 * width], right, &dqkv, weights(QKV))?;
        drop(dqkv);
        let mut gain_1 = maths.alloc(width)?;
        let forward = [&trail.x, weights(GAIN_1), &trail.scale_1];
        maths.norm_back(shape, forward, &dnormed, dx, &mut gain_1)?;
        Ok([gain_1, qkv, mix, gain_2, up, down])
    }

    /// The mean loss of a batch and the gradients of all tensors, in their order.
    pub(crate) fn gradients(&self, batch: &Batch) -> Result<(f32, Vec<M::Buffer>)> {
        let (maths, shape) = (self.maths, self.shape(batch));
        let Shape { rows, width, .. } = shape;
        let tokens = maths.upload(&batch.tokens)?;
        let mut x = maths.alloc(rows * width)?;
        maths.embed(shape, &tokens, [self.weights(TABLE), self.weights(PLACES)], &mut x)?;
        let mut trails = Vec::new();
        for number in 0..self.plan.layers {
            let (trail, out) = self.forward_layer(batch, number, x)?;
            trails.push(trail);
            x = out;
        }
        let (mut normed, mut scale) = (maths.alloc(rows * width)?, maths.alloc(rows)?);
        maths.norm(shape, &x, self.weights(GAIN), &mut normed, &mut scale)?;
        // The table of tokens serves for the output too.
        let mut logits = self.product([rows, VOCABULARY, width], [false, true], &normed, self.weights(TABLE))?;
        let mut losses = maths.alloc(rows)?;
        maths.cross_entropy(shape, &mut logits, &maths.upload(&batch.targets)?, &mut losses)?;
        let losses = maths.download(&losses)?;
        let loss = (losses.iter().map(|loss| f64::from(*loss)).sum::<f64>() / rows as f64) as f32;

        let mut table = self.product([VOCABULARY, width, rows], [true, false], &logits, &normed)?;
        let dnormed = self.product([rows, width, VOCABULARY], [false; 2], &logits, self.weights(TABLE))?;
        drop((logits, normed));
        let mut dx = maths.zeros(rows * width)?;
        let mut gain = maths.alloc(width)?;
        maths.norm_back(shape, [&x, self.weights(GAIN), &scale], &dnormed, &mut dx, &mut gain)?;
        drop((x, dnormed));
        let mut layers = Vec::new();
        for (number, trail) in trails.into_iter().enumerate().rev() {
            layers.push(self.backward_layer(batch, number, trail, &mut dx)?);
        }
        let mut places = maths.zeros(self.plan.longest * width)?;
        maths.embed_back(shape, &tokens, &dx, [&mut table, &mut places])?;
        Ok((loss, [table, places, gain].into_iter().chain(layers.into_iter().rev().flatten()).collect()))
    }

    /// One step of training, numbered from 0; the loss before it.
    pub(crate) fn step(&mut self, number: usize, batch: &Batch) -> Result<f32> {
        let (loss, gradients) = self.gradients(batch)?;
        for (tensor, gradient) in self.tensors.iter_mut().zip(gradients) {
            let step = Step::new(tensor.count, 3e-3, number + 1);
            let [first, second] = &mut tensor.moments;
            self.maths.adam(step, &mut tensor.weights, &gradient, [first, second])?;
        }
        Ok(loss)
    }
}

/// Where a matrix of [`Model::attention`] lies.
#[derive(Debug, Clone, Copy)]
enum Side {
    /// A head's columns, from `first` on, of a matrix with `of` columns.
    Columns { first: usize, of: usize },
    /// A head's square of scores.
    Scores,
}
