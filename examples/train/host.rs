//! The operations in plain Rust, on memory of a heap on the host backend or on `Vec`s.

use super::maths::{Maths, Product, Result, Shape, Step};
use super::memory::{Plain, Tally};
use std::ops::{Deref, DerefMut};
use xseg::{Allocation, Heap, StreamId};

/// Where [`HostMaths`] takes its memory from.
pub(crate) trait Source {
    type Buffer: DerefMut<Target = [f32]>;

    fn alloc(&self, count: usize) -> Result<Self::Buffer>;
}

/// Numbers in a block of a heap.
pub(crate) struct Numbers {
    block: Allocation,
    count: usize,
}

impl Deref for Numbers {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        let first = std::ptr::with_exposed_provenance::<f32>(self.block.address() as usize);
        // SAFETY: a live block of the host backend is mapped memory of this process (I8), aligned to 512
        // bytes, of `count` numbers that only this borrow reaches; any bytes are numbers.
        unsafe { std::slice::from_raw_parts(first, self.count) }
    }
}

impl DerefMut for Numbers {
    fn deref_mut(&mut self) -> &mut [f32] {
        let first = std::ptr::with_exposed_provenance_mut::<f32>(self.block.address() as usize);
        // SAFETY: as above, and borrowed for writing.
        unsafe { std::slice::from_raw_parts_mut(first, self.count) }
    }
}

impl Source for Heap {
    type Buffer = Numbers;

    fn alloc(&self, count: usize) -> Result<Numbers> {
        let block = Heap::alloc(self, (count * size_of::<f32>()) as u64, StreamId(0))?;
        Ok(Numbers { block, count })
    }
}

/// A `Vec` that is counted while it lives.
pub(crate) struct Counted {
    numbers: Vec<f32>,
    _tally: Tally,
}

impl Deref for Counted {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.numbers
    }
}

impl DerefMut for Counted {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.numbers
    }
}

impl Source for Plain {
    type Buffer = Counted;

    fn alloc(&self, count: usize) -> Result<Counted> {
        // What is read before it is written spoils the loss.
        Ok(Counted { numbers: vec![f32::NAN; count], _tally: self.count((count * size_of::<f32>()) as u64) })
    }
}

/// See the module's text.
pub(crate) struct HostMaths<S>(pub(crate) S);

/// Sum of products in eight strands, which the compiler turns into vector instructions.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut strands = [0.0f32; 8];
    let (a, a_rest) = a.as_chunks::<8>();
    let (b, b_rest) = b.as_chunks::<8>();
    for (a, b) in a.iter().zip(b) {
        for ((strand, a), b) in strands.iter_mut().zip(a).zip(b) {
            *strand += a * b;
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    strands.iter().sum::<f32>() + rest
}

/// One product; the slices begin at its matrices.
fn multiply_one(product: &Product, a: &[f32], b: &[f32], c: &mut [f32]) {
    let Product { columns, inner, alpha, beta, transposed, lead, .. } = *product;
    let mut left = vec![0.0; inner];
    for row in 0..product.rows {
        for (at, left) in left.iter_mut().enumerate() {
            *left = alpha * if transposed[0] { a[at * lead[0] + row] } else { a[row * lead[0] + at] };
        }
        let out = &mut c[row * lead[2]..][..columns];
        if beta == 0.0 {
            out.fill(0.0);
        } else {
            out.iter_mut().for_each(|out| *out *= beta);
        }
        if transposed[1] {
            for (column, out) in out.iter_mut().enumerate() {
                *out += dot(&left, &b[column * lead[1]..][..inner]);
            }
        } else {
            for (at, left) in left.iter().enumerate() {
                let line = &b[at * lead[1]..][..columns];
                out.iter_mut().zip(line).for_each(|(out, b)| *out += left * b);
            }
        }
    }
}

fn softmax_row(row: &mut [f32]) -> (f32, f32) {
    let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    row.iter_mut().for_each(|x| *x = (*x - most).exp());
    let sum: f32 = row.iter().sum();
    row.iter_mut().for_each(|x| *x /= sum);
    (most, sum)
}

impl<S: Source> Maths for HostMaths<S> {
    type Buffer = S::Buffer;

    fn alloc(&self, count: usize) -> Result<S::Buffer> {
        self.0.alloc(count)
    }

    fn zeros(&self, count: usize) -> Result<S::Buffer> {
        let mut buffer = self.alloc(count)?;
        buffer.fill(0.0);
        Ok(buffer)
    }

    fn upload(&self, numbers: &[f32]) -> Result<S::Buffer> {
        let mut buffer = self.alloc(numbers.len())?;
        buffer.copy_from_slice(numbers);
        Ok(buffer)
    }

    fn download(&self, from: &S::Buffer) -> Result<Vec<f32>> {
        Ok(from.to_vec())
    }

    fn copy(&self, from: &S::Buffer, to: &mut S::Buffer) -> Result<()> {
        to.copy_from_slice(from);
        Ok(())
    }

    fn multiply(&self, product: &Product, a: &S::Buffer, b: &S::Buffer, c: &mut S::Buffer) -> Result<()> {
        for number in 0..product.count {
            let at = [0, 1, 2].map(|side: usize| product.first[side] + number * product.stride[side]);
            multiply_one(product, &a[at[0]..], &b[at[1]..], &mut c[at[2]..]);
        }
        Ok(())
    }

    fn embed(
        &self,
        shape: Shape,
        tokens: &S::Buffer,
        [table, places]: [&S::Buffer; 2],
        out: &mut S::Buffer,
    ) -> Result<()> {
        for (row, (out, token)) in out.chunks_exact_mut(shape.width).zip(tokens.iter()).enumerate() {
            let token = &table[*token as usize * shape.width..];
            let place = &places[row % shape.length * shape.width..];
            out.iter_mut().zip(token.iter().zip(place)).for_each(|(out, (a, b))| *out = a + b);
        }
        Ok(())
    }

    fn embed_back(
        &self,
        shape: Shape,
        tokens: &S::Buffer,
        gradient: &S::Buffer,
        [table, places]: [&mut S::Buffer; 2],
    ) -> Result<()> {
        for (row, (gradient, token)) in gradient.chunks_exact(shape.width).zip(tokens.iter()).enumerate() {
            let token = &mut table[*token as usize * shape.width..];
            token.iter_mut().zip(gradient).for_each(|(sum, d)| *sum += d);
            let place = &mut places[row % shape.length * shape.width..];
            place.iter_mut().zip(gradient).for_each(|(sum, d)| *sum += d);
        }
        Ok(())
    }

    fn norm(
        &self,
        shape: Shape,
        x: &S::Buffer,
        gain: &S::Buffer,
        y: &mut S::Buffer,
        scale: &mut S::Buffer,
    ) -> Result<()> {
        let rows = x.chunks_exact(shape.width).zip(y.chunks_exact_mut(shape.width));
        for ((x, y), scale) in rows.zip(scale.iter_mut()) {
            *scale = 1.0 / (dot(x, x) / shape.width as f32 + 1e-5).sqrt();
            y.iter_mut().zip(x.iter().zip(gain.iter())).for_each(|(y, (x, gain))| *y = x * *scale * gain);
        }
        Ok(())
    }

    fn norm_back(
        &self,
        shape: Shape,
        [x, gain, scale]: [&S::Buffer; 3],
        dy: &S::Buffer,
        dx: &mut S::Buffer,
        dgain: &mut S::Buffer,
    ) -> Result<()> {
        dgain.fill(0.0);
        let rows = dy.chunks_exact(shape.width).zip(dx.chunks_exact_mut(shape.width));
        for ((x, scale), (dy, dx)) in x.chunks_exact(shape.width).zip(scale.iter()).zip(rows) {
            let sum: f32 = x.iter().zip(gain.iter()).zip(dy).map(|((x, gain), dy)| x * gain * dy).sum();
            let shared = sum * scale * scale * scale / shape.width as f32;
            for (column, dx) in dx.iter_mut().enumerate() {
                *dx += scale * gain[column] * dy[column] - shared * x[column];
                dgain[column] += x[column] * scale * dy[column];
            }
        }
        Ok(())
    }

    fn relu(&self, count: usize, x: &mut S::Buffer) -> Result<()> {
        x[..count].iter_mut().for_each(|x| *x = x.max(0.0));
        Ok(())
    }

    fn relu_back(&self, count: usize, y: &S::Buffer, gradient: &mut S::Buffer) -> Result<()> {
        let shut = gradient[..count].iter_mut().zip(y.iter()).filter(|(_, y)| **y <= 0.0);
        shut.for_each(|(d, _)| *d = 0.0);
        Ok(())
    }

    fn softmax(&self, rows: usize, length: usize, scores: &mut S::Buffer) -> Result<()> {
        for row in 0..rows {
            let (seen, unseen) = scores[row * length..][..length].split_at_mut(row % length + 1);
            softmax_row(seen);
            unseen.fill(0.0);
        }
        Ok(())
    }

    fn softmax_back(&self, rows: usize, length: usize, chances: &S::Buffer, gradient: &mut S::Buffer) -> Result<()> {
        for row in 0..rows {
            let chances = &chances[row * length..][..length];
            let gradient = &mut gradient[row * length..][..length];
            let sum = dot(chances, gradient);
            gradient.iter_mut().zip(chances).for_each(|(d, chance)| *d = chance * (*d - sum));
        }
        Ok(())
    }

    fn cross_entropy(
        &self,
        shape: Shape,
        logits: &mut S::Buffer,
        targets: &S::Buffer,
        losses: &mut S::Buffer,
    ) -> Result<()> {
        let rows = logits.chunks_exact_mut(shape.vocabulary).zip(targets.iter());
        for ((row, target), loss) in rows.zip(losses.iter_mut()) {
            let target = *target as usize;
            let right = row[target];
            let (most, sum) = softmax_row(row);
            *loss = sum.ln() + most - right;
            row[target] -= 1.0;
            row.iter_mut().for_each(|x| *x /= shape.rows as f32);
        }
        Ok(())
    }

    fn adam(
        &self,
        step: Step,
        weights: &mut S::Buffer,
        gradient: &S::Buffer,
        [first, second]: [&mut S::Buffer; 2],
    ) -> Result<()> {
        let moments = first.iter_mut().zip(second.iter_mut());
        for ((weight, g), (first, second)) in weights[..step.count].iter_mut().zip(gradient.iter()).zip(moments) {
            *first = 0.9 * *first + 0.1 * g;
            *second = 0.99 * *second + 0.01 * g * g;
            let [left, right] = step.corrections;
            *weight -= step.rate * (*first / left) / ((*second / right).sqrt() + 1e-8);
        }
        Ok(())
    }
}
