//! A real GPU through the CUDA driver API.
//!
//! The driver is loaded at run time; without one, opening fails with [`Error::Unavailable`]. The
//! device's *primary* context is used, the one of the CUDA runtime, PyTorch and `cudarc`, and each
//! call leaves the caller's current context and capture mode as found. Streams are the caller's
//! `CUstream` handles as numbers: 0 the default stream, 1 the legacy one, 2 the calling thread's.
//!
//! Graph capture: calls are made in relaxed capture mode, which keeps a capture valid, with two
//! exceptions. The driver refuses a context-wide event and a wait for the context while *any* of its
//! streams captures, **and invalidates that capture**: see [`CudaBackend::record`](Backend::record).

use super::{
    Abroad, Backend, BackendKind, Capabilities, ClientEvent, Event, EventScope, MemoryInfo, PhysicalAllocation,
    StreamId,
};
use crate::error::{DriverCall, DriverError, Error};
use crate::units::GRANULE;
use adopt::Waiters;
use enter::Primary;
use events::EventPool;
use probe::unavailable;
use std::cell::Cell;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};
use sys::{Access, Api, MemoryKind, STREAM_LEGACY, STREAM_PER_THREAD};

mod abroad;
mod adopt;
mod ballast;
mod enter;
mod events;
mod identity;
pub mod kinds;
pub mod memory;
mod options;
mod peers;
mod probe;
mod share;
mod streams;

pub use ballast::Ballast;
pub use options::{CudaOptions, DeviceInfo, DriverInfo, NullStream, driver_info};
pub use streams::StreamSet;
mod sys;

fn initialised() -> Result<&'static Api, Error> {
    let api = Api::load().map_err(unavailable)?;
    api.init().map_err(|error| {
        unavailable(format!(
            "{}; check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or do without by `backend:host`",
            error.reason
        ))
    })?;
    Ok(api)
}

/// One GPU. See the module's text.
#[derive(Debug)]
pub struct CudaBackend {
    primary: Primary,
    index: u32,
    uuid: [u8; 16],
    events: EventPool,
    waiters: Waiters,
    others: abroad::Others,
    /// Devices of the driver.
    devices: u32,
    capabilities: Capabilities,
    memory: MemoryKind,
    peers: peers::Peers,
    null_stream: NullStream,
    trusts_handles: bool,
    identities: identity::Identities,
    opened: Instant,
}

impl CudaBackend {
    /// Opens a device by index (as `CUDA_VISIBLE_DEVICES` leaves them) and probes it: a few trial
    /// calls, undone again. Not while a graph is being captured, for the probe records a
    /// context-wide event.
    ///
    /// # Errors
    /// [`Error::Unavailable`] where there is no driver, no such device, or no virtual memory
    /// management; [`Error::Driver`] when the driver refuses something that the heap needs.
    pub fn open(index: u32, options: &CudaOptions) -> Result<Self, Error> {
        let api = initialised()?;
        let count = api.device_count()?;
        let ordinal = i32::try_from(index).ok().filter(|ordinal| *ordinal < count).ok_or_else(|| {
            unavailable(format!("device {index} does not exist, the driver shows {count}; check CUDA_VISIBLE_DEVICES"))
        })?;
        let primary = Primary::retain(api, api.device(ordinal)?)?;
        let entered = primary.enter(true)?;
        let probed = probe::probe(&primary, ordinal, options)?;
        drop(entered);
        let uuid = api.device_uuid(primary.device());
        Ok(Self {
            primary,
            index,
            uuid,
            events: EventPool::default(),
            waiters: Waiters::default(),
            others: abroad::Others::default(),
            devices: count.cast_unsigned(),
            capabilities: probed.capabilities,
            memory: probed.memory,
            peers: probed.peers,
            null_stream: options.null_stream,
            trusts_handles: options.trust_handles,
            identities: identity::Identities::default(),
            opened: Instant::now(),
        })
    }

    /// Can memory be exported as a file descriptor?
    #[must_use]
    pub fn exportable(&self) -> bool {
        self.memory.posix_fd
    }

    /// May network cards access the memory?
    #[must_use]
    pub fn rdma(&self) -> bool {
        self.memory.rdma
    }

    /// Blocks until all work queued so far on `stream` is done. For tests and measurements; the heap
    /// never calls it. Any thread.
    ///
    /// # Errors
    /// When the driver refuses, or reports a failure of earlier work.
    ///
    /// # Safety
    /// `stream` exists and belongs to this device's primary context.
    pub unsafe fn synchronize(&self, stream: StreamId) -> Result<(), DriverError> {
        let _entered = self.primary.enter(true)?;
        // SAFETY: the caller's.
        unsafe { self.primary.api().synchronize_stream(self.resolve(stream)) }
    }

    fn api(&self) -> &'static Api {
        self.primary.api()
    }

    /// The stream as the driver knows it.
    fn resolve(&self, stream: StreamId) -> u64 {
        match (stream.0, self.null_stream) {
            (0, NullStream::PerThread) => STREAM_PER_THREAD,
            (stream, _) => stream,
        }
    }

    /// Fails for a stream that captures: recording or waiting there would become part of the graph.
    fn refuse_capturing(&self, stream: u64) -> Result<(), DriverError> {
        // SAFETY: streams of the `Backend` trait exist.
        if unsafe { self.api().is_capturing(stream) }? {
            return Err(DriverError::new(DriverCall::Event, "the stream is capturing a graph"));
        }
        Ok(())
    }
}

/// Identities that the driver does not give have this bit set; its own count up from small numbers,
/// and addresses of user space stay below it too.
const OWN_KEY: u64 = 1 << 63;

/// A number for the calling thread that no other thread ever has (0 is no thread's).
fn thread_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local!(static NUMBER: Cell<u64> = const { Cell::new(0) });
    NUMBER.with(|number| {
        if number.get() == 0 {
            number.set(NEXT.fetch_add(1, Relaxed));
        }
        number.get()
    })
}

impl Backend for CudaBackend {
    fn kind(&self) -> BackendKind {
        BackendKind::Cuda
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn memory(&self) -> Result<MemoryInfo, DriverError> {
        let _entered = self.primary.enter(true)?;
        let (free, total) = self.api().memory_info()?;
        Ok(MemoryInfo { free, total })
    }

    fn reserve(&self, bytes: u64) -> Result<u64, DriverError> {
        let _entered = self.primary.enter(true)?;
        self.api().reserve(bytes, GRANULE)
    }

    unsafe fn unreserve(&self, address: u64, bytes: u64) -> Result<(), DriverError> {
        let _entered = self.primary.enter(true)?;
        // SAFETY: the caller's.
        unsafe { self.api().unreserve(address, bytes) }
    }

    fn create(&self, bytes: u64) -> Result<PhysicalAllocation, DriverError> {
        let _entered = self.primary.enter(true)?;
        self.api().create(bytes, self.memory).map(PhysicalAllocation)
    }

    unsafe fn map(&self, address: u64, handle: PhysicalAllocation, bytes: u64) -> Result<(), DriverError> {
        let _entered = self.primary.enter(true)?;
        // SAFETY: the caller's.
        unsafe { self.api().map(address, handle.0, bytes) }
    }

    unsafe fn set_access(&self, address: u64, bytes: u64) -> Result<(), DriverError> {
        let _entered = self.primary.enter(true)?;
        // SAFETY: the caller's.
        unsafe { self.api().set_access(address, bytes, &self.peers.access()) }
    }

    unsafe fn unmap(&self, address: u64, bytes: u64) -> Result<(), DriverError> {
        let _entered = self.primary.enter(true)?;
        // SAFETY: the caller's.
        unsafe { self.api().unmap(address, bytes) }
    }

    unsafe fn release(&self, handle: PhysicalAllocation, _bytes: u64) -> Result<(), DriverError> {
        let _entered = self.primary.enter(true)?;
        // SAFETY: the caller's.
        unsafe { self.api().release(handle.0) }
    }

    /// The legacy stream waits for the own streams of all threads.
    fn of_all_threads(&self, stream: StreamId) -> StreamId {
        if self.resolve(stream) == STREAM_PER_THREAD { StreamId(STREAM_LEGACY) } else { stream }
    }

    fn retired(&self, stream: StreamId) {
        let stream = self.resolve(stream);
        // Those of the driver are never destroyed.
        if stream > STREAM_PER_THREAD {
            self.identities.forget(stream);
        }
    }

    /// The default stream and each thread's own have identities of this backend; others have the
    /// driver's, or where it has none their handle. A stream that captures is not asked for its
    /// identity, which would invalidate the capture: it has the one it had when last asked, so it should
    /// be announced or used before. Leaves the context as found.
    fn stream_key(&self, stream: StreamId) -> Result<u64, Error> {
        match self.resolve(stream) {
            0 | STREAM_LEGACY => Ok(OWN_KEY),
            STREAM_PER_THREAD => Ok(OWN_KEY | thread_number()),
            other => {
                // SAFETY: the trait's streams exist; the driver answers for one of another context too.
                let capturing = || unsafe { self.api().is_capturing(other) };
                let entered = |_| self.primary.enter(true).and_then(|_entered| capturing());
                // Asked again after a refusal, which must not end in the call that breaks a capture: within the
                // context, should none be current, and once more.
                if capturing().or_else(entered).or_else(entered).unwrap_or(false) {
                    return Ok(self.identities.of(other));
                }
                // SAFETY: as above; a stream that is dead says so here.
                match unsafe { self.api().stream_id(other) } {
                    None => Ok(self.identities.numbered(other)),
                    Some(Ok(id)) => Ok(self.identities.note(other, id)),
                    Some(Err((true, error))) => Err(Error::DeadStream { stream: other, why: error.reason }),
                    Some(Err((false, error))) => Err(error.into()),
                }
            }
        }
    }

    fn known_stream_key(&self, stream: StreamId) -> Option<u64> {
        match self.resolve(stream) {
            0 | STREAM_LEGACY => Some(OWN_KEY),
            STREAM_PER_THREAD => Some(OWN_KEY | thread_number()),
            // A handle is used again while work of the stream that was destroyed still runs: 29 of 30 times on an H200.
            other if self.trusts_handles => self.identities.known(other),
            _ => None,
        }
    }

    fn is_lasting(&self, stream: StreamId) -> bool {
        self.is_default(stream)
    }

    /// A thread's own default stream ends with its thread.
    fn is_default(&self, stream: StreamId) -> bool {
        matches!(self.resolve(stream), 0 | STREAM_LEGACY)
    }

    /// A stream that captures a graph is refused. [`EventScope::Context`] must not be asked for while
    /// any stream of the context captures: the driver refuses it and invalidates the capture.
    fn record(&self, scope: EventScope) -> Result<Event, DriverError> {
        let _entered = self.primary.enter(true)?;
        let stream = match scope {
            EventScope::Context => None,
            EventScope::Stream(stream) => Some(self.resolve(stream)),
        };
        if let Some(stream) = stream {
            self.refuse_capturing(stream)?;
        }
        let event = self.events.take(self.api())?;
        let recorded = match stream {
            // SAFETY: an event of this context that nobody else holds.
            None => unsafe { self.api().record_context(event, self.primary.context()) },
            // SAFETY: as above; the trait's streams exist.
            Some(stream) => unsafe { self.api().record(event, stream) },
        };
        match recorded {
            Ok(()) => Ok(Event(event)),
            Err(error) => {
                self.events.give_back(event);
                Err(error)
            }
        }
    }

    fn is_done(&self, event: &Event) -> Result<bool, DriverError> {
        let _entered = self.primary.enter(true)?;
        // SAFETY: events exist until the backend is dropped.
        unsafe { self.api().query(event.0) }
    }

    /// Polls, so that the limit holds: the driver's own wait has none.
    fn wait(&self, event: &Event, limit: Duration) -> Result<bool, DriverError> {
        let _entered = self.primary.enter(true)?;
        let start = Instant::now();
        let mut pause = Duration::from_micros(5);
        loop {
            // SAFETY: events exist until the backend is dropped.
            if unsafe { self.api().query(event.0) }? {
                return Ok(true);
            }
            let waited = start.elapsed();
            let Some(left) = limit.checked_sub(waited).filter(|left| !left.is_zero()) else {
                return Ok(false);
            };
            if waited < Duration::from_micros(50) {
                std::thread::yield_now();
            } else {
                std::thread::sleep(pause.min(left));
                pause = (pause * 2).min(Duration::from_micros(500));
            }
        }
    }

    /// A stream that captures a graph is refused.
    fn stream_wait(&self, stream: StreamId, event: &Event) -> Result<(), DriverError> {
        let _entered = self.primary.enter(true)?;
        let stream = self.resolve(stream);
        self.refuse_capturing(stream)?;
        // SAFETY: the event exists until the backend is dropped; the trait's streams exist.
        unsafe { self.api().stream_wait(stream, event.0) }
    }

    fn adopt(&self, event: ClientEvent) -> Result<Event, DriverError> {
        let _entered = self.primary.enter(true)?;
        let own = self.events.take(self.api())?;
        // SAFETY: the trait's events exist; `own` was taken out of the pool just now.
        match unsafe { self.waiters.record_behind(self.api(), event.0, own) } {
            Ok(()) => Ok(Event(own)),
            Err(error) => {
                self.events.give_back(own);
                Err(error)
            }
        }
    }

    fn abroad(&self, stream: StreamId, device: Option<u32>) -> Result<Option<Abroad>, Error> {
        self.find_abroad(stream, device)
    }

    /// A stream that captures a graph is refused.
    fn record_abroad(&self, abroad: &Abroad, all: bool) -> Result<Event, DriverError> {
        self.event_abroad(abroad, all)
    }

    fn recycle(&self, event: Event) {
        self.events.give_back(event.0);
    }

    /// Must not be asked for while any stream of the context captures.
    fn quiesce(&self) -> Result<(), DriverError> {
        let _entered = self.primary.enter(true)?;
        self.api().synchronize()
    }

    /// A stream about which the driver gives no answer counts as not capturing.
    fn is_capturing(&self, stream: StreamId) -> bool {
        let Ok(_entered) = self.primary.enter(true) else { return false };
        // SAFETY: the trait's streams exist.
        unsafe { self.api().is_capturing(self.resolve(stream)) }.unwrap_or(false)
    }

    /// Also sees a capture of a stream that is not listed, where that stream waits for the legacy one.
    fn any_capturing(&self, streams: &[StreamId]) -> bool {
        let Ok(_entered) = self.primary.enter(true) else { return false };
        let streams = streams.iter().map(|stream| self.resolve(*stream));
        // SAFETY: the trait's streams exist, and the legacy one always does.
        streams.chain([STREAM_LEGACY]).any(|stream| unsafe { self.api().is_capturing(stream) }.unwrap_or(false))
    }

    fn device(&self) -> u32 {
        self.index
    }

    /// A descriptor of the handle alone.
    unsafe fn export(&self, handle: PhysicalAllocation) -> Result<(OwnedFd, u64), DriverError> {
        // SAFETY: the caller's.
        Ok((unsafe { self.export_fd(handle) }?, 0))
    }

    fn peers(&self) -> Vec<u32> {
        self.peers.list()
    }

    fn reach(&self, peer: u32) -> Result<(), Error> {
        peers::reach(&self.primary, self.index, peer)
    }

    unsafe fn set_peer_access(&self, address: u64, bytes: u64, peer: u32, on: bool) -> Result<(), DriverError> {
        let access = if on { Access::new([peer.cast_signed()]) } else { Access::none(peer.cast_signed()) };
        let _entered = self.primary.enter(true)?;
        // SAFETY: the caller's.
        unsafe { self.api().set_access(address, bytes, &access) }
    }

    fn add_peer(&self, peer: u32) {
        self.peers.add(peer);
    }

    /// The device's UUID.
    fn device_id(&self) -> [u8; 16] {
        self.uuid
    }

    /// That the handle has `bytes` is seen when it is mapped.
    fn import(&self, fd: BorrowedFd<'_>, start: u64, _bytes: u64) -> Result<PhysicalAllocation, DriverError> {
        self.import_fd(fd, start)
    }

    fn now(&self) -> Duration {
        self.opened.elapsed()
    }
}

impl Drop for CudaBackend {
    fn drop(&mut self) {
        // Refused twice, the driver is shutting down, and the events go with it.
        if let Ok(_entered) = self.primary.enter(true).or_else(|_| self.primary.enter(true)) {
            self.waiters.clear(self.primary.api());
            self.events.clear(self.primary.api());
        }
    }
}
