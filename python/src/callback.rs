//! Python functions that a heap calls when memory runs out.

use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use std::sync::{Arc, Mutex, Weak};

use crate::share::locked;

/// Those of one Python heap, which owns them: the library's heap, which blocks and views hold as well, only knows of them. So Python's
/// garbage collector sees all that there is to a function that names its heap, and nothing of Python's is dropped elsewhere.
///
/// Locked by threads that hold the interpreter, and never while Python code may run.
#[derive(Debug, Default)]
pub(crate) struct Callbacks(Mutex<Vec<Arc<Py<PyAny>>>>);

impl Callbacks {
    /// Has the heap call `callback` as long as this keeps it.
    pub(crate) fn add(&self, heap: &xseg::Heap, callback: &Bound<'_, PyAny>) {
        let callback = Arc::new(callback.clone().unbind());
        let known = Arc::downgrade(&callback);
        locked(&self.0).push(callback);
        heap.on_out_of_memory(Box::new(move |bytes| ask(&known, bytes)));
    }

    /// For the garbage collector. What is being changed just now is in use.
    pub(crate) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        let Ok(callbacks) = self.0.try_lock() else { return Ok(()) };
        callbacks.iter().try_for_each(|callback| visit.call(&**callback))
    }

    /// Forgets them all: the heap calls none any more.
    pub(crate) fn clear(&self) {
        // Dropped without the lock: that runs Python code.
        let forgotten = std::mem::take(&mut *locked(&self.0));
        drop(forgotten);
    }
}

/// Did `callback(bytes)` say something true? On a thread that has let go of the interpreter.
fn ask(callback: &Weak<Py<PyAny>>, bytes: u64) -> bool {
    Python::attach(|py| {
        let Some(callback) = callback.upgrade() else { return false };
        let called = callback.call1(py, (bytes,)).and_then(|said| said.is_truthy(py));
        called.unwrap_or_else(|error| {
            // Not printed as at the end of a program, which SystemExit would be on any thread.
            error.write_unraisable(py, Some(callback.bind(py)));
            false
        })
    })
}
