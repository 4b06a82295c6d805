//! Following a plan made ahead: large blocks get the addresses that it chose, as long as requests are those that it
//! foresaw.
//!
//! The plan's addresses are a range of the large segment and its memory is ordinary memory: what lies free there serves
//! others, and moves. A request whose place is not free, and all that the plan did not foresee, go on by the
//! ordinary rules.
#![forbid(unsafe_code)]

use super::execute::Outcome;
use super::inner::{Block, FIRST_POOL, HUGE_BYTES, Inner, LARGE, Slow, Wanted};
use crate::error::{Error, Result};
use crate::plan::ahead::matcher::{Answer, Matcher};
use crate::plan::ahead::{PLANNED_ABOVE, Plan};
use crate::plan::place::{self, Places, Request};
use crate::plan::source::{self, Terms};
use crate::plan::{Fill, Placement, Source, Supply};
use crate::policy;
use crate::segment::nodes::{Kind, NIL};
use crate::segment::spot::Spot;
use crate::segment::{Claim, Segment};
use crate::units::{GRANULE, UNIT, UNITS_PER_GRANULE, granule_ceil, granule_floor};
use parking_lot::Mutex;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A plan that a heap follows.
#[derive(Debug)]
pub(crate) struct Planned {
    /// Taken before any other lock, and never held with one.
    matcher: Mutex<Matcher>,
    /// Units of the plan's addresses.
    top: u32,
    /// It has a step that repeats.
    repeats: bool,
    /// Its addresses, once it was followed; `None`: they are more than the limit, or than is left of the heap's.
    area: OnceLock<Option<Area>>,
    /// Handles that moved to places of the plan.
    moved: AtomicU64,
}

/// A plan that needs more moves than this, and one more for so many blocks, does not fit what the program does (its device
/// lags behind more than was planned for, or much else is live) and is given up.
const MOVES: u64 = 128;
const BLOCKS_PER_MOVE: u64 = 16;

/// Addresses of a plan.
#[derive(Debug, Clone, Copy)]
struct Area {
    /// Units; whole granules.
    start: u32,
    end: u32,
    repeats: bool,
}

impl Planned {
    /// Reads the plan's file.
    pub(super) fn load(path: &Path) -> Result<Self> {
        let plan = Plan::load(path).map_err(|error| Error::Plan { path: path.into(), why: error.to_string() })?;
        let matcher = Matcher::new(plan);
        let (top, repeats) = (matcher.top(), matcher.repeats());
        Ok(Self { matcher: Mutex::new(matcher), top, repeats, area: OnceLock::new(), moved: AtomicU64::new(0) })
    }
}

impl Inner {
    /// Serves a request at its place in the plan, if the plan foresaw it and the place is free.
    pub(super) fn follow(&self, planned: &Planned, wanted: &Wanted) -> Option<Block> {
        if wanted.bytes <= PLANNED_ABOVE || wanted.pool || wanted.align != 1 || wanted.segment >= FIRST_POOL {
            return None;
        }
        let most = MOVES + self.counters.planned.load(Relaxed) / BLOCKS_PER_MOVE;
        if planned.moved.load(Relaxed) > most {
            return None;
        }
        let answer = planned.matcher.lock().request(wanted.len, wanted.stream.slot);
        // Huge blocks too: the plan knows where they leave room.
        let wanted = Wanted { segment: LARGE, ..*wanted };
        match answer {
            Answer::At(offset) => {
                let area = (*planned.area.get_or_init(|| self.plan_area(planned)))?;
                let served = self.serve_at(planned, &wanted, area.start + offset, area);
                let counter = if served.is_some() { &self.counters.planned } else { &self.counters.planned_elsewhere };
                counter.fetch_add(1, Relaxed);
                served.or_else(|| self.serve_apart(&wanted, area))
            }
            Answer::Apart => {
                let area = (*planned.area.get()?)?;
                self.serve_apart(&wanted, area)
            }
            Answer::Anywhere => None,
        }
    }

    /// Serves a request at `start`, if it may have that.
    fn serve_at(&self, planned: &Planned, wanted: &Wanted, start: u32, area: Area) -> Option<Block> {
        let range = start..start + wanted.len;
        {
            let slot = self.slot(LARGE);
            let mut segment = slot.segment.lock();
            segment.merge_last();
            match segment.spot(&range, self.claim(wanted.stream)) {
                Spot::Free(first) => {
                    let live = segment.take_spot(first, range);
                    return Some(self.hand_out(slot, &mut segment, live, wanted));
                }
                // That may have passed since anybody asked.
                Spot::Missing(_) | Spot::Unproven => {}
                Spot::Taken => return None,
            }
        }
        self.grow(wanted, |slow, segment, claim| {
            let (Spot::Free(first) | Spot::Missing(first)) = segment.spot(&range, claim) else { return None };
            // That is free for the stream, whatever the stamps of the whole nodes say.
            let request = Request { len: wanted.len, align: 1, claim: Claim { horizon: u32::MAX, ..claim } };
            let placement = place::exactly(segment, first, range.start, request)?;
            if placement.missing.is_empty() {
                return Some((placement, Supply::default()));
            }
            if let Some(found) = self.whole_handles(slow, segment, wanted, &placement, area) {
                return Some(found);
            }
            let found = self.memory_for(slow, segment, wanted, slow.limit, std::iter::once(placement))?;
            let moves = found.1.fills.iter().filter(|fill| matches!(fill.source, Source::Move(_)));
            planned.moved.fetch_add(moves.count() as u64, Relaxed);
            Some(found)
        })
    }

    /// Serves a request beside the plan's addresses, whose free memory is about to be wanted: from free memory there, or
    /// from new memory where that may be created.
    fn serve_apart(&self, wanted: &Wanted, area: Area) -> Option<Block> {
        let claim = self.claim(wanted.stream);
        {
            let slot = self.slot(LARGE);
            let mut segment = slot.segment.lock();
            segment.merge_last();
            if let Some(found) = segment.find_apart(wanted.len, claim, &(area.start..area.end)) {
                let live = segment.take(found, wanted.len, 1, wanted.stream.slot);
                return Some(self.hand_out(slot, &mut segment, live, wanted));
            }
        }
        self.grow(wanted, |slow, segment, claim| {
            let places = Places::of(segment, Request { len: wanted.len, align: 1, claim });
            let apart = |place: &Placement| place.claim.end <= area.start || place.claim.start >= area.end;
            let placement = places.iter().find(apart)?;
            let terms = self.terms(slow, wanted, slow.limit);
            let terms = Terms { budget: self.room(slow, wanted), moves: false, rechunk: false, stale: None, ..terms };
            let supply = source::supply(&placement, slow.physical.cached(), &[], terms)?;
            Some((placement, supply))
        })
    }

    /// Chooses the plan's addresses: the end of the longest run that has no memory, away from where others grow.
    fn plan_area(&self, planned: &Planned) -> Option<Area> {
        let len = granule_ceil(planned.top).checked_mul(UNITS_PER_GRANULE)?;
        if u64::from(len) * UNIT > self.limit.load(Relaxed) {
            self.space.note("the plan is not followed: it takes more memory than the limit".into());
            return None;
        }
        let area = |start: u32| Area { start, end: start + len, repeats: planned.repeats };
        let found = self.segment(LARGE).last_unmapped(len);
        if found.is_some() {
            return found.map(area);
        }
        let bytes = u64::from(len) * UNIT;
        let _slow = self.slow.lock();
        self.add_span(LARGE, bytes, bytes).ok()?;
        self.segment(LARGE).last_unmapped(len).map(area)
    }

    /// Granules that may be created before anything moves. What a plan takes is known: only a slack that was set is in
    /// the way.
    fn room(&self, slow: &Slow, wanted: &Wanted) -> u64 {
        let most = slow.limit.min(self.soft_limit(wanted.bytes.min(HUGE_BYTES - 1)));
        most.saturating_sub(slow.physical.reserved()) / GRANULE
    }

    /// Puts memory behind the addresses that `choose` chooses, and the block there. `None`: the ordinary rules go on.
    fn grow(
        &self,
        wanted: &Wanted,
        choose: impl FnOnce(&Slow, &mut Segment, Claim) -> Option<(Placement, Supply)>,
    ) -> Option<Block> {
        let mut wanted = *wanted;
        self.notice_capture(&mut wanted);
        let backend = self.driver.backend();
        if wanted.proof {
            return None;
        }
        // Off the hot path the driver is asked who the stream is, where it was not; the ordinary path sees to what it says.
        let id = wanted.stream.id;
        if backend.known_stream_key(id).is_some_and(|known| backend.stream_key(id) != Ok(known)) {
            return None;
        }
        let mut slow = self.slow.lock();
        if self.shut.load(Relaxed) {
            return None;
        }
        self.counters.slow_allocs.fetch_add(1, Relaxed);
        self.housekeep(&mut slow);
        self.obey_limit(&mut slow);
        if self.quiesce && !self.capture_under_way() {
            self.quiesce_device(&mut slow).ok()?;
        }
        let mut segment = self.segment(LARGE);
        let (placement, supply) = choose(&slow, &mut segment, self.claim(wanted.stream))?;
        match self.execute(&mut slow, segment, &wanted, &placement, &supply) {
            Outcome::Done(block) => {
                self.shrink(&mut slow);
                Some(block)
            }
            Outcome::Stale | Outcome::Failed(_) => None,
        }
    }

    /// New handles that lie on a grid of the plan's addresses, as large as is free of memory there. `None` when they
    /// may not all be created.
    fn whole_handles(
        &self,
        slow: &Slow,
        segment: &Segment,
        wanted: &Wanted,
        placement: &Placement,
        area: Area,
    ) -> Option<(Placement, Supply)> {
        let (first, end) = (granule_floor(area.start), granule_floor(area.end));
        let handle_max = u32::try_from(self.config.handle_max / GRANULE).unwrap_or(u32::MAX);
        let headroom = slow.limit.saturating_sub(slow.physical.reserved()) / GRANULE;
        let (granules, limit) = (u64::from(end - first), slow.limit / GRANULE);
        let size = policy::planned_handle_size(granules, area.repeats, limit, headroom, handle_max);
        let (mut placement, mut supply) = (placement.clone(), Supply::default());
        let mut id = placement.first;
        while id != NIL && segment.nodes[id].start < placement.block.end {
            let node = &segment.nodes[id];
            id = node.next;
            if node.kind != Kind::Unmapped {
                continue;
            }
            let (low, high) = (granule_floor(node.start), granule_floor(node.end()));
            let wants = low.max(granule_floor(placement.block.start))..high.min(granule_ceil(placement.block.end));
            let grid = |granule: u32| first + (granule - first) / size * size;
            let mut at = low.max(grid(wants.start));
            while at < wants.end {
                let stop = (grid(at) + size).min(high).min(end);
                supply.fills.push(Fill { at, granules: stop - at, source: Source::Create });
                at = stop;
            }
        }
        let granules: u64 = supply.fills.iter().map(|fill| u64::from(fill.granules)).sum();
        if granules > self.room(slow, wanted) {
            return None;
        }
        let covered = |edge: u32| edge * UNITS_PER_GRANULE;
        if let (Some(front), Some(back)) = (supply.fills.first(), supply.fills.last()) {
            placement.claim.start = placement.claim.start.min(covered(front.at));
            placement.claim.end = placement.claim.end.max(covered(back.at + back.granules));
        }
        Some((placement, supply))
    }
}
