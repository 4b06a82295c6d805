//! The library's own threads stop calling the driver before the process's end takes it away under them.

use crate::devices::forked;
use parking_lot::RwLock;
use std::sync::Once;
use std::time::Duration;

/// The process is ending. Held for reading while a thread of the library uses a heap.
static LEAVING: RwLock<bool> = RwLock::new(false);
/// Longest wait at the end for what such a thread is about: it may wait for a device that never comes.
const LONGEST: Duration = Duration::from_secs(1);

/// Handlers run in reverse: this one before the driver's, which a heap has had loaded by then.
extern "C" fn at_exit() {
    // A forked child has no such thread, and perhaps its lock.
    if forked().is_ok()
        && let Some(mut leaving) = LEAVING.try_write_for(LONGEST)
    {
        *leaving = true;
    }
}

/// To be called before a thread is started.
pub(crate) fn prepare() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the function is there as long as the library, which is never unloaded while its threads run.
        let _ = unsafe { libc::atexit(at_exit) };
    });
}

/// Does work on a heap, unless the process is ending.
pub(crate) fn unless_leaving<T>(work: impl FnOnce() -> T) -> Option<T> {
    let leaving = LEAVING.read();
    (!*leaving).then(work)
}
