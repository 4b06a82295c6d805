//! Thin checked wrappers of the driver calls: the only module that names `cudarc::driver::sys`.
//!
//! `cudarc` panics when the library or a symbol is missing, so [`Api::load`] looks for both first,
//! and an [`Api`] is the proof that they are there. Errors keep the name of the call and of its
//! result; `cudarc`'s own error type is never formatted, since that asks the driver for a text.

use crate::error::{DriverCall, DriverError};
use cudarc::driver::sys::{self, CUresult};
use std::error::Error as _;
use std::ffi::{c_char, c_int, c_void};
use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::sync::OnceLock;

mod kinds;
mod memory;
mod module;

pub(crate) use kinds::KIND_CALLS;
pub(crate) use memory::{Access, MemoryKind};
pub(crate) use module::MODULE_CALLS;

/// `CU_STREAM_LEGACY`.
pub(crate) const STREAM_LEGACY: u64 = 1;
/// `CU_STREAM_PER_THREAD`.
pub(crate) const STREAM_PER_THREAD: u64 = 2;

/// Handles are passed on as numbers: what they point to is the driver's alone.
fn handle<T>(value: u64) -> *mut T {
    with_exposed_provenance_mut(value as usize)
}

fn number<T>(handle: *mut T) -> u64 {
    handle.expose_provenance() as u64
}

/// Every driver with virtual memory management has these.
const REQUIRED: [&str; 37] = [
    "cuInit",
    "cuDriverGetVersion",
    "cuDeviceGet",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetAttribute",
    "cuDeviceCanAccessPeer",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxGetCurrent",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuCtxSynchronize",
    "cuCtxGetDevice",
    "cuMemGetInfo_v2",
    "cuMemGetAllocationGranularity",
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemCreate",
    "cuMemRelease",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemExportToShareableHandle",
    "cuMemImportFromShareableHandle",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventDestroy_v2",
    "cuStreamWaitEvent",
    "cuStreamIsCapturing",
    "cuStreamSynchronize",
    "cuStreamQuery",
    "cuStreamGetCtx",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuThreadExchangeStreamCaptureMode",
];

/// Prototypes of symbols whose bindings depend on the version of the bindings. The result is a
/// plain number, so that one unknown to the bindings is no invalid value.
type RecordContext = unsafe extern "C" fn(*mut c_void, *mut c_void) -> u32;
type StreamIdOf = unsafe extern "C" fn(*mut c_void, *mut u64) -> u32;
type UuidOf = unsafe extern "C" fn(*mut [u8; 16], c_int) -> u32;

/// The loaded driver. Any thread may use it.
#[derive(Debug)]
pub(crate) struct Api {
    library: libloading::Library,
    record_context: Option<RecordContext>,
    stream_id: Option<StreamIdOf>,
    uuid: Option<UuidOf>,
}

/// How a thread's calls bear on captures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CaptureMode(sys::CUstreamCaptureMode);

impl CaptureMode {
    pub(crate) const RELAXED: Self = Self(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED);
}

/// Attributes that the probe asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Attribute {
    ComputeMajor,
    ComputeMinor,
    VirtualMemory,
    PosixHandles,
    RdmaWithVirtualMemory,
}

/// Turns a result into an error that names the call. `cudarc` hands out results as an enumeration.
pub(super) fn check(call: DriverCall, name: &str, result: CUresult) -> Result<(), DriverError> {
    match result {
        CUresult::CUDA_SUCCESS => Ok(()),
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => Err(DriverError::out_of_memory(call, format!("{name}: {result:?}"))),
        other => Err(DriverError::new(call, format!("{name}: {other:?}"))),
    }
}

/// As [`check`] for the calls that are declared here.
fn check_code(call: DriverCall, name: &str, code: u32) -> Result<(), DriverError> {
    let text = match code {
        0 => return Ok(()),
        1 => "CUDA_ERROR_INVALID_VALUE",
        2 => return Err(DriverError::out_of_memory(call, format!("{name}: CUDA_ERROR_OUT_OF_MEMORY"))),
        3 => "CUDA_ERROR_NOT_INITIALIZED",
        4 => "CUDA_ERROR_DEINITIALIZED",
        201 => "CUDA_ERROR_INVALID_CONTEXT",
        400 => "CUDA_ERROR_INVALID_HANDLE",
        700 => "CUDA_ERROR_ILLEGAL_ADDRESS",
        709 => "CUDA_ERROR_CONTEXT_IS_DESTROYED",
        719 => "CUDA_ERROR_LAUNCH_FAILED",
        801 => "CUDA_ERROR_NOT_SUPPORTED",
        900 => "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        999 => "CUDA_ERROR_UNKNOWN",
        other => return Err(DriverError::new(call, format!("{name}: CUDA error {other}"))),
    };
    Err(DriverError::new(call, format!("{name}: {text}")))
}

impl Api {
    /// Loads the driver, once per process.
    ///
    /// # Errors
    /// What is missing, in words.
    pub(crate) fn load() -> Result<&'static Self, String> {
        static API: OnceLock<Result<Api, String>> = OnceLock::new();
        API.get_or_init(Self::open).as_ref().map_err(Clone::clone)
    }

    fn open() -> Result<Self, String> {
        // `cudarc` tries these names in this order (others in between name no real driver), and the
        // symbols must be looked for in the library that it will use.
        let mut failure = String::new();
        let library = ["libcuda.so", "libcuda.so.1"].into_iter().find_map(|name| {
            // SAFETY: the driver's library runs constructors of NVIDIA's that have no conditions.
            let loaded = unsafe { libloading::Library::new(name) };
            // The loader's own words, where there are any.
            let words =
                |error: &libloading::Error| error.source().map_or_else(|| error.to_string(), ToString::to_string);
            loaded.map_err(|error| failure = words(&error)).ok()
        });
        let library = library.ok_or_else(|| {
            format!(
                "the CUDA driver's library libcuda.so.1 cannot be loaded ({failure}); install it with NVIDIA's driver, give a \
                 container its GPUs, or do without by `backend:host`"
            )
        })?;
        let missing: Vec<&str> = REQUIRED.into_iter().filter(|name| !has_symbol(&library, name)).collect();
        if !missing.is_empty() {
            return Err(format!("the CUDA driver has no {}; install one for CUDA 11.2 or later", missing.join(", ")));
        }
        // SAFETY: the prototype of the driver's documentation.
        let record_context = unsafe { library.get::<RecordContext>(b"cuCtxRecordEvent\0") }.ok().map(|s| *s);
        // SAFETY: the prototype of the driver's documentation.
        let stream_id = unsafe { library.get::<StreamIdOf>(b"cuStreamGetId\0") }.ok().map(|s| *s);
        // The second form tells parts of one GPU (MIG) apart.
        let uuid = [b"cuDeviceGetUuid_v2\0".as_slice(), b"cuDeviceGetUuid\0"].into_iter().find_map(|name| {
            // SAFETY: the prototype of the driver's documentation.
            unsafe { library.get::<UuidOf>(name) }.ok().map(|s| *s)
        });
        Ok(Self { library, record_context, stream_id, uuid })
    }

    /// Does the driver have all of these? Callers of wrappers outside the required list ask first.
    pub(crate) fn missing<'a>(&self, names: &[&'a str]) -> Vec<&'a str> {
        names.iter().copied().filter(|name| !has_symbol(&self.library, name)).collect()
    }

    /// Has the driver context-wide events?
    pub(crate) fn has_context_events(&self) -> bool {
        self.record_context.is_some()
    }

    /// Has the driver stream identities?
    pub(crate) fn has_stream_ids(&self) -> bool {
        self.stream_id.is_some()
    }

    pub(crate) fn init(&self) -> Result<(), DriverError> {
        // SAFETY: no conditions; may be called any number of times.
        check(DriverCall::Other, "cuInit", unsafe { sys::cuInit(0) })
    }

    /// Version of CUDA that the driver supports, as 1000 × major + 10 × minor.
    pub(crate) fn version(&self) -> Result<i32, DriverError> {
        let mut version = 0;
        // SAFETY: writes one `int`.
        check(DriverCall::Other, "cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&raw mut version) })?;
        Ok(version)
    }

    pub(crate) fn device_count(&self) -> Result<i32, DriverError> {
        let mut count = 0;
        // SAFETY: writes one `int`.
        check(DriverCall::Other, "cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&raw mut count) })?;
        Ok(count)
    }

    pub(crate) fn device(&self, ordinal: i32) -> Result<i32, DriverError> {
        let mut device = 0;
        // SAFETY: writes one `int`; a wrong ordinal is an error.
        check(DriverCall::Other, "cuDeviceGet", unsafe { sys::cuDeviceGet(&raw mut device, ordinal) })?;
        Ok(device)
    }

    pub(crate) fn device_name(&self, device: i32) -> Result<String, DriverError> {
        let mut name = [0u8; 256];
        let text: *mut c_char = name.as_mut_ptr().cast();
        // SAFETY: writes at most the given number of bytes, the last of them zero.
        check(DriverCall::Other, "cuDeviceGetName", unsafe {
            sys::cuDeviceGetName(text, name.len() as c_int, device)
        })?;
        let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
        Ok(String::from_utf8_lossy(&name[..end]).into_owned())
    }

    /// The device's UUID; zeros where the driver gives none.
    pub(crate) fn device_uuid(&self, device: i32) -> [u8; 16] {
        let mut bytes = [0; 16];
        // SAFETY: the driver writes 16 bytes.
        let code = self.uuid.map(|uuid| unsafe { uuid(&raw mut bytes, device) });
        if code == Some(0) { bytes } else { [0; 16] }
    }

    pub(crate) fn attribute(&self, attribute: Attribute, device: i32) -> Result<i32, DriverError> {
        use sys::CUdevice_attribute as A;
        let name = match attribute {
            Attribute::ComputeMajor => A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            Attribute::ComputeMinor => A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            Attribute::VirtualMemory => A::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED,
            Attribute::PosixHandles => A::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
            Attribute::RdmaWithVirtualMemory => A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
        };
        let mut value = 0;
        // SAFETY: writes one `int`.
        let result = unsafe { sys::cuDeviceGetAttribute(&raw mut value, name, device) };
        check(DriverCall::Other, "cuDeviceGetAttribute", result)?;
        Ok(value)
    }

    pub(crate) fn can_access_peer(&self, device: i32, memory_of: i32) -> Result<bool, DriverError> {
        let mut can = 0;
        // SAFETY: writes one `int`.
        let result = unsafe { sys::cuDeviceCanAccessPeer(&raw mut can, device, memory_of) };
        check(DriverCall::Other, "cuDeviceCanAccessPeer", result)?;
        Ok(can != 0)
    }

    pub(crate) fn retain_primary(&self, device: i32) -> Result<u64, DriverError> {
        let mut context = null_mut();
        // SAFETY: writes one pointer.
        let result = unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut context, device) };
        check(DriverCall::Other, "cuDevicePrimaryCtxRetain", result)?;
        Ok(number(context))
    }

    /// # Safety
    /// Pairs with one [`Api::retain_primary`], whose context this caller no longer uses.
    pub(crate) unsafe fn release_primary(&self, device: i32) -> Result<(), DriverError> {
        // SAFETY: the caller's.
        check(DriverCall::Other, "cuDevicePrimaryCtxRelease", unsafe { sys::cuDevicePrimaryCtxRelease_v2(device) })
    }

    pub(crate) fn current(&self) -> Result<u64, DriverError> {
        let mut context = null_mut();
        // SAFETY: writes one pointer.
        check(DriverCall::Other, "cuCtxGetCurrent", unsafe { sys::cuCtxGetCurrent(&raw mut context) })?;
        Ok(number(context))
    }

    /// The device of the current context.
    pub(crate) fn current_device(&self) -> Result<i32, DriverError> {
        let mut device = 0;
        // SAFETY: writes one `int`.
        check(DriverCall::Other, "cuCtxGetDevice", unsafe { sys::cuCtxGetDevice(&raw mut device) })?;
        Ok(device)
    }

    /// # Safety
    /// `context` exists.
    pub(crate) unsafe fn push(&self, context: u64) -> Result<(), DriverError> {
        // SAFETY: the caller's.
        check(DriverCall::Other, "cuCtxPushCurrent", unsafe { sys::cuCtxPushCurrent_v2(handle(context)) })
    }

    pub(crate) fn pop(&self) -> Result<(), DriverError> {
        let mut context = null_mut();
        // SAFETY: writes one pointer; an empty stack is an error.
        check(DriverCall::Other, "cuCtxPopCurrent", unsafe { sys::cuCtxPopCurrent_v2(&raw mut context) })
    }

    pub(crate) fn synchronize(&self) -> Result<(), DriverError> {
        // SAFETY: no conditions.
        check(DriverCall::Other, "cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
    }

    /// Sets the calling thread's capture mode and says what it was.
    pub(crate) fn exchange_capture_mode(&self, mode: CaptureMode) -> Result<CaptureMode, DriverError> {
        let mut mode = mode;
        // SAFETY: reads and writes one enumeration.
        let result = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode.0) };
        check(DriverCall::Other, "cuThreadExchangeStreamCaptureMode", result)?;
        Ok(mode)
    }

    pub(crate) fn create_event(&self) -> Result<u64, DriverError> {
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        let mut event = null_mut();
        // SAFETY: writes one pointer.
        check(DriverCall::Event, "cuEventCreate", unsafe { sys::cuEventCreate(&raw mut event, flags) })?;
        Ok(number(event))
    }

    /// # Safety
    /// `event` exists and is not named again.
    pub(crate) unsafe fn destroy_event(&self, event: u64) -> Result<(), DriverError> {
        // SAFETY: the caller's.
        check(DriverCall::Event, "cuEventDestroy", unsafe { sys::cuEventDestroy_v2(handle(event)) })
    }

    /// # Safety
    /// `event` and `stream` exist and belong to the current context.
    pub(crate) unsafe fn record(&self, event: u64, stream: u64) -> Result<(), DriverError> {
        // SAFETY: the caller's.
        check(DriverCall::Event, "cuEventRecord", unsafe { sys::cuEventRecord(handle(event), handle(stream)) })
    }

    /// Records an event of all work of a context.
    ///
    /// # Safety
    /// `event` and `context` exist and belong together.
    pub(crate) unsafe fn record_context(&self, event: u64, context: u64) -> Result<(), DriverError> {
        let Some(record) = self.record_context else {
            return Err(DriverError::new(DriverCall::Event, "the driver has no cuCtxRecordEvent"));
        };
        // SAFETY: the caller's.
        check_code(DriverCall::Event, "cuCtxRecordEvent", unsafe { record(handle(context), handle(event)) })
    }

    /// # Safety
    /// `event` exists.
    pub(crate) unsafe fn query(&self, event: u64) -> Result<bool, DriverError> {
        // SAFETY: the caller's.
        match unsafe { sys::cuEventQuery(handle(event)) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            other => check(DriverCall::Event, "cuEventQuery", other).map(|()| true),
        }
    }

    /// # Safety
    /// `event` and `stream` exist.
    pub(crate) unsafe fn stream_wait(&self, stream: u64, event: u64) -> Result<(), DriverError> {
        // SAFETY: the caller's.
        let result = unsafe { sys::cuStreamWaitEvent(handle(stream), handle(event), 0) };
        check(DriverCall::Event, "cuStreamWaitEvent", result)
    }

    /// Is the stream capturing? A legacy stream that another capture blocks counts as capturing.
    ///
    /// # Safety
    /// `stream` exists.
    pub(crate) unsafe fn is_capturing(&self, stream: u64) -> Result<bool, DriverError> {
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream is the caller's; writes one enumeration.
        match unsafe { sys::cuStreamIsCapturing(handle(stream), &raw mut status) } {
            CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT => Ok(true),
            other => check(DriverCall::Other, "cuStreamIsCapturing", other)
                .map(|()| status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE),
        }
    }

    /// The driver's identity of a stream; `None` where the driver has none to give. An error comes with whether it
    /// says that there is no such stream.
    ///
    /// # Safety
    /// `stream` exists.
    pub(crate) unsafe fn stream_id(&self, stream: u64) -> Option<Result<u64, (bool, DriverError)>> {
        let of = self.stream_id?;
        let mut id = 0;
        // SAFETY: the stream is the caller's; writes one number.
        let code = unsafe { of(handle(stream), &raw mut id) };
        // Invalid value, context or handle; all others are failures of the device or of earlier work.
        let dead = matches!(code, 1 | 201 | 400);
        Some(check_code(DriverCall::Other, "cuStreamGetId", code).map(|()| id).map_err(|error| (dead, error)))
    }

    /// The context that a stream was made in.
    ///
    /// # Safety
    /// `stream` exists and does not capture.
    pub(crate) unsafe fn stream_context(&self, stream: u64) -> Result<u64, DriverError> {
        let mut context = null_mut();
        // SAFETY: the stream is the caller's; writes one pointer.
        let result = unsafe { sys::cuStreamGetCtx(handle(stream), &raw mut context) };
        check(DriverCall::Other, "cuStreamGetCtx", result)?;
        Ok(number(context))
    }

    /// Is all work of the stream done?
    ///
    /// # Safety
    /// `stream` exists, belongs to the current context and does not capture.
    pub(crate) unsafe fn query_stream(&self, stream: u64) -> Result<bool, DriverError> {
        // SAFETY: the caller's.
        match unsafe { sys::cuStreamQuery(handle(stream)) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            other => check(DriverCall::Event, "cuStreamQuery", other).map(|()| true),
        }
    }

    /// # Safety
    /// `stream` exists and belongs to the current context.
    pub(crate) unsafe fn synchronize_stream(&self, stream: u64) -> Result<(), DriverError> {
        // SAFETY: the caller's.
        check(DriverCall::Other, "cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(handle(stream)) })
    }
}

/// Undoes something: with a second try, since a refusal may be of the moment, and else with word of what stays.
pub(crate) fn undo(what: &str, call: impl Fn() -> Result<(), DriverError>) {
    if let Err(error) = call().or_else(|_| call()) {
        tracing::warn!(%error, "{what}");
    }
}

fn has_symbol(library: &libloading::Library, name: &str) -> bool {
    // SAFETY: the symbol is looked up, never used as this type.
    unsafe { library.get::<unsafe extern "C" fn()>(name.as_bytes()) }.is_ok()
}
