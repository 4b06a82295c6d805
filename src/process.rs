//! Whose memory it is: a forked child has a copy of every heap, and none of the memory (I15).
#![allow(unsafe_code, reason = "registers a function that runs in forked children")]

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Why a process that was forked off the one that made a heap gets nothing of it, for those who refuse it themselves.
pub const FORKED: &str =
    "the heap belongs to the process that this one was forked off; make a heap of this process's own";

/// Forks from the process that asked first to this one.
static FORKS: AtomicU32 = AtomicU32::new(0);

extern "C" fn in_child() {
    FORKS.fetch_add(1, Relaxed);
}

/// A process, as its forked children know that they are others. Asking takes no system call, since blocks ask when they are
/// dropped. A child that is made without `fork` of the C library does not count: it must run another program at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Process(u32);

impl Process {
    /// This one. Any thread.
    #[must_use]
    pub fn this() -> Self {
        static WATCH: Once = Once::new();
        // Refused for want of a few bytes only, with which no heap could be made either.
        WATCH.call_once(|| {
            // SAFETY: the function only changes an atomic, which is allowed after a fork.
            let _ = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        });
        Self(FORKS.load(Relaxed))
    }

    /// Is it this one, and not one that this was forked off? Any thread.
    #[must_use]
    pub fn is_this(self) -> bool {
        self.0 == FORKS.load(Relaxed)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a panic is how a test fails")]
mod tests {
    use super::*;

    /// The status of a forked child that does `work`.
    fn in_a_child(work: impl FnOnce() -> bool) -> i32 {
        // SAFETY: the child only reads atomics, forks and waits.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: ends the child with nothing of the parent's done twice.
            unsafe { libc::_exit(i32::from(!work())) };
        }
        let mut status = -1;
        // SAFETY: waits for the child made above.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        status
    }

    #[test]
    fn a_forked_child_is_another_process() {
        let parent = Process::this();
        assert!(parent.is_this());
        let status = in_a_child(|| {
            let child = Process::this();
            let grandchild = || !parent.is_this() && !child.is_this() && Process::this().is_this();
            !parent.is_this() && child.is_this() && in_a_child(grandchild) == 0 && child.is_this()
        });
        assert_eq!(status, 0);
        assert!(parent.is_this());
    }
}
