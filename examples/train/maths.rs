//! What a training step needs of a device: buffers and a dozen operations on them.

/// Any error, with a text for people.
pub(crate) type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// `count` matrix products `C = alpha op(A) op(B) + beta C`, all matrices in rows. `C` has `rows` rows
/// and `columns` columns; `inner` is what is summed over. Arrays are for A, B and C in this order.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Product {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) inner: usize,
    /// Is A (B) stored as its transpose?
    pub(crate) transposed: [bool; 2],
    /// Elements before the first.
    pub(crate) first: [usize; 3],
    /// Elements from one row to the next.
    pub(crate) lead: [usize; 3],
    /// Elements from one matrix to the next.
    pub(crate) stride: [usize; 3],
    pub(crate) count: usize,
    pub(crate) alpha: f32,
    /// 0: what C held is not read.
    pub(crate) beta: f32,
}

impl Product {
    /// One product of whole matrices without gaps.
    pub(crate) fn new(rows: usize, columns: usize, inner: usize, transposed: [bool; 2]) -> Self {
        let lead = [if transposed[0] { rows } else { inner }, if transposed[1] { inner } else { columns }, columns];
        Self { rows, columns, inner, transposed, first: [0; 3], lead, stride: [0; 3], count: 1, alpha: 1.0, beta: 0.0 }
    }
}

/// A device with memory. Numbers are `f32`, also tokens, which are small whole numbers. Work is done in
/// the order of the calls; a buffer that is dropped goes back to where it came from.
pub(crate) trait Maths {
    /// Numbers in the device's memory.
    type Buffer;

    /// `count` numbers that must be written before they are read.
    fn alloc(&self, count: usize) -> Result<Self::Buffer>;

    fn zeros(&self, count: usize) -> Result<Self::Buffer>;

    fn upload(&self, numbers: &[f32]) -> Result<Self::Buffer>;

    fn download(&self, from: &Self::Buffer) -> Result<Vec<f32>>;

    fn copy(&self, from: &Self::Buffer, to: &mut Self::Buffer) -> Result<()>;

    fn multiply(&self, product: &Product, a: &Self::Buffer, b: &Self::Buffer, c: &mut Self::Buffer) -> Result<()>;

    /// Row of the first table for each token, plus the row of the second for its place in the sequence.
    fn embed(
        &self,
        shape: Shape,
        tokens: &Self::Buffer,
        tables: [&Self::Buffer; 2],
        out: &mut Self::Buffer,
    ) -> Result<()>;

    /// Adds to the gradients of both tables.
    fn embed_back(
        &self,
        shape: Shape,
        tokens: &Self::Buffer,
        gradient: &Self::Buffer,
        tables: [&mut Self::Buffer; 2],
    ) -> Result<()>;

    /// `y = gain x / rms(x)` by rows; `scale` gets `1 / rms(x)` of each row.
    fn norm(
        &self,
        shape: Shape,
        x: &Self::Buffer,
        gain: &Self::Buffer,
        y: &mut Self::Buffer,
        scale: &mut Self::Buffer,
    ) -> Result<()>;

    /// Adds to `dx` and writes `dgain`; `[x, gain, scale]` are those of [`Maths::norm`].
    fn norm_back(
        &self,
        shape: Shape,
        forward: [&Self::Buffer; 3],
        dy: &Self::Buffer,
        dx: &mut Self::Buffer,
        dgain: &mut Self::Buffer,
    ) -> Result<()>;

    /// In place.
    fn relu(&self, count: usize, x: &mut Self::Buffer) -> Result<()>;

    /// In place; `y` is what [`Maths::relu`] left.
    fn relu_back(&self, count: usize, y: &Self::Buffer, gradient: &mut Self::Buffer) -> Result<()>;

    /// In place, for `rows` rows of squares of `length`: row `r` of a square sees its first `r + 1` entries.
    fn softmax(&self, rows: usize, length: usize, scores: &mut Self::Buffer) -> Result<()>;

    /// In place; `chances` is what [`Maths::softmax`] left.
    fn softmax_back(
        &self,
        rows: usize,
        length: usize,
        chances: &Self::Buffer,
        gradient: &mut Self::Buffer,
    ) -> Result<()>;

    /// Writes the loss of each row; the logits become the gradient of the mean of all.
    fn cross_entropy(
        &self,
        shape: Shape,
        logits: &mut Self::Buffer,
        targets: &Self::Buffer,
        losses: &mut Self::Buffer,
    ) -> Result<()>;

    /// One step of Adam (0.9, 0.99) for one tensor; `state` holds both moments.
    fn adam(
        &self,
        step: Step,
        weights: &mut Self::Buffer,
        gradient: &Self::Buffer,
        state: [&mut Self::Buffer; 2],
    ) -> Result<()>;
}

/// Rows of a matrix and what they are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    /// Tokens of the batch: sequences times length.
    pub(crate) rows: usize,
    pub(crate) width: usize,
    /// Tokens of one sequence.
    pub(crate) length: usize,
    pub(crate) vocabulary: usize,
}

/// What [`Maths::adam`] needs besides the tensors.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Step {
    pub(crate) count: usize,
    pub(crate) rate: f32,
    /// 1 - beta^step of both moments.
    pub(crate) corrections: [f32; 2],
}

impl Step {
    /// `number` counts from 1.
    pub(crate) fn new(count: usize, rate: f32, number: usize) -> Self {
        let correction = |beta: f64| (1.0 - beta.powf(number as f64)) as f32;
        Self { count, rate, corrections: [correction(0.9), correction(0.99)] }
    }
}
