//! What a heap did and holds, as a structure that can grow.

use crate::handles::{heap, xseg_heap};
use crate::heap::place;
use crate::status::{Failure, guard, xseg_status};
use xseg::Stats;

/// What a heap did and holds. Sizes in bytes. Exact when no other thread is at work on the heap. Later versions add
/// fields at the end.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct xseg_statistics {
    /// Set it to `sizeof(xseg_statistics)` before the call. Afterwards: how many bytes the library filled.
    pub size: u64,
    /// Bytes in live blocks, rounded to 512 B.
    pub allocated: u64,
    /// Bytes in live blocks as the client asked for them.
    pub requested: u64,
    /// Physical memory of all handles that exist, mapped or not.
    pub reserved: u64,
    /// Most `allocated` at once.
    pub peak_allocated: u64,
    /// Most `requested` at once.
    pub peak_requested: u64,
    /// Most `reserved` at once.
    pub peak_reserved: u64,
    /// Most physical memory that may exist; `UINT64_MAX`: no bound.
    pub limit: u64,
    /// Live blocks.
    pub live_blocks: u64,
    /// Free bytes behind free addresses.
    pub free: u64,
    /// Largest free range at one place.
    pub largest_free: u64,
    /// Bytes of free ranges that share a granule with a live block (internal to granules: no use to others).
    pub partly_live_granules: u64,
    /// Granules that small blocks hold with less than a quarter of their bytes live (internal fragmentation).
    pub pinned_by_small: u64,
    /// Bytes that freed blocks hold until the streams they were declared used on have passed and imports by other
    /// processes have ended.
    pub pending: u64,
    /// Bytes of addresses whose memory was moved away and that are still mapped.
    pub zombie: u64,
    /// Bytes inside pinned ranges.
    pub pinned: u64,
    /// Capture pools that exist, also released ones with live blocks.
    pub capture_pools: u64,
    /// Bytes of memory behind addresses of capture pools; their free part counts in `free` too.
    pub captured: u64,
    /// Allocations so far.
    pub allocs: u64,
    /// Frees so far.
    pub frees: u64,
    /// Requests, also those that failed, that needed more than a fitting free block.
    pub slow_allocs: u64,
    /// Requests that ended in an out-of-memory error.
    pub ooms: u64,
    /// Requests that waited on the host.
    pub host_waits: u64,
    /// Waits put on a stream of the device.
    pub gpu_waits: u64,
    /// Handles moved by remapping.
    pub handles_moved: u64,
    /// Bytes moved by remapping: growth that the moves saved.
    pub bytes_moved: u64,
    /// Handles mapped a second time, so that an idle end of them is used while the rest is live elsewhere.
    pub handles_joined: u64,
    /// Idle handles given up so that smaller ones could be created.
    pub handles_rechunked: u64,
    /// Their bytes.
    pub bytes_rechunked: u64,
    /// Handles given back by trimming and shrinking.
    pub handles_trimmed: u64,
    /// Their bytes.
    pub bytes_trimmed: u64,
    /// Bytes created so far.
    pub bytes_created: u64,
    /// Bytes copied: always 0.
    pub bytes_copied: u64,
    /// Handles created so far.
    pub calls_create: u64,
    /// Handles mapped so far.
    pub calls_map: u64,
    /// Mappings made accessible so far.
    pub calls_set_access: u64,
    /// Mappings unmapped so far.
    pub calls_unmap: u64,
    /// Handles released so far.
    pub calls_release: u64,
    /// Address ranges reserved so far.
    pub calls_reserve: u64,
    /// Time in driver calls in nanoseconds: modelled on `sim` and `host`, measured on `cuda`.
    pub driver_nanos: u64,
    /// Of it: in calls that count in `calls_create`.
    pub nanos_create: u64,
    /// Of it: in calls that count in `calls_map`.
    pub nanos_map: u64,
    /// Of it: in calls that count in `calls_set_access`.
    pub nanos_set_access: u64,
    /// Of it: in calls that count in `calls_unmap`.
    pub nanos_unmap: u64,
    /// Of it: in calls that count in `calls_release`.
    pub nanos_release: u64,
    /// Of it: in calls that count in `calls_reserve`.
    pub nanos_reserve: u64,
    /// Host memory that the heap's tables hold, without untouched pages.
    pub metadata_bytes: u64,
    /// Bytes of blocks that other processes may use, live or pending.
    pub exported: u64,
    /// Bytes of other processes' blocks that are mapped here; they count nowhere else.
    pub imported: u64,
    /// Blocks so far that lie where the plan (`plan` in `XSEG_CONF`) says.
    pub planned: u64,
    /// Blocks so far that the plan foresaw and that lie elsewhere, since their place was not free.
    pub planned_elsewhere: u64,
    /// What became of the plan: 0 none was set, 1 no request of a size that is planned came yet, 2 it is followed, 3 it was
    /// followed to its end, 4 it was left, 5 it foresaw none of the requests so far, 6 it takes more than the limit, 7 the heap
    /// has no addresses for it, 8 it was given up after too many moves.
    pub plan_state: u64,
    /// Bytes so far of the ends for which handles were mapped a second time.
    pub bytes_joined: u64,
    /// Second mappings so far that ended, so that the handle is one again where it was.
    pub joins_ended: u64,
}

impl From<&Stats> for xseg_statistics {
    fn from(stats: &Stats) -> Self {
        Self {
            size: size_of::<Self>() as u64,
            allocated: stats.allocated,
            requested: stats.requested,
            reserved: stats.reserved,
            peak_allocated: stats.peak_allocated,
            peak_requested: stats.peak_requested,
            peak_reserved: stats.peak_reserved,
            limit: stats.limit,
            live_blocks: stats.live_blocks,
            free: stats.free,
            largest_free: stats.largest_free,
            partly_live_granules: stats.partly_live_granules,
            pinned_by_small: stats.pinned_by_small,
            pending: stats.pending,
            zombie: stats.zombie,
            pinned: stats.pinned,
            capture_pools: stats.capture_pools,
            captured: stats.captured,
            allocs: stats.allocs,
            frees: stats.frees,
            slow_allocs: stats.slow_allocs,
            ooms: stats.ooms,
            host_waits: stats.host_waits,
            gpu_waits: stats.gpu_waits,
            handles_moved: stats.handles_moved,
            bytes_moved: stats.bytes_moved,
            handles_joined: stats.handles_joined,
            handles_rechunked: stats.handles_rechunked,
            bytes_rechunked: stats.bytes_rechunked,
            handles_trimmed: stats.handles_trimmed,
            bytes_trimmed: stats.bytes_trimmed,
            bytes_created: stats.bytes_created,
            bytes_copied: stats.bytes_copied,
            calls_create: stats.driver_calls.create,
            calls_map: stats.driver_calls.map,
            calls_set_access: stats.driver_calls.set_access,
            calls_unmap: stats.driver_calls.unmap,
            calls_release: stats.driver_calls.release,
            calls_reserve: stats.driver_calls.reserve,
            driver_nanos: stats.driver_nanos,
            nanos_create: stats.driver_call_nanos.create,
            nanos_map: stats.driver_call_nanos.map,
            nanos_set_access: stats.driver_call_nanos.set_access,
            nanos_unmap: stats.driver_call_nanos.unmap,
            nanos_release: stats.driver_call_nanos.release,
            nanos_reserve: stats.driver_call_nanos.reserve,
            metadata_bytes: stats.metadata_bytes,
            exported: stats.exported,
            imported: stats.imported,
            planned: stats.planned,
            planned_elsewhere: stats.planned_elsewhere,
            plan_state: stats.plan.code(),
            bytes_joined: stats.bytes_joined,
            joins_ended: stats.joins_ended,
        }
    }
}

/// The same by name, for bindings in other languages.
#[must_use]
pub fn named_statistics(stats: &Stats) -> [(&'static str, u64); 53] {
    let filled = xseg_statistics::from(stats);
    [
        ("allocated", filled.allocated),
        ("requested", filled.requested),
        ("reserved", filled.reserved),
        ("peak_allocated", filled.peak_allocated),
        ("peak_requested", filled.peak_requested),
        ("peak_reserved", filled.peak_reserved),
        ("limit", filled.limit),
        ("live_blocks", filled.live_blocks),
        ("free", filled.free),
        ("largest_free", filled.largest_free),
        ("partly_live_granules", filled.partly_live_granules),
        ("pinned_by_small", filled.pinned_by_small),
        ("pending", filled.pending),
        ("zombie", filled.zombie),
        ("pinned", filled.pinned),
        ("capture_pools", filled.capture_pools),
        ("captured", filled.captured),
        ("allocs", filled.allocs),
        ("frees", filled.frees),
        ("slow_allocs", filled.slow_allocs),
        ("ooms", filled.ooms),
        ("host_waits", filled.host_waits),
        ("gpu_waits", filled.gpu_waits),
        ("handles_moved", filled.handles_moved),
        ("bytes_moved", filled.bytes_moved),
        ("handles_joined", filled.handles_joined),
        ("handles_rechunked", filled.handles_rechunked),
        ("bytes_rechunked", filled.bytes_rechunked),
        ("handles_trimmed", filled.handles_trimmed),
        ("bytes_trimmed", filled.bytes_trimmed),
        ("bytes_created", filled.bytes_created),
        ("bytes_copied", filled.bytes_copied),
        ("calls_create", filled.calls_create),
        ("calls_map", filled.calls_map),
        ("calls_set_access", filled.calls_set_access),
        ("calls_unmap", filled.calls_unmap),
        ("calls_release", filled.calls_release),
        ("calls_reserve", filled.calls_reserve),
        ("driver_nanos", filled.driver_nanos),
        ("nanos_create", filled.nanos_create),
        ("nanos_map", filled.nanos_map),
        ("nanos_set_access", filled.nanos_set_access),
        ("nanos_unmap", filled.nanos_unmap),
        ("nanos_release", filled.nanos_release),
        ("nanos_reserve", filled.nanos_reserve),
        ("metadata_bytes", filled.metadata_bytes),
        ("exported", filled.exported),
        ("imported", filled.imported),
        ("planned", filled.planned),
        ("planned_elsewhere", filled.planned_elsewhere),
        ("plan_state", filled.plan_state),
        ("bytes_joined", filled.bytes_joined),
        ("joins_ended", filled.joins_ended),
    ]
}

/// Fills `statistics`, as far as both the program and the library know its fields.
///
/// # Safety
/// `statistics` is null or valid for writing as many bytes as its `size` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_stats(handle: *mut xseg_heap, statistics: *mut xseg_statistics) -> xseg_status {
    guard(|| {
        place(statistics, "statistics")?;
        // SAFETY: every version of the structure begins with its size (the caller's promise).
        let size = unsafe { statistics.cast::<u64>().read() };
        if size < size_of::<u64>() as u64 || size % 8 != 0 {
            return Err(Failure::argument("`statistics.size` is not sizeof(xseg_statistics)"));
        }
        let mut filled = xseg_statistics::from(&heap(handle)?.stats());
        filled.size = filled.size.min(size);
        // SAFETY: no more than the caller says there is, and than there is to give; the two do not overlap.
        unsafe {
            std::ptr::copy_nonoverlapping(
                (&raw const filled).cast::<u8>(),
                statistics.cast::<u8>(),
                filled.size as usize,
            );
        }
        Ok(())
    })
}

/// Sets the peaks to the present values.
#[unsafe(no_mangle)]
pub extern "C" fn xseg_reset_peaks(handle: *mut xseg_heap) -> xseg_status {
    guard(|| {
        heap(handle)?.reset_peaks();
        Ok(())
    })
}

/// The limit in bytes; `UINT64_MAX`: none.
///
/// # Safety
/// `bytes` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_limit(handle: *mut xseg_heap, bytes: *mut u64) -> xseg_status {
    guard(|| {
        place(bytes, "bytes")?;
        let limit = heap(handle)?.limit();
        // SAFETY: not null, and the caller's.
        unsafe { crate::heap::put(bytes, limit) };
        Ok(())
    })
}

/// The backend: `"cuda"`, `"host"` or `"sim"`, as text that lives as long as the library.
///
/// # Safety
/// `name` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_backend(handle: *mut xseg_heap, name: *mut *const std::ffi::c_char) -> xseg_status {
    guard(|| {
        place(name, "name")?;
        let text = match heap(handle)?.backend().kind() {
            xseg::backend::BackendKind::Cuda => c"cuda",
            xseg::backend::BackendKind::Host => c"host",
            xseg::backend::BackendKind::Sim => c"sim",
        };
        // SAFETY: not null, and the caller's.
        unsafe { crate::heap::put(name, text.as_ptr()) };
        Ok(())
    })
}
