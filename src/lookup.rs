//! Address → node: one `u32` per unit of address space, in lazily touched anonymous memory.
//!
//! A table covers one reservation. Only the entry at a live block's first unit is set; 0 elsewhere,
//! which tells double frees, interior and foreign pointers apart from blocks. 4 KiB of table serve
//! 512 KiB of addresses, so that a live block costs at most one touched page.
#![allow(unsafe_code, reason = "a table of atomics over an anonymous mapping")]

use crate::error::{DriverCall, DriverError};
use crate::units::UNIT;
use memmap2::{Advice, MmapOptions, MmapRaw};
use std::ops::Range;
use std::sync::atomic::AtomicU32;
#[cfg(test)]
use std::sync::atomic::Ordering::Relaxed;

/// See the module's text. Entries are written under the lock of the segment that owns the address.
#[derive(Debug)]
pub(crate) struct BlockTable {
    map: MmapRaw,
    entries: usize,
}

impl BlockTable {
    /// A table of zeros for `bytes` of addresses.
    pub(crate) fn new(bytes: u64) -> Result<Self, DriverError> {
        let entries = usize::try_from(bytes / UNIT).unwrap_or(usize::MAX);
        let size = entries.checked_mul(size_of::<AtomicU32>());
        let map = size
            .ok_or_else(|| std::io::Error::from(std::io::ErrorKind::OutOfMemory))
            .and_then(|size| MmapOptions::new().len(size.max(4096)).no_reserve_swap().map_anon())
            .map_err(|error| {
                DriverError::new(DriverCall::Reserve, format!("no host memory for the block table: {error}"))
            })?;
        Ok(Self { map: map.into(), entries })
    }

    /// Many blocks may start in these units: their part of the table is better off on huge pages, since a free looks up any of
    /// it. A hint, which the operating system may not take.
    pub(crate) fn expect_many(&self, units: Range<u32>) {
        let at = |unit: u32| (unit as usize).min(self.entries) * size_of::<AtomicU32>();
        let (start, end) = (at(units.start), at(units.end));
        if let Err(error) = self.map.advise_range(Advice::HugePage, start, end - start) {
            tracing::debug!(%error, "no huge pages for the block table");
        }
    }

    /// The entry of `unit` (from the start of the reservation); `None` outside.
    #[inline]
    pub(crate) fn entry(&self, unit: u32) -> Option<&AtomicU32> {
        let unit = unit as usize;
        if unit >= self.entries {
            return None;
        }
        // SAFETY: I9: the mapping holds `entries` u32, so the result stays inside it.
        let entry = unsafe { self.map.as_mut_ptr().cast::<AtomicU32>().add(unit) };
        // SAFETY: I9: aligned and mapped for as long as `self` lives, zero is a valid AtomicU32, and every
        // access goes through this function.
        Some(unsafe { &*entry })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::GIB;

    #[test]
    fn a_table_of_a_large_range_is_lazy() {
        let table = BlockTable::new(512 * GIB).unwrap();
        let get = |unit| table.entry(unit).map(|entry| entry.load(Relaxed));
        assert_eq!(get(1 << 29), Some(0));
        table.entry((1 << 30) - 1).unwrap().store(7, Relaxed);
        assert_eq!((get((1 << 30) - 1), get(0), get(1 << 30)), (Some(7), Some(0), None));
    }
}
