//! Mapped ranges made by bare driver calls.

use super::Suite;
use std::sync::Arc;
use xseg::Error;
use xseg::backend::cuda::CudaBackend;
use xseg::backend::{Backend, PhysicalAllocation};

/// Reserved addresses; given back when dropped.
#[derive(Debug)]
pub struct Reservation {
    backend: Arc<CudaBackend>,
    /// First address.
    pub address: u64,
    bytes: u64,
}

impl Reservation {
    /// Reserves `bytes`.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn new(suite: &Suite, bytes: u64) -> Result<Self, Error> {
        Ok(Self { backend: suite.backend.clone(), address: suite.backend.reserve(bytes)?, bytes })
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // SAFETY: whoever maps in it holds a borrow or unmaps before (fields drop in order).
        let done = unsafe { self.backend.unreserve(self.address, self.bytes) };
        report(done);
    }
}

/// Handles of one size; released when dropped.
#[derive(Debug)]
pub struct Handles {
    backend: Arc<CudaBackend>,
    /// The handles.
    pub all: Vec<PhysicalAllocation>,
    size: u64,
}

impl Handles {
    /// Creates `count` handles of `size` bytes.
    ///
    /// # Errors
    /// When the driver refuses one; those before it are released.
    pub fn new(suite: &Suite, size: u64, count: usize) -> Result<Self, Error> {
        let mut handles = Self { backend: suite.backend.clone(), all: Vec::with_capacity(count), size };
        for _ in 0..count {
            let handle = handles.backend.create(size)?;
            handles.all.push(handle);
        }
        Ok(handles)
    }
}

impl Drop for Handles {
    fn drop(&mut self) {
        for handle in self.all.drain(..) {
            // SAFETY: created by `new`, not named again.
            let done = unsafe { self.backend.release(handle, self.size) };
            report(done);
        }
    }
}

/// Handles mapped and accessible in a row; undone when dropped.
#[derive(Debug)]
pub struct Mapped {
    /// First address.
    pub address: u64,
    mapped: usize,
    handles: Handles,
    reservation: Reservation,
}

impl Mapped {
    /// Maps handle `order[i]` at place `i`, `before` bytes into a reservation of its own.
    ///
    /// # Errors
    /// When the driver refuses; what was done is undone.
    pub fn new(suite: &Suite, size: u64, order: &[usize], before: u64) -> Result<Self, Error> {
        let reservation = Reservation::new(suite, before + size * order.len() as u64)?;
        let handles = Handles::new(suite, size, order.len())?;
        let address = reservation.address + before;
        let mut range = Self { address, mapped: 0, handles, reservation };
        for (place, &index) in order.iter().enumerate() {
            // SAFETY: a place of its own for each.
            unsafe { map(&suite.backend, address + place as u64 * size, range.handles.all[index], size) }?;
            range.mapped += 1;
        }
        Ok(range)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let size = self.handles.size;
        // Kernels may still run on it.
        report(self.reservation.backend.quiesce());
        for place in 0..self.mapped {
            // SAFETY: mapped by `new`; the device is idle.
            let done = unsafe { self.reservation.backend.unmap(self.address + place as u64 * size, size) };
            report(done);
        }
    }
}

/// Maps a handle and makes it accessible.
///
/// # Errors
/// When the driver refuses; nothing is mapped then.
///
/// # Safety
/// As [`Backend::map`].
pub unsafe fn map(backend: &CudaBackend, at: u64, handle: PhysicalAllocation, bytes: u64) -> Result<(), Error> {
    // SAFETY: the caller's.
    unsafe { backend.map(at, handle, bytes) }?;
    // SAFETY: mapped just now.
    unsafe { backend.set_access(at, bytes) }.inspect_err(|_| {
        // SAFETY: new, nobody has used it.
        let undone = unsafe { backend.unmap(at, bytes) };
        report(undone);
    })?;
    Ok(())
}

fn report(done: Result<(), xseg::error::DriverError>) {
    if let Err(error) = done {
        eprintln!("xseg-device: left behind: {error}");
    }
}
