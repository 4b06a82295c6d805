//! Functions of the client's that the library calls.

use crate::handles::{heap, xseg_heap};
use crate::status::{Failure, guard, xseg_status};
use std::ffi::c_void;
use std::sync::Arc;
use xseg::backend::{MappingCallback, MappingChange, MappingEvent};

/// What happens to a mapping.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum xseg_mapping_change {
    /// It was made and is accessible.
    XSEG_MAPPED = 0,
    /// It is about to be unmapped: what was registered on it must go now.
    XSEG_UNMAPPING = 1,
    /// The driver refused the unmapping that was announced: it stays.
    XSEG_KEPT = 2,
}

/// A change of one mapping. Later versions may add fields at the end.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct xseg_mapping_event {
    /// What happens.
    pub change: xseg_mapping_change,
    /// Number of the device.
    pub device: u32,
    /// First address.
    pub address: *mut c_void,
    /// Length in bytes.
    pub bytes: u64,
}

/// Told of every mapping, in the order of the driver calls and by the thread that makes them. It may call the driver, but
/// not the heap, and must not unwind. `event` is valid during the call.
pub type xseg_mapping_callback = Option<extern "C" fn(event: *const xseg_mapping_event, user: *mut c_void)>;

/// Called without any lock before an out-of-memory error, with the bytes asked for. It may free blocks, and returns
/// other than 0 if it did; the request is then tried again. It must not unwind.
pub type xseg_out_of_memory_callback = Option<extern "C" fn(bytes: u64, user: *mut c_void) -> i32>;

/// The client's pointer, which only the client follows.
#[derive(Clone, Copy)]
pub(crate) struct User(*mut c_void);

// SAFETY: the pointer is never followed here; who sets the callback promises that any thread may call it.
unsafe impl Send for User {}
// SAFETY: as above.
unsafe impl Sync for User {}

impl User {
    pub(crate) fn new(pointer: *mut c_void) -> Self {
        Self(pointer)
    }

    /// A method, so that closures capture the whole.
    pub(crate) fn get(&self) -> *mut c_void {
        self.0
    }
}

/// A callback of C's as the heap takes it.
pub(crate) fn mapping(callback: xseg_mapping_callback, user: *mut c_void) -> Option<MappingCallback> {
    let callback = callback?;
    let user = User::new(user);
    Some(Arc::new(move |event: &MappingEvent| {
        let told = xseg_mapping_event {
            change: match event.change {
                MappingChange::Mapped => xseg_mapping_change::XSEG_MAPPED,
                MappingChange::Unmapping => xseg_mapping_change::XSEG_UNMAPPING,
                MappingChange::Kept => xseg_mapping_change::XSEG_KEPT,
            },
            device: event.device,
            address: std::ptr::without_provenance_mut(event.address as usize),
            bytes: event.bytes,
        };
        callback(&raw const told, user.get());
    }))
}

/// Adds a function that may free memory before an out-of-memory error. When it says that it did, the request is tried again, and
/// the function called again while less and less is live: until the limit has room, and, where the device has nothing more to
/// wait for, until there is a place; for what is larger than the limit once.
///
/// # Safety
/// Any thread may call `callback` with `user` until the heap is destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_on_out_of_memory(
    handle: *mut xseg_heap,
    callback: xseg_out_of_memory_callback,
    user: *mut c_void,
) -> xseg_status {
    guard(|| {
        let callback = callback.ok_or_else(|| Failure::argument("`callback` is a null pointer"))?;
        let user = User::new(user);
        heap(handle)?.on_out_of_memory(Box::new(move |bytes| callback(bytes, user.get()) != 0));
        Ok(())
    })
}
