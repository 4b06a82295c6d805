//! A backend that keeps a picture of the device: what is mapped where, how much exists, what it cost.
//!
//! For reports. A heap's own statistics walk its tables and do deferred work; this can be read after
//! every call without changing what the heap does next.
#![allow(unsafe_code, reason = "passes the backend's contracts through")]

use super::{
    Backend, BackendKind, ClientEvent, Event, EventScope, PhysicalAllocation, StreamId, Unmoved, cost,
    handed_on::handed_on,
};
use crate::error::{DriverCall, DriverError};
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// What lies behind a mapped range of addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backing {
    /// Memory at the address that it was first mapped at.
    First,
    /// Memory that was first mapped elsewhere.
    Moved,
    /// Memory that has been mapped again elsewhere: blocks use it there, not here.
    Left,
}

/// One mapping. Address and bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MappedRange {
    /// Where it starts.
    pub address: u64,
    /// How long it is.
    pub bytes: u64,
    /// What is behind it.
    pub backing: Backing,
}

/// What an allocator holds and has cost at one moment, cheap to ask for. Sizes in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Gauge {
    /// Live blocks with their rounding.
    pub allocated: u64,
    /// Physical memory that exists.
    pub reserved: u64,
    /// Nanoseconds in driver calls made so far.
    pub driver_nanos: u64,
}

#[derive(Debug, Clone, Copy)]
struct Mapping {
    handle: PhysicalAllocation,
    bytes: u64,
    /// Counts up with each mapping made.
    order: u64,
}

/// Mappings by address, and where each handle was mapped first.
#[derive(Debug, Default)]
pub(crate) struct Picture {
    mappings: BTreeMap<u64, Mapping>,
    first: HashMap<PhysicalAllocation, u64>,
    made: u64,
}

impl Picture {
    /// Notes a mapping.
    pub(crate) fn mapped(&mut self, address: u64, handle: PhysicalAllocation, bytes: u64) {
        self.made += 1;
        self.mappings.insert(address, Mapping { handle, bytes, order: self.made });
        self.first.entry(handle).or_insert(address);
    }

    /// Notes that a mapping is gone; what it was.
    pub(crate) fn unmapped(&mut self, address: u64) -> Option<(PhysicalAllocation, u64)> {
        self.mappings.remove(&address).map(|mapping| (mapping.handle, mapping.bytes))
    }

    /// Forgets a released handle, whose name may come again.
    pub(crate) fn released(&mut self, handle: PhysicalAllocation) {
        self.first.remove(&handle);
    }

    /// What is mapped at exactly this address.
    pub(crate) fn at(&self, address: u64) -> Option<(PhysicalAllocation, u64)> {
        self.mappings.get(&address).map(|mapping| (mapping.handle, mapping.bytes))
    }

    /// The lowest mapping's address.
    pub(crate) fn lowest(&self) -> Option<u64> {
        self.mappings.keys().next().copied()
    }

    /// All mappings by address.
    pub(crate) fn ranges(&self) -> Vec<MappedRange> {
        let mut newest: HashMap<PhysicalAllocation, u64> = HashMap::new();
        for mapping in self.mappings.values() {
            let order = newest.entry(mapping.handle).or_default();
            *order = mapping.order.max(*order);
        }
        let range = |(&address, mapping): (&u64, &Mapping)| {
            let backing = match () {
                () if newest.get(&mapping.handle) != Some(&mapping.order) => Backing::Left,
                () if self.first.get(&mapping.handle) == Some(&address) => Backing::First,
                () => Backing::Moved,
            };
            MappedRange { address, bytes: mapping.bytes, backing }
        };
        self.mappings.iter().map(range).collect()
    }
}

/// See the module's text. Shared like any backend.
#[derive(Debug)]
pub struct GaugeBackend {
    inner: Arc<dyn Backend>,
    picture: Mutex<Picture>,
    reserved: AtomicU64,
    nanos: AtomicU64,
}

impl GaugeBackend {
    /// Watches `inner`, which nothing else may use.
    #[must_use]
    pub fn new(inner: Arc<dyn Backend>) -> Self {
        Self { inner, picture: Mutex::default(), reserved: AtomicU64::new(0), nanos: AtomicU64::new(0) }
    }

    /// Physical memory that exists, in bytes.
    #[must_use]
    pub fn reserved(&self) -> u64 {
        self.reserved.load(Relaxed)
    }

    /// Nanoseconds in calls so far: measured on a GPU, else by the frozen cost model.
    #[must_use]
    pub fn nanos(&self) -> u64 {
        self.nanos.load(Relaxed)
    }

    /// All mappings by address.
    #[must_use]
    pub fn ranges(&self) -> Vec<MappedRange> {
        self.picture.lock().ranges()
    }

    /// Runs `operation` and adds what it cost.
    fn count<T>(
        &self,
        calls: &[DriverCall],
        bytes: u64,
        operation: impl FnOnce() -> Result<T, DriverError>,
    ) -> Result<T, DriverError> {
        let start = (self.inner.kind() == BackendKind::Cuda).then(Instant::now);
        let done = operation()?;
        let nanos = match start {
            Some(start) => u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX),
            None => calls.iter().map(|call| cost::nanos(*call, bytes)).sum(),
        };
        self.nanos.fetch_add(nanos, Relaxed);
        Ok(done)
    }
}

impl Backend for GaugeBackend {
    handed_on!();

    fn reserve(&self, bytes: u64) -> Result<u64, DriverError> {
        self.count(&[DriverCall::Reserve], bytes, || self.inner.reserve(bytes))
    }

    unsafe fn unreserve(&self, address: u64, bytes: u64) -> Result<(), DriverError> {
        // SAFETY: passed on to the caller.
        unsafe { self.inner.unreserve(address, bytes) }
    }

    fn create(&self, bytes: u64) -> Result<PhysicalAllocation, DriverError> {
        let handle = self.count(&[DriverCall::Create], bytes, || self.inner.create(bytes))?;
        self.reserved.fetch_add(bytes, Relaxed);
        Ok(handle)
    }

    unsafe fn map(&self, address: u64, handle: PhysicalAllocation, bytes: u64) -> Result<(), DriverError> {
        // SAFETY: passed on to the caller.
        self.count(&[DriverCall::Map], bytes, || unsafe { self.inner.map(address, handle, bytes) })?;
        self.picture.lock().mapped(address, handle, bytes);
        Ok(())
    }

    unsafe fn set_access(&self, address: u64, bytes: u64) -> Result<(), DriverError> {
        // SAFETY: passed on to the caller.
        self.count(&[DriverCall::SetAccess], bytes, || unsafe { self.inner.set_access(address, bytes) })
    }

    unsafe fn set_peer_access(&self, address: u64, bytes: u64, peer: u32, on: bool) -> Result<(), DriverError> {
        // SAFETY: passed on to the caller.
        let call = || unsafe { self.inner.set_peer_access(address, bytes, peer, on) };
        self.count(&[DriverCall::SetAccess], bytes, call)
    }

    unsafe fn unmap(&self, address: u64, bytes: u64) -> Result<(), DriverError> {
        // SAFETY: passed on to the caller.
        self.count(&[DriverCall::Unmap], bytes, || unsafe { self.inner.unmap(address, bytes) })?;
        self.picture.lock().unmapped(address);
        Ok(())
    }

    unsafe fn release(&self, handle: PhysicalAllocation, bytes: u64) -> Result<(), DriverError> {
        // SAFETY: passed on to the caller.
        self.count(&[DriverCall::Release], bytes, || unsafe { self.inner.release(handle, bytes) })?;
        self.reserved.fetch_sub(bytes, Relaxed);
        self.picture.lock().released(handle);
        Ok(())
    }

    unsafe fn relocate(&self, from: u64, to: u64, handle: PhysicalAllocation, bytes: u64) -> Result<(), Unmoved> {
        const CALLS: [DriverCall; 3] = [DriverCall::Map, DriverCall::SetAccess, DriverCall::Unmap];
        let mut left = false;
        let moved = self.count(&CALLS, bytes, || {
            // SAFETY: passed on to the caller.
            unsafe { self.inner.relocate(from, to, handle, bytes) }.map_err(|unmoved| {
                left = unmoved.left;
                unmoved.error
            })
        });
        let mut picture = self.picture.lock();
        if moved.is_ok() || left {
            picture.mapped(to, handle, bytes);
        }
        if moved.is_ok() {
            picture.unmapped(from);
        }
        moved.map_err(|error| Unmoved { error, left })
    }

    fn record(&self, scope: EventScope) -> Result<Event, DriverError> {
        self.inner.record(scope)
    }

    fn is_done(&self, event: &Event) -> Result<bool, DriverError> {
        self.inner.is_done(event)
    }

    fn wait(&self, event: &Event, limit: Duration) -> Result<bool, DriverError> {
        self.inner.wait(event, limit)
    }

    fn stream_wait(&self, stream: StreamId, event: &Event) -> Result<(), DriverError> {
        self.inner.stream_wait(stream, event)
    }

    fn adopt(&self, event: ClientEvent) -> Result<Event, DriverError> {
        self.inner.adopt(event)
    }

    fn quiesce(&self) -> Result<(), DriverError> {
        self.inner.quiesce()
    }

    unsafe fn export(&self, handle: PhysicalAllocation) -> Result<(OwnedFd, u64), DriverError> {
        // SAFETY: passed on to the caller.
        unsafe { self.inner.export(handle) }
    }

    fn import(&self, fd: BorrowedFd<'_>, start: u64, bytes: u64) -> Result<PhysicalAllocation, DriverError> {
        let handle = self.inner.import(fd, start, bytes)?;
        self.reserved.fetch_add(bytes, Relaxed);
        Ok(handle)
    }

    unsafe fn release_shared(&self, handle: PhysicalAllocation, bytes: u64) -> Result<(), DriverError> {
        // SAFETY: passed on to the caller.
        self.count(&[DriverCall::Release], bytes, || unsafe { self.inner.release_shared(handle, bytes) })?;
        self.reserved.fetch_sub(bytes, Relaxed);
        self.picture.lock().released(handle);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::sim::{SimBackend, SimOptions};
    use crate::units::GRANULE;

    fn kinds(watch: &GaugeBackend) -> Vec<Backing> {
        watch.ranges().iter().map(|range| range.backing).collect()
    }

    #[test]
    fn it_knows_what_was_moved_and_what_it_cost() {
        let watch = GaugeBackend::new(Arc::new(SimBackend::new(SimOptions::default())));
        let at = watch.reserve(4 * GRANULE).unwrap();
        let handle = watch.create(GRANULE).unwrap();
        // SAFETY: a free place of the reservation.
        unsafe { watch.map(at, handle, GRANULE) }.unwrap();
        // SAFETY: mapped above.
        unsafe { watch.set_access(at, GRANULE) }.unwrap();
        assert_eq!((kinds(&watch), watch.reserved()), (vec![Backing::First], GRANULE));
        // SAFETY: a second mapping, at a free place.
        unsafe { watch.map(at + GRANULE, handle, GRANULE) }.unwrap();
        assert_eq!(kinds(&watch), [Backing::Left, Backing::Moved]);
        // SAFETY: one mapping, unused.
        unsafe { watch.unmap(at, GRANULE) }.unwrap();
        // SAFETY: one mapping, unused, to a free place.
        unsafe { watch.relocate(at + GRANULE, at, handle, GRANULE) }.unwrap();
        assert_eq!(kinds(&watch), [Backing::First], "back at its first place");
        let micros = watch.nanos() / 100;
        assert_eq!(micros, 96 + 3 * 11 + 2 * 260 + 2 * 170);
        // SAFETY: one mapping, unused.
        unsafe { watch.unmap(at, GRANULE) }.unwrap();
        // SAFETY: created above, not named again.
        unsafe { watch.release(handle, GRANULE) }.unwrap();
        assert_eq!((watch.reserved(), watch.ranges()), (0, Vec::new()));
        // SAFETY: the whole, empty reservation.
        unsafe { watch.unreserve(at, 4 * GRANULE) }.unwrap();
    }
}
