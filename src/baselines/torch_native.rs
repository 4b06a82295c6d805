//! PyTorch's caching allocator without expandable segments.
//!
//! Segments by `cudaMalloc`: 2 MiB for requests up to 1 MiB, 20 MiB for those below 10 MiB, the request
//! rounded to 2 MiB above. Best fit within the stream and kind; on failure every wholly free segment
//! goes back and the call is made once more.

use super::SubjectError;
use super::blocks::{Block, Blocks, State};
use super::device::Device;
use super::frame::Policy;
use crate::units::{GRANULE, MIB, UNIT, round_up};

/// Largest request of the small pool, and the remainder that a large block is not split for.
const SMALL: u64 = MIB;

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct TorchNative {
    blocks: Blocks,
}

const fn segment_size(size: u64) -> u64 {
    match size {
        ..=SMALL => 2 * MIB,
        size if size < 10 * MIB => 20 * MIB,
        size => size.next_multiple_of(GRANULE),
    }
}

const fn list_of(size: u64, stream: u64) -> u64 {
    stream << 1 | (size > SMALL) as u64
}

impl TorchNative {
    fn grow(&mut self, device: &mut Device, size: u64, stream: u64) -> Option<u64> {
        let bytes = segment_size(size);
        let segment = device.malloc(bytes)?;
        let list = list_of(size, stream);
        self.blocks.put(segment, Block::segment(segment, bytes, list, State::Free));
        Some(segment)
    }

    fn take(&mut self, at: u64, size: u64) -> (u64, u64) {
        (at, self.blocks.take(at, size, |rest| if size <= SMALL { rest >= UNIT } else { rest > SMALL }))
    }
}

impl Policy for TorchNative {
    fn name(&self) -> &'static str {
        "torch-native"
    }

    fn alloc(&mut self, device: &mut Device, bytes: u64, stream: u64) -> Result<Option<(u64, u64)>, SubjectError> {
        let Some(size) = round_up(bytes.max(1), UNIT) else { return Ok(None) };
        let cached = self.blocks.fitting(list_of(size, stream), size).next();
        match cached {
            Some(at) => Ok(Some(self.take(at, size))),
            None => self.again(device, bytes, stream),
        }
    }

    /// The cache is not searched again, as upstream.
    fn again(&mut self, device: &mut Device, bytes: u64, stream: u64) -> Result<Option<(u64, u64)>, SubjectError> {
        let Some(size) = round_up(bytes.max(1), UNIT) else { return Ok(None) };
        Ok(self.grow(device, size, stream).map(|at| self.take(at, size)))
    }

    fn live(&self, address: u64) -> Result<(u64, u64), SubjectError> {
        self.blocks.live(address).map(|block| (block.size, block.list >> 1))
    }

    fn give(&mut self, _device: &mut Device, address: u64) -> Result<(), SubjectError> {
        self.blocks.settle(address, State::Free);
        Ok(())
    }

    fn flush(&mut self, device: &mut Device) -> Result<(), SubjectError> {
        self.blocks.drop_whole(|at| device.malloc_free(at));
        Ok(())
    }
}
