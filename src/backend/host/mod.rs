//! Host memory that is really remapped: what the heap runs on where there is no GPU.
//!
//! Addresses come from a large inaccessible reservation, physical memory from one sparse memfd, and
//! a handle is a run of it. Moving a handle moves page-table entries (`mremap`); the bytes stay.
//! An access to an address that is not mapped is a real fault. Memory that was never written costs
//! nothing, so that traces of a large GPU replay on a small machine.
//!
//! `map` only notes the mapping, `set_access` makes it one `mmap`: a stage in between with another
//! protection would be a VMA of its own that cannot join its neighbours, and a second call.
//!
//! Invariants (cited in SAFETY comments):
//!
//! - **H1** A reservation is owned by one `MmapRaw` from `reserve` to `unreserve` (or the backend's
//!   drop) and has an inaccessible guard on either side. Every `MAP_FIXED` or `mremap` target lies in
//!   one reservation, checked under the lock that `unreserve` takes.
//! - **H2** Every address of a reservation belongs at all times to a hole or a mapping, never to a gap
//!   that another `mmap` of the process could be given.
//! - **H3** Mappings do not overlap; each is one whole handle, hence one run of the memfd, hence part
//!   of one VMA.
//! - **H4** A granule of the memfd belongs to at most one handle that was created. Its memory is freed, and its
//!   offset handed out again, only when the handle is released, its last mapping is gone and no process was left with it.
//! - **H5** The pieces counted in the table are at least the VMAs that the kernel has for the
//!   reservations; a call that would pass the budget is refused before the kernel is asked.
//! - **H6** The backend forms no reference to device memory: it passes addresses to the kernel.
//! - **H7** An event completes when, and only when, everything queued before it in its scope has run.
//! - **H8** A mapping lies within its memfd, which cannot shrink: the own one and those of imports are sealed.

mod access;
mod capture;
mod device;
mod operations;
mod physical;
mod streams;
mod sys;
mod table;
mod worker;

pub use access::AccessError;
pub use capture::HostGraph;

use super::capture::Captures;
use super::timeline::Timeline;
use super::{
    Backend, BackendKind, Capabilities, ClientEvent, Event, EventScope, MemoryInfo, PhysicalAllocation, StreamId,
    Unmoved,
};
use crate::error::{DriverCall, DriverError, Error};
use crate::units::{GRANULE, human};
use access::Refused;
use memmap2::{Mmap, MmapOptions};
use parking_lot::{Mutex, RwLock};
use physical::Physical;
use std::collections::BTreeMap;
use std::fmt;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};
use streams::{Streams, Workers};
use sys::Reservation;
use table::{Mapping, Table};

/// How a [`HostBackend`] is made. The default is a device of 1 TiB with worker threads.
#[derive(Debug, Clone, Default)]
pub struct HostOptions {
    /// Memory of the device in bytes; 1 TiB if not given. It is nominal: only what is written takes
    /// memory of the machine, so it may exceed that.
    pub total: Option<u64>,
    /// Runs on this clock instead of threads: any stream exists, and events complete by the clock.
    pub timeline: Option<Timeline>,
    /// VMAs that the backend may use; by default half of `vm.max_map_count`, and at least 10,000 less.
    pub vma_budget: Option<u64>,
    /// Moves handles by a second mapping even where `mremap` works, for comparisons.
    pub double_map: bool,
}

/// Memory of the device if nothing else is said: enough for any trace.
const DEFAULT_TOTAL: u64 = 1 << 40;

/// What the memory operations change.
#[derive(Debug)]
struct Space {
    table: Table,
    physical: Physical,
}

/// The host backend. Any thread may call anything.
pub struct HostBackend {
    capabilities: Capabilities,
    budget: u64,
    /// Handles move by `mremap`.
    moves: bool,
    started: Instant,
    clock: Option<Timeline>,
    streams: Streams,
    captures: Captures<capture::Node>,
    /// By base. Locked before `space`; readers keep addresses from being given back.
    reservations: RwLock<BTreeMap<u64, Reservation>>,
    space: Mutex<Space>,
}

/// What a backend still holds. Shown for people; empty after an orderly end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Leaks {
    /// Reservations that were not given back.
    pub reservations: usize,
    /// Mappings that were not unmapped.
    pub mappings: usize,
    /// Handles that were not released, or are still mapped.
    pub handles: usize,
    /// Events that were not recycled.
    pub events: usize,
}

impl Leaks {
    /// Is nothing left?
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl fmt::Display for Leaks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { reservations, mappings, handles, events } = self;
        write!(f, "{reservations} reservations, {mappings} mappings, {handles} handles, {events} events")
    }
}

impl fmt::Debug for HostBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostBackend").field("device", &self.capabilities.device).finish_non_exhaustive()
    }
}

impl HostBackend {
    /// Opens the backend.
    ///
    /// # Errors
    /// [`Error::Unavailable`] where the system refuses a memfd.
    pub fn new(options: HostOptions) -> Result<Self, Error> {
        let HostOptions { total, timeline, vma_budget, double_map } = options;
        let physical = Physical::new(total.unwrap_or(DEFAULT_TOTAL)).map_err(|error| Error::Unavailable {
            backend: BackendKind::Host.name(),
            why: format!(
                "the system gives no memfd ({error}); it needs Linux, a descriptor (`ulimit -n`), and room for the file size \
                 (`ulimit -f`)"
            ),
        })?;
        let mut notes = Vec::new();
        let moves = match sys::can_move(physical.file()) {
            _ if double_map => {
                notes.push("moves by a second mapping, as asked".to_owned());
                false
            }
            Ok(()) => true,
            Err(error) => {
                notes.push(format!("moves by a second mapping: mremap with DONTUNMAP failed ({error})"));
                false
            }
        };
        let device = format!("host memory, {} nominal", human(physical.total()));
        Ok(Self {
            capabilities: Capabilities { device, notes, ..Capabilities::default() },
            budget: vma_budget.unwrap_or_else(sys::default_budget),
            moves,
            started: Instant::now(),
            streams: timeline.clone().map_or_else(|| Streams::Workers(Workers::new()), Streams::Virtual),
            captures: Captures::default(),
            clock: timeline,
            reservations: RwLock::default(),
            space: Mutex::new(Space { table: Table::default(), physical }),
        })
    }

    /// VMAs in use and the most that the backend allows itself. Memory calls that would pass the budget
    /// fail with [`DriverError::mapping_limit`] set; unmapping is never refused for it.
    #[must_use]
    pub fn mapping_budget(&self) -> (u64, u64) {
        let reservations = self.reservations.read().len() as u64;
        (reservations + self.space.lock().table.pieces(), self.budget)
    }

    /// Bytes of the machine's memory that the device's memory takes: what was written and not released.
    ///
    /// # Errors
    /// The system's own.
    pub fn resident(&self) -> Result<u64, DriverError> {
        let resident = self.space.lock().physical.resident();
        resident.map_err(|error| DriverError::new(DriverCall::Other, error.to_string()))
    }

    /// What is reserved, mapped, created or recorded and not given back.
    #[must_use]
    pub fn leaks(&self) -> Leaks {
        let reservations = self.reservations.read().len();
        let space = self.space.lock();
        Leaks {
            reservations,
            mappings: space.table.len(),
            handles: space.physical.len(),
            events: self.streams.open_events(),
        }
    }

    /// Is every byte of `[address, address + bytes)` mapped and accessible?
    #[must_use]
    pub fn is_mapped(&self, address: u64, bytes: u64) -> bool {
        self.reserved(address, bytes) && self.space.lock().table.covers(address, bytes)
    }

    fn reserved(&self, address: u64, bytes: u64) -> bool {
        self.reservations.read().range(..=address).next_back().is_some_and(|(_, at)| at.contains(address, bytes))
    }
}
