//! Identities of streams that cannot be asked: because they capture a graph (measured on an H200: `cuStreamGetId`
//! on a capturing stream invalidates its capture), or because the driver has none to give.
#![forbid(unsafe_code)]

use parking_lot::RwLock;
use std::collections::HashMap;

/// Marks identities of streams that captured when they were first seen; the driver counts its own from 1.
const UNASKED: u64 = 1 << 62;
/// Handles are addresses of user space, below this; how often they were retired is counted above.
const HANDLE_BITS: u32 = 48;
const RETIREMENTS: u64 = (1 << (62 - HANDLE_BITS)) - 1;

/// What is known of handles. Any thread.
#[derive(Debug, Default)]
pub(super) struct Identities {
    /// The last known identity of each handle, sorted by handle.
    last: RwLock<Vec<(u64, u64)>>,
    /// How many streams of a handle were retired.
    retired: RwLock<HashMap<u64, u64>>,
}

impl Identities {
    /// Notes what the driver said, and gives it back.
    pub(super) fn note(&self, handle: u64, id: u64) -> u64 {
        let known = |all: &[(u64, u64)]| all.binary_search_by_key(&handle, |entry| entry.0);
        let same = {
            let all = self.last.read();
            known(&all).is_ok_and(|at| all[at].1 == id)
        };
        if !same {
            let mut all = self.last.write();
            match known(&all) {
                Ok(at) => all[at].1 = id,
                Err(at) => all.insert(at, (handle, id)),
            }
        }
        id
    }

    /// The last known identity of a handle; for one that was never asked, one of its own.
    pub(super) fn of(&self, handle: u64) -> u64 {
        let all = self.last.read();
        let last = all.binary_search_by_key(&handle, |entry| entry.0).map(|at| all[at].1);
        last.unwrap_or_else(|_| UNASKED | self.numbered(handle))
    }

    /// An identity without the driver's help: the handle, and how many streams of it were retired.
    pub(super) fn numbered(&self, handle: u64) -> u64 {
        let times = self.retired.read().get(&handle).copied().unwrap_or(0);
        handle | (times & RETIREMENTS) << HANDLE_BITS
    }

    /// The handle may stand for another stream from now on.
    pub(super) fn forget(&self, handle: u64) {
        self.last.write().retain(|entry| entry.0 != handle);
        *self.retired.write().entry(handle).or_default() += 1;
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
