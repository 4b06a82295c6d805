//! A free list searched from the lowest address: one heap that grows at its end.
//!
//! The heap grows by one handle of what is missing, rounded to 2 MiB, up to four cards, and never
//! shrinks. All work counts as of one stream.

use super::SubjectError;
use super::blocks::{Block, Blocks, State};
use super::device::{CARD, Device};
use super::frame::Policy;
use crate::units::{GRANULE, UNIT, round_up};

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct FirstFit {
    blocks: Blocks,
    /// Start of the heap and its end so far.
    heap: Option<(u64, u64)>,
}

impl FirstFit {
    fn grow(&mut self, device: &mut Device, size: u64) -> Result<Option<u64>, SubjectError> {
        let (segment, end) = match self.heap {
            Some(heap) => heap,
            None => {
                let start = device.reserve(4 * CARD)?;
                (start, start)
            }
        };
        let tail =
            self.blocks.last().filter(|(_, block)| block.state == State::Free).map_or(0, |(_, block)| block.size);
        let Some(bytes) = round_up(size - tail, GRANULE) else { return Ok(None) };
        self.heap = Some((segment, end));
        if end + bytes > segment + 4 * CARD {
            return Ok(None);
        }
        let Some(handle) = device.create(bytes)? else { return Ok(None) };
        device.map(end, handle, bytes)?;
        self.heap = Some((segment, end + bytes));
        self.blocks.put(end, Block { segment, ..Block::segment(end, bytes, 0, State::Free) });
        Ok(Some(self.blocks.settle(end, State::Free)))
    }
}

impl Policy for FirstFit {
    fn name(&self) -> &'static str {
        "first-fit"
    }

    fn alloc(&mut self, device: &mut Device, bytes: u64, _stream: u64) -> Result<Option<(u64, u64)>, SubjectError> {
        let Some(size) = round_up(bytes.max(1), UNIT) else { return Ok(None) };
        let found = match self.blocks.first_fit(size) {
            None => self.grow(device, size)?,
            found => found,
        };
        Ok(found.map(|at| (at, self.blocks.take(at, size, |_| true))))
    }

    fn live(&self, address: u64) -> Result<(u64, u64), SubjectError> {
        self.blocks.live(address).map(|block| (block.size, 0))
    }

    fn give(&mut self, _device: &mut Device, address: u64) -> Result<(), SubjectError> {
        self.blocks.settle(address, State::Free);
        Ok(())
    }

    fn flush(&mut self, _device: &mut Device) -> Result<(), SubjectError> {
        Ok(())
    }
}
