//! Trains a small transformer whose every buffer comes from a heap, and checks the losses against the
//! same training without one.
//!
//! ```sh
//! cargo run --release --example train -- --limit 1.12x
//! cargo run --release --features cublas --example train -- --backend cuda --width 1024 --layers 8 --limit 1.05x
//! ```
//!
//! The training without the heap runs first, on `Vec`s or on the driver's own allocations; the most that it
//! has live at once is what factors of `--limit` refer to. Batches have different lengths, so no two steps
//! ask for the same sizes. On a GPU the products are cuBLAS's and the rest are the kernels of
//! `train/kernels.cu`; on the host both are plain Rust. Exits with 1 when the losses differ.

#[cfg(feature = "cublas")]
#[path = "train/cuda.rs"]
mod cuda;
#[path = "train/host.rs"]
pub(crate) mod host;
#[path = "train/maths.rs"]
pub(crate) mod maths;
#[path = "train/memory.rs"]
pub(crate) mod memory;
#[path = "train/model.rs"]
pub(crate) mod model;

use clap::Parser;
use clap::builder::RangedU64ValueParser;
use host::HostMaths;
use maths::{Maths, Result};
use memory::Plain;
use model::{Model, Plan};
use std::io::Write;
use std::process::ExitCode;
use xseg::config::{BackendChoice, Config, SizeOrShare};
use xseg::{Heap, Stats};

const MIB: f64 = (1u64 << 20) as f64;

/// Trains a small transformer on memory of an xseg heap and checks the losses against a run without it.
#[derive(Debug, Parser)]
#[command(name = "train")]
pub(crate) struct Arguments {
    /// Where the training runs: host, or cuda or cuda=N for a GPU
    #[arg(long, default_value = "host")]
    backend: String,
    /// Steps of training
    #[arg(long, default_value_t = 10, value_parser = count())]
    steps: usize,
    /// Most physical memory of the heap: a size such as 64MiB, or a factor such as 1.05x of what the run
    /// without the heap had live at its peak
    #[arg(long, value_name = "SIZE|FACTORx")]
    limit: Option<String>,
    /// Settings of the heap over those of `XSEG_CONF`, in the same form
    #[arg(long, value_name = "CONF")]
    conf: Option<String>,
    /// Layers of the model
    #[arg(long, default_value_t = 2, value_parser = count())]
    layers: usize,
    /// Width of the model, a multiple of the heads
    #[arg(long, default_value_t = 64, value_parser = count())]
    width: usize,
    /// Heads of attention
    #[arg(long, default_value_t = 4, value_parser = count())]
    heads: usize,
    /// Sequences of a batch
    #[arg(long, default_value_t = 16, value_parser = count())]
    batch: usize,
    /// Longest sequence in bytes; each batch has its own length from a quarter of it upwards
    #[arg(long, default_value_t = 256, value_parser = count())]
    longest: usize,
    /// Seed of the first weights and of the batches
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Largest relative difference of two losses; 0: not a bit
    #[arg(long, default_value_t = 0.0)]
    tolerance: f32,
}

/// A count from 1.
fn count() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=8192)
}

fn main() -> ExitCode {
    match run(&Arguments::parse(), &mut std::io::stdout().lock()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("train: {error}");
            ExitCode::from(2)
        }
    }
}

/// Trains without and with the heap; do the losses agree?
pub(crate) fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<bool> {
    let mut config = Config::from_env()?;
    config.apply(arguments.conf.as_deref().unwrap_or(""))?;
    config.apply(&format!("backend:{}", arguments.backend))?;
    let plan = Plan {
        steps: arguments.steps,
        layers: arguments.layers,
        width: arguments.width,
        heads: arguments.heads,
        batch: arguments.batch,
        longest: arguments.longest,
        seed: arguments.seed,
    };
    if !plan.width.is_multiple_of(plan.heads) {
        return Err(format!("--width {} is no multiple of --heads {}", plan.width, plan.heads).into());
    }
    let trained = match config.backend {
        BackendChoice::Host => on_host(arguments, config, &plan, out)?,
        BackendChoice::Cuda(index) => on_gpu(arguments, config, index, &plan, out)?,
        _ => return Err("the training needs memory; give --backend host, cuda or cuda=N".into()),
    };
    let verdict = compare(&trained, arguments.tolerance);
    match &verdict {
        Ok(()) => writeln!(out, "the {} losses with the heap are those without it", trained.with.len())?,
        Err(why) => writeln!(out, "FAILED: {why}")?,
    }
    Ok(verdict.is_ok())
}

/// The losses of both trainings, step by step.
#[derive(Debug)]
pub(crate) struct Trained {
    pub(crate) without: Vec<f32>,
    pub(crate) with: Vec<f32>,
}

fn on_host(arguments: &Arguments, config: Config, plan: &Plan, out: &mut dyn Write) -> Result<Trained> {
    let plain = Plain::default();
    let without = train(&HostMaths(plain.clone()), plan, &mut |_, _, _| Ok(()))?;
    let heap = heap_for(arguments, config, plain.peak(), out)?;
    let with = train(&HostMaths(heap.clone()), plan, &mut |number, length, loss| {
        line(out, number, length, loss, &heap.stats())
    })?;
    closing(out, &heap)?;
    Ok(Trained { without, with })
}

#[cfg(feature = "cublas")]
fn on_gpu(arguments: &Arguments, config: Config, index: u32, plan: &Plan, out: &mut dyn Write) -> Result<Trained> {
    use cuda::{CudaMaths, Gpu};
    let gpu = Gpu::open(index)?;
    let small = Plan { steps: 3, layers: 2, width: 48, heads: 3, batch: 3, longest: 40, seed: plan.seed };
    let maths = Trained {
        without: train(&HostMaths(Plain::default()), &small, &mut |_, _, _| Ok(()))?,
        with: train(&CudaMaths::new(&gpu, Plain::default())?, &small, &mut |_, _, _| Ok(()))?,
    };
    // Sums are added up in other orders, and exponentials rounded otherwise.
    compare(&maths, 1e-3).map_err(|why| format!("the GPU computes otherwise than the host: {why}"))?;
    writeln!(out, "a small model on the GPU has the losses of the host within 0.1 %: {:?}", maths.with)?;

    let plain = Plain::default();
    let without = train(&CudaMaths::new(&gpu, plain.clone())?, plan, &mut |_, _, _| Ok(()))?;
    let heap = heap_for(arguments, config, plain.peak(), out)?;
    let with = train(&CudaMaths::new(&gpu, heap.clone())?, plan, &mut |number, length, loss| {
        line(out, number, length, loss, &heap.stats())
    })?;
    closing(out, &heap)?;
    Ok(Trained { without, with })
}

#[cfg(not(feature = "cublas"))]
fn on_gpu(_: &Arguments, _: Config, _: u32, _: &Plan, _: &mut dyn Write) -> Result<Trained> {
    Err("for a GPU build the example with --features cublas".into())
}

/// A heap with the arguments' limit, and the heading of the lines about it.
fn heap_for(arguments: &Arguments, mut config: Config, peak: u64, out: &mut dyn Write) -> Result<Heap> {
    match arguments.limit.as_deref().map(|limit| (limit, limit.strip_suffix('x'))) {
        Some((limit, Some(factor))) => {
            let factor = factor.parse().ok().filter(|factor| (0.0..1e6).contains(factor));
            let factor: f64 = factor.ok_or_else(|| format!("--limit {limit}: write a factor such as 1.05x"))?;
            config.limit = Some(SizeOrShare::Bytes((peak as f64 * factor) as u64));
        }
        Some((limit, None)) => config.apply(&format!("limit:{limit}"))?,
        None => {}
    }
    config.check()?;
    let heap = Heap::builder().config(config).build()?;
    writeln!(out, "without the heap {:.2} MiB were live at the peak; with it, in MiB:", peak as f64 / MIB)?;
    writeln!(out, "step length   loss    live reserved peak live peak reserved handles moved  moved host waits")?;
    Ok(heap)
}

fn line(out: &mut dyn Write, number: usize, length: usize, loss: f32, stats: &Stats) -> Result<()> {
    let mib = |bytes: u64| bytes as f64 / MIB;
    writeln!(
        out,
        "{number:4} {length:6} {loss:6.4} {:7.2} {:8.2} {:9.2} {:13.2} {:13} {:6.1} {:10}",
        mib(stats.requested),
        mib(stats.reserved),
        mib(stats.peak_requested),
        mib(stats.peak_reserved),
        stats.handles_moved,
        mib(stats.bytes_moved),
        stats.host_waits
    )?;
    Ok(())
}

/// The heap after the training: nothing of it is live, and it is sound.
fn closing(out: &mut dyn Write, heap: &Heap) -> Result<()> {
    let stats = heap.stats();
    if stats.allocated != 0 {
        return Err(format!("{} bytes of the heap are still live after the training", stats.allocated).into());
    }
    heap.check().map_err(|why| format!("an invariant of the heap is broken: {why}"))?;
    let mib = |bytes: u64| bytes as f64 / MIB;
    let ratio = stats.peak_reserved as f64 / stats.peak_requested as f64;
    writeln!(
        out,
        "{} allocations, {:.2} MiB reserved for {:.2} MiB live at the peak: {ratio:.4}; {} out of memory",
        stats.allocs,
        mib(stats.peak_reserved),
        mib(stats.peak_requested),
        stats.ooms
    )?;
    Ok(())
}

/// Trains a new model; calls `each` with the number, the length and the loss of every step.
fn train<M: Maths>(maths: &M, plan: &Plan, each: &mut dyn FnMut(usize, usize, f32) -> Result<()>) -> Result<Vec<f32>> {
    let mut model = Model::new(maths, *plan)?;
    let mut losses = Vec::new();
    for number in 0..plan.steps {
        let batch = plan.batch_of(number);
        let loss = model.step(number, &batch)?;
        each(number, batch.length, loss)?;
        losses.push(loss);
    }
    Ok(losses)
}

/// Are the losses the same, to the bit or within `tolerance` of their size?
pub(crate) fn compare(trained: &Trained, tolerance: f32) -> std::result::Result<(), String> {
    let Trained { without, with } = trained;
    if without.len() != with.len() {
        return Err(format!("{} steps with the heap, {} without", with.len(), without.len()));
    }
    for (number, (a, b)) in without.iter().zip(with).enumerate() {
        let near = a.to_bits() == b.to_bits() || (a - b).abs() <= tolerance * a.abs();
        if !near || !a.is_finite() {
            return Err(format!("step {number}: the loss is {b:?} with the heap and {a:?} without"));
        }
    }
    Ok(())
}
