//! How much memory may lie idle before pages move instead of more being made.
#![forbid(unsafe_code)]

use super::inner::{FIRST_POOL, HUGE_BYTES, Inner, Slow, Wanted};
use crate::config::Defrag;
use crate::policy;
use crate::segment::Segment;
use crate::units::GRANULE;
use std::sync::atomic::Ordering::Relaxed;

/// Share of the most that was live that `defrag:eager` lets lie idle. The constants here were chosen by measurement
/// (`policy-notes.md`).
const EAGER_SLACK: f64 = 0.0035;
/// Share of the most that was live that may lie idle before a huge request moves pages, where no limit was set.
const HUGE_SLACK: f64 = 0.02;
/// The same before other requests do for which there was room already: what they miss is missing because it lies scattered.
const SCATTERED_SLACK: f64 = 0.008;
/// Such requests are at least this share of what is live: for smaller ones more handles would be opened than are saved.
const SCATTERED_LEAST: u64 = 128;
/// Nor do pages move for them while more than this share of the most that was live is locked in partly live handles.
const LOCKED_MOST: f64 = 0.02;
/// Nor once one byte in so many of what exists has moved for such requests: where each step moves what the one before left,
/// growth ends it.
const GATHERED_MOST: u64 = 4;

impl Inner {
    /// Bytes up to which growth may go before pages move instead; `u64::MAX`: no such bound.
    pub(super) fn soft_limit(&self, asked: u64) -> u64 {
        let slack = match (self.config.defrag, self.config.slack) {
            (Defrag::Off, _) => return u64::MAX,
            (_, Some(slack)) => slack,
            (Defrag::Eager, None) => EAGER_SLACK,
            (Defrag::OnPressure, None) if asked >= HUGE_BYTES && !self.is_limited() => HUGE_SLACK,
            (Defrag::OnPressure, None) => return u64::MAX,
        };
        above(self.live().saturating_add(asked).max(self.peaks.most_ever()), slack)
    }

    /// Bytes that are to do for a request without a limit, if memory can be brought together: where no more will live than
    /// once did, what is missing lies scattered. `None`: growth is as good.
    ///
    /// What moves away from a block's neighbours leaves ends behind that are locked, so that where much is locked already more
    /// would be.
    pub(super) fn scattered_limit(&self, slow: &Slow, segment: &Segment, wanted: &Wanted) -> Option<u64> {
        let plain = self.config.defrag == Defrag::OnPressure && self.config.slack.is_none() && !self.is_limited();
        let large = wanted.segment < FIRST_POOL && wanted.contiguous == 0 && wanted.bytes < HUGE_BYTES;
        let (live, most) = (self.live(), self.peaks.most_ever());
        let share = wanted.bytes.saturating_mul(SCATTERED_LEAST) >= live;
        let reserved = slow.physical.reserved();
        let often = slow.gathered > reserved / GATHERED_MOST;
        if !(plain && large && share) || often || live.saturating_add(wanted.bytes) > most {
            return None;
        }
        let idle: u64 = self.victims(slow, segment, wanted, 0..0).iter().map(|victim| u64::from(victim.granules)).sum();
        let locked = reserved.saturating_sub(live).saturating_sub(idle * GRANULE);
        (locked <= above(most, LOCKED_MOST) - most).then(|| above(most, SCATTERED_SLACK).max(reserved))
    }

    /// Counts that more exists than `defrag:eager` allows beside a large request, so that handles are made smaller.
    pub(super) fn notice_crowding(&self, slow: &mut Slow, wanted: &Wanted) {
        let eager = self.config.defrag == Defrag::Eager && wanted.segment < FIRST_POOL;
        if eager && policy::is_crowded(slow.physical.reserved() / GRANULE, self.soft_limit(wanted.bytes) / GRANULE) {
            slow.crowded = slow.crowded.saturating_add(1);
        }
    }

    /// Has a limit been set? Then memory up to it is there to be used.
    fn is_limited(&self) -> bool {
        self.config.limit.is_some() || self.limit.load(Relaxed) != self.device_limit
    }
}

/// So many bytes and a share of them.
fn above(bytes: u64, share: f64) -> u64 {
    (bytes as f64 * (1.0 + share)) as u64
}
