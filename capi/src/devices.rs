//! The process's heap of each GPU: one a device, made when it is first asked for, and never destroyed.
//!
//! A heap that is torn down while the process ends would unmap memory under tensors that are still there; the
//! driver takes everything back by itself.

use crate::callbacks::{mapping, xseg_mapping_callback};
use crate::handles::{enter, xseg_heap};
use crate::heap::{hand_out, note_use, place, put};
use crate::noted;
use crate::status::{Failure, guard, xseg_status};
use crate::{stream_id, teller, xseg_stream};
use parking_lot::{Mutex, RwLock};
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Once, OnceLock};
use xseg::backend::{MappingCallback, MappingEvent};
use xseg::conf::VARIABLE;
use xseg::config::BackendChoice;
use xseg::error::PointerFault;
use xseg::{Config, Error, Heap};

/// Devices of one process.
pub(crate) const DEVICES: usize = 64;

/// A device's heap and what is counted beside it.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) heap: Heap,
    handle: usize,
    /// Rounded bytes of all allocations so far.
    pub(crate) bytes_allocated: AtomicU64,
    /// As asked for.
    pub(crate) bytes_requested: AtomicU64,
}

static HEAPS: [OnceLock<Device>; DEVICES] = [const { OnceLock::new() }; DEVICES];
/// Held while a heap is made, which may fail and be tried again.
static MAKING: Mutex<()> = Mutex::new(());
/// This process was forked off one that has device heaps: the driver cannot be used here, nor can locks be trusted.
static FORKED: AtomicBool = AtomicBool::new(false);

extern "C" fn in_child() {
    FORKED.store(true, Relaxed);
    teller::in_child();
}

/// From now on forked children know that they are.
pub(crate) fn watch_forks() {
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        // SAFETY: the function only changes atomics and closes a descriptor, which is allowed after a fork.
        let _ = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
}

pub(crate) fn forked() -> Result<(), Failure> {
    if FORKED.load(Relaxed) {
        let why = "this process was forked off one that uses the GPU; start it by `spawn` to use the GPU in it";
        return Err(Failure { status: xseg_status::XSEG_UNAVAILABLE, why: why.into() });
    }
    Ok(())
}

/// Told of the mappings of all device heaps.
static WATCHERS: RwLock<Vec<MappingCallback>> = RwLock::new(Vec::new());

/// The policy of a device's heap: that of the environment, on this device.
fn config(device: u32) -> Result<Config, Error> {
    let mut config = Config::from_env()?;
    match config.backend {
        BackendChoice::Auto => config.backend = BackendChoice::Cuda(device),
        // Named without a number it is device 0, and then each device gets its own.
        BackendChoice::Cuda(0) => config.backend = BackendChoice::Cuda(device),
        BackendChoice::Cuda(other) if other != device => {
            return Err(Error::Config(format!(
                "{VARIABLE}: `backend:cuda={other}` is another device than {device}, which is in use; leave `backend` out, and each device gets a heap"
            )));
        }
        BackendChoice::Cuda(_) | BackendChoice::Host | BackendChoice::Sim => {}
    }
    Ok(config)
}

/// The heap of a device.
pub(crate) fn device(number: c_int) -> Result<&'static Device, Failure> {
    forked()?;
    let number = usize::try_from(number).ok().filter(|number| *number < DEVICES);
    let number = number.ok_or_else(|| Failure::argument(format!("device numbers are 0 to {}", DEVICES - 1)))?;
    let place = &HEAPS[number];
    if let Some(device) = place.get() {
        return Ok(device);
    }
    let _making = MAKING.lock();
    if let Some(device) = place.get() {
        return Ok(device);
    }
    let told: MappingCallback = Arc::new(move |event| {
        let mut event: MappingEvent = *event;
        // On host memory the backend does not know for which device it stands.
        event.device = number as u32;
        for tell in WATCHERS.read().iter() {
            tell(&event);
        }
    });
    let heap = Heap::builder().config(config(number as u32)?).on_mapping(told).build()?;
    watch_forks();
    let handle = enter(heap.clone(), true)?.expose_provenance();
    let new = Device { heap, handle, bytes_allocated: AtomicU64::new(0), bytes_requested: AtomicU64::new(0) };
    Ok(place.get_or_init(|| new))
}

/// Device heaps that exist, by number.
pub(crate) fn devices() -> impl Iterator<Item = (usize, &'static Device)> {
    HEAPS.iter().enumerate().filter_map(|(number, place)| Some((number, place.get()?)))
}

pub(crate) fn allocate(number: c_int, bytes: u64, stream: xseg_stream) -> Result<u64, Failure> {
    let device = device(number)?;
    let address = device.heap.alloc_raw(bytes, stream_id(stream))?;
    device.bytes_allocated.fetch_add(bytes.max(1).next_multiple_of(xseg::units::UNIT), Relaxed);
    device.bytes_requested.fetch_add(bytes, Relaxed);
    if noted::wanted() {
        let (heap, stream) = (device.handle, stream_id(stream).0);
        noted::allocated(address, noted::Block { heap, device: Some(number as usize), requested: bytes, stream });
    }
    Ok(address)
}

fn no_block(address: u64) -> Failure {
    Failure {
        status: xseg_status::XSEG_INVALID_POINTER,
        why: format!("{address:#x} is no live block of a device's heap"),
    }
}

/// Does `call` on the heap that the block is of.
fn with_owner(block: *const c_void, call: impl Fn(&Heap, u64) -> Result<(), Error>) -> Result<(), Failure> {
    let address = block.addr() as u64;
    for (_, device) in devices() {
        match call(&device.heap, address) {
            Err(Error::InvalidPointer { why: PointerFault::Foreign, .. }) => {}
            done => return Ok(done?),
        }
    }
    Err(no_block(address))
}

pub(crate) fn free(block: *const c_void) -> Result<(), Failure> {
    // In a child the parent has the block; here is only a copy of the books.
    if block.is_null() || FORKED.load(Relaxed) {
        return Ok(());
    }
    noted::free(block.addr() as u64, || with_owner(block, Heap::free_raw))
}

pub(crate) fn record_use(block: *const c_void, stream: xseg_stream, device: Option<c_int>) -> Result<(), Failure> {
    forked()?;
    let device = device.map(whose).transpose()?;
    with_owner(block, |heap, address| match device {
        Some(device) => heap.record_use_on(address, stream_id(stream), device),
        None => heap.record_use(address, stream_id(stream)),
    })?;
    note_use(block.addr() as u64, stream);
    Ok(())
}

/// The number of a device that a caller names.
pub(crate) fn whose(device: c_int) -> Result<u32, Failure> {
    u32::try_from(device).map_err(|_| Failure::argument(format!("device numbers begin with 0, and {device} is none")))
}

/// The device whose heap has this handle; `None`: no device's.
pub(crate) fn number(handle: usize) -> Option<usize> {
    devices().find(|(_, device)| device.handle == handle).map(|(number, _)| number)
}

/// The process's heap of a GPU, made by the first call for it with the policy of `XSEG_CONF`. It lives as long as the process;
/// the handle is for all functions but `xseg_heap_destroy`. Not to be called first while a graph is being captured.
///
/// # Safety
/// `heap` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_device_heap(device: c_int, heap: *mut *mut xseg_heap) -> xseg_status {
    guard(|| {
        place(heap, "heap")?;
        let found = self::device(device)?.handle;
        // SAFETY: not null, and the caller's.
        unsafe { put(heap, std::ptr::with_exposed_provenance_mut(found)) };
        Ok(())
    })
}

/// As `xseg_alloc`, on a device's heap.
///
/// # Safety
/// As `xseg_alloc`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_device_alloc(
    device: c_int,
    bytes: u64,
    stream: xseg_stream,
    block: *mut *mut c_void,
) -> xseg_status {
    // SAFETY: the caller's.
    unsafe { hand_out(block, || allocate(device, bytes, stream)) }
}

/// As `xseg_free`, for a block of any device's heap. In a forked child, and for a null `block`, it does nothing.
///
/// # Safety
/// As `xseg_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_device_free(block: *mut c_void) -> xseg_status {
    guard(|| free(block))
}

/// As `xseg_record_use`, for a block of any device's heap.
///
/// # Safety
/// As `xseg_record_use`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_device_record_use(block: *const c_void, stream: xseg_stream) -> xseg_status {
    guard(|| record_use(block, stream, None))
}

/// As `xseg_record_use_on`, for a block of any device's heap.
///
/// # Safety
/// As `xseg_record_use`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_device_record_use_on(
    block: *const c_void,
    stream: xseg_stream,
    device: c_int,
) -> xseg_status {
    guard(|| record_use(block, stream, Some(device)))
}

/// Bytes of all allocations so far on a device's heap: rounded, and as asked for. Either place may be null; 0 where the
/// device has no heap yet.
///
/// # Safety
/// The places are null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_device_totals(device: c_int, allocated: *mut u64, requested: *mut u64) -> xseg_status {
    guard(|| {
        let found = usize::try_from(device).ok().and_then(|number| HEAPS.get(number)?.get());
        // SAFETY: the caller's.
        unsafe { put(allocated, found.map_or(0, |device| device.bytes_allocated.load(Relaxed))) };
        // SAFETY: the caller's.
        unsafe { put(requested, found.map_or(0, |device| device.bytes_requested.load(Relaxed))) };
        Ok(())
    })
}

/// The device whose heap a block is of, the bytes that were asked for, and those that it takes up; each place may be null.
///
/// # Safety
/// The places are null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_device_block(
    block: *const c_void,
    device: *mut c_int,
    requested: *mut u64,
    size: *mut u64,
) -> xseg_status {
    guard(|| {
        // Before any lock, which may be that of a thread that a child does not have: PyTorch asks at each free under a history.
        forked()?;
        let address = block.addr() as u64;
        let found = devices().find_map(|(number, device)| Some((number, device.heap.block_size(address).ok()?)));
        let Some((number, sizes)) = found else {
            return Err(no_block(address));
        };
        // SAFETY: the caller's.
        unsafe { put(device, number as c_int) };
        // SAFETY: the caller's.
        unsafe { put(requested, sizes.0) };
        // SAFETY: the caller's.
        unsafe { put(size, sizes.1) };
        Ok(())
    })
}

/// From now on `callback` is told of every mapping of the devices' heaps, for as long as the process lives.
///
/// # Safety
/// Any thread may call `callback` with `user` from now on; what it may do is said at `xseg_mapping_callback`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_device_watch(callback: xseg_mapping_callback, user: *mut c_void) -> xseg_status {
    guard(|| {
        let told = mapping(callback, user).ok_or_else(|| Failure::argument("`callback` is a null pointer"))?;
        WATCHERS.write().push(told);
        Ok(())
    })
}
