//! Status codes, the calling thread's last error, and the wall that panics do not pass.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};
use xseg::Error;

/// What a function says of its success.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum xseg_status {
    /// It did what it says.
    XSEG_OK = 0,
    /// No memory for the request, after everything was tried. The heap is unharmed.
    XSEG_OUT_OF_MEMORY = 1,
    /// The heap's addresses hold no range of this length; raise `reserve`, or no block can be as long.
    XSEG_ADDRESS_SPACE = 2,
    /// An address that is no live block of the heap: foreign, freed already, or inside a block.
    XSEG_INVALID_POINTER = 3,
    /// A null pointer where none may be, a value out of range, text that is not UTF-8.
    XSEG_INVALID_ARGUMENT = 4,
    /// A stream that was retired, or that the driver does not know.
    XSEG_DEAD_STREAM = 5,
    /// The driver refused a call. The heap is as it was.
    XSEG_DRIVER = 6,
    /// The system's limit on the mappings of a process is near (`vm.max_map_count`).
    XSEG_MAPPING_LIMIT = 7,
    /// The backend cannot be used here: no GPU, no driver; or a GPU has no way to another's memory.
    XSEG_UNAVAILABLE = 8,
    /// A key or value of the configuration is wrong, or the plan that it names.
    XSEG_CONFIG = 9,
    /// The heap was shut down.
    XSEG_SHUT_DOWN = 10,
    /// The handle names no heap: it was destroyed, or never one.
    XSEG_STALE_HANDLE = 11,
    /// A defect of xseg; the text says where.
    XSEG_INTERNAL = 12,
    /// A file cannot be written; the text says why.
    XSEG_IO = 13,
    /// Memory could not be given to or taken from another process.
    XSEG_SHARE = 14,
}

impl xseg_status {
    const ALL: [(Self, &'static str); 15] = [
        (Self::XSEG_OK, "XSEG_OK\0"),
        (Self::XSEG_OUT_OF_MEMORY, "XSEG_OUT_OF_MEMORY\0"),
        (Self::XSEG_ADDRESS_SPACE, "XSEG_ADDRESS_SPACE\0"),
        (Self::XSEG_INVALID_POINTER, "XSEG_INVALID_POINTER\0"),
        (Self::XSEG_INVALID_ARGUMENT, "XSEG_INVALID_ARGUMENT\0"),
        (Self::XSEG_DEAD_STREAM, "XSEG_DEAD_STREAM\0"),
        (Self::XSEG_DRIVER, "XSEG_DRIVER\0"),
        (Self::XSEG_MAPPING_LIMIT, "XSEG_MAPPING_LIMIT\0"),
        (Self::XSEG_UNAVAILABLE, "XSEG_UNAVAILABLE\0"),
        (Self::XSEG_CONFIG, "XSEG_CONFIG\0"),
        (Self::XSEG_SHUT_DOWN, "XSEG_SHUT_DOWN\0"),
        (Self::XSEG_STALE_HANDLE, "XSEG_STALE_HANDLE\0"),
        (Self::XSEG_INTERNAL, "XSEG_INTERNAL\0"),
        (Self::XSEG_IO, "XSEG_IO\0"),
        (Self::XSEG_SHARE, "XSEG_SHARE\0"),
    ];
}

/// A status and its sentence.
#[derive(Debug)]
pub struct Failure {
    pub(crate) status: xseg_status,
    pub(crate) why: String,
}

impl Failure {
    pub(crate) fn argument(why: impl Into<String>) -> Self {
        Self { status: xseg_status::XSEG_INVALID_ARGUMENT, why: format!("invalid argument: {}", why.into()) }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let status = match &error {
            Error::OutOfMemory(_) => xseg_status::XSEG_OUT_OF_MEMORY,
            Error::AddressSpace { .. } => xseg_status::XSEG_ADDRESS_SPACE,
            Error::InvalidPointer { .. } => xseg_status::XSEG_INVALID_POINTER,
            Error::InvalidArgument(_) => xseg_status::XSEG_INVALID_ARGUMENT,
            Error::DeadStream { .. } => xseg_status::XSEG_DEAD_STREAM,
            Error::Driver(_) => xseg_status::XSEG_DRIVER,
            Error::MappingLimit { .. } => xseg_status::XSEG_MAPPING_LIMIT,
            Error::Unavailable { .. } | Error::Unreachable { .. } => xseg_status::XSEG_UNAVAILABLE,
            Error::Config(_) | Error::Plan { .. } => xseg_status::XSEG_CONFIG,
            Error::ShutDown => xseg_status::XSEG_SHUT_DOWN,
            Error::Share(_) => xseg_status::XSEG_SHARE,
            _ => xseg_status::XSEG_INTERNAL,
        };
        Self { status, why: error.to_string() }
    }
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Notes the sentence of a failure for [`xseg_last_error`].
pub(crate) fn note(why: &str) {
    let text = CString::new(why.replace('\0', " ")).unwrap_or_default();
    // A thread that is ending has no last error any more.
    let _ = LAST.try_with(|last| {
        if let Ok(mut last) = last.try_borrow_mut() {
            *last = text;
        }
    });
}

/// Runs the body of a C function: a failure and a panic become a status with a sentence.
pub(crate) fn guard(body: impl FnOnce() -> Result<(), Failure>) -> xseg_status {
    match caught(body) {
        Ok(()) => xseg_status::XSEG_OK,
        Err(failure) => {
            note(&failure.why);
            failure.status
        }
    }
}

/// Runs `body`; a panic becomes a failure.
pub(crate) fn caught<T>(body: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    // After a panic nothing of the body's is looked at again; the heap's own locks do not poison.
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().map(ToString::to_string);
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        Err(Failure { status: xseg_status::XSEG_INTERNAL, why: format!("a defect of xseg: {text}; please report it") })
    })
}

/// The sentence of the last call on this thread that failed; empty before the first. Never null. It is valid until
/// another call on this thread fails.
#[unsafe(no_mangle)]
pub extern "C" fn xseg_last_error() -> *const c_char {
    let pointer = LAST.try_with(|last| last.try_borrow().map_or(c"".as_ptr(), |text| text.as_ptr()));
    pointer.unwrap_or(c"".as_ptr())
}

/// The name of a status, as text that lives as long as the library; `"unknown status"` for another number.
#[unsafe(no_mangle)]
pub extern "C" fn xseg_status_name(status: c_int) -> *const c_char {
    let name = xseg_status::ALL.iter().find(|(known, _)| *known as c_int == status);
    name.map_or("unknown status\0", |(_, name)| name).as_ptr().cast()
}
