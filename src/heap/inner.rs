//! The shared state of a heap, and the locks.
//!
//! Lock order: driver lock (`slow`) before a segment's lock; never two segments' locks at once; the
//! list of pending frees, the epochs' queue, exports, imports and the peaks are innermost. Nothing is held while waiting.
#![forbid(unsafe_code)]

use super::after::Pending;
use super::export::Exports;
use super::import::Imports;
use super::planned::Planned;
use super::pools::Pools;
use super::space::Space;
use super::stats::Counters;
use super::streams::{SEGMENTS, Stream, Streams};
use super::tally::{Peaks, Tally};
use crate::backend::driver::Driver;
use crate::backend::nvtx::Nvtx;
use crate::backend::{Abroad, BackendKind, StreamId};
use crate::config::{Config, CrossStream, Shrink};
use crate::edges::Edges;
use crate::epoch::Epochs;
use crate::error::{Error, Result};
use crate::lock::{Guard, Lock};
use crate::physical::{HandleId, Physical};
use crate::process::FORKED;
use crate::segment::{Claim, History, Segment};
use crate::units::{GRANULE, MIB, RESERVE_MAX, UNIT};
use crate::used::Used;
use parking_lot::Mutex;
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
/// A segment with its counts, on lines of its own.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Slot {
    pub(super) segment: Lock<Segment>,
    pub(super) tally: Tally,
}

/// A segment, locked.
pub(crate) type SegmentGuard<'a> = Guard<'a, Segment>;

/// A stream that a live block was declared used on.
#[derive(Debug, Clone, Copy)]
pub(super) struct Use {
    pub(super) stream: StreamId,
    /// Its identity: the handle may stand for another stream when the block is freed.
    pub(super) key: u64,
    /// The stream was retired meanwhile, and its handle may be gone.
    pub(super) retired: bool,
    /// It is another device's: only an event on it proves anything.
    pub(super) abroad: Option<Abroad>,
}

/// What the driver lock guards.
#[derive(Debug, Default)]
pub(crate) struct Slow {
    pub(crate) physical: Physical,
    /// Pinned ranges of granules, as often as they were pinned.
    pub(crate) pins: Vec<std::ops::Range<u32>>,
    /// Bytes that may exist; `u64::MAX`: no bound.
    pub(crate) limit: u64,
    /// Times that more existed than `defrag:eager` allows when memory was planned for.
    pub(crate) crowded: u32,
    /// Bytes that moved where growth would have done (`slack`).
    pub(crate) gathered: u64,
    /// For `shrink:idle`: handles seen idle, with the age of their memory and when it was first seen
    /// (nanoseconds of the backend's clock).
    pub(crate) idle_since: HashMap<HandleId, (u64, u64)>,
}

impl Slow {
    /// Keeps a range of granules in place.
    pub(super) fn pin(&mut self, range: std::ops::Range<u32>) {
        self.physical.pinned.set(range.clone(), true);
        self.pins.push(range);
    }

    /// How often the range is pinned.
    pub(super) fn pins_of(&self, range: &std::ops::Range<u32>) -> usize {
        self.pins.iter().filter(|pin| *pin == range).count()
    }

    /// Ends one [`Self::pin`] of the range; false: there is none.
    pub(super) fn unpin(&mut self, range: &std::ops::Range<u32>) -> bool {
        let Some(at) = self.pins.iter().position(|pin| pin == range) else { return false };
        self.pins.swap_remove(at);
        self.physical.pinned.set(range.clone(), false);
        for pin in &self.pins {
            self.physical.pinned.set(pin.clone(), true);
        }
        true
    }
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
    pub(super) edges: Arc<Edges>,
    pub(crate) pools: Pools,
    pub(crate) nvtx: Nvtx,
    pub(super) planned: Option<Box<Planned>>,
    /// Of the two large segments together.
    pub(crate) history: Arc<History>,
    pub(crate) used: Arc<Used>,
    pub(super) slots: Box<[OnceLock<Box<Slot>>]>,
    /// One more than the highest segment that exists, so that walks stay short.
    segments_end: AtomicU16,
    pub(crate) slow: Mutex<Slow>,
    pub(crate) pending: Mutex<VecDeque<Pending>>,
    /// There may be some in `pending`; changed under its lock, so that looking costs a load.
    pub(super) any_pending: AtomicBool,
    /// Streams that a live block was declared used on, by its first unit.
    pub(super) uses: Mutex<HashMap<u32, Vec<Use>>>,
    /// What other processes may use of this heap's memory, and what this one uses of others'.
    pub(super) exports: Mutex<Exports>,
    pub(super) imports: Mutex<Imports>,
    pub(crate) counters: Counters,
    pub(crate) peaks: Peaks,
    pub(crate) quiesce: bool,
    /// The policy looks at what is idle after large frees.
    pub(super) shrinks_on_calls: bool,
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

impl Wanted {
    /// Bytes of the block that nobody asked for.
    #[inline]
    pub(crate) fn slack(&self) -> u32 {
        (u64::from(self.len) * UNIT - self.bytes) as u32
    }
}

impl Inner {
    pub(crate) fn new(driver: Driver, config: Config, limit: u64, quiesce: bool) -> Self {
        let edges = Arc::new(Edges::default());
        let slow = Slow { limit, physical: Physical::new(Arc::clone(&edges)), ..Slow::default() };
        let backend = driver.backend();
        let gpu = (backend.kind() == BackendKind::Cuda).then(|| backend.device());
        Self {
            driver,
            shrinks_on_calls: matches!(config.shrink, Shrink::Idle(_) | Shrink::Watermark(_)),
            config,
            space: Space::default(),
            streams: Streams::default(),
            epochs: Epochs::default(),
            edges,
            pools: Pools::of(gpu),
            nvtx: Nvtx::off(),
            planned: None,
            history: Arc::default(),
            used: Arc::default(),
            slots: (0..SEGMENTS).map(|_| OnceLock::new()).collect(),
            segments_end: AtomicU16::new(0),
            slow: Mutex::new(slow),
            pending: Mutex::default(),
            any_pending: AtomicBool::new(false),
            uses: Mutex::default(),
            exports: Mutex::default(),
            imports: Mutex::default(),
            counters: Counters::default(),
            peaks: Peaks::default(),
            quiesce,
            callbacks: Mutex::default(),
            shut: AtomicBool::new(false),
            device_limit: limit,
            limit: AtomicU64::new(limit),
        }
    }

    /// A segment's place; the segment comes into being at first use.
    #[inline]
    pub(super) fn slot(&self, index: u16) -> &Slot {
        match self.slots[index as usize].get() {
            Some(slot) => slot,
            None => self.new_slot(index),
        }
    }

    #[cold]
    fn new_slot(&self, index: u16) -> &Slot {
        self.slots[index as usize].get_or_init(|| {
            self.segments_end.fetch_max(index + 1, Relaxed);
            let large = || Segment::large(Arc::clone(&self.history), Arc::clone(&self.used));
            let segment = if index < FIRST_POOL { large() } else { Segment::default() };
            Box::new(Slot { segment: Lock::new(segment.numbered(index)), tally: Tally::default() })
        })
    }

    /// Locks a segment, with nothing kept unmerged in it: for all but the hot path.
    pub(crate) fn segment(&self, index: u16) -> SegmentGuard<'_> {
        let mut segment = self.slot(index).segment.lock();
        segment.flush(self.epochs.passed());
        segment
    }

    /// As [`Self::segment`], unless another thread holds it.
    pub(crate) fn try_segment(&self, index: u16) -> Option<SegmentGuard<'_>> {
        let mut segment = self.slots[index as usize].get()?.segment.try_lock()?;
        segment.flush(self.epochs.passed());
        Some(segment)
    }

    /// The counts of all segments.
    pub(crate) fn tallies(&self) -> impl Iterator<Item = &Tally> + Clone {
        let slots = &self.slots[..self.segments_end.load(Relaxed) as usize];
        slots.iter().filter_map(OnceLock::get).map(|slot| &slot.tally)
    }

    /// Bytes in live blocks.
    pub(crate) fn live(&self) -> u64 {
        self.tallies().map(|tally| tally.live().0).sum()
    }

    /// Bytes of addresses that a reservation asks for.
    pub(crate) fn reserve_bytes(&self) -> u64 {
        let total = self.driver.backend().memory().map_or(u64::MAX, |memory| memory.total);
        self.config.reserve.unwrap_or(if total > RESERVE_MAX / 4 { RESERVE_MAX / 2 } else { total * 4 })
    }

    /// Segments that exist.
    pub(crate) fn segment_indices(&self) -> impl Iterator<Item = u16> + '_ {
        (0..self.segments_end.load(Relaxed)).filter(|index| self.slots[*index as usize].get().is_some())
    }

    /// What a stream may take, as far as is known now.
    #[inline]
    pub(crate) fn claim(&self, stream: Stream) -> Claim {
        let horizon = match self.config.cross_stream {
            CrossStream::Off => 0,
            CrossStream::Passed | CrossStream::Wait => self.epochs.passed().max(stream.waited),
        };
        Claim { owner: stream.slot, horizon }
    }

    /// Checks a request. `align` in bytes.
    #[inline]
    pub(crate) fn wanted(&self, bytes: u64, align: u64, stream: StreamId) -> Result<Wanted> {
        self.wanted_of(bytes, align, stream, None)
    }

    /// A stream by its identity, which is asked for where it is not given.
    fn stream_of(&self, key: Option<u64>, id: StreamId) -> Result<Stream> {
        let backend = self.driver.backend();
        let key = match key.or_else(|| backend.known_stream_key(id)) {
            Some(key) => key,
            None => backend.stream_key(id)?,
        };
        let stream = self.own_stream(key, id)?;
        if backend.is_lasting(id) {
            self.streams.note_lasting(key, id);
        }
        Ok(stream)
    }

    /// The stream of an identity, which has to be this device's: this device's events prove nothing of others.
    pub(super) fn own_stream(&self, key: u64, id: StreamId) -> Result<Stream> {
        self.may_enter(key, id)?;
        self.streams.get(key, id)
    }

    /// Refuses a new stream of another device.
    pub(super) fn may_enter(&self, key: u64, id: StreamId) -> Result<()> {
        if !self.streams.is_known(key)
            && self.driver.backend().abroad(id, None)?.is_some_and(|abroad| abroad.device.is_some())
        {
            return Err(Error::InvalidArgument(format!(
                "stream {:#x} is of another device than the heap, {}; allocate for one of this device, and declare the use on the other \
                 by `record_use`",
                id.0,
                self.driver.backend().device()
            )));
        }
        Ok(())
    }

    /// As [`Self::wanted`], with the stream's identity where it is known already.
    #[inline]
    pub(super) fn wanted_of(&self, bytes: u64, align: u64, stream: StreamId, key: Option<u64>) -> Result<Wanted> {
        if !align.is_power_of_two() || align > GRANULE {
            return Err(Error::InvalidArgument(format!(
                "alignment {align}: it must be a power of two of at most 2 MiB"
            )));
        }
        if self.shut.load(Relaxed) {
            return Err(Error::ShutDown);
        }
        let stream = match (key, self.streams.lasting(stream)) {
            (None, Some(known)) => known.named(stream),
            _ => self.stream_of(key, stream)?,
        };
        let align = (align / UNIT).max(1) as u32;
        let Some(len) = bytes.max(1).checked_add(UNIT - 1).and_then(|b| u32::try_from(b / UNIT).ok()) else {
            return Err(self.endless(bytes, stream));
        };
        let pool = self.pools.route(&stream);
        let large = if bytes < HUGE_BYTES { LARGE } else { HUGE };
        let (small, large) = pool.map_or((stream.small, large), |pair| (pair.small, pair.large));
        let segment = if bytes <= self.config.small_limit { small } else { large };
        let pool = pool.is_some();
        Ok(Wanted { bytes, len, align, segment, stream, pool, proof: pool, contiguous: 0 })
    }

    /// The error for a request that is longer than any block.
    #[cold]
    fn endless(&self, bytes: u64, stream: Stream) -> Error {
        if bytes <= self.limit.load(Relaxed) {
            return Error::AddressSpace { requested: bytes, reserved: self.space.bytes() };
        }
        self.counters.ooms.fetch_add(1, Relaxed);
        self.out_of_memory(bytes, stream, None)
    }

    /// This, but for a child that was forked off (I15).
    pub(crate) fn ours(&self) -> Result<&Self> {
        if self.driver.is_ours() {
            return Ok(self);
        }
        Err(Error::Unavailable { backend: self.driver.backend().kind().name(), why: FORKED.into() })
    }

    /// More than the limit allows would be live with so many bytes more: nothing that the device finishes makes room for them.
    pub(super) fn is_full_for(&self, bytes: u64) -> bool {
        self.live().saturating_add(bytes) > self.limit.load(Relaxed)
    }

    /// Declares that work queued on `stream` up to the free uses the block; `device` is whose stream it is, where that is known.
    pub(crate) fn record_use(&self, address: u64, stream: StreamId, device: Option<u32>) -> Result<()> {
        let backend = self.driver.backend();
        let key = backend.stream_key(stream)?;
        // A wrong address enters no stream.
        self.block_info(address)?;
        // What is known is this device's, but for the handles of default streams.
        let asked = device.is_some() || !self.streams.is_known(key);
        let abroad = if asked { backend.abroad(stream, device)? } else { None };
        if abroad.is_some_and(|abroad| abroad.device.is_none()) {
            // It may be this device's, whose epochs have to wait for its capture then.
            self.pools.note_capturing(stream);
        }
        let user = if abroad.is_none() { Some(self.streams.get(key, stream)?.slot) } else { None };
        let (place, mut segment, id) = self.live_block(address)?;
        let node = &mut segment.nodes[id];
        if Some(node.owner) == user {
            return Ok(());
        }
        node.has_uses = true;
        let mut uses = self.uses.lock();
        let uses = uses.entry(place.unit()).or_default();
        if !uses.iter().any(|one| one.key == key && one.abroad == abroad) {
            uses.push(Use { stream, key, retired: false, abroad });
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
