//! Heaps and blocks as Python classes.

use crate::callback::Callbacks;
use crate::errors::{Error, PointerError, raise};
use crate::memory::Range;
use crate::number;
use crate::share::{Export, Imported, descriptor, interruptible, locked};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use xseg::backend::BackendKind;
use xseg::process::{FORKED, Process};
use xseg::{Allocation, PoolId, StreamFilter, StreamId};

/// A heap: an allocator for one device.
///
/// `conf` is the policy in the form of the environment variable XSEG_CONF, whose value counts where `conf` is None.
/// Any thread may use a heap; a process that was forked off makes its own, for one of its threads. Streams are numbers: a `cudaStream_t` on a GPU (`torch.cuda.Stream.cuda_stream`), 0 the
/// default one.
///
/// Raises ConfigError, and Error where the backend cannot be used.
#[pyclass(module = "xseg", frozen)]
#[derive(Debug)]
pub(crate) struct Heap {
    heap: xseg::Heap,
    /// A child that was forked off gets nothing: it would wait for locks of threads that it does not have.
    process: Process,
    callbacks: Callbacks,
    owned: Owned,
}

impl Heap {
    fn ours(&self) -> PyResult<&xseg::Heap> {
        refuse_forked(self.process).map(|()| &self.heap)
    }
}

#[pymethods]
impl Heap {
    #[new]
    #[pyo3(signature = (conf=None))]
    fn new(py: Python<'_>, #[pyo3(from_py_with = number::conf)] conf: Option<String>) -> PyResult<Self> {
        let made = py.detach(|| match conf {
            Some(conf) => xseg::Heap::builder().conf(&conf).and_then(xseg::HeapBuilder::build),
            None => xseg::Heap::from_env(),
        });
        Ok(Self {
            heap: made.map_err(raise)?,
            process: Process::this(),
            callbacks: Callbacks::default(),
            owned: Owned::default(),
        })
    }

    /// Allocate `bytes` for work on `stream`. The block is freed when it is closed, its `with` ends, or it is collected.
    ///
    /// Raises OutOfMemoryError.
    #[pyo3(signature = (bytes, stream=0))]
    fn alloc(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = number::bytes)] bytes: u64,
        #[pyo3(from_py_with = number::stream)] stream: u64,
    ) -> PyResult<Block> {
        let heap = self.ours()?;
        let found = py.detach(|| heap.alloc(bytes, StreamId(stream))).map_err(raise)?;
        let kind = self.heap.backend().kind();
        let (address, process) = (found.address(), self.process);
        locked(&self.owned).insert(address);
        let held = Held { found, owned: Arc::clone(&self.owned), process };
        Ok(Block { address, bytes, stream, kind, held: Mutex::new(Some(Arc::new(held))), process })
    }

    /// As `alloc`, for a bare address that `free` frees.
    #[pyo3(signature = (bytes, stream=0))]
    fn alloc_raw(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = number::bytes)] bytes: u64,
        #[pyo3(from_py_with = number::stream)] stream: u64,
    ) -> PyResult<u64> {
        let heap = self.ours()?;
        py.detach(|| heap.alloc_raw(bytes, StreamId(stream))).map_err(raise)
    }

    /// Free a block of `alloc_raw` by its address; a `Block` frees its own. Never waits. Raises PointerError.
    fn free(&self, #[pyo3(from_py_with = number::address)] address: u64) -> PyResult<()> {
        let heap = self.ours()?;
        if locked(&self.owned).contains(&address) {
            // It would free the address again when it is closed, then somebody else's.
            let why = format!("the block at {address:#x} belongs to a Block, which frees it; close that");
            return Err(PointerError::new_err(why));
        }
        heap.free_raw(address).map_err(raise)
    }

    /// Export the block at `address` for one import by another process; see `Block.export`.
    fn export(&self, #[pyo3(from_py_with = number::address)] address: u64) -> PyResult<Export> {
        Ok(Export::new(self.ours()?.export(address).map_err(raise)?))
    }

    /// Map the block of an `Export` of another process, which is closed by it. Raises ShareError.
    fn import_(&self, py: Python<'_>, export: &Export) -> PyResult<Imported> {
        let heap = self.ours()?;
        let export = export.take()?;
        let imported = interruptible(py, |go_on| heap.import_while(export, go_on))?;
        Ok(Imported::new(imported, self.heap.backend().kind()))
    }

    /// Map the block that another process sends over a Unix socket by `Export.send`; waits 10 s at most. Raises ShareError.
    fn receive(&self, py: Python<'_>, socket: &Bound<'_, PyAny>) -> PyResult<Imported> {
        let heap = self.ours()?;
        let socket = descriptor(socket)?;
        let imported = interruptible(py, |go_on| heap.receive_while(socket, go_on))?;
        Ok(Imported::new(imported, self.heap.backend().kind()))
    }

    /// Work on `stream`, queued up to its free, uses the block at `address`. `device` is the GPU that a default stream is of, where it
    /// is not the heap's.
    #[pyo3(signature = (address, stream, device=None))]
    fn record_use(
        &self,
        #[pyo3(from_py_with = number::address)] address: u64,
        #[pyo3(from_py_with = number::stream)] stream: u64,
        #[pyo3(from_py_with = number::device_or_none)] device: Option<u32>,
    ) -> PyResult<()> {
        let (heap, stream) = (self.ours()?, StreamId(stream));
        device
            .map_or_else(|| heap.record_use(address, stream), |device| heap.record_use_on(address, stream, device))
            .map_err(raise)
    }

    /// The bytes that were asked for and those that the block at `address` takes up.
    fn block_size(&self, #[pyo3(from_py_with = number::address)] address: u64) -> PyResult<(u64, u64)> {
        self.ours()?.block_size(address).map_err(raise)
    }

    /// Give idle memory back to the driver; returns the bytes.
    fn trim(&self, py: Python<'_>) -> PyResult<u64> {
        let heap = self.ours()?;
        Ok(py.detach(|| heap.trim().released))
    }

    /// Do deferred work; waits for the device only under `remap:quiesce`.
    fn tick(&self, py: Python<'_>) -> PyResult<()> {
        let heap = self.ours()?;
        py.detach(|| heap.tick());
        Ok(())
    }

    /// `stream` is going to be destroyed: what it freed belongs to all when its work has passed.
    fn retire_stream(&self, #[pyo3(from_py_with = number::stream)] stream: u64) -> PyResult<()> {
        self.ours()?.retire_stream(StreamId(stream)).map_err(raise)
    }

    /// Keep the memory behind a range where it is until `unpin`.
    fn pin(
        &self,
        #[pyo3(from_py_with = number::address)] address: u64,
        #[pyo3(from_py_with = number::bytes)] bytes: u64,
    ) -> PyResult<()> {
        self.ours()?.pin(address, bytes).map_err(raise)
    }

    /// End one `pin` of the same range.
    fn unpin(
        &self,
        #[pyo3(from_py_with = number::address)] address: u64,
        #[pyo3(from_py_with = number::bytes)] bytes: u64,
    ) -> PyResult<()> {
        self.ours()?.unpin(address, bytes).map_err(raise)
    }

    /// From now on the GPU `device` reaches all of this heap's memory, what is there and what comes later. Raises Error.
    fn enable_peer(&self, py: Python<'_>, #[pyo3(from_py_with = number::device)] device: u32) -> PyResult<()> {
        let heap = self.ours()?;
        py.detach(|| heap.enable_peer(device)).map_err(raise)
    }

    /// Allocations of `streams` (None: of all; an empty list is an Error) come from the capture pool `pool`, a pair of numbers, until
    /// `end_capture`.
    #[pyo3(signature = (pool, streams=None))]
    fn begin_capture(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = number::pool)] pool: (u64, u64),
        #[pyo3(from_py_with = number::streams)] streams: Option<Vec<u64>>,
    ) -> PyResult<()> {
        let filter = streams
            .map_or(StreamFilter::All, |streams| StreamFilter::Streams(streams.into_iter().map(StreamId).collect()));
        let heap = self.ours()?;
        py.detach(|| heap.begin_capture(PoolId(pool.0, pool.1), filter)).map_err(raise)
    }

    /// End the recording of a pool; the pool stays.
    fn end_capture(&self, #[pyo3(from_py_with = number::pool)] pool: (u64, u64)) -> PyResult<()> {
        self.ours()?.end_capture(PoolId(pool.0, pool.1)).map_err(raise)
    }

    /// End one use of a pool, as when a graph is destroyed.
    fn release_capture(&self, #[pyo3(from_py_with = number::pool)] pool: (u64, u64)) -> PyResult<()> {
        self.ours()?.release_capture(PoolId(pool.0, pool.1)).map_err(raise)
    }

    /// Call `callback(bytes)` before an out-of-memory error; when it returns a true value, the request is tried again.
    /// What it raises, SystemExit and KeyboardInterrupt too, goes to `sys.unraisablehook`, which prints it, and counts as false. A heap
    /// may have several such functions, and keeps them as long as this object lives; they may name it. None is called once the
    /// interpreter ends: from `atexit` on, where xseg was imported.
    fn on_out_of_memory(&self, callback: &Bound<'_, PyAny>) -> PyResult<()> {
        if !callback.is_callable() {
            return Err(number::unlike(callback, "callback", "a function of the number of bytes"));
        }
        self.callbacks.add(self.ours()?, callback);
        Ok(())
    }

    /// What the heap did and holds: bytes and counts by name.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let heap = self.ours()?;
        let stats = py.detach(|| heap.stats());
        let named = PyDict::new(py);
        for (name, value) in xseg_capi::named_statistics(&stats) {
            named.set_item(name, value)?;
        }
        Ok(named)
    }

    /// Set the peaks to the present values.
    fn reset_peaks(&self) -> PyResult<()> {
        self.ours()?.reset_peaks();
        Ok(())
    }

    /// Check the heap's own books, for tests and bug reports; raises AssertionError.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        let heap = self.ours()?;
        py.detach(|| heap.check()).map_err(pyo3::exceptions::PyAssertionError::new_err)
    }

    /// Most physical memory that may exist, in bytes; None: no bound.
    #[getter]
    fn limit(&self) -> Option<u64> {
        Some(self.heap.limit()).filter(|limit| *limit != u64::MAX)
    }

    /// Set the limit in bytes; None: no bound. Returns what exists afterwards.
    #[pyo3(signature = (bytes))]
    fn set_limit(&self, py: Python<'_>, #[pyo3(from_py_with = number::limit)] bytes: Option<u64>) -> PyResult<u64> {
        let heap = self.ours()?;
        Ok(py.detach(|| heap.set_limit(bytes.unwrap_or(u64::MAX))))
    }

    /// "cuda", "host" or "sim".
    #[getter]
    fn backend(&self) -> &'static str {
        self.heap.backend().kind().name()
    }

    /// The settings that differ from the defaults, in the form of XSEG_CONF.
    #[getter]
    fn conf(&self) -> String {
        self.heap.config().to_string()
    }

    fn __repr__(&self) -> String {
        format!("<xseg.Heap on {}>", self.backend())
    }

    /// A function that it calls may name it.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.callbacks.traverse(&visit)
    }

    fn __clear__(&self) {
        self.callbacks.clear();
    }
}

/// The addresses of a heap's blocks that a `Block`, or a view of one, will free.
type Owned = Arc<Mutex<HashSet<u64>>>;

/// What a `Block` and its views hold.
#[derive(Debug)]
struct Held {
    found: Allocation,
    owned: Owned,
    process: Process,
}

impl Drop for Held {
    fn drop(&mut self) {
        // Before the block is freed, after which its address may be another's. In a forked child the lock may be held for ever.
        if self.process.is_this() {
            locked(&self.owned).remove(&self.found.address());
        }
    }
}

/// A block of a heap's memory.
///
/// On a GPU it has `__cuda_array_interface__`, as bytes, so that `torch.as_tensor(block)` or `cupy.asarray(block)` look at it.
#[pyclass(module = "xseg", frozen)]
#[derive(Debug)]
pub(crate) struct Block {
    address: u64,
    bytes: u64,
    stream: u64,
    kind: BackendKind,
    /// Views hold it, too.
    held: Mutex<Option<Arc<Held>>>,
    process: Process,
}

/// A child that was forked off gets no view of what is its parent's: it would write into the parent's memory.
pub(crate) fn refuse_forked(process: Process) -> PyResult<()> {
    if process.is_this() { Ok(()) } else { Err(Error::new_err(FORKED)) }
}

fn closed() -> PyErr {
    PointerError::new_err("the block is closed")
}

impl Block {
    fn live<T>(&self, use_it: impl FnOnce(&Allocation) -> T) -> PyResult<T> {
        let held = locked(&self.held);
        held.as_deref().map(|held| use_it(&held.found)).ok_or_else(closed)
    }

    fn range(&self) -> Range {
        Range { address: self.address, bytes: self.bytes, kind: self.kind }
    }
}

#[pymethods]
impl Block {
    /// First address. Raises PointerError for a closed block.
    #[getter]
    fn address(&self) -> PyResult<u64> {
        self.live(|_| self.address)
    }

    /// Bytes that were asked for.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.bytes
    }

    /// The stream that it was allocated for.
    #[getter]
    fn stream(&self) -> u64 {
        self.stream
    }

    /// Is the block freed?
    #[getter]
    fn closed(&self) -> bool {
        self.live(|_| ()).is_err()
    }

    /// Work on `stream`, queued before the block is freed, uses it too; `device` as for `Heap.record_use`.
    #[pyo3(signature = (stream, device=None))]
    fn record_use(
        &self,
        #[pyo3(from_py_with = number::stream)] stream: u64,
        #[pyo3(from_py_with = number::device_or_none)] device: Option<u32>,
    ) -> PyResult<()> {
        let stream = StreamId(stream);
        self.live(|found| {
            device.map_or_else(|| found.record_use(stream), |device| found.record_use_on(stream, device))
        })?
        .map_err(raise)
    }

    /// Export the block for one import by another process. It may be closed afterwards: its memory goes to nobody else until
    /// the import has ended. Raises ShareError.
    fn export(&self) -> PyResult<Export> {
        Ok(Export::new(self.live(Allocation::export)?.map_err(raise)?))
    }

    /// Free the block now, or with the last memoryview of `view`; again is no error. Never waits.
    fn close(&self) {
        let taken = locked(&self.held).take();
        drop(taken);
    }

    /// The memory as a writable memoryview of bytes, on host memory only. The block is not freed before it and its slices are gone.
    fn view<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        refuse_forked(self.process)?;
        let held = locked(&self.held).clone();
        self.range().view(py, held.ok_or_else(closed)?)
    }

    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.live(|_| ())?;
        self.range().interface(py, self.stream)
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_why))]
    fn __exit__(&self, _why: &Bound<'_, PyTuple>) {
        self.close();
    }

    fn __len__(&self) -> usize {
        self.bytes as usize
    }

    fn __repr__(&self) -> String {
        match self.live(|_| ()) {
            Ok(()) => {
                format!("<xseg.Block of {} bytes at {:#x} on stream {:#x}>", self.bytes, self.address, self.stream)
            }
            Err(_) => "<xseg.Block, closed>".into(),
        }
    }
}
