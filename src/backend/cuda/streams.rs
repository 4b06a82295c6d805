//! Streams by number, for programs that know streams from a file and not from the driver.

use super::CudaBackend;
use crate::backend::{Backend, StreamId};
use crate::error::DriverError;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A stream of the device for each number; made when first asked for, destroyed with the set.
#[derive(Debug)]
pub struct StreamSet {
    device: Arc<CudaBackend>,
    made: BTreeMap<u64, StreamId>,
}

impl StreamSet {
    /// An empty set.
    #[must_use]
    pub fn new(device: Arc<CudaBackend>) -> Self {
        Self { device, made: BTreeMap::new() }
    }

    /// The stream of this number.
    ///
    /// # Errors
    /// When the driver refuses to create it.
    pub fn get(&mut self, number: u64) -> Result<StreamId, DriverError> {
        if let Some(stream) = self.made.get(&number) {
            return Ok(*stream);
        }
        let stream = self.device.create_stream()?;
        self.made.insert(number, stream);
        Ok(stream)
    }
}

impl Drop for StreamSet {
    fn drop(&mut self) {
        // The driver ends a destroyed stream when its work is done; waiting first keeps memory mapped for it.
        if let Err(error) = self.device.quiesce() {
            tracing::warn!(%error, "the device could not be waited for before its streams end");
        }
        for stream in self.made.values() {
            // SAFETY: created by `get`; the set is its only owner.
            if let Err(error) = unsafe { self.device.destroy_stream(*stream) } {
                tracing::warn!(%error, "a stream stays");
            }
        }
    }
}
