//! Simulated driver: no memory, every rule checked.
//!
//! A broken rule is refused with an error *and* noted in [`SimBackend::violations`], and dropping a
//! simulated driver with violations, or with anything left over, panics: a test cannot miss it.

use super::timeline::Timeline;
use super::{Backend, BackendKind, Capabilities, Event, EventScope, MemoryInfo, PhysicalAllocation, StreamId};
use crate::error::{DriverCall, DriverError};
use crate::units::{GRANULE, human};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::time::Duration;

/// How a simulated device is made.
#[derive(Debug, Clone, Default)]
pub struct SimOptions {
    /// Physical memory in bytes; `None`: unbounded.
    pub total: Option<u64>,
    /// Its clock and streams.
    pub timeline: Timeline,
    /// Largest reservation that is granted, in bytes; `None`: any.
    pub reserve_max: Option<u64>,
    /// Refuse context-wide events, as drivers without `cuCtxRecordEvent` do.
    pub no_context_events: bool,
}

/// See the module's text. Any thread may call.
#[derive(Debug)]
pub struct SimBackend {
    options: SimOptions,
    capabilities: Capabilities,
    state: Mutex<State>,
}

#[derive(Debug, Clone, Copy)]
struct SimHandle {
    bytes: u64,
    mappings: u32,
    released: bool,
}

#[derive(Debug, Clone, Copy)]
struct SimMapping {
    bytes: u64,
    handle: u64,
    access: bool,
}

#[derive(Debug, Default)]
struct State {
    next_address: u64,
    next_handle: u64,
    reservations: BTreeMap<u64, u64>,
    handles: BTreeMap<u64, SimHandle>,
    mappings: BTreeMap<u64, SimMapping>,
    /// Queued work: start address → (end, done at, in nanoseconds), several per address.
    work: BTreeMap<u64, Vec<(u64, u64)>>,
    longest_work: u64,
    in_use: u64,
    violations: Vec<String>,
    disarmed: bool,
}

impl State {
    fn broken(&mut self, call: DriverCall, why: String) -> DriverError {
        self.violations.push(format!("{call}: {why}"));
        DriverError::new(call, why)
    }

    /// Start and size of the mapping that overlaps a range.
    fn overlap(&self, start: u64, end: u64) -> Option<(u64, SimMapping)> {
        let (at, mapping) = self.mappings.range(..end).next_back()?;
        (at + mapping.bytes > start).then_some((*at, *mapping))
    }

    /// When the last work on a range is done.
    fn busy_until(&self, start: u64, end: u64) -> u64 {
        let from = start.saturating_sub(self.longest_work);
        let entries = self.work.range(from..end).flat_map(|(_, list)| list);
        entries.filter(|(work_end, _)| *work_end > start).map(|(_, done)| *done).max().unwrap_or(0)
    }

    fn forget(&mut self, handle: u64) {
        if let Some(entry) = self.handles.get(&handle)
            && entry.released
            && entry.mappings == 0
        {
            self.in_use -= entry.bytes;
            self.handles.remove(&handle);
        }
    }
}

impl SimBackend {
    /// A simulated device.
    #[must_use]
    pub fn new(options: SimOptions) -> Self {
        let capabilities = Capabilities {
            context_events: !options.no_context_events,
            device: "simulated device".into(),
            ..Capabilities::default()
        };
        let state = State { next_address: 1 << 40, ..State::default() };
        Self { options, capabilities, state: Mutex::new(state) }
    }

    /// The clock and streams.
    #[must_use]
    pub fn timeline(&self) -> &Timeline {
        &self.options.timeline
    }

    /// Queues work of `length` on `stream` that uses a range; the range must be mapped and accessible.
    pub fn queue_work(&self, stream: StreamId, address: u64, bytes: u64, length: Duration) {
        let done = self.options.timeline.queue(stream, length);
        self.use_until(address, bytes, done);
    }

    /// Notes that queued work uses a range until a moment of the timeline.
    pub fn use_until(&self, address: u64, bytes: u64, until: Duration) {
        let now = nanos(self.options.timeline.now());
        let mut state = self.state.lock();
        let end = address + bytes;
        let mut at = address;
        while at < end {
            match state.overlap(at, at + 1) {
                Some((start, mapping)) if mapping.access => at = start + mapping.bytes,
                _ => {
                    state.broken(DriverCall::Other, format!("work uses {at:#x}, which is not mapped and accessible"));
                    return;
                }
            }
        }
        if state.work.len() > 4096 {
            state.work.retain(|_, list| {
                list.retain(|(_, done)| *done > now);
                !list.is_empty()
            });
        }
        state.longest_work = state.longest_work.max(bytes);
        state.work.entry(address).or_default().push((end, nanos(until)));
    }

    /// Rules that were broken so far.
    #[must_use]
    pub fn violations(&self) -> Vec<String> {
        self.state.lock().violations.clone()
    }

    /// Handles, mappings and reservations that exist.
    #[must_use]
    pub fn counts(&self) -> (usize, usize, usize) {
        let state = self.state.lock();
        (state.handles.len(), state.mappings.len(), state.reservations.len())
    }

    /// Physical memory in use, in bytes: released handles count until their last mapping is gone.
    #[must_use]
    pub fn memory_in_use(&self) -> u64 {
        self.state.lock().in_use
    }

    /// Dropping this driver panics no more, for tests that break rules on purpose.
    pub fn disarm(&self) {
        self.state.lock().disarmed = true;
    }
}

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
        if self.options.reserve_max.is_some_and(|most| bytes > most) {
            return Err(DriverError::out_of_memory(DriverCall::Reserve, "the simulated device grants no such range"));
        }
        if bytes == 0 || bytes % GRANULE != 0 {
            return Err(state.broken(DriverCall::Reserve, format!("{bytes} bytes are no granules")));
        }
        let address = state.next_address;
        state.next_address += bytes + GRANULE;
        state.reservations.insert(address, bytes);
        Ok(address)
    }

    unsafe fn unreserve(&self, address: u64, bytes: u64) -> Result<(), DriverError> {
        let mut state = self.state.lock();
        if state.reservations.get(&address) != Some(&bytes) {
            return Err(state.broken(DriverCall::Unreserve, format!("{address:#x} is no whole reservation")));
        }
        if let Some((at, _)) = state.overlap(address, address + bytes) {
            return Err(state.broken(DriverCall::Unreserve, format!("{at:#x} is still mapped")));
        }
        state.reservations.remove(&address);
        Ok(())
    }

    fn create(&self, bytes: u64) -> Result<PhysicalAllocation, DriverError> {
        let mut state = self.state.lock();
        if bytes == 0 || bytes % GRANULE != 0 {
            return Err(state.broken(DriverCall::Create, format!("{bytes} bytes are no granules")));
        }
        if self.options.total.is_some_and(|total| state.in_use + bytes > total) {
            let why = format!("the simulated device has no {} left", human(bytes));
            return Err(DriverError::out_of_memory(DriverCall::Create, why));
        }
        state.in_use += bytes;
        state.next_handle += 1;
        let handle = state.next_handle;
        state.handles.insert(handle, SimHandle { bytes, mappings: 0, released: false });
        Ok(PhysicalAllocation(handle))
    }

    unsafe fn map(&self, address: u64, handle: PhysicalAllocation, bytes: u64) -> Result<(), DriverError> {
        let mut state = self.state.lock();
        let end = address.saturating_add(bytes);
        if address % GRANULE != 0 || bytes % GRANULE != 0 {
            return Err(state.broken(DriverCall::Map, format!("{address:#x} or {bytes} is off the granule grid")));
        }
        match state.handles.get(&handle.0) {
            Some(entry) if entry.released => {
                return Err(state.broken(DriverCall::Map, "the handle was released".into()));
            }
            Some(entry) if entry.bytes == bytes => {}
            Some(_) => return Err(state.broken(DriverCall::Map, "a part of a handle cannot be mapped".into())),
            None => return Err(state.broken(DriverCall::Map, "no such handle".into())),
        }
        if state.reservations.range(..=address).next_back().is_none_or(|(start, len)| end > start + len) {
            return Err(state.broken(DriverCall::Map, format!("{address:#x} is not inside one reservation")));
        }
        if let Some((at, _)) = state.overlap(address, end) {
            return Err(state.broken(DriverCall::Map, format!("{at:#x} is mapped already")));
        }
        state.mappings.insert(address, SimMapping { bytes, handle: handle.0, access: false });
        if let Some(entry) = state.handles.get_mut(&handle.0) {
            entry.mappings += 1;
        }
        Ok(())
    }

    unsafe fn set_access(&self, address: u64, bytes: u64) -> Result<(), DriverError> {
        let mut state = self.state.lock();
        match state.mappings.get_mut(&address) {
            Some(mapping) if mapping.bytes == bytes => {
                mapping.access = true;
                Ok(())
            }
            _ => Err(state.broken(DriverCall::SetAccess, format!("{address:#x} is not exactly one mapping"))),
        }
    }

    unsafe fn unmap(&self, address: u64, bytes: u64) -> Result<(), DriverError> {
        let now = nanos(self.options.timeline.now());
        let mut state = self.state.lock();
        let Some(mapping) = state.mappings.get(&address).copied().filter(|mapping| mapping.bytes == bytes) else {
            return Err(state.broken(DriverCall::Unmap, format!("{address:#x} is not exactly one mapping")));
        };
        let busy = state.busy_until(address, address + bytes);
        if busy > now {
            let why = format!("{address:#x} is used by queued work for {} us more", (busy - now) / 1000);
            return Err(state.broken(DriverCall::Unmap, why));
        }
        state.mappings.remove(&address);
        if let Some(entry) = state.handles.get_mut(&mapping.handle) {
            entry.mappings -= 1;
        }
        state.forget(mapping.handle);
        Ok(())
    }

    unsafe fn release(&self, handle: PhysicalAllocation, bytes: u64) -> Result<(), DriverError> {
        let mut state = self.state.lock();
        match state.handles.get_mut(&handle.0) {
            Some(entry) if entry.bytes == bytes && !entry.released => {
                entry.released = true;
                state.forget(handle.0);
                Ok(())
            }
            _ => Err(state.broken(DriverCall::Release, "no such handle, or released before".into())),
        }
    }

    fn record(&self, scope: EventScope) -> Result<Event, DriverError> {
        if scope == EventScope::Context && self.options.no_context_events {
            return Err(DriverError::new(DriverCall::Event, "no context-wide events on this simulated device"));
        }
        Ok(self.options.timeline.record(scope))
    }

    fn is_done(&self, event: &Event) -> Result<bool, DriverError> {
        Ok(self.options.timeline.is_done(event))
    }

    fn wait(&self, event: &Event, limit: Duration) -> Result<bool, DriverError> {
        Ok(self.options.timeline.wait(event, limit))
    }

    fn stream_wait(&self, stream: StreamId, event: &Event) -> Result<(), DriverError> {
        self.options.timeline.stream_wait(stream, event);
        Ok(())
    }

    fn recycle(&self, event: Event) {
        self.options.timeline.recycle(event);
    }

    fn quiesce(&self) -> Result<(), DriverError> {
        self.options.timeline.quiesce();
        Ok(())
    }

    fn now(&self) -> Duration {
        self.options.timeline.now()
    }
}

impl Drop for SimBackend {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        if state.disarmed || std::thread::panicking() {
            return;
        }
        assert!(state.violations.is_empty(), "rules of the driver were broken: {:#?}", state.violations);
        let left = (state.handles.len(), state.mappings.len(), state.reservations.len());
        assert_eq!(left, (0, 0, 0), "handles, mappings, reservations left behind");
        assert_eq!(self.options.timeline.open_events(), 0, "events left behind");
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
