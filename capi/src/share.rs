//! Memory that several processes use.

use crate::handles::{heap, xseg_heap};
use crate::heap::{block, place, put};
use crate::status::{Failure, guard, xseg_status};
use std::ffi::{c_int, c_void};
use std::os::fd::{BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};
use xseg::Imported;

/// Part of a piece of physical memory that another process may map.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct xseg_exported_handle {
    /// A descriptor, which the caller closes.
    pub fd: c_int,
    /// First byte of the part in what the descriptor stands for.
    pub offset: u64,
    /// Bytes of the part.
    pub bytes: u64,
    /// Bytes of the whole piece, which is what an importer maps.
    pub handle_bytes: u64,
}

/// A descriptor of the caller's that is open during the call.
///
/// # Safety
/// Nobody closes it before `'a` ends.
unsafe fn borrowed<'a>(fd: c_int, what: &str) -> Result<BorrowedFd<'a>, Failure> {
    // SAFETY: looks up a number.
    if unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
        return Err(Failure::argument(format!("`{what}` is no open descriptor")));
    }
    // SAFETY: it is open, and stays so (the caller's promise).
    Ok(unsafe { BorrowedFd::borrow_raw(fd) })
}

/// Gives an import to the caller, by its address.
///
/// # Safety
/// The places are null or valid for writing.
unsafe fn give(imported: Imported, address: *mut *mut c_void, bytes: *mut u64) {
    // SAFETY: the caller's.
    unsafe { put(bytes, imported.len()) };
    let found = imported.into_raw() as usize;
    // SAFETY: the caller's.
    unsafe { put(address, std::ptr::with_exposed_provenance_mut(found)) };
}

/// Descriptors of the memory behind a block, one for each piece in address order. `count` gets how many there are; the first
/// `capacity` of them are written to `handles`, which may be null where `capacity` is 0. While another process uses the
/// memory, keep the block; `xseg_export` sees to that by itself.
///
/// # Safety
/// `handles` is valid for writing `capacity` of them; `count` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_export_handles(
    heap: *mut xseg_heap,
    block: *const c_void,
    handles: *mut xseg_exported_handle,
    capacity: usize,
    count: *mut usize,
) -> xseg_status {
    guard(|| {
        place(count, "count")?;
        if capacity > 0 {
            place(handles, "handles")?;
        }
        let exported = self::heap(heap)?.export_handles(self::block(block)?)?;
        let all = exported.len();
        for (index, part) in exported.into_iter().take(capacity).enumerate() {
            let (offset, bytes, handle_bytes) = (part.offset, part.bytes, part.handle_bytes);
            let part = xseg_exported_handle { fd: part.fd.into_raw_fd(), offset, bytes, handle_bytes };
            // SAFETY: below the capacity, and the caller's.
            unsafe { put(handles.wrapping_add(index), part) };
        }
        // SAFETY: not null, and the caller's.
        unsafe { put(count, all) };
        Ok(())
    })
}

/// Exports a block for one import by another process: `fd` gets a descriptor, which the other process gives to `xseg_import`.
/// It may be sent over a Unix socket or inherited (`FD_CLOEXEC` is set); the caller closes its own copy. The block may be freed
/// at any time afterwards: its memory goes to nobody else until the import has ended, by the importer's word or with its
/// process, which is looked at by `xseg_tick` and the like. What the importer reads must have been written before.
///
/// # Safety
/// `fd` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_export(heap: *mut xseg_heap, block: *const c_void, fd: *mut c_int) -> xseg_status {
    guard(|| {
        place(fd, "fd")?;
        let exported = self::heap(heap)?.export(self::block(block)?)?;
        // SAFETY: not null, and the caller's.
        unsafe { put(fd, OwnedFd::from(exported).into_raw_fd()) };
        Ok(())
    })
}

/// As `xseg_export`, sent over a connected Unix socket, from which the other process takes it by `xseg_import_receive`.
///
/// # Safety
/// No other thread closes `socket` meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_export_send(heap: *mut xseg_heap, block: *const c_void, socket: c_int) -> xseg_status {
    guard(|| {
        // SAFETY: the caller's.
        let socket = unsafe { borrowed(socket, "socket") }?;
        Ok(self::heap(heap)?.export(self::block(block)?)?.send(socket)?)
    })
}

/// Maps a block that another process exported; `address` gets where it starts and `bytes`, which may be null, its length. The
/// descriptor is the library's from now on, also after an error. The memory counts towards no limit of this heap.
///
/// # Safety
/// `fd` is the caller's to give away; `address` and `bytes` are null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_import(
    heap: *mut xseg_heap,
    fd: c_int,
    address: *mut *mut c_void,
    bytes: *mut u64,
) -> xseg_status {
    guard(|| {
        // SAFETY: only looked at; the caller's.
        unsafe { borrowed(fd, "fd") }?;
        // SAFETY: it is open, and the caller gives it away.
        let export = unsafe { OwnedFd::from_raw_fd(fd) };
        place(address, "address")?;
        let imported = self::heap(heap)?.import(export)?;
        // SAFETY: the caller's.
        unsafe { give(imported, address, bytes) };
        Ok(())
    })
}

/// As `xseg_import`, of what `xseg_export_send` sent over a Unix socket. Waits for it 10 s at most.
///
/// # Safety
/// No other thread closes `socket` meanwhile; `address` and `bytes` are null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_import_receive(
    heap: *mut xseg_heap,
    socket: c_int,
    address: *mut *mut c_void,
    bytes: *mut u64,
) -> xseg_status {
    guard(|| {
        // SAFETY: the caller's.
        let socket = unsafe { borrowed(socket, "socket") }?;
        place(address, "address")?;
        let imported = self::heap(heap)?.receive(socket)?;
        // SAFETY: the caller's.
        unsafe { give(imported, address, bytes) };
        Ok(())
    })
}

/// Ends an import by its address. Never waits: it is unmapped, and the exporter told, when work that was queued before has
/// passed, which is looked at by `xseg_tick` and the like.
///
/// # Safety
/// No work that is queued after the call uses the memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_import_end(heap: *mut xseg_heap, address: *mut c_void) -> xseg_status {
    guard(|| Ok(self::heap(heap)?.end_import(block(address)?)?))
}

/// As `xseg_import_end`, and waits until it is unmapped, at most `wait_limit` of the policy. With `XSEG_SHARE` for an import
/// that work still uses it has ended all the same, and is unmapped later.
///
/// # Safety
/// As `xseg_import_end`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_import_close(heap: *mut xseg_heap, address: *mut c_void) -> xseg_status {
    guard(|| Ok(self::heap(heap)?.close_import(block(address)?)?))
}
