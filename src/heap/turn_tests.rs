//! The clock of idle memory turns after 2^32 frees: a heap does the same before, at and after that.

use super::Heap;
use crate::backend::StreamId;
use crate::backend::sim::{SimBackend, SimOptions};
use crate::units::MIB;
use std::sync::Arc;

/// What a run of requests of two streams comes to when the clock starts at `frees`: every address, and what was done for it.
fn run(conf: &str, frees: u64) -> (Vec<u64>, [u64; 4]) {
    let backend = Arc::new(SimBackend::new(SimOptions::default()));
    let heap = Heap::builder().conf(conf).unwrap().backend(backend).build().unwrap();
    heap.inner.history.set_now(frees);
    let (mut seed, mut live, mut addresses) = (7_u64, Vec::new(), Vec::new());
    for step in 0..4000 {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let (bytes, stream) = ((1 + (seed >> 33) % 24) * 2 * MIB - 4096, StreamId(seed >> 40 & 1));
        while heap.stats().allocated + bytes > 230 * MIB || live.len() > 30 {
            drop(live.swap_remove((seed >> 45) as usize % live.len()));
        }
        let block = heap.alloc(bytes, stream).unwrap();
        addresses.push(block.address());
        live.push(block);
        if step % 16 == 0 {
            heap.tick();
        }
    }
    heap.check().unwrap();
    let stats = heap.stats();
    (addresses, [stats.handles_moved, stats.handles_rechunked, stats.handles_trimmed, stats.driver_calls.total()])
}

#[test]
fn a_heap_does_the_same_where_the_clock_turns() {
    for conf in ["limit:256MiB,handle_max:8MiB", "limit:256MiB,shrink:watermark=20%", "defrag:eager,handle_max:4MiB"] {
        let (addresses, done) = run(conf, 0);
        assert!(done[0] > 100 || done[2] > 100, "{conf}: {done:?}");
        for frees in [(1 << 32) - 2000, (1 << 32) - 100, (5 << 32) - 1000] {
            let (again, done_again) = run(conf, frees);
            let same = again.iter().zip(&addresses).take_while(|(one, other)| one == other).count();
            assert_eq!((same, done_again), (addresses.len(), done), "{conf}, from {frees} frees");
        }
    }
}
