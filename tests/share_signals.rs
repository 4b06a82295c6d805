//! Signals that reach a thread while it waits for another process: profilers and timers send them all the time.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

#[path = "support/side.rs"]
mod side;

use side::{S0, Side};
use std::os::unix::net::UnixStream;
use std::os::unix::thread::JoinHandleExt;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::thread::{sleep, spawn};
use std::time::Duration;
use xseg::units::MIB;

static SIGNALS: AtomicU32 = AtomicU32::new(0);

extern "C" fn count(_signal: libc::c_int) {
    SIGNALS.fetch_add(1, Relaxed);
}

#[test]
fn a_signal_does_not_end_a_wait_for_an_export() {
    let handler: extern "C" fn(libc::c_int) = count;
    // SAFETY: the handler adds to an atomic, which is allowed in one.
    unsafe { libc::signal(libc::SIGUSR1, handler as libc::sighandler_t) };
    let (exporter, importer) = (Side::new("limit:1GiB"), Side::new("limit:1GiB"));
    let block = exporter.heap.alloc(4 * MIB, S0).unwrap();
    exporter.stamp(block.address(), block.len(), 1);
    let (here, there) = UnixStream::pair().unwrap();
    let heap = importer.heap.clone();
    let waits = spawn(move || heap.receive(&there));
    while SIGNALS.load(Relaxed) < 20 {
        // SAFETY: the thread has not been joined, and the signal has a handler.
        unsafe { libc::pthread_kill(waits.as_pthread_t(), libc::SIGUSR1) };
        sleep(Duration::from_millis(5));
    }
    exporter.heap.export(block.address()).unwrap().send(&here).unwrap();
    let imported = waits.join().unwrap().unwrap();
    importer.expect(imported.address(), imported.len(), 1);
}
