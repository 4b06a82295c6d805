//! A buddy system: blocks of powers of two, split in halves and joined with their other half.
//!
//! Memory comes by `cudaMalloc` in pieces of a power of two, 32 MiB at least; wholly free pieces go back
//! when memory is short.

use super::SubjectError;
use super::device::Device;
use super::frame::{Policy, not_live};
use crate::units::{MIB, UNIT};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Smallest piece that is asked of the device.
const PIECE: u64 = 32 * MIB;

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Buddy {
    /// Stream, size, address.
    free: BTreeSet<(u64, u64, u64)>,
    /// Address → size and stream.
    live: HashMap<u64, (u64, u64)>,
    /// Start of each piece → size and stream.
    pieces: BTreeMap<u64, (u64, u64)>,
}

impl Policy for Buddy {
    fn name(&self) -> &'static str {
        "buddy"
    }

    fn alloc(&mut self, device: &mut Device, bytes: u64, stream: u64) -> Result<Option<(u64, u64)>, SubjectError> {
        let Some(size) = bytes.max(UNIT).checked_next_power_of_two() else { return Ok(None) };
        let cached = self.free.range((stream, size, 0)..=(stream, u64::MAX, u64::MAX)).next().copied();
        let (mut have, at) = match cached {
            Some(entry) => {
                self.free.remove(&entry);
                (entry.1, entry.2)
            }
            None => {
                let piece = size.max(PIECE);
                let Some(at) = device.malloc(piece) else { return Ok(None) };
                self.pieces.insert(at, (piece, stream));
                (piece, at)
            }
        };
        while have > size {
            have /= 2;
            self.free.insert((stream, have, at + have));
        }
        self.live.insert(at, (size, stream));
        Ok(Some((at, size)))
    }

    fn live(&self, address: u64) -> Result<(u64, u64), SubjectError> {
        self.live.get(&address).copied().ok_or_else(|| not_live(address))
    }

    fn give(&mut self, _device: &mut Device, address: u64) -> Result<(), SubjectError> {
        let (mut size, stream) = self.live.remove(&address).ok_or_else(|| not_live(address))?;
        let piece = self.pieces.range(..=address).next_back().map(|(at, (piece, _))| (*at, *piece));
        let (base, piece) = piece.ok_or_else(|| not_live(address))?;
        let mut at = address - base;
        while size < piece && self.free.remove(&(stream, size, base + (at ^ size))) {
            at &= !size;
            size *= 2;
        }
        self.free.insert((stream, size, base + at));
        Ok(())
    }

    fn flush(&mut self, device: &mut Device) -> Result<(), SubjectError> {
        let free = &mut self.free;
        self.pieces.retain(|at, (size, stream)| {
            let whole = free.remove(&(*stream, *size, *at));
            if whole {
                device.malloc_free(*at);
            }
            !whole
        });
        Ok(())
    }
}
