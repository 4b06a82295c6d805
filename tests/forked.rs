//! A forked child has a copy of the heap, but the parent's memory: what it drops must touch nothing.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

#[path = "support/side.rs"]
mod side;

use side::{S0, Side};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use xseg::backend::{ClientEvent, EventScope};
use xseg::units::{KIB, MIB};
use xseg::{Error, PoolId, Result, StreamFilter};

/// Does `work` in a forked child, and says how it ended: 0 where it did by itself.
fn status_of_a_child(work: impl FnOnce()) -> i32 {
    // SAFETY: no thread of this program but this one holds a lock that the child needs.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        // SAFETY: a child that hangs is ended by this.
        unsafe { libc::alarm(20) };
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        // SAFETY: ends the process, with nothing of the parent's done twice.
        unsafe { libc::_exit(i32::from(done.is_err())) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    status
}

fn in_a_child(work: impl FnOnce()) {
    let status = status_of_a_child(work);
    assert_eq!(status, 0, "the child ended with {status:#x}");
}

#[test]
fn what_a_forked_child_drops_stays_the_parents() {
    let side = Side::new("limit:256MiB");
    let (kept, freed) = (side.heap.alloc(20 * MIB, S0).unwrap(), side.heap.alloc(12 * MIB, S0).unwrap());
    let places = [kept.address(), freed.address()];
    side.stamp(places[0], 20 * MIB, 1);
    side.stamp(places[1], 12 * MIB, 2);
    // The device has a thread from now on, which no child has.
    side.device.launch(S0, || ()).unwrap();
    let mut owned = Some((side, kept, freed));
    in_a_child(|| drop(owned.take()));
    in_a_child(|| {
        let (side, _kept, freed) = owned.take().unwrap();
        drop(freed);
        let trimmed = side.heap.trim();
        assert_eq!((trimmed.released, trimmed.reserved), (0, 0));
        side.heap.tick();
        side.heap.shut_down();
    });
    let (side, kept, freed) = owned.unwrap();
    side.expect(places[0], 20 * MIB, 1);
    side.expect(places[1], 12 * MIB, 2);
    side.heap.check().unwrap();
    drop((kept, freed));
    // The device's thread may not have come to its work yet.
    side.heap.backend().quiesce().unwrap();
    assert_eq!(side.heap.trim().reserved, 0);
}

#[test]
fn a_forked_child_is_refused() {
    fn refused<T>(done: Result<T>) {
        let error = done.err().unwrap();
        assert!(matches!(error, Error::Unavailable { .. }), "{error}");
        assert!(error.to_string().ends_with("make a heap of this process's own"), "{error}");
    }
    let (side, other) = (Side::new("limit:256MiB"), Side::new("limit:256MiB"));
    let block = side.heap.alloc(8 * MIB, S0).unwrap();
    let imported = other.import_of(&side, &block);
    let export = side.heap.export(block.address()).unwrap();
    let raw = other.import_of(&side, &block).into_raw();
    let event = side.heap.backend().record(EventScope::Stream(S0)).unwrap();
    let before = (side.heap.stats(), other.heap.stats());
    let pool = PoolId(1, 1);
    let mut export = Some(export);
    in_a_child(|| {
        let (heap, at) = (&side.heap, block.address());
        refused(heap.alloc(20 * MIB, S0));
        refused(heap.alloc_contiguous(4 * KIB, S0));
        refused(heap.free_after(at, ClientEvent(event.0)));
        refused(heap.record_use(at, S0));
        refused(block.record_use(S0));
        refused(heap.export_handles(at));
        refused(heap.export(at));
        refused(block.export());
        refused(heap.pin(at, MIB));
        refused(heap.unpin(at, MIB));
        refused(heap.enable_peer(1));
        refused(heap.retire_stream(S0));
        refused(heap.begin_capture(pool, StreamFilter::All));
        refused(heap.begin_pool(pool, StreamFilter::All));
        refused(heap.end_capture(pool));
        refused(heap.retain_capture(pool));
        refused(heap.release_capture(pool));
        refused(heap.restore_block(pool, at, (MIB, MIB), S0));
        refused(other.heap.import(export.take().unwrap()));
        refused(other.heap.receive(std::os::unix::net::UnixStream::pair().unwrap().0));
        refused(other.heap.end_import(raw));
        refused(other.heap.close_import(raw));
        assert_eq!(heap.set_limit(0), 0);
    });
    assert_eq!(side.heap.limit(), 256 * MIB);
    assert_eq!((side.heap.stats(), other.heap.stats()), before);
    drop(imported);
    other.heap.end_import(raw).unwrap();
    side.heap.check().unwrap();
    other.heap.check().unwrap();
}

#[test]
fn a_forked_child_waits_for_none_of_the_parents_threads() {
    let (side, other) = (Side::new("limit:512MiB"), Side::new("limit:512MiB"));
    let mut blocks: Vec<_> = [600, 4 * KIB, 3 * MIB, 40 * MIB].map(|bytes| side.heap.alloc(bytes, S0).unwrap()).into();
    let mut imports: Vec<_> = blocks.iter().map(|block| other.import_of(&side, block)).collect();
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !ended.load(Relaxed) {
                    for bytes in [600, MIB, 3 * MIB, 20 * MIB] {
                        drop(side.heap.alloc(bytes, S0).unwrap());
                    }
                    side.device.launch(S0, || ()).unwrap();
                    side.heap.trim();
                    side.heap.reset_peaks();
                    other.heap.tick();
                }
            });
        }
        let ends = [(); 100].map(|()| {
            status_of_a_child(|| {
                blocks.clear();
                imports.clear();
                side.heap.trim();
                side.heap.reset_peaks();
                side.heap.on_out_of_memory(Box::new(|_| false));
                side.heap.shut_down();
                let own = Side::new("limit:64MiB");
                let block = own.heap.alloc(8 * MIB, S0).unwrap();
                own.stamp(block.address(), 8 * MIB, 9);
                own.expect(block.address(), 8 * MIB, 9);
            })
        });
        ended.store(true, Relaxed);
        assert_eq!(ends, [0; 100]);
    });
    side.heap.check().unwrap();
    other.heap.check().unwrap();
    assert_eq!(imports.len(), 4);
}

#[test]
fn an_import_that_a_forked_child_closes_stays_open() {
    let (here, there) = (Side::new("limit:64MiB"), Side::new("limit:64MiB,wait_limit:0s"));
    let block = here.heap.alloc(20 * MIB, S0).unwrap();
    here.stamp(block.address(), 20 * MIB, 5);
    let mut imported = Some(there.import_of(&here, &block));
    let address = imported.as_ref().unwrap().address();
    in_a_child(|| imported.take().unwrap().close().unwrap());
    there.expect(address, 20 * MIB, 5);
    assert_eq!((there.heap.stats().imported, here.heap.stats().exported), (20 * MIB, 20 * MIB));
    imported.unwrap().close().unwrap();
    here.heap.tick();
    assert_eq!((there.heap.stats().imported, here.heap.stats().exported), (0, 0));
}
