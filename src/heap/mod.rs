//! The heap: what a program allocates from.

mod after;
mod allocation;
mod builder;
mod captures;
mod contiguous;
mod execute;
mod export;
mod hot;
mod import;
mod inner;
mod joins;
mod ladder;
mod last;
mod layout;
mod peers;
mod planned;
mod pools;
mod report;
mod restore;
mod shrink;
mod slack;
mod space;
mod stats;
mod streams;
mod tally;
#[cfg(test)]
mod turn_tests;
mod warm;

pub use allocation::Allocation;
pub use builder::HeapBuilder;
pub use captures::{PoolId, StreamFilter};
pub use export::Export;
pub use import::Imported;
pub use layout::{Region, RegionState};
pub use planned::PlanState;
pub use stats::Stats;

use crate::backend::{Backend, ClientEvent, ExportedHandle, StreamId};
use crate::config::Config;
use crate::error::Result;
use crate::units::{GRANULE, UNIT, round_down};
use inner::Inner;
use std::fmt;
use std::sync::Arc;

/// A function that may free memory before an out-of-memory error: gets the bytes asked for, says whether it freed any.
pub type OutOfMemoryCallback = Box<dyn Fn(u64) -> bool + Send + Sync>;

/// An allocator for one device. Clones share it; any thread may use it. A forked child must not: its memory is the parent's. Calls
/// that can fail are refused there with [`crate::Error::Unavailable`], others do nothing, and what is dropped is only forgotten. That
/// is so but for the fast path of `alloc` and `free_raw`, which asks nothing, and for what only looks (`stats`, `layout`, `check`),
/// which may wait for ever for a lock that another thread held at the fork. A heap that the child makes is for one thread of it: what
/// the parent's threads waited for at the fork is copied, too. A child that needs more is to be a program of its own (`exec`, `spawn`).
///
/// ```
/// use xseg::{Heap, StreamId};
/// # fn main() -> xseg::Result<()> {
/// let heap = Heap::builder().conf("backend:sim,limit:64MiB")?.build()?;
/// let block = heap.alloc(16 << 20, StreamId(0))?;
/// assert_eq!(block.len(), 16 << 20);
/// drop(block);
/// assert_eq!(heap.stats().allocated, 0);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Heap {
    inner: Arc<Inner>,
}

impl fmt::Debug for Heap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Heap").field("backend", &self.inner.driver.backend().kind()).finish_non_exhaustive()
    }
}

/// What [`Heap::trim`] did, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrimReport {
    /// Given back to the driver.
    pub released: u64,
    /// Still reserved.
    pub reserved: u64,
}

impl Heap {
    /// A heap with the policy of the environment variable `XSEG_CONF`, on the backend that it names.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for a wrong key or value, and as [`HeapBuilder::build`].
    pub fn from_env() -> Result<Self> {
        Self::builder().config(Config::from_env()?).build()
    }

    /// A builder with the default policy.
    #[must_use]
    pub fn builder() -> HeapBuilder {
        HeapBuilder::default()
    }

    /// Allocates `bytes` for work on `stream`; freed when the [`Allocation`] is dropped. Size 0 gives a
    /// block of 512 B of which the client may use nothing. Any thread may call. Waits for the device
    /// only as the last step before an error.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`], [`crate::Error::AddressSpace`], [`crate::Error::DeadStream`],
    /// [`crate::Error::Driver`]; the heap is unharmed by each.
    pub fn alloc(&self, bytes: u64, stream: StreamId) -> Result<Allocation> {
        self.alloc_aligned(bytes, UNIT, stream)
    }

    /// As [`Heap::alloc`], at an address that is a multiple of `align` bytes (a power of two up to 2 MiB).
    ///
    /// # Errors
    /// As [`Heap::alloc`], and [`crate::Error::InvalidArgument`] for the alignment.
    pub fn alloc_aligned(&self, bytes: u64, align: u64, stream: StreamId) -> Result<Allocation> {
        let block = self.inner.alloc(bytes, align, stream)?;
        Ok(Allocation { heap: self.clone(), block, bytes, stream, owned: true })
    }

    /// Allocates and gives the bare address; end it with [`Heap::free_raw`].
    ///
    /// # Errors
    /// As [`Heap::alloc`].
    pub fn alloc_raw(&self, bytes: u64, stream: StreamId) -> Result<u64> {
        Ok(self.inner.alloc(bytes, UNIT, stream)?.address)
    }

    /// Frees a block by its address. Its stream may use the memory again at once; others when every
    /// stream has passed. Never waits. Any thread may call.
    ///
    /// # Errors
    /// [`crate::Error::InvalidPointer`] for an address that is no live block; the heap is unharmed.
    pub fn free_raw(&self, address: u64) -> Result<()> {
        self.inner.free(address)
    }

    /// As [`Heap::free_raw`], once `event` has completed: for blocks that work which the heap is not told of
    /// uses until then. What the event stands for now counts, so that it may be recorded again or destroyed
    /// right afterwards. Never waits. Any thread may call.
    ///
    /// On `cuda` the event exists and was not recorded in a capture under way.
    ///
    /// # Errors
    /// As [`Heap::free_raw`]; [`crate::Error::Driver`] when the backend refuses the event. The block then lives on.
    pub fn free_after(&self, address: u64, event: ClientEvent) -> Result<()> {
        self.inner.ours()?.free_after(address, event)
    }

    /// As [`Heap::alloc`], on exactly one handle that starts at the block's address: for libraries that take
    /// memory for one piece, and for export. Takes up whole granules of 2 MiB, and always the slow path.
    ///
    /// # Errors
    /// As [`Heap::alloc`].
    pub fn alloc_contiguous(&self, bytes: u64, stream: StreamId) -> Result<Allocation> {
        let block = self.inner.ours()?.alloc_contiguous(bytes, stream)?;
        Ok(Allocation { heap: self.clone(), block, bytes, stream, owned: true })
    }

    /// Descriptors of the memory behind a live block, one for each of its handles in address order. They are
    /// made now (a heap holds none by itself) and closed when dropped. While another process uses the
    /// memory, keep the block: freed memory is given to others ([`Heap::export`] sees to that by itself). A handle shows its importer all of its memory, also other blocks'; [`Heap::alloc_contiguous`] shares none.
    ///
    /// `cuda` gives a descriptor of each handle; `host` has one memfd, of which each is a duplicate that
    /// shows all of the device's memory; `sim` has no memory.
    ///
    /// # Errors
    /// [`crate::Error::InvalidPointer`]; [`crate::Error::Driver`] when the backend cannot export or the
    /// process has no descriptors left. What was exported for the call is closed again then.
    pub fn export_handles(&self, address: u64) -> Result<Vec<ExportedHandle>> {
        self.inner.ours()?.export_handles(address)
    }

    /// Declares that work on `stream`, queued up to the block's free, uses the block: after the free it
    /// is reused only when that work is done. The stream may be of another GPU, but a default stream is taken for
    /// the heap's: see [`Heap::record_use_on`]. Any thread.
    ///
    /// # Errors
    /// [`crate::Error::InvalidPointer`], [`crate::Error::DeadStream`].
    pub fn record_use(&self, address: u64, stream: StreamId) -> Result<()> {
        self.inner.ours()?.record_use(address, stream, None)
    }

    /// As [`Heap::record_use`], for a stream of the GPU of this number, a default stream as well. A stream of another GPU has to
    /// exist when the block is freed: else all that was queued on that GPU is waited for, once no heap has announced a capture
    /// there, and before CUDA 12.5 the memory is kept until the heap ends. Any thread.
    ///
    /// # Errors
    /// As [`Heap::record_use`]; [`crate::Error::InvalidArgument`] for a device that does not exist.
    pub fn record_use_on(&self, address: u64, stream: StreamId, device: u32) -> Result<()> {
        self.inner.ours()?.record_use(address, stream, Some(device))
    }

    /// Requested and rounded size in bytes of the live block at `address`.
    ///
    /// # Errors
    /// [`crate::Error::InvalidPointer`].
    pub fn block_size(&self, address: u64) -> Result<(u64, u64)> {
        self.inner.block_info(address)
    }

    /// Gives idle memory whose use has passed back to the driver, down to the policy's `keep`, and imports that were ended.
    /// Never waits, but for the device under `remap:quiesce`.
    pub fn trim(&self) -> TrimReport {
        if !self.inner.driver.is_ours() {
            return TrimReport { released: 0, reserved: 0 };
        }
        let mut slow = self.inner.slow.lock();
        self.inner.close_epoch();
        let released = self.inner.trim_to(&mut slow, self.inner.config.keep);
        TrimReport { released, reserved: slow.physical.reserved() }
    }

    /// Keeps the memory behind a range of addresses (whole granules of it) where it is, until [`Heap::unpin`]: for
    /// graphs, registrations and peers that hold the address. It says nothing of who uses it: once its block is
    /// freed, other requests are served from it where it lies. Pins are counted. Any thread.
    ///
    /// # Errors
    /// [`crate::Error::InvalidPointer`] outside the heap, [`crate::Error::InvalidArgument`] for no bytes, and where a
    /// part has no memory.
    pub fn pin(&self, address: u64, bytes: u64) -> Result<()> {
        self.inner.ours()?.pin(address, bytes)
    }

    /// Ends one [`Heap::pin`] of the same granules.
    ///
    /// # Errors
    /// As [`Heap::pin`].
    pub fn unpin(&self, address: u64, bytes: u64) -> Result<()> {
        self.inner.ours()?.unpin(address, bytes)
    }

    /// Sets the most physical memory that may exist, in bytes, rounded down to granules; idle memory
    /// above it is released as far as it has passed. Returns what is reserved afterwards.
    pub fn set_limit(&self, bytes: u64) -> u64 {
        if !self.inner.driver.is_ours() {
            return 0;
        }
        self.inner.set_limit(if bytes == u64::MAX { bytes } else { round_down(bytes, GRANULE) })
    }

    /// The limit in bytes; `u64::MAX`: none.
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.inner.limit.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// Does deferred work: closes an epoch, unmaps what has passed, shrinks by the policy. Call it now
    /// and then from any thread; it never waits for the device, but under `remap:quiesce`: when it shrinks, and when an
    /// import was ended whose work has passed. Only after such a wait anything is unmapped there.
    pub fn tick(&self) {
        if self.inner.driver.is_ours() {
            self.inner.tick();
        }
    }

    /// The stream is going to be destroyed: what it freed belongs to all when its work has passed, and
    /// later use of it is an error. Call it before the stream is destroyed.
    ///
    /// # Errors
    /// [`crate::Error::DeadStream`] for a stream that the heap does not know; [`crate::Error::InvalidArgument`] for the default stream,
    /// which is never destroyed, and during captures where the driver has no context-wide events.
    pub fn retire_stream(&self, stream: StreamId) -> Result<()> {
        self.inner.ours()?.retire(stream)
    }

    /// Adds a function that is called, without any lock held, before an out-of-memory error. It may
    /// free blocks; when it says that it did, the request is tried again. It is called again while that leaves less and less live: until
    /// the limit has room, and, where the device has nothing more to wait for, until there is a place (for what is larger than the limit
    /// once). A request that it makes itself calls none.
    pub fn on_out_of_memory(&self, callback: OutOfMemoryCallback) {
        if self.inner.driver.is_ours() {
            self.inner.callbacks.lock().push(Arc::from(callback));
        }
    }

    /// What the heap did and holds.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.inner.stats()
    }

    /// All mapped ranges, by address: a picture of memory. Exact at rest; frees and hits of the cache on other
    /// threads go on meanwhile. Takes time in proportion to the blocks.
    #[must_use]
    pub fn layout(&self) -> Vec<Region> {
        self.inner.layout()
    }

    /// Sets the peaks to the present values.
    pub fn reset_peaks(&self) {
        if self.inner.driver.is_ours() {
            self.inner.reset_peaks();
        }
    }

    /// The policy in force.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.inner.config
    }

    /// The backend.
    #[must_use]
    pub fn backend(&self) -> &dyn Backend {
        self.inner.driver.backend()
    }

    /// Releases everything now, live blocks too, after waiting for the device. Later calls fail with
    /// [`crate::Error::ShutDown`]; frees of blocks that were live are ignored, and [`Heap::stats`] counts nothing as live or free.
    /// Dropping the last clone does the same.
    pub fn shut_down(&self) {
        self.inner.shut_down();
    }

    /// Checks the heap's invariants (design.md); for tests and bug reports. Exact only at rest.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub fn check(&self) -> std::result::Result<(), String> {
        self.inner.check()
    }

    /// Notes on what was refused or is missing (reservations, NVTX, a plan that is not followed), for people.
    #[must_use]
    pub fn notes(&self) -> Vec<String> {
        let plan = Some(self.inner.plan_state()).filter(|state| state.is_in_vain());
        self.inner.space.notes().into_iter().chain(plan.map(|state| state.to_string())).collect()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if !self.driver.is_ours() {
            return self.driver.leave();
        }
        self.shut_down();
    }
}
