//! The C interface of xseg: what `include/xseg.h` declares.
//!
//! Every function that can fail returns an [`xseg_status`] and leaves what it was to fill untouched on an
//! error; the sentence for it is [`xseg_last_error`]. No panic leaves a function. Handles are numbers that
//! the library looks up, so that one that was destroyed is found out. Any thread may call any function,
//! where the text of one does not say otherwise.
#![allow(non_camel_case_types, reason = "the names are C's")]

mod callbacks;
mod captures;
mod devices;
mod function;
mod handles;
mod heap;
mod leaving;
mod noted;
mod opened;
mod peers;
mod quiet;
mod record;
mod regions;
mod share;
mod statistics;
mod status;
mod tags;
mod teller;
mod throw;
mod tickets;
mod torch;

pub use callbacks::*;
pub use captures::*;
pub use devices::*;
pub use handles::*;
pub use heap::*;
pub use peers::*;
pub use record::*;
pub use regions::*;
pub use share::*;
pub use statistics::*;
pub use status::*;
pub use tags::*;
pub use tickets::*;
pub use torch::*;

use std::ffi::{c_char, c_void};

/// A stream: a `cudaStream_t` or `CUstream`; null is the default stream.
pub type xseg_stream = *mut c_void;

/// Major version of the interface: programs built for another one do not fit.
pub const XSEG_VERSION_MAJOR: u32 = 0;
/// Minor version of the interface: later ones add to it.
pub const XSEG_VERSION_MINOR: u32 = 1;
/// Patch of the interface.
pub const XSEG_VERSION_PATCH: u32 = 0;

/// Version of the library in use: major × 65536 + minor × 256 + patch.
#[unsafe(no_mangle)]
pub extern "C" fn xseg_version() -> u32 {
    XSEG_VERSION_MAJOR << 16 | XSEG_VERSION_MINOR << 8 | XSEG_VERSION_PATCH
}

/// Version of the library in use as text, which lives as long as the library.
#[unsafe(no_mangle)]
pub extern "C" fn xseg_version_string() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

pub(crate) fn stream_id(stream: xseg_stream) -> xseg::StreamId {
    xseg::StreamId(stream.addr() as u64)
}
