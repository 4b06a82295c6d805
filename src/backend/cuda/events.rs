//! A pool of events without timing. An event leaves the pool to be recorded and comes back when
//! its only holder recycles it, so none is recorded again while someone may ask for it.

use super::sys::{Api, undo};
use crate::error::DriverError;
use parking_lot::Mutex;

#[derive(Debug, Default)]
pub(super) struct EventPool(Mutex<Events>);

#[derive(Debug, Default)]
struct Events {
    /// All that exist, also those that were given out and never came back.
    all: Vec<u64>,
    free: Vec<u64>,
}

impl EventPool {
    /// Takes an event out. The context must be current.
    pub(super) fn take(&self, api: &Api) -> Result<u64, DriverError> {
        let mut events = self.0.lock();
        if let Some(event) = events.free.pop() {
            return Ok(event);
        }
        let event = api.create_event()?;
        events.all.push(event);
        Ok(event)
    }

    pub(super) fn give_back(&self, event: u64) {
        self.0.lock().free.push(event);
    }

    /// Destroys all events. The context must be current.
    pub(super) fn clear(&mut self, api: &Api) {
        let events = self.0.get_mut();
        events.free.clear();
        for event in events.all.drain(..) {
            // SAFETY: created by `take`; whoever still holds its token cannot use it without the
            // backend, which is being dropped.
            undo("an event stays", || unsafe { api.destroy_event(event) });
        }
    }
}
