//! Streams of other devices that a block was declared used on: what this device's events prove does not hold for them.

use super::CudaBackend;
use super::enter::{Primary, enter};
use super::sys::{STREAM_LEGACY, STREAM_PER_THREAD, undo};
use crate::backend::{Abroad, Backend, ClientEvent, Event, StreamId};
use crate::error::{DriverError, Error};
use parking_lot::Mutex;
use std::collections::BTreeMap;

/// Primary contexts of other devices, retained while this backend may name their streams.
#[derive(Debug, Default)]
pub(super) struct Contexts(Mutex<BTreeMap<u32, Primary>>);

impl CudaBackend {
    /// See [`Backend::abroad`]. A stream that captures is not asked for its context, lest that end its capture.
    pub(super) fn find_abroad(&self, stream: StreamId, device: Option<u32>) -> Result<Option<Abroad>, Error> {
        let handle = self.resolve(stream);
        if device == Some(self.index) || (device.is_none() && handle <= STREAM_PER_THREAD) {
            return Ok(None);
        }
        if let Some(device) = device {
            let context = self.context_of(device)?;
            // The legacy stream waits for the own streams of all threads.
            return Ok(Some(match handle {
                STREAM_PER_THREAD => Abroad { context, stream: STREAM_LEGACY, id: 0 },
                0 | STREAM_LEGACY => Abroad { context, stream: handle, id: 0 },
                _ => Abroad { context, stream: handle, id: self.stream_key(stream)? },
            }));
        }
        let _entered = self.primary.enter(true)?;
        // SAFETY: the trait's streams exist.
        if unsafe { self.api().is_capturing(handle) }? {
            return Ok(None);
        }
        // SAFETY: as above.
        let context = unsafe { self.api().stream_context(handle) }?;
        if context == self.primary.context() {
            return Ok(None);
        }
        let there = enter(self.api(), context, true)?;
        // Another context of this device is no other device.
        let here = self.api().current_device()? == self.primary.device();
        drop(there);
        if here { Ok(None) } else { Ok(Some(Abroad { context, stream: handle, id: self.stream_key(stream)? })) }
    }

    fn context_of(&self, device: u32) -> Result<u64, Error> {
        let mut contexts = self.contexts.0.lock();
        if let Some(primary) = contexts.get(&device) {
            return Ok(primary.context());
        }
        let count = self.api().device_count()?;
        let ordinal = i32::try_from(device).ok().filter(|ordinal| *ordinal < count);
        let ordinal = ordinal.ok_or_else(|| {
            Error::InvalidArgument(format!(
                "device {device} does not exist, the driver shows {count}; give the stream's"
            ))
        })?;
        let primary = Primary::retain(self.api(), self.api().device(ordinal)?)?;
        let context = primary.context();
        contexts.insert(device, primary);
        Ok(context)
    }

    /// See [`Backend::record_abroad`].
    pub(super) fn event_abroad(&self, abroad: &Abroad) -> Result<Event, DriverError> {
        let api = self.api();
        // Where the stream is gone, its handle may be another's: then all of its context.
        let same = abroad.id == 0 || self.stream_key(StreamId(abroad.stream)) == Ok(abroad.id);
        let _there = enter(api, abroad.context, true)?;
        self.refuse_capturing(if same { abroad.stream } else { STREAM_LEGACY })?;
        let event = api.create_event()?;
        let recorded = match same {
            // SAFETY: a new event of the context that is current, which is the stream's.
            true => unsafe { api.record(event, abroad.stream) },
            // SAFETY: as above.
            false => unsafe { api.record_context(event, abroad.context) },
        };
        let adopted = recorded.and_then(|()| self.adopt(ClientEvent(event)));
        // SAFETY: created above, not named again; a recorded event may be destroyed at any time.
        undo("an event on another device stays", || unsafe { api.destroy_event(event) });
        adopted
    }
}
