//! The backend with every call counted and priced: the one door to the driver.
//!
//! Counts are per handle, whatever way the backend takes, so that `sim` and `host` agree.
#![allow(unsafe_code, reason = "passes the backend's contracts through, adds none")]

use crate::backend::{Backend, PhysicalAllocation, cost};
use crate::error::{DriverCall, DriverError};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Driver calls of a heap or baseline, by kind, in handles touched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "cli", derive(serde::Serialize))]
#[non_exhaustive]
pub struct DriverCalls {
    /// Handles created.
    pub create: u64,
    /// Handles mapped.
    pub map: u64,
    /// Mappings made accessible.
    pub set_access: u64,
    /// Mappings unmapped.
    pub unmap: u64,
    /// Handles released.
    pub release: u64,
    /// Address ranges reserved.
    pub reserve: u64,
}

impl DriverCalls {
    /// All calls together.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.create + self.map + self.set_access + self.unmap + self.release + self.reserve
    }
}

/// See the module's text. Shared; memory calls are made by one thread at a time.
#[derive(Debug)]
pub(crate) struct Driver {
    backend: Arc<dyn Backend>,
    create: AtomicU64,
    map: AtomicU64,
    set_access: AtomicU64,
    unmap: AtomicU64,
    release: AtomicU64,
    reserve: AtomicU64,
    /// Time in calls: modelled, or measured where the backend is a real device.
    nanos: AtomicU64,
    measured: bool,
}

impl Driver {
    pub(crate) fn new(backend: Arc<dyn Backend>) -> Self {
        let measured = backend.kind() == crate::backend::BackendKind::Cuda;
        let zero = AtomicU64::default;
        Self {
            backend,
            create: zero(),
            map: zero(),
            set_access: zero(),
            unmap: zero(),
            release: zero(),
            reserve: zero(),
            nanos: zero(),
            measured,
        }
    }

    pub(crate) fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    pub(crate) fn calls(&self) -> DriverCalls {
        DriverCalls {
            create: self.create.load(Relaxed),
            map: self.map.load(Relaxed),
            set_access: self.set_access.load(Relaxed),
            unmap: self.unmap.load(Relaxed),
            release: self.release.load(Relaxed),
            reserve: self.reserve.load(Relaxed),
        }
    }

    /// Nanoseconds spent in driver calls so far.
    pub(crate) fn nanos(&self) -> u64 {
        self.nanos.load(Relaxed)
    }

    /// Runs `operation`, then counts and prices the calls it stands for.
    fn count<T>(
        &self,
        calls: &[DriverCall],
        bytes: u64,
        operation: impl FnOnce() -> Result<T, DriverError>,
    ) -> Result<T, DriverError> {
        let start = self.measured.then(std::time::Instant::now);
        let done = operation()?;
        let mut nanos = 0;
        for &call in calls {
            nanos += cost::nanos(call, bytes);
            let counter = match call {
                DriverCall::Create => &self.create,
                DriverCall::Map => &self.map,
                DriverCall::SetAccess => &self.set_access,
                DriverCall::Unmap => &self.unmap,
                DriverCall::Release => &self.release,
                DriverCall::Reserve => &self.reserve,
                _ => continue,
            };
            counter.fetch_add(1, Relaxed);
        }
        if let Some(start) = start {
            nanos = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        }
        self.nanos.fetch_add(nanos, Relaxed);
        Ok(done)
    }

    pub(crate) fn reserve(&self, bytes: u64) -> Result<u64, DriverError> {
        self.count(&[DriverCall::Reserve], bytes, || self.backend.reserve(bytes))
    }

    /// # Safety
    /// As [`Backend::unreserve`].
    pub(crate) unsafe fn unreserve(&self, address: u64, bytes: u64) -> Result<(), DriverError> {
        // SAFETY: passed on to the caller.
        unsafe { self.backend.unreserve(address, bytes) }
    }

    pub(crate) fn create(&self, bytes: u64) -> Result<PhysicalAllocation, DriverError> {
        self.count(&[DriverCall::Create], bytes, || self.backend.create(bytes))
    }

    /// Maps a handle and makes it accessible; on failure nothing is mapped.
    ///
    /// # Safety
    /// As [`Backend::map`].
    pub(crate) unsafe fn map(&self, at: u64, handle: PhysicalAllocation, bytes: u64) -> Result<(), DriverError> {
        // SAFETY: passed on to the caller.
        self.count(&[DriverCall::Map], bytes, || unsafe { self.backend.map(at, handle, bytes) })?;
        // SAFETY: the mapping was made just now.
        let access = self.count(&[DriverCall::SetAccess], bytes, || unsafe { self.backend.set_access(at, bytes) });
        if access.is_err() {
            // SAFETY: the mapping is new, nobody has used it. A second failure leaves a mapping that
            // the error cannot mend; the range stays unusable (design.md, "Transactions").
            let _ = unsafe { self.unmap(at, bytes) };
        }
        access
    }

    /// # Safety
    /// As [`Backend::unmap`].
    pub(crate) unsafe fn unmap(&self, at: u64, bytes: u64) -> Result<(), DriverError> {
        // SAFETY: passed on to the caller.
        self.count(&[DriverCall::Unmap], bytes, || unsafe { self.backend.unmap(at, bytes) })
    }

    /// # Safety
    /// As [`Backend::relocate`].
    pub(crate) unsafe fn relocate(
        &self,
        from: u64,
        to: u64,
        handle: PhysicalAllocation,
        bytes: u64,
    ) -> Result<(), DriverError> {
        const CALLS: [DriverCall; 3] = [DriverCall::Map, DriverCall::SetAccess, DriverCall::Unmap];
        // SAFETY: passed on to the caller.
        self.count(&CALLS, bytes, || unsafe { self.backend.relocate(from, to, handle, bytes) })
    }

    /// # Safety
    /// As [`Backend::release`].
    pub(crate) unsafe fn release(&self, handle: PhysicalAllocation, bytes: u64) -> Result<(), DriverError> {
        // SAFETY: passed on to the caller.
        self.count(&[DriverCall::Release], bytes, || unsafe { self.backend.release(handle, bytes) })
    }
}
