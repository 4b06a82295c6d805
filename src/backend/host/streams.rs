//! Streams and events of the host backend: a worker thread for each stream, or a [`Timeline`].
//!
//! H7: an event completes when, and only when, everything queued before its record in its scope has
//! run. A record puts a marker behind the work of each stream of the scope, under the lock of that
//! stream's queue; a stream with nothing queued or running has passed already. Streams that were
//! destroyed with work left count until that work is done, as in a CUDA context.
#![forbid(unsafe_code)]

use super::super::timeline::Timeline;
use super::super::{Event, EventScope, StreamId};
use super::worker::{Signal, Worker};
use crate::error::{DriverCall, DriverError, Error};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Streams that can exist at once.
const SLOTS: usize = 1024;

/// Key of a slot whose stream was destroyed, and of one that never had a stream.
const DESTROYED: u64 = u64::MAX;
const NEVER: u64 = u64::MAX - 1;
/// Marks the keys of streams that a program only names: they have no work, so there is nothing to wait for.
const NAMED: u64 = 1 << 63;

/// Who runs the work.
#[derive(Debug)]
pub(super) enum Streams {
    /// Nobody: a clock says when it would be done. Every id is a stream.
    Virtual(Timeline),
    /// Threads.
    Workers(Workers),
}

/// Streams with a thread each, started with the stream's first work.
#[derive(Debug)]
pub(super) struct Workers {
    /// Key by stream id, apart from the lock: it is read for every allocation.
    keys: Box<[AtomicU64]>,
    list: Mutex<List>,
    events: Mutex<Events>,
    /// First panic of a closure: from then on every call fails, as after a fault of a GPU.
    fault: Arc<OnceLock<String>>,
}

#[derive(Debug, Default)]
struct List {
    /// By stream id.
    slots: Vec<Option<Arc<Worker>>>,
    /// Destroyed, perhaps with work left.
    draining: Vec<Arc<Worker>>,
    next_key: u64,
}

#[derive(Debug, Default)]
struct Events {
    /// By the number in [`Event`]; numbers are never used again.
    recorded: HashMap<u64, Arc<Signal>>,
    last: u64,
}

fn failed(reason: impl Into<String>) -> DriverError {
    DriverError::new(DriverCall::Event, reason)
}

impl Workers {
    pub(super) fn new() -> Self {
        let workers = Self {
            keys: (0..SLOTS).map(|_| AtomicU64::new(NEVER)).collect(),
            list: Mutex::default(),
            events: Mutex::default(),
            fault: Arc::default(),
        };
        // The default stream: slot 0, key 0.
        let _ = workers.open(&mut workers.list.lock());
        workers
    }

    /// Opens a stream in the lowest free slot.
    fn open(&self, list: &mut List) -> Option<StreamId> {
        let slot = list.slots.iter().position(Option::is_none).unwrap_or(list.slots.len());
        let key = self.keys.get(slot)?;
        if slot == list.slots.len() {
            list.slots.push(None);
        }
        list.slots[slot] = Some(Arc::new(Worker::new(list.next_key, Arc::clone(&self.fault))));
        key.store(list.next_key, Ordering::Release);
        list.next_key += 1;
        Some(StreamId(slot as u64))
    }

    fn find(&self, stream: StreamId) -> Result<Arc<Worker>, String> {
        let slot = usize::try_from(stream.0).ok();
        let list = self.list.lock();
        let worker = slot.and_then(|slot| list.slots.get(slot)?.clone());
        worker.ok_or_else(|| format!("stream {} does not exist or was destroyed", stream.0))
    }

    /// The key of a stream, unless it was destroyed.
    fn key(&self, stream: StreamId) -> Option<u64> {
        let slot = usize::try_from(stream.0).ok().and_then(|slot| self.keys.get(slot));
        match slot.map_or(NEVER, |key| key.load(Ordering::Acquire)) {
            DESTROYED => None,
            NEVER => Some(NAMED | stream.0),
            key => Some(key),
        }
    }

    /// Is this a stream that was never created here?
    fn is_only_named(&self, stream: StreamId) -> bool {
        self.key(stream).is_some_and(|key| key & NAMED != 0)
    }

    fn healthy(&self) -> Result<(), DriverError> {
        self.fault.get().map_or(Ok(()), |fault| Err(failed(fault.clone())))
    }

    fn signal(&self, event: &Event) -> Result<Arc<Signal>, DriverError> {
        self.healthy()?;
        let signal = self.events.lock().recorded.get(&event.0).cloned();
        signal.ok_or_else(|| failed(format!("event {} was not recorded here", event.0)))
    }

    /// A signal that is raised when all work queued so far in `scope` has run.
    fn mark(&self, scope: EventScope) -> Result<Arc<Signal>, DriverError> {
        self.healthy()?;
        // Held by this call until every marker is placed, so that it cannot be raised before.
        let signal = Arc::new(Signal::held());
        match scope {
            EventScope::Stream(stream) if self.is_only_named(stream) => {}
            EventScope::Stream(stream) => self.find(stream).map_err(failed)?.mark(&signal),
            EventScope::Context => {
                let mut list = self.list.lock();
                list.draining.retain(|worker| !worker.is_finished());
                for worker in list.slots.iter().flatten().chain(&list.draining) {
                    worker.mark(&signal);
                }
            }
        }
        signal.let_go();
        Ok(signal)
    }
}

impl Streams {
    fn workers(&self) -> Result<&Workers, DriverError> {
        match self {
            Self::Virtual(_) => Err(failed("streams are virtual here: queue work on the timeline")),
            Self::Workers(workers) => Ok(workers),
        }
    }

    pub(super) fn create(&self) -> Result<StreamId, DriverError> {
        let workers = self.workers()?;
        workers.open(&mut workers.list.lock()).ok_or_else(|| failed(format!("{SLOTS} streams exist, destroy some")))
    }

    pub(super) fn destroy(&self, stream: StreamId) -> Result<(), DriverError> {
        let workers = self.workers()?;
        if stream == StreamId::default() {
            return Err(failed("the default stream cannot be destroyed"));
        }
        let mut list = workers.list.lock();
        let slot = usize::try_from(stream.0).ok().filter(|slot| *slot < list.slots.len());
        let worker = slot.and_then(|slot| list.slots[slot].take());
        let (Some(slot), Some(worker)) = (slot, worker) else {
            return Err(failed(format!("stream {} does not exist or was destroyed", stream.0)));
        };
        workers.keys[slot].store(DESTROYED, Ordering::Release);
        worker.close();
        list.draining.push(worker);
        Ok(())
    }

    pub(super) fn launch(&self, stream: StreamId, work: Box<dyn FnOnce() + Send>) -> Result<(), Error> {
        let workers = self.workers()?;
        workers.healthy()?;
        let dead = |why| Error::DeadStream { stream: stream.0, why };
        workers.find(stream).map_err(dead)?.run(work).map_err(|why| failed(why).into())
    }

    /// Are there no streams but numbers on a virtual clock?
    pub(super) fn are_virtual(&self) -> bool {
        matches!(self, Self::Virtual(_))
    }

    pub(super) fn key(&self, stream: StreamId) -> Result<u64, Error> {
        let Self::Workers(workers) = self else { return Ok(stream.0) };
        workers.key(stream).ok_or_else(|| Error::DeadStream { stream: stream.0, why: "it was destroyed".to_owned() })
    }

    pub(super) fn record(&self, scope: EventScope) -> Result<Event, DriverError> {
        let workers = match self {
            Self::Virtual(timeline) => return Ok(timeline.record(scope)),
            Self::Workers(workers) => workers,
        };
        let signal = workers.mark(scope)?;
        let mut events = workers.events.lock();
        events.last += 1;
        let number = events.last;
        events.recorded.insert(number, signal);
        Ok(Event(number))
    }

    pub(super) fn is_done(&self, event: &Event) -> Result<bool, DriverError> {
        match self {
            Self::Virtual(timeline) => Ok(timeline.is_done(event)),
            Self::Workers(workers) => Ok(workers.signal(event)?.is_raised()),
        }
    }

    pub(super) fn wait(&self, event: &Event, limit: Duration) -> Result<bool, DriverError> {
        match self {
            Self::Virtual(timeline) => Ok(timeline.wait(event, limit)),
            Self::Workers(workers) => {
                let raised = workers.signal(event)?.wait(Some(limit));
                workers.healthy()?;
                Ok(raised)
            }
        }
    }

    pub(super) fn stream_wait(&self, stream: StreamId, event: &Event) -> Result<(), DriverError> {
        match self {
            Self::Virtual(timeline) => {
                timeline.stream_wait(stream, event);
                Ok(())
            }
            Self::Workers(workers) => {
                let signal = workers.signal(event)?;
                if workers.is_only_named(stream) {
                    return Ok(());
                }
                workers.find(stream).map_err(failed)?.hold_for(signal).map_err(failed)
            }
        }
    }

    /// Another event that completes when `event` does.
    pub(super) fn adopt(&self, event: u64) -> Result<Event, DriverError> {
        match self {
            Self::Virtual(timeline) => {
                timeline.adopt(event).ok_or_else(|| failed(format!("event {event} was not recorded here")))
            }
            Self::Workers(workers) => {
                let signal = workers.signal(&Event(event))?;
                let mut events = workers.events.lock();
                events.last += 1;
                let number = events.last;
                events.recorded.insert(number, signal);
                Ok(Event(number))
            }
        }
    }

    pub(super) fn recycle(&self, event: Event) {
        match self {
            Self::Virtual(timeline) => timeline.recycle(event),
            Self::Workers(workers) => drop(workers.events.lock().recorded.remove(&event.0)),
        }
    }

    pub(super) fn quiesce(&self) -> Result<(), DriverError> {
        match self {
            Self::Virtual(timeline) => {
                timeline.quiesce();
                Ok(())
            }
            Self::Workers(workers) => {
                workers.mark(EventScope::Context)?.wait(None);
                workers.healthy()
            }
        }
    }

    /// Runs what is queued and ends every stream.
    pub(super) fn finish(&mut self) {
        let Self::Workers(workers) = self else { return };
        let list = workers.list.get_mut();
        let all: Vec<_> = list.slots.drain(..).flatten().chain(list.draining.drain(..)).collect();
        for worker in &all {
            worker.close();
        }
        for worker in &all {
            worker.join();
        }
    }

    /// Events that were recorded and not recycled.
    pub(super) fn open_events(&self) -> usize {
        match self {
            Self::Virtual(timeline) => timeline.open_events(),
            Self::Workers(workers) => workers.events.lock().recorded.len(),
        }
    }
}
