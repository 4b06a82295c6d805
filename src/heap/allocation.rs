//! A block that frees itself.
#![forbid(unsafe_code)]

use super::Heap;
use super::inner::Block;
use crate::backend::StreamId;
use crate::error::Result;
use std::fmt;

/// A block of device memory, freed when dropped.
#[must_use = "the block is freed when this is dropped"]
pub struct Allocation {
    pub(super) heap: Heap,
    pub(super) block: Block,
    pub(super) bytes: u64,
    pub(super) stream: StreamId,
    pub(super) owned: bool,
}

impl Allocation {
    /// First address.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.block.address
    }

    /// Bytes asked for.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.bytes
    }

    /// Was nothing asked for?
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Bytes that it takes up, a multiple of 512.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.block.bytes
    }

    /// The stream that it was allocated for.
    #[must_use]
    pub fn stream(&self) -> StreamId {
        self.stream
    }

    /// See [`Heap::record_use`].
    ///
    /// # Errors
    /// [`crate::Error::DeadStream`].
    pub fn record_use(&self, stream: StreamId) -> Result<()> {
        self.heap.record_use(self.block.address, stream)
    }

    /// See [`Heap::record_use_on`].
    ///
    /// # Errors
    /// [`crate::Error::DeadStream`], [`crate::Error::InvalidArgument`].
    pub fn record_use_on(&self, stream: StreamId, device: u32) -> Result<()> {
        self.heap.record_use_on(self.block.address, stream, device)
    }

    /// The bare address; the block is freed by [`Heap::free_raw`] from now on.
    #[must_use]
    pub fn into_raw(mut self) -> u64 {
        self.owned = false;
        self.block.address
    }
}

impl fmt::Debug for Allocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Allocation({} B at {:#x} on stream {})", self.bytes, self.block.address, self.stream.0)
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // A child that was forked off only forgets its copy (I15).
        if self.owned
            && self.heap.inner.driver.is_ours()
            && let Err(error) = self.heap.free_raw(self.block.address)
        {
            tracing::error!(%error, "a block could not be freed when it was dropped");
        }
    }
}
