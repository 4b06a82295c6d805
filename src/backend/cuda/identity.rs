//! Identities of streams, for streams that cannot be asked because they capture a graph (measured on an H200:
//! `cuStreamGetId` on a capturing stream invalidates its capture).
#![forbid(unsafe_code)]

use parking_lot::RwLock;

/// Marks identities of streams that captured when they were first seen; the driver counts its own from 1.
const UNASKED: u64 = 1 << 62;

/// The last known identity of each handle, sorted by handle. Any thread.
#[derive(Debug, Default)]
pub(super) struct Identities(RwLock<Vec<(u64, u64)>>);

impl Identities {
    /// Notes what the driver said, and gives it back.
    pub(super) fn note(&self, handle: u64, id: u64) -> u64 {
        let known = |all: &[(u64, u64)]| all.binary_search_by_key(&handle, |entry| entry.0);
        let same = {
            let all = self.0.read();
            known(&all).is_ok_and(|at| all[at].1 == id)
        };
        if !same {
            let mut all = self.0.write();
            match known(&all) {
                Ok(at) => all[at].1 = id,
                Err(at) => all.insert(at, (handle, id)),
            }
        }
        id
    }

    /// The last known identity of a handle; for one that was never asked, one of its own.
    pub(super) fn of(&self, handle: u64) -> u64 {
        let all = self.0.read();
        all.binary_search_by_key(&handle, |entry| entry.0).map_or(UNASKED | handle, |at| all[at].1)
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
}
