//! Remapping of whole pages in the manner of VPMM (a stream-ordered pool of 2 MiB pages).
//!
//! Every request is rounded to whole pages; those below one go to a stream-ordered pool. Best fit among
//! the stream's free regions, then among regions of other streams that have passed. Else the smallest hole
//! of addresses is filled: free pages are mapped a second time there, the stream's own first, then the
//! longest free of others (the stream waits for those on the device), and only what is missing is created.
//! The old address of a moved page stays mapped until its last work is done. Nothing is ever given back.

use super::SubjectError;
use super::blocks::{Block, Blocks, State};
use super::cuda_malloc_async::AsyncPool;
use super::device::Device;
use super::frame::Policy;
use crate::units::{GRANULE, round_up};
use std::collections::BTreeSet;
use std::time::Duration;

/// Addresses of one reservation: 8 TiB.
const RESERVE: u64 = 8 << 40;
/// The list of address ranges with nothing behind them.
const HOLES: u64 = u64::MAX;

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Vpmm {
    small: AsyncPool,
    blocks: Blocks,
    streams: BTreeSet<u64>,
    /// Old addresses of moved pages: when their last work is done, and where.
    zombies: Vec<(Duration, u64)>,
}

impl Vpmm {
    /// Unmaps the zombies whose last work is done.
    fn reap(&mut self, device: &mut Device) -> Result<(), SubjectError> {
        let now = device.timeline.now();
        for (when, at) in std::mem::take(&mut self.zombies) {
            if when > now {
                self.zombies.push((when, at));
                continue;
            }
            let Some(block) = self.blocks.remove(at) else { continue };
            for page in (at..at + block.size).step_by(GRANULE as usize) {
                device.unmap(page)?;
            }
            self.blocks.put(at, Block { list: HOLES, state: State::Unmapped, ..block });
            self.blocks.settle(at, State::Unmapped);
        }
        Ok(())
    }

    /// A free region that needs no driver call.
    fn cached(&mut self, device: &Device, size: u64, stream: u64) -> Option<u64> {
        if let Some(at) = self.blocks.fitting(stream, size).next() {
            return Some(at);
        }
        let now = device.timeline.now();
        let mut best: Option<(u64, u64)> = None;
        for other in self.streams.iter().filter(|other| **other != stream) {
            for at in self.blocks.fitting(*other, size) {
                let Some(block) = self.blocks.get(at).filter(|block| block.passed <= now) else { continue };
                best = best.into_iter().chain([(block.size, at)]).min();
                break;
            }
        }
        let (_, at) = best?;
        self.blocks.hand_over(at, size, stream);
        Some(at)
    }

    fn hole(&mut self, device: &mut Device, size: u64) -> Result<u64, SubjectError> {
        let sized = |at: u64| self.blocks.get(at).map_or(0, |block| block.size);
        let holes = self.blocks.unmapped(HOLES).map(|at| (sized(at), at));
        if let Some((_, at)) = holes.filter(|(have, _)| *have >= size).min() {
            return Ok(at);
        }
        let bytes = RESERVE.max(size);
        let at = device.reserve(bytes)?;
        self.blocks.put(at, Block::segment(at, bytes, HOLES, State::Unmapped));
        Ok(at)
    }

    /// Fills a hole; `None`, with nothing changed, when memory is short.
    fn fill(&mut self, device: &mut Device, size: u64, stream: u64) -> Result<Option<u64>, SubjectError> {
        let mut regions: Vec<(bool, Duration, u64, u64)> = Vec::new();
        for at in self.blocks.free_blocks() {
            if let Some(block) = self.blocks.get(at) {
                regions.push((block.list != stream, block.passed, at, block.size));
            }
        }
        regions.sort_unstable();
        let free: u64 = regions.iter().map(|region| region.3).sum();
        let missing = size.saturating_sub(free) / GRANULE;
        let Some(fresh) = device.create_all(missing, GRANULE)? else { return Ok(None) };
        let start = self.hole(device, size)?;
        let Some(hole) = self.blocks.remove(start) else { return Ok(None) };
        let mut to = start;
        for (foreign, passed, at, have) in regions {
            let bytes = have.min(start + size - to);
            if bytes == 0 {
                break;
            }
            device.figures.gpu_waits += u64::from(foreign && passed > device.timeline.now());
            for page in (at..at + bytes).step_by(GRANULE as usize) {
                let handle = device.mapped(page)?;
                device.map(to, handle, GRANULE)?;
                to += GRANULE;
            }
            device.figures.handles_moved += bytes / GRANULE;
            device.figures.bytes_moved += bytes;
            let Some(region) = self.blocks.remove(at) else { continue };
            if bytes < have {
                self.blocks.put(at + bytes, Block { size: have - bytes, ..region });
            }
            self.blocks.put(at, Block { size: bytes, state: State::Zombie, ..region });
            self.zombies.push((passed, at));
        }
        for handle in fresh {
            device.map(to, handle, GRANULE)?;
            to += GRANULE;
        }
        if hole.size > size {
            self.blocks.put(start + size, Block { size: hole.size - size, ..hole });
        }
        self.blocks.put(start, Block { size, list: stream, state: State::Free, ..hole });
        Ok(Some(start))
    }
}

impl Policy for Vpmm {
    fn name(&self) -> &'static str {
        "vpmm"
    }

    fn alloc(&mut self, device: &mut Device, bytes: u64, stream: u64) -> Result<Option<(u64, u64)>, SubjectError> {
        self.reap(device)?;
        if bytes < GRANULE {
            return self.small.alloc(device, bytes, stream);
        }
        let Some(size) = round_up(bytes, GRANULE) else { return Ok(None) };
        self.streams.insert(stream);
        let found = match self.cached(device, size, stream) {
            None => self.fill(device, size, stream)?,
            found => found,
        };
        Ok(found.map(|at| (at, self.blocks.take(at, size, |_| true))))
    }

    fn live(&self, address: u64) -> Result<(u64, u64), SubjectError> {
        self.blocks.live(address).map(|block| (block.size, block.list)).or_else(|_| self.small.live(address))
    }

    fn give(&mut self, device: &mut Device, address: u64) -> Result<(), SubjectError> {
        let Ok(block) = self.blocks.live(address) else { return self.small.give(device, address) };
        self.blocks.settle_free(address, device.passed(block.list));
        Ok(())
    }

    fn flush(&mut self, device: &mut Device) -> Result<(), SubjectError> {
        self.small.flush(device)
    }
}
