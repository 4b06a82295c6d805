//! PyTorch's expandable segments.
//!
//! One segment of addresses per stream and kind (small requests, up to 1 MiB, on pages of 2 MiB; large
//! ones on pages of 20 MiB). Free mapped blocks are taken best fit, except that the tail that can still
//! grow counts with its growth; else pages are mapped behind the first unmapped range whose
//! neighbourhood is long enough. A page never moves: when memory is short, every whole free page
//! goes back to the driver.

use super::SubjectError;
use super::blocks::{Block, Blocks, State};
use super::device::{CARD, Device};
use super::frame::Policy;
use crate::units::{MIB, UNIT, round_up};

/// Largest request that goes to the small pool.
const SMALL: u64 = MIB;

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct TorchExpandable {
    blocks: Blocks,
}

/// The list of a stream's free blocks of one kind: the kind is the lowest bit.
const fn list_of(stream: u64, large: bool) -> u64 {
    stream << 1 | large as u64
}

const fn page_of(list: u64) -> u64 {
    if list & 1 == 1 { 20 * MIB } else { 2 * MIB }
}

impl TorchExpandable {
    /// Size of a block with the unmapped range right after it.
    fn worth(&self, address: u64) -> u64 {
        let size = self.blocks.get(address).map_or(0, |block| block.size);
        size + self.blocks.next(address).filter(|(_, next)| next.state == State::Unmapped).map_or(0, |(_, n)| n.size)
    }

    fn cached(&self, list: u64, size: u64) -> Option<u64> {
        let mut fitting = self.blocks.fitting(list, size);
        let mut best = fitting.next()?;
        for other in fitting {
            if self.worth(other) >= self.worth(best) {
                break;
            }
            best = other;
        }
        Some(best)
    }

    /// Where free and unmapped neighbours add up to `size`; a new segment where nowhere.
    fn candidate(&mut self, device: &mut Device, list: u64, size: u64) -> Result<u64, SubjectError> {
        for unmapped in self.blocks.unmapped(list) {
            let before = self.blocks.previous(unmapped).filter(|(_, block)| block.state == State::Free);
            let start = before.map_or(unmapped, |(at, _)| at);
            let (mut at, mut sum) = (Some(start), 0);
            while let Some(block) = at.and_then(|at| self.blocks.get(at)).filter(|b| b.state != State::Used) {
                sum += block.size;
                if sum >= size {
                    return Ok(start);
                }
                at = at.and_then(|at| self.blocks.next(at)).map(|(next, _)| next);
            }
        }
        let bytes = (CARD + CARD / 8).next_multiple_of(page_of(list));
        if size > bytes {
            return Err(SubjectError::OutOfMemory(size));
        }
        let segment = device.reserve(bytes)?;
        self.blocks.put(segment, Block::segment(segment, bytes, list, State::Unmapped));
        Ok(segment)
    }

    /// Maps pages over the first `size` bytes of an unmapped block and joins them with free neighbours; where
    /// the joined block starts, or `None`, with nothing changed, when memory is short.
    fn map(&mut self, device: &mut Device, at: u64, size: u64) -> Result<Option<u64>, SubjectError> {
        let Some(block) = self.blocks.get(at).copied() else { return Ok(None) };
        let page = page_of(block.list);
        let Some(handles) = device.create_all(size.div_ceil(page), page)? else { return Ok(None) };
        let bytes = handles.len() as u64 * page;
        for (to, handle) in (at..).step_by(page as usize).zip(handles) {
            device.map(to, handle, page)?;
        }
        self.blocks.remove(at);
        if bytes < block.size {
            self.blocks.put(at + bytes, Block { size: block.size - bytes, ..block });
        }
        self.blocks.put(at, Block { size: bytes, ..block });
        Ok(Some(self.blocks.settle(at, State::Free)))
    }

    /// Every remainder is split off here, also of large blocks.
    fn take(&mut self, at: u64, size: u64) -> (u64, u64) {
        (at, self.blocks.take(at, size, |rest| rest >= UNIT))
    }

    /// A free block of `size` made by mapping pages.
    fn grow(&mut self, device: &mut Device, list: u64, size: u64) -> Result<Option<u64>, SubjectError> {
        let mut at = self.candidate(device, list, size)?;
        while let Some(block) = self.blocks.get(at).copied() {
            let (unmapped, missing) = match block.state {
                State::Unmapped => (Some(at), size.min(block.size)),
                _ if block.size >= size => return Ok(Some(at)),
                _ => {
                    let next = self.blocks.next(at);
                    (next.map(|(to, _)| to), next.map_or(0, |(_, n)| n.size.min(size - block.size)))
                }
            };
            let Some(unmapped) = unmapped else { break };
            match self.map(device, unmapped, missing)? {
                Some(joined) => at = joined,
                None => return Ok(None),
            }
        }
        Ok(None)
    }
}

impl Policy for TorchExpandable {
    fn name(&self) -> &'static str {
        "torch-expandable"
    }

    fn alloc(&mut self, device: &mut Device, bytes: u64, stream: u64) -> Result<Option<(u64, u64)>, SubjectError> {
        let Some(size) = round_up(bytes.max(1), UNIT) else { return Ok(None) };
        match self.cached(list_of(stream, size > SMALL), size) {
            Some(at) => Ok(Some(self.take(at, size))),
            None => self.again(device, bytes, stream),
        }
    }

    /// The cache is not searched again, as upstream.
    fn again(&mut self, device: &mut Device, bytes: u64, stream: u64) -> Result<Option<(u64, u64)>, SubjectError> {
        let Some(size) = round_up(bytes.max(1), UNIT) else { return Ok(None) };
        Ok(self.grow(device, list_of(stream, size > SMALL), size)?.map(|at| self.take(at, size)))
    }

    fn live(&self, address: u64) -> Result<(u64, u64), SubjectError> {
        self.blocks.live(address).map(|block| (block.size, block.list >> 1))
    }

    fn give(&mut self, _device: &mut Device, address: u64) -> Result<(), SubjectError> {
        self.blocks.settle(address, State::Free);
        Ok(())
    }

    /// Gives every whole page inside a free block back.
    fn flush(&mut self, device: &mut Device) -> Result<(), SubjectError> {
        for at in self.blocks.free_blocks() {
            let Some(block) = self.blocks.get(at).copied() else { continue };
            let page = page_of(block.list);
            let first = block.segment + (at - block.segment).next_multiple_of(page);
            let end = at + block.size - (at + block.size - block.segment) % page;
            if first >= end {
                continue;
            }
            device.synchronize(Some(block.list >> 1));
            for to in (first..end).step_by(page as usize) {
                let (handle, _) = device.unmap(to)?;
                device.release(handle)?;
            }
            self.blocks.remove(at);
            if first > at {
                self.blocks.put(at, Block { size: first - at, ..block });
            }
            if end < at + block.size {
                self.blocks.put(end, Block { size: at + block.size - end, ..block });
            }
            self.blocks.put(first, Block { size: end - first, state: State::Unmapped, ..block });
            self.blocks.settle(first, State::Unmapped);
        }
        Ok(())
    }
}
