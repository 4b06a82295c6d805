//! Python functions that a heap calls when memory runs out.

use crate::leaving::{Stay, attached};
use crate::share::locked;
use pyo3::ffi::PyObject;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::PyInt;
use std::ptr;
use std::sync::{Arc, Mutex, Weak};

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

/// Python's functions as those that a thread may leave by its end there, by an unwinding (see [`Stay`]): `pyo3` has them as such that
/// nothing unwinds from, at which the process would be aborted.
mod python {
    use pyo3::ffi::PyObject;
    use std::ffi::c_int;

    unsafe extern "C-unwind" {
        pub(super) fn PyObject_CallFunctionObjArgs(callable: *mut PyObject, ...) -> *mut PyObject;
        pub(super) fn PyObject_IsTrue(object: *mut PyObject) -> c_int;
        pub(super) fn PyErr_WriteUnraisable(object: *mut PyObject);
        pub(super) fn Py_DecRef(object: *mut PyObject);
    }
}

/// Did `callback(bytes)` say something true? On a thread that has let go of the interpreter; not while that ends.
fn ask(callback: &Weak<Py<PyAny>>, bytes: u64) -> bool {
    let asked = attached(|py| {
        let callback = callback.upgrade()?;
        Some(call(callback.bind(py), &PyInt::new(py, bytes)))
    });
    asked.flatten().unwrap_or(false)
}

/// Is `callback(bytes)` true? What it raises is not printed as at the end of a program, which SystemExit would be on any thread.
fn call(callback: &Bound<'_, PyAny>, bytes: &Bound<'_, PyInt>) -> bool {
    let (callback, bytes) = (callback.as_ptr(), bytes.as_ptr());
    let stay = Stay;
    // SAFETY: two live objects and the end of the list, on a thread that has the interpreter.
    let said = unsafe { python::PyObject_CallFunctionObjArgs(callback, bytes, ptr::null_mut::<PyObject>()) };
    let truth = match said.is_null() {
        true => -1,
        // SAFETY: what was just given, which is this function's own.
        false => unsafe { python::PyObject_IsTrue(said) },
    };
    if truth < 0 {
        // SAFETY: one of the two has raised, and `callback` lives.
        unsafe { python::PyErr_WriteUnraisable(callback) };
    }
    // SAFETY: null, or this function's own, given back once.
    unsafe { python::Py_DecRef(said) };
    std::mem::forget(stay);
    truth > 0
}
