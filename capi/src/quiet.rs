//! Writes that fail by an error, and by no signal: what is written beside a program must not end it.

use std::fs::File;
use std::io::{Result, Write};
use std::mem::MaybeUninit;
use std::ptr;

/// Those that a write may raise, whose default is the program's end: nobody reads the pipe any more, or the file has the length that
/// `ulimit -f` allows. Both go to the thread that writes.
const RAISED: [libc::c_int; 2] = [libc::SIGPIPE, libc::SIGXFSZ];

/// A file that is written so.
#[derive(Debug)]
pub(crate) struct Quiet(pub(crate) File);

impl Write for Quiet {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        let held = Held::begin();
        let written = self.0.write(bytes);
        held.end();
        written
    }

    fn flush(&mut self) -> Result<()> {
        self.0.flush()
    }
}

/// The signals wait on this thread.
struct Held {
    /// What waited before.
    before: libc::sigset_t,
    /// Those that were there already are the program's own.
    ours: libc::sigset_t,
}

fn none() -> libc::sigset_t {
    let mut set = MaybeUninit::uninit();
    // SAFETY: it is there to be filled.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    // SAFETY: just filled.
    unsafe { set.assume_init() }
}

fn is_pending(signal: libc::c_int) -> bool {
    let mut pending = none();
    // SAFETY: a set to be filled.
    unsafe { libc::sigpending(&raw mut pending) };
    // SAFETY: a set, and a signal that exists.
    unsafe { libc::sigismember(&raw const pending, signal) == 1 }
}

impl Held {
    fn begin() -> Self {
        let (mut ours, mut before) = (none(), none());
        for signal in RAISED.into_iter().filter(|signal| !is_pending(*signal)) {
            // SAFETY: a set, and a signal that exists.
            unsafe { libc::sigaddset(&raw mut ours, signal) };
        }
        // SAFETY: two sets, on this thread, which ends it in `end`.
        unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const ours, &raw mut before) };
        Self { before, ours }
    }

    /// Takes what was raised meanwhile, which a write that went half way may have done, too, and lets signals come as before.
    fn end(self) {
        let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: a set and a time; what is told of the signals goes nowhere.
        while unsafe { libc::sigtimedwait(&raw const self.ours, ptr::null_mut(), &raw const now) } > 0 {}
        // SAFETY: the set of before, on the same thread.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, ptr::null_mut()) };
    }
}
