//! Frees that wait for an event of the client's.
#![forbid(unsafe_code)]

use super::inner::Inner;
use crate::backend::ClientEvent;
use crate::error::Result;
use crate::segment::Stamp;
use crate::units::UNIT;
use std::sync::atomic::Ordering::Relaxed;

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
}
