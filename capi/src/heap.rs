//! Heaps and blocks.

use crate::callbacks::xseg_mapping_callback;
use crate::devices::whose;
use crate::handles::{enter, heap, xseg_heap};
use crate::noted;
use crate::status::{Failure, guard, xseg_status};
use crate::{callbacks, stream_id, xseg_stream};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::num::NonZeroU64;
use xseg::{Allocation, ClientEvent, Config, Error, Heap};

/// Is there a place to write a result to? Asked before the work, so that nothing is done whose result is lost.
pub(crate) fn place<T>(to: *mut T, what: &str) -> Result<*mut T, Failure> {
    if to.is_null() { Err(Failure::argument(format!("`{what}` is a null pointer"))) } else { Ok(to) }
}

/// Writes a result where the caller wants it; nowhere for null.
///
/// # Safety
/// `to` is null or valid for writing a `T`.
pub(crate) unsafe fn put<T>(to: *mut T, value: T) {
    if !to.is_null() {
        // SAFETY: the caller's; outside the heap's memory, so that no invariant (I1 to I11) is touched.
        unsafe { to.write(value) };
    }
}

/// A text of the caller's.
///
/// # Safety
/// `text` is null or a string that ends with a zero byte and is not written to meanwhile.
pub(crate) unsafe fn text<'a>(text: *const c_char, what: &str) -> Result<&'a str, Failure> {
    if text.is_null() {
        return Err(Failure::argument(format!("`{what}` is a null pointer")));
    }
    // SAFETY: the caller's; the text is only read.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map_err(|_| Failure::argument(format!("`{what}` is not UTF-8")))
}

pub(crate) fn block(pointer: *const c_void) -> Result<u64, Failure> {
    NonZeroU64::new(pointer.addr() as u64)
        .map(NonZeroU64::get)
        .ok_or_else(|| Failure::argument("the block is a null pointer"))
}

/// How a heap is made. Set `size` and leave what is not wanted zero.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct xseg_heap_options {
    /// `sizeof(xseg_heap_options)` of the program, so that later versions can add fields.
    pub size: usize,
    /// The policy, in the form of the environment variable `XSEG_CONF`; null: what that variable says.
    pub conf: *const c_char,
    /// Told of every mapping; may be null.
    pub mapping: xseg_mapping_callback,
    /// Passed to `mapping`.
    pub mapping_user: *mut c_void,
}

/// Makes a heap as the options say, and gives its handle in `heap`.
///
/// # Safety
/// `options` points to a structure of the size that it states, with a `conf` that is null or a string; `heap` is
/// null or valid for writing. `mapping` may be called by any thread until the heap is destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_heap_create(options: *const xseg_heap_options, heap: *mut *mut xseg_heap) -> xseg_status {
    guard(|| {
        place(heap, "heap")?;
        if options.is_null() {
            return Err(Failure::argument("`options` is a null pointer"));
        }
        // SAFETY: every version of the structure begins with its size (the caller's promise).
        let size = unsafe { options.cast::<usize>().read() };
        if size < size_of::<xseg_heap_options>() {
            return Err(Failure::argument("`options.size` is not sizeof(xseg_heap_options)"));
        }
        // SAFETY: it is at least that large.
        let options = unsafe { options.read() };
        let config = if options.conf.is_null() {
            Config::from_env()?
        } else {
            // SAFETY: the caller's.
            Config::parse(unsafe { text(options.conf, "options.conf") }?)?
        };
        let mut builder = Heap::builder().config(config);
        if let Some(callback) = callbacks::mapping(options.mapping, options.mapping_user) {
            builder = builder.on_mapping(callback);
        }
        let handle = enter(builder.build()?, false)?;
        // SAFETY: not null, and the caller's.
        unsafe { put(heap, handle) };
        Ok(())
    })
}

/// Makes a heap with the policy of the environment variable `XSEG_CONF`: a GPU where there is one, else host memory.
///
/// # Safety
/// `heap` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_heap_from_env(heap: *mut *mut xseg_heap) -> xseg_status {
    guard(|| {
        place(heap, "heap")?;
        let handle = enter(Heap::from_env()?, false)?;
        // SAFETY: not null, and the caller's.
        unsafe { put(heap, handle) };
        Ok(())
    })
}

/// Makes a heap with the policy `conf`, such as `"backend:host,limit:4GiB"`, whatever the environment says.
///
/// # Safety
/// `conf` is null or a string; `heap` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_heap_from_conf(conf: *const c_char, heap: *mut *mut xseg_heap) -> xseg_status {
    guard(|| {
        place(heap, "heap")?;
        // SAFETY: the caller's.
        let conf = unsafe { text(conf, "conf") }?;
        let handle = enter(Heap::builder().conf(conf)?.build()?, false)?;
        // SAFETY: not null, and the caller's.
        unsafe { put(heap, handle) };
        Ok(())
    })
}

/// Allocates `bytes` for work on `stream`, aligned to 512 bytes. Size 0 gives a block of which nothing may be used.
/// Ordered by the stream, not by the host: work that is queued on `stream` after the call may use the block. The host waits
/// for the device only as the last step before an error, and not longer than `wait_limit` of the policy.
///
/// # Safety
/// `block` is null or valid for writing; `stream` exists.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_alloc(
    heap: *mut xseg_heap,
    bytes: u64,
    stream: xseg_stream,
    block: *mut *mut c_void,
) -> xseg_status {
    // SAFETY: the caller's.
    unsafe { hand_out(block, || with_note(heap, bytes, stream, self::heap(heap)?.alloc_raw(bytes, stream_id(stream)))) }
}

/// As `xseg_alloc`, at a multiple of `align` bytes, a power of two up to 2 MiB.
///
/// # Safety
/// As `xseg_alloc`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_alloc_aligned(
    heap: *mut xseg_heap,
    bytes: u64,
    align: u64,
    stream: xseg_stream,
    block: *mut *mut c_void,
) -> xseg_status {
    // SAFETY: the caller's.
    unsafe {
        hand_out(block, || {
            let made = self::heap(heap)?.alloc_aligned(bytes, align, stream_id(stream));
            with_note(heap, bytes, stream, made.map(Allocation::into_raw))
        })
    }
}

/// As `xseg_alloc`, on one piece of physical memory of its own, for libraries that take memory by the handle. Takes up
/// whole granules of 2 MiB.
///
/// # Safety
/// As `xseg_alloc`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_alloc_contiguous(
    heap: *mut xseg_heap,
    bytes: u64,
    stream: xseg_stream,
    block: *mut *mut c_void,
) -> xseg_status {
    // SAFETY: the caller's.
    unsafe {
        hand_out(block, || {
            let made = self::heap(heap)?.alloc_contiguous(bytes, stream_id(stream));
            with_note(heap, bytes, stream, made.map(Allocation::into_raw))
        })
    }
}

/// The address of a new block, noted if anything of it is to be.
pub(crate) fn with_note(
    heap: *mut xseg_heap,
    bytes: u64,
    stream: xseg_stream,
    made: Result<u64, Error>,
) -> Result<u64, Failure> {
    let address = made?;
    if noted::wanted() {
        let (device, stream) = (crate::devices::number(heap.addr()), stream_id(stream).0);
        noted::allocated(address, noted::Block { heap: heap.addr(), device, requested: bytes, stream });
    }
    Ok(address)
}

/// Writes the address that `find` gives to `block`, which is looked at first: nothing is allocated for no place.
///
/// # Safety
/// `block` is null or valid for writing.
pub(crate) unsafe fn hand_out(block: *mut *mut c_void, find: impl FnOnce() -> Result<u64, Failure>) -> xseg_status {
    guard(|| {
        place(block, "block")?;
        let address = find()?;
        // SAFETY: not null, and the caller's.
        unsafe { put(block, std::ptr::with_exposed_provenance_mut(address as usize)) };
        Ok(())
    })
}

/// Frees a block. Never waits: work that was queued on the block's stream before the call may still use it, and other
/// streams get the memory only when every stream has passed the call. A null `block` is `XSEG_OK`, and nothing is done.
///
/// # Safety
/// No work that is queued after the call uses the block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_free(heap: *mut xseg_heap, block: *mut c_void) -> xseg_status {
    guard(|| {
        let Ok(block) = self::block(block) else { return Ok(()) };
        let heap = self::heap(heap)?;
        Ok(noted::free(block, || heap.free_raw(block))?)
    })
}

/// As `xseg_free`, once `event` (a `cudaEvent_t` or `CUevent` that was recorded) has completed. What the event stands for
/// now counts; it may be recorded again or destroyed right afterwards. On an error the block lives on.
/// A null `block` is `XSEG_OK`, and nothing is done.
///
/// # Safety
/// As `xseg_free`; `event` exists.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_free_after(heap: *mut xseg_heap, block: *mut c_void, event: *mut c_void) -> xseg_status {
    guard(|| {
        let event = ClientEvent(event.addr() as u64);
        let Ok(block) = self::block(block) else { return Ok(()) };
        let heap = self::heap(heap)?;
        Ok(noted::free(block, || heap.free_after(block, event))?)
    })
}

/// The bytes that were asked for and those that the block takes up; either place may be null.
///
/// # Safety
/// `requested` and `size` are null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_block_size(
    heap: *mut xseg_heap,
    block: *const c_void,
    requested: *mut u64,
    size: *mut u64,
) -> xseg_status {
    guard(|| {
        let found = self::heap(heap)?.block_size(self::block(block)?)?;
        // SAFETY: the caller's.
        unsafe { put(requested, found.0) };
        // SAFETY: the caller's.
        unsafe { put(size, found.1) };
        Ok(())
    })
}

/// Says that work on `stream`, queued up to the block's free, uses the block: it is reused only when that work is done.
/// The stream may be of another GPU than the heap, but a default stream is taken for the heap's: see `xseg_record_use_on`.
///
/// # Safety
/// `stream` exists.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_record_use(
    heap: *mut xseg_heap,
    block: *const c_void,
    stream: xseg_stream,
) -> xseg_status {
    guard(|| {
        let block = self::block(block)?;
        self::heap(heap)?.record_use(block, stream_id(stream))?;
        note_use(block, stream);
        Ok(())
    })
}

/// Writes a declared use to the recordings there are.
pub(crate) fn note_use(block: u64, stream: xseg_stream) {
    if noted::wanted() {
        noted::used(block, stream_id(stream).0);
    }
}

/// As `xseg_record_use`, for a stream of the GPU `device`, a default stream as well. A stream of another GPU has to exist when the
/// block is freed: else all that was queued on that GPU is waited for, once no heap has announced a capture there, and before CUDA 12.5
/// the memory is kept until the heap ends.
///
/// # Safety
/// As `xseg_record_use`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_record_use_on(
    heap: *mut xseg_heap,
    block: *const c_void,
    stream: xseg_stream,
    device: c_int,
) -> xseg_status {
    guard(|| {
        let block = self::block(block)?;
        self::heap(heap)?.record_use_on(block, stream_id(stream), whose(device)?)?;
        note_use(block, stream);
        Ok(())
    })
}

/// The stream is going to be destroyed: what it freed belongs to all when its work has passed. Later use of it is an error.
///
/// # Safety
/// `stream` still exists.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_retire_stream(heap: *mut xseg_heap, stream: xseg_stream) -> xseg_status {
    guard(|| Ok(self::heap(heap)?.retire_stream(stream_id(stream))?))
}

/// Gives idle memory whose use has passed back to the driver, down to `keep` of the policy. `released` gets its bytes; it
/// may be null.
///
/// # Safety
/// `released` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_trim(heap: *mut xseg_heap, released: *mut u64) -> xseg_status {
    guard(|| {
        let report = self::heap(heap)?.trim();
        // SAFETY: the caller's.
        unsafe { put(released, report.released) };
        Ok(())
    })
}

/// Sets the most physical memory that may exist, in bytes, rounded down to granules of 2 MiB; `UINT64_MAX`: no bound. Idle
/// memory above it is released as far as its use has passed; `reserved` gets what exists afterwards and may be null.
///
/// # Safety
/// `reserved` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_set_limit(heap: *mut xseg_heap, bytes: u64, reserved: *mut u64) -> xseg_status {
    guard(|| {
        let now = self::heap(heap)?.set_limit(bytes);
        // SAFETY: the caller's.
        unsafe { put(reserved, now) };
        Ok(())
    })
}

/// Does deferred work: call it now and then. It never waits for the device, but where page tables may not be edited beside
/// running kernels.
#[unsafe(no_mangle)]
pub extern "C" fn xseg_tick(heap: *mut xseg_heap) -> xseg_status {
    guard(|| {
        self::heap(heap)?.tick();
        Ok(())
    })
}

/// Keeps the memory behind a range of addresses where it is until `xseg_unpin`: for graphs, network cards and other
/// processes that hold the address.
///
/// # Safety
/// None beyond a valid handle: the range is checked.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_pin(heap: *mut xseg_heap, address: *const c_void, bytes: u64) -> xseg_status {
    guard(|| Ok(self::heap(heap)?.pin(block(address)?, bytes)?))
}

/// Ends one `xseg_pin` of the same granules of 2 MiB, to which ranges are rounded outwards.
///
/// # Safety
/// Nothing outside relies on the range any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_unpin(heap: *mut xseg_heap, address: *const c_void, bytes: u64) -> xseg_status {
    guard(|| Ok(self::heap(heap)?.unpin(block(address)?, bytes)?))
}
