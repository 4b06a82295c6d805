//! Blocks on one handle of their own.
#![forbid(unsafe_code)]

use super::inner::{Block, Inner, SegmentGuard, Slow, Wanted};
use super::ladder::Found;
use crate::backend::StreamId;
use crate::config::Defrag;
use crate::error::{Error, Result};
use crate::plan::Supply;
use crate::plan::contiguous::{self, Terms};
use crate::plan::source;
use crate::units::GRANULE;

impl Inner {
    /// Allocates a block that is exactly one handle.
    pub(crate) fn alloc_contiguous(&self, bytes: u64, stream: StreamId) -> Result<Block> {
        // What has no such length is refused by its own, as longer than any block.
        let whole = bytes.max(1).checked_next_multiple_of(GRANULE).unwrap_or(bytes);
        let mut wanted = self.wanted(whole, GRANULE, stream)?;
        (wanted.bytes, wanted.contiguous) = (bytes, (whole / GRANULE) as u32);
        self.alloc_slow(&wanted)
    }

    /// Finds addresses and one handle for them: an idle one of the size where it lies, else as
    /// [`contiguous::supply`] says, with rising licence.
    pub(super) fn plan_contiguous<'a>(
        &'a self,
        slow: &mut Slow,
        mut segment: SegmentGuard<'a>,
        wanted: &Wanted,
        cap: u64,
    ) -> Result<Found<'a>> {
        let granules = wanted.contiguous;
        let claim = if wanted.pool { self.claim(wanted.stream) } else { self.claim_elsewhere(wanted) };
        let idle = source::idle_handles(wanted.segment, &segment, &slow.physical, claim, 0..0);
        let same = idle.iter().filter(|victim| victim.granules == granules);
        if let Some(victim) = same.min_by_key(|victim| (victim.age, victim.home)) {
            return Ok(Found::Plan(segment, contiguous::in_place(victim), Supply::default()));
        }
        let mut placement = contiguous::addresses(&mut segment, granules, claim);
        if placement.is_none() {
            // No addresses for what the limit has no memory for.
            if wanted.bytes > cap {
                return Ok(Found::Nothing);
            }
            drop(segment);
            self.add_addresses(wanted)?;
            segment = self.segment(wanted.segment);
            placement = contiguous::addresses(&mut segment, granules, claim);
        }
        let Some(placement) = placement else {
            return Err(Error::AddressSpace { requested: wanted.bytes, reserved: self.space.bytes() });
        };
        let reserved = slow.physical.reserved();
        let room = |limit: u64| limit.saturating_sub(reserved) / GRANULE;
        let (soft, hard) = (room(self.soft_limit(u64::from(granules) * GRANULE).min(cap)), room(cap));
        let edits = !(self.quiesce && self.capture_under_way());
        let moves = edits && self.config.defrag != Defrag::Off;
        let release = edits && reserved <= cap;
        let victims = self.victims(slow, &segment, wanted, 0..0);
        let passed = self.epochs.passed();
        for (budget, moves, release) in
            [(soft, false, false), (soft, moves, false), (hard, false, false), (hard, moves, release)]
        {
            let terms = Terms { budget, moves, release };
            let at = placement.missing[0].start;
            let cached = slow.physical.cached();
            if let Some(supply) = contiguous::supply(at, granules, cached, &victims, terms, passed) {
                return Ok(Found::Plan(segment, placement, supply));
            }
        }
        Ok(Found::Nothing)
    }
}
