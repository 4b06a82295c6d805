//! Handles as file descriptors, for other processes and from them.

use super::CudaBackend;
use crate::backend::PhysicalAllocation;
use crate::error::{DriverCall, DriverError};
use std::os::fd::{BorrowedFd, OwnedFd};

impl CudaBackend {
    /// Exports a handle as a new file descriptor, for another process to import. The memory lives
    /// until both sides have let go of it. Any thread.
    ///
    /// # Errors
    /// When the device's memory cannot be exported, or the process has no descriptor left.
    ///
    /// # Safety
    /// `handle` came from this backend's `create` and is not released.
    pub unsafe fn export_fd(&self, handle: PhysicalAllocation) -> Result<OwnedFd, DriverError> {
        if !self.memory.posix_fd {
            let why = "memory was created without POSIX-fd export (see the notes of `xseg info`)";
            return Err(DriverError::new(DriverCall::Other, why));
        }
        let _entered = self.primary.enter(true)?;
        // SAFETY: the caller's.
        unsafe { self.primary.api().export_fd(handle.0) }
    }

    /// A handle for the memory that a descriptor stands for, wherever it was exported.
    pub(super) fn import_fd(&self, fd: BorrowedFd<'_>, start: u64) -> Result<PhysicalAllocation, DriverError> {
        if start != 0 {
            return Err(DriverError::new(DriverCall::Other, format!("a handle starts at {start} of its descriptor")));
        }
        let _entered = self.primary.enter(true)?;
        self.primary.api().import_fd(fd).map(PhysicalAllocation)
    }
}
