//! Pools for the memory of captured graphs.

use crate::callbacks::User;
use crate::handles::{heap, xseg_heap};
use crate::heap::{place, put};
use crate::status::{Failure, guard, xseg_status};
use crate::{stream_id, xseg_stream};
use std::ffi::c_void;
use std::sync::Arc;
use xseg::{PoolId, StreamFilter, StreamId};

/// Name of a capture pool; the client chooses it.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct xseg_pool {
    /// First part.
    pub first: u64,
    /// Second part.
    pub second: u64,
}

impl From<xseg_pool> for PoolId {
    fn from(pool: xseg_pool) -> Self {
        Self(pool.first, pool.second)
    }
}

/// Does this stream's memory go to the pool (other than 0)? Asked at every allocation while the pool is open, by the
/// allocating thread. It must not call the heap and must not unwind.
pub type xseg_stream_filter = Option<extern "C" fn(stream: xseg_stream, user: *mut c_void) -> i32>;

/// A graph is going to be captured: from now on what `filter` says yes to is allocated from `pool`, which gets one use more
/// and whose memory stays where it is until it is released. A null `filter` takes every stream. Call it before the
/// capture begins.
///
/// # Safety
/// Any thread may call `filter` with `user` until `xseg_end_capture` has returned and requests that were under way have too.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_begin_capture(
    handle: *mut xseg_heap,
    pool: xseg_pool,
    filter: xseg_stream_filter,
    user: *mut c_void,
) -> xseg_status {
    guard(|| {
        let user = User::new(user);
        let filter = match filter {
            None => StreamFilter::All,
            Some(takes) => StreamFilter::Matching(Arc::new(move |stream: StreamId| {
                takes(std::ptr::without_provenance_mut(stream.0 as usize), user.get()) != 0
            })),
        };
        Ok(heap(handle)?.begin_capture(pool.into(), filter)?)
    })
}

/// As `xseg_begin_capture`, for the `count` streams at `streams`, of which there is one at least.
///
/// # Safety
/// `streams` is valid for reading `count` of them, which exist.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_begin_capture_of(
    handle: *mut xseg_heap,
    pool: xseg_pool,
    streams: *const xseg_stream,
    count: usize,
) -> xseg_status {
    guard(|| {
        if streams.is_null() || count == 0 {
            return Err(Failure::argument("there are no streams to capture"));
        }
        // SAFETY: the caller's.
        let streams = unsafe { std::slice::from_raw_parts(streams, count) };
        let streams = streams.iter().map(|stream| stream_id(*stream)).collect();
        Ok(heap(handle)?.begin_capture(pool.into(), StreamFilter::Streams(streams))?)
    })
}

/// Ends the recording of a pool: allocations are ordinary again, the pool stays. Call it when the capture has ended.
#[unsafe(no_mangle)]
pub extern "C" fn xseg_end_capture(handle: *mut xseg_heap, pool: xseg_pool) -> xseg_status {
    guard(|| Ok(heap(handle)?.end_capture(pool.into())?))
}

/// Adds one use to a pool without sending allocations there.
#[unsafe(no_mangle)]
pub extern "C" fn xseg_retain_capture(handle: *mut xseg_heap, pool: xseg_pool) -> xseg_status {
    guard(|| Ok(heap(handle)?.retain_capture(pool.into())?))
}

/// Ends one use of a pool, as when a graph is destroyed. With the last one its memory is ordinary when its blocks are freed.
#[unsafe(no_mangle)]
pub extern "C" fn xseg_release_capture(handle: *mut xseg_heap, pool: xseg_pool) -> xseg_status {
    guard(|| Ok(heap(handle)?.release_capture(pool.into())?))
}

/// Uses of a pool; 0 for one that is released or never was.
///
/// # Safety
/// `uses` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_capture_uses(handle: *mut xseg_heap, pool: xseg_pool, uses: *mut u32) -> xseg_status {
    guard(|| {
        place(uses, "uses")?;
        let count = heap(handle)?.capture_uses(pool.into());
        // SAFETY: not null, and the caller's.
        unsafe { put(uses, count) };
        Ok(())
    })
}
