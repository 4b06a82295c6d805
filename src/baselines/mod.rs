//! Other allocators, so that the same trace can be replayed through every known design.
//!
//! Each is written from the description of its rules and runs on a simulated device: memory is
//! counted and calls are priced by the frozen model, nothing is touched. Names are those of the
//! command line ([`NAMES`]).
#![deny(unsafe_code)]

pub use crate::backend::DriverCalls;
use crate::backend::gauge::{Gauge, MappedRange};
use crate::backend::timeline::Timeline;

mod blocks;
mod buddy;
mod classes;
mod cuda_malloc;
mod cuda_malloc_async;
mod device;
mod first_fit;
mod frame;
mod gmlake;
mod pending;
#[cfg(feature = "cli")]
mod replayed;
mod size_class;
mod slab;
mod tf_bfc;
mod torch_expandable;
mod torch_native;
mod vpmm;

#[cfg(feature = "cli")]
pub use replayed::replayable;

#[cfg(test)]
mod tests;
#[cfg(test)]
#[cfg(feature = "cli")]
mod trace_tests;

/// Why a baseline could not do what was asked.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SubjectError {
    /// No memory, after everything that this design tries.
    #[error("out of memory: {0} bytes asked for")]
    OutOfMemory(u64),
    /// Anything else, such as an address that is no live block.
    #[error("{0}")]
    Other(String),
}

crate::error::debug_is_the_sentence!(SubjectError);

/// What an allocator has used so far. Sizes in bytes, times in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Figures {
    /// Live blocks with their rounding.
    pub allocated: u64,
    /// Physical memory that exists, mapped or not.
    pub reserved: u64,
    /// Most `allocated` at once.
    pub peak_allocated: u64,
    /// Most `reserved` at once.
    pub peak_reserved: u64,
    /// Driver calls; a `cudaMalloc` counts as a create and a `cudaFree` as a release.
    pub calls: DriverCalls,
    /// Modelled time in driver calls, with the unmapping of old addresses that is still to come.
    pub driver_nanos: u64,
    /// Times that the host had to wait for the device.
    pub host_waits: u64,
    /// Times that one stream was made to wait for another.
    pub gpu_waits: u64,
    /// Handles unmapped from one place and mapped at another.
    pub handles_moved: u64,
    /// Handles mapped a second time beside their first place.
    pub handles_joined: u64,
    /// Bytes in moved and joined handles.
    pub bytes_moved: u64,
    /// Bytes copied; none of the designs here copies.
    pub bytes_copied: u64,
    /// Times that cached memory was given back because a request could not be served.
    pub retries: u64,
}

/// An allocator that a trace can be replayed through. One thread at a time.
pub trait Subject: std::fmt::Debug + Send {
    /// Name as on the command line.
    fn name(&self) -> &str;

    /// A block of at least `bytes` for `stream`; its address.
    ///
    /// # Errors
    /// [`SubjectError::OutOfMemory`] when the design finds no memory.
    fn alloc(&mut self, bytes: u64, stream: u64) -> Result<u64, SubjectError>;

    /// Gives the block at `address` back.
    ///
    /// # Errors
    /// [`SubjectError::Other`] if it is not the start of a live block.
    fn free(&mut self, address: u64) -> Result<(), SubjectError>;

    /// Says that work on `stream` uses the block too.
    ///
    /// # Errors
    /// [`SubjectError::Other`] if it is not the start of a live block.
    fn record_use(&mut self, address: u64, stream: u64) -> Result<(), SubjectError>;

    /// What was used so far.
    fn figures(&self) -> Figures;

    /// What it holds and has cost now, cheaper than [`Subject::figures`] and without what is still owed.
    fn gauge(&self) -> Gauge;

    /// What is mapped where, by address.
    fn ranges(&self) -> Vec<MappedRange>;

    /// Gives all memory back, also that of live blocks, and says how many modelled nanoseconds it took.
    ///
    /// # Errors
    /// [`SubjectError::Other`] if the simulated driver refuses, which is a defect of the baseline.
    fn finish(&mut self) -> Result<u64, SubjectError>;
}

/// Every baseline, in the order of reports.
pub const NAMES: &[&str] = &[
    "cuda-malloc",
    "cuda-malloc-async",
    "first-fit",
    "buddy",
    "slab",
    "size-class",
    "torch-native",
    "torch-expandable",
    "tf-bfc",
    "gmlake",
    "vpmm",
];

/// The baseline called `name` on a device with `limit` bytes (no bound where `None`), whose work
/// completes by `timeline`.
#[must_use]
pub fn create(name: &str, limit: Option<u64>, timeline: Timeline) -> Option<Box<dyn Subject>> {
    let device = device::Device::new(limit, timeline);
    Some(match name {
        "cuda-malloc" => frame::subject(device, cuda_malloc::CudaMalloc::default()),
        "cuda-malloc-async" => frame::subject(device, cuda_malloc_async::AsyncPool::default()),
        "first-fit" => frame::subject(device, first_fit::FirstFit::default()),
        "buddy" => frame::subject(device, buddy::Buddy::default()),
        "slab" => frame::subject(device, slab::new()),
        "size-class" => frame::subject(device, size_class::new()),
        "torch-native" => frame::subject(device, torch_native::TorchNative::default()),
        "torch-expandable" => frame::subject(device, torch_expandable::TorchExpandable::default()),
        "tf-bfc" => frame::subject(device, tf_bfc::Bfc::default()),
        "gmlake" => frame::subject(device, gmlake::GmLake::default()),
        "vpmm" => frame::subject(device, vpmm::Vpmm::default()),
        _ => return None,
    })
}
