//! The out-of-memory error: what stands in the way of a request.
#![forbid(unsafe_code)]

use super::inner::Inner;
use super::streams::Stream;
use crate::error::{DriverError, Error, OutOfMemory};
use crate::plan::source;
use crate::segment::Claim;
use crate::segment::nodes::Kind;
use crate::units::{GRANULE, UNIT, granule_ceil, granule_floor};

/// Free bytes by what keeps them from a request; a byte may count in several.
#[derive(Debug, Default)]
struct Obstacles {
    waiting: u64,
    whole: u64,
    pinned: u64,
    captured: u64,
}

impl Inner {
    /// The error, with what stands in the way.
    pub(super) fn out_of_memory(&self, requested: u64, stream: Stream, driver: Option<DriverError>) -> Error {
        let stats = self.stats();
        let found = self.obstacles(self.claim(stream));
        let exported = self.pending_exports();
        Error::OutOfMemory(Box::new(OutOfMemory {
            requested,
            stream: stream.id.0,
            limit: if driver.is_some() { stats.reserved } else { stats.limit },
            reserved: stats.reserved,
            allocated: stats.allocated,
            free: stats.free,
            largest_free: stats.largest_free,
            waiting: stats.pending.saturating_sub(exported) + found.waiting,
            exported,
            // What is left: free, but neither pinned nor a capture pool's nor in a handle that is idle as a whole.
            partly_live: stats.free.saturating_sub(found.whole + found.pinned + found.captured),
            pinned: found.pinned,
            captured: found.captured,
            zombie: stats.zombie,
            driver,
        }))
    }

    /// Bytes of freed blocks that other processes may use.
    fn pending_exports(&self) -> u64 {
        let pending: Vec<u32> = self.pending.lock().iter().map(|one| one.unit).collect();
        let exported = self.exports.lock().blocks();
        pending.iter().filter_map(|unit| exported.get(unit)).sum()
    }

    fn obstacles(&self, claim: Claim) -> Obstacles {
        let slow = self.slow.lock();
        let all = Claim { owner: 0, horizon: u32::MAX };
        let mut found = Obstacles::default();
        for index in self.segment_indices() {
            let segment = self.segment(index);
            if segment.private {
                found.captured += segment.free_units() * UNIT;
                continue;
            }
            let idle = source::victims(index, &segment, &slow.physical, all, 0..0);
            found.whole += idle.iter().map(|victim| u64::from(victim.granules) * GRANULE).sum::<u64>();
            for node in segment.iter().map(|id| &segment.nodes[id]).filter(|node| node.kind == Kind::Free) {
                let granules = granule_ceil(node.start)..granule_floor(node.end()).max(granule_ceil(node.start));
                found.pinned += u64::from(slow.physical.pinned.count(granules)) * GRANULE;
                if !claim.may_take(node) {
                    found.waiting += u64::from(node.len) * UNIT;
                }
            }
        }
        found
    }
}
