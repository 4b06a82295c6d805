//! Reads and writes of device memory that fail instead of faulting.
//!
//! The kernel copies (`process_vm_readv`/`writev` on the own process) through the page table that
//! the accesses of a kernel would go through, so a wrong mapping shows, an absent one is an error,
//! and no Rust reference to memory that may be remapped is ever formed (H6). Many pieces go in one
//! call: the replay stamps every granule.

use rustix::io::Errno;
use std::ffi::c_void;
use std::ptr;

/// Pieces in one system call (`IOV_MAX`).
const BATCH: usize = 1024;

/// An access that did not happen. Earlier pieces of the same call may have been copied.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("no access to {address:#x}: {reason}")]
pub struct AccessError {
    /// First address that could not be accessed, to a page.
    pub address: u64,
    /// Why.
    pub reason: String,
}

crate::error::debug_is_the_sentence!(AccessError);

impl AccessError {
    pub(super) fn new(address: u64, reason: impl Into<String>) -> Self {
        Self { address, reason: reason.into() }
    }
}

/// Why a copy did not go through.
pub(super) enum Refused {
    /// The first address that is not accessible.
    At(u64),
    /// The call is not allowed here (a sandbox): nothing was copied.
    Call,
}

#[derive(Clone, Copy)]
enum Direction {
    Read,
    Write,
}

/// Copies `pieces` to their addresses.
///
/// # Safety
/// No Rust object lies at the addresses.
pub(super) unsafe fn write(pieces: &[(u64, &[u8])]) -> Result<(), Refused> {
    for batch in pieces.chunks(BATCH) {
        let mut local: Vec<_> = batch.iter().map(|(_, bytes)| piece(bytes.as_ptr().cast_mut(), bytes.len())).collect();
        let mut remote: Vec<_> = batch.iter().map(|(address, bytes)| device(*address, bytes.len())).collect();
        // SAFETY: a write only reads the local side, which is borrowed; the caller vouches for the other.
        unsafe { transfer(&mut local, &mut remote, Direction::Write) }?;
    }
    Ok(())
}

/// Fills `pieces` from their addresses.
pub(super) fn read(pieces: &mut [(u64, &mut [u8])]) -> Result<(), Refused> {
    for batch in pieces.chunks_mut(BATCH) {
        let mut remote: Vec<_> = batch.iter().map(|(address, bytes)| device(*address, bytes.len())).collect();
        let mut local: Vec<_> = batch.iter_mut().map(|(_, bytes)| piece(bytes.as_mut_ptr(), bytes.len())).collect();
        // SAFETY: the local side is borrowed exclusively; a read changes nothing at the other.
        unsafe { transfer(&mut local, &mut remote, Direction::Read) }?;
    }
    Ok(())
}

fn piece(start: *mut u8, length: usize) -> libc::iovec {
    libc::iovec { iov_base: start.cast(), iov_len: length }
}

fn device(address: u64, length: usize) -> libc::iovec {
    piece(ptr::with_exposed_provenance_mut(address as usize), length)
}

/// Copies between two lists of equal lengths, piece by piece.
///
/// # Safety
/// The target side of `direction` may be written to.
unsafe fn transfer(local: &mut [libc::iovec], remote: &mut [libc::iovec], direction: Direction) -> Result<(), Refused> {
    let pid = rustix::process::getpid().as_raw_pid();
    let mut first = 0;
    loop {
        while local.get(first).is_some_and(|piece| piece.iov_len == 0) {
            first += 1;
        }
        let (from, to) = (&local[first..], &remote[first..]);
        if from.is_empty() {
            return Ok(());
        }
        let count = from.len() as libc::c_ulong;
        let copied = match direction {
            // SAFETY: both lists are valid for the call; the kernel checks every address.
            Direction::Read => unsafe { libc::process_vm_readv(pid, from.as_ptr(), count, to.as_ptr(), count, 0) },
            // SAFETY: as above; the caller vouches for the target.
            Direction::Write => unsafe { libc::process_vm_writev(pid, from.as_ptr(), count, to.as_ptr(), count, 0) },
        };
        let here = to[0].iov_base.expose_provenance() as u64;
        match usize::try_from(copied) {
            Ok(0) => return Err(Refused::At(here)),
            Ok(copied) => first = skip(local, remote, first, copied),
            Err(_) => match std::io::Error::last_os_error().raw_os_error().map(Errno::from_raw_os_error) {
                Some(Errno::NOSYS | Errno::PERM | Errno::ACCESS) => return Err(Refused::Call),
                _ => return Err(Refused::At(here)),
            },
        }
    }
}

/// Takes `copied` bytes off the front of both lists; says which piece is next. The kernel stops early
/// at a page that it cannot access and after 2 GiB: the next call tells which it was.
fn skip(local: &mut [libc::iovec], remote: &mut [libc::iovec], mut first: usize, mut copied: usize) -> usize {
    while copied > 0 {
        let step = copied.min(local[first].iov_len);
        for side in [&mut local[first], &mut remote[first]] {
            side.iov_base = side.iov_base.cast::<u8>().wrapping_add(step).cast::<c_void>();
            side.iov_len -= step;
        }
        copied -= step;
        first += usize::from(local[first].iov_len == 0);
    }
    first
}
