//! Kernels that write, check and copy device memory, for verification and measurements: the device
//! suite and `replay --verify` use them, the heap never does.
//!
//! The kernels are PTX text (`kernels.ptx`), which the driver compiles when [`Kernels::load`] runs.

use super::sys::{Api, MODULE_CALLS};
use super::{CudaBackend, unavailable};
use crate::backend::{Backend, StreamId};
use crate::error::{DriverError, Error};
use parking_lot::Mutex;
use std::ffi::{CStr, c_void};
use std::sync::Arc;

const PTX: &str = concat!(include_str!("kernels.ptx"), "\0");
/// Threads of a block.
const THREADS: u32 = 256;
/// Blocks of a large grid: all that an H200 holds at once (132 multiprocessors, 2,048 threads each).
const BLOCKS: u32 = 132 * 8;
/// Stamps that fit in the list that the device reads.
const LIST: usize = 1 << 16;

/// A pattern of up to 16 bytes at an address of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Stamp {
    /// Where; any alignment.
    pub address: u64,
    /// First and last eight bytes, little-endian.
    pub value: [u64; 2],
    /// How many of the 16 bytes, at most 16.
    pub bytes: u64,
}

/// What checks found since it was last taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Mismatches {
    /// Words (of [`Kernels::check`]) and stamps (of [`Kernels::check_stamps`]) that were wrong.
    pub count: u64,
    /// Address of one of them; 0 when there is none.
    pub address: u64,
}

/// Word `index` of the pattern that [`Kernels::fill`] writes.
#[must_use]
pub const fn pattern(index: u64, seed: u32) -> u32 {
    let word = (index as u32).wrapping_mul(0x9E37_79B1).wrapping_add(seed);
    word ^ (word >> 15)
}

/// The kernels, loaded on one device. Any thread may launch; launches are asynchronous.
///
/// Takes 4 KiB of the device's memory and 2 MiB of pinned host memory outside any heap, and what the
/// driver needs for the kernels.
#[derive(Debug)]
pub struct Kernels {
    backend: Arc<CudaBackend>,
    module: u64,
    fill: u64,
    check: u64,
    stamp: u64,
    check_stamps: u64,
    spin: u64,
    copy: u64,
    /// Two words on the device: [`Mismatches`].
    result: u64,
    list: Mutex<List>,
}

/// Pinned memory from which kernels read their stamps. Used from the front on; full, it waits.
#[derive(Debug)]
struct List {
    memory: *mut Stamp,
    used: usize,
}

// SAFETY: the memory belongs to this list alone, and no thread is special to it.
unsafe impl Send for List {}

impl Kernels {
    /// Compiles and loads the kernels.
    ///
    /// # Errors
    /// [`Error::Unavailable`] for a driver without the calls that this needs, [`Error::Driver`] when
    /// it refuses the kernels (they need compute capability 7.0) or has no memory for them.
    pub fn load(backend: Arc<CudaBackend>) -> Result<Self, Error> {
        let api = backend.api();
        let missing = api.missing(&MODULE_CALLS);
        if !missing.is_empty() {
            return Err(unavailable(format!("the CUDA driver has no {}", missing.join(", "))));
        }
        let text =
            CStr::from_bytes_with_nul(PTX.as_bytes()).map_err(|error| Error::InvalidArgument(error.to_string()))?;
        let entered = backend.primary.enter(true)?;
        let module = api.load_module(text)?;
        // What follows is undone by `Drop` if a step fails.
        let mut kernels = Self {
            backend: backend.clone(),
            module,
            fill: 0,
            check: 0,
            stamp: 0,
            check_stamps: 0,
            spin: 0,
            copy: 0,
            result: 0,
            list: Mutex::new(List { memory: std::ptr::null_mut(), used: 0 }),
        };
        for (function, name) in [
            (&mut kernels.fill, c"fill"),
            (&mut kernels.check, c"check"),
            (&mut kernels.stamp, c"stamp_many"),
            (&mut kernels.check_stamps, c"check_many"),
            (&mut kernels.spin, c"spin"),
            (&mut kernels.copy, c"copy"),
        ] {
            // SAFETY: the module was loaded just now.
            *function = unsafe { api.function(module, name) }?;
        }
        kernels.result = api.allocate_plain(4096)?;
        kernels.list.get_mut().memory = api.allocate_pinned(LIST * size_of::<Stamp>())?.cast();
        drop(entered);
        // SAFETY: memory of this object that nothing uses yet.
        unsafe { kernels.write(StreamId(1), kernels.result, &[0; 16]) }?;
        Ok(kernels)
    }

    /// Queues writing a pattern: word `i` (of `words` words of four bytes) becomes [`pattern`]`(i, seed)`.
    ///
    /// # Errors
    /// When the driver refuses the launch.
    ///
    /// # Safety
    /// The range may be written by the stream, until it has passed this kernel; `stream` exists.
    pub unsafe fn fill(&self, stream: StreamId, address: u64, words: u64, seed: u32) -> Result<(), DriverError> {
        // SAFETY: the caller's.
        unsafe { self.launch(self.fill, words, stream, &[address, words, u64::from(seed)]) }
    }

    /// Queues checking a pattern; wrong words are counted in [`Kernels::mismatches`].
    ///
    /// # Errors
    /// When the driver refuses the launch.
    ///
    /// # Safety
    /// The range may be read by the stream, until it has passed this kernel; `stream` exists.
    pub unsafe fn check(&self, stream: StreamId, address: u64, words: u64, seed: u32) -> Result<(), DriverError> {
        // SAFETY: the caller's.
        unsafe { self.launch(self.check, words, stream, &[address, words, u64::from(seed), self.result]) }
    }

    /// Queues writing stamps. Waits for the device now and then, when its list is full.
    ///
    /// # Errors
    /// When the driver refuses the launch.
    ///
    /// # Safety
    /// The stamped bytes may be written by the stream, until it has passed this kernel; `stream` exists.
    pub unsafe fn stamp(&self, stream: StreamId, stamps: &[Stamp]) -> Result<(), DriverError> {
        for stamps in stamps.chunks(LIST) {
            let mut list = self.list.lock();
            let at = self.stage(&mut list, stamps)?;
            // SAFETY: the caller's; the list is not overwritten before the device is idle.
            unsafe { self.launch_each(self.stamp, stream, &[at, stamps.len() as u64]) }?;
        }
        Ok(())
    }

    /// Queues checking stamps; wrong ones are counted in [`Kernels::mismatches`]. Waits as
    /// [`Kernels::stamp`].
    ///
    /// # Errors
    /// When the driver refuses the launch.
    ///
    /// # Safety
    /// The stamped bytes may be read by the stream, until it has passed this kernel; `stream` exists.
    pub unsafe fn check_stamps(&self, stream: StreamId, stamps: &[Stamp]) -> Result<(), DriverError> {
        for stamps in stamps.chunks(LIST) {
            let mut list = self.list.lock();
            let at = self.stage(&mut list, stamps)?;
            // SAFETY: as in `stamp`.
            unsafe { self.launch_each(self.check_stamps, stream, &[at, stamps.len() as u64, self.result]) }?;
        }
        Ok(())
    }

    /// Queues work that takes this many nanoseconds of one thread and touches no memory.
    ///
    /// # Errors
    /// When the driver refuses the launch.
    ///
    /// # Safety
    /// `stream` exists.
    pub unsafe fn spin(&self, stream: StreamId, nanoseconds: u64) -> Result<(), DriverError> {
        let _entered = self.backend.primary.enter(true)?;
        // SAFETY: the kernel touches no memory; the stream is the caller's.
        unsafe { self.backend.api().launch(self.spin, (1, 1), self.backend.resolve(stream), &[nanoseconds]) }
    }

    /// Queues copying `bytes` (a multiple of 16, as the addresses) within the device by a kernel.
    ///
    /// # Errors
    /// When the driver refuses the launch.
    ///
    /// # Safety
    /// Both ranges may be used by the stream, until it has passed this kernel, and do not overlap;
    /// `stream` exists.
    pub unsafe fn copy(&self, stream: StreamId, to: u64, from: u64, bytes: u64) -> Result<(), DriverError> {
        // SAFETY: the caller's.
        unsafe { self.launch(self.copy, bytes / 16, stream, &[to, from, bytes / 16]) }
    }

    /// Writes to the device and waits until that is done.
    ///
    /// # Errors
    /// When the driver refuses the copy.
    ///
    /// # Safety
    /// The range may be written by the stream now; `stream` exists.
    pub unsafe fn write(&self, stream: StreamId, to: u64, bytes: &[u8]) -> Result<(), DriverError> {
        let _entered = self.backend.primary.enter(true)?;
        let stream = self.backend.resolve(stream);
        // SAFETY: the caller's; the source outlives the copy, which the next call waits for.
        unsafe { self.backend.api().copy_in(to, bytes, stream) }?;
        // SAFETY: the caller's.
        unsafe { self.backend.api().synchronize_stream(stream) }
    }

    /// Reads from the device, after all earlier work of the stream.
    ///
    /// # Errors
    /// When the driver refuses the copy, or earlier work failed.
    ///
    /// # Safety
    /// The range may be read by the stream now; `stream` exists.
    pub unsafe fn read(&self, stream: StreamId, from: u64, to: &mut [u8]) -> Result<(), DriverError> {
        let _entered = self.backend.primary.enter(true)?;
        let stream = self.backend.resolve(stream);
        // SAFETY: the caller's; the target outlives the copy, which the next call waits for.
        unsafe { self.backend.api().copy_out(to, from, stream) }?;
        // SAFETY: the caller's.
        unsafe { self.backend.api().synchronize_stream(stream) }
    }

    /// Waits for the device and takes what checks have found.
    ///
    /// # Errors
    /// When the driver refuses, or earlier work failed.
    pub fn mismatches(&self) -> Result<Mismatches, DriverError> {
        self.backend.quiesce()?;
        let mut found = [0u8; 16];
        // SAFETY: memory of this object; the device is idle.
        unsafe { self.read(StreamId(1), self.result, &mut found) }?;
        let [count, address] = [0, 8].map(|at| {
            let mut word = [0; 8];
            word.copy_from_slice(&found[at..at + 8]);
            u64::from_le_bytes(word)
        });
        if count > 0 {
            // SAFETY: as above.
            unsafe { self.write(StreamId(1), self.result, &[0; 16]) }?;
        }
        Ok(Mismatches { count, address })
    }

    /// Puts stamps where the device can read them and says where.
    fn stage(&self, list: &mut List, stamps: &[Stamp]) -> Result<u64, DriverError> {
        if list.used + stamps.len() > LIST {
            self.backend.quiesce()?;
            list.used = 0;
        }
        // SAFETY: inside the list's memory.
        let at = unsafe { list.memory.add(list.used) };
        // SAFETY: there is room for all; no kernel reads this part (it is new, or the device was idle).
        unsafe { at.copy_from_nonoverlapping(stamps.as_ptr(), stamps.len()) };
        list.used += stamps.len();
        Ok(at.expose_provenance() as u64)
    }

    /// Launches with enough blocks for `items`, at most a full device.
    unsafe fn launch(&self, kernel: u64, items: u64, stream: StreamId, parameters: &[u64]) -> Result<(), DriverError> {
        let blocks = items.div_ceil(u64::from(THREADS)).clamp(1, u64::from(BLOCKS)) as u32;
        let _entered = self.backend.primary.enter(true)?;
        // SAFETY: the caller's.
        unsafe { self.backend.api().launch(kernel, (blocks, THREADS), self.backend.resolve(stream), parameters) }
    }

    /// Launches with one thread for each of the entries, which are the second parameter.
    unsafe fn launch_each(&self, kernel: u64, stream: StreamId, parameters: &[u64]) -> Result<(), DriverError> {
        let blocks = parameters[1].div_ceil(64).max(1) as u32;
        let _entered = self.backend.primary.enter(true)?;
        // SAFETY: the caller's.
        unsafe { self.backend.api().launch(kernel, (blocks, 64), self.backend.resolve(stream), parameters) }
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        // No kernel may run when its module and memory go. A refusal means that the driver is gone.
        let Ok(_entered) = self.backend.primary.enter(true) else { return };
        let api: &Api = self.backend.api();
        let _ = api.synchronize();
        let memory: *mut c_void = self.list.get_mut().memory.cast();
        if !memory.is_null() {
            // SAFETY: allocated by `load`, and the device is idle.
            let _ = unsafe { api.free_pinned(memory) };
        }
        if self.result != 0 {
            // SAFETY: as above.
            let _ = unsafe { api.free_plain(self.result) };
        }
        // SAFETY: as above.
        let _ = unsafe { api.unload_module(self.module) };
    }
}

impl CudaBackend {
    /// A new stream of the device that does not wait for the legacy one. For tests and measurements.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn create_stream(&self) -> Result<StreamId, DriverError> {
        let _entered = self.primary.enter(true)?;
        self.api().create_stream().map(StreamId)
    }

    /// Destroys a stream; work queued on it still runs.
    ///
    /// # Errors
    /// When the driver refuses.
    ///
    /// # Safety
    /// The stream came from [`CudaBackend::create_stream`] and is not named again.
    pub unsafe fn destroy_stream(&self, stream: StreamId) -> Result<(), DriverError> {
        let _entered = self.primary.enter(true)?;
        // SAFETY: the caller's.
        unsafe { self.api().destroy_stream(stream.0) }
    }

    /// Memory by `cuMemAlloc`, outside any heap; the driver's own allocator to compare with. Bytes.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn allocate_plain(&self, bytes: u64) -> Result<u64, DriverError> {
        let _entered = self.primary.enter(true)?;
        self.api().allocate_plain(bytes)
    }

    /// Frees such memory, by `cuMemFree`, which waits for the device.
    ///
    /// # Errors
    /// When the driver refuses.
    ///
    /// # Safety
    /// `address` came from [`CudaBackend::allocate_plain`] and is not used again.
    pub unsafe fn free_plain(&self, address: u64) -> Result<(), DriverError> {
        let _entered = self.primary.enter(true)?;
        // SAFETY: the caller's.
        unsafe { self.api().free_plain(address) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_read_stamps_as_four_words() {
        let stamp = Stamp { address: 1, value: [2, 3], bytes: 16 };
        assert_eq!((size_of::<Stamp>(), align_of::<Stamp>()), (32, 8));
        // SAFETY: plain words without padding.
        assert_eq!(unsafe { std::mem::transmute::<Stamp, [u64; 4]>(stamp) }, [1, 2, 3, 16]);
    }

    #[test]
    fn patterns_differ_by_index_and_seed() {
        assert_eq!(pattern(0, 5), 5);
        assert_eq!(pattern(1, 0), 0x9E37_79B1 ^ (0x9E37_79B1 >> 15));
        assert_ne!(pattern(7, 1), pattern(7, 2));
        assert_eq!(pattern(1 << 32, 9), pattern(0, 9));
    }
}
