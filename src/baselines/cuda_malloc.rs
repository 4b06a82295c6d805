//! `cudaMalloc` and `cudaFree` for each request.
//!
//! Requests below 1 MiB share chunks of 2 MiB inside the driver, larger ones are rounded to 2 MiB. Each
//! call costs what the driver takes, and each free waits for the device.

use super::SubjectError;
use super::blocks::{Block, Blocks, State};
use super::device::Device;
use super::frame::{Policy, not_live};
use crate::units::{GRANULE, MIB, UNIT, round_up};
use std::collections::HashMap;

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct CudaMalloc {
    small: Blocks,
    /// Size of each large block.
    large: HashMap<u64, u64>,
}

impl Policy for CudaMalloc {
    fn name(&self) -> &'static str {
        "cuda-malloc"
    }

    fn alloc(&mut self, device: &mut Device, bytes: u64, _stream: u64) -> Result<Option<(u64, u64)>, SubjectError> {
        if bytes >= MIB {
            let Some(size) = round_up(bytes, GRANULE) else { return Ok(None) };
            let made = device.malloc(size);
            return Ok(made.inspect(|at| _ = self.large.insert(*at, size)).map(|at| (at, size)));
        }
        let size = bytes.max(1).next_multiple_of(UNIT);
        let mut found = self.small.fitting(0, size).next();
        if found.is_none() {
            found = device.chunk(GRANULE);
            if let Some(segment) = found {
                self.small.put(segment, Block::segment(segment, GRANULE, 0, State::Free));
            }
        }
        let Some(at) = found else { return Ok(None) };
        device.price_malloc(size);
        Ok(Some((at, self.small.take(at, size, |_| true))))
    }

    fn live(&self, address: u64) -> Result<(u64, u64), SubjectError> {
        let size = self.large.get(&address).copied().or_else(|| self.small.live(address).ok().map(|b| b.size));
        size.map(|size| (size, 0)).ok_or_else(|| not_live(address))
    }

    fn give(&mut self, device: &mut Device, address: u64) -> Result<(), SubjectError> {
        if self.large.remove(&address).is_some() {
            device.malloc_free(address);
            return Ok(());
        }
        device.price_free(self.small.live(address)?.size);
        let joined = self.small.settle(address, State::Free);
        if self.small.is_whole(joined) {
            self.small.remove(joined);
            device.chunk_free(joined);
        }
        Ok(())
    }

    fn free_waits(&self) -> bool {
        true
    }

    fn flush(&mut self, _device: &mut Device) -> Result<(), SubjectError> {
        Ok(())
    }
}
