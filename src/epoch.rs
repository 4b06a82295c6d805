//! Epochs: proof that every stream of the device has passed a free, at no cost to the hot path.
//!
//! A free is stamped with the epoch that is open. Closing an epoch records one event that covers all
//! work queued so far on every stream; when it has completed, every stamp up to that epoch has passed.
//! The number is raised *before* the event is recorded, so that a free that still read the old number
//! had queued its work before the event (invariant I5).
#![forbid(unsafe_code)]

use crate::backend::{Backend, Event, EventScope, StreamId};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// Closed epochs kept waiting at most; beyond that, an epoch stays open longer instead.
const PENDING_MAX: usize = 256;

/// Events that end one epoch together.
pub(crate) type Closing = Arc<Vec<Event>>;

/// See the module's text. Any thread may call.
#[derive(Debug)]
pub(crate) struct Epochs {
    open: AtomicU32,
    passed: AtomicU32,
    pending: Mutex<VecDeque<(u32, Closing)>>,
    /// After shutdown no event is recorded any more; written under the lock of `pending`.
    ended: AtomicBool,
}

impl Default for Epochs {
    fn default() -> Self {
        Self {
            open: AtomicU32::new(1),
            passed: AtomicU32::new(0),
            pending: Mutex::default(),
            ended: AtomicBool::new(false),
        }
    }
}

impl Epochs {
    /// The stamp for a free that happens now.
    pub(crate) fn open(&self) -> u32 {
        self.open.load(Ordering::SeqCst)
    }

    /// The last epoch that is proven passed, as of the last [`Epochs::poll`].
    pub(crate) fn passed(&self) -> u32 {
        self.passed.load(Ordering::Acquire)
    }

    /// Closes the open epoch: records an event for the context, or one for each known stream where
    /// that is missing or refused. When an event is refused the epoch counts as never passed by
    /// itself; a later one covers it.
    pub(crate) fn close(&self, backend: &dyn Backend, streams: impl Fn() -> Vec<StreamId>) {
        let mut pending = self.pending.lock();
        if self.ended.load(Ordering::Relaxed) {
            return;
        }
        let epoch = self.open.fetch_add(1, Ordering::SeqCst);
        let mut events = Vec::new();
        if backend.capabilities().context_events
            && let Ok(event) = backend.record(EventScope::Context)
        {
            events.push(event);
        } else {
            for stream in streams() {
                match backend.record(EventScope::Stream(stream)) {
                    Ok(event) => events.push(event),
                    Err(error) => {
                        tracing::debug!(%error, epoch, "an epoch could not be closed; a later one covers it");
                        events.into_iter().for_each(|event| backend.recycle(event));
                        return;
                    }
                }
            }
        }
        pending.push_back((epoch, Arc::new(events)));
    }

    /// So many closed epochs wait that the next had better stay open longer.
    pub(crate) fn is_full(&self) -> bool {
        self.pending.lock().len() >= PENDING_MAX
    }

    /// Asks which epochs have passed. Never waits.
    pub(crate) fn poll(&self, backend: &dyn Backend) {
        let mut pending = self.pending.lock();
        while let Some((epoch, events)) = pending.front() {
            if !events.iter().all(|event| backend.is_done(event).unwrap_or(false)) {
                break;
            }
            self.passed.fetch_max(*epoch, Ordering::AcqRel);
            if let Some((_, events)) = pending.pop_front() {
                recycle(backend, events);
            }
        }
    }

    /// The oldest closed epoch that has not passed, with its events.
    pub(crate) fn oldest(&self) -> Option<(u32, Closing)> {
        self.pending.lock().front().map(|(epoch, events)| (*epoch, events.clone()))
    }

    /// All closed epochs that have not passed, oldest first, with their events.
    pub(crate) fn waiting(&self) -> Vec<(u32, Closing)> {
        self.pending.lock().iter().map(|(epoch, events)| (*epoch, events.clone())).collect()
    }

    /// Gives all events back (at shutdown); no epoch is closed afterwards.
    pub(crate) fn clear(&self, backend: &dyn Backend) {
        let mut pending = self.pending.lock();
        self.ended.store(true, Ordering::Relaxed);
        for (_, events) in pending.drain(..) {
            recycle(backend, events);
        }
    }
}

/// Gives events back once nobody else holds them.
pub(crate) fn recycle(backend: &dyn Backend, events: Closing) {
    if let Some(events) = Arc::into_inner(events) {
        events.into_iter().for_each(|event| backend.recycle(event));
    }
}
