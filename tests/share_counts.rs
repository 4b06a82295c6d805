//! What exports and imports hold: descriptors, reservations, mappings, handles. Counted, so one test at a time.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

#[path = "support/side.rs"]
mod side;

use side::{S0, Side, descriptors, holds, no_more_than};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use xseg::backend::fault::{FaultPlan, FaultRule, FaultyBackend};
use xseg::backend::host::{HostBackend, HostOptions};
use xseg::error::{DriverCall, ShareFault};
use xseg::units::{GRANULE, MIB};
use xseg::{Error, Heap, Imported};

/// Tests share the process's descriptors.
fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn an_export_that_nobody_takes_is_as_if_it_had_never_been() {
    let _alone = alone();
    let here = Side::new("limit:64MiB,growth:exact,handle_max:2MiB");
    let before = descriptors();
    let block = here.heap.alloc(48 * MIB, S0).unwrap();
    drop(here.heap.export(block.address()).unwrap());
    let (ours, theirs) = UnixStream::pair().unwrap();
    here.heap.export(block.address()).unwrap().send(&ours).unwrap();
    assert_eq!(here.heap.stats().exported, 48 * MIB);
    // Lost with the socket on which it waits.
    drop((ours, theirs));
    here.heap.tick();
    assert_eq!((here.heap.stats().exported, here.heap.stats().pinned), (0, 0));
    no_more_than(before);
}

/// More handles than a message has room for, and than a process may open, go over one after the other.
#[test]
fn any_number_of_handles() {
    let _alone = alone();
    let (here, there) = (Side::new("limit:2GiB,handle_max:2MiB,growth:exact"), Side::new(""));
    let before = descriptors();
    for handles in [1, 15, 16, 17, 63, 64, 65, 128, 129, 700] {
        let block = here.heap.alloc(handles * GRANULE, S0).unwrap();
        let exported = here.heap.export(block.address()).unwrap();
        assert!(descriptors() <= before + 4, "none is open by itself");
        here.set_word(block.address() + block.len() - 8, handles);
        let imported = there.heap.import(exported).unwrap();
        assert_eq!(there.word(imported.address() + imported.len() - 8), handles);
        assert_eq!(there.device.leaks().handles as u64, handles);
        // Both ends, the process's, and the memfd.
        no_more_than(before + 5);
        imported.close().unwrap();
        here.heap.tick();
        assert_eq!(here.heap.stats().exported, 0);
        no_more_than(before);
    }
    // One that is never taken does not leave its thread waiting.
    let block = here.heap.alloc(700 * GRANULE, S0).unwrap();
    let exported = here.heap.export(block.address()).unwrap();
    drop(exported);
    here.heap.tick();
    assert_eq!(here.heap.stats().exported, 0);
    no_more_than(before);
    // Nor does a heap that ends first.
    let exported = here.heap.export(block.address()).unwrap();
    here.heap.shut_down();
    let error = there.heap.import(exported).unwrap_err();
    assert!(matches!(error, Error::Share(ShareFault::Ended | ShareFault::Refused(_))), "{error}");
    holds(&there.device, 1);
}

/// Waits until so many threads hand over handles. They name themselves as they start.
#[track_caller]
fn exporting(wanted: usize) {
    let start = Instant::now();
    loop {
        let threads = std::fs::read_dir("/proc/self/task").unwrap();
        let names = threads.filter_map(|thread| std::fs::read_to_string(thread.ok()?.path().join("comm")).ok());
        let found = names.filter(|name| name.trim() == "xseg export").count();
        if found == wanted {
            return;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "{found} threads, not {wanted}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// What will not be asked for is not waited for.
#[test]
fn a_half_closed_export_has_no_thread_left() {
    let _alone = alone();
    let here = Side::new("limit:256MiB,handle_max:2MiB,growth:exact");
    let before = descriptors();
    let block = here.heap.alloc(64 * MIB, S0).unwrap();
    let exported: Vec<_> = (0..2).map(|_| here.heap.export(block.address()).unwrap()).collect();
    exporting(2);
    exported.iter().for_each(|export| rustix::net::shutdown(export, rustix::net::Shutdown::Write).unwrap());
    exporting(0);
    here.heap.tick();
    assert_eq!(here.heap.stats().exported, 64 * MIB, "it may be mapped still");
    drop(exported);
    here.heap.tick();
    assert_eq!((here.heap.stats().exported, here.heap.stats().pinned), (0, 0));
    no_more_than(before);
}

#[test]
fn a_thousand_imports_take_nothing_with_them() {
    let _alone = alone();
    let (here, there) = (Side::new("limit:64MiB,growth:exact"), Side::new(""));
    let block = here.heap.alloc(6 * MIB, S0).unwrap();
    let (before, leaks, pieces) = (descriptors(), there.device.leaks(), there.device.mapping_budget().0);
    for round in 0..1000 {
        let imported = there.import_of(&here, &block);
        if round % 3 == 0 {
            imported.close().unwrap();
        }
        assert!(descriptors() <= before + 8, "round {round}: {} descriptors", descriptors());
    }
    there.heap.tick();
    here.heap.tick();
    assert_eq!((descriptors(), there.device.leaks(), there.device.mapping_budget().0), (before, leaks, pieces));
    assert_eq!((there.heap.stats().imported, here.heap.stats().exported, here.heap.stats().pinned), (0, 0, 0));
}

/// Each of the calls of an import, of its end, and of an export fails in turn: nothing is lost, on neither side.
#[test]
fn any_call_may_fail() {
    let _alone = alone();
    let device = Arc::new(HostBackend::new(HostOptions::default()).unwrap());
    let faulty = Arc::new(FaultyBackend::new(device.clone()));
    let conf = "reserve:16GiB,limit:64MiB,handle_max:2MiB,growth:exact";
    let there = Heap::builder().conf(conf).unwrap().backend(faulty.clone()).build().unwrap();
    let here = Side::new("limit:64MiB,handle_max:2MiB,growth:exact");
    let block = here.heap.alloc(8 * MIB, S0).unwrap();
    let (leaks, open) = (device.leaks(), descriptors());
    let (mut refused, mut again) = (0, 0);
    for turn in 1.. {
        faulty.arm(FaultPlan::new(FaultRule::At(turn), false));
        let imported = there.import(here.heap.export(block.address()).unwrap());
        let came = imported.is_ok();
        let ended = imported.and_then(Imported::close);
        let missed = faulty.injected() == 0;
        faulty.disarm();
        if missed {
            ended.unwrap();
            break;
        }
        match ended {
            Err(Error::Driver(error)) => assert!(error.reason.contains("made to fail"), "{error}"),
            Err(error) => panic!("turn {turn}: {error}"),
            // What is refused once is tried again at once.
            Ok(()) => again += 1,
        }
        refused += u32::from(!came);
        there.tick();
        there.trim();
        here.heap.tick();
        assert_eq!(device.leaks(), leaks, "turn {turn}");
        assert_eq!(descriptors(), open, "turn {turn}");
        assert_eq!((there.stats().imported, here.heap.stats().exported), (0, 0), "turn {turn}");
    }
    assert!(refused >= 4 * 3 && again > 0, "{refused} refused, {again} tried again");

    // What is refused again and again is kept for later.
    let imported = there.import(here.heap.export(block.address()).unwrap()).unwrap();
    let unmap = FaultPlan { only: Some(DriverCall::Unmap), ..FaultPlan::new(FaultRule::From(1), false) };
    faulty.arm(unmap);
    assert!(matches!(imported.close(), Err(Error::Share(ShareFault::InUse))));
    faulty.disarm();
    there.tick();
    assert_eq!((device.leaks(), there.stats().imported), (leaks, 0));

    // And of an export.
    here.heap.tick();
    let own = there.alloc(8 * MIB, S0).unwrap();
    for turn in 1..=4 {
        faulty.arm(FaultPlan { only: Some(DriverCall::Other), ..FaultPlan::new(FaultRule::At(turn), false) });
        assert!(matches!(there.export(own.address()), Err(Error::Driver(_))), "turn {turn}");
        faulty.disarm();
        assert_eq!((there.stats().exported, there.stats().pinned), (0, 0));
        assert_eq!(descriptors(), open);
    }
    here.heap.import(there.export(own.address()).unwrap()).unwrap().close().unwrap();
}
