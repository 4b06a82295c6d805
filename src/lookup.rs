//! Address → node: one `u32` per unit of address space, in lazily touched anonymous memory.
//!
//! A table covers one reservation. Only the entry at a live block's first unit is set; 0 elsewhere,
//! which tells double frees, interior and foreign pointers apart from blocks. 4 KiB of table serve
//! 512 KiB of addresses, so that a live block costs at most one touched page.
#![allow(unsafe_code, reason = "a table of atomics over an anonymous mapping")]

use crate::error::{DriverCall, DriverError};
use crate::units::UNIT;
use memmap2::{MmapOptions, MmapRaw};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

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

    fn entry(&self, unit: usize) -> &AtomicU32 {
        assert!(unit < self.entries, "I9: only addresses of the reservation are looked up");
        // SAFETY: I9: the mapping holds `entries` u32, so the result stays inside it.
        let entry = unsafe { self.map.as_mut_ptr().cast::<AtomicU32>().add(unit) };
        // SAFETY: I9: aligned and mapped for as long as `self` lives, zero is a valid AtomicU32, and every
        // access goes through this function.
        unsafe { &*entry }
    }

    /// Node of the block that starts at `unit` (from the start of the reservation); 0: none.
    pub(crate) fn get(&self, unit: u32) -> u32 {
        self.entry(unit as usize).load(Relaxed)
    }

    /// Sets or (with 0) clears the entry.
    pub(crate) fn set(&self, unit: u32, node: u32) {
        self.entry(unit as usize).store(node, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::GIB;

    #[test]
    fn a_table_of_a_large_range_is_lazy() {
        let table = BlockTable::new(512 * GIB).unwrap();
        assert_eq!(table.get(1 << 29), 0);
        table.set((1 << 30) - 1, 7);
        assert_eq!((table.get((1 << 30) - 1), table.get(0)), (7, 0));
    }
}
