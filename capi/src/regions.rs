//! What lies where in a heap.

use crate::captures::xseg_pool;
use crate::handles::{heap, xseg_heap};
use crate::heap::{place, put};
use crate::status::{Failure, guard, xseg_status};
use crate::xseg_stream;
use std::ffi::c_void;
use xseg::{Region, RegionState};

/// What a range of mapped addresses is.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum xseg_region_state {
    /// A block of the client.
    XSEG_LIVE = 0,
    /// Free memory.
    XSEG_FREE = 1,
    /// Freed, waiting for the streams that it was declared used on, or for exports of it that are open.
    XSEG_PENDING = 2,
    /// Still mapped, but its memory was given to another address.
    XSEG_ZOMBIE = 3,
}

/// One range of mapped addresses.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct xseg_region {
    /// First address.
    pub address: *mut c_void,
    /// Length in bytes.
    pub bytes: u64,
    /// Bytes that the client asked for; 0 where it has nothing.
    pub requested: u64,
    /// The stream that it was allocated on, or freed by; null also where any may have it.
    pub stream: xseg_stream,
    /// The capture pool that it belongs to; zeros: none.
    pub pool: xseg_pool,
    /// What it is.
    pub state: xseg_region_state,
    /// Other than 0: memory for small blocks.
    pub small: u32,
}

impl From<&Region> for xseg_region {
    fn from(region: &Region) -> Self {
        let pool = region.pool.unwrap_or_default();
        Self {
            address: std::ptr::without_provenance_mut(region.address as usize),
            bytes: region.bytes,
            requested: region.requested,
            stream: std::ptr::without_provenance_mut(region.stream.unwrap_or_default().0 as usize),
            pool: xseg_pool { first: pool.0, second: pool.1 },
            state: match region.state {
                RegionState::Live => xseg_region_state::XSEG_LIVE,
                RegionState::Pending => xseg_region_state::XSEG_PENDING,
                RegionState::Zombie => xseg_region_state::XSEG_ZOMBIE,
                _ => xseg_region_state::XSEG_FREE,
            },
            small: u32::from(region.small),
        }
    }
}

/// What is read of a region that the caller fills: all before `state`, in which anything may stand.
#[repr(C)]
struct Told {
    address: *mut c_void,
    bytes: u64,
    requested: u64,
    stream: xseg_stream,
    pool: xseg_pool,
}

const _: () = assert!(std::mem::offset_of!(xseg_region, pool) == std::mem::offset_of!(Told, pool));

/// Makes a block of a capture pool live again where it lay: `block` is what `xseg_regions` said of it while it was live, and all
/// of its memory must be free by now, for its stream. With the frees of what came after it this is a checkpoint of a pool.
///
/// # Safety
/// `block` is null or valid for reading; its stream exists.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_restore_block(handle: *mut xseg_heap, block: *const xseg_region) -> xseg_status {
    guard(|| {
        place(block.cast_mut(), "block")?;
        // SAFETY: not null, and the caller's; the fields read are the first of a region.
        let Told { address, bytes, requested, stream, pool } = unsafe { block.cast::<Told>().read() };
        let address = address.addr() as u64;
        heap(handle)?.restore_block(pool.into(), address, (requested, bytes), crate::stream_id(stream))?;
        crate::heap::with_note(handle, requested, stream, Ok(address)).map(drop)
    })
}

/// Lists all mapped ranges by address. `count` gets how many there are; the first `capacity` of them are written to `regions`,
/// which may be null where `capacity` is 0.
///
/// # Safety
/// `regions` is valid for writing `capacity` of them; `count` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_regions(
    handle: *mut xseg_heap,
    regions: *mut xseg_region,
    capacity: usize,
    count: *mut usize,
) -> xseg_status {
    guard(|| {
        place(count, "count")?;
        if regions.is_null() && capacity > 0 {
            return Err(Failure::argument("`regions` is a null pointer"));
        }
        let found: Vec<xseg_region> = heap(handle)?.layout().iter().map(xseg_region::from).collect();
        if capacity > 0 {
            // SAFETY: as many as the caller says there is room for, and than there are; the two do not overlap.
            unsafe { std::ptr::copy_nonoverlapping(found.as_ptr(), regions, found.len().min(capacity)) };
        }
        // SAFETY: not null, and the caller's.
        unsafe { put(count, found.len()) };
        Ok(())
    })
}
