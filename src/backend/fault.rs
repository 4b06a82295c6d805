//! A backend that fails on demand and logs the order of calls, for tests of transactions.

use super::{Backend, ClientEvent, Event, EventScope, PhysicalAllocation, StreamId, handed_on::handed_on};
use crate::error::{DriverCall, DriverError};
use parking_lot::Mutex;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

/// Which of the counted calls fail; the first is number 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FaultRule {
    /// None.
    #[default]
    Never,
    /// The k-th, once.
    At(u64),
    /// The k-th and all after it.
    From(u64),
    /// Each n-th.
    Every(u64),
}

/// What fails and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FaultPlan {
    /// Which of the counted calls.
    pub rule: FaultRule,
    /// The error says that memory is short; otherwise the driver just refuses.
    pub out_of_memory: bool,
    /// Operations on events, waits and quiescing count too.
    pub events: bool,
    /// Count (and fail) only this kind.
    pub only: Option<DriverCall>,
}

impl FaultPlan {
    /// Memory operations counted by `rule`, refused for lack of memory or otherwise.
    #[must_use]
    pub const fn new(rule: FaultRule, out_of_memory: bool) -> Self {
        Self { rule, out_of_memory, events: false, only: None }
    }
}

/// One call as it came in. Sizes and addresses in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoggedCall {
    /// What.
    pub call: DriverCall,
    /// Where; 0 for calls that take no address.
    pub address: u64,
    /// How much; 0 for calls without a size.
    pub bytes: u64,
    /// Whether it failed, by plan or in the backend behind.
    pub failed: bool,
}

#[derive(Debug, Default)]
struct State {
    plan: FaultPlan,
    counted: u64,
    injected: u64,
    log: Vec<LoggedCall>,
}

impl State {
    fn fails(&mut self, call: DriverCall, event: bool) -> Option<DriverError> {
        if (event && !self.plan.events) || self.plan.only.is_some_and(|only| only != call) {
            return None;
        }
        self.counted += 1;
        let hit = match self.plan.rule {
            FaultRule::Never => false,
            FaultRule::At(k) => self.counted == k,
            FaultRule::From(k) => self.counted >= k,
            FaultRule::Every(n) => n != 0 && self.counted.is_multiple_of(n),
        };
        if !hit {
            return None;
        }
        self.injected += 1;
        let why = format!("made to fail, counted call {}", self.counted);
        Some(if self.plan.out_of_memory { DriverError::out_of_memory(call, why) } else { DriverError::new(call, why) })
    }
}

/// See the module's text. Any thread may call; counts and log are in the order of entry.
#[derive(Debug)]
pub struct FaultyBackend<B: Backend + ?Sized> {
    inner: Arc<B>,
    state: Mutex<State>,
}

impl<B: Backend + ?Sized> FaultyBackend<B> {
    /// Wraps a backend; nothing fails until [`FaultyBackend::arm`].
    pub fn new(inner: Arc<B>) -> Self {
        Self { inner, state: Mutex::default() }
    }

    /// The backend behind.
    #[must_use]
    pub fn inner(&self) -> &B {
        &self.inner
    }

    /// Sets the plan and counts from zero.
    pub fn arm(&self, plan: FaultPlan) {
        let mut state = self.state.lock();
        state.plan = plan;
        state.counted = 0;
        state.injected = 0;
    }

    /// Lets every call through again.
    pub fn disarm(&self) {
        self.arm(FaultPlan::default());
    }

    /// Calls counted since [`FaultyBackend::arm`].
    #[must_use]
    pub fn counted(&self) -> u64 {
        self.state.lock().counted
    }

    /// Failures injected since [`FaultyBackend::arm`].
    #[must_use]
    pub fn injected(&self) -> u64 {
        self.state.lock().injected
    }

    /// Every call so far, in order, events included.
    #[must_use]
    pub fn log(&self) -> Vec<LoggedCall> {
        self.state.lock().log.clone()
    }

    /// Empties the log.
    pub fn clear_log(&self) {
        self.state.lock().log.clear();
    }

    fn pass<T>(
        &self,
        call: DriverCall,
        (address, bytes): (u64, u64),
        event: bool,
        operation: impl FnOnce(&B) -> Result<T, DriverError>,
    ) -> Result<T, DriverError> {
        let (planned, entry) = {
            let mut state = self.state.lock();
            let planned = state.fails(call, event);
            state.log.push(LoggedCall { call, address, bytes, failed: planned.is_some() });
            (planned, state.log.len() - 1)
        };
        let done = planned.map_or_else(|| operation(&self.inner), Err);
        if done.is_err()
            && let Some(logged) = self.state.lock().log.get_mut(entry)
        {
            logged.failed = true;
        }
        done
    }

    fn event<T>(&self, operation: impl FnOnce(&B) -> Result<T, DriverError>) -> Result<T, DriverError> {
        self.pass(DriverCall::Event, (0, 0), true, operation)
    }
}

// `relocate` is left to the trait, whose way is through map, set_access and unmap here, so that each can fail.
#[allow(unsafe_code, reason = "hands the trait's unsafe operations on with the caller's promises")]
impl<B: Backend + ?Sized> Backend for FaultyBackend<B> {
    handed_on!();

    fn reserve(&self, bytes: u64) -> Result<u64, DriverError> {
        self.pass(DriverCall::Reserve, (0, bytes), false, |b| b.reserve(bytes))
    }

    unsafe fn unreserve(&self, address: u64, bytes: u64) -> Result<(), DriverError> {
        // SAFETY: the caller's promise holds for the backend behind.
        self.pass(DriverCall::Unreserve, (address, bytes), false, |b| unsafe { b.unreserve(address, bytes) })
    }

    fn create(&self, bytes: u64) -> Result<PhysicalAllocation, DriverError> {
        self.pass(DriverCall::Create, (0, bytes), false, |b| b.create(bytes))
    }

    unsafe fn map(&self, address: u64, handle: PhysicalAllocation, bytes: u64) -> Result<(), DriverError> {
        // SAFETY: the caller's promise holds for the backend behind.
        self.pass(DriverCall::Map, (address, bytes), false, |b| unsafe { b.map(address, handle, bytes) })
    }

    unsafe fn set_access(&self, address: u64, bytes: u64) -> Result<(), DriverError> {
        // SAFETY: the caller's promise holds for the backend behind.
        self.pass(DriverCall::SetAccess, (address, bytes), false, |b| unsafe { b.set_access(address, bytes) })
    }

    unsafe fn set_peer_access(&self, address: u64, bytes: u64, peer: u32, on: bool) -> Result<(), DriverError> {
        // SAFETY: the caller's promise holds for the backend behind.
        let call = |b: &B| unsafe { b.set_peer_access(address, bytes, peer, on) };
        self.pass(DriverCall::SetAccess, (address, bytes), false, call)
    }

    unsafe fn unmap(&self, address: u64, bytes: u64) -> Result<(), DriverError> {
        // SAFETY: the caller's promise holds for the backend behind.
        self.pass(DriverCall::Unmap, (address, bytes), false, |b| unsafe { b.unmap(address, bytes) })
    }

    unsafe fn release(&self, handle: PhysicalAllocation, bytes: u64) -> Result<(), DriverError> {
        // SAFETY: the caller's promise holds for the backend behind.
        self.pass(DriverCall::Release, (0, bytes), false, |b| unsafe { b.release(handle, bytes) })
    }

    fn record(&self, scope: EventScope) -> Result<Event, DriverError> {
        self.event(|b| b.record(scope))
    }

    fn is_done(&self, event: &Event) -> Result<bool, DriverError> {
        self.event(|b| b.is_done(event))
    }

    fn wait(&self, event: &Event, limit: Duration) -> Result<bool, DriverError> {
        self.event(|b| b.wait(event, limit))
    }

    fn stream_wait(&self, stream: StreamId, event: &Event) -> Result<(), DriverError> {
        self.event(|b| b.stream_wait(stream, event))
    }

    fn adopt(&self, event: ClientEvent) -> Result<Event, DriverError> {
        self.event(|b| b.adopt(event))
    }

    fn quiesce(&self) -> Result<(), DriverError> {
        self.pass(DriverCall::Other, (0, 0), true, |b| b.quiesce())
    }

    unsafe fn export(&self, handle: PhysicalAllocation) -> Result<(OwnedFd, u64), DriverError> {
        // SAFETY: the caller's promise holds for the backend behind.
        self.pass(DriverCall::Other, (0, 0), false, |b| unsafe { b.export(handle) })
    }

    fn import(&self, fd: BorrowedFd<'_>, start: u64, bytes: u64) -> Result<PhysicalAllocation, DriverError> {
        self.pass(DriverCall::Other, (0, bytes), false, |b| b.import(fd, start, bytes))
    }

    unsafe fn release_shared(&self, handle: PhysicalAllocation, bytes: u64) -> Result<(), DriverError> {
        // SAFETY: the caller's promise holds for the backend behind.
        self.pass(DriverCall::Release, (0, bytes), false, |b| unsafe { b.release_shared(handle, bytes) })
    }
}
