//! Plain memory that leaves little of a device free.

use super::CudaBackend;
use crate::backend::Backend;
use crate::error::Error;
use crate::units::{GRANULE, round_down};
use std::sync::Arc;

/// Fills a device by plain allocations, so that no more than so much is free for others.
#[derive(Debug)]
pub struct Ballast {
    device: Arc<CudaBackend>,
    /// A stack, so that small changes cost little.
    pieces: Vec<u64>,
}

impl Ballast {
    /// Nothing yet.
    #[must_use]
    pub fn new(device: Arc<CudaBackend>) -> Self {
        Self { device, pieces: Vec::new() }
    }

    /// Leaves at most `bytes` free, to a granule; how much is free then. Waits for the device. One thread.
    ///
    /// # Errors
    /// When the driver refuses to free or to say what is free.
    pub fn leave(&mut self, bytes: u64) -> Result<u64, Error> {
        while self.device.memory()?.free < bytes && self.pop()? {}
        // What a piece costs beyond its size is only known after it.
        for _ in 0..3 {
            let more = round_down(self.device.memory()?.free.saturating_sub(bytes), GRANULE);
            if more == 0 {
                break;
            }
            match self.device.allocate_plain(more) {
                Ok(piece) => self.pieces.push(piece),
                Err(_) => break,
            }
        }
        Ok(self.device.memory()?.free)
    }

    /// Frees the last piece, if there is one.
    fn pop(&mut self) -> Result<bool, Error> {
        let Some(piece) = self.pieces.pop() else { return Ok(false) };
        // SAFETY: allocated by `leave` and named by nobody else.
        unsafe { self.device.free_plain(piece) }?;
        Ok(true)
    }
}

impl Drop for Ballast {
    fn drop(&mut self) {
        while let Some(piece) = self.pieces.pop() {
            // SAFETY: as in `pop`.
            if let Err(error) = unsafe { self.device.free_plain(piece) } {
                tracing::warn!(%error, "a piece of ballast stays");
            }
        }
    }
}
