//! Stitching in the manner of GMLake: second mappings of 2 MiB pages, nothing ever moves.
//!
//! Requests below 2 MiB go the native way. Larger ones are whole pages: best fit among the stream's free
//! blocks and the stitched ranges that are free; from 512 MiB on, free blocks (largest first) that add
//! up to the request are mapped a second time, side by side, at new addresses, and the stitched range is
//! kept after its free; else a fresh range is created. Stitched ranges that are not in use go when
//! memory is short or when there are more than 1,000 GiB of them, wholly free ranges when memory is short.

use super::SubjectError;
use super::blocks::{Block, Blocks, State};
use super::device::Device;
use super::frame::Policy;
use super::torch_native::TorchNative;
use crate::units::{GIB, GRANULE, MIB, round_up};
use std::collections::BTreeMap;

/// Smallest request that is stitched.
const STITCH: u64 = 512 * MIB;
/// A stitched range serves requests down to this fraction of it.
const REUSE: u64 = 10;
/// Addresses of stitched ranges beyond which unused ones go.
const COLLECT: u64 = 1000 * GIB;

#[derive(Debug)]
struct Stitched {
    size: u64,
    stream: u64,
    /// Ranges of the blocks that its pages belong to.
    parts: Vec<(u64, u64)>,
    live: bool,
}

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct GmLake {
    small: TorchNative,
    blocks: Blocks,
    stitched: BTreeMap<u64, Stitched>,
    /// Bytes of addresses in `stitched`.
    addresses: u64,
}

impl GmLake {
    /// The smallest stitched range that fits and all of whose pages are free.
    fn reusable(&self, size: u64, stream: u64) -> Option<(u64, u64)> {
        let fits = |s: &Stitched| !s.live && s.stream == stream && s.size >= size && s.size / REUSE <= size;
        let free = |s: &Stitched| s.parts.iter().all(|(at, bytes)| self.blocks.free_around(*at, *bytes).is_some());
        self.stitched.iter().filter(|(_, s)| fits(s) && free(s)).map(|(at, s)| (s.size, *at)).min()
    }

    fn reuse(&mut self, at: u64) {
        if let Some(stitched) = self.stitched.get_mut(&at) {
            stitched.live = true;
            for (part, bytes) in &stitched.parts {
                self.blocks.carve(*part, *bytes);
            }
        }
    }

    fn stitch(&mut self, device: &mut Device, size: u64, stream: u64) -> Result<Option<u64>, SubjectError> {
        let own: Vec<u64> = self.blocks.fitting(stream, 0).collect();
        let sizes: Vec<(u64, u64)> = own.iter().filter_map(|at| Some((*at, self.blocks.get(*at)?.size))).collect();
        if sizes.iter().map(|(_, bytes)| bytes).sum::<u64>() < size {
            return Ok(None);
        }
        let start = device.reserve(size)?;
        let (mut to, mut parts) = (start, Vec::new());
        for (at, have) in sizes.into_iter().rev() {
            let bytes = have.min(start + size - to);
            if bytes == 0 {
                break;
            }
            for page in (at..at + bytes).step_by(GRANULE as usize) {
                let handle = device.mapped(page)?;
                device.map(to, handle, GRANULE)?;
                to += GRANULE;
            }
            self.blocks.carve(at, bytes);
            parts.push((at, bytes));
        }
        device.figures.handles_joined += size / GRANULE;
        device.figures.bytes_moved += size;
        self.addresses += size;
        self.stitched.insert(start, Stitched { size, stream, parts, live: true });
        Ok(Some(start))
    }

    fn grow(&mut self, device: &mut Device, size: u64, stream: u64) -> Result<Option<u64>, SubjectError> {
        let Some(handles) = device.create_all(size / GRANULE, GRANULE)? else { return Ok(None) };
        let start = device.reserve(size)?;
        for (at, handle) in (start..).step_by(GRANULE as usize).zip(handles) {
            device.map(at, handle, GRANULE)?;
        }
        self.blocks.put(start, Block::segment(start, size, stream, State::Used));
        Ok(Some(start))
    }

    /// Unmaps the stitched ranges that are not in use.
    fn collect(&mut self, device: &mut Device) -> Result<(), SubjectError> {
        device.synchronize(None);
        let unused: Vec<u64> = self.stitched.iter().filter(|(_, s)| !s.live).map(|(at, _)| *at).collect();
        for at in unused {
            let Some(stitched) = self.stitched.remove(&at) else { continue };
            self.addresses -= stitched.size;
            for page in (at..at + stitched.size).step_by(GRANULE as usize) {
                device.unmap(page)?;
            }
        }
        Ok(())
    }
}

impl Policy for GmLake {
    fn name(&self) -> &'static str {
        "gmlake"
    }

    fn alloc(&mut self, device: &mut Device, bytes: u64, stream: u64) -> Result<Option<(u64, u64)>, SubjectError> {
        if bytes < GRANULE {
            return self.small.alloc(device, bytes, stream);
        }
        let Some(size) = round_up(bytes, GRANULE) else { return Ok(None) };
        if self.addresses > COLLECT {
            self.collect(device)?;
        }
        let block = self.blocks.fitting(stream, size).next();
        let have = block.and_then(|at| self.blocks.get(at)).map_or(u64::MAX, |block| block.size);
        match (self.reusable(size, stream), block) {
            (Some((total, at)), _) if total < have => {
                self.reuse(at);
                return Ok(Some((at, total)));
            }
            (_, Some(at)) => return Ok(Some((at, self.blocks.take(at, size, |_| true)))),
            _ => {}
        }
        let mut made = if size >= STITCH { self.stitch(device, size, stream)? } else { None };
        if made.is_none() {
            made = self.grow(device, size, stream)?;
        }
        Ok(made.map(|at| (at, size)))
    }

    fn live(&self, address: u64) -> Result<(u64, u64), SubjectError> {
        if let Some(stitched) = self.stitched.get(&address).filter(|stitched| stitched.live) {
            return Ok((stitched.size, stitched.stream));
        }
        // A part that a stitched range holds is no block of the client's.
        let held = self.stitched.values().any(|s| s.live && s.parts.iter().any(|(at, _)| *at == address));
        match self.blocks.live(address) {
            Ok(block) if !held => Ok((block.size, block.list)),
            _ => self.small.live(address),
        }
    }

    fn give(&mut self, device: &mut Device, address: u64) -> Result<(), SubjectError> {
        if let Some(stitched) = self.stitched.get_mut(&address) {
            stitched.live = false;
            for (part, _) in &stitched.parts {
                self.blocks.settle(*part, State::Free);
            }
            return Ok(());
        }
        if self.blocks.live(address).is_err() {
            return self.small.give(device, address);
        }
        self.blocks.settle(address, State::Free);
        Ok(())
    }

    fn flush(&mut self, device: &mut Device) -> Result<(), SubjectError> {
        self.collect(device)?;
        let mut whole = Vec::new();
        for at in self.blocks.free_blocks() {
            // Pages that a live stitched range shows are in use, so none of these has a second mapping.
            if self.blocks.is_whole(at)
                && let Some(block) = self.blocks.remove(at)
            {
                whole.extend((at..at + block.size).step_by(GRANULE as usize));
            }
        }
        for page in whole {
            let (handle, _) = device.unmap(page)?;
            device.release(handle)?;
        }
        self.small.flush(device)
    }
}
