//! Blocks that several processes use, as Python classes.

use crate::errors::{ShareError, raise};
use crate::heap::refuse_forked;
use crate::leaving::attached;
use crate::memory::Range;
use crate::number;
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt, PyTuple};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use xseg::backend::BackendKind;
use xseg::error::ShareFault;
use xseg::process::Process;

pub(crate) fn locked<T>(place: &Mutex<T>) -> MutexGuard<'_, T> {
    place.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The descriptor of a Python object (a socket, a number), as one of our own, so that nobody closes it meanwhile.
pub(crate) fn descriptor(object: &Bound<'_, PyAny>) -> PyResult<OwnedFd> {
    let number = match object.is_instance_of::<PyInt>() {
        true => number::descriptor(object)?,
        false => match object.hasattr("fileno")? {
            true => number::descriptor(&object.call_method0("fileno")?)?,
            false => return Err(number::unlike(object, "socket", "a socket, or the number of a descriptor")),
        },
    };
    if number < 0 {
        return Err(PyOSError::new_err(format!("{number} is no open descriptor")));
    }
    // SAFETY: duplicated at once, which fails for a number that is not open.
    let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
    borrowed.try_clone_to_owned().map_err(|error| {
        match ShareFault::system(format_args!("no copy of descriptor {number}"), &error) {
            few @ ShareFault::NoDescriptor(_) => raise(few.into()),
            _ => error.into(),
        }
    })
}

/// Work of the library's that waits for another process, without the interpreter, and ends where a signal's handler raises, as by
/// Ctrl-C. `work` gets the function to be asked whether it is to go on.
pub(crate) fn interruptible<T: Send>(
    py: Python<'_>,
    work: impl FnOnce(Box<dyn FnMut() -> bool + Send>) -> Result<T, xseg::Error> + Send,
) -> PyResult<T> {
    let raised = Arc::new(Mutex::new(None));
    let seen = Arc::clone(&raised);
    let go_on = move || match attached(|py| py.check_signals()) {
        Some(Err(error)) => locked(&seen).replace(error).is_some(),
        _ => true,
    };
    let done = py.detach(|| work(Box::new(go_on)));
    let raised = locked(&raised).take();
    raised.map_or_else(|| done.map_err(raise), Err)
}

/// A block that was exported once, for one import by another process.
///
/// It is sent over a Unix socket (`send`), or as an argument, over a pipe or a queue of `multiprocessing`, once. Closed or lost,
/// the export ends.
#[pyclass(module = "xseg", frozen)]
#[derive(Debug)]
pub(crate) struct Export {
    export: Mutex<Option<xseg::Export>>,
}

impl Export {
    pub(crate) fn new(export: xseg::Export) -> Self {
        Self { export: Mutex::new(Some(export)) }
    }

    /// What it holds; it is closed then.
    pub(crate) fn take(&self) -> PyResult<xseg::Export> {
        locked(&self.export).take().ok_or_else(|| ShareError::new_err("the export is closed"))
    }
}

#[pymethods]
impl Export {
    /// The export that a descriptor is, which it takes over.
    #[staticmethod]
    fn from_fd(fd: &Bound<'_, PyAny>) -> PyResult<Self> {
        let number = number::descriptor(fd)?;
        let own = descriptor(fd)?;
        // SAFETY: open, as was just seen, and the caller gives it away.
        drop(unsafe { OwnedFd::from_raw_fd(number) });
        Ok(Self::new(own.into()))
    }

    /// Its descriptor, which stays its own.
    fn fileno(&self) -> PyResult<RawFd> {
        let export = locked(&self.export);
        let export = export.as_ref().ok_or_else(|| ShareError::new_err("the export is closed"))?;
        Ok(export.as_fd().as_raw_fd())
    }

    /// Its descriptor, which is the caller's from now on.
    fn detach(&self) -> PyResult<RawFd> {
        Ok(OwnedFd::from(self.take()?).into_raw_fd())
    }

    /// Send it over a connected Unix socket, to `Heap.receive` in the other process; waits 10 s at most where that is full. It is
    /// closed then. Raises ShareError.
    fn send(&self, py: Python<'_>, socket: &Bound<'_, PyAny>) -> PyResult<()> {
        let socket = descriptor(socket)?;
        let export = self.take()?;
        interruptible(py, |go_on| export.send_while(socket, go_on))
    }

    /// Is it closed?
    #[getter]
    fn closed(&self) -> bool {
        locked(&self.export).is_none()
    }

    /// End the export, unless it was sent; again is no error.
    fn close(&self) {
        let taken = locked(&self.export).take();
        drop(taken);
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_why))]
    fn __exit__(&self, _why: &Bound<'_, PyTuple>) {
        self.close();
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        let module = py.import("xseg._share")?;
        let copy = module.getattr("to_send")?.call1((self.fileno()?,))?;
        Ok((module.getattr("rebuild")?, PyTuple::new(py, [copy])?))
    }

    fn __repr__(&self) -> String {
        self.fileno().map_or_else(|_| "<xseg.Export, closed>".into(), |fd| format!("<xseg.Export, descriptor {fd}>"))
    }
}

/// A block of another process, mapped here until it is closed or collected.
///
/// What is read must have been written before: nothing is ordered between the processes. On a GPU it has
/// `__cuda_array_interface__`, as a block has.
#[pyclass(module = "xseg", frozen)]
#[derive(Debug)]
pub(crate) struct Imported {
    range: Range,
    /// Views hold it, too.
    found: Mutex<Option<Arc<xseg::Imported>>>,
    process: Process,
}

impl Imported {
    pub(crate) fn new(found: xseg::Imported, kind: BackendKind) -> Self {
        let range = Range { address: found.address(), bytes: found.len(), kind };
        Self { range, found: Mutex::new(Some(Arc::new(found))), process: Process::this() }
    }

    fn open(&self) -> PyResult<Range> {
        self.held().map(|_| self.range)
    }

    fn held(&self) -> PyResult<Arc<xseg::Imported>> {
        locked(&self.found).clone().ok_or_else(|| ShareError::new_err("the import is closed"))
    }
}

#[pymethods]
impl Imported {
    /// First address, in this process. Raises ShareError for a closed one.
    #[getter]
    fn address(&self) -> PyResult<u64> {
        Ok(self.open()?.address)
    }

    /// Bytes that the exporter asked for.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.range.bytes
    }

    /// Is it closed?
    #[getter]
    fn closed(&self) -> bool {
        self.open().is_err()
    }

    /// Wait for the work that uses it, unmap it, and tell the exporter; again is no error. Raises ShareError when that work is
    /// not done within `wait_limit` of the policy: it is then unmapped later. All that happens with the last memoryview of `view`
    /// where one is left.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let taken = locked(&self.found).take().and_then(Arc::into_inner);
        taken.map_or(Ok(()), |found| py.detach(|| found.close()).map_err(raise))
    }

    /// The memory as a writable memoryview of bytes, on host memory only. The import does not end before it and its slices are gone.
    fn view<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        refuse_forked(self.process)?;
        self.range.view(py, self.held()?)
    }

    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.open()?.interface(py, 0)
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_why))]
    fn __exit__(&self, py: Python<'_>, _why: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py)
    }

    fn __len__(&self) -> usize {
        self.range.bytes as usize
    }

    fn __repr__(&self) -> String {
        match self.open() {
            Ok(range) => format!("<xseg.Imported of {} bytes at {:#x}>", range.bytes, range.address),
            Err(_) => "<xseg.Imported, closed>".into(),
        }
    }
}
