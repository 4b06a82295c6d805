//! Physical memory of the host backend: runs of one sparse memfd.
//!
//! A handle is one contiguous run, so that it is one `mmap` wherever it is mapped. Runs are handed
//! out first fit from offset 0: handles that are created one after another have ascending offsets,
//! and the kernel joins their mappings into one VMA when they are mapped side by side.
#![forbid(unsafe_code)]

use crate::error::{DriverCall, DriverError};
use crate::units::human;
use rustix::fs::{FallocateFlags, MemfdFlags};
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::os::unix::fs::MetadataExt;

/// Length of the memfd: offsets are free, so holes between handles never stand in the way.
const EXTENT: u64 = 1 << 50;

/// One create call.
#[derive(Debug, Clone, Copy)]
pub(super) struct Handle {
    /// Start of the run in the memfd, in bytes.
    pub(super) offset: u64,
    /// Its length.
    pub(super) bytes: u64,
    /// Addresses that it is mapped at.
    mappings: u32,
    /// The client has released it; the run stays until `mappings` is 0 (H4).
    released: bool,
}

/// The memfd and who owns which part of it.
#[derive(Debug)]
pub(super) struct Physical {
    file: File,
    /// Free runs: start and length in bytes, no two adjacent.
    free: BTreeMap<u64, u64>,
    handles: HashMap<u64, Handle>,
    next: u64,
    total: u64,
    used: u64,
}

impl Physical {
    /// A memfd that hands out at most `total` bytes.
    pub(super) fn new(total: u64) -> Result<Self, rustix::io::Errno> {
        let file = File::from(rustix::fs::memfd_create("xseg", MemfdFlags::CLOEXEC)?);
        rustix::fs::ftruncate(&file, EXTENT)?;
        let free = BTreeMap::from([(0, EXTENT)]);
        Ok(Self { file, free, handles: HashMap::new(), next: 1, total, used: 0 })
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Bytes that may be handed out in all.
    pub(super) fn total(&self) -> u64 {
        self.total
    }

    /// Bytes of all handles, with released ones that are still mapped.
    pub(super) fn used(&self) -> u64 {
        self.used
    }

    /// Handles that are not released, and released ones that are still mapped.
    pub(super) fn len(&self) -> usize {
        self.handles.len()
    }

    /// Bytes that the system has really given to the memfd.
    pub(super) fn resident(&self) -> std::io::Result<u64> {
        Ok(self.file.metadata()?.blocks() * 512)
    }

    /// Makes a handle of `bytes` (whole granules) over the lowest run that is long enough. Nothing is
    /// touched.
    pub(super) fn create(&mut self, bytes: u64) -> Result<u64, DriverError> {
        let refused = || {
            let (used, total) = (human(self.used), human(self.total));
            DriverError::out_of_memory(
                DriverCall::Create,
                format!("{} asked for, {used} of {total} in use", human(bytes)),
            )
        };
        if bytes > self.total.saturating_sub(self.used) {
            return Err(refused());
        }
        let (offset, length) = self
            .free
            .iter()
            .find(|(_, length)| **length >= bytes)
            .map(|(at, length)| (*at, *length))
            .ok_or_else(refused)?;
        self.free.remove(&offset);
        if length > bytes {
            self.free.insert(offset + bytes, length - bytes);
        }
        let number = self.next;
        self.next += 1;
        self.used += bytes;
        self.handles.insert(number, Handle { offset, bytes, mappings: 0, released: false });
        Ok(number)
    }

    /// The handle of this number, if the client still owns it.
    pub(super) fn get(&self, number: u64) -> Result<Handle, String> {
        match self.handles.get(&number) {
            Some(handle) if !handle.released => Ok(*handle),
            _ => Err(format!("handle {number} does not exist or was released")),
        }
    }

    /// Notes one more mapping of a handle.
    pub(super) fn mapped(&mut self, number: u64) {
        if let Some(handle) = self.handles.get_mut(&number) {
            handle.mappings += 1;
        }
    }

    /// Notes one mapping less; the last one of a released handle frees its memory.
    pub(super) fn unmapped(&mut self, number: u64) {
        if let Some(handle) = self.handles.get_mut(&number) {
            handle.mappings -= 1;
            self.free_if_unused(number);
        }
    }

    /// Takes a handle from the client; memory goes with its last mapping.
    pub(super) fn release(&mut self, number: u64) {
        if let Some(handle) = self.handles.get_mut(&number) {
            handle.released = true;
            self.free_if_unused(number);
        }
    }

    fn free_if_unused(&mut self, number: u64) {
        let Some(handle) = self.handles.get(&number).copied().filter(|handle| handle.released && handle.mappings == 0)
        else {
            return;
        };
        self.handles.remove(&number);
        self.used -= handle.bytes;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let punched =
            rustix::io::retry_on_intr(|| rustix::fs::fallocate(&self.file, flags, handle.offset, handle.bytes));
        if let Err(error) = punched {
            // The run is free all the same: its next owner finds old bytes, as on a GPU.
            tracing::warn!(%error, offset = handle.offset, "memory of a released handle stays resident");
        }
        self.give_back(handle.offset, handle.bytes);
    }

    /// Puts a run among the free ones, joined with its neighbours.
    fn give_back(&mut self, mut offset: u64, mut bytes: u64) {
        if let Some(right) = self.free.remove(&(offset + bytes)) {
            bytes += right;
        }
        if let Some((left, length)) = self.free.range(..offset).next_back().map(|(left, length)| (*left, *length))
            && left + length == offset
        {
            self.free.remove(&left);
            offset = left;
            bytes += length;
        }
        self.free.insert(offset, bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::GRANULE;

    fn offset(physical: &Physical, number: u64) -> u64 {
        physical.get(number).unwrap().offset / GRANULE
    }

    #[test]
    fn runs_ascend_and_are_used_again() {
        let mut physical = Physical::new(100 * GRANULE).unwrap();
        let made: Vec<_> = (0..4).map(|_| physical.create(2 * GRANULE).unwrap()).collect();
        assert_eq!(made.iter().map(|&made| offset(&physical, made)).collect::<Vec<_>>(), [0, 2, 4, 6]);
        physical.release(made[1]);
        physical.release(made[2]);
        let small = physical.create(GRANULE).unwrap();
        let large = physical.create(4 * GRANULE).unwrap();
        assert_eq!((offset(&physical, small), offset(&physical, large)), (2, 8), "first fit; a run is contiguous");
        for number in [small, made[0], large, made[3]] {
            physical.release(number);
        }
        assert_eq!(physical.free, BTreeMap::from([(0, EXTENT)]), "all runs joined again");
        assert_eq!((physical.used(), physical.len()), (0, 0));
    }

    #[test]
    fn the_total_holds() {
        let mut physical = Physical::new(3 * GRANULE).unwrap();
        let first = physical.create(2 * GRANULE).unwrap();
        let error = physical.create(2 * GRANULE).unwrap_err();
        assert!(error.out_of_memory && error.reason.contains("4.000 MiB of 6.000 MiB"), "{error}");
        physical.mapped(first);
        physical.release(first);
        assert!(physical.create(2 * GRANULE).is_err(), "still mapped, so still there");
        physical.unmapped(first);
        assert!(physical.create(2 * GRANULE).is_ok());
    }
}
