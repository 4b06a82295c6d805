//! The functions that PyTorch's `CUDAPluggableAllocator` calls, with its types.
//!
//! `alloc` throws a C++ exception when it has no memory, and the opening of a pool when it is refused, because PyTorch looks
//! at no error code; they are the only functions here that another language's exception leaves. The C++ part of the Python package does not
//! use these but `xseg_device_alloc` and the rest, and throws PyTorch's own type.

use crate::devices::{allocate, device, devices, forked, free, record_use};
use crate::function::Function;
use crate::status::{Failure, caught, guard, note};
use crate::{throw, xseg_stream};
use parking_lot::{Mutex, RwLock};
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use xseg::{Heap, PoolId, StreamFilter, StreamId};

/// `CUDAPluggableAllocator`'s allocation. Size 0 gives null.
///
/// # Safety
/// The caller is C++ that catches exceptions, or lets itself be unwound: out of memory is `std::runtime_error`. `stream` exists.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn xseg_torch_alloc(bytes: usize, device: c_int, stream: xseg_stream) -> *mut c_void {
    if bytes == 0 {
        return std::ptr::null_mut();
    }
    match caught(|| allocate(device, bytes as u64, stream)) {
        Ok(address) => std::ptr::with_exposed_provenance_mut(address as usize),
        Err(failure) => {
            // SAFETY: the caller's.
            unsafe { thrown("CUDA out of memory. xseg", failure) };
            std::ptr::null_mut()
        }
    }
}

/// Throws a failure as a C++ exception; comes back only where no C++ library is loaded to throw one.
///
/// # Safety
/// The caller is `C-unwind`, and is called by C++ that catches exceptions, or lets itself be unwound.
unsafe fn thrown(what: &str, failure: Failure) {
    note(&failure.why);
    let text = format!("{what}: {}", failure.why);
    drop(failure);
    // SAFETY: the caller's; this frame holds nothing but text.
    unsafe { throw::runtime_error(&text) };
    eprintln!("{text}; no C++ library is loaded to throw an exception with");
}

/// `CUDAPluggableAllocator`'s free.
///
/// # Safety
/// As `xseg_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_torch_free(block: *mut c_void, bytes: usize, device: c_int, stream: xseg_stream) {
    // The heap knows them itself.
    let _ = (bytes, device, stream);
    if !block.is_null() {
        told("free a block", guard(|| free(block)));
    }
}

/// `CUDAPluggableAllocator`'s `record_stream`.
///
/// # Safety
/// As `xseg_record_use`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_torch_record_stream(block: *mut c_void, stream: xseg_stream) {
    if !block.is_null() {
        told("record the use of a block", guard(|| record_use(block, stream, None)));
    }
}

/// `CUDAPluggableAllocator`'s reset, that is `torch.cuda.empty_cache()`: every device's idle memory goes back.
#[unsafe(no_mangle)]
pub extern "C" fn xseg_torch_reset() {
    let done = guard(|| {
        for (_, device) in devices() {
            device.heap.trim();
        }
        Ok(())
    });
    told("trim", done);
}

/// `CUDAPluggableAllocator`'s memory fraction: the limit is this share of the device's memory.
#[unsafe(no_mangle)]
pub extern "C" fn xseg_torch_memory_fraction(fraction: f64, device: c_int) {
    let done = guard(|| {
        if !(0.0..=1.0).contains(&fraction) {
            return Err(Failure::argument("a memory fraction is 0 to 1"));
        }
        let heap = &self::device(device)?.heap;
        let total = heap.backend().memory().map_err(xseg::Error::from)?.total;
        heap.set_limit((total as f64 * fraction) as u64);
        Ok(())
    });
    told("set the memory fraction", done);
}

/// `CUDAPluggableAllocator`'s base of an allocation: a block is its own.
///
/// # Safety
/// `size` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_torch_base_alloc(block: *mut c_void, size: *mut usize) -> *mut c_void {
    let address = block.addr() as u64;
    // None in a forked child, where a thread of the parent's may have the lock.
    let found = forked().ok().and_then(|()| devices().find_map(|(_, device)| device.heap.block_size(address).ok()));
    // SAFETY: the caller's.
    unsafe { crate::heap::put(size, found.map_or(0, |sizes| sizes.1 as usize)) };
    block
}

type Filter = Box<dyn Fn(StreamId) -> bool + Send + Sync>;

/// What a pool takes.
pub(crate) enum Takes {
    /// What the function says.
    Filtered(Filter),
    /// What any stream asks for that captures a graph.
    Captures,
}

/// An open pool.
struct Opening {
    /// Empty once the pool's opening has ended, also for requests that are still on their way.
    filter: Arc<RwLock<Option<Filter>>>,
    /// It takes from all captures.
    all: bool,
}

/// By device and pool.
type Open = HashMap<(c_int, PoolId), Opening>;

/// Pools that are open.
static OPEN: Mutex<Option<Open>> = Mutex::new(None);

/// A stream that captures a graph. The legacy stream never does; about it the driver cannot say while another captures.
fn captures(heap: &Heap, stream: StreamId) -> bool {
    const LEGACY: u64 = 1;
    stream.0 > LEGACY && heap.backend().is_capturing(stream)
}

/// Opens a pool. A second opening at once is refused, as PyTorch's own allocator does: an end names only the pool, so that
/// one's end would be the other's.
pub(crate) fn begin_pool(device: c_int, pool: PoolId, takes: Takes) -> Result<(), Failure> {
    let heap = &self::device(device)?.heap;
    let mut open = OPEN.lock();
    let open = open.get_or_insert_default();
    let all = matches!(takes, Takes::Captures);
    let other = open.iter().find(|(key, other)| key.0 == device && key.1 != pool && (all || other.all));
    if let Some(((_, other), _)) = other {
        return Err(Failure::argument(format!(
            "pool {other} is open, and one of the two comes without a filter, so that a capture's memory cannot be told apart; end that first"
        )));
    }
    let filter = match takes {
        Takes::Filtered(filter) => filter,
        Takes::Captures => {
            let heap = heap.clone();
            Box::new(move |stream| captures(&heap, stream))
        }
    };
    let filter = Arc::new(RwLock::new(Some(filter)));
    let asked = Arc::clone(&filter);
    let takes = move |stream: StreamId| asked.read().as_ref().is_some_and(|takes| takes(stream));
    heap.begin_capture(pool, StreamFilter::Matching(Arc::new(takes)))?;
    open.insert((device, pool), Opening { filter, all });
    Ok(())
}

/// Ends a pool's opening.
pub(crate) fn end_pool(device: c_int, pool: PoolId) -> Result<(), Failure> {
    let heap: &Heap = &self::device(device)?.heap;
    let mut open = OPEN.lock();
    let ended = open.get_or_insert_default().remove(&(device, pool));
    heap.end_capture(pool)?;
    drop(open);
    // Dropped without a lock: it may be somebody else's function.
    let filter = ended.and_then(|opening| opening.filter.write().take());
    drop(filter);
    Ok(())
}

/// `CUDAPluggableAllocator`'s opening of a pool: it takes what those streams ask for that capture a graph and that the filter
/// says yes to. A pool that is open is not opened again. Without a filter (a null pointer or an empty one, or in a process without
/// GCC's C++ library) a pool takes from all captures, and is the only one that is open on its device.
///
/// # Safety
/// The caller is C++ that catches exceptions, or lets itself be unwound: a refusal is `std::runtime_error`. `filter` is null or a
/// `std::function<bool(cudaStream_t)>`, which is copied. Any thread may call the copy until `xseg_torch_end_pool` has returned.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn xseg_torch_begin_pool(device: c_int, first: u64, second: u64, filter: *mut c_void) {
    let done = caught(|| {
        // SAFETY: the caller's.
        let filter = unsafe { Function::copy(filter) };
        let heap = self::device(device)?.heap.clone();
        let takes = filter.map_or(Takes::Captures, |filter| {
            // Whether the stream captures is asked first: PyTorch's filter throws where the driver fails.
            Takes::Filtered(Box::new(move |stream| {
                captures(&heap, stream) && filter.call(std::ptr::without_provenance_mut(stream.0 as usize))
            }))
        });
        begin_pool(device, PoolId(first, second), takes)
    });
    if let Err(failure) = done {
        // SAFETY: the caller's.
        unsafe { thrown("xseg could not open a pool", failure) };
    }
}

/// A pool is opened with a filter of the caller's; see `xseg_begin_capture`. While a pool is open a second opening
/// of it is refused, from whichever thread.
///
/// # Safety
/// As `xseg_begin_capture`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_device_begin_pool(
    device: c_int,
    pool: crate::xseg_pool,
    filter: crate::xseg_stream_filter,
    user: *mut c_void,
) -> crate::xseg_status {
    guard(|| {
        let filter = filter.ok_or_else(|| Failure::argument("`filter` is a null pointer"))?;
        let user = crate::callbacks::User::new(user);
        let takes =
            move |stream: StreamId| filter(std::ptr::without_provenance_mut(stream.0 as usize), user.get()) != 0;
        begin_pool(device, pool.into(), Takes::Filtered(Box::new(takes)))
    })
}

/// Ends `xseg_device_begin_pool` of a pool. Its filter is not called any more when this returns.
#[unsafe(no_mangle)]
pub extern "C" fn xseg_device_end_pool(device: c_int, pool: crate::xseg_pool) -> crate::xseg_status {
    guard(|| end_pool(device, pool.into()))
}

/// `CUDAPluggableAllocator`'s end of a pool's opening.
#[unsafe(no_mangle)]
pub extern "C" fn xseg_torch_end_pool(device: c_int, first: u64, second: u64) {
    told("close a pool", guard(|| end_pool(device, PoolId(first, second))));
}

/// `CUDAPluggableAllocator`'s release of a pool.
#[unsafe(no_mangle)]
pub extern "C" fn xseg_torch_release_pool(device: c_int, first: u64, second: u64) {
    let done = guard(|| Ok(self::device(device)?.heap.release_capture(PoolId(first, second))?));
    told("release a pool", done);
}

/// A hook that PyTorch calls cannot say that it failed: it goes to stderr.
fn told(what: &str, status: crate::xseg_status) {
    if status != crate::xseg_status::XSEG_OK {
        // SAFETY: the text of this thread, which the failing call has just set.
        let why = unsafe { std::ffi::CStr::from_ptr(crate::xseg_last_error()) };
        eprintln!("xseg: could not {what}: {}", why.to_string_lossy());
    }
}
