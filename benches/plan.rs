//! Planning: what a request costs that the free lists cannot serve, by the number of free ranges that are looked at.
//!
//! "refused" is planned at every step of the ladder and executed by none: the limit leaves nothing to create, and
//! no free range has a whole handle. "moved" is planned once and executed: two handles move, on a backend
//! without memory, so that only the heap's own work is timed.

use criterion::{BatchSize, BenchmarkId, Criterion};
use std::hint::black_box;
use std::time::Duration;
use xseg::units::MIB;
use xseg::{Allocation, Heap, StreamId};

const STREAM: StreamId = StreamId(0);

/// A heap at its limit whose free memory is `count` ranges of `hole` bytes between live blocks of as many.
fn scattered(count: u64, hole: u64) -> (Heap, Vec<Allocation>) {
    let conf = "backend:sim,handle_max:2MiB,growth:exact,small_limit:0,wait_limit:0s";
    let heap = Heap::builder().conf(conf).and_then(|builder| builder.build()).expect("a heap on sim");
    let mut live: Vec<Allocation> = (0..2 * count).map(|_| heap.alloc(hole, STREAM).expect("no limit yet")).collect();
    let mut index = 0;
    live.retain(|_| {
        index += 1;
        index % 2 == 0
    });
    heap.tick();
    heap.set_limit(heap.stats().reserved);
    (heap, live)
}

fn main() {
    let mut criterion = Criterion::default()
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
        .sample_size(20)
        .configure_from_args();
    let mut group = criterion.benchmark_group("plan");
    for count in [64, 512, 4096] {
        // Half a granule each: no handle is idle as a whole.
        let (heap, live) = scattered(count, MIB);
        group.bench_function(BenchmarkId::new("refused", count), |bench| {
            bench.iter(|| black_box(heap.alloc(4 * MIB, STREAM)).expect_err("nothing can serve it"));
        });
        drop((heap, live));
        group.bench_function(BenchmarkId::new("moved", count), |bench| {
            bench.iter_batched(
                || scattered(count, 2 * MIB),
                |(heap, live)| {
                    let block = heap.alloc(4 * MIB, STREAM).expect("two handles can move");
                    (block, live, heap)
                },
                BatchSize::LargeInput,
            );
        });
    }
    group.finish();
    criterion.final_summary();
}
