//! Physical memory of the host backend: runs of one sparse memfd.
//!
//! A handle is one contiguous run, so that it is one `mmap` wherever it is mapped. Runs are handed
//! out first fit from offset 0: handles that are created one after another have ascending offsets,
//! and the kernel joins their mappings into one VMA when they are mapped side by side.
//!
//! An imported handle is a run of another process's memfd, of which one descriptor is kept however many handles
//! there are.
#![forbid(unsafe_code)]

use crate::error::{DriverCall, DriverError};
use crate::units::human;
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals};
use rustix::process::{Pid, getpid};
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::os::fd::BorrowedFd;
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
    /// Number of the memfd that the run is of; 0 is the own one.
    pub(super) file: u64,
    /// Others use the run: it was imported, or other processes may have it mapped still.
    lent: bool,
}

/// A memfd of another process.
#[derive(Debug)]
struct Foreign {
    file: File,
    /// Device and inode: what descriptors of one memfd share.
    identity: (u64, u64),
    /// Handles that are runs of it.
    handles: usize,
}

/// The memfd and who owns which part of it.
#[derive(Debug)]
pub(super) struct Physical {
    file: File,
    /// Free runs: start and length in bytes, no two adjacent.
    free: BTreeMap<u64, u64>,
    handles: HashMap<u64, Handle>,
    /// By number.
    foreign: HashMap<u64, Foreign>,
    next: u64,
    total: u64,
    used: u64,
    /// The process whose memory it is.
    owner: Pid,
}

impl Physical {
    /// A memfd that hands out at most `total` bytes.
    pub(super) fn new(total: u64) -> Result<Self, rustix::io::Errno> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(rustix::fs::memfd_create("xseg", flags)?);
        rustix::fs::ftruncate(&file, EXTENT)?;
        // An importer could fault on what was cut off (H8). Holes may still be punched.
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let free = BTreeMap::from([(0, EXTENT)]);
        Ok(Self {
            file,
            free,
            handles: HashMap::new(),
            foreign: HashMap::new(),
            next: 1,
            total,
            used: 0,
            owner: getpid(),
        })
    }

    /// The own memfd.
    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// The memfd of a handle's number.
    pub(super) fn file_of(&self, number: u64) -> &File {
        self.foreign.get(&number).map_or(&self.file, |foreign| &foreign.file)
    }

    fn new_number(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }

    /// Makes a handle of a run of another process's memfd.
    pub(super) fn import(&mut self, fd: BorrowedFd<'_>, offset: u64, bytes: u64) -> Result<u64, String> {
        let file = File::from(fd.try_clone_to_owned().map_err(|error| error.to_string())?);
        let seals = fcntl_get_seals(&file).map_err(|error| format!("the descriptor is of no memfd ({error})"))?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err("the memfd may shrink, which would make every access a fault; it is not xseg's".into());
        }
        let metadata = file.metadata().map_err(|error| error.to_string())?;
        if offset.checked_add(bytes).is_none_or(|end| end > metadata.len()) {
            return Err(format!("{} at {offset:#x} are not in the memfd", human(bytes)));
        }
        let file = self.foreign_number(file, (metadata.dev(), metadata.ino())).map_err(|error| error.to_string())?;
        let number = self.new_number();
        self.handles.insert(number, Handle { offset, bytes, mappings: 0, released: false, file, lent: true });
        Ok(number)
    }

    /// Number of a memfd, with one handle more; the own one's where it was exported by this very device.
    fn foreign_number(&mut self, file: File, identity: (u64, u64)) -> std::io::Result<u64> {
        let own = self.file.metadata()?;
        if (own.dev(), own.ino()) == identity {
            return Ok(0);
        }
        if let Some((number, known)) = self.foreign.iter_mut().find(|(_, known)| known.identity == identity) {
            known.handles += 1;
            return Ok(*number);
        }
        let number = self.new_number();
        self.foreign.insert(number, Foreign { file, identity, handles: 1 });
        Ok(number)
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
        let number = self.new_number();
        self.used += bytes;
        let handle = Handle { offset, bytes, mappings: 0, released: false, file: 0, lent: false };
        self.handles.insert(number, handle);
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

    /// Other processes may use the run for as long as they like: it is neither freed nor handed out again.
    pub(super) fn lend(&mut self, number: u64) {
        if let Some(handle) = self.handles.get_mut(&number) {
            handle.lent = true;
        }
    }

    fn free_if_unused(&mut self, number: u64) {
        let Some(handle) = self.handles.get(&number).copied().filter(|handle| handle.released && handle.mappings == 0)
        else {
            return;
        };
        self.handles.remove(&number);
        if let Some(foreign) = self.foreign.get_mut(&handle.file) {
            foreign.handles -= 1;
            if foreign.handles == 0 {
                self.foreign.remove(&handle.file);
            }
        }
        if handle.lent {
            return;
        }
        self.used -= handle.bytes;
        // A forked child has the parent's memfd, not a copy of it.
        if getpid() != self.owner {
            return;
        }
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
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;

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

    /// A memfd of `bytes` with these seals.
    fn memfd(bytes: u64, seals: SealFlags) -> File {
        let file = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&file, bytes).unwrap();
        fcntl_add_seals(&file, seals).unwrap();
        file.into()
    }

    #[test]
    fn imported_runs_are_anothers() {
        let [mut here, mut there] = [(); 2].map(|()| Physical::new(100 * GRANULE).unwrap());
        let made = here.create(4 * GRANULE).unwrap();
        let run = here.get(made).unwrap();
        let fd = here.file().as_fd();
        let [first, second] = [(); 2].map(|()| there.import(fd, run.offset, run.bytes).unwrap());
        assert_ne!(first, second);
        let (one, two) = (there.get(first).unwrap(), there.get(second).unwrap());
        assert!(one.file != 0 && one.file == two.file, "one descriptor for all that is of one memfd");
        assert_eq!(there.file_of(one.file).metadata().unwrap().ino(), here.file().metadata().unwrap().ino());
        assert_eq!((there.used(), there.len(), there.foreign.len()), (0, 2, 1));
        here.file().write_all_at(b"kept", run.offset).unwrap();
        for number in [first, second] {
            there.release(number);
        }
        assert_eq!((there.len(), there.foreign.len(), &there.free), (0, 0, &BTreeMap::from([(0, EXTENT)])));
        // The own memfd needs no second descriptor, and the run stays its first handle's.
        let fd = here.file().try_clone().unwrap();
        let own = here.import(fd.as_fd(), run.offset, run.bytes).unwrap();
        assert_eq!((here.get(own).unwrap().file, here.foreign.len(), here.used()), (0, 0, 4 * GRANULE));
        here.release(own);
        let mut kept = [0; 4];
        here.file().read_exact_at(&mut kept, run.offset).unwrap();
        assert_eq!(&kept, b"kept");
    }

    #[test]
    fn only_what_cannot_shrink_is_imported() {
        let mut physical = Physical::new(100 * GRANULE).unwrap();
        let mut import = |file: &File, start, bytes| physical.import(file.as_fd(), start, bytes).unwrap_err();
        let error = import(&memfd(4 * GRANULE, SealFlags::GROW), 0, GRANULE);
        assert!(error.contains("may shrink"), "{error}");
        let sealed = memfd(4 * GRANULE, SealFlags::SHRINK);
        for (start, bytes) in [(0, 5 * GRANULE), (4 * GRANULE, GRANULE), (u64::MAX - GRANULE + 1, GRANULE)] {
            let error = import(&sealed, start, bytes);
            assert!(error.contains("not in the memfd"), "{error}");
        }
        let error = import(&File::open("/dev/null").unwrap(), 0, GRANULE);
        assert!(error.contains("no memfd"), "{error}");
        assert!(physical.import(sealed.as_fd(), 3 * GRANULE, GRANULE).is_ok());
    }

    #[test]
    fn lent_runs_are_not_used_again() {
        let mut physical = Physical::new(4 * GRANULE).unwrap();
        let lent = physical.create(2 * GRANULE).unwrap();
        let run = physical.get(lent).unwrap();
        physical.file().write_all_at(b"kept", run.offset).unwrap();
        physical.mapped(lent);
        physical.lend(lent);
        physical.release(lent);
        physical.unmapped(lent);
        assert_eq!((physical.len(), physical.used()), (0, 2 * GRANULE));
        let next = physical.create(2 * GRANULE).unwrap();
        assert_eq!(offset(&physical, next), 2, "beside it");
        let mut kept = [0; 4];
        physical.file().read_exact_at(&mut kept, run.offset).unwrap();
        assert_eq!(&kept, b"kept");
    }
}
