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
use crate::plan::ahead::matcher::{Answer, Matcher, Standing};
use crate::plan::ahead::{PLANNED_ABOVE, Plan};
use crate::plan::place::{self, Places, Request};
use crate::plan::source::{self, Terms};
use crate::plan::{Fill, Placement, Source, Supply};
use crate::policy;
use crate::segment::nodes::{Kind, NIL};
use crate::segment::spot::Spot;
use crate::segment::{Claim, Segment};
use crate::units::{GRANULE, UNIT, UNITS_PER_GRANULE, granule_ceil, granule_floor, human};
use parking_lot::Mutex;
use std::fmt;
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
    /// Its addresses, once it was followed, or why it has none.
    area: OnceLock<Result<Area, PlanState>>,
    /// Handles that moved to places of the plan.
    moved: AtomicU64,
    /// What was said of it: [`PlanState::code`] of what it was set in vain for, 0 at first.
    told: AtomicU64,
}

/// What became of the plan of a heap (`plan` in `XSEG_CONF`). Its text says why a plan is not followed, and what to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum PlanState {
    /// No plan was set.
    #[default]
    None,
    /// No request of a size that is planned came yet.
    Waiting,
    /// Requests are those that it foresaw, or were until a few requests ago.
    Followed,
    /// It was followed, and came to its end: it planned a whole run.
    Ended,
    /// It was followed until requests came that it did not foresee. It is taken up again when they are those that it foresaw.
    Left,
    /// None of the requests so far was one that it foresaw.
    Unmatched {
        /// Requests of a size that is planned.
        requests: u64,
    },
    /// It takes more memory than the limit.
    TooLarge {
        /// Bytes that it takes.
        bytes: u64,
        /// The limit when it was to be followed, in bytes.
        limit: u64,
    },
    /// The heap has no range of addresses left that is long enough for it.
    NoAddresses {
        /// Bytes that it takes.
        bytes: u64,
    },
    /// Its places needed too many moves: it does not fit what the program does.
    GivenUp {
        /// Handles that were moved to its places.
        moves: u64,
    },
}

impl PlanState {
    /// Is there a plan that is not, and that nothing said so far will make, followed?
    #[must_use]
    pub fn is_in_vain(self) -> bool {
        matches!(self, Self::Unmatched { .. } | Self::TooLarge { .. } | Self::NoAddresses { .. } | Self::GivenUp { .. })
    }

    /// A number for it, for programs in other languages: as the variants are listed, from 0.
    #[must_use]
    pub fn code(self) -> u64 {
        match self {
            Self::None => 0,
            Self::Waiting => 1,
            Self::Followed => 2,
            Self::Ended => 3,
            Self::Left => 4,
            Self::Unmatched { .. } => 5,
            Self::TooLarge { .. } => 6,
            Self::NoAddresses { .. } => 7,
            Self::GivenUp { .. } => 8,
        }
    }
}

#[cfg(feature = "cli")]
impl serde::Serialize for PlanState {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        match self {
            Self::None => serializer.serialize_none(),
            other => serializer.collect_str(other),
        }
    }
}

impl fmt::Display for PlanState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("no plan is set"),
            Self::Waiting => f.write_str("no request of more than 1 MiB came yet"),
            Self::Followed => f.write_str("the plan is followed"),
            Self::Ended => f.write_str("the plan was followed to its end"),
            Self::Left => f.write_str("the plan was left: requests came that it did not foresee"),
            Self::Unmatched { requests } => write!(
                f,
                "the plan is not followed: it foresaw none of {requests} requests of more than 1 MiB; make it from a run of this \
                 program with the same settings"
            ),
            Self::TooLarge { bytes, limit } => write!(
                f,
                "the plan is not followed: it takes {} and the limit is {}; raise `limit`",
                human(*bytes),
                human(*limit)
            ),
            Self::NoAddresses { bytes } => write!(
                f,
                "the plan is not followed: no range of {} is left of the heap's addresses; raise `reserve`",
                human(*bytes)
            ),
            Self::GivenUp { moves } => write!(
                f,
                "the plan was given up after {moves} moves of memory to its places: more is live than was recorded, or the \
                 device lags further behind than `xseg plan --apart` says; make it anew"
            ),
        }
    }
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
        Ok(Self {
            matcher: Mutex::new(matcher),
            top,
            repeats,
            area: OnceLock::new(),
            moved: AtomicU64::new(0),
            told: AtomicU64::new(0),
        })
    }

    /// Is it given up, when so many blocks got their places?
    fn is_given_up(&self, blocks: u64) -> bool {
        self.moved.load(Relaxed) > MOVES + blocks / BLOCKS_PER_MOVE
    }
}

impl Inner {
    /// Serves a request at its place in the plan, if the plan foresaw it and the place is free.
    pub(super) fn follow(&self, planned: &Planned, wanted: &Wanted) -> Option<Block> {
        if wanted.bytes <= PLANNED_ABOVE || wanted.pool || wanted.align != 1 || wanted.segment >= FIRST_POOL {
            return None;
        }
        if planned.is_given_up(self.counters.planned.load(Relaxed)) {
            self.tell_plan(planned);
            return None;
        }
        let answer = planned.matcher.lock().request(wanted.len, wanted.stream.slot);
        // Huge blocks too: the plan knows where they leave room.
        let wanted = Wanted { segment: LARGE, ..*wanted };
        match answer {
            Answer::At(offset) => {
                let area = match planned.area.get_or_init(|| self.plan_area(planned)) {
                    Ok(area) => *area,
                    Err(_) => {
                        self.tell_plan(planned);
                        return None;
                    }
                };
                let served = self.serve_at(planned, &wanted, area.start + offset, area);
                let counter = if served.is_some() { &self.counters.planned } else { &self.counters.planned_elsewhere };
                counter.fetch_add(1, Relaxed);
                served.or_else(|| self.serve_apart(&wanted, area))
            }
            Answer::Apart => {
                let area = planned.area.get()?.ok()?;
                self.serve_apart(&wanted, area)
            }
            Answer::Anywhere => {
                if planned.area.get().is_none() && planned.told.load(Relaxed) == 0 {
                    self.tell_plan(planned);
                }
                None
            }
        }
    }

    /// What became of the plan so far.
    pub(super) fn plan_state(&self) -> PlanState {
        let Some(planned) = &self.planned else { return PlanState::None };
        let placed = self.counters.planned.load(Relaxed);
        let moves = planned.moved.load(Relaxed);
        match planned.area.get() {
            Some(Err(why)) => *why,
            _ if planned.is_given_up(placed) => PlanState::GivenUp { moves },
            area => match planned.matcher.lock().standing() {
                // Before the first that was foreseen and has a place there are no addresses.
                Standing { requests: 0, .. } => PlanState::Waiting,
                Standing { requests, .. } if area.is_none() => PlanState::Unmatched { requests },
                Standing { ended: true, .. } => PlanState::Ended,
                Standing { left: true, .. } => PlanState::Left,
                Standing { .. } => PlanState::Followed,
            },
        }
    }

    /// Says that a plan is not followed, once for each reason.
    #[cold]
    fn tell_plan(&self, planned: &Planned) {
        let state = self.plan_state();
        if state.is_in_vain() && planned.told.swap(state.code(), Relaxed) != state.code() {
            tracing::warn!("{state}");
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
            let found = self.memory_for(
                slow,
                segment,
                wanted,
                slow.limit,
                self.soft_limit(wanted.bytes),
                std::iter::once(placement),
            )?;
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
    fn plan_area(&self, planned: &Planned) -> Result<Area, PlanState> {
        let bytes = u64::from(granule_ceil(planned.top)) * GRANULE;
        let none = PlanState::NoAddresses { bytes };
        let len = u32::try_from(bytes / UNIT).map_err(|_| none)?;
        let limit = self.limit.load(Relaxed);
        if bytes > limit {
            return Err(PlanState::TooLarge { bytes, limit });
        }
        let area = |start: u32| Area { start, end: start + len, repeats: planned.repeats };
        if let Some(found) = self.segment(LARGE).last_unmapped(len) {
            return Ok(area(found));
        }
        let _slow = self.slow.lock();
        self.add_span(LARGE, bytes, bytes).map_err(|_| none)?;
        self.segment(LARGE).last_unmapped(len).map(area).ok_or(none)
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
