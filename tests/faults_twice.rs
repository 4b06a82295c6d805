//! A driver call is refused, and so is the one that is to undo what was done before it: what is left is kept in the books, used by
//! nobody, and given back later.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod support;

use std::sync::Arc;
use support::{Book, MS, S0, book};
use xseg::backend::fault::{FaultPlan, FaultRule, FaultyBackend};
use xseg::backend::sim::{SimBackend, SimOptions};
use xseg::backend::timeline::Timeline;
use xseg::error::DriverCall;
use xseg::units::{GRANULE, MIB};
use xseg::{Allocation, Error, Heap, PoolId, StreamFilter};

/// A heap on a simulated device, which checks at its end that nothing was left behind.
struct Rig {
    heap: Heap,
    faulty: Arc<FaultyBackend<SimBackend>>,
    sim: Arc<SimBackend>,
    time: Timeline,
    book: Book,
}

fn rig(conf: &str) -> Rig {
    let time = Timeline::default();
    let sim = Arc::new(SimBackend::new(SimOptions { timeline: time.clone(), ..SimOptions::default() }));
    let faulty = Arc::new(FaultyBackend::new(sim.clone()));
    let (book, told) = book();
    let conf = format!("reserve:8GiB,limit:64MiB,growth:exact,wait_limit:0s,{conf}");
    let builder = Heap::builder().conf(&conf).unwrap().backend(faulty.clone()).on_mapping(told);
    Rig { heap: builder.build().unwrap(), faulty, sim, time, book }
}

impl Rig {
    /// From the k-th memory call on all are refused.
    fn refuse_from(&self, k: u64) {
        self.faulty.arm(FaultPlan::new(FaultRule::From(k), false));
    }

    #[track_caller]
    fn refused(&self, bytes: u64, call: DriverCall) {
        match self.heap.alloc(bytes, S0) {
            Err(Error::Driver(error)) => assert_eq!(error.call, call),
            other => panic!("{other:?}"),
        }
        self.check();
    }

    /// Heap, device and callbacks agree, and no rule of the driver was broken.
    #[track_caller]
    fn check(&self) {
        self.heap.check().unwrap();
        assert_eq!(self.sim.violations(), Vec::<String>::new());
        assert_eq!(self.sim.memory_in_use(), self.heap.stats().reserved);
        assert_eq!(self.book.lock().unwrap().len(), self.sim.mapping_count());
    }

    /// All of the limit can be had, in blocks large and small, and given back.
    #[track_caller]
    fn is_whole(&self) {
        drop(self.heap.alloc(64 * MIB, S0).unwrap());
        let blocks: Vec<Allocation> = (0..16).map(|_| self.heap.alloc(4 * MIB, S0).unwrap()).collect();
        self.check();
        drop(blocks);
        self.heap.tick();
        self.heap.trim();
        self.check();
        let stats = self.heap.stats();
        assert_eq!((stats.reserved, stats.zombie, self.sim.handle_count(), self.sim.mapping_count()), (0, 0, 0, 0));
    }
}

/// The calls of a growth by one handle: create, map, access; then unmap and release undo it.
#[test]
fn a_new_handle_that_could_be_neither_used_nor_unmapped() {
    let rig = rig("handle_max:2MiB");
    rig.refuse_from(3);
    rig.refused(2 * MIB, DriverCall::SetAccess);
    assert_eq!((rig.sim.handle_count(), rig.sim.mapping_count(), rig.heap.stats().zombie), (1, 1, GRANULE));
    // Once more: it is unmapped, and the handle, cached now, mapped again.
    rig.refuse_from(3);
    rig.refused(2 * MIB, DriverCall::SetAccess);
    rig.faulty.disarm();
    rig.heap.tick();
    rig.check();
    assert_eq!((rig.sim.mapping_count(), rig.heap.stats().zombie), (0, 0));
    rig.is_whole();
}

/// Of a block of eight handles the k-th: those before it stay as free memory, it does not.
#[test]
fn one_of_several_new_handles() {
    for k in 0..8 {
        let rig = rig("handle_max:2MiB");
        rig.refuse_from(3 * k + 3);
        rig.refused(16 * MIB, DriverCall::SetAccess);
        let (free, stats) = (k * GRANULE, rig.heap.stats());
        assert_eq!((stats.reserved, stats.zombie), (free + GRANULE, GRANULE));
        rig.faulty.disarm();
        // No request is served from what is not accessible.
        let block = rig.heap.alloc(16 * MIB, S0).unwrap();
        rig.sim.queue_work(S0, block.address(), block.size(), MS).unwrap();
        rig.check();
        drop(block);
        rig.time.advance(MS);
        rig.is_whole();
    }
}

#[test]
fn a_cached_handle() {
    let rig = rig("handle_max:2MiB");
    drop(rig.heap.alloc(2 * MIB, S0).unwrap());
    // It could be unmapped, and not released.
    rig.faulty.arm(FaultPlan { only: Some(DriverCall::Release), ..FaultPlan::new(FaultRule::From(1), false) });
    rig.heap.trim();
    rig.check();
    assert_eq!((rig.sim.handle_count(), rig.sim.mapping_count()), (1, 0));
    rig.refuse_from(2);
    rig.refused(2 * MIB, DriverCall::SetAccess);
    assert_eq!((rig.sim.handle_count(), rig.sim.mapping_count()), (1, 1));
    rig.faulty.disarm();
    drop(rig.heap.alloc(2 * MIB, S0).unwrap());
    assert_eq!(rig.heap.stats().peak_reserved, GRANULE, "it is used again");
    rig.is_whole();
}

/// Handles that move at once (map, access, unmap), and by a second mapping (map, access) where work uses them still: two of
/// four calls are refused, the second one an unmap.
#[test]
fn a_handle_that_moves() {
    for (busy, k) in [(false, 2), (false, 3), (false, 5), (true, 2), (true, 4)] {
        let rig = rig("handle_max:2MiB");
        let mut blocks: Vec<_> = (0..16).map(|_| Some(rig.heap.alloc(4 * MIB, S0).unwrap())).collect();
        for block in blocks.iter_mut().step_by(2).filter_map(Option::take) {
            if busy {
                rig.sim.queue_work(S0, block.address(), block.size(), MS).unwrap();
            }
        }
        rig.heap.tick();
        rig.refuse_from(k);
        let call = if !busy && k == 3 { DriverCall::Unmap } else { DriverCall::SetAccess };
        rig.refused(8 * MIB, call);
        assert!(rig.heap.stats().zombie >= GRANULE);
        // While it is refused still, nothing is mapped over what is there.
        rig.refuse_from(k);
        assert!(rig.heap.alloc(8 * MIB, S0).is_err());
        rig.check();
        rig.faulty.disarm();
        let block = rig.heap.alloc(8 * MIB, S0).unwrap();
        rig.sim.queue_work(S0, block.address(), block.size(), MS).unwrap();
        rig.check();
        drop((block, blocks));
        rig.time.advance(60 * MS);
        rig.heap.tick();
        rig.is_whole();
    }
}

#[test]
fn memory_of_a_capture_pool() {
    let rig = rig("handle_max:2MiB");
    let pool = PoolId(1, 1);
    rig.heap.begin_capture(pool, StreamFilter::All).unwrap();
    rig.refuse_from(6);
    rig.refused(8 * MIB, DriverCall::SetAccess);
    rig.faulty.disarm();
    let block = rig.heap.alloc(8 * MIB, S0).unwrap();
    rig.check();
    rig.heap.end_capture(pool).unwrap();
    rig.heap.release_capture(pool).unwrap();
    drop(block);
    rig.heap.tick();
    rig.is_whole();
}

/// Where page tables may not be edited beside running kernels, it is unmapped on a quiet device.
#[test]
fn on_a_device_that_must_be_quiet() {
    let rig = rig("handle_max:2MiB,remap:quiesce");
    rig.refuse_from(3);
    rig.refused(2 * MIB, DriverCall::SetAccess);
    rig.faulty.disarm();
    rig.heap.trim();
    rig.check();
    assert_eq!((rig.sim.handle_count(), rig.sim.mapping_count()), (0, 0));
    rig.is_whole();
}

/// The heap ends with it.
#[test]
fn the_end_of_the_heap() {
    let rig = rig("handle_max:2MiB");
    rig.refuse_from(3);
    rig.refused(2 * MIB, DriverCall::SetAccess);
    rig.faulty.disarm();
    rig.heap.shut_down();
    assert_eq!(rig.sim.leftovers(), Vec::<String>::new());
}

/// Two to five calls in a row of a run that makes, moves and joins memory, each of its calls the first one.
#[test]
fn any_calls_in_a_row() {
    for many in 2..6 {
        for k in 1..120 {
            let rig = rig("handle_max:8MiB");
            let mut blocks: Vec<Option<Allocation>> = (0..10).map(|_| rig.heap.alloc(6 * MIB, S0).ok()).collect();
            rig.faulty.arm(FaultPlan::new(FaultRule::From(k), false));
            for step in 0..10usize {
                let block = blocks[step * 7 % 10].take();
                if let Some(block) = &block {
                    rig.sim.queue_work(S0, block.address(), block.size(), MS * (step as u32 % 3)).unwrap();
                }
                drop(block);
                rig.time.advance(MS / 2);
                blocks[step * 3 % 10] = rig.heap.alloc((3 + 4 * step as u64) * MIB, S0).ok();
                rig.check();
                if rig.faulty.injected() >= many {
                    rig.faulty.disarm();
                }
            }
            rig.faulty.disarm();
            drop(blocks);
            rig.time.advance(60 * MS);
            rig.heap.tick();
            rig.is_whole();
        }
    }
}
