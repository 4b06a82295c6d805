//! The public surface of capture pools; [`super::pools`] has what is behind it.
#![forbid(unsafe_code)]

use super::Heap;
use crate::backend::StreamId;
use crate::error::Result;
use std::fmt;
use std::sync::Arc;

/// Name of a capture pool, in two parts as PyTorch's `MempoolId_t`. The client chooses it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct PoolId(pub u64, pub u64);

impl fmt::Display for PoolId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "({}, {})", self.0, self.1)
    }
}

/// Which streams' allocations go to a capture pool.
#[derive(Clone)]
pub enum StreamFilter {
    /// Every stream's.
    All,
    /// These streams', of which there is one at least.
    Streams(Vec<StreamId>),
    /// Those for which the function says so: it is asked at every allocation while the recording is open, on
    /// the allocating thread and without any lock held, and must not call the heap.
    Matching(Arc<dyn Fn(StreamId) -> bool + Send + Sync>),
}

impl fmt::Debug for StreamFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("All"),
            Self::Streams(streams) => f.debug_tuple("Streams").field(streams).finish(),
            Self::Matching(_) => f.write_str("Matching(..)"),
        }
    }
}

/// Capture pools: memory for captured graphs.
///
/// ```
/// use xseg::{Heap, PoolId, StreamFilter, StreamId};
/// # fn main() -> xseg::Result<()> {
/// let heap = Heap::builder().conf("backend:sim,limit:64MiB")?.build()?;
/// let (pool, stream) = (PoolId(0, 1), StreamId(7));
/// heap.begin_capture(pool, StreamFilter::Streams(vec![stream]))?;
/// // The stream's capture begins, and its allocations:
/// drop(heap.alloc(4 << 20, stream)?);
/// // The stream's capture ends.
/// heap.end_capture(pool)?;
/// assert_eq!(heap.stats().captured, 4 << 20);
/// // When the graph is destroyed:
/// heap.release_capture(pool)?;
/// assert_eq!(heap.stats().captured, 0);
/// # Ok(())
/// # }
/// ```
impl Heap {
    /// A graph is going to be captured: from now on allocations of the streams that `filter` takes come from
    /// the capture pool `pool`, which comes into being with its first use and gets one use more. Memory of a
    /// pool stays where it is and is nobody else's until it is released, since graphs have its addresses
    /// baked in; blocks freed there are used again by allocations that go to the pool. One recording into a
    /// pool at a time; where several take a stream, the first counts. Call it before the stream begins to
    /// capture, so that no event over all streams is recorded meanwhile. May wait for the device under
    /// `remap:quiesce`. A heap that is shut down meanwhile waits for the device, which invalidates the capture.
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] while allocations go to this pool already, for a filter of no streams, and where there are too
    /// many pools or streams; [`crate::Error::DeadStream`] for a stream of the filter. Nothing is left of the call then: neither a use
    /// of the pool nor a stream that the heap did not know.
    pub fn begin_capture(&self, pool: PoolId, filter: StreamFilter) -> Result<()> {
        self.inner.ours()?.begin_capture(pool, filter, true)
    }

    /// As [`Heap::begin_capture`], for a pool that no graph is captured into meanwhile: events go on being
    /// recorded, so that no stream of the context may capture unless another recording says so.
    ///
    /// # Errors
    /// As [`Heap::begin_capture`].
    pub fn begin_pool(&self, pool: PoolId, filter: StreamFilter) -> Result<()> {
        self.inner.ours()?.begin_capture(pool, filter, false)
    }

    /// Ends [`Heap::begin_capture`] or [`Heap::begin_pool`]: allocations are ordinary again, the pool and its
    /// use stay. Call it when the stream's capture has ended.
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] when no allocations go to this pool.
    pub fn end_capture(&self, pool: PoolId) -> Result<()> {
        self.inner.ours()?.end_capture(pool)
    }

    /// Adds one use to a pool (which comes into being with it) without sending allocations there.
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] when there are too many pools.
    pub fn retain_capture(&self, pool: PoolId) -> Result<()> {
        self.inner.ours()?.retain_capture(pool)
    }

    /// Ends one use of a pool, as when a graph is destroyed. With the last one the pool is given up: when its
    /// blocks are freed too, its memory is ordinary memory again.
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] for a pool without uses.
    pub fn release_capture(&self, pool: PoolId) -> Result<()> {
        self.inner.ours()?.release_capture(pool)
    }

    /// Makes a block of a capture pool live again at the address where it lay, with its `sizes` as [`Heap::block_size`] or
    /// [`Heap::layout`] gave them: what was asked for, and what it takes up. All of its memory must be free by now, for
    /// `stream`, on which it was allocated. With the frees of what came after it this is a checkpoint of a pool, as PyTorch's
    /// graph trees take them. The block is freed by its address ([`Heap::free_raw`]).
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] for a pool that is gone or has no such addresses, and where anything of the block is in
    /// use or not free for its stream yet; [`crate::Error::DeadStream`].
    pub fn restore_block(&self, pool: PoolId, address: u64, sizes: (u64, u64), stream: StreamId) -> Result<()> {
        self.inner.ours()?.restore_block(pool, address, sizes, stream)
    }

    /// Uses of a pool; 0 for one that is released or never was.
    #[must_use]
    pub fn capture_uses(&self, pool: PoolId) -> u32 {
        self.inner.capture_uses(pool)
    }
}
