//! Moving against copying: GB/s of remapping by handle size, by bare driver calls and through the heap,
//! beside a copy of the same bytes.

use super::Progress;
use super::report::Table;
use crate::backend::driver::Driver;
use crate::backend::host::{HostBackend, HostOptions};
use crate::backend::{Backend, BackendKind, StreamId};
use crate::heap::{Allocation, Heap};
use crate::units::MIB;
use serde::Serialize;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Handle sizes in MiB.
const SIZES: [u64; 10] = [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];
/// Largest one in a quick run.
const QUICK_MAX: u64 = 64;
/// Largest one on host memory, whose pages the system gives one by one: two of more take longer than they tell.
const HOST_MAX: u64 = 128;
/// Memory that is moved or copied in one round, at least two handles; a quarter of it in a quick run.
const WORKING_SET: u64 = 128 * MIB;
/// Rounds of one measurement: the most, and the least, after which none is begun once enough time is gone.
const ROUNDS: usize = 7;
const FEWEST: usize = 3;
const ENOUGH: Duration = Duration::from_millis(200);

/// One handle size. Rates count each byte once.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Rate {
    pub(crate) handle_mib: u64,
    /// Microseconds of one bare remap.
    pub(crate) bare_us: f64,
    pub(crate) bare_gb_s: f64,
    pub(crate) heap_gb_s: f64,
    pub(crate) copy_gb_s: f64,
}

/// All sizes on one kind of memory.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Moving {
    /// `host` or `cuda`.
    pub(crate) backend: String,
    pub(crate) device: String,
    pub(crate) rates: Vec<Rate>,
    /// Handle size from which remapping is faster than copying, in MiB; `None`: at no size tried.
    pub(crate) crossover_mib: Option<f64>,
}

/// Memory that can be moved and copied.
trait Ground {
    fn backend(&self) -> Arc<dyn Backend>;
    /// Writes to all of a mapped range, so that it has memory.
    fn touch(&self, address: u64, bytes: u64) -> Result<(), String>;
    /// Waits until the device has done what was queued.
    fn settle(&self) -> Result<(), String> {
        self.backend().quiesce().map_err(text)
    }
    /// Time of one copy of `bytes`, of which several make up `set`.
    fn copy(&self, bytes: u64, set: u64, rounds: usize) -> Result<Duration, String>;
}

fn text(error: impl ToString) -> String {
    error.to_string()
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

fn gb_s(bytes: u64, time: Duration) -> f64 {
    bytes as f64 / time.as_secs_f64().max(1e-12) / 1e9
}

/// Host memory: pages of a memfd.
#[derive(Debug)]
struct HostGround(Arc<HostBackend>);

impl Ground for HostGround {
    fn backend(&self) -> Arc<dyn Backend> {
        self.0.clone()
    }

    fn touch(&self, address: u64, bytes: u64) -> Result<(), String> {
        let ones = vec![1; 2 * MIB as usize];
        (0..bytes / (2 * MIB)).try_for_each(|at| self.0.write(address + at * 2 * MIB, &ones)).map_err(text)
    }

    /// Between two halves of ordinary memory, so large that no copy finds its bytes in a cache.
    fn copy(&self, bytes: u64, set: u64, rounds: usize) -> Result<Duration, String> {
        let set = set.max(bytes) as usize;
        let (from, mut to, bytes) = (vec![1u8; set], vec![2u8; set], bytes as usize);
        let (mut times, begin) = (Vec::new(), Instant::now());
        for round in 0..rounds.max(set / bytes) {
            if round >= FEWEST && begin.elapsed() > ENOUGH {
                break;
            }
            let at = round * bytes % (set - bytes + 1).max(1) / bytes * bytes;
            let start = Instant::now();
            to[at..at + bytes].copy_from_slice(&from[at..at + bytes]);
            times.push(start.elapsed());
            std::hint::black_box(&mut to);
        }
        Ok(median(times))
    }
}

/// Microseconds of one remap by bare calls: handles at every second place of a range, moved to a row.
fn bare(ground: &dyn Ground, size: u64, count: u64, rounds: usize) -> Result<Duration, String> {
    let driver = Driver::new(ground.backend(), Vec::new());
    let base = driver.reserve(3 * size * count).map_err(text)?;
    let (scattered, row) = (|index: u64| base + 2 * index * size, |index: u64| base + (2 * count + index) * size);
    let mut handles = Vec::new();
    let result = (|| {
        for index in 0..count {
            let handle = driver.create(size).map_err(text)?;
            handles.push(handle);
            driver.map(scattered(index), handle, size).map_err(text)?;
            ground.touch(scattered(index), size)?;
        }
        ground.settle()?;
        let (mut times, begin) = (Vec::new(), Instant::now());
        for round in 0..rounds {
            if round >= FEWEST && begin.elapsed() > ENOUGH {
                break;
            }
            for (index, handle) in (0..count).zip(&handles) {
                let start = Instant::now();
                driver.relocate(scattered(index), row(index), *handle, size).map_err(text)?;
                times.push(start.elapsed());
            }
            for (index, handle) in (0..count).zip(&handles) {
                driver.relocate(row(index), scattered(index), *handle, size).map_err(text)?;
            }
        }
        Ok(median(times))
    })();
    // What was mapped goes also after a failure, which is then the answer.
    for (index, handle) in (0..count).zip(handles) {
        let gone = driver.unmap(scattered(index), size).or_else(|_| driver.unmap(row(index), size));
        gone.and_then(|()| driver.release(handle, size)).map_err(text)?;
    }
    driver.unreserve(base, 3 * size * count).map_err(text)?;
    result
}

/// Time of one request that the heap serves by moving `count` handles.
fn through_heap(ground: &dyn Ground, size: u64, count: u64) -> Result<Duration, String> {
    // A handle for each block, also where handles are a smaller share of the device; then the limit leaves nothing to create.
    let conf = format!("handle_max:{}MiB,growth:exact", size / MIB);
    let heap = Heap::builder().conf(&conf).and_then(|builder| builder.backend(ground.backend()).build());
    let heap = heap.map_err(text)?;
    let blocks: Result<Vec<Allocation>, _> = (0..2 * count).map(|_| heap.alloc_contiguous(size, StreamId(0))).collect();
    let (mut keep, mut go) = (Vec::new(), Vec::new());
    for (index, block) in blocks.map_err(text)?.into_iter().enumerate() {
        if index % 2 == 0 {
            ground.touch(block.address(), size)?;
            go.push(block);
        } else {
            keep.push(block);
        }
    }
    drop(go);
    ground.settle()?;
    heap.tick();
    heap.set_limit(heap.stats().reserved);
    let start = Instant::now();
    let block = heap.alloc(size * count, StreamId(0)).map_err(text)?;
    let took = start.elapsed();
    let moved = heap.stats().handles_moved;
    drop((block, keep));
    if moved == count { Ok(took) } else { Err(format!("{moved} handles of {size} bytes moved instead of {count}")) }
}

/// Median over rounds of [`through_heap`].
fn through_heap_often(ground: &dyn Ground, size: u64, count: u64, rounds: usize) -> Result<Duration, String> {
    let (mut times, begin) = (Vec::new(), Instant::now());
    while times.len() < FEWEST || (times.len() < rounds && begin.elapsed() < ENOUGH) {
        times.push(through_heap(ground, size, count)?);
    }
    Ok(median(times))
}

fn measure(ground: &dyn Ground, quick: bool, progress: &dyn Progress) -> Result<Moving, String> {
    let (rounds, set) = if quick { (FEWEST, WORKING_SET / 4) } else { (ROUNDS, WORKING_SET) };
    let host = ground.backend().kind() == BackendKind::Host;
    let most = if quick { QUICK_MAX } else { SIZES[SIZES.len() - 1] }.min(if host { HOST_MAX } else { u64::MAX });
    let sizes = || SIZES.into_iter().filter(|size| *size <= most);
    let moved = |handle_mib: u64| set.max(2 * handle_mib * MIB);
    let mut rates = Vec::new();
    progress.length(sizes().map(moved).sum());
    for handle_mib in sizes() {
        let size = handle_mib * MIB;
        let count = moved(handle_mib) / size;
        progress.doing(&format!("moving against copying on {}, {handle_mib} MiB", ground.backend().kind().name()));
        let bare = bare(ground, size, count, rounds)?;
        let heap = through_heap_often(ground, size, count, rounds)?;
        rates.push(Rate {
            handle_mib,
            bare_us: bare.as_secs_f64() * 1e6,
            bare_gb_s: gb_s(size, bare),
            heap_gb_s: gb_s(size * count, heap),
            copy_gb_s: gb_s(size, ground.copy(size, set, rounds)?),
        });
        progress.done(moved(handle_mib));
    }
    let backend = ground.backend();
    Ok(Moving {
        backend: backend.kind().name().to_owned(),
        device: backend.capabilities().device.clone(),
        crossover_mib: crossover(&rates),
        rates,
    })
}

/// Where the line of bare remapping crosses that of copying for good, by straight lines between the
/// logarithms of sizes and rates.
fn crossover(rates: &[Rate]) -> Option<f64> {
    let ahead = |rate: &Rate| (rate.bare_gb_s / rate.copy_gb_s).ln();
    let first = rates.iter().rposition(|rate| ahead(rate) < 0.0).map_or(0, |slow| slow + 1);
    let at = rates.get(first)?;
    let Some(before) = first.checked_sub(1).map(|slow| &rates[slow]) else { return Some(at.handle_mib as f64) };
    let share = -ahead(before) / (ahead(at) - ahead(before));
    let (low, high) = ((before.handle_mib as f64).ln(), (at.handle_mib as f64).ln());
    Some((low + share * (high - low)).exp())
}

/// On host memory.
///
/// # Errors
/// What the system refuses, in words.
pub(crate) fn host(quick: bool, progress: &dyn Progress) -> Result<Moving, String> {
    let backend = HostBackend::new(HostOptions::default()).map_err(text)?;
    measure(&HostGround(Arc::new(backend)), quick, progress)
}

/// On the first GPU.
///
/// # Errors
/// Why there is none, or what the driver refuses.
#[cfg(feature = "cuda")]
pub(crate) fn cuda(quick: bool, progress: &dyn Progress) -> Result<Moving, String> {
    use crate::backend::cuda::{CudaBackend, CudaOptions};

    #[derive(Debug)]
    struct CudaGround(Arc<CudaBackend>);

    impl Ground for CudaGround {
        fn backend(&self) -> Arc<dyn Backend> {
            self.0.clone()
        }

        /// The driver gives memory when it creates a handle.
        fn touch(&self, _: u64, _: u64) -> Result<(), String> {
            Ok(())
        }

        fn copy(&self, bytes: u64, _: u64, rounds: usize) -> Result<Duration, String> {
            self.0.time_copy(bytes, rounds).map_err(text)
        }
    }

    let backend = CudaBackend::open(0, &CudaOptions::default()).map_err(text)?;
    measure(&CudaGround(Arc::new(backend)), quick, progress)
}

/// Built without the backend.
///
/// # Errors
/// Always.
#[cfg(not(feature = "cuda"))]
pub(crate) fn cuda(_: bool, _: &dyn Progress) -> Result<Moving, String> {
    Err("xseg was built without the `cuda` feature".to_owned())
}

impl Moving {
    /// From which size remapping is faster, in a sentence.
    pub(crate) fn sentence(&self) -> String {
        format!("Moving against copying on {}: {}.", self.backend, self.crossover())
    }

    fn crossover(&self) -> String {
        match self.crossover_mib {
            Some(mib) if mib <= SIZES[0] as f64 => "at every size tried, remapping is faster than copying".to_owned(),
            Some(mib) => format!("remapping is faster than copying from handles of {mib:.1} MiB up"),
            None => "copying is faster than remapping at every size tried".to_owned(),
        }
    }

    /// The table of reports.
    pub(crate) fn table(&self) -> Table {
        let crossover = self.crossover();
        let mut table = Table::new(
            &format!("Moving against copying on {}", self.backend),
            &format!(
                "{}; measured here; each byte counted once; {crossover}. Bare: single calls at the driver's door; heap: one request served by moving, with its bookkeeping.",
                self.device
            ),
            &["handle MiB", "bare remap µs", "bare remap GB/s", "through the heap GB/s", "copy GB/s", "bare / copy"],
        );
        for rate in &self.rates {
            table.row([
                rate.handle_mib.to_string(),
                format!("{:.1}", rate.bare_us),
                format!("{:.1}", rate.bare_gb_s),
                format!("{:.1}", rate.heap_gb_s),
                format!("{:.1}", rate.copy_gb_s),
                format!("{:.2}", rate.bare_gb_s / rate.copy_gb_s),
            ]);
        }
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::sim::{SimBackend, SimOptions};

    fn rates(ratios: &[f64]) -> Vec<Rate> {
        let sizes = SIZES.into_iter().zip(ratios);
        let rate = |(handle_mib, bare_gb_s): (u64, &f64)| Rate {
            handle_mib,
            bare_us: 1.0,
            bare_gb_s: *bare_gb_s,
            heap_gb_s: 1.0,
            copy_gb_s: 1.0,
        };
        sizes.map(rate).collect()
    }

    #[test]
    fn the_crossover_is_where_the_lines_cross_for_good() {
        assert_eq!(crossover(&rates(&[2.0, 4.0])), Some(2.0));
        assert_eq!(crossover(&rates(&[0.5, 0.9])), None);
        // From a half to twice between 4 and 8 MiB: in the middle of their logarithms.
        let found = crossover(&rates(&[1.5, 0.5, 2.0, 3.0])).unwrap();
        assert!((found - 32f64.sqrt()).abs() < 1e-9, "{found}");
        assert_eq!(crossover(&[]), None);
    }

    #[derive(Debug)]
    struct SimGround(Arc<SimBackend>);

    impl Ground for SimGround {
        fn backend(&self) -> Arc<dyn Backend> {
            self.0.clone()
        }

        fn touch(&self, _: u64, _: u64) -> Result<(), String> {
            Ok(())
        }

        fn copy(&self, _: u64, _: u64, _: usize) -> Result<Duration, String> {
            Ok(Duration::ZERO)
        }
    }

    #[test]
    fn handles_of_every_size_move_on_a_device_of_the_usual_size() {
        let total = Some(140_000 * MIB);
        for size in SIZES {
            let ground = SimGround(Arc::new(SimBackend::new(SimOptions { total, ..SimOptions::default() })));
            let count = WORKING_SET.max(2 * size * MIB) / (size * MIB);
            let moved = through_heap(&ground, size * MIB, count);
            assert!(moved.is_ok(), "{size} MiB: {moved:?}");
        }
    }

    #[test]
    fn host_memory_moves() {
        let ground = HostGround(Arc::new(HostBackend::new(HostOptions::default()).unwrap()));
        assert!(bare(&ground, 4 * MIB, 3, 2).unwrap() > Duration::ZERO);
        assert!(through_heap(&ground, 4 * MIB, 3).unwrap() > Duration::ZERO);
        assert!(ground.copy(4 * MIB, 16 * MIB, 2).unwrap() > Duration::ZERO);
        assert!(ground.0.leaks().is_empty(), "{}", ground.0.leaks());
    }
}
