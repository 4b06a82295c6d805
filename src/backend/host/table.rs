//! Which handle is mapped where, and how many VMAs that costs. Pure bookkeeping.
//!
//! A *piece* is a VMA of the kernel: a hole between mappings, or a maximal stretch of accessible
//! mappings in which address and memfd offset advance together. A mapping that is not accessible
//! yet is still a hole to the kernel, so it costs nothing.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;

/// One whole handle at one address. Sizes in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Mapping {
    /// The handle's number.
    pub(super) handle: u64,
    /// Number of its memfd.
    pub(super) file: u64,
    /// Where the handle starts in the memfd.
    pub(super) offset: u64,
    /// Its length.
    pub(super) bytes: u64,
    /// `set_access` was called: the kernel has it.
    pub(super) accessible: bool,
}

impl Mapping {
    /// Is `next`, at the addresses behind this one, part of the same VMA?
    fn goes_on(&self, next: &Self) -> bool {
        self.file == next.file && self.offset + self.bytes == next.offset
    }
}

/// All mappings by address; they never overlap (H3).
#[derive(Debug, Default)]
pub(super) struct Table {
    mappings: BTreeMap<u64, Mapping>,
    /// Pieces beyond the one that each reservation costs when empty.
    pieces: u64,
}

impl Table {
    /// Number of mappings.
    pub(super) fn len(&self) -> usize {
        self.mappings.len()
    }

    /// Pieces beyond one a reservation.
    pub(super) fn pieces(&self) -> u64 {
        self.pieces
    }

    /// The mapping that is exactly `[address, address + bytes)`.
    pub(super) fn exact(&self, address: u64, bytes: u64) -> Result<Mapping, String> {
        match self.mappings.get(&address) {
            Some(mapping) if mapping.bytes == bytes => Ok(*mapping),
            Some(mapping) => Err(format!("{bytes} bytes at {address:#x} are part of a mapping of {}", mapping.bytes)),
            None => Err(format!("no mapping starts at {address:#x}")),
        }
    }

    /// Some mapping that overlaps `[address, address + bytes)`, by its address.
    pub(super) fn overlap(&self, address: u64, bytes: u64) -> Option<u64> {
        let (start, mapping) = self.mappings.range(..address + bytes).next_back()?;
        (start + mapping.bytes > address).then_some(*start)
    }

    /// The mapping that `address` lies in, with its start.
    pub(super) fn at(&self, address: u64) -> Option<(u64, Mapping)> {
        let (start, mapping) = self.mappings.range(..=address).next_back()?;
        (start + mapping.bytes > address).then_some((*start, *mapping))
    }

    /// Is every byte of `[address, address + bytes)` mapped and accessible?
    pub(super) fn covers(&self, address: u64, bytes: u64) -> bool {
        let mut at = address;
        while at < address + bytes {
            match self.at(at) {
                Some((start, mapping)) if mapping.accessible => at = start + mapping.bytes,
                _ => return false,
            }
        }
        true
    }

    /// By how many pieces the kernel's list grows when `mapping`, which is not in the table, becomes
    /// accessible at `address`: between -1 (it closes a hole and joins both neighbours) and 2.
    pub(super) fn growth(&self, address: u64, mapping: &Mapping) -> i64 {
        let left = self.at(address.wrapping_sub(1)).map(|(_, left)| left).filter(|left| left.accessible);
        let right = self.mappings.get(&(address + mapping.bytes)).filter(|right| right.accessible);
        // The hole around it is cut at each side that has no neighbour (guards exist, H1).
        let mut growth = i64::from(left.is_none()) + i64::from(right.is_none());
        growth -= i64::from(left.is_some_and(|left| left.goes_on(mapping)));
        growth -= i64::from(right.is_some_and(|right| mapping.goes_on(right)));
        growth
    }

    /// Puts a mapping in. The caller has checked that nothing overlaps it.
    pub(super) fn insert(&mut self, address: u64, mapping: Mapping) {
        debug_assert!(self.overlap(address, mapping.bytes).is_none(), "H3");
        if mapping.accessible {
            self.pieces = self.pieces.saturating_add_signed(self.growth(address, &mapping));
        }
        self.mappings.insert(address, mapping);
    }

    /// Takes a mapping out.
    pub(super) fn remove(&mut self, address: u64) -> Option<Mapping> {
        let mapping = self.mappings.remove(&address)?;
        if mapping.accessible {
            self.pieces = self.pieces.saturating_add_signed(-self.growth(address, &mapping));
        }
        Some(mapping)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapping(offset: u64) -> Mapping {
        Mapping { handle: offset, file: 0, offset, bytes: 10, accessible: true }
    }

    #[test]
    fn pieces_follow_runs() {
        let mut table = Table::default();
        table.insert(100, mapping(0));
        assert_eq!(table.pieces(), 2);
        table.insert(110, mapping(10));
        assert_eq!(table.pieces(), 2, "offset goes on: one VMA");
        table.insert(120, mapping(0));
        assert_eq!(table.pieces(), 3, "another offset: its own VMA");
        table.insert(140, mapping(30));
        assert_eq!(table.pieces(), 5);
        let other = Mapping { file: 1, ..mapping(40) };
        assert_eq!(table.growth(150, &other), 1, "another memfd: its own VMA");
        table.insert(130, mapping(20));
        assert_eq!(table.pieces(), 4, "closes the hole, joins its right neighbour only");
        for address in [120, 100, 140, 110, 130] {
            assert!(table.remove(address).is_some());
        }
        assert_eq!((table.pieces(), table.len()), (0, 0));
    }

    #[test]
    fn inaccessible_mappings_are_holes() {
        let mut table = Table::default();
        table.insert(100, Mapping { accessible: false, ..mapping(0) });
        assert_eq!(table.pieces(), 0);
        assert!(!table.covers(100, 10));
        assert_eq!(table.growth(110, &mapping(10)), 2);
        assert_eq!(table.overlap(95, 6), Some(100));
        assert_eq!(table.overlap(90, 10), None);
    }

    #[test]
    fn ranges_are_exact() {
        let mut table = Table::default();
        table.insert(100, mapping(0));
        table.insert(110, mapping(50));
        assert!(table.covers(103, 17) && !table.covers(103, 18));
        assert!(table.exact(100, 5).is_err() && table.exact(105, 5).is_err());
        assert_eq!(table.exact(110, 10), Ok(mapping(50)));
    }
}
