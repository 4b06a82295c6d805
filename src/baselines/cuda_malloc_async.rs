//! A stream-ordered pool in the manner of `cudaMallocAsync`, with an unlimited release threshold.
//!
//! Best fit among the stream's own free blocks, then among those of other streams, which makes the
//! stream wait for the other where that has not passed. The pool grows by 32 MiB; wholly free pieces go
//! back when memory is short, and it then grows by no more than it needs.

use super::SubjectError;
use super::blocks::{Block, Blocks, State};
use super::device::Device;
use super::frame::Policy;
use crate::units::{GRANULE, MIB, UNIT, round_up};
use std::collections::BTreeSet;

/// The pool grows by multiples of this.
const PIECE: u64 = 32 * MIB;

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct AsyncPool {
    blocks: Blocks,
    streams: BTreeSet<u64>,
}

impl AsyncPool {
    fn cached(&mut self, device: &mut Device, size: u64, stream: u64) -> Option<u64> {
        if let Some(at) = self.blocks.fitting(stream, size).next() {
            return Some(at);
        }
        let others = self.streams.iter().filter(|other| **other != stream);
        let best = others.filter_map(|other| self.blocks.fitting(*other, size).next());
        let at = best.min_by_key(|at| (self.blocks.get(*at).map(|block| block.size), *at))?;
        let block = *self.blocks.get(at)?;
        device.figures.gpu_waits += u64::from(block.passed > device.timeline.now());
        self.blocks.hand_over(at, size, stream);
        Some(at)
    }
}

impl Policy for AsyncPool {
    fn name(&self) -> &'static str {
        "cuda-malloc-async"
    }

    fn alloc(&mut self, device: &mut Device, bytes: u64, stream: u64) -> Result<Option<(u64, u64)>, SubjectError> {
        let Some(size) = round_up(bytes.max(1), UNIT) else { return Ok(None) };
        self.streams.insert(stream);
        let mut found = self.cached(device, size, stream);
        for step in [PIECE, GRANULE] {
            let Some(bytes) = round_up(size, step).filter(|_| found.is_none()) else { continue };
            found = device.malloc(bytes);
            if let Some(segment) = found {
                self.blocks.put(segment, Block::segment(segment, bytes, stream, State::Free));
            }
        }
        Ok(found.map(|at| (at, self.blocks.take(at, size, |_| true))))
    }

    fn live(&self, address: u64) -> Result<(u64, u64), SubjectError> {
        self.blocks.live(address).map(|block| (block.size, block.list))
    }

    fn give(&mut self, device: &mut Device, address: u64) -> Result<(), SubjectError> {
        let stream = self.blocks.live(address)?.list;
        self.blocks.settle_free(address, device.passed(stream));
        Ok(())
    }

    fn flush(&mut self, device: &mut Device) -> Result<(), SubjectError> {
        device.synchronize(None);
        // Nothing runs any more, so pieces that several streams freed parts of become whole.
        for at in self.blocks.free_blocks() {
            if let Some(block) = self.blocks.remove(at) {
                self.blocks.put(at, Block { list: 0, ..block });
                self.blocks.settle(at, State::Free);
            }
        }
        self.streams.insert(0);
        self.blocks.drop_whole(|at| device.malloc_free(at));
        Ok(())
    }
}
