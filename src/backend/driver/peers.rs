//! Access of other devices to all that a heap has mapped.

use super::{Driver, Known};
use crate::error::{DriverCall, DriverError};

impl Driver {
    /// Has the device access to all that is mapped, now and later? It has to its own.
    pub(crate) fn has_peer(&self, peer: u32) -> bool {
        peer == self.backend.device() || self.known.lock().peers.contains(&peer)
    }

    /// Gives a device access to all that is mapped, by one call a mapping, and to all that will be. On failure it has access to
    /// nothing that it had none to, unless taking it back was refused twice, or another heap on the same backend has given it access:
    /// then what is new since may have it already, and nothing is taken back.
    pub(crate) fn enable_peer(&self, peer: u32) -> Result<(), DriverError> {
        self.of_parent(DriverCall::SetAccess)?;
        // Locked from the first call to the last: what is mapped meanwhile would be missed.
        let mut known = self.known.lock();
        let refused = known.mappings.iter().find_map(|(&at, mapping)| {
            let error = self.set_peer_access(at, mapping.bytes, peer, true).err()?;
            Some((at, error))
        });
        let Some((at, error)) = refused else {
            self.backend.add_peer(peer);
            known.peers.push(peer);
            return Ok(());
        };
        let kept = if self.backend.peers().contains(&peer) { None } else { self.take_back(&known, at, peer) };
        drop(known);
        if let Some((mappings, why)) = kept {
            tracing::warn!(error = %why, mappings, peer, "access could not be taken back from a device that was not to get it");
        }
        Err(error)
    }

    /// Takes back what was given below `end`; of how many mappings that was refused twice, and why at last.
    fn take_back(&self, known: &Known, end: u64, peer: u32) -> Option<(usize, DriverError)> {
        let refusals = known.mappings.range(..end).filter_map(|(&at, mapping)| {
            let take = || self.set_peer_access(at, mapping.bytes, peer, false);
            take().or_else(|_| take()).err()
        });
        refusals.enumerate().last().map(|(before, why)| (before + 1, why))
    }

    fn set_peer_access(&self, at: u64, bytes: u64, peer: u32, access: bool) -> Result<(), DriverError> {
        // SAFETY: I10: exactly one mapping, of `known`, which is locked; I16: where access is taken back, nobody was told that
        // there is any.
        let call = || unsafe { self.backend.set_peer_access(at, bytes, peer, access) };
        self.count(&[DriverCall::SetAccess], bytes, call)
    }
}
