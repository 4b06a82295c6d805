//! A backend that breaks the heap on purpose, to prove that a verification can fail.
//!
//! It stands between a heap and the real backend. Memory faults are made behind the heap's back, on
//! mappings that were there before, so that live data is hit: by the count of maps, hence the same
//! in every run. It also tells whoever plays the device's part when a wait has moved the clock.
#![allow(unsafe_code, reason = "passes the backend's contracts through, and breaks them on purpose")]

use super::{Backend, ClientEvent, Event, EventScope, PhysicalAllocation, StreamId, Unmoved, handed_on::handed_on};
use crate::error::DriverError;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

/// Maps before the first memory fault.
const FIRST: u64 = 4;
/// Maps from one memory fault to the next.
const EVERY: u64 = 16;

/// What is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Two mappings exchange their physical memory.
    Swap,
    /// A mapping gets fresh memory in place of its own.
    Lost,
    /// Memory goes before its last use: every event is said to have completed, so that memory is given away
    /// and unmapped under queued work, and now and then a mapping in use is unmapped.
    EarlyUnmap,
}

impl FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "swap" => Ok(Self::Swap),
            "lost" => Ok(Self::Lost),
            "early-unmap" => Ok(Self::EarlyUnmap),
            _ => Err("the faults are swap, lost and early-unmap".into()),
        }
    }
}

type ClockHook = Box<dyn Fn() + Send + Sync>;
type StreamHook = Box<dyn Fn(StreamId) + Send + Sync>;

#[derive(Debug, Clone, Copy)]
struct Mapped {
    handle: PhysicalAllocation,
    bytes: u64,
}

#[derive(Debug, Default)]
struct State {
    mappings: BTreeMap<u64, Mapped>,
    /// The inner handle behind an outer name, where a fault has changed it.
    renamed: HashMap<PhysicalAllocation, PhysicalAllocation>,
    /// Mappings that were unmapped early; the heap takes them to be there.
    gone: BTreeSet<u64>,
    maps: u64,
    /// Faults that are due; one waits until there is a mapping to hit.
    due: u64,
    injected: u64,
}

impl State {
    fn inner(&self, handle: PhysicalAllocation) -> PhysicalAllocation {
        self.renamed.get(&handle).copied().unwrap_or(handle)
    }

    /// Mappings that a fault may hit: all but the newest, with handles that are mapped once.
    fn victims(&self, newest: u64) -> Vec<(u64, Mapped)> {
        let mut times = HashMap::new();
        for mapped in self.mappings.values() {
            *times.entry(mapped.handle).or_insert(0u32) += 1;
        }
        let once = self
            .mappings
            .iter()
            .filter(|(at, mapped)| **at != newest && times.get(&mapped.handle) == Some(&1) && !self.gone.contains(at));
        let mut victims: Vec<_> = once.map(|(at, mapped)| (*at, *mapped)).collect();
        if !victims.is_empty() {
            // Another one each time, the same in each run.
            let turn = (self.injected as usize).wrapping_mul(7919) % victims.len();
            victims.rotate_left(turn);
        }
        victims
    }
}

/// See the module's text. Shared like any backend.
pub struct InjectBackend {
    inner: Arc<dyn Backend>,
    fault: Option<Fault>,
    on_clock: Option<ClockHook>,
    on_stream_wait: Option<StreamHook>,
    state: Mutex<State>,
}

impl fmt::Debug for InjectBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InjectBackend").field("inner", &self.inner).field("fault", &self.fault).finish_non_exhaustive()
    }
}

impl InjectBackend {
    /// Wraps a backend; `None` breaks nothing.
    #[must_use]
    pub fn new(inner: Arc<dyn Backend>, fault: Option<Fault>) -> Self {
        Self { inner, fault, on_clock: None, on_stream_wait: None, state: Mutex::default() }
    }

    /// Calls `hook` whenever a host wait may have moved the clock, before the heap goes on.
    #[must_use]
    pub fn on_clock(mut self, hook: impl Fn() + Send + Sync + 'static) -> Self {
        self.on_clock = Some(Box::new(hook));
        self
    }

    /// Calls `hook` whenever the heap made a stream wait on the device.
    #[must_use]
    pub fn on_stream_wait(mut self, hook: impl Fn(StreamId) + Send + Sync + 'static) -> Self {
        self.on_stream_wait = Some(Box::new(hook));
        self
    }

    /// Memory faults made so far.
    #[must_use]
    pub fn injected(&self) -> u64 {
        self.state.lock().injected
    }

    fn clock_moved(&self) {
        if let Some(hook) = &self.on_clock {
            hook();
        }
    }

    /// Counts a finished map at `newest`, and makes the faults that are due.
    fn mapped(&self, newest: u64) -> Result<(), DriverError> {
        let mut state = self.state.lock();
        state.maps += 1;
        if state.maps % EVERY == FIRST {
            state.due += 1;
        }
        if state.due == 0 {
            return Ok(());
        }
        let done = match self.fault {
            Some(Fault::Swap) => self.swap(&mut state, newest)?,
            Some(Fault::Lost) => self.lose(&mut state, newest)?,
            Some(Fault::EarlyUnmap) => self.unmap_early(&mut state, newest)?,
            None => false,
        };
        if done {
            state.due -= 1;
            state.injected += 1;
        }
        Ok(())
    }

    fn swap(&self, state: &mut State, newest: u64) -> Result<bool, DriverError> {
        let victims = state.victims(newest);
        let pair = victims
            .iter()
            .enumerate()
            .find_map(|(number, a)| victims[number + 1..].iter().find(|b| b.1.bytes == a.1.bytes).map(|b| (*a, *b)));
        let Some(((at, mapped), (other_at, other))) = pair else { return Ok(false) };
        let (inner, other_inner) = (state.inner(mapped.handle), state.inner(other.handle));
        self.back(at, mapped.bytes, other_inner, || self.back(other_at, other.bytes, inner, || Ok(())))?;
        state.renamed.insert(mapped.handle, other_inner);
        state.renamed.insert(other.handle, inner);
        Ok(true)
    }

    fn lose(&self, state: &mut State, newest: u64) -> Result<bool, DriverError> {
        let Some((at, mapped)) = state.victims(newest).first().copied() else { return Ok(false) };
        let fresh = self.inner.create(mapped.bytes)?;
        self.back(at, mapped.bytes, fresh, || Ok(()))?;
        let lost = state.inner(mapped.handle);
        state.renamed.insert(mapped.handle, fresh);
        // SAFETY: the heap's name for it stands for the fresh handle from now on.
        unsafe { self.inner.release(lost, mapped.bytes) }?;
        Ok(true)
    }

    fn unmap_early(&self, state: &mut State, newest: u64) -> Result<bool, DriverError> {
        let Some((at, mapped)) = state.victims(newest).first().copied() else { return Ok(false) };
        // SAFETY: as in `back`.
        unsafe { self.inner.unmap(at, mapped.bytes) }?;
        state.gone.insert(at);
        Ok(true)
    }

    /// Puts `handle` behind the mapping at `at`, with `between` done while nothing is there.
    fn back(
        &self,
        at: u64,
        bytes: u64,
        handle: PhysicalAllocation,
        between: impl FnOnce() -> Result<(), DriverError>,
    ) -> Result<(), DriverError> {
        // SAFETY: it is one mapping, by the book kept here. That live data is cut off is the fault to be found;
        // memory is reached through calls that fail on unmapped addresses.
        unsafe { self.inner.unmap(at, bytes) }?;
        between()?;
        // SAFETY: the range has just been unmapped.
        unsafe { self.inner.map(at, handle, bytes) }?;
        // SAFETY: the mapping has just been made.
        unsafe { self.inner.set_access(at, bytes) }
    }

    fn is_early(&self) -> bool {
        self.fault == Some(Fault::EarlyUnmap)
    }
}

impl Backend for InjectBackend {
    handed_on!();

    fn reserve(&self, bytes: u64) -> Result<u64, DriverError> {
        self.inner.reserve(bytes)
    }

    unsafe fn unreserve(&self, address: u64, bytes: u64) -> Result<(), DriverError> {
        // SAFETY: passed on to the caller.
        unsafe { self.inner.unreserve(address, bytes) }
    }

    fn create(&self, bytes: u64) -> Result<PhysicalAllocation, DriverError> {
        let handle = self.inner.create(bytes)?;
        // A name may come again after its release; it then stands for itself.
        self.state.lock().renamed.remove(&handle);
        Ok(handle)
    }

    unsafe fn map(&self, address: u64, handle: PhysicalAllocation, bytes: u64) -> Result<(), DriverError> {
        let mut state = self.state.lock();
        // SAFETY: passed on to the caller.
        unsafe { self.inner.map(address, state.inner(handle), bytes) }?;
        state.mappings.insert(address, Mapped { handle, bytes });
        Ok(())
    }

    unsafe fn set_access(&self, address: u64, bytes: u64) -> Result<(), DriverError> {
        // SAFETY: passed on to the caller.
        unsafe { self.inner.set_access(address, bytes) }?;
        self.mapped(address)
    }

    unsafe fn set_peer_access(&self, address: u64, bytes: u64, peer: u32, on: bool) -> Result<(), DriverError> {
        // What a fault has unmapped has no access to be changed; the heap takes it to be there.
        if self.state.lock().gone.contains(&address) {
            return Ok(());
        }
        // SAFETY: passed on to the caller.
        unsafe { self.inner.set_peer_access(address, bytes, peer, on) }
    }

    unsafe fn unmap(&self, address: u64, bytes: u64) -> Result<(), DriverError> {
        let mut state = self.state.lock();
        if !state.gone.remove(&address) {
            // SAFETY: passed on to the caller.
            unsafe { self.inner.unmap(address, bytes) }?;
        }
        state.mappings.remove(&address);
        Ok(())
    }

    unsafe fn release(&self, handle: PhysicalAllocation, bytes: u64) -> Result<(), DriverError> {
        let inner = self.state.lock().inner(handle);
        // SAFETY: passed on to the caller.
        unsafe { self.inner.release(inner, bytes) }
    }

    unsafe fn relocate(&self, from: u64, to: u64, handle: PhysicalAllocation, bytes: u64) -> Result<(), Unmoved> {
        let mut state = self.state.lock();
        let moved = if state.gone.contains(&from) {
            // SAFETY: passed on to the caller.
            unsafe { self.inner.map(to, state.inner(handle), bytes) }?;
            // SAFETY: the mapping was made just now.
            let done = unsafe { self.inner.set_access(to, bytes) };
            // SAFETY: as above.
            done.map_err(|error| Unmoved { error, left: unsafe { self.inner.unmap(to, bytes) }.is_err() })
        } else {
            // SAFETY: passed on to the caller.
            unsafe { self.inner.relocate(from, to, state.inner(handle), bytes) }
        };
        if moved.as_ref().err().is_none_or(|unmoved| unmoved.left) {
            state.mappings.insert(to, Mapped { handle, bytes });
        }
        moved?;
        state.gone.remove(&from);
        state.mappings.remove(&from);
        drop(state);
        Ok(self.mapped(to)?)
    }

    fn record(&self, scope: EventScope) -> Result<Event, DriverError> {
        self.inner.record(scope)
    }

    fn is_done(&self, event: &Event) -> Result<bool, DriverError> {
        if self.is_early() { Ok(true) } else { self.inner.is_done(event) }
    }

    fn wait(&self, event: &Event, limit: Duration) -> Result<bool, DriverError> {
        if self.is_early() {
            return Ok(true);
        }
        let done = self.inner.wait(event, limit);
        self.clock_moved();
        done
    }

    fn stream_wait(&self, stream: StreamId, event: &Event) -> Result<(), DriverError> {
        self.inner.stream_wait(stream, event)?;
        if let Some(hook) = &self.on_stream_wait {
            hook(stream);
        }
        Ok(())
    }

    fn adopt(&self, event: ClientEvent) -> Result<Event, DriverError> {
        self.inner.adopt(event)
    }

    fn quiesce(&self) -> Result<(), DriverError> {
        if self.is_early() {
            return Ok(());
        }
        let done = self.inner.quiesce();
        self.clock_moved();
        done
    }

    unsafe fn export(&self, handle: PhysicalAllocation) -> Result<(OwnedFd, u64), DriverError> {
        let inner = self.state.lock().inner(handle);
        // SAFETY: passed on to the caller.
        unsafe { self.inner.export(inner) }
    }

    fn import(&self, fd: BorrowedFd<'_>, start: u64, bytes: u64) -> Result<PhysicalAllocation, DriverError> {
        self.inner.import(fd, start, bytes)
    }

    unsafe fn release_shared(&self, handle: PhysicalAllocation, bytes: u64) -> Result<(), DriverError> {
        let inner = self.state.lock().inner(handle);
        // SAFETY: passed on to the caller.
        unsafe { self.inner.release_shared(inner, bytes) }
    }
}

#[cfg(test)]
pub(crate) mod tests;
