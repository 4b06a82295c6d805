//! Imports that have ended where page tables may not be edited beside running kernels: the heap gives them back by itself, on a
//! quiet device.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod support;

use std::sync::Arc;
use std::time::Duration;
use support::{Lab, MS, S1, S2, host};
use xseg::backend::fault::{FaultPlan, FaultRule, FaultyBackend};
use xseg::backend::host::{HostBackend, HostOptions};
use xseg::error::{DriverCall, ShareFault};
use xseg::units::MIB;
use xseg::{Error, Heap, Imported, PoolId, StreamFilter};

const BLOCK: u64 = 8 * MIB;

/// An import of a block that the exporter has freed.
fn import(here: &Lab, there: &Heap) -> Imported {
    let block = here.alloc(BLOCK, S1);
    there.import(here.heap.export(block.address()).unwrap()).unwrap()
}

/// Bytes that the importer has mapped, that the exporter keeps for it, and that the exporter holds at all after a trim.
fn held(here: &Lab, there: &Heap) -> (u64, u64, u64) {
    here.heap.tick();
    here.heap.trim();
    (there.stats().imported, here.heap.stats().exported, here.heap.stats().reserved)
}

/// The importer has no memory of its own that anybody could ask for.
#[test]
fn what_was_dropped_is_given_back_without_a_request() {
    let deeds: [fn(&Heap); 2] = [Heap::tick, |heap| assert_eq!(heap.trim().released, 0)];
    for remap in ["concurrent", "quiesce"] {
        for deed in deeds {
            let (here, there) = (host("limit:64MiB,growth:exact"), host(&format!("remap:{remap}")));
            let imported = import(&here, &there.heap);
            assert_eq!(held(&here, &there.heap), (BLOCK, BLOCK, BLOCK), "{remap}");
            drop(imported);
            deed(&there.heap);
            assert_eq!(held(&here, &there.heap), (0, 0, 0), "{remap}");
            assert_eq!(there.time.now(), Duration::ZERO);
        }
    }
}

/// Its own work is never waited for; other work is once that has passed, and only by who must.
#[test]
fn only_work_that_has_nothing_to_do_with_it_is_waited_for() {
    let deeds: [fn(&Heap); 2] = [Heap::tick, |heap| assert_eq!(heap.trim().released, 0)];
    for deed in deeds {
        for (remap, end) in [("concurrent", 5 * MS), ("quiesce", 20 * MS)] {
            let (here, there) = (host("limit:64MiB,growth:exact"), host(&format!("keep:1GiB,remap:{remap}")));
            let other = there.alloc(BLOCK, S1);
            let imported = import(&here, &there.heap);
            there.work_at(S2, imported.address(), imported.size(), 5 * MS);
            drop(imported);
            deed(&there.heap);
            assert_eq!((held(&here, &there.heap).0, there.time.now()), (BLOCK, Duration::ZERO), "{remap}");
            there.work_at(S1, other.address(), other.size(), 20 * MS);
            there.time.advance(5 * MS);
            deed(&there.heap);
            assert_eq!((held(&here, &there.heap), there.time.now()), ((0, 0, 0), end), "{remap}");
            drop(other);
        }
    }
}

/// While a graph is captured the device is not waited for.
#[test]
fn not_during_a_capture() {
    let (here, there) = (host("limit:64MiB,growth:exact"), host("remap:quiesce,wait_limit:0s"));
    let (imported, pool) = (import(&here, &there.heap), PoolId(1, 1));
    there.heap.begin_capture(pool, StreamFilter::All).unwrap();
    assert_eq!(imported.close(), Err(ShareFault::InUse.into()));
    there.heap.tick();
    there.heap.trim();
    assert_eq!(held(&here, &there.heap), (BLOCK, BLOCK, BLOCK));
    there.heap.end_capture(pool).unwrap();
    there.heap.release_capture(pool).unwrap();
    there.heap.tick();
    assert_eq!(held(&here, &there.heap), (0, 0, 0));
}

#[test]
fn a_refused_wait_is_tried_again() {
    let here = host("limit:64MiB,growth:exact");
    let device = Arc::new(FaultyBackend::new(Arc::new(HostBackend::new(HostOptions::default()).unwrap())));
    let there = Heap::builder().conf("remap:quiesce").unwrap().backend(device.clone()).build().unwrap();
    drop(import(&here, &there));
    let only = Some(DriverCall::Other);
    device.arm(FaultPlan { events: true, only, ..FaultPlan::new(FaultRule::From(1), false) });
    there.tick();
    there.trim();
    assert_eq!(held(&here, &there), (BLOCK, BLOCK, BLOCK));
    assert!(matches!(there.alloc(BLOCK, S1), Err(Error::Driver(_))));
    device.disarm();
    there.tick();
    assert_eq!(held(&here, &there), (0, 0, 0));
}
