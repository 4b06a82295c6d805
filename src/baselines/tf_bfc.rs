//! TensorFlow's best fit with coalescing, in its growing mode.
//!
//! Sizes in multiples of 256 B, one heap, best fit; all work counts as of one stream. A block is split
//! only where it has twice the size asked for or 128 MiB to spare. Memory comes in regions that double
//! from 2 MiB; a refused one is tried again at nine tenths. Free regions go back when memory is short.

use super::SubjectError;
use super::blocks::{Block, Blocks, State};
use super::device::Device;
use super::frame::Policy;
use crate::units::{GRANULE, MIB, round_down, round_up};

/// Remainder that is always split off.
const SPARE: u64 = 128 * MIB;

/// See the module's text.
#[derive(Debug)]
pub(super) struct Bfc {
    blocks: Blocks,
    /// Size of the next region.
    region: u64,
}

impl Default for Bfc {
    fn default() -> Self {
        Self { blocks: Blocks::default(), region: GRANULE }
    }
}

impl Bfc {
    fn extend(&mut self, device: &mut Device, size: u64) -> Option<u64> {
        let least = round_up(size, GRANULE)?;
        let mut doubled = false;
        while self.region < least {
            self.region = self.region.checked_mul(2)?;
            doubled = true;
        }
        let mut bytes = self.region.min(round_down(device.room(), GRANULE)).max(least);
        let segment = loop {
            if let Some(at) = device.malloc(bytes) {
                break at;
            }
            if bytes == least {
                return None;
            }
            bytes = round_down(bytes / 10 * 9, GRANULE).max(least);
        };
        if !doubled {
            self.region = self.region.checked_mul(2)?;
        }
        self.blocks.put(segment, Block::segment(segment, bytes, 0, State::Free));
        Some(segment)
    }
}

impl Policy for Bfc {
    fn name(&self) -> &'static str {
        "tf-bfc"
    }

    fn alloc(&mut self, device: &mut Device, bytes: u64, _stream: u64) -> Result<Option<(u64, u64)>, SubjectError> {
        let Some(size) = round_up(bytes.max(1), 256) else { return Ok(None) };
        let cached = self.blocks.fitting(0, size).next();
        let found = cached.or_else(|| self.extend(device, size));
        Ok(found.map(|at| (at, self.blocks.take(at, size, |rest| rest >= size || rest >= SPARE))))
    }

    fn live(&self, address: u64) -> Result<(u64, u64), SubjectError> {
        self.blocks.live(address).map(|block| (block.size, 0))
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
