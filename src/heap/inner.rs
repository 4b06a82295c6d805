//! The shared state of a heap, its hot path, and the locks.
//!
//! Lock order: driver lock (`slow`) before a segment's lock; never two segments' locks at once; the
//! list of pending frees and the epochs' queue are innermost. Nothing is held while waiting.
#![forbid(unsafe_code)]

use super::pools::Pools;
use super::space::{Located, Space};
use super::stats::Counters;
use super::streams::{SEGMENTS, Stream, Streams};
use crate::backend::driver::Driver;
use crate::backend::nvtx::Nvtx;
use crate::backend::{Event, EventScope, StreamId};
use crate::config::{Config, CrossStream, RESERVE_MAX, Shrink};
use crate::edges::Edges;
use crate::epoch::Epochs;
use crate::error::{Error, PointerFault, Result};
use crate::physical::{HandleId, Physical};
use crate::segment::nodes::{Kind, NodeId};
use crate::segment::{Claim, History, Segment, Stamp};
use crate::units::{GIB, GRANULE, MIB, UNIT};
use crate::used::Used;
use parking_lot::{Mutex, MutexGuard};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

/// The segment of large blocks.
pub(crate) const LARGE: u16 = 0;
/// The segment of huge blocks, so that ordinary requests do not cut up what only huge ones need.
pub(crate) const HUGE: u16 = 1;
/// Segments of this number and more are small pools and capture pools.
pub(crate) const FIRST_POOL: u16 = 2;
/// A request of this many bytes and more is huge.
pub(crate) const HUGE_BYTES: u64 = 512 * MIB;
/// Bytes freed on a segment after which an epoch is closed: with several streams, once memory has moved, so that
/// they take each other's memory where it lies; with several streams; with one, which needs no proof to go on.
const CLOSE_AFTER: [u64; 3] = [8 * MIB, 64 * MIB, GIB];

/// A freed block that waits for the streams it was declared used on.
#[derive(Debug)]
pub(crate) struct Pending {
    pub(crate) segment: u16,
    pub(crate) node: NodeId,
    pub(crate) stamp: Stamp,
    /// What must complete; where an event was refused, the epoch of the stamp must pass instead.
    pub(crate) events: Vec<Event>,
    pub(crate) refused: bool,
}

/// A stream that a live block was declared used on.
#[derive(Debug, Clone, Copy)]
struct Use {
    stream: StreamId,
    /// Its identity: the handle may stand for another stream when the block is freed.
    key: u64,
    /// The stream was retired meanwhile, and its handle may be gone.
    retired: bool,
}

/// What the driver lock guards.
#[derive(Debug, Default)]
pub(crate) struct Slow {
    pub(crate) physical: Physical,
    /// Pinned ranges of granules, as often as they were pinned.
    pub(crate) pins: Vec<std::ops::Range<u32>>,
    /// Bytes that may exist; `u64::MAX`: no bound.
    pub(crate) limit: u64,
    /// For `shrink:idle`: handles seen idle, with the age of their memory and when it was first seen
    /// (nanoseconds of the backend's clock).
    pub(crate) idle_since: HashMap<HandleId, (u32, u64)>,
}

/// Called with the bytes asked for before an out-of-memory error; says whether it freed any.
pub(crate) type Callback = Arc<dyn Fn(u64) -> bool + Send + Sync>;

/// See the module's text.
pub(crate) struct Inner {
    pub(crate) driver: Driver,
    pub(crate) config: Config,
    pub(crate) space: Space,
    pub(crate) streams: Streams,
    pub(crate) epochs: Epochs,
    edges: Arc<Edges>,
    pub(crate) pools: Pools,
    pub(crate) nvtx: Nvtx,
    /// Of the two large segments together.
    pub(crate) history: Arc<History>,
    pub(crate) used: Arc<Used>,
    segments: Box<[OnceLock<Mutex<Segment>>]>,
    /// One more than the highest segment that exists, so that walks stay short.
    segments_end: AtomicU16,
    pub(crate) slow: Mutex<Slow>,
    pub(crate) pending: Mutex<VecDeque<Pending>>,
    /// Streams that a live block was declared used on, by its first unit.
    uses: Mutex<HashMap<u32, Vec<Use>>>,
    pub(crate) counters: Counters,
    pub(crate) quiesce: bool,
    pub(crate) callbacks: Mutex<Vec<Callback>>,
    pub(crate) shut: AtomicBool,
    /// What the limit was at start.
    pub(crate) device_limit: u64,
    /// The limit, readable without the driver lock.
    pub(crate) limit: AtomicU64,
}

/// A block as the heap hands it out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Block {
    pub(crate) address: u64,
    /// Length in bytes, rounded to units.
    pub(crate) bytes: u64,
}

/// A request, worked out.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted {
    pub(crate) bytes: u64,
    /// Units.
    pub(crate) len: u32,
    /// Units, a power of two.
    pub(crate) align: u32,
    pub(crate) segment: u16,
    pub(crate) stream: Stream,
    /// The segment is a capture pool's.
    pub(crate) pool: bool,
    /// Memory from elsewhere is taken only when every stream has passed its free.
    pub(crate) proof: bool,
    /// On one handle of its own, in granules; 0: on any.
    pub(crate) contiguous: u32,
}

impl Inner {
    pub(crate) fn new(driver: Driver, config: Config, limit: u64, quiesce: bool) -> Self {
        let edges = Arc::new(Edges::default());
        let slow = Slow { limit, physical: Physical::new(Arc::clone(&edges)), ..Slow::default() };
        Self {
            driver,
            config,
            space: Space::default(),
            streams: Streams::default(),
            epochs: Epochs::default(),
            edges,
            pools: Pools::default(),
            nvtx: Nvtx::off(),
            history: Arc::default(),
            used: Arc::default(),
            segments: (0..SEGMENTS).map(|_| OnceLock::new()).collect(),
            segments_end: AtomicU16::new(0),
            slow: Mutex::new(slow),
            pending: Mutex::default(),
            uses: Mutex::default(),
            counters: Counters::default(),
            quiesce,
            callbacks: Mutex::default(),
            shut: AtomicBool::new(false),
            device_limit: limit,
            limit: AtomicU64::new(limit),
        }
    }

    /// Locks a segment, which comes into being at first use.
    pub(crate) fn segment(&self, index: u16) -> MutexGuard<'_, Segment> {
        let segment = self.segments[index as usize].get_or_init(|| {
            self.segments_end.fetch_max(index + 1, Relaxed);
            let large = || Segment::large(Arc::clone(&self.history), Arc::clone(&self.used));
            Mutex::new(if index < FIRST_POOL { large() } else { Segment::default() })
        });
        segment.lock()
    }

    /// Locks a segment unless another thread holds it.
    pub(crate) fn try_segment(&self, index: u16) -> Option<MutexGuard<'_, Segment>> {
        self.segments[index as usize].get()?.try_lock()
    }

    /// Bytes of addresses that a reservation asks for.
    pub(crate) fn reserve_bytes(&self) -> u64 {
        let total = self.driver.backend().memory().map_or(u64::MAX, |memory| memory.total);
        self.config.reserve.unwrap_or(if total > RESERVE_MAX / 4 { RESERVE_MAX / 2 } else { total * 4 })
    }

    /// Segments that exist.
    pub(crate) fn segment_indices(&self) -> impl Iterator<Item = u16> + '_ {
        (0..self.segments_end.load(Relaxed)).filter(|index| self.segments[*index as usize].get().is_some())
    }

    /// What a stream may take, as far as is known now.
    pub(crate) fn claim(&self, stream: Stream) -> Claim {
        let horizon = match self.config.cross_stream {
            CrossStream::Off => 0,
            CrossStream::Passed | CrossStream::Wait => self.epochs.passed().max(stream.waited),
        };
        Claim { owner: stream.slot, horizon }
    }

    /// Checks a request. `align` in bytes.
    pub(crate) fn wanted(&self, bytes: u64, align: u64, stream: StreamId) -> Result<Wanted> {
        if !align.is_power_of_two() || align > GRANULE {
            return Err(Error::InvalidArgument(format!(
                "alignment {align}: it must be a power of two of at most 2 MiB"
            )));
        }
        if self.shut.load(Relaxed) {
            return Err(Error::ShutDown);
        }
        let key = self.driver.backend().stream_key(stream)?;
        let stream = self.streams.get(key, stream)?;
        let align = (align / UNIT).max(1) as u32;
        let Some(len) = bytes.max(1).checked_add(UNIT - 1).and_then(|b| u32::try_from(b / UNIT).ok()) else {
            return Err(Error::AddressSpace { requested: bytes, reserved: self.space.bytes() });
        };
        let pool = self.pools.route(&stream);
        let large = if bytes < HUGE_BYTES { LARGE } else { HUGE };
        let (small, large) = pool.map_or((stream.small, large), |pair| (pair.small, pair.large));
        let segment = if bytes <= self.config.small_limit { small } else { large };
        let pool = pool.is_some();
        Ok(Wanted { bytes, len, align, segment, stream, pool, proof: pool, contiguous: 0 })
    }

    /// Allocates. The hot path: one lock, one bin look-up, one table entry.
    pub(crate) fn alloc(&self, bytes: u64, align: u64, stream: StreamId) -> Result<Block> {
        let wanted = self.wanted(bytes, align, stream)?;
        let mut segment = self.segment(wanted.segment);
        if let Some(block) = self.take_fitting(&mut segment, &wanted) {
            return Ok(block);
        }
        drop(segment);
        if let Some(block) = self.take_elsewhere(&wanted) {
            return Ok(block);
        }
        self.alloc_slow(&wanted)
    }

    /// Serves a large request from free memory of the huge segment, or the other way round.
    pub(crate) fn take_elsewhere(&self, wanted: &Wanted) -> Option<Block> {
        let other = match wanted.segment {
            LARGE => HUGE,
            HUGE => LARGE,
            _ => return None,
        };
        // One that does not exist yet has nothing.
        let mut segment = self.segments[other as usize].get()?.lock();
        self.take_fitting(&mut segment, wanted)
    }

    /// Serves a request from mapped free memory, if there is any at one place.
    pub(crate) fn take_fitting(&self, segment: &mut Segment, wanted: &Wanted) -> Option<Block> {
        let claim = self.claim(wanted.stream);
        let edges = (wanted.segment < FIRST_POOL).then_some(&*self.edges);
        let found = segment
            .find_own(wanted.len, wanted.align, claim, edges)
            .or_else(|| segment.find_passed(wanted.len, wanted.align, claim, edges))?;
        let live = segment.take(found, wanted.len, wanted.align, wanted.stream.slot);
        Some(self.hand_out(segment, live, wanted))
    }

    /// Enters a live node as a block of the client.
    pub(crate) fn hand_out(&self, segment: &mut Segment, live: NodeId, wanted: &Wanted) -> Block {
        let bytes = u64::from(wanted.len) * UNIT;
        let node = &mut segment.nodes[live];
        node.slack = (bytes - wanted.bytes) as u32;
        node.owner = wanted.stream.slot;
        let start = node.start;
        self.space.set_node(start, live);
        self.counters.allocated(bytes, wanted.bytes);
        Block { address: self.space.address(start), bytes }
    }

    /// The live block that starts at an address: where, its segment locked, and its node.
    pub(crate) fn live_block(&self, address: u64) -> Result<(Located<'_>, MutexGuard<'_, Segment>, NodeId)> {
        let fault = |why| Error::InvalidPointer { address, why };
        let place = self.space.locate(address).ok_or(fault(PointerFault::Foreign))?;
        let segment = self.segment(place.segment);
        match place.node() {
            0 => Err(fault(pointer_fault(&segment, place.unit))),
            id => Ok((place, segment, id)),
        }
    }

    /// Frees by address. Never waits; one lock.
    pub(crate) fn free(&self, address: u64) -> Result<()> {
        self.free_at(address, self.epochs.open())
    }

    /// Frees a block that no work was ever queued on.
    pub(crate) fn free_as_new(&self, address: u64) -> Result<()> {
        self.free_at(address, 0)
    }

    fn free_at(&self, address: u64, epoch: u32) -> Result<()> {
        let (place, mut segment, id) = self.live_block(address)?;
        self.space.set_node(place.unit, 0);
        let node = &segment.nodes[id];
        let bytes = u64::from(node.len) * UNIT;
        self.counters.freed(bytes, bytes - u64::from(node.slack));
        let stamp = Stamp { owner: node.owner, epoch };
        if node.has_uses {
            segment.suspend(id);
            drop(segment);
            self.suspend(place.segment, id, place.unit, stamp, None);
            return Ok(());
        }
        segment.free(id, stamp, self.epochs.passed());
        let freed = segment.freed_units * UNIT;
        if freed >= CLOSE_AFTER[0] && freed >= self.close_after() {
            segment.freed_units = 0;
            drop(segment);
            self.close_epoch();
            // Never by waiting: whoever holds the lock is at work on the same.
            if self.shrinks_by_itself()
                && let Some(mut slow) = self.slow.try_lock()
                && !self.shut.load(Relaxed)
            {
                self.housekeep(&mut slow);
                self.shrink(&mut slow);
            }
        }
        Ok(())
    }

    fn shrinks_by_itself(&self) -> bool {
        matches!(self.config.shrink, Shrink::Idle(_) | Shrink::Watermark(_))
    }

    /// See [`CLOSE_AFTER`].
    fn close_after(&self) -> u64 {
        match (self.streams.are_many(), self.counters.handles_moved.load(Relaxed)) {
            (true, 1..) => CLOSE_AFTER[0],
            (true, 0) => CLOSE_AFTER[1],
            // Shrinking by itself is looked at then too.
            (false, _) if self.shrinks_by_itself() => CLOSE_AFTER[1],
            (false, _) => CLOSE_AFTER[2],
        }
    }

    /// Records what a freed block with declared uses waits for, besides an event of the caller's.
    pub(crate) fn suspend(&self, segment: u16, node: NodeId, unit: u32, stamp: Stamp, after: Option<Event>) {
        let uses = self.uses.lock().remove(&unit).unwrap_or_default();
        let backend = self.driver.backend();
        let mut events: Vec<Event> = after.into_iter().collect();
        let mut refused = false;
        // Held while recording, so that a shutdown finds every event that there is.
        let mut pending = self.pending.lock();
        for Use { stream, key, retired } in uses {
            if self.shut.load(Relaxed) {
                break;
            }
            // An event on another stream, or on this thread's own for another thread's, would prove nothing.
            if retired || backend.stream_key(stream) != Ok(key) {
                refused = true;
                continue;
            }
            match backend.record(EventScope::Stream(stream)) {
                Ok(event) => events.push(event),
                Err(error) => {
                    tracing::debug!(%error, ?stream, "no event for a declared use; its epoch must pass instead");
                    refused = true;
                }
            }
        }
        if self.shut.load(Relaxed) {
            events.drain(..).for_each(|event| backend.recycle(event));
        }
        pending.push_back(Pending { segment, node, stamp, events, refused });
    }

    /// Declares that work queued on `stream` up to the free uses the block.
    pub(crate) fn record_use(&self, address: u64, stream: StreamId) -> Result<()> {
        let key = self.driver.backend().stream_key(stream)?;
        let user = self.streams.get(key, stream)?;
        let (place, mut segment, id) = self.live_block(address)?;
        let node = &mut segment.nodes[id];
        if node.owner == user.slot {
            return Ok(());
        }
        node.has_uses = true;
        let mut uses = self.uses.lock();
        let uses = uses.entry(place.unit).or_default();
        if !uses.iter().any(|one| one.key == key) {
            uses.push(Use { stream, key, retired: false });
        }
        Ok(())
    }

    /// Declared uses of a stream end with its epoch from now on: its handle is not named again.
    pub(crate) fn retire_uses(&self, key: u64) {
        let mut uses = self.uses.lock();
        uses.values_mut().flatten().filter(|one| one.key == key).for_each(|one| one.retired = true);
    }

    /// Closes the open epoch, but not while a graph is captured: the event would invalidate the capture, and
    /// the next epoch covers what was freed meanwhile. Takes no lock of a segment or of the driver.
    pub(crate) fn close_epoch(&self) {
        let _gate = self.pools.gate.read();
        if self.capture_under_way() {
            return;
        }
        if self.epochs.is_full() {
            // Some may have passed since anyone asked.
            self.epochs.poll(self.driver.backend());
        }
        if !self.epochs.is_full() {
            self.record_epoch();
        }
    }

    /// As [`Self::close_epoch`], however many wait already.
    pub(crate) fn close_epoch_now(&self) {
        let _gate = self.pools.gate.read();
        if self.capture_under_way() {
            return;
        }
        self.record_epoch();
    }

    fn record_epoch(&self) {
        let backend = self.driver.backend();
        self.epochs.close(backend, || self.streams.all().iter().map(|one| backend.of_all_threads(one.id)).collect());
    }

    /// Requested and rounded size of a live block, and its stream.
    pub(crate) fn block_info(&self, address: u64) -> Result<(u64, u64)> {
        let (_, segment, id) = self.live_block(address)?;
        let node = &segment.nodes[id];
        let bytes = u64::from(node.len) * UNIT;
        Ok((bytes - u64::from(node.slack), bytes))
    }
}

/// Why a unit is no live block's start. A walk: only errors pay for it.
fn pointer_fault(segment: &Segment, unit: u32) -> PointerFault {
    let covering = segment.iter().find(|id| (segment.nodes[*id].start..segment.nodes[*id].end()).contains(&unit));
    match covering.map(|id| segment.nodes[id].kind) {
        Some(Kind::Live) => PointerFault::Interior,
        _ => PointerFault::Freed,
    }
}
