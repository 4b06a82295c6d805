//! Identities of streams that are not asked for: because the stream captures a graph (measured on an H200:
//! `cuStreamGetId` on a capturing stream invalidates its capture), because the driver has none to give, or because the
//! client promises to retire streams.
#![forbid(unsafe_code)]

use crate::keys::Keys;
use parking_lot::Mutex;
use std::collections::HashMap;

/// Marks identities of streams that captured when they were first seen; the driver counts its own from 1.
const UNASKED: u64 = 1 << 62;
/// Handles are addresses of user space, below this; how often they were retired is counted above.
const HANDLE_BITS: u32 = 48;
const RETIREMENTS: u64 = (1 << (62 - HANDLE_BITS)) - 1;
/// A handle whose stream is gone.
const FORGOTTEN: u64 = u64::MAX;

/// Is this an identity that was made up for a stream that captured?
pub(super) fn is_unasked(id: u64) -> bool {
    id & (super::OWN_KEY | UNASKED) == UNASKED
}

/// What is known of handles. Any thread; the last known identity is read without a lock.
#[derive(Debug, Default)]
pub(super) struct Identities {
    last: Keys,
    /// How many streams of a handle were retired; whoever writes `last` holds it.
    retired: Mutex<HashMap<u64, u64>>,
}

impl Identities {
    /// Notes what the driver said, and gives it back.
    #[inline]
    pub(super) fn note(&self, handle: u64, id: u64) -> u64 {
        if self.last.get(handle) != id {
            let _turn = self.retired.lock();
            self.last.set(handle, id);
        }
        id
    }

    /// The last known identity of a handle that was not retired since.
    #[inline]
    pub(super) fn known(&self, handle: u64) -> Option<u64> {
        Some(self.last.get(handle)).filter(|id| ![0, FORGOTTEN].contains(id))
    }

    /// The last known identity of a handle; for one that was never asked, one of its own.
    pub(super) fn of(&self, handle: u64) -> u64 {
        self.known(handle).unwrap_or_else(|| UNASKED | self.numbered(handle))
    }

    /// An identity without the driver's help: the handle, and how many streams of it were retired.
    pub(super) fn numbered(&self, handle: u64) -> u64 {
        let times = self.retired.lock().get(&handle).copied().unwrap_or(0);
        handle | (times & RETIREMENTS) << HANDLE_BITS
    }

    /// The handle may stand for another stream from now on.
    pub(super) fn forget(&self, handle: u64) {
        let mut retired = self.retired.lock();
        *retired.entry(handle).or_default() += 1;
        if self.last.get(handle) != 0 {
            self.last.set(handle, FORGOTTEN);
        }
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

    #[test]
    fn a_retired_handle_is_another_stream() {
        let identities = Identities::default();
        identities.note(7, 2);
        assert_eq!(identities.numbered(7), 7);
        identities.forget(7);
        assert_eq!((identities.numbered(7), identities.of(7)), (7 | 1 << 48, UNASKED | 7 | 1 << 48));
        identities.forget(7);
        assert_eq!(identities.numbered(7), 7 | 2 << 48);
        assert_eq!(identities.numbered(8), 8);
    }
}
