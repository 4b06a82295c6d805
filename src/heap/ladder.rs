//! The ladder for a request that no fitting free block serves (rule 7 of the brief): another stream's
//! block in place → grow → move idle handles → re-chunk → GPU-side wait → out-of-memory callbacks →
//! host wait → error.
#![forbid(unsafe_code)]

use super::execute::Outcome;
use super::inner::{Block, FIRST_POOL, Inner, LARGE, SegmentGuard, Slow, Wanted};
use crate::config::{CrossStream, Defrag, Growth, Shrink};
use crate::error::{DriverError, Error, Result};
use crate::plan::place::{Places, Request};
use crate::plan::source::{self, Terms};
use crate::plan::{Placement, Supply, Victim};
use crate::policy;
use crate::segment::Segment;
use crate::units::{GIB, GRANULE, UNIT, UNITS_PER_GRANULE, granule_ceil, granule_floor};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// Plans that other threads made stale before the request gives up planning.
const REPLANS: u32 = 64;
/// One slice of a host wait; between slices everything is looked at anew.
const SLICE: Duration = Duration::from_micros(200);
/// Rounds of a host wait in which a clock may stand still (a driver that refuses every wait).
const STUCK: u32 = 1000;
/// Refusals one after the other after which a host wait gives up: the device, and not one call, has failed.
const REFUSALS: u32 = 8;
/// Places that are tried before there is none.
pub(super) const PLACES: usize = 64;
/// Idle memory is stale when so many large blocks were freed since: it moves before memory is created.
const STALE_FREES: u64 = 25;

/// How much memory a plan may create.
#[derive(Debug, Clone, Copy)]
enum Budget {
    /// What the slack allows.
    Soft,
    /// No more than is missing when all idle memory has moved.
    Least,
    /// What the limit allows.
    Hard,
}

/// What planning found.
pub(super) enum Found<'a> {
    /// Addresses in the locked segment, and memory for them.
    Plan(SegmentGuard<'a>, Placement, Supply),
    /// Not enough memory that may be used now.
    Nothing,
}

/// What a rung of the ladder found.
enum Rung {
    Served(Block),
    Nothing(Option<DriverError>),
}

impl Inner {
    /// Serves a request that has no fitting free block, or says why not.
    pub(crate) fn alloc_slow(&self, wanted: &Wanted) -> Result<Block> {
        self.ours()?;
        self.counters.slow_allocs.fetch_add(1, Relaxed);
        let clock = self.driver.backend().now();
        let mut waited = false;
        let mut gpu_waited = false;
        // A copy, since a wait on the device widens what its stream may take.
        let mut wanted = *wanted;
        self.notice_capture(&mut wanted);
        // Live bytes when clients were last asked to free some; they are asked again below that.
        let mut asked = u64::MAX;
        let (mut last, mut stuck, mut refusals) = (Duration::ZERO, 0u32, 0u32);
        loop {
            let refusal = {
                let mut slow = self.slow.lock();
                if self.shut.load(Relaxed) {
                    return Err(Error::ShutDown);
                }
                self.housekeep(&mut slow);
                self.obey_limit(&mut slow);
                self.notice_crowding(&mut slow, &wanted);
                match self.obtain(&mut slow, &wanted)? {
                    Rung::Served(block) => {
                        self.shrink(&mut slow);
                        return Ok(block);
                    }
                    Rung::Nothing(refusal) => refusal,
                }
            };
            if self.config.cross_stream == CrossStream::Wait && !gpu_waited {
                gpu_waited = true;
                if let Some(epoch) = self.gpu_wait(&wanted) {
                    wanted.stream.waited = epoch;
                    continue;
                }
            }
            // Where what they freed is room enough the device may not be done with it yet.
            if (asked == u64::MAX || self.is_full_for(wanted.bytes)) && self.ask_clients(wanted.bytes, &mut asked) {
                continue;
            }
            // The backend's clock alone, so that a run on a virtual clock repeats whatever the machine does.
            let elapsed = self.driver.backend().now().saturating_sub(clock);
            stuck = if elapsed == last { stuck + 1 } else { 0 };
            last = elapsed;
            let waiting = !self.is_full_for(wanted.bytes) && stuck < STUCK && elapsed < self.config.wait_limit;
            let progress = if waiting { self.wait_for_progress(SLICE.max(elapsed / 8)) } else { Ok(false) };
            refusals = if progress.is_err() { refusals + 1 } else { 0 };
            if let Err(error) = &progress
                && refusals >= REFUSALS
            {
                return Err(error.clone().into());
            }
            if progress.unwrap_or(true) {
                if !waited {
                    waited = true;
                    self.counters.host_waits.fetch_add(1, Relaxed);
                }
                continue;
            }
            // The room may be no place: more of it may be.
            if self.ask_clients(wanted.bytes, &mut asked) {
                continue;
            }
            self.counters.ooms.fetch_add(1, Relaxed);
            let error = self.out_of_memory(wanted.bytes, wanted.stream, refusal);
            if self.config.shrink == Shrink::Oom {
                self.trim_to(&mut self.slow.lock(), self.config.keep);
            }
            return Err(error);
        }
    }

    /// Looks after what the hot path left: closed epochs, pending frees, zombies.
    pub(crate) fn housekeep(&self, slow: &mut Slow) {
        let backend = self.driver.backend();
        // An event now costs 0.2 us, and makes what was freed so far provable as early as can be.
        self.close_epoch();
        self.epochs.poll(backend);
        self.end_exports(slow);
        self.settle_pending();
        self.end_joins(slow);
        if !self.quiesce {
            self.reap(slow);
        }
        self.clear_pools(slow);
    }

    /// Waits for the device, where page tables may not be edited beside running kernels. Only then is
    /// the driver lock held while waiting: nobody may edit meanwhile.
    pub(crate) fn quiesce_device(&self, slow: &mut Slow) -> Result<()> {
        self.close_epoch();
        self.driver.backend().quiesce()?;
        self.epochs.poll(self.driver.backend());
        self.reap(slow);
        Ok(())
    }

    /// Rungs one to four, with the driver lock held.
    fn obtain(&self, slow: &mut Slow, wanted: &Wanted) -> Result<Rung> {
        let mut refusal: Option<DriverError> = None;
        // Memory that the driver refuses to create is not asked for again for this request.
        let mut cap = slow.limit;
        for _ in 0..REPLANS {
            let mut segment = self.segment(wanted.segment);
            if wanted.contiguous == 0
                && let Some(block) = self.take_fitting(self.slot(wanted.segment), &mut segment, wanted)
            {
                return Ok(Rung::Served(block));
            }
            if wanted.contiguous == 0 {
                drop(segment);
                if let Some(block) = self.take_elsewhere(wanted) {
                    return Ok(Rung::Served(block));
                }
                segment = self.segment(wanted.segment);
                // Memory that has passed is used where it lies before any is created or moved.
                if segment.part_passed(wanted.len, self.claim(wanted.stream))
                    && let Some(block) = self.take_fitting(self.slot(wanted.segment), &mut segment, wanted)
                {
                    return Ok(Rung::Served(block));
                }
            }
            if self.quiesce && !self.capture_under_way() {
                drop(segment);
                self.quiesce_device(slow)?;
                segment = self.segment(wanted.segment);
            }
            let (found, gathers) = self.plan_frugally(slow, segment, wanted, cap)?;
            let (segment, placement, supply) = match found {
                Found::Plan(segment, placement, supply) => (segment, placement, supply),
                // A handle behind free blocks of several streams can move once they are one block.
                Found::Nothing if self.merge_passed() => continue,
                Found::Nothing => match self.plan_joined(slow, self.segment(wanted.segment), wanted, cap)? {
                    Found::Plan(segment, placement, supply) => (segment, placement, supply),
                    Found::Nothing => return Ok(Rung::Nothing(refusal)),
                },
            };
            match self.execute(slow, segment, wanted, &placement, &supply) {
                Outcome::Done(block) => {
                    // A plan that became stale, or was refused, moved nothing that counts.
                    if gathers {
                        slow.gathered = slow.gathered.saturating_add(supply.touched() * GRANULE);
                    }
                    return Ok(Rung::Served(block));
                }
                Outcome::Stale => {}
                Outcome::Failed(error) if error.out_of_memory => {
                    cap = slow.physical.reserved();
                    refusal = Some(error);
                }
                Outcome::Failed(error) => return Err(error.into()),
            }
        }
        Ok(Rung::Nothing(refusal))
    }

    /// Finds addresses and memory, where memory only lies scattered without making any beyond a little: true, what the plan moves
    /// counts against the bound of that rule.
    fn plan_frugally<'a>(
        &'a self,
        slow: &mut Slow,
        segment: SegmentGuard<'a>,
        wanted: &Wanted,
        cap: u64,
    ) -> Result<(Found<'a>, bool)> {
        let Some(most) = self.scattered_limit(slow, &segment, wanted).filter(|most| *most < cap) else {
            return Ok((self.plan(slow, segment, wanted, cap, self.soft_limit(wanted.bytes))?, false));
        };
        let mut found = self.plan(slow, segment, wanted, most, most)?;
        if matches!(found, Found::Nothing) {
            found = self.plan_joined(slow, self.segment(wanted.segment), wanted, most)?;
        }
        if matches!(found, Found::Nothing) {
            found = self.plan(slow, self.segment(wanted.segment), wanted, cap, most)?;
        }
        let gathers = matches!(found, Found::Plan(..));
        Ok((found, gathers))
    }

    /// Finds addresses and memory; `cap` bytes may exist, and more than `soft` only where moving does not serve.
    fn plan<'a>(
        &'a self,
        slow: &mut Slow,
        mut segment: SegmentGuard<'a>,
        wanted: &Wanted,
        cap: u64,
        soft: u64,
    ) -> Result<Found<'a>> {
        if wanted.contiguous > 0 {
            return self.plan_contiguous(slow, segment, wanted, cap);
        }
        let claim = self.claim(wanted.stream);
        let request = Request { len: wanted.len, align: wanted.align, claim };
        if wanted.bytes > cap {
            return Ok(Found::Nothing);
        }
        let mut places = Places::of(&mut segment, request);
        if places.is_empty() {
            drop(segment);
            self.add_addresses(wanted)?;
            segment = self.segment(wanted.segment);
            places = Places::of(&mut segment, request);
        }
        if places.is_empty() {
            return Err(Error::AddressSpace { requested: wanted.bytes, reserved: self.space.bytes() });
        }
        match self.memory_for(slow, &segment, wanted, cap, soft, places.iter().take(PLACES)) {
            Some((placement, supply)) => Ok(Found::Plan(segment, placement, supply)),
            None => Ok(Found::Nothing),
        }
    }

    /// The first of these places that memory can be had for, with the memory; `cap` and `soft` as for [`Inner::plan`].
    pub(super) fn memory_for(
        &self,
        slow: &Slow,
        segment: &Segment,
        wanted: &Wanted,
        cap: u64,
        soft: u64,
        places: impl Iterator<Item = Placement> + Clone,
    ) -> Option<(Placement, Supply)> {
        let reserved = slow.physical.reserved();
        let hard = (cap.saturating_sub(reserved)) / GRANULE;
        let soft = (soft.saturating_sub(reserved) / GRANULE).min(hard);
        let terms = self.terms(slow, wanted, cap);
        let idle = self.victims(slow, segment, wanted, 0..0);
        let budgets: &[Budget] =
            if soft < hard { &[Budget::Soft, Budget::Least, Budget::Hard] } else { &[Budget::Hard] };
        for budget in budgets {
            for placement in places.clone() {
                let keep = granule_floor(placement.claim.start)..granule_ceil(placement.claim.end);
                let apart = |victim: &&Victim| victim.home >= keep.end || victim.home + victim.granules <= keep.start;
                let victims: Vec<Victim> = idle.iter().filter(apart).copied().collect();
                let budget = match budget {
                    Budget::Soft => soft,
                    Budget::Least => {
                        let idle: u64 = victims.iter().map(|victim| u64::from(victim.granules)).sum();
                        placement.missing().saturating_sub(idle).max(soft).min(hard)
                    }
                    Budget::Hard => hard,
                };
                let terms = Terms { budget, ..terms };
                if let Some(supply) = source::supply(&placement, slow.physical.cached(), &victims, terms) {
                    return Some((placement, supply));
                }
            }
        }
        None
    }

    /// What planning for a request may do while `cap` bytes may exist.
    pub(super) fn terms(&self, slow: &Slow, wanted: &Wanted, cap: u64) -> Terms {
        let reserved = slow.physical.reserved();
        let hard = (cap.saturating_sub(reserved)) / GRANULE;
        let soft = (self.soft_limit(wanted.bytes).saturating_sub(reserved) / GRANULE).min(hard);
        // A wait for the device invalidates captures; growth alone was made safe when the capture began.
        let grow_only = self.quiesce && self.capture_under_way();
        let large = wanted.segment < FIRST_POOL;
        Terms {
            budget: hard,
            // By what the limit leaves, whatever this plan may make of it.
            handle_max: self.handle_size(slow, soft, slow.limit.saturating_sub(reserved) / GRANULE, wanted),
            moves: self.config.defrag != Defrag::Off && !grow_only,
            // Above a limit that was lowered, nothing is created for what is released.
            rechunk: reserved <= cap && !grow_only,
            step: self.growth_step(reserved, hard, large),
            passed: self.epochs.passed(),
            stale: large.then(|| self.history.now().saturating_sub(STALE_FREES)),
            shared: self.streams.are_many(),
        }
    }

    /// Largest handle to create for a request, in granules, while `soft` or (with moves) `hard` may be created.
    fn handle_size(&self, slow: &Slow, soft: u64, hard: u64, wanted: &Wanted) -> u32 {
        let most = u32::try_from(self.config.handle_max / GRANULE).unwrap_or(u32::MAX).max(1);
        if wanted.segment >= FIRST_POOL {
            // A small pool's granules come back one by one.
            return if wanted.bytes <= self.config.small_limit { 1 } else { most };
        }
        let (most, headroom) = match (self.config.defrag, self.config.slack) {
            (Defrag::Eager, _) => (policy::eager_handle_size(slow.crowded, most), hard),
            (Defrag::OnPressure, Some(_)) => (most, soft),
            _ => (most, hard),
        };
        let (asked, limit) = (wanted.bytes / GRANULE, slow.limit / GRANULE);
        policy::handle_size(self.config.handles, asked, limit, headroom, most, self.history.churn())
    }

    /// Granules that a growth step creates at least.
    fn growth_step(&self, reserved: u64, headroom: u64, large: bool) -> u32 {
        let granules = match self.config.growth {
            Growth::Exact => 1,
            Growth::Step(bytes) => bytes / GRANULE,
            Growth::Geometric(factor) => (reserved as f64 * (factor - 1.0)) as u64 / GRANULE,
        };
        if large { policy::growth_step(granules, headroom) } else { 1 }
    }

    /// Idle handles of all segments that the request may move.
    pub(super) fn victims(
        &self,
        slow: &Slow,
        own: &Segment,
        wanted: &Wanted,
        keep: std::ops::Range<u32>,
    ) -> Vec<Victim> {
        let claim = self.claim_elsewhere(wanted);
        let mut found = source::victims(wanted.segment, own, &slow.physical, claim, keep);
        for index in self.segment_indices().filter(|index| *index != wanted.segment) {
            // Never two segments' locks at once by waiting: a busy segment is left out.
            if let Some(other) = self.try_segment(index) {
                found.extend(source::victims(index, &other, &slow.physical, claim, 0..0));
            }
        }
        found
    }

    /// Gives the request's segment more addresses.
    pub(super) fn add_addresses(&self, wanted: &Wanted) -> Result<()> {
        self.add_span(wanted.segment, wanted.bytes, u64::from(wanted.len) * UNIT + GRANULE)
    }

    /// Gives a segment at least `bytes` more addresses, for a request of `requested`.
    pub(super) fn add_span(&self, segment: u16, requested: u64, bytes: u64) -> Result<()> {
        let take = || {
            if segment < FIRST_POOL {
                self.space.take_low(segment, bytes)
            } else {
                self.space.take_high(segment, bytes, requested <= self.config.small_limit)
            }
        };
        let span = match take() {
            Some(span) => span,
            None => {
                let size = self.reserve_bytes();
                let least = bytes.checked_mul(2).ok_or(Error::AddressSpace { requested, reserved: size })?;
                let full = Error::AddressSpace { requested, reserved: self.space.bytes() };
                self.space.reserve(&self.driver, size, least).map_err(|_| full)?;
                take().ok_or(Error::AddressSpace { requested, reserved: self.space.bytes() })?
            }
        };
        self.segment(segment).add_span(span.0, span.1);
        Ok(())
    }

    /// Creates and maps memory at start, as free memory of the large segment.
    pub(crate) fn warm_up(&self, bytes: u64) -> Result<()> {
        let stream = self.streams.get(0, crate::backend::StreamId(0))?;
        let mut left = bytes.next_multiple_of(GRANULE);
        let mut blocks = Vec::new();
        while left > 0 {
            // Blocks side by side merge into one free range when they are freed.
            let part = left.min(GIB);
            let len = (part / UNIT) as u32;
            let (pool, proof, contiguous) = (false, false, 0);
            let wanted =
                Wanted { bytes: part, len, align: UNITS_PER_GRANULE, segment: LARGE, stream, pool, proof, contiguous };
            match self.alloc_slow(&wanted) {
                Ok(block) => blocks.push(block),
                Err(error) => {
                    blocks.iter().try_for_each(|block: &Block| self.free(block.address))?;
                    return Err(error);
                }
            }
            left -= part;
        }
        for block in blocks {
            self.free_as_new(block.address)?;
        }
        self.reset_peaks();
        Ok(())
    }
}
