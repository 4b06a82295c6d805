//! The kinds of allocation that CUDA has: who can reach them, and what they cost on this GPU.

use super::super::report::Table;
use crate::backend::{Backend, StreamId};
use crate::heap::Heap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Sizes of the table of costs, in MiB.
const SIZES: [u64; 3] = [1, 16, 128];

/// What was measured on a GPU. Pairs of times: allocation and free.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Measured {
    pub(crate) device: String,
    /// 1000 × 1 MiB, and 1 × 1 GiB, by `cuMemAlloc`.
    pub(super) many: (Duration, Duration),
    pub(super) one: (Duration, Duration),
    /// An allocation and a free of 1 MiB, by `cuMemAlloc` and by `cuMemAllocAsync`.
    pub(super) device_pair: Duration,
    pub(super) pool_pair: Duration,
    /// The same of 128 MiB.
    pub(super) buffer_device: Duration,
    pub(super) buffer_pool: Duration,
    /// Both by a heap on this GPU.
    pub(super) heap_pair: Duration,
    pub(super) buffer_heap: Duration,
    /// For each kind, by the order of [`KINDS`], the costs at [`SIZES`].
    pub(super) kinds: Vec<[(Duration, Duration); 3]>,
}

/// One kind: its name, its call, and who can reach it: the host, this GPU, other GPUs, other processes.
struct Reach {
    name: &'static str,
    call: &'static str,
    reach: [&'static str; 4],
}

const fn pinned(name: &'static str, call: &'static str, host: &'static str) -> Reach {
    Reach { name, call, reach: [host, "yes, over the bus", "yes, over the bus", "by registering shared memory"] }
}

/// With unified addressing every pinned allocation is portable and mapped, whatever its flags.
const KINDS: [Reach; 7] = [
    Reach { name: "device", call: "cudaMalloc", reach: ["no", "yes", "with peer access", "by IPC handle"] },
    Reach {
        name: "pool",
        call: "cudaMallocAsync",
        reach: ["no", "yes, in stream order", "by access set on the pool", "from pools made to be shared"],
    },
    Reach {
        name: "managed",
        call: "cudaMallocManaged",
        reach: ["yes, pages move", "yes, pages move", "yes, pages move", "no"],
    },
    pinned("pinned, default", "cudaHostAlloc(0)", "yes"),
    pinned("pinned, portable", "cudaHostAlloc(Portable)", "yes"),
    pinned("pinned, mapped", "cudaHostAlloc(Mapped)", "yes"),
    pinned("pinned, write-combined", "cudaHostAlloc(WriteCombined)", "yes, reads are slow"),
];

/// Two tables: who can reach what, and the costs.
pub(super) fn kinds(gpu: Option<&Measured>) -> [Table; 2] {
    let mut reach = Table::new(
        "Four kinds of allocation: who can reach them",
        "From CUDA's documentation, with unified addressing, under which pinned memory is portable and mapped whatever its flags.",
        &["kind", "call", "host", "this GPU", "other GPUs", "other processes"],
    );
    let headings: Vec<String> =
        SIZES.iter().flat_map(|mib| [format!("{mib} MiB: allocate µs"), format!("{mib} MiB: free µs")]).collect();
    let headings: Vec<&str> = std::iter::once("kind").chain(headings.iter().map(String::as_str)).collect();
    let mut costs = Table::new(
        "Four kinds of allocation: what they cost",
        &format!(
            "measured here on {}. Once on an H200: 64 MiB of pinned memory in 31.8 ms.",
            gpu.map_or("no GPU", |gpu| &gpu.device)
        ),
        &headings,
    );
    for (number, kind) in KINDS.iter().enumerate() {
        let cells = [kind.name, kind.call].into_iter().chain(kind.reach);
        reach.row(cells.map(str::to_owned));
        let found = gpu.and_then(|gpu| gpu.kinds.get(number));
        let cells = (0..SIZES.len()).flat_map(|size| {
            let micros = |time: Duration| format!("{:.1}", time.as_secs_f64() * 1e6);
            found.map_or_else(
                || ["–".to_owned(), "–".to_owned()],
                |costs| [micros(costs[size].0), micros(costs[size].1)],
            )
        });
        costs.row(std::iter::once(kind.name.to_owned()).chain(cells));
    }
    [reach, costs]
}

/// Measures on the first GPU.
///
/// # Errors
/// Why that cannot be, in words.
#[cfg(feature = "cuda")]
pub(crate) fn measured() -> Result<Measured, String> {
    use crate::backend::cuda::kinds::Kind;
    use crate::backend::cuda::{CudaBackend, CudaOptions};
    use crate::units::{GIB, MIB};

    let text = |error: crate::error::DriverError| error.to_string();
    let gpu = Arc::new(CudaBackend::open(0, &CudaOptions::default()).map_err(|error| error.to_string())?);
    let batch = |count, bytes| -> Result<(Duration, Duration), String> {
        let cost = gpu.time_kind_batch(Kind::Device, bytes, count, 3).map_err(text)?;
        Ok((cost.allocate, cost.free))
    };
    let pair = |kind, bytes, rounds| -> Result<Duration, String> {
        let cost = gpu.time_kind(kind, bytes, rounds).map_err(text)?;
        Ok(cost.allocate + cost.free)
    };
    let order =
        [Kind::Device, Kind::Pool, Kind::Managed, Kind::Pinned(0), Kind::Pinned(1), Kind::Pinned(2), Kind::Pinned(4)];
    let mut kinds = Vec::new();
    for kind in order {
        let mut costs = [(Duration::ZERO, Duration::ZERO); SIZES.len()];
        for (cost, mib) in costs.iter_mut().zip(SIZES) {
            let found = gpu.time_kind(kind, mib * MIB, 15).map_err(text)?;
            *cost = (found.allocate, found.free);
        }
        kinds.push(costs);
    }
    Ok(Measured {
        device: gpu.capabilities().device.clone(),
        many: batch(1000, MIB)?,
        one: batch(1, GIB)?,
        device_pair: pair(Kind::Device, MIB, 1000)?,
        pool_pair: pair(Kind::Pool, MIB, 10_000)?,
        buffer_device: pair(Kind::Device, 128 * MIB, 100)?,
        buffer_pool: pair(Kind::Pool, 128 * MIB, 1000)?,
        heap_pair: through_heap(gpu.clone(), MIB, 10_000)?,
        buffer_heap: through_heap(gpu, 128 * MIB, 1000)?,
        kinds,
    })
}

/// A pair through a heap with the default policy, the mean of `rounds` with the first, which creates the memory.
fn through_heap(backend: Arc<dyn Backend>, bytes: u64, rounds: u32) -> Result<Duration, String> {
    let heap = Heap::builder().backend(backend).build().map_err(|error| error.to_string())?;
    let start = Instant::now();
    for _ in 0..rounds {
        drop(heap.alloc(bytes, StreamId(0)).map_err(|error| error.to_string())?);
    }
    Ok(start.elapsed() / rounds)
}

/// Built without the backend.
///
/// # Errors
/// Always.
#[cfg(not(feature = "cuda"))]
pub(crate) fn measured() -> Result<Measured, String> {
    Err("xseg was built without the `cuda` feature".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::sim::{SimBackend, SimOptions};
    use crate::units::MIB;

    #[test]
    fn a_heap_serves_pairs_and_gives_everything_back() {
        let sim = Arc::new(SimBackend::new(SimOptions::default()));
        assert!(through_heap(sim.clone(), MIB, 1000).unwrap() > Duration::ZERO);
        assert_eq!((sim.handle_count(), sim.reservation_count()), (0, 0));
        let refused = through_heap(sim, u64::MAX, 1).unwrap_err();
        assert!(refused.contains("no address range"), "{refused}");
    }
}
