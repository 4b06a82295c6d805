//! A virtual clock and virtual streams for `sim` and for repeatable runs on `host`.
//!
//! Work queued on a stream at time `t` is done at `max(t, end of the work before it) + its length`,
//! and seen as done `lag` later. An event completes when what it waits for has. A host wait moves
//! the clock on. Times are nanoseconds.
#![forbid(unsafe_code)]

use super::{Event, EventScope, StreamId};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

/// Shared by a backend and whoever drives the clock (a replay, a test). Any thread may call.
#[derive(Debug, Clone, Default)]
pub struct Timeline(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    now: u64,
    lag: u64,
    busy_until: HashMap<u64, u64>,
    /// Streams (by identity) that work was ever queued on with a length; others are idle.
    events: HashMap<u64, u64>,
    next_event: u64,
    host_wait_nanos: u64,
}

impl State {
    fn ready_at(&self, stream: u64) -> u64 {
        self.busy_until.get(&stream).copied().unwrap_or(0).max(self.now + self.lag)
    }
}

impl Timeline {
    /// A clock at 0 with work seen as done `lag` after it was queued.
    #[must_use]
    pub fn new(lag: Duration) -> Self {
        let timeline = Self::default();
        timeline.0.lock().lag = nanos(lag);
        timeline
    }

    /// The lag.
    #[must_use]
    pub fn lag(&self) -> Duration {
        Duration::from_nanos(self.0.lock().lag)
    }

    /// Present time.
    #[must_use]
    pub fn now(&self) -> Duration {
        Duration::from_nanos(self.0.lock().now)
    }

    /// Moves the clock to `time`; it never goes back.
    pub fn advance_to(&self, time: Duration) {
        let mut state = self.0.lock();
        state.now = state.now.max(nanos(time));
    }

    /// Moves the clock on by `by`.
    pub fn advance(&self, by: Duration) {
        self.0.lock().now += nanos(by);
    }

    /// Queues work of a given length on a stream and says when it will be done.
    pub fn queue(&self, stream: StreamId, length: Duration) -> Duration {
        let mut state = self.0.lock();
        let end = state.ready_at(stream.0) + nanos(length);
        state.busy_until.insert(stream.0, end);
        Duration::from_nanos(end)
    }

    /// When everything queued so far in `scope` will be done.
    #[must_use]
    pub fn completion(&self, scope: EventScope) -> Duration {
        Duration::from_nanos(completion(&self.0.lock(), scope))
    }

    /// Time by which host waits moved the clock on.
    #[must_use]
    pub fn host_wait_time(&self) -> Duration {
        Duration::from_nanos(self.0.lock().host_wait_nanos)
    }

    pub(crate) fn record(&self, scope: EventScope) -> Event {
        let mut state = self.0.lock();
        let at = completion(&state, scope);
        state.next_event += 1;
        let id = state.next_event;
        state.events.insert(id, at);
        Event(id)
    }

    /// Another event that completes when `event` does; `None` where there is no such event.
    pub(crate) fn adopt(&self, event: u64) -> Option<Event> {
        let mut state = self.0.lock();
        let at = *state.events.get(&event)?;
        state.next_event += 1;
        let id = state.next_event;
        state.events.insert(id, at);
        Some(Event(id))
    }

    pub(crate) fn is_done(&self, event: &Event) -> bool {
        let state = self.0.lock();
        state.events.get(&event.0).is_none_or(|at| *at <= state.now)
    }

    pub(crate) fn wait(&self, event: &Event, limit: Duration) -> bool {
        let mut state = self.0.lock();
        let at = state.events.get(&event.0).copied().unwrap_or(0);
        let until = at.min(state.now.saturating_add(nanos(limit)));
        if until > state.now {
            state.host_wait_nanos += until - state.now;
            state.now = until;
        }
        at <= state.now
    }

    pub(crate) fn stream_wait(&self, stream: StreamId, event: &Event) {
        let mut state = self.0.lock();
        let at = state.events.get(&event.0).copied().unwrap_or(0);
        let until = state.busy_until.entry(stream.0).or_default();
        *until = (*until).max(at);
    }

    pub(crate) fn recycle(&self, event: Event) {
        self.0.lock().events.remove(&event.0);
    }

    pub(crate) fn quiesce(&self) {
        let mut state = self.0.lock();
        let at = completion(&state, EventScope::Context);
        state.host_wait_nanos += at - state.now;
        state.now = at;
    }

    /// Events that were recorded and not given back.
    pub(crate) fn open_events(&self) -> usize {
        self.0.lock().events.len()
    }
}

fn completion(state: &State, scope: EventScope) -> u64 {
    match scope {
        EventScope::Stream(stream) => state.ready_at(stream.0),
        EventScope::Context => state.busy_until.values().copied().max().unwrap_or(0).max(state.now + state.lag),
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_wait_for_their_scope() {
        let time = Timeline::new(Duration::from_millis(1));
        time.queue(StreamId(1), Duration::from_millis(10));
        let own = time.record(EventScope::Stream(StreamId(1)));
        let other = time.record(EventScope::Stream(StreamId(2)));
        let all = time.record(EventScope::Context);
        time.advance(Duration::from_millis(1));
        assert!(time.is_done(&other) && !time.is_done(&own) && !time.is_done(&all));
        assert!(!time.wait(&own, Duration::from_millis(5)));
        assert!(time.wait(&all, Duration::from_secs(1)));
        assert_eq!(time.now(), Duration::from_millis(11));
        assert_eq!(time.host_wait_time(), Duration::from_millis(10));
    }
}
