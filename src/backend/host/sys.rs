//! The system calls of the host backend that touch the address space, each with its contract.
//!
//! `memmap2` owns reservations (one object, one `munmap` of everything inside); what it has no
//! call for (`MAP_FIXED`, `PROT_NONE`, `mremap` to a fixed place) goes through `rustix`.

use crate::units::GRANULE;
use memmap2::{MmapOptions, MmapRaw};
use rustix::io::Errno;
use rustix::mm::{MapFlags, MprotectFlags, MremapFlags, ProtFlags};
use std::ffi::c_void;
use std::fs::File;
use std::ptr;

/// A range of addresses that nothing else of the process can be given (H1).
#[derive(Debug)]
pub(super) struct Reservation {
    /// First address, a multiple of a granule.
    pub(super) base: u64,
    /// Length in bytes.
    pub(super) bytes: u64,
    _owner: MmapRaw,
}

impl Reservation {
    /// Reserves `bytes` (a multiple of a granule), with an inaccessible guard on either side.
    ///
    /// # Errors
    /// The system's own, and what to do where it is known.
    pub(super) fn new(bytes: u64) -> Result<Self, String> {
        let padded = bytes.checked_add(2 * GRANULE).and_then(|padded| usize::try_from(padded).ok());
        let padded = padded.ok_or_else(|| format!("{bytes} bytes are more than there are addresses"))?;
        let owner = MmapOptions::new().len(padded).no_reserve_swap().map_anon().map_err(|error| {
            let strict = std::fs::read_to_string("/proc/sys/vm/overcommit_memory").is_ok_and(|mode| mode.trim() == "2");
            let advice =
                if strict { "; vm.overcommit_memory is 2 (strict), set it to 0 or 1, or reserve less" } else { "" };
            format!("{error}{advice}")
        })?;
        let owner = MmapRaw::from(owner);
        let start = owner.as_mut_ptr();
        // SAFETY: exactly the pages that `owner` owns; no reference into them exists (H6).
        unsafe { rustix::mm::mprotect(start.cast(), padded, MprotectFlags::empty()) }
            .map_err(|error| error.to_string())?;
        // Strictly above the start, so that both guards are there: at least a page, at most a granule.
        let base = (start.expose_provenance() as u64 / GRANULE + 1) * GRANULE;
        Ok(Self { base, bytes, _owner: owner })
    }

    /// Does `[address, address + bytes)` lie in it?
    pub(super) fn contains(&self, address: u64, bytes: u64) -> bool {
        address >= self.base && bytes <= self.bytes && address - self.base <= self.bytes - bytes
    }
}

fn pointer(address: u64) -> *mut c_void {
    // Addresses come from `Reservation::new`, which exposes them.
    ptr::with_exposed_provenance_mut(address as usize)
}

/// Maps `bytes` of `file` from `offset` at `address`, readable and writable.
///
/// # Safety
/// The range lies in one reservation (H1) and nothing is mapped in it.
pub(super) unsafe fn map_run(address: u64, bytes: u64, file: &File, offset: u64) -> Result<(), Errno> {
    // SAFETY: MAP_FIXED replaces a hole that the caller owns; the file is never truncated (H8).
    let mapped = unsafe {
        rustix::mm::mmap(
            pointer(address),
            bytes as usize,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED | MapFlags::FIXED | MapFlags::NORESERVE,
            file,
            offset,
        )
    };
    if mapped.is_err() {
        // SAFETY: the caller's range.
        unsafe { refill(address, bytes) };
    }
    mapped.map(drop)
}

/// Puts an inaccessible hole in place of whatever is mapped. In one step, so that no other thread can
/// be given the addresses in between (H2); `munmap` would give them away.
///
/// # Safety
/// The range lies in one reservation (H1), and nobody uses what is mapped there.
pub(super) unsafe fn leave_hole(address: u64, bytes: u64) -> Result<(), Errno> {
    // SAFETY: the caller owns the range, and nobody uses it.
    unsafe { anonymous(address, bytes, MapFlags::FIXED) }
}

/// Moves the page-table entries of a mapping, so that nothing is faulted in again, and leaves a hole.
///
/// # Errors
/// The mapping is at `from` as before and `to` is a hole.
///
/// # Safety
/// As [`map_run`] for `to` and [`leave_hole`] for `from`, which is one mapping of [`map_run`].
pub(super) unsafe fn move_run(from: u64, to: u64, bytes: u64) -> Result<(), Errno> {
    let length = bytes as usize;
    let flags = MremapFlags::MAYMOVE | MremapFlags::DONTUNMAP;
    // SAFETY: `to` is a hole that the caller owns and `from` a mapping that nobody uses. DONTUNMAP
    // keeps the addresses of `from` taken until the hole is there (H2).
    let moved = unsafe { rustix::mm::mremap_fixed(pointer(from), length, length, flags, pointer(to)) };
    if let Err(error) = moved {
        // SAFETY: the caller's range.
        unsafe { refill(to, bytes) };
        return Err(error);
    }
    // SAFETY: the caller owns `from`, and nobody uses it.
    let left = unsafe { leave_hole(from, bytes) };
    if left.is_err() {
        // `from` still shows the same pages of the file, so taking `to` away restores everything.
        // SAFETY: the mapping at `to` is new, nobody uses it.
        let _ = unsafe { leave_hole(to, bytes) };
    }
    left
}

/// After a failed `MAP_FIXED` or `mremap`: the kernel may have unmapped the target before it failed.
/// NOREPLACE fills that gap and does nothing where there is none.
///
/// # Safety
/// The range lies in one reservation (H1).
unsafe fn refill(address: u64, bytes: u64) {
    // SAFETY: replaces nothing.
    let _ = unsafe { anonymous(address, bytes, MapFlags::FIXED_NOREPLACE) };
}

/// # Safety
/// With `FIXED`, the range lies in one reservation and nobody uses what is mapped there.
unsafe fn anonymous(address: u64, bytes: u64, fixed: MapFlags) -> Result<(), Errno> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | fixed;
    // SAFETY: the caller's.
    unsafe { rustix::mm::mmap_anonymous(pointer(address), bytes as usize, ProtFlags::empty(), flags) }.map(drop)
}

/// Can shared mappings be moved with `MREMAP_DONTUNMAP` (Linux 5.13)? Tried on a range of its own, since
/// a kernel that cannot says so only after it has unmapped the target.
pub(super) fn can_move(file: &File) -> Result<(), String> {
    let trial = Reservation::new(2 * GRANULE)?;
    // SAFETY: the range is in `trial`, which nobody else knows.
    unsafe { map_run(trial.base, GRANULE, file, 0) }.map_err(|error| error.to_string())?;
    // SAFETY: both ranges are in `trial`; the first was mapped above.
    unsafe { move_run(trial.base, trial.base + GRANULE, GRANULE) }.map_err(|error| error.to_string())
}

/// VMAs that the backend allows itself: the system's limit, less what the rest of the process needs.
/// At the limit even `malloc` and unmapping fail, so the margin is wide.
pub(super) fn default_budget() -> u64 {
    let limit = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok();
    let limit: u64 = limit.and_then(|limit| limit.trim().parse().ok()).unwrap_or(65_530);
    (limit / 2).min(limit.saturating_sub(10_000))
}
