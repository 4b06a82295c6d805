//! Moving touched memory on the host backend, against copying the same bytes.
//!
//! Each case works through 256 MiB in turn, so that no way finds its bytes in a cache. "used" reads a
//! word of each page afterwards, as the next kernel would: a second mapping postpones its cost to that
//! moment (every page faults), `mremap` does not.

use criterion::{BenchmarkId, Criterion, Throughput};
use std::hint::black_box;
use std::time::Duration;
use xseg::backend::host::{HostBackend, HostOptions};
use xseg::backend::{Backend, PhysicalAllocation};
use xseg::units::MIB;

const WORKING_SET: u64 = 256 * MIB;
const PAGE: u64 = 4096;

/// Handles of one size, each mapped and touched, with a free place of its own to move to and back.
struct Bed {
    backend: HostBackend,
    bytes: u64,
    base: u64,
    handles: Vec<(PhysicalAllocation, bool)>,
    turn: usize,
}

impl Bed {
    fn new(bytes: u64) -> Self {
        let backend = HostBackend::new(HostOptions::default()).expect("host memory");
        let base = backend.reserve(2 * WORKING_SET).expect("addresses");
        let mut bed = Self { backend, bytes, base, handles: Vec::new(), turn: 0 };
        for index in 0..WORKING_SET / bytes {
            let handle = bed.backend.create(bytes).expect("memory");
            bed.handles.push((handle, false));
            let at = bed.place(index as usize, false);
            bed.map(at, handle);
            bed.backend.write(at, &vec![index as u8 | 1; bytes as usize]).expect("mapped");
        }
        bed
    }

    fn place(&self, index: usize, second: bool) -> u64 {
        self.base + u64::from(second) * WORKING_SET + index as u64 * self.bytes
    }

    fn map(&self, at: u64, handle: PhysicalAllocation) {
        // SAFETY: a free place of the reservation.
        unsafe { self.backend.map(at, handle, self.bytes) }.expect("map");
        // SAFETY: mapped in the line above.
        unsafe { self.backend.set_access(at, self.bytes) }.expect("set_access");
    }

    /// Moves the next handle to its other place by `way`; says where that is.
    fn next(&mut self, way: impl FnOnce(&Self, u64, u64, PhysicalAllocation)) -> u64 {
        let index = self.turn;
        self.turn = (index + 1) % self.handles.len();
        let (handle, second) = self.handles[index];
        let (from, to) = (self.place(index, second), self.place(index, !second));
        way(self, from, to, handle);
        self.handles[index].1 = !second;
        to
    }

    fn relocate(&mut self) -> u64 {
        self.next(|bed, from, to, handle| {
            // SAFETY: `from` is the handle's mapping, `to` is free; only this thread uses either.
            unsafe { bed.backend.relocate(from, to, handle, bed.bytes) }.expect("relocate");
        })
    }

    fn double_map(&mut self) -> u64 {
        self.next(|bed, from, to, handle| {
            bed.map(to, handle);
            // SAFETY: the handle's old mapping, which nobody uses.
            unsafe { bed.backend.unmap(from, bed.bytes) }.expect("unmap");
        })
    }

    /// Reads a word of each page.
    fn use_at(&self, at: u64) -> u64 {
        let words = (0..self.bytes / PAGE).map(|page| {
            let word = std::ptr::with_exposed_provenance::<u64>((at + page * PAGE) as usize);
            // SAFETY: `at` is a mapping of `bytes`, and only this thread edits mappings.
            unsafe { word.read_volatile() }
        });
        words.fold(0, u64::wrapping_add)
    }
}

/// Copies between two halves of touched memory, `bytes` at a time.
struct Copier {
    from: Vec<u8>,
    to: Vec<u8>,
    bytes: usize,
    at: usize,
}

impl Copier {
    fn new(bytes: u64) -> Self {
        let set = WORKING_SET as usize;
        Self { from: vec![1; set], to: vec![2; set], bytes: bytes as usize, at: 0 }
    }

    fn next(&mut self) {
        let range = self.at..self.at + self.bytes;
        self.to[range.clone()].copy_from_slice(&self.from[range]);
        black_box(&mut self.to);
        self.at = (self.at + self.bytes) % self.from.len();
    }
}

fn main() {
    let mut criterion = Criterion::default()
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
        .sample_size(20)
        .configure_from_args();
    let mut group = criterion.benchmark_group("remap");
    for mib in [2, 16, 64] {
        let bytes = mib * MIB;
        group.throughput(Throughput::Bytes(bytes));
        let named = |way| BenchmarkId::new(way, format!("{mib}MiB"));
        let mut bed = Bed::new(bytes);
        group.bench_function(named("relocate"), |bench| bench.iter(|| bed.relocate()));
        group.bench_function(named("relocate_used"), |bench| {
            bench.iter(|| {
                let at = bed.relocate();
                bed.use_at(at)
            });
        });
        group.bench_function(named("double_map"), |bench| bench.iter(|| bed.double_map()));
        group.bench_function(named("double_map_used"), |bench| {
            bench.iter(|| {
                let at = bed.double_map();
                bed.use_at(at)
            });
        });
        drop(bed);
        let mut copier = Copier::new(bytes);
        group.bench_function(named("copy"), |bench| bench.iter(|| copier.next()));
    }
    group.finish();
    criterion.final_summary();
}
