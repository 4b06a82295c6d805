//! Identities of streams, for streams that cannot be asked because they capture a graph (measured on an H200:
//! `cuStreamGetId` on a capturing stream invalidates its capture).
#![forbid(unsafe_code)]

use crate::keys::Keys;
use parking_lot::Mutex;

/// Marks identities of streams that captured when they were first seen; the driver counts its own from 1.
const UNASKED: u64 = 1 << 62;
/// A handle whose stream is gone.
const FORGOTTEN: u64 = u64::MAX;

/// The last known identity of each handle. Any thread; reads take no lock.
#[derive(Debug, Default)]
pub(super) struct Identities {
    known: Keys,
    writers: Mutex<()>,
}

impl Identities {
    /// Notes what the driver said, and gives it back.
    pub(super) fn note(&self, handle: u64, id: u64) -> u64 {
        if self.known.get(handle) != id {
            let _turn = self.writers.lock();
            self.known.set(handle, id);
        }
        id
    }

    /// The handle's stream is going to be destroyed.
    pub(super) fn forget(&self, handle: u64) {
        if self.known(handle).is_some() {
            self.note(handle, FORGOTTEN);
        }
    }

    /// The last known identity of a handle.
    #[inline]
    pub(super) fn known(&self, handle: u64) -> Option<u64> {
        Some(self.known.get(handle)).filter(|id| ![0, FORGOTTEN].contains(id))
    }

    /// The last known identity of a handle; for one that was never asked, one of its own.
    pub(super) fn of(&self, handle: u64) -> u64 {
        self.known(handle).unwrap_or(UNASKED | handle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_has_the_identity_that_was_noted_last() {
        let identities = Identities::default();
        assert_eq!(identities.of(7), UNASKED | 7);
        for (handle, id) in [(9, 1), (7, 2), (8, 3), (7, 4)] {
            assert_eq!(identities.note(handle, id), id);
        }
        assert_eq!([7, 8, 9].map(|handle| identities.of(handle)), [4, 3, 1]);
        identities.forget(8);
        identities.forget(10);
        assert_eq!([8, 10].map(|handle| identities.known(handle)), [None, None]);
        assert_eq!((identities.note(8, 5), identities.known(8)), (5, Some(5)));
    }
}
