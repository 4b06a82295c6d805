//! Access of other GPUs to a heap's memory.
#![forbid(unsafe_code)]

use super::Heap;
use super::inner::Inner;
use crate::error::{Error, Result};
use std::sync::atomic::Ordering::Relaxed;

impl Inner {
    fn enable_peer(&self, device: u32) -> Result<()> {
        let mut slow = self.slow.lock();
        if self.shut.load(Relaxed) {
            return Err(Error::ShutDown);
        }
        if self.driver.has_peer(device) {
            return Ok(());
        }
        self.driver.backend().reach(device)?;
        self.quiet_for_edit(&mut slow)?;
        Ok(self.driver.enable_peer(device)?)
    }
}

/// Peers: other GPUs that reach the heap's memory.
impl Heap {
    /// From now on the GPU `device` (its number, as CUDA counts) reads and writes all of this heap's memory: what is mapped,
    /// imports too, and what will be, wherever it moves. That is for good. The work of both devices is for the caller to order.
    /// For a device that has access, by this or by the policy's `peers`, and for the heap's own nothing is done.
    ///
    /// What is mapped takes one driver call a mapping now, with the driver lock held; later no call is added to those that
    /// are made anyway. Also while a graph is captured. Waits for the device only under `remap:quiesce`, outside of captures.
    /// Heaps that share a backend share what it gives to later memory. Any thread.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] where there is no such device, and on `host` and `sim`; [`Error::Unreachable`] where it has
    /// no way to this heap's memory; [`Error::Driver`] when the driver refuses, after which the device has access to nothing
    /// that it had none to; [`Error::ShutDown`].
    pub fn enable_peer(&self, device: u32) -> Result<()> {
        self.inner.ours()?.enable_peer(device)
    }
}
