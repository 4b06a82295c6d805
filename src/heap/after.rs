//! Frees that wait: for the streams that a block was declared used on, for an event of the client's, for imports.
#![forbid(unsafe_code)]

use super::inner::{Inner, Use};
use super::pools;
use crate::backend::{Abroad, Backend, ClientEvent, Event, EventScope};
use crate::epoch::{self, Closing};
use crate::error::{DriverError, Result};
use crate::segment::Stamp;
use crate::segment::nodes::NodeId;
use crate::units::UNIT;
use std::sync::atomic::Ordering::Relaxed;

/// Blocks that wait which a request looks at while a graph is captured.
const SETTLE: usize = 16;
/// Blocks that wait which a large request looks at that needs no driver work, at 0.25 us each on an H200; it stops at the first
/// that waits still.
const FEW: usize = 4;

/// A freed block that waits for the streams it was declared used on.
#[derive(Debug)]
pub(crate) struct Pending {
    pub(crate) segment: u16,
    pub(crate) node: NodeId,
    pub(crate) stamp: Stamp,
    /// What must complete; where an event was refused, the epoch of the stamp must pass instead. Who waits for them shares them.
    pub(crate) events: Closing,
    pub(crate) refused: bool,
    /// Streams of other devices whose event was refused: no epoch of this device proves anything of them, so it is asked for again.
    pub(crate) away: Vec<Abroad>,
    /// First unit of the block: it waits for imports that are open too.
    pub(crate) unit: u32,
}

/// An event behind a stream of another device; where that is gone, behind all of its device, unless a capture is announced there.
pub(super) fn record_abroad(backend: &dyn Backend, abroad: &Abroad) -> Result<Event, DriverError> {
    backend.record_abroad(abroad, abroad.device.is_some_and(|device| !pools::captures_on(device)))
}

impl Pending {
    /// Asks again for the events on other devices that were refused.
    #[cold]
    pub(crate) fn record_away(&mut self, backend: &dyn Backend) {
        // Nobody waits for them meanwhile.
        let Some(events) = Closing::get_mut(&mut self.events) else { return };
        self.away.retain(|abroad| match record_abroad(backend, abroad) {
            Ok(event) => {
                events.push(event);
                false
            }
            Err(_) => true,
        });
    }
}

impl Inner {
    /// Frees a block as soon as the client's event has completed. Never waits. After an error the block lives on.
    pub(crate) fn free_after(&self, address: u64, event: ClientEvent) -> Result<()> {
        let (place, mut segment, id) = self.live_block(address)?;
        let backend = self.driver.backend();
        // Before anything changes: a refusal leaves the block live.
        let event = if self.shut.load(Relaxed) { None } else { Some(backend.adopt(event)?) };
        place.clear();
        let node = &segment.nodes[id];
        let bytes = u64::from(node.len) * UNIT;
        self.count_free(&place, bytes, u64::from(node.slack));
        let stamp = Stamp { owner: node.owner, epoch: self.epochs.open() };
        segment.suspend(id);
        drop(segment);
        self.suspend(place.segment, id, place.unit(), stamp, event);
        Ok(())
    }

    /// Records what a freed block with declared uses waits for, besides an event of the caller's.
    pub(crate) fn suspend(&self, segment: u16, node: NodeId, unit: u32, stamp: Stamp, after: Option<Event>) {
        let uses = self.uses.lock().remove(&unit).unwrap_or_default();
        let backend = self.driver.backend();
        let mut events: Vec<Event> = after.into_iter().collect();
        let (mut refused, mut away) = (false, Vec::new());
        // Held while recording, so that a shutdown finds every event that there is.
        let mut pending = self.pending.lock();
        for Use { stream, key, retired, abroad } in uses {
            if self.shut.load(Relaxed) {
                break;
            }
            if let Some(abroad) = abroad {
                match record_abroad(backend, &abroad) {
                    Ok(event) => events.push(event),
                    Err(error) => {
                        tracing::debug!(%error, ?stream, "no event for a use on another device yet");
                        away.push(abroad);
                    }
                }
                continue;
            }
            // An event on another stream, or on this thread's own for another thread's, would prove nothing.
            if retired || backend.stream_key(stream) != Ok(key) {
                refused = true;
                continue;
            }
            match backend.record(EventScope::Stream(stream)) {
                Ok(event) => events.push(event),
                Err(error) => {
                    tracing::debug!(%error, ?stream, "no event for a declared use; its epoch must pass instead");
                    refused = true;
                }
            }
        }
        if self.shut.load(Relaxed) {
            events.drain(..).for_each(|event| backend.recycle(event));
        }
        pending.push_back(Pending { segment, node, stamp, events: Closing::new(events), refused, away, unit });
        self.any_pending.store(true, Relaxed);
    }

    /// Frees blocks whose declared uses have completed and whose imports have ended.
    pub(crate) fn settle_pending(&self) {
        // During a capture few at a time, by turns, so that a request costs the same however many wait.
        self.settle_some(if self.pools.announced() { SETTLE } else { usize::MAX }, false);
    }

    /// As [`Self::settle_pending`], a few of them, before a large block is cut out of a longer one: what lies ready in its place is
    /// taken as it is. Not during a capture, where asking takes more calls. Never waits: whoever holds the driver lock is at work
    /// on the same.
    #[cold]
    pub(super) fn settle_few(&self) {
        if !self.pools.announced()
            && let Some(_slow) = self.slow.try_lock()
            && !self.shut.load(Relaxed)
        {
            self.settle_some(FEW, true);
        }
    }

    /// Looks at up to `most` of the blocks that wait, by turns, or up to the first that waits still.
    fn settle_some(&self, most: usize, up_to_first: bool) {
        let backend = self.driver.backend();
        let passed = self.epochs.passed();
        let mut ready = Vec::new();
        {
            let mut pending = self.pending.lock();
            for _ in 0..pending.len().min(most) {
                let Some(mut one) = pending.pop_front() else { break };
                if !one.away.is_empty() {
                    one.record_away(backend);
                }
                let done = one.away.is_empty()
                    && (!one.refused || one.stamp.epoch <= passed)
                    && !self.exports.lock().contains(one.unit)
                    && one.events.iter().all(|event| backend.is_done(event).unwrap_or(false));
                if done {
                    ready.push(one);
                } else {
                    pending.push_back(one);
                    if up_to_first {
                        break;
                    }
                }
            }
            self.any_pending.store(!pending.is_empty(), Relaxed);
        }
        for one in ready {
            let mut segment = self.segment(one.segment);
            // The stream may have been retired since: then the block is nobody's.
            let stamp = Stamp { owner: segment.nodes[one.node].owner, ..one.stamp };
            segment.free(one.node, stamp, passed);
            drop(segment);
            epoch::recycle(backend, one.events);
        }
    }
}
