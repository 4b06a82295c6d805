//! The client's events: a stream of this backend waits for one and records an event of the pool behind it,
//! so that the client's may be recorded again or destroyed at once.

use super::sys::{Api, undo};
use crate::error::DriverError;
use parking_lot::Mutex;

/// Streams that wait at most. Beyond that an event may be seen late: after one before it on its stream.
const STREAMS: usize = 32;

/// Streams that only ever wait, so that an event which completes late holds up no other.
#[derive(Debug, Default)]
pub(super) struct Waiters(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    streams: Vec<u64>,
    /// Which one is taken when all of them wait.
    turn: usize,
}

impl Waiters {
    /// Records `own` behind what `event` stands for now. The context must be current, the mode relaxed.
    ///
    /// # Safety
    /// `event` exists and was not recorded in a capture under way; `own` is an event of this context that
    /// nobody else holds.
    pub(super) unsafe fn record_behind(&self, api: &Api, event: u64, own: u64) -> Result<(), DriverError> {
        let mut state = self.0.lock();
        let stream = state.idle(api)?;
        // SAFETY: the stream is one of ours, the event the caller's.
        unsafe { api.stream_wait(stream, event) }?;
        // SAFETY: as above.
        unsafe { api.record(own, stream) }
    }

    /// Destroys the streams. The context must be current.
    pub(super) fn clear(&mut self, api: &Api) {
        for stream in self.0.get_mut().streams.drain(..) {
            // SAFETY: created by `idle`, nobody else knows it.
            undo("a stream that waited stays", || unsafe { api.destroy_stream(stream) });
        }
    }
}

impl State {
    /// A stream that waits for nothing, if there is or may be one.
    fn idle(&mut self, api: &Api) -> Result<u64, DriverError> {
        for &stream in &self.streams {
            // SAFETY: created below, destroyed only by `clear`.
            if unsafe { api.query_stream(stream) }? {
                return Ok(stream);
            }
        }
        if self.streams.len() < STREAMS {
            let stream = api.create_stream()?;
            self.streams.push(stream);
            return Ok(stream);
        }
        self.turn = (self.turn + 1) % STREAMS;
        Ok(self.streams[self.turn])
    }
}
