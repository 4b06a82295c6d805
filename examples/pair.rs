//! Pairs of `alloc` and `free` on the simulated device, for counting instructions (`.ci/instructions`).
//!
//! `pair SIZE PAIRS` frees and allocates one size, `pair churn PAIRS` random sizes up to 1 MiB among 10,000 live blocks.
//! Twice the pairs cost twice the instructions and one start of the program, so that the difference is what pairs cost.

use xseg::units::{MIB, UNIT};
use xseg::{Heap, StreamId};

const STREAM: StreamId = StreamId(7);

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, what, pairs] = &arguments[..] else { return Err("usage: pair SIZE|churn PAIRS".into()) };
    let pairs: u64 = pairs.parse()?;
    let heap = Heap::builder().conf("backend:sim")?.build()?;
    if what == "churn" {
        return churn(&heap, pairs);
    }
    let bytes = what.parse()?;
    let kept = heap.alloc_raw(bytes, STREAM)?;
    for _ in 0..pairs {
        heap.free_raw(heap.alloc_raw(bytes, STREAM)?)?;
    }
    Ok(heap.free_raw(kept)?)
}

fn churn(heap: &Heap, pairs: u64) -> Result<(), Box<dyn std::error::Error>> {
    let mut seed = 1_u64;
    let mut random = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        seed >> 32
    };
    let sizes: Vec<u64> =
        (0..4096).map(|_| ((MIB / UNIT) as f64).powf(random() as f64 / 2_f64.powi(32)) as u64 * UNIT).collect();
    let mut live: Vec<u64> = Vec::new();
    for index in 0..10_000 {
        live.push(heap.alloc_raw(sizes[index % sizes.len()], STREAM)?);
    }
    for _ in 0..pairs {
        let number = random() as usize;
        let place = number % live.len();
        heap.free_raw(live[place])?;
        live[place] = heap.alloc_raw(sizes[number / live.len() % sizes.len()], STREAM)?;
    }
    Ok(())
}
