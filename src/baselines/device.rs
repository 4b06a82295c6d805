//! The device that baselines run on: memory with a limit, calls counted and priced.
#![allow(unsafe_code, reason = "calls the simulated driver, which checks every promise itself and touches no memory")]

use super::{Figures, SubjectError};
use crate::backend::cost;
use crate::backend::gauge::{Backing, MappedRange, Picture};
use crate::backend::sim::{SimBackend, SimOptions};
use crate::backend::timeline::Timeline;
use crate::backend::{Backend, EventScope, PhysicalAllocation, StreamId};
use crate::error::{DriverCall, DriverError};
use crate::units::{GIB, GRANULE, MIB, round_up};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// `cuMemAlloc` and `cuMemFree` by size: MiB, microseconds of each. From pairs of 61 µs (1 MiB) and
/// 135 µs (128 MiB), 1 GiB in 0.44 ms, and 64 GiB in 1.9 ms and back in 26 ms, on the machine of the
/// frozen model; linear between rows.
const MALLOC: [(u64, f64, f64); 4] =
    [(1, 30.5, 30.5), (128, 67.5, 67.5), (1024, 220.0, 220.0), (65_536, 1900.0, 26_000.0)];

/// Modelled nanoseconds of `cuMemAlloc` and of `cuMemFree` of `bytes`.
fn malloc_nanos(bytes: u64) -> (u64, u64) {
    let mib = bytes as f64 / MIB as f64;
    let above = MALLOC.partition_point(|row| (row.0 as f64) < mib).clamp(1, MALLOC.len() - 1);
    let (low, high) = (&MALLOC[above - 1], &MALLOC[above]);
    let share = ((mib - low.0 as f64) / (high.0 - low.0) as f64).clamp(0.0, 1.0);
    let at = |a: f64, b: f64| ((a + share * (b - a)) * 1000.0).round() as u64;
    (at(low.1, high.1), at(low.2, high.2))
}

/// Memory, addresses, and what they cost. Sizes in bytes.
#[derive(Debug)]
pub(super) struct Device {
    sim: Arc<SimBackend>,
    pub(super) timeline: Timeline,
    limit: u64,
    pub(super) figures: Figures,
    /// Address → bytes of what `cudaMalloc` gave.
    mallocs: BTreeMap<u64, u64>,
    next_malloc: u64,
    mappings: Picture,
    /// Handle → bytes.
    handles: BTreeMap<u64, u64>,
    reservations: Vec<(u64, u64)>,
    /// Streams that the host has waited for since the client's last call (`None`: all of them): nothing was
    /// queued since, so that a second wait takes no time.
    settled: Vec<Option<u64>>,
}

impl From<DriverError> for SubjectError {
    fn from(error: DriverError) -> Self {
        if error.out_of_memory { Self::OutOfMemory(0) } else { Self::Other(error.to_string()) }
    }
}

impl Device {
    pub(super) fn new(limit: Option<u64>, timeline: Timeline) -> Self {
        let options = SimOptions { total: limit, timeline: timeline.clone(), ..SimOptions::default() };
        let sim = Arc::new(SimBackend::new(options));
        Self {
            sim,
            timeline,
            limit: limit.unwrap_or(u64::MAX),
            figures: Figures::default(),
            mallocs: BTreeMap::new(),
            next_malloc: 1 << 52,
            mappings: Picture::default(),
            handles: BTreeMap::new(),
            reservations: Vec::new(),
            settled: Vec::new(),
        }
    }

    fn reserved(&mut self, by: i64) {
        let figures = &mut self.figures;
        figures.reserved = figures.reserved.saturating_add_signed(by);
        figures.peak_reserved = figures.peak_reserved.max(figures.reserved);
    }

    /// A live block of `bytes` more.
    pub(super) fn allocated(&mut self, bytes: u64) {
        self.figures.allocated += bytes;
        self.figures.peak_allocated = self.figures.peak_allocated.max(self.figures.allocated);
    }

    /// A live block of `bytes` fewer.
    pub(super) fn freed(&mut self, bytes: u64) {
        self.figures.allocated -= bytes;
    }

    /// Counts one call on a handle of `bytes` and adds its price.
    fn count(&mut self, call: DriverCall, bytes: u64) {
        self.figures.driver_nanos += cost::nanos(call, bytes);
        let calls = &mut self.figures.calls;
        match call {
            DriverCall::Create => calls.create += 1,
            DriverCall::Map => calls.map += 1,
            DriverCall::SetAccess => calls.set_access += 1,
            DriverCall::Unmap => calls.unmap += 1,
            DriverCall::Release => calls.release += 1,
            DriverCall::Reserve => calls.reserve += 1,
            _ => {}
        }
    }

    /// Bytes that the limit leaves.
    pub(super) fn room(&self) -> u64 {
        self.limit - self.figures.reserved
    }

    fn fits(&self, bytes: u64) -> bool {
        bytes <= self.room()
    }

    /// When all work queued so far on `stream` is done.
    pub(super) fn passed(&self, stream: u64) -> Duration {
        self.timeline.completion(EventScope::Stream(StreamId(stream)))
    }

    /// Lets the host wait until `when`; counted where that is not yet.
    pub(super) fn wait_until(&mut self, when: Duration) {
        if when > self.timeline.now() {
            self.figures.host_waits += 1;
            self.timeline.advance_to(when);
        }
    }

    /// The client calls: it may have queued work since its last call.
    pub(super) fn called(&mut self) {
        self.settled.clear();
    }

    /// Lets the host wait for all work of `stream`, or of the device.
    pub(super) fn synchronize(&mut self, stream: Option<u64>) {
        if self.settled.contains(&None) || self.settled.contains(&stream) {
            return;
        }
        self.settled.push(stream);
        let all = || self.timeline.completion(EventScope::Context);
        self.wait_until(stream.map_or_else(all, |id| self.passed(id)));
    }

    /// Counts and prices one `cudaMalloc`.
    pub(super) fn price_malloc(&mut self, bytes: u64) {
        self.figures.calls.create += 1;
        self.figures.driver_nanos += malloc_nanos(bytes).0;
    }

    /// Counts and prices one `cudaFree`, which waits for the device.
    pub(super) fn price_free(&mut self, bytes: u64) {
        self.synchronize(None);
        self.figures.calls.release += 1;
        self.figures.driver_nanos += malloc_nanos(bytes).1;
    }

    /// Memory of whole granules without a call of its own; `None` when it is short.
    pub(super) fn chunk(&mut self, bytes: u64) -> Option<u64> {
        let bytes = round_up(bytes, GRANULE)?;
        if !self.fits(bytes) {
            return None;
        }
        let address = self.next_malloc;
        // A granule between two, so that they are never taken for one.
        self.next_malloc += bytes + GRANULE;
        self.mallocs.insert(address, bytes);
        self.reserved(bytes as i64);
        Some(address)
    }

    /// Gives memory of [`Device::chunk`] back; its size.
    pub(super) fn chunk_free(&mut self, address: u64) -> u64 {
        let bytes = self.mallocs.remove(&address).unwrap_or(0);
        self.reserved(-(bytes as i64));
        bytes
    }

    /// `cudaMalloc` of whole granules; `None` when memory is short.
    pub(super) fn malloc(&mut self, bytes: u64) -> Option<u64> {
        let address = self.chunk(bytes)?;
        self.price_malloc(bytes);
        Some(address)
    }

    /// `cudaFree`.
    pub(super) fn malloc_free(&mut self, address: u64) {
        let bytes = self.chunk_free(address);
        self.price_free(bytes);
    }

    /// What is mapped where, by address.
    pub(super) fn ranges(&self) -> Vec<MappedRange> {
        let whole = |(&address, &bytes): (&u64, &u64)| MappedRange { address, bytes, backing: Backing::First };
        let mut ranges: Vec<MappedRange> = self.mallocs.iter().map(whole).chain(self.mappings.ranges()).collect();
        ranges.sort_unstable_by_key(|range| range.address);
        ranges
    }

    /// Addresses with nothing behind them.
    pub(super) fn reserve(&mut self, bytes: u64) -> Result<u64, SubjectError> {
        let address = self.sim.reserve(bytes)?;
        self.count(DriverCall::Reserve, bytes);
        self.reservations.push((address, bytes));
        Ok(address)
    }

    /// A handle; `None` when memory is short.
    pub(super) fn create(&mut self, bytes: u64) -> Result<Option<PhysicalAllocation>, SubjectError> {
        if !self.fits(bytes) {
            return Ok(None);
        }
        let handle = self.sim.create(bytes)?;
        self.count(DriverCall::Create, bytes);
        self.handles.insert(handle.0, bytes);
        self.reserved(bytes as i64);
        Ok(Some(handle))
    }

    /// Maps a handle and gives access.
    pub(super) fn map(&mut self, at: u64, handle: PhysicalAllocation, bytes: u64) -> Result<(), SubjectError> {
        // SAFETY: the simulated driver refuses what is no free range of a reservation.
        unsafe { self.sim.map(at, handle, bytes) }?;
        // SAFETY: exactly the mapping made above.
        unsafe { self.sim.set_access(at, bytes) }?;
        self.count(DriverCall::Map, bytes);
        self.count(DriverCall::SetAccess, bytes);
        self.mappings.mapped(at, handle, bytes);
        Ok(())
    }

    /// Unmaps what is mapped at exactly this address and says which handle that was.
    pub(super) fn unmap(&mut self, at: u64) -> Result<(PhysicalAllocation, u64), SubjectError> {
        let Some((handle, bytes)) = self.mappings.unmapped(at) else {
            return Err(SubjectError::Other(format!("nothing is mapped at {at:#x}")));
        };
        // SAFETY: one whole mapping of this table; the simulated driver refuses one that is in use.
        unsafe { self.sim.unmap(at, bytes) }?;
        self.count(DriverCall::Unmap, bytes);
        Ok((handle, bytes))
    }

    /// The handle that is mapped at exactly this address.
    pub(super) fn mapped(&self, at: u64) -> Result<PhysicalAllocation, SubjectError> {
        let known = self.mappings.at(at).map(|(handle, _)| handle);
        known.ok_or_else(|| SubjectError::Other(format!("nothing is mapped at {at:#x}")))
    }

    /// `count` handles of `bytes`, all or none.
    pub(super) fn create_all(
        &mut self,
        count: u64,
        bytes: u64,
    ) -> Result<Option<Vec<PhysicalAllocation>>, SubjectError> {
        let mut handles = Vec::new();
        for _ in 0..count {
            if let Some(handle) = self.create(bytes)? {
                handles.push(handle);
                continue;
            }
            for handle in handles {
                self.release(handle)?;
            }
            return Ok(None);
        }
        Ok(Some(handles))
    }

    /// Releases a handle that nothing maps.
    pub(super) fn release(&mut self, handle: PhysicalAllocation) -> Result<(), SubjectError> {
        if let Some(bytes) = self.handles.remove(&handle.0) {
            // SAFETY: a handle of this table, which forgets it here.
            unsafe { self.sim.release(handle, bytes) }?;
            self.count(DriverCall::Release, bytes);
            self.mappings.released(handle);
            self.reserved(-(bytes as i64));
        }
        Ok(())
    }

    /// Gives everything back; modelled nanoseconds of it.
    pub(super) fn teardown(&mut self) -> Result<u64, SubjectError> {
        let before = self.figures.driver_nanos;
        self.synchronize(None);
        while let Some((&at, _)) = self.mallocs.iter().next() {
            self.malloc_free(at);
        }
        while let Some(at) = self.mappings.lowest() {
            self.unmap(at)?;
        }
        while let Some((&handle, _)) = self.handles.iter().next() {
            self.release(PhysicalAllocation(handle))?;
        }
        for (address, bytes) in std::mem::take(&mut self.reservations) {
            // SAFETY: a reservation of this table, all of whose mappings went above.
            unsafe { self.sim.unreserve(address, bytes) }?;
        }
        let left = self.sim.leftovers();
        if left.is_empty() { Ok(self.figures.driver_nanos - before) } else { Err(SubjectError::Other(left.join("; "))) }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // A replay may end anywhere; only broken rules are worth a panic.
        if self.sim.violations().is_empty() {
            self.sim.disarm();
        }
    }
}

/// Memory of the card that the traces were recorded on: what PyTorch sizes its reservations by.
pub(super) const CARD: u64 = 140 * GIB;
