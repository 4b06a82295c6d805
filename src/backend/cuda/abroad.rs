//! Streams of other devices that a block was declared used on: what this device's events prove does not hold for them.

use super::CudaBackend;
use super::enter::{Primary, enter};
use super::identity::is_unasked;
use super::sys::{STREAM_LEGACY, STREAM_PER_THREAD, undo};
use crate::backend::{Abroad, Backend, ClientEvent, Event, StreamId};
use crate::error::{DriverCall, DriverError, Error};
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};

/// Streams of other devices that are remembered.
const REMEMBERED: usize = 4096;

/// What is known of other devices.
#[derive(Debug, Default)]
pub(super) struct Others {
    /// Their primary contexts, retained while this backend may name their streams.
    contexts: Mutex<BTreeMap<u32, Primary>>,
    /// Device and context of their streams, by identity: those that capture are not asked.
    streams: Mutex<HashMap<u64, (u32, u64)>>,
}

impl CudaBackend {
    /// See [`Backend::abroad`]. A stream that captures is not asked for its context, lest that end its capture: it may be anyone's.
    pub(super) fn find_abroad(&self, stream: StreamId, device: Option<u32>) -> Result<Option<Abroad>, Error> {
        let handle = self.resolve(stream);
        if device == Some(self.index) || (device.is_none() && (self.devices == 1 || handle <= STREAM_PER_THREAD)) {
            return Ok(None);
        }
        if let Some(device) = device.filter(|device| *device >= self.devices) {
            let why = format!("device {device} does not exist, the driver shows {}; give the stream's", self.devices);
            return Err(Error::InvalidArgument(why));
        }
        if let (Some(device), 0..=STREAM_PER_THREAD) = (device, handle) {
            let context = self.context_of(device)?;
            // The legacy stream waits for the own streams of all threads.
            let stream = if handle == STREAM_PER_THREAD { STREAM_LEGACY } else { handle };
            return Ok(Some(Abroad { device: Some(device), context, stream, id: 0 }));
        }
        let id = self.stream_key(stream)?;
        if let Some(&(device, context)) = self.others.streams.lock().get(&id) {
            return Ok(Some(Abroad { device: Some(device), context, stream: handle, id }));
        }
        let _entered = self.primary.enter(true)?;
        // SAFETY: the trait's streams exist.
        if unsafe { self.api().is_capturing(handle) }? {
            return Ok(Some(Abroad { device: None, context: 0, stream: handle, id }));
        }
        // SAFETY: as above.
        let context = unsafe { self.api().stream_context(handle) }?;
        if context == self.primary.context() {
            return Ok(None);
        }
        let there = enter(self.api(), context, true)?;
        let device = self.api().current_device()?;
        drop(there);
        // Another context of this device is no other device.
        if device == self.primary.device() {
            return Ok(None);
        }
        let device = device.cast_unsigned();
        self.context_of(device)?;
        let mut streams = self.others.streams.lock();
        if streams.len() >= REMEMBERED {
            streams.clear();
        }
        streams.insert(id, (device, context));
        Ok(Some(Abroad { device: Some(device), context, stream: handle, id }))
    }

    fn context_of(&self, device: u32) -> Result<u64, DriverError> {
        let mut contexts = self.others.contexts.lock();
        if let Some(primary) = contexts.get(&device) {
            return Ok(primary.context());
        }
        let primary = Primary::retain(self.api(), self.api().device(device.cast_signed())?)?;
        let context = primary.context();
        contexts.insert(device, primary);
        Ok(context)
    }

    /// See [`Backend::record_abroad`].
    pub(super) fn event_abroad(&self, abroad: &Abroad, all: bool) -> Result<Event, DriverError> {
        let api = self.api();
        let refused = |why: &str| Err(DriverError::new(DriverCall::Event, why));
        if !self.is_there(abroad)? {
            if abroad.context == 0 || !all {
                return refused("the stream is gone, and an event of all its device would end a capture there");
            }
            let _there = enter(api, abroad.context, true)?;
            self.refuse_capturing(STREAM_LEGACY)?;
            // SAFETY: a new event of that context.
            return self.taken_over(|event| unsafe { api.record_context(event, abroad.context) });
        }
        let context = match abroad.context {
            0 => {
                let _entered = self.primary.enter(true)?;
                self.refuse_capturing(abroad.stream)?;
                // SAFETY: the stream is there, and does not capture.
                unsafe { api.stream_context(abroad.stream) }?
            }
            known => known,
        };
        let _there = enter(api, context, true)?;
        self.refuse_capturing(abroad.stream)?;
        // SAFETY: a new event of the context that is current, which is the stream's.
        self.taken_over(|event| unsafe { api.record(event, abroad.stream) })
    }

    /// Is the stream there still, as far as can be told? One that was never asked for its identity has to be.
    fn is_there(&self, abroad: &Abroad) -> Result<bool, DriverError> {
        if abroad.id == 0 {
            return Ok(true);
        }
        match self.stream_key(StreamId(abroad.stream)) {
            Ok(id) => Ok(id == abroad.id || is_unasked(id) || is_unasked(abroad.id)),
            Err(Error::DeadStream { .. }) => Ok(false),
            Err(Error::Driver(error)) => Err(error),
            Err(other) => Err(DriverError::new(DriverCall::Event, other.to_string())),
        }
    }

    /// An event of this device behind one that is made and recorded in the context that is current.
    fn taken_over(&self, record: impl FnOnce(u64) -> Result<(), DriverError>) -> Result<Event, DriverError> {
        let event = self.api().create_event()?;
        let adopted = record(event).and_then(|()| self.adopt(ClientEvent(event)));
        // SAFETY: created above, not named again; a recorded event may be destroyed at any time.
        undo("an event on another device stays", || unsafe { self.api().destroy_event(event) });
        adopted
    }
}
