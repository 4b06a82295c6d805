//! When the memory behind each granule of addresses was last used, as far as frees tell.
//!
//! A free node has one stamp, the latest of all that merged into it, so one small free beside a large idle
//! range would hide that the rest of it has passed. Here each granule keeps its own. Written and read under
//! the lock of the segment that the granule belongs to.
#![forbid(unsafe_code)]

use std::fmt;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Granules of one piece (8 GiB of addresses): pieces come into being where blocks are freed.
const PIECE: usize = 1 << 12;
/// Unit numbers of 32 bits name 2^20 granules.
const PIECES: usize = (1 << 20) / PIECE;

type Piece = OnceLock<Box<[AtomicU32]>>;

/// See the module's text.
pub(crate) struct Used(Box<[Piece]>);

impl Default for Used {
    fn default() -> Self {
        Self((0..PIECES).map(|_| OnceLock::new()).collect())
    }
}

impl fmt::Debug for Used {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Used").finish_non_exhaustive()
    }
}

impl Used {
    /// Notes that these granules were used up to `epoch`; a later note stays.
    pub(crate) fn note(&self, granules: Range<u32>, epoch: u32) {
        for (piece, range) in self.pieces(granules) {
            let piece = piece.get_or_init(|| (0..PIECE).map(|_| AtomicU32::new(0)).collect());
            for last in &piece[range] {
                // No other thread writes meanwhile, so that no read-modify-write is needed; and most often no write.
                if last.load(Relaxed) < epoch {
                    last.store(epoch, Relaxed);
                }
            }
        }
    }

    /// The latest epoch in which one of these granules was used; 0: none ever was.
    pub(crate) fn latest(&self, granules: Range<u32>) -> u32 {
        let pieces = self.pieces(granules).filter_map(|(piece, range)| Some(&piece.get()?[range]));
        pieces.flatten().map(|last| last.load(Relaxed)).max().unwrap_or(0)
    }

    /// The pieces that `granules` touch, each with the range in it.
    #[inline]
    fn pieces(&self, granules: Range<u32>) -> impl Iterator<Item = (&Piece, Range<usize>)> {
        let (mut start, end) = (granules.start as usize, granules.end as usize);
        std::iter::from_fn(move || {
            let first = start / PIECE * PIECE;
            let stop = end.min(first + PIECE);
            let piece = self.0.get(first / PIECE).filter(|_| start < stop)?;
            let range = start - first..stop - first;
            start = stop;
            Some((piece, range))
        })
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        self.0.iter().filter(|piece| piece.get().is_some()).count() * PIECE * size_of::<AtomicU32>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_use_of_any_granule_counts() {
        let used = Used::default();
        assert_eq!(used.latest(0..1 << 20), 0);
        used.note(10..20, 3);
        used.note(15..16, 7);
        used.note(12..18, 5);
        let latest = |range| used.latest(range);
        assert_eq!([latest(0..10), latest(10..12), latest(12..15), latest(15..16), latest(16..18)], [0, 3, 5, 7, 5]);
        assert_eq!((latest(18..20), latest(20..99)), (3, 0));
        assert_eq!(used.bytes(), 4 * PIECE);
        // Over the boundary of pieces, and up to the last granule.
        used.note(PIECE as u32 - 1..PIECE as u32 + 1, 9);
        assert_eq!((latest(PIECE as u32..PIECE as u32 + 1), latest(4090..4095), latest(4095..4096)), (9, 0, 9));
        used.note((1 << 20) - 1..1 << 20, 4);
        assert_eq!(latest((1 << 20) - 5..1 << 20), 4);
    }
}
