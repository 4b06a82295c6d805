//! What can be replayed against: an allocator with its figures.
#![forbid(unsafe_code)]

pub use crate::backend::DriverCalls;
pub use crate::backend::gauge::{Backing, Gauge, MappedRange};

/// Why an allocator refused.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SubjectError {
    /// No memory within the limit, in the allocator's own words.
    #[error("{0}")]
    OutOfMemory(String),
    /// Anything else: an allocator or driver that does not work.
    #[error("{0}")]
    Other(String),
}

crate::error::debug_is_the_sentence!(SubjectError);

/// What an allocator did so far. Sizes in bytes.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Figures {
    /// In live blocks now.
    pub allocated: u64,
    /// Physical memory that exists now, mapped or not.
    pub reserved: u64,
    /// Most of `allocated`.
    pub peak_allocated: u64,
    /// Most of `reserved`.
    pub peak_reserved: u64,
    /// Driver calls, in handles touched.
    pub driver_calls: DriverCalls,
    /// Nanoseconds in driver calls (modelled or measured), with the unmapping of zombies still to come.
    pub driver_nanos: u64,
    /// Times that the host waited for the device.
    pub host_waits: u64,
    /// Waits queued on the device.
    pub gpu_waits: u64,
    /// Handles mapped elsewhere whole.
    pub handles_moved: u64,
    /// Handles whose idle part was mapped a second time.
    pub handles_joined: u64,
    /// Bytes of those idle parts, where the allocator says so.
    pub bytes_joined: u64,
    /// Second mappings of them that ended, where the allocator says so.
    pub joins_ended: u64,
    /// Bytes of handles moved or, where `bytes_joined` says nothing, joined.
    pub bytes_moved: u64,
    /// Bytes of live data copied.
    pub bytes_copied: u64,
    /// Anything more that the allocator has to say; null for nothing.
    pub detail: serde_json::Value,
}

/// An allocator under replay. One thread calls it.
pub trait Subject {
    /// Its name, as on the command line.
    fn name(&self) -> &str;

    /// Allocates; the block's address. A size of 0 gives an address that can be freed.
    ///
    /// # Errors
    /// [`SubjectError::OutOfMemory`] ends a replay as not completed, anything else as failed.
    fn alloc(&mut self, bytes: u64, stream: u64) -> Result<u64, SubjectError>;

    /// Frees a live block by its address.
    ///
    /// # Errors
    /// The allocator does not know it, or does not work.
    fn free(&mut self, address: u64) -> Result<(), SubjectError>;

    /// The block is used by work queued on `stream` up to its free.
    ///
    /// # Errors
    /// As [`Subject::free`].
    fn record_use(&mut self, address: u64, stream: u64) -> Result<(), SubjectError>;

    /// What it did so far.
    fn figures(&self) -> Figures;

    /// Free bytes in handles that live blocks hold, when it last refused a request; `None`: it does not know.
    fn locked(&self) -> Option<u64> {
        None
    }

    /// What it holds and has cost now. By default from [`Subject::figures`]; an allocator for which that is
    /// dear, or does deferred work, answers by itself.
    fn gauge(&self) -> Gauge {
        let Figures { allocated, reserved, driver_nanos, .. } = self.figures();
        Gauge { allocated, reserved, driver_nanos }
    }

    /// What is mapped where, by address; nothing where it is not known.
    fn ranges(&self) -> Vec<MappedRange> {
        Vec::new()
    }

    /// Gives everything back to the driver, live blocks too; no other call but `figures` follows.
    ///
    /// # Errors
    /// Something was lost.
    fn finish(&mut self) -> Result<(), SubjectError>;
}
