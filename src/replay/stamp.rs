//! What is written into a block to recognise it.
//!
//! Byte `k` of block `b` at address `a` is a hash of all three, so that neither zeros, nor another block's
//! bytes, nor the same block's bytes from another place or another life pass. Since a byte depends on
//! its place alone, stamps that overlap (at the ends of short blocks) agree.
#![forbid(unsafe_code)]

use crate::units::GRANULE;

/// Bytes of one stamp.
pub const STAMP: usize = 16;

/// A few bytes at one place of device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Where.
    pub address: u64,
    /// How many of `bytes` count, 1 to 16.
    pub length: u8,
    /// What is written, or what was read.
    pub bytes: [u8; STAMP],
}

impl Piece {
    /// The bytes that count.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.length)]
    }

    /// Room for the bytes that count.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[..usize::from(self.length)]
    }
}

/// A block as the stamps see it. `id` is never used twice in a replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stamped {
    pub(super) id: u32,
    pub(super) address: u64,
    pub(super) bytes: u64,
}

impl Stamped {
    /// The stamps of the block: at its start, at each granule boundary inside, and at its end. A block
    /// shorter than a stamp has one of its own length, an empty one none.
    pub(super) fn pieces(self) -> impl Iterator<Item = Piece> {
        let length = self.bytes.min(STAMP as u64);
        let end = self.address.saturating_add(self.bytes);
        let last = (self.bytes > 0).then_some(end - length);
        let first = last.filter(|last| *last != self.address).map(|_| self.address);
        let boundary = (self.address / GRANULE + 1).saturating_mul(GRANULE);
        let inside = (boundary..end.saturating_sub(length)).step_by(GRANULE as usize);
        first.into_iter().chain(inside).chain(last).map(move |address| self.piece(address, length as u8))
    }

    fn piece(self, address: u64, length: u8) -> Piece {
        let offset = address - self.address;
        let word =
            |index: u64| mix(mix(mix(u64::from(self.id) ^ 0x9e37_79b9_7f4a_7c15) ^ self.address) ^ index).to_le_bytes();
        // Three words cover 16 bytes at any offset.
        let words = [word(offset / 8), word(offset / 8 + 1), word(offset / 8 + 2)];
        let flat = words.as_flattened();
        let skip = (offset % 8) as usize;
        let mut bytes = [0; STAMP];
        bytes.copy_from_slice(&flat[skip..skip + STAMP]);
        Piece { address, length, bytes }
    }
}

/// The finaliser of `SplitMix64`: every bit of the input changes half of the output.
pub(super) fn mix(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(address: u64, bytes: u64) -> Vec<(u64, u8)> {
        Stamped { id: 1, address, bytes }.pieces().map(|piece| (piece.address, piece.length)).collect()
    }

    #[test]
    fn stamps_lie_at_the_edges_and_at_every_granule() {
        assert_eq!(places(512, 0), []);
        assert_eq!(places(512, 5), [(512, 5)]);
        assert_eq!(places(512, 16), [(512, 16)]);
        assert_eq!(places(512, 20), [(512, 16), (516, 16)]);
        assert_eq!(places(0, GRANULE), [(0, 16), (GRANULE - 16, 16)]);
        // The boundary at 4 MiB is inside, but its stamp is the last one.
        assert_eq!(places(512, 2 * GRANULE - 496), [(512, 16), (GRANULE, 16), (2 * GRANULE, 16)]);
        assert_eq!(places(512, 2 * GRANULE - 500), [(512, 16), (GRANULE, 16), (2 * GRANULE - 4, 16)]);
        assert_eq!(places(GRANULE, 3 * GRANULE).len(), 4);
    }

    #[test]
    fn overlapping_stamps_agree_and_different_ones_differ() {
        let block = Stamped { id: 3, address: 4096, bytes: 21 };
        let pieces: Vec<Piece> = block.pieces().collect();
        assert_eq!(pieces[0].bytes[5..], pieces[1].bytes[..11]);
        let other = |id, address| Stamped { id, address, bytes: 100 }.pieces().next().map(|piece| piece.bytes);
        assert_eq!(other(1, 512), other(1, 512));
        assert_ne!(other(1, 512), other(2, 512));
        assert_ne!(other(1, 512), other(1, 1024));
        assert_ne!(other(0, 0), Some([0; STAMP]));
    }
}
