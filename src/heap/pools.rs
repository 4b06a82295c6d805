//! Capture pools: memory that belongs to captured graphs, which have its addresses baked in.
//!
//! A pool has two segments of its own, a large and a small one, marked private: nothing in them is ever a
//! victim of moves, re-chunking, trims or limits, and no request from outside finds them. Frees come back
//! to the segment that the address lies in, so to the pool. A request is routed here while a recording
//! whose filter takes its stream is open; without one, the hot path pays one relaxed load.
//!
//! Lock order: driver lock → a segment's lock → `state`, `recordings` and `seen`, which are innermost.
#![forbid(unsafe_code)]

use super::captures::{PoolId, StreamFilter};
use super::inner::{Inner, Slow, Wanted};
use super::streams::Stream;
use crate::backend::StreamId;
use crate::error::{Error, Result};
use crate::plan::{Victim, source};
use crate::segment::{Claim, Stamp};
use parking_lot::{Mutex, RwLock};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

/// A pool's segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pair {
    pub(crate) large: u16,
    pub(crate) small: u16,
}

impl Pair {
    const fn both(self) -> [u16; 2] {
        [self.large, self.small]
    }
}

#[derive(Debug)]
struct Pool {
    id: PoolId,
    uses: u32,
    segments: Pair,
}

/// Allocations of some streams go to a pool.
#[derive(Debug, Clone)]
struct Recording {
    id: PoolId,
    segments: Pair,
    filter: StreamFilter,
    /// Slots of the streams that `filter` lists.
    slots: Vec<u16>,
    /// A graph is captured meanwhile.
    capture: bool,
}

impl Recording {
    fn takes(&self, stream: &Stream) -> bool {
        match &self.filter {
            StreamFilter::All => true,
            StreamFilter::Streams(_) => self.slots.contains(&stream.slot),
            StreamFilter::Matching(takes) => takes(stream.id),
        }
    }
}

#[derive(Debug, Default)]
struct State {
    pools: Vec<Pool>,
    /// Segments of pools that are gone, for the next pool; their memory is ordinary.
    spare: Vec<Pair>,
}

/// Added to the number of open recordings when the heap is shut down, so that the hot path asks one thing.
const SHUT: u32 = 1 << 16;

/// Captures that heaps on GPUs have announced, by device.
static CAPTURES: [AtomicU32; 64] = [const { AtomicU32::new(0) }; 64];

fn captures_of(device: u32) -> Option<&'static AtomicU32> {
    CAPTURES.get(usize::try_from(device).ok()?)
}

/// Has any heap of this GPU announced a capture?
pub(super) fn captures_on(device: u32) -> bool {
    captures_of(device).is_some_and(|captures| captures.load(Relaxed) > 0)
}

/// See the module's text.
#[derive(Debug, Default)]
pub(crate) struct Pools {
    /// The heap's GPU.
    gpu: Option<u32>,
    /// Open recordings, and [`SHUT`].
    active: AtomicU32,
    /// Open recordings that go with a capture.
    captures: AtomicU32,
    recordings: RwLock<Arc<Vec<Recording>>>,
    state: Mutex<State>,
    /// There are pools without uses, or spare segments with memory.
    to_clear: AtomicBool,
    /// Streams that were seen to capture without an announcement, or whose announced end may be early.
    seen: Mutex<Vec<StreamId>>,
    any_seen: AtomicBool,
    /// Held for reading from the look for captures to the record of an event over all streams, for writing
    /// while a capture is announced: no capture begins in between.
    pub(crate) gate: RwLock<()>,
}

impl Pools {
    pub(crate) fn of(gpu: Option<u32>) -> Self {
        Self { gpu, ..Self::default() }
    }

    /// The segments of the pool that a request on `stream` goes to.
    #[inline]
    pub(crate) fn route(&self, stream: &Stream) -> Option<Pair> {
        if self.active.load(Relaxed) == 0 {
            return None;
        }
        // A copy, so that the client's function is asked without a lock.
        let recordings = Arc::clone(&self.recordings.read());
        recordings.iter().find(|recording| recording.takes(stream)).map(|recording| recording.segments)
    }

    /// Do requests of all streams go to their own segments, as they do most of the time?
    #[inline]
    pub(crate) fn none_recording(&self) -> bool {
        self.active.load(Relaxed) == 0
    }

    /// The heap is shut down.
    pub(crate) fn shut(&self) {
        let _gate = self.gate.write();
        self.active.fetch_add(SHUT, Relaxed);
        self.tell_others(self.captures.load(Relaxed), 0);
    }

    /// So many captures are announced, where there were so many before.
    fn tell_others(&self, before: u32, now: u32) {
        if let Some(captures) = self.gpu.and_then(captures_of) {
            captures.fetch_add(now.wrapping_sub(before), Relaxed);
        }
    }

    /// Is a capture announced?
    pub(crate) fn announced(&self) -> bool {
        self.captures.load(Relaxed) > 0
    }

    /// Pools that exist, also released ones with live blocks.
    pub(crate) fn count(&self) -> u64 {
        self.state.lock().pools.len() as u64
    }

    /// The pool that a segment belongs to, and whether it is the one for small blocks.
    pub(crate) fn owner(&self, segment: u16) -> Option<(PoolId, bool)> {
        let state = self.state.lock();
        let pool = state.pools.iter().find(|pool| pool.segments.both().contains(&segment))?;
        Some((pool.id, pool.segments.small == segment))
    }

    /// Gives those of before, whose filters may own what uses the heap as it ends: to be dropped without a lock.
    #[must_use]
    fn set_recordings(&self, recordings: Vec<Recording>) -> Arc<Vec<Recording>> {
        let _gate = self.gate.write();
        let captures = recordings.iter().filter(|recording| recording.capture).count();
        let mut current = self.recordings.write();
        let (before, now) = (current.len() as u32, recordings.len() as u32);
        self.active.fetch_add(now.wrapping_sub(before), Relaxed);
        let captures_before = self.captures.swap(captures as u32, Relaxed);
        if self.active.load(Relaxed) < SHUT {
            self.tell_others(captures_before, captures as u32);
        }
        std::mem::replace(&mut *current, Arc::new(recordings))
    }

    pub(super) fn note_capturing(&self, stream: StreamId) {
        let mut seen = self.seen.lock();
        if !seen.contains(&stream) {
            seen.push(stream);
        }
        self.any_seen.store(true, Relaxed);
    }
}

fn unknown(pool: PoolId) -> Error {
    Error::InvalidArgument(format!("there is no capture pool {pool}"))
}

impl Inner {
    /// Is a graph being captured, as far as anyone said or can be asked? Constant time while captures are
    /// announced; else the driver is asked for the streams that were seen to capture.
    pub(crate) fn capture_under_way(&self) -> bool {
        if self.pools.announced() {
            return true;
        }
        let backend = self.driver.backend();
        if !self.pools.any_seen.load(Relaxed) {
            return backend.any_capturing(&[]);
        }
        let mut seen = self.pools.seen.lock();
        seen.retain(|stream| backend.is_capturing(*stream));
        self.pools.any_seen.store(!seen.is_empty(), Relaxed);
        !seen.is_empty() || backend.any_capturing(&[])
    }

    /// Looks whether the asking stream captures although no pool was announced for it: then it takes memory
    /// from elsewhere only with proof, and no epoch is closed until it is done.
    pub(crate) fn notice_capture(&self, wanted: &mut Wanted) {
        if !wanted.pool && self.driver.backend().is_capturing(wanted.stream.id) {
            if !self.pools.any_seen.load(Relaxed) {
                tracing::warn!(
                    stream = wanted.stream.id.0,
                    "a stream captures a graph without a capture pool: its memory is not kept for the graph"
                );
            }
            self.pools.note_capturing(wanted.stream.id);
            wanted.proof = true;
        }
    }

    /// What a request may take from segments other than its own: a pool's, which keeps it for graphs that
    /// any stream replays, only what every stream has passed (I11).
    pub(crate) fn claim_elsewhere(&self, wanted: &Wanted) -> Claim {
        let claim = self.claim(wanted.stream);
        // No stream has this slot; a wait of the asking stream on the device holds for no replay.
        let proven = Claim { owner: u16::MAX, horizon: claim.horizon.min(self.epochs.passed()) };
        if wanted.proof { proven } else { claim }
    }

    /// Opens a recording into a pool, which comes into being with its first use.
    pub(crate) fn begin_capture(&self, id: PoolId, filter: StreamFilter, capture: bool) -> Result<()> {
        let mut named = Vec::new();
        if let StreamFilter::Streams(streams) = &filter {
            if streams.is_empty() {
                let why = "the filter names no stream, so that nothing would come from the pool";
                return Err(Error::InvalidArgument(why.into()));
            }
            for stream in streams {
                let key = self.driver.backend().stream_key(*stream)?;
                self.may_enter(key, *stream)?;
                named.push((key, *stream));
            }
        }
        let _before;
        let mut slow = self.slow.lock();
        if self.shut.load(Relaxed) {
            return Err(Error::ShutDown);
        }
        let mut recordings = self.pools.recordings.read().to_vec();
        if recordings.iter().any(|recording| recording.id == id) {
            return Err(Error::InvalidArgument(format!("allocations go to capture pool {id} already; end that first")));
        }
        if capture && !self.capture_under_way() {
            // The last chance for a while: what was freed so far becomes provable during the capture.
            if self.quiesce { self.quiesce_device(&mut slow)? } else { self.close_epoch() }
        }
        let segments = self.add_use(id)?;
        let slots = match self.streams.get_all(&named) {
            Ok(streams) => streams.iter().map(|stream| stream.slot).collect(),
            Err(error) => {
                self.end_use(&mut slow, id)?;
                return Err(error);
            }
        };
        recordings.push(Recording { id, segments, filter, slots, capture });
        _before = self.pools.set_recordings(recordings);
        Ok(())
    }

    /// Ends the recording into a pool.
    pub(crate) fn end_capture(&self, id: PoolId) -> Result<()> {
        let (_before, ended);
        let _slow = self.slow.lock();
        let mut recordings = self.pools.recordings.read().to_vec();
        let Some(at) = recordings.iter().position(|recording| recording.id == id) else {
            return Err(Error::InvalidArgument(format!("no allocations go to capture pool {id}; begin that first")));
        };
        ended = recordings.remove(at);
        if let (true, StreamFilter::Streams(streams)) = (ended.capture, &ended.filter) {
            // Whoever ends the recording before the stream's capture is covered too.
            streams.iter().for_each(|stream| self.pools.note_capturing(*stream));
        }
        _before = self.pools.set_recordings(recordings);
        Ok(())
    }

    /// Adds a use to a pool without recording.
    pub(crate) fn retain_capture(&self, id: PoolId) -> Result<()> {
        let _slow = self.slow.lock();
        if self.shut.load(Relaxed) {
            return Err(Error::ShutDown);
        }
        self.add_use(id).map(drop)
    }

    /// Ends one use of a pool; the last one gives it up.
    pub(crate) fn release_capture(&self, id: PoolId) -> Result<()> {
        self.end_use(&mut self.slow.lock(), id)
    }

    fn end_use(&self, slow: &mut Slow, id: PoolId) -> Result<()> {
        {
            let mut state = self.pools.state.lock();
            let pool = state.pools.iter_mut().find(|pool| pool.id == id && pool.uses > 0).ok_or(unknown(id))?;
            pool.uses -= 1;
            if pool.uses > 0 {
                return Ok(());
            }
        }
        self.pools.to_clear.store(true, Relaxed);
        self.clear_pools(slow);
        Ok(())
    }

    /// Uses of a pool; 0 for one that is released or does not exist.
    pub(crate) fn capture_uses(&self, id: PoolId) -> u32 {
        self.pools.state.lock().pools.iter().find(|pool| pool.id == id).map_or(0, |pool| pool.uses)
    }

    /// One use more of a pool, with segments for a new one. Called with the driver lock held.
    fn add_use(&self, id: PoolId) -> Result<Pair> {
        if id == PoolId(0, 0) {
            return Err(Error::InvalidArgument("capture pool 0,0 stands for no pool; use other numbers".into()));
        }
        let mut state = self.pools.state.lock();
        if let Some(pool) = state.pools.iter_mut().find(|pool| pool.id == id) {
            pool.uses += 1;
            return Ok(pool.segments);
        }
        let fresh = || self.streams.take_segments().map(|[large, small]| Pair { large, small });
        let Some(segments) = state.spare.pop().or_else(fresh) else {
            return Err(Error::InvalidArgument("too many capture pools and streams; release some".into()));
        };
        state.pools.push(Pool { id, uses: 1, segments });
        drop(state);
        segments.both().into_iter().for_each(|index| self.segment(index).private = true);
        Ok(segments)
    }

    /// Pools that were released and hold no block any more end: their memory goes to the cache of handles as
    /// soon as every stream has passed it. Called with the driver lock held.
    pub(crate) fn clear_pools(&self, slow: &mut Slow) {
        if !self.pools.to_clear.load(Relaxed) {
            return;
        }
        let recordings = Arc::clone(&self.pools.recordings.read());
        let unused: Vec<(PoolId, Pair)> = {
            let state = self.pools.state.lock();
            let unused = state.pools.iter().filter(|pool| pool.uses == 0);
            unused.map(|pool| (pool.id, pool.segments)).collect()
        };
        let mut left = false;
        for (id, segments) in unused {
            let pending = || self.pending.lock().iter().any(|one| segments.both().contains(&one.segment));
            let live = segments.both().into_iter().any(|index| self.segment(index).live_blocks > 0);
            if live || recordings.iter().any(|recording| recording.id == id) || pending() {
                left = true;
                continue;
            }
            // Replays queued up to now used what was freed long ago.
            let stamp = Stamp { owner: 0, epoch: self.epochs.open() };
            for index in segments.both() {
                let mut segment = self.segment(index);
                segment.restamp(stamp);
                segment.private = false;
            }
            let mut state = self.pools.state.lock();
            state.pools.retain(|pool| pool.id != id);
            state.spare.push(segments);
        }
        let spare: Vec<u16> = self.pools.state.lock().spare.iter().flat_map(|segments| segments.both()).collect();
        for index in spare {
            left |= self.drain(slow, index);
        }
        self.pools.to_clear.store(left, Relaxed);
    }

    /// Unmaps what lies idle in a spare segment, into the cache. Says whether memory is left there.
    fn drain(&self, slow: &mut Slow, index: u16) -> bool {
        let claim = Claim { owner: u16::MAX, horizon: self.epochs.passed() };
        if self.quiesce {
            // Edits need a quiet device: the memory waits for moves and trims, which see to that.
            return false;
        }
        let mut idle: Vec<Victim> = {
            let mut segment = self.segment(index);
            if segment.free_units() == 0 {
                return false;
            }
            segment.merge_passed(claim.horizon);
            source::victims(index, &segment, &slow.physical, claim, 0..0)
        };
        idle.retain(|victim| victim.releasable);
        for victim in idle {
            if self.uncover(slow, claim, &victim) {
                slow.physical.put_cached(victim.handle);
            }
        }
        self.segment(index).free_units() > 0
    }

    /// Unmaps an idle handle whose use has passed; its addresses are without memory then.
    pub(crate) fn uncover(&self, slow: &mut Slow, claim: Claim, victim: &Victim) -> bool {
        let claimed = super::execute::claim_victim(&mut self.segment(victim.segment), claim, victim);
        let Some((node, stamp)) = claimed else { return false };
        let unmapped = self.unmap_home(slow, victim).is_ok();
        let passed = self.epochs.passed();
        self.segment(victim.segment).restore(node, stamp, passed, |granule| slow.physical.mapped.contains(granule));
        unmapped
    }
}
