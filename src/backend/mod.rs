//! The driver as the heap sees it: reservations, physical handles, mappings, streams, events.
//!
//! A [`Backend`] is mechanism only. It knows nothing of blocks or policy, and the heap calls its
//! memory operations from one thread at a time (they run under the heap's driver lock); event
//! operations may come from any thread. Three backends exist: [`sim`] (no memory, checks every
//! rule of the driver), [`host`] (memfd pages really remapped) and `cuda`.

pub use driver::DriverCalls;
pub use watch::{MappingCallback, MappingChange, MappingEvent};

use crate::error::{DriverError, Error};
use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

mod capture;
pub mod cost;
#[cfg(feature = "cuda")]
pub mod cuda;
pub(crate) mod driver;
pub mod fault;
pub mod gauge;
mod handed_on;
pub mod host;
#[cfg(feature = "cli")]
pub mod inject;
pub(crate) mod nvtx;
pub mod sim;
pub mod timeline;
mod watch;

/// A stream as the client names it: a `CUstream` on CUDA, any number on `sim` and `host` (where
/// [`host::HostBackend::create_stream`] gives those that work can be queued on). 0 is the default stream.
///
/// On CUDA the driver takes the number for a pointer and does not check it: a number that was never a stream of the
/// device may crash the process, as in the driver's own interface. One that was destroyed is told from a new one by
/// its identity, where the driver still knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct StreamId(pub u64);

/// Physical memory of one create call. The number is the backend's own name for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PhysicalAllocation(pub u64);

/// A recorded event. Not `Clone`: whoever holds it is the only one, so it cannot be recorded
/// again while someone waits for it. Give it back with [`Backend::recycle`].
#[derive(Debug, PartialEq, Eq, Hash)]
#[must_use = "an event that is dropped instead of recycled is lost to the backend's pool"]
pub struct Event(pub u64);

/// An event of the client's, which the heap only looks at: a `CUevent` on CUDA, the number in an [`Event`]
/// that the client recorded through the backend elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ClientEvent(pub u64);

/// A stream of another device, which events of this one say nothing of, or one that may be: it captures, and cannot be asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Abroad {
    /// Its device; `None`: not known yet.
    pub device: Option<u32>,
    /// The driver's handle of its context; 0: not known yet.
    pub context: u64,
    /// The driver's handle of the stream.
    pub stream: u64,
    /// Its identity, by which one that is gone is known; 0: a default stream, which always exists.
    pub id: u64,
}

/// Part of a handle's memory that another process or device may map. See
/// [`crate::Heap::export_handles`].
#[derive(Debug)]
#[non_exhaustive]
pub struct ExportedHandle {
    /// Closed when dropped; the memory then lives on while somebody else holds it.
    pub fd: OwnedFd,
    /// First byte of the part in what the descriptor stands for.
    pub offset: u64,
    /// Bytes of the part.
    pub bytes: u64,
    /// Bytes of the whole handle, which is what an importer maps.
    pub handle_bytes: u64,
}

/// What an event covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventScope {
    /// All work queued so far on every stream of the device's context, also streams that the heap
    /// has never seen (`cuCtxRecordEvent`).
    Context,
    /// All work queued so far on one stream.
    Stream(StreamId),
}

/// Which backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BackendKind {
    /// A real GPU.
    Cuda,
    /// Host memory, really remapped.
    Host,
    /// No memory: counts and checks.
    Sim,
}

impl BackendKind {
    /// Name as on the command line and in `XSEG_CONF`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cuda => "cuda",
            Self::Host => "host",
            Self::Sim => "sim",
        }
    }
}

impl fmt::Display for BackendKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What the device can do, as probed when the backend was opened.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Smallest multiple of physical memory in bytes. The heap needs a divisor of 2 MiB.
    pub granularity: u64,
    /// [`EventScope::Context`] works.
    pub context_events: bool,
    /// Page-table edits beside running kernels are known to be safe (compute capability 8.0 and up).
    pub concurrent_remap: bool,
    /// Name of the device, for people.
    pub device: String,
    /// What was tried and dropped, for people.
    pub notes: Vec<String>,
}

impl Default for Capabilities {
    fn default() -> Self {
        Self {
            granularity: crate::units::GRANULE,
            context_events: true,
            concurrent_remap: true,
            device: String::new(),
            notes: Vec::new(),
        }
    }
}

/// Memory of the device in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Not in use by anyone.
    pub free: u64,
    /// All of it; `u64::MAX` where there is no bound.
    pub total: u64,
}

/// Why a mapping was not moved, and whether anything was left of the attempt.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{error}")]
pub struct Unmoved {
    /// The first refusal.
    pub error: DriverError,
    /// The new mapping exists beside the old one, accessible or not, since undoing it was refused too. It is the caller's
    /// to unmap.
    pub left: bool,
}

impl From<DriverError> for Unmoved {
    fn from(error: DriverError) -> Self {
        Self { error, left: false }
    }
}

/// The driver operations that the heap is built on.
///
/// Sizes and addresses are bytes and multiples of [`Capabilities::granularity`]. A handle is
/// mapped, unmapped and released whole; it may be mapped at several addresses at once. A released
/// handle frees its memory when its last mapping is gone.
///
/// # Errors
/// Every operation can fail, and leaves everything as it was when it does; [`Backend::relocate`] says where it could not.
pub trait Backend: Send + Sync + fmt::Debug {
    /// Which backend this is.
    fn kind(&self) -> BackendKind;

    /// What the device can do.
    fn capabilities(&self) -> &Capabilities;

    /// Free and total memory of the device.
    fn memory(&self) -> Result<MemoryInfo, DriverError>;

    /// Reserves `bytes` of addresses, aligned to a granule; nothing is mapped there.
    fn reserve(&self, bytes: u64) -> Result<u64, DriverError>;

    /// Gives a whole reservation back.
    ///
    /// # Safety
    /// `address` and `bytes` are those of a [`Backend::reserve`]; nothing is mapped in it and
    /// nobody uses its addresses any more.
    unsafe fn unreserve(&self, address: u64, bytes: u64) -> Result<(), DriverError>;

    /// Creates physical memory.
    fn create(&self, bytes: u64) -> Result<PhysicalAllocation, DriverError>;

    /// Maps all of `handle` (of `bytes`) at `address`; not accessible yet.
    ///
    /// # Safety
    /// The range lies in one reservation and nothing is mapped in it.
    unsafe fn map(&self, address: u64, handle: PhysicalAllocation, bytes: u64) -> Result<(), DriverError>;

    /// Makes one mapping readable and writable for the device and its [`Backend::peers`].
    ///
    /// # Safety
    /// The range is exactly one mapping.
    unsafe fn set_access(&self, address: u64, bytes: u64) -> Result<(), DriverError>;

    /// Unmaps one mapping.
    ///
    /// # Safety
    /// The range is exactly one mapping, and no work that is queued or running uses its addresses.
    unsafe fn unmap(&self, address: u64, bytes: u64) -> Result<(), DriverError>;

    /// Releases `handle`.
    ///
    /// # Safety
    /// `handle` came from [`Backend::create`] or [`Backend::import`] with `bytes`, and is not named again.
    unsafe fn release(&self, handle: PhysicalAllocation, bytes: u64) -> Result<(), DriverError>;

    /// Moves a mapping: afterwards `handle` is mapped and accessible at `to`, and `from` is unmapped.
    /// Counts as map, `set_access` and unmap whatever way it takes.
    ///
    /// # Safety
    /// As [`Backend::map`] for `to` and [`Backend::unmap`] for `from`.
    unsafe fn relocate(&self, from: u64, to: u64, handle: PhysicalAllocation, bytes: u64) -> Result<(), Unmoved> {
        // SAFETY: the caller vouches for `to`.
        unsafe { self.map(to, handle, bytes) }?;
        // SAFETY: `to` is the mapping made above; `from` is the caller's.
        let done = unsafe { self.set_access(to, bytes) }.and_then(|()| unsafe { self.unmap(from, bytes) });
        // SAFETY: the mapping at `to` is new, nobody has used it.
        done.map_err(|error| Unmoved { error, left: unsafe { self.unmap(to, bytes) }.is_err() })
    }

    /// A stream whose events, whatever thread records them, come after the work of this one of every thread:
    /// itself, unless the name means another stream in each thread.
    fn of_all_threads(&self, stream: StreamId) -> StreamId {
        stream
    }

    /// The stream is retired: its handle may stand for another one from now on.
    fn retired(&self, _stream: StreamId) {}

    /// The identity of a stream: two streams that ever existed never share one, though their
    /// handles may (`cuStreamGetId`).
    ///
    /// # Errors
    /// [`Error::DeadStream`] for a stream that the backend knows not to exist.
    fn stream_key(&self, stream: StreamId) -> Result<u64, Error> {
        Ok(stream.0)
    }

    /// As [`Backend::stream_key`] where that needs no driver call, for the hot path: a few nanoseconds. Out of date for a
    /// handle that is used again after its stream was destroyed, until [`Backend::retired`] or the next
    /// [`Backend::stream_key`]. `None`: ask.
    fn known_stream_key(&self, stream: StreamId) -> Option<u64> {
        self.stream_key(stream).ok()
    }

    /// Does the handle stand for one stream, with one identity on every thread, as long as the backend lives? Then the
    /// hot path asks no more who it is.
    fn is_lasting(&self, _stream: StreamId) -> bool {
        false
    }

    /// Is it the default stream, which nobody can destroy?
    fn is_default(&self, stream: StreamId) -> bool {
        stream.0 == 0
    }

    /// Records an event that completes when all work queued so far in `scope` has.
    fn record(&self, scope: EventScope) -> Result<Event, DriverError>;

    /// Has the event completed? Never waits.
    fn is_done(&self, event: &Event) -> Result<bool, DriverError>;

    /// Blocks the calling thread until the event completes, at most `limit`; says whether it did.
    fn wait(&self, event: &Event, limit: Duration) -> Result<bool, DriverError>;

    /// Makes later work of `stream` wait for the event, on the device.
    fn stream_wait(&self, stream: StreamId, event: &Event) -> Result<(), DriverError>;

    /// An event of the backend's that completes when what the client's event stands for now has. The client
    /// may record its event again or destroy it right afterwards. Never waits.
    fn adopt(&self, _event: ClientEvent) -> Result<Event, DriverError> {
        let why = format!("the {} backend takes no events of clients", self.kind());
        Err(DriverError::new(crate::error::DriverCall::Event, why))
    }

    /// Which stream this is, where it is another device's: `device`'s, where the caller knows whose it is, which the handles of
    /// default streams do not say. `None` for this device's. Of one that captures and was never seen it is not known.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a device that does not exist.
    fn abroad(&self, _stream: StreamId, _device: Option<u32>) -> Result<Option<Abroad>, Error> {
        Ok(None)
    }

    /// An event of this device that completes when what a stream of another device has queued so far has; where that stream is
    /// gone, when all has that its device was given, which is refused unless it may be `all`: that ends captures there. Never waits.
    fn record_abroad(&self, _abroad: &Abroad, _all: bool) -> Result<Event, DriverError> {
        Err(DriverError::new(
            crate::error::DriverCall::Event,
            format!("the {} backend has no other devices", self.kind()),
        ))
    }

    /// Takes an event back.
    fn recycle(&self, event: Event);

    /// Waits until all work of the device is done (for devices whose page tables may not be edited
    /// beside running kernels).
    fn quiesce(&self) -> Result<(), DriverError>;

    /// Is a graph being captured from this stream? While one is, [`EventScope::Context`] and
    /// [`Backend::quiesce`] must not be asked for: the driver refuses them and invalidates the capture.
    fn is_capturing(&self, _stream: StreamId) -> bool {
        false
    }

    /// Is a graph being captured from one of these streams, or from another that the backend can tell?
    fn any_capturing(&self, streams: &[StreamId]) -> bool {
        streams.iter().any(|stream| self.is_capturing(*stream))
    }

    /// Number of the device among those of its kind.
    fn device(&self) -> u32 {
        0
    }

    /// A file descriptor for the memory of a handle, and where in it the handle starts (bytes).
    ///
    /// # Safety
    /// `handle` came from [`Backend::create`] and is not released.
    unsafe fn export(&self, _handle: PhysicalAllocation) -> Result<(OwnedFd, u64), DriverError> {
        let why = format!("the {} backend has no memory to export", self.kind());
        Err(DriverError::new(crate::error::DriverCall::Other, why))
    }

    /// Tells the device from all others that a descriptor could reach: two processes share memory only where they agree
    /// (a GPU's UUID). Zeros: there is one such device, or nobody knows.
    fn device_id(&self) -> [u8; 16] {
        [0; 16]
    }

    /// Takes memory of another process by a descriptor of its [`Backend::export`], where in that the handle starts, and the
    /// handle's bytes. No memory is created; the result is mapped, unmapped and released as one of [`Backend::create`].
    /// The descriptor may be closed afterwards. Importing a handle twice may give the same name twice, each to be released.
    fn import(&self, _fd: BorrowedFd<'_>, _start: u64, _bytes: u64) -> Result<PhysicalAllocation, DriverError> {
        let why = format!("the {} backend imports no memory", self.kind());
        Err(DriverError::new(crate::error::DriverCall::Other, why))
    }

    /// As [`Backend::release`], of memory that other processes have mapped: it lives until they let go of it.
    ///
    /// # Safety
    /// As [`Backend::release`].
    unsafe fn release_shared(&self, handle: PhysicalAllocation, bytes: u64) -> Result<(), DriverError> {
        // SAFETY: the caller's.
        unsafe { self.release(handle, bytes) }
    }

    /// Other devices that have access to memory that is mapped from now on.
    fn peers(&self) -> Vec<u32> {
        Vec::new()
    }

    /// Could another device be given access to this one's memory? Changes nothing.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] where there is no such device, or none at all; [`Error::Unreachable`]; [`Error::Driver`].
    fn reach(&self, peer: u32) -> Result<(), Error> {
        let kind = self.kind();
        Err(Error::InvalidArgument(format!(
            "device {peer}: a heap on the {kind} backend has no GPU's memory to give access to; use `backend:cuda`"
        )))
    }

    /// Gives another device access to one mapping, or takes it away. That of others stays.
    ///
    /// # Safety
    /// The range is exactly one mapping. Where access is taken away, no work of `peer` that is queued or running uses it.
    unsafe fn set_peer_access(&self, _address: u64, _bytes: u64, _peer: u32, _on: bool) -> Result<(), DriverError> {
        let why = format!("the {} backend has no peers", self.kind());
        Err(DriverError::new(crate::error::DriverCall::SetAccess, why))
    }

    /// From now on `peer`, which [`Backend::reach`] is fine with, gets access with the device itself, in [`Backend::set_access`]
    /// and [`Backend::relocate`]: in all heaps on this backend.
    fn add_peer(&self, _peer: u32) {}

    /// Time since some fixed moment, for policies with durations. Not called on the hot path.
    fn now(&self) -> Duration;
}

/// Opens a backend by policy.
///
/// # Errors
/// [`Error::Unavailable`] where it cannot be used, and why.
pub fn open(choice: crate::config::BackendChoice) -> Result<Arc<dyn Backend>, Error> {
    open_with(choice, &crate::config::Config::default())
}

/// As [`open`]; on a GPU the policy's `peers` get access to the memory, and `streams` says how they are known.
///
/// # Errors
/// As [`open`], and for a listed peer that does not exist.
pub fn open_with(
    choice: crate::config::BackendChoice,
    config: &crate::config::Config,
) -> Result<Arc<dyn Backend>, Error> {
    use crate::config::BackendChoice;
    Ok(match choice {
        BackendChoice::Sim => Arc::new(sim::SimBackend::new(sim::SimOptions::default())),
        BackendChoice::Host => Arc::new(host::HostBackend::new(host::HostOptions::default())?),
        BackendChoice::Cuda(device) => open_cuda(device, config)?,
        BackendChoice::Auto => match open_cuda(0, config) {
            Ok(backend) => backend,
            Err(error) => {
                tracing::debug!(%error, "no CUDA device; host memory instead");
                Arc::new(host::HostBackend::new(host::HostOptions::default())?)
            }
        },
    })
}

#[cfg(feature = "cuda")]
fn open_cuda(device: u32, config: &crate::config::Config) -> Result<Arc<dyn Backend>, Error> {
    Ok(Arc::new(cuda::CudaBackend::open(device, &cuda::CudaOptions::of(config)?)?))
}

#[cfg(not(feature = "cuda"))]
fn open_cuda(_: u32, _: &crate::config::Config) -> Result<Arc<dyn Backend>, Error> {
    Err(Error::Unavailable { backend: "cuda", why: "xseg was built without the `cuda` feature".into() })
}
