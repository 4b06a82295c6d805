//! PyTorch's caching allocator without expandable segments.
//!
//! Segments by `cudaMalloc`: 2 MiB for requests up to 1 MiB, 20 MiB for those below 10 MiB, the request
//! rounded to 2 MiB above. Best fit within the stream and kind; on failure every wholly free segment
//! goes back and the call is made once more.

use super::blocks::{Block, Blocks, State};
use super::device::Device;
use super::pending::Pending;
use super::{Figures, Subject, SubjectError};
use crate::units::{GRANULE, MIB, UNIT, round_up};

/// Largest request of the small pool, and the remainder that a large block is not split for.
const SMALL: u64 = MIB;

/// See the module's text.
#[derive(Debug)]
pub(super) struct TorchNative {
    device: Device,
    blocks: Blocks,
    pending: Pending,
}

const fn segment_size(size: u64) -> u64 {
    match size {
        ..=SMALL => 2 * MIB,
        size if size < 10 * MIB => 20 * MIB,
        size => size.next_multiple_of(GRANULE),
    }
}

impl TorchNative {
    pub(super) fn new(device: Device) -> Self {
        Self { device, blocks: Blocks::default(), pending: Pending::default() }
    }

    fn grow(&mut self, list: u64, size: u64) -> Option<u64> {
        let bytes = segment_size(size);
        let segment = self.device.malloc(bytes)?;
        self.blocks.put(segment, Block { size: bytes, segment, list, state: State::Free });
        Some(segment)
    }

    fn flush(&mut self) {
        for address in self.pending.wait_all(&mut self.device) {
            self.blocks.settle(address, State::Free);
        }
        for at in self.blocks.free_blocks() {
            if self.blocks.is_whole(at) {
                self.blocks.remove(at);
                self.device.malloc_free(at);
            }
        }
    }
}

impl Subject for TorchNative {
    fn name(&self) -> &str {
        "torch-native"
    }

    fn alloc(&mut self, bytes: u64, stream: u64) -> Result<u64, SubjectError> {
        let size = round_up(bytes.max(1), UNIT).ok_or(SubjectError::OutOfMemory(bytes))?;
        let small = size <= SMALL;
        let list = stream << 1 | u64::from(!small);
        for address in self.pending.passed(&self.device) {
            self.blocks.settle(address, State::Free);
        }
        let cached = self.blocks.fitting(list, size).next();
        let mut found = cached.or_else(|| self.grow(list, size));
        if found.is_none() {
            self.device.figures.retries += 1;
            self.flush();
            found = self.grow(list, size);
        }
        let address = found.ok_or(SubjectError::OutOfMemory(bytes))?;
        let taken = self.blocks.take(address, size, |rest| if small { rest >= UNIT } else { rest > SMALL });
        self.device.allocated(taken);
        Ok(address)
    }

    fn free(&mut self, address: u64) -> Result<(), SubjectError> {
        let block = self.blocks.live(address)?;
        self.device.freed(block.size);
        if !self.pending.holds(&self.device, address) {
            self.blocks.settle(address, State::Free);
        }
        Ok(())
    }

    fn record_use(&mut self, address: u64, stream: u64) -> Result<(), SubjectError> {
        if self.blocks.live(address)?.list >> 1 != stream {
            self.pending.record(address, stream);
        }
        Ok(())
    }

    fn figures(&self) -> Figures {
        self.device.figures()
    }

    fn finish(&mut self) -> Result<u64, SubjectError> {
        self.device.teardown()
    }
}
