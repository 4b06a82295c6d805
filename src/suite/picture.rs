//! The address space at one moment, reduced to what a drawing needs.

use crate::replay::{Backing, MappedRange};
use serde::Serialize;

/// Columns of a drawing.
const COLUMNS: usize = 120;
/// A run of addresses without memory is shown no longer than this share of what is mapped.
const GAP_SHARE: u64 = 40;

/// Kinds of addresses, in the order in which a column is filled from the bottom.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Live blocks on memory at its first address.
    Block,
    /// Live blocks on memory that was moved there.
    Moved,
    /// Memory that no block uses.
    Hole,
    /// Still mapped, but its memory is used at another address.
    Left,
    /// Addresses without memory between others.
    Unmapped,
}

/// How many kinds there are.
pub(crate) const KINDS: usize = 5;

/// See the module's text. Sizes in bytes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Picture {
    /// All addresses of each kind; of those without memory, what is shown.
    pub(crate) bytes: [u64; KINDS],
    /// Free ranges, joined over neighbouring mappings.
    pub(crate) holes: u64,
    /// The longest of them.
    pub(crate) largest_hole: u64,
    /// Share of each kind in each column, left to right by address.
    #[serde(skip)]
    pub(crate) columns: Vec<[f32; KINDS]>,
}

/// Runs of addresses of one kind, in order of address.
fn runs(ranges: &[MappedRange], live: &[(u64, u64)]) -> Vec<(Kind, u64)> {
    let mapped: u64 = ranges.iter().map(|range| range.bytes).sum();
    let mut runs: Vec<(Kind, u64)> = Vec::new();
    let mut add = |kind, bytes| match runs.last_mut() {
        _ if bytes == 0 => {}
        Some((last, length)) if *last == kind => *length += bytes,
        _ => runs.push((kind, bytes)),
    };
    let (mut blocks, mut end) = (live.iter().peekable(), None);
    for range in ranges {
        let stop = range.address + range.bytes;
        if let Some(end) = end {
            add(Kind::Unmapped, (range.address.saturating_sub(end)).min(mapped / GAP_SHARE));
        }
        end = Some(stop);
        let mut at = range.address;
        // Blocks that end before this range lie in none.
        while blocks.next_if(|(start, bytes)| start + bytes <= at).is_some() {}
        while let Some(&&(start, bytes)) = blocks.peek().filter(|(start, _)| *start < stop) {
            let (from, to) = (start.max(at), (start + bytes).min(stop));
            add(empty(range.backing), from - at);
            add(used(range.backing), to - from);
            at = to;
            if start + bytes > stop {
                break;
            }
            blocks.next();
        }
        add(empty(range.backing), stop - at);
    }
    runs
}

fn empty(backing: Backing) -> Kind {
    if backing == Backing::Left { Kind::Left } else { Kind::Hole }
}

fn used(backing: Backing) -> Kind {
    match backing {
        Backing::First => Kind::Block,
        Backing::Moved => Kind::Moved,
        // A range shown at two addresses with a block at the older one: both are in use.
        Backing::Left => Kind::Block,
    }
}

impl Picture {
    /// From what is mapped and the live blocks (address and bytes as requested), both by address.
    pub(crate) fn new(ranges: &[MappedRange], live: &[(u64, u64)]) -> Self {
        let runs = runs(ranges, live);
        let mut picture = Self { bytes: [0; KINDS], holes: 0, largest_hole: 0, columns: vec![[0.0; KINDS]; COLUMNS] };
        let total: u64 = runs.iter().map(|run| run.1).sum();
        let width = (total as f64 / COLUMNS as f64).max(1.0);
        let mut at = 0.0;
        for (kind, bytes) in runs {
            picture.bytes[kind as usize] += bytes;
            if kind == Kind::Hole {
                picture.holes += 1;
                picture.largest_hole = picture.largest_hole.max(bytes);
            }
            let end = at + bytes as f64;
            let mut column = (at / width) as usize;
            while at < end && column < COLUMNS {
                let stop = end.min((column + 1) as f64 * width);
                picture.columns[column][kind as usize] += ((stop - at) / width) as f32;
                at = stop;
                column += 1;
            }
            at = end;
        }
        picture
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(address: u64, bytes: u64, backing: Backing) -> MappedRange {
        MappedRange { address, bytes, backing }
    }

    #[test]
    fn runs_are_what_lies_there() {
        let ranges = [range(0, 100, Backing::First), range(100, 100, Backing::Moved), range(300, 50, Backing::Left)];
        // One block across two mappings, one that ends with its mapping.
        let found = runs(&ranges, &[(10, 20), (90, 30), (150, 50)]);
        let kinds = [
            (Kind::Hole, 10),
            (Kind::Block, 20),
            (Kind::Hole, 60),
            (Kind::Block, 10),
            (Kind::Moved, 20),
            (Kind::Hole, 30),
            (Kind::Moved, 50),
            // 250 bytes are mapped: a gap is at most a fortieth.
            (Kind::Unmapped, 6),
            (Kind::Left, 50),
        ];
        assert_eq!(found, kinds);
        let picture = Picture::new(&ranges, &[(10, 20), (90, 30), (150, 50)]);
        assert_eq!((picture.bytes, picture.holes, picture.largest_hole), ([30, 70, 100, 50, 6], 3, 60));
        let shares: f32 = picture.columns.iter().flatten().sum();
        assert!((shares - COLUMNS as f32).abs() < 0.01, "{shares}");
    }

    #[test]
    fn nothing_is_nothing() {
        let picture = Picture::new(&[], &[(5, 5)]);
        assert_eq!((picture.bytes, picture.holes), ([0; KINDS], 0));
    }
}
