//! The interpreter's end, which threads that hold none of it must not meet.
//!
//! While Python ends, a thread that asks for the interpreter is ended where it stands (up to Python 3.13 by an unwinding that C and Rust
//! frames do not survive), and once it has ended the thread finds memory that is gone. So none asks any more from the end's beginning
//! ([`Entering`]), and one that is within Python then stays there for good ([`Stay`]).

use pyo3::prelude::*;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;
use xseg::process::Process;

/// Threads that are asking for the interpreter, and [`CLOSED`].
static DOOR: AtomicUsize = AtomicUsize::new(0);
/// Nobody asks any more.
const CLOSED: usize = 1 << (usize::BITS - 1);
/// The process that imported the module: a forked child's door has a copy of the count, with threads that it does not have.
static PROCESS: OnceLock<Process> = OnceLock::new();

/// This thread is asking for the interpreter, whose end waits for that.
#[derive(Debug)]
pub(crate) struct Entering(());

impl Entering {
    /// `None` where the interpreter is ending. Any thread.
    fn begin() -> Option<Self> {
        // Counted before it is looked at: who closes the door sees this thread, or this thread the closed door.
        let entering = Self(());
        (DOOR.fetch_add(1, SeqCst) & CLOSED == 0).then_some(entering)
    }
}

impl Drop for Entering {
    fn drop(&mut self) {
        DOOR.fetch_sub(1, SeqCst);
    }
}

/// `work` with the interpreter; `None` where that is ending. On any thread that has let go of it.
pub(crate) fn attached<T>(work: impl FnOnce(Python<'_>) -> T) -> Option<T> {
    let entering = Entering::begin()?;
    Python::try_attach(|py| {
        // Inside. The end comes with the interpreter in its hands, so not before this thread lets go of it.
        drop(entering);
        work(py)
    })
}

/// Keeps a thread that is ended within Python: dropped by the unwinding, it never returns, so that no frame below is left. Forgotten where
/// Python returns. Newer releases of Python keep such threads themselves.
#[derive(Debug)]
pub(crate) struct Stay;

impl Drop for Stay {
    fn drop(&mut self) {
        loop {
            std::thread::park();
        }
    }
}

/// Closes the door, for good, and waits for those who are in it.
#[pyfunction]
fn leave(py: Python<'_>) {
    DOOR.fetch_or(CLOSED, SeqCst);
    let counted = PROCESS.get().is_some_and(|process| process.is_this());
    // Without the interpreter, for which they wait.
    py.detach(|| {
        while counted && DOOR.load(SeqCst) != CLOSED {
            std::thread::sleep(Duration::from_micros(100));
        }
    });
}

/// To be called when the module is imported.
pub(crate) fn prepare(module: &Bound<'_, PyModule>) -> PyResult<()> {
    PROCESS.get_or_init(Process::this);
    // Runs after what is registered later, which may use heaps, and before any thread is ended.
    let leave = wrap_pyfunction!(leave, module)?;
    module.py().import("atexit")?.call_method1("register", (leave,)).map(drop)
}
