//! A device without memory that checks every rule of the driver.
//!
//! It keeps what the driver would keep (reservations, handles, mappings, access, queued work) and
//! fails loudly: a broken rule is an error to the caller *and* a line in [`SimBackend::violations`],
//! and dropping a backend with violations or leftovers panics, so that no test passes over one.
//! Calls cost nothing here; the counted and priced door is in front of every backend.

use super::capture::Captures;
use super::timeline::Timeline;
use super::{
    Backend, BackendKind, Capabilities, ClientEvent, Event, EventScope, MemoryInfo, PhysicalAllocation, StreamId,
};
use crate::error::{DriverCall, DriverError};
use crate::units::{GRANULE, human, round_up};
use parking_lot::Mutex;
use ranges::{Runs, Uses};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

mod capture;
mod ranges;

pub use capture::SimGraph;

/// Where the first reservation starts: a number that no client takes for an offset.
const FIRST_ADDRESS: u64 = 1 << 40;

/// How a [`SimBackend`] behaves. Sizes in bytes.
#[derive(Debug, Clone)]
pub struct SimOptions {
    /// Physical memory of the device; without bound where `None`.
    pub total: Option<u64>,
    /// The clock, shared with whoever drives it.
    pub timeline: Timeline,
    /// Longest reservation that succeeds, as on devices with few address bits; any where `None`.
    pub reserve_max: Option<u64>,
    /// Events over the whole context work.
    pub context_events: bool,
    /// Page tables may be edited beside running kernels.
    pub concurrent_remap: bool,
}

impl Default for SimOptions {
    fn default() -> Self {
        Self {
            total: None,
            timeline: Timeline::default(),
            reserve_max: None,
            context_events: true,
            concurrent_remap: true,
        }
    }
}

#[derive(Debug)]
struct Handle {
    bytes: u64,
    mappings: u32,
    released: bool,
}

#[derive(Debug)]
struct Mapping {
    bytes: u64,
    handle: u64,
}

#[derive(Debug)]
struct State {
    /// Address → bytes.
    reservations: BTreeMap<u64, u64>,
    handles: BTreeMap<u64, Handle>,
    mappings: BTreeMap<u64, Mapping>,
    accessible: Runs,
    uses: Uses,
    in_use: u64,
    next_address: u64,
    next_handle: u64,
    violations: Vec<String>,
}

impl State {
    /// A broken rule: noted, and an error for the caller.
    fn broken(&mut self, call: DriverCall, why: String) -> DriverError {
        self.violations.push(format!("{call}: {why}"));
        DriverError::new(call, why)
    }

    /// The mapping that is exactly this range, or why there is none.
    fn exact(&self, address: u64, bytes: u64) -> Result<&Mapping, String> {
        match self.mappings.get(&address) {
            Some(mapping) if mapping.bytes == bytes => Ok(mapping),
            Some(mapping) => {
                Err(format!("{} at {address:#x} is not the whole mapping of {}", human(bytes), human(mapping.bytes)))
            }
            None => Err(format!("no mapping starts at {address:#x}")),
        }
    }

    fn may_map(&self, address: u64, handle: u64, bytes: u64) -> Result<(), String> {
        let known = self.handles.get(&handle).filter(|h| !h.released);
        let size = known.ok_or_else(|| format!("handle {handle} does not exist"))?.bytes;
        if size != bytes {
            return Err(format!("handle {handle} has {}, not {}", human(size), human(bytes)));
        }
        if !address.is_multiple_of(GRANULE) {
            return Err(format!("{address:#x} is not on a granule"));
        }
        let end = address.checked_add(bytes).ok_or("the range overflows")?;
        let inside = self.reservations.range(..=address).next_back().is_some_and(|(at, len)| end <= at + len);
        if !inside {
            return Err(format!("{} at {address:#x} are not in one reservation", human(bytes)));
        }
        match self.mappings.range(..end).next_back() {
            Some((at, mapping)) if at + mapping.bytes > address => Err(format!("{at:#x} is mapped already")),
            _ => Ok(()),
        }
    }

    fn may_use(&mut self, address: u64, bytes: u64) -> Result<(), DriverError> {
        if self.accessible.covers(address, address.saturating_add(bytes)) {
            return Ok(());
        }
        let why = format!("work on {} at {address:#x}, which is not mapped with access throughout", human(bytes));
        Err(self.broken(DriverCall::Other, why))
    }

    /// Frees a released handle's memory once nothing maps it.
    fn settle(&mut self, handle: u64) {
        if let Some(h) = self.handles.get(&handle)
            && h.released
            && h.mappings == 0
        {
            self.in_use -= h.bytes;
            self.handles.remove(&handle);
        }
    }
}

/// See the module's text. Any thread may call.
#[derive(Debug)]
pub struct SimBackend {
    options: SimOptions,
    capabilities: Capabilities,
    state: Mutex<State>,
    captures: Captures<capture::Node>,
    open_events: AtomicU64,
    armed: AtomicBool,
}

impl SimBackend {
    /// A device as described; nothing is reserved or created.
    #[must_use]
    pub fn new(options: SimOptions) -> Self {
        let capabilities = Capabilities {
            context_events: options.context_events,
            concurrent_remap: options.concurrent_remap,
            device: "simulated device".into(),
            ..Capabilities::default()
        };
        let state = State {
            reservations: BTreeMap::new(),
            handles: BTreeMap::new(),
            mappings: BTreeMap::new(),
            accessible: Runs::default(),
            uses: Uses::default(),
            in_use: 0,
            next_address: FIRST_ADDRESS,
            next_handle: 1,
            violations: Vec::new(),
        };
        Self {
            options,
            capabilities,
            state: Mutex::new(state),
            captures: Captures::default(),
            open_events: AtomicU64::new(0),
            armed: AtomicBool::new(true),
        }
    }

    /// The clock.
    #[must_use]
    pub fn timeline(&self) -> &Timeline {
        &self.options.timeline
    }

    /// Queues work of `length` on `stream` that uses `bytes` at `address`, and says when it will be done. On
    /// a stream that captures it becomes part of the graph instead.
    ///
    /// # Errors
    /// A [`DriverError`], also noted as a violation, if part of the range is not accessible.
    pub fn queue_work(
        &self,
        stream: StreamId,
        address: u64,
        bytes: u64,
        length: Duration,
    ) -> Result<Duration, DriverError> {
        let timeline = &self.options.timeline;
        self.state.lock().may_use(address, bytes)?;
        if self.captured(stream, address, bytes, length) {
            return Ok(timeline.now());
        }
        let mut state = self.state.lock();
        let end = timeline.queue(stream, length);
        state.uses.add(address, address + bytes, nanos(end), nanos(timeline.now()));
        Ok(end)
    }

    /// Notes that `bytes` at `address` are in use by queued work until the clock shows `until`.
    ///
    /// # Errors
    /// A [`DriverError`], also noted as a violation, if part of the range is not accessible.
    pub fn use_until(&self, address: u64, bytes: u64, until: Duration) -> Result<(), DriverError> {
        let now = self.options.timeline.now();
        let mut state = self.state.lock();
        state.may_use(address, bytes)?;
        state.uses.add(address, address + bytes, nanos(until), nanos(now));
        Ok(())
    }

    /// The physical memory behind a range, as (handle, offset in it, bytes) in address order; `None` where
    /// a part has none. Two addresses with the same answer show the same bytes.
    #[must_use]
    pub fn resolve(&self, address: u64, bytes: u64) -> Option<Vec<(PhysicalAllocation, u64, u64)>> {
        let state = self.state.lock();
        let end = address.checked_add(bytes)?;
        let mut pieces = Vec::new();
        let mut at = address;
        while at < end {
            let (start, mapping) = state.mappings.range(..=at).next_back()?;
            let stop = (start + mapping.bytes).min(end);
            if stop <= at {
                return None;
            }
            pieces.push((PhysicalAllocation(mapping.handle), at - start, stop - at));
            at = stop;
        }
        Some(pieces)
    }

    /// Mappings that exist.
    #[must_use]
    pub fn mapping_count(&self) -> usize {
        self.state.lock().mappings.len()
    }

    /// Handles whose memory exists, also those released but still mapped.
    #[must_use]
    pub fn handle_count(&self) -> usize {
        self.state.lock().handles.len()
    }

    /// Reservations that exist.
    #[must_use]
    pub fn reservation_count(&self) -> usize {
        self.state.lock().reservations.len()
    }

    /// Handles, mappings and reservations that exist.
    #[must_use]
    pub fn counts(&self) -> (usize, usize, usize) {
        (self.handle_count(), self.mapping_count(), self.reservation_count())
    }

    /// Bytes of physical memory that exist, whether mapped or not.
    #[must_use]
    pub fn memory_in_use(&self) -> u64 {
        self.state.lock().in_use
    }

    /// Every rule broken so far, in order.
    #[must_use]
    pub fn violations(&self) -> Vec<String> {
        self.state.lock().violations.clone()
    }

    /// What is left that a clean shutdown would have given back; empty when nothing is.
    #[must_use]
    pub fn leftovers(&self) -> Vec<String> {
        let state = self.state.lock();
        let left = [
            (state.mappings.len() as u64, "mappings"),
            (state.handles.len() as u64, "handles"),
            (state.reservations.len() as u64, "reservations"),
            (self.open_events.load(Relaxed), "events"),
        ];
        left.iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!("{n} {what} left over")).collect()
    }

    /// Stops the panic on drop, for tests that break rules or leave things behind on purpose.
    pub fn disarm(&self) {
        self.armed.store(false, Relaxed);
    }
}

impl Drop for SimBackend {
    fn drop(&mut self) {
        if !self.armed.load(Relaxed) || std::thread::panicking() {
            return;
        }
        let mut wrong = self.violations();
        wrong.extend(self.leftovers());
        assert!(wrong.is_empty(), "the simulated driver ends unclean: {}", wrong.join("; "));
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[allow(unsafe_code, reason = "implements the trait's unsafe operations; touches no memory itself")]
impl Backend for SimBackend {
    fn kind(&self) -> BackendKind {
        BackendKind::Sim
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn memory(&self) -> Result<MemoryInfo, DriverError> {
        let total = self.options.total.unwrap_or(u64::MAX);
        Ok(MemoryInfo { free: total - self.memory_in_use(), total })
    }

    fn reserve(&self, bytes: u64) -> Result<u64, DriverError> {
        let mut state = self.state.lock();
        if bytes == 0 || !bytes.is_multiple_of(GRANULE) {
            return Err(state.broken(DriverCall::Reserve, format!("{bytes} bytes are no whole granules")));
        }
        let refused = || DriverError::new(DriverCall::Reserve, format!("no range of {}", human(bytes)));
        if self.options.reserve_max.is_some_and(|max| bytes > max) {
            return Err(refused());
        }
        let address = state.next_address;
        // One granule between reservations, so that running over the end of one is seen.
        state.next_address = address.checked_add(bytes).and_then(|end| end.checked_add(GRANULE)).ok_or_else(refused)?;
        state.reservations.insert(address, bytes);
        Ok(address)
    }

    unsafe fn unreserve(&self, address: u64, bytes: u64) -> Result<(), DriverError> {
        let mut state = self.state.lock();
        if state.reservations.get(&address) != Some(&bytes) {
            let why = format!("{} at {address:#x} are no reservation", human(bytes));
            return Err(state.broken(DriverCall::Unreserve, why));
        }
        if let Some((at, _)) = state.mappings.range(address..address + bytes).next() {
            let why = format!("{at:#x} is still mapped");
            return Err(state.broken(DriverCall::Unreserve, why));
        }
        state.reservations.remove(&address);
        Ok(())
    }

    fn create(&self, bytes: u64) -> Result<PhysicalAllocation, DriverError> {
        let mut state = self.state.lock();
        if bytes == 0 || round_up(bytes, GRANULE) != Some(bytes) {
            return Err(state.broken(DriverCall::Create, format!("{bytes} bytes are no whole granules")));
        }
        let total = self.options.total.unwrap_or(u64::MAX);
        if bytes > total - state.in_use {
            let why = format!("{} of {} are free", human(total - state.in_use), human(total));
            return Err(DriverError::out_of_memory(DriverCall::Create, why));
        }
        let id = state.next_handle;
        state.next_handle += 1;
        state.in_use += bytes;
        state.handles.insert(id, Handle { bytes, mappings: 0, released: false });
        Ok(PhysicalAllocation(id))
    }

    unsafe fn map(&self, address: u64, handle: PhysicalAllocation, bytes: u64) -> Result<(), DriverError> {
        let mut state = self.state.lock();
        if let Err(why) = state.may_map(address, handle.0, bytes) {
            return Err(state.broken(DriverCall::Map, why));
        }
        state.mappings.insert(address, Mapping { bytes, handle: handle.0 });
        if let Some(h) = state.handles.get_mut(&handle.0) {
            h.mappings += 1;
        }
        Ok(())
    }

    unsafe fn set_access(&self, address: u64, bytes: u64) -> Result<(), DriverError> {
        let mut state = self.state.lock();
        if let Err(why) = state.exact(address, bytes) {
            return Err(state.broken(DriverCall::SetAccess, why));
        }
        state.accessible.add(address, address + bytes);
        Ok(())
    }

    unsafe fn unmap(&self, address: u64, bytes: u64) -> Result<(), DriverError> {
        let now = nanos(self.options.timeline.now());
        let mut state = self.state.lock();
        let handle = match state.exact(address, bytes) {
            Ok(mapping) => mapping.handle,
            Err(why) => return Err(state.broken(DriverCall::Unmap, why)),
        };
        if let Some(until) = state.uses.last_use(address, address + bytes, now) {
            let why = format!("work uses {address:#x} until {until} ns, it is {now} ns");
            return Err(state.broken(DriverCall::Unmap, why));
        }
        state.mappings.remove(&address);
        state.accessible.remove(address, address + bytes);
        if let Some(h) = state.handles.get_mut(&handle) {
            h.mappings -= 1;
        }
        state.settle(handle);
        Ok(())
    }

    unsafe fn release(&self, handle: PhysicalAllocation, bytes: u64) -> Result<(), DriverError> {
        let mut state = self.state.lock();
        match state.handles.get_mut(&handle.0) {
            Some(h) if !h.released && h.bytes == bytes => h.released = true,
            _ => {
                let why = format!("handle {} of {} does not exist", handle.0, human(bytes));
                return Err(state.broken(DriverCall::Release, why));
            }
        }
        state.settle(handle.0);
        Ok(())
    }

    fn known_stream_key(&self, stream: StreamId) -> Option<u64> {
        Some(stream.0)
    }

    fn is_lasting(&self, _stream: StreamId) -> bool {
        true
    }

    fn record(&self, scope: EventScope) -> Result<Event, DriverError> {
        match scope {
            EventScope::Context if !self.options.context_events => {
                return Err(DriverError::new(DriverCall::Event, "context events are not available"));
            }
            EventScope::Context => self.outside_captures(DriverCall::Event, "an event over the whole context")?,
            EventScope::Stream(stream) => self.not_capturing(stream)?,
        }
        self.open_events.fetch_add(1, Relaxed);
        Ok(self.options.timeline.record(scope))
    }

    fn is_done(&self, event: &Event) -> Result<bool, DriverError> {
        Ok(self.options.timeline.is_done(event))
    }

    fn wait(&self, event: &Event, limit: Duration) -> Result<bool, DriverError> {
        Ok(self.options.timeline.wait(event, limit))
    }

    fn stream_wait(&self, stream: StreamId, event: &Event) -> Result<(), DriverError> {
        self.not_capturing(stream)?;
        self.options.timeline.stream_wait(stream, event);
        Ok(())
    }

    fn adopt(&self, event: ClientEvent) -> Result<Event, DriverError> {
        self.adopted(event.0)
    }

    fn recycle(&self, event: Event) {
        self.open_events.fetch_sub(1, Relaxed);
        self.options.timeline.recycle(event);
    }

    fn quiesce(&self) -> Result<(), DriverError> {
        self.outside_captures(DriverCall::Other, "a wait for the device")?;
        self.options.timeline.quiesce();
        Ok(())
    }

    fn is_capturing(&self, stream: StreamId) -> bool {
        self.captures.contains(stream)
    }

    fn now(&self) -> Duration {
        self.options.timeline.now()
    }
}
