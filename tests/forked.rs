//! A forked child has a copy of the heap, but the parent's memory: what it drops must touch nothing.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

#[path = "support/side.rs"]
mod side;

use side::{S0, Side};
use xseg::units::MIB;

/// Does `work` in a forked child, which must end by itself.
fn in_a_child(work: impl FnOnce()) {
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
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "the child ended with {status:#x}");
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
        side.heap.trim();
        side.heap.shut_down();
    });
    let (side, kept, freed) = owned.unwrap();
    side.expect(places[0], 20 * MIB, 1);
    side.expect(places[1], 12 * MIB, 2);
    side.heap.check().unwrap();
    drop((kept, freed));
    assert_eq!(side.heap.trim().reserved, 0);
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
