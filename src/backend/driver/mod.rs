//! The backend with every call counted, priced and checked: the one door to the driver.
//!
//! Counts are per handle, whatever way the backend takes, so that `sim` and `host` agree. The door keeps
//! a list of reservations, handles and mappings of its own and refuses what would break the driver's
//! rules, so that the safe code above cannot: a mistake there is a typed error, not another's memory
//! (invariant I10). What it cannot see is queued work: callers unmap only what has passed (I5).
#![allow(unsafe_code, reason = "turns the backend's contracts into checks")]

mod peers;

use super::watch::{MappingCallback, MappingChange, MappingEvent};
use super::{Backend, BackendKind, PhysicalAllocation, cost};
use crate::error::{DriverCall, DriverError};
use crate::process::{FORKED, Process};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Driver calls of a heap or baseline, by kind, in handles touched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "cli", derive(serde::Serialize))]
#[non_exhaustive]
pub struct DriverCalls {
    /// Handles created.
    pub create: u64,
    /// Handles mapped.
    pub map: u64,
    /// Mappings made accessible.
    pub set_access: u64,
    /// Mappings unmapped.
    pub unmap: u64,
    /// Handles released.
    pub release: u64,
    /// Address ranges reserved.
    pub reserve: u64,
}

impl DriverCalls {
    /// All calls together.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.create + self.map + self.set_access + self.unmap + self.release + self.reserve
    }
}

/// Kinds of calls that are counted.
const CALLS: usize = 6;

/// Place of a call among those that are counted.
fn index(call: DriverCall) -> Option<usize> {
    match call {
        DriverCall::Create => Some(0),
        DriverCall::Map => Some(1),
        DriverCall::SetAccess => Some(2),
        DriverCall::Unmap => Some(3),
        DriverCall::Release => Some(4),
        DriverCall::Reserve => Some(5),
        _ => None,
    }
}

fn read(counters: &[AtomicU64; CALLS]) -> DriverCalls {
    let [create, map, set_access, unmap, release, reserve] = counters.each_ref().map(|counter| counter.load(Relaxed));
    DriverCalls { create, map, set_access, unmap, release, reserve }
}

/// See the module's text. Shared; memory calls are made by one thread at a time.
pub(crate) struct Driver {
    backend: Arc<dyn Backend>,
    /// Whose memory it is: on the host a process that was forked off shares it, and would free what its parent uses.
    process: Process,
    counts: [AtomicU64; CALLS],
    /// Time in calls, in nanoseconds: modelled, or measured where the backend is a real device.
    nanos: [AtomicU64; CALLS],
    measured: bool,
    known: Mutex<Known>,
    /// Told of every mapping, while `known` is not locked.
    watchers: Vec<MappingCallback>,
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver").field("backend", &self.backend).finish_non_exhaustive()
    }
}

/// What exists, by the door's own count.
#[derive(Debug, Default)]
struct Known {
    /// Address → bytes.
    reservations: BTreeMap<u64, u64>,
    /// Handle → bytes, and how often it was created or imported.
    handles: BTreeMap<u64, (u64, u32)>,
    mappings: BTreeMap<u64, Mapping>,
    /// Other devices that have access to all that is mapped (I16).
    peers: Vec<u32>,
}

#[derive(Debug, Clone, Copy)]
struct Mapping {
    bytes: u64,
    handle: PhysicalAllocation,
    /// Of an import: watchers are not told.
    quiet: bool,
}

fn refused(call: DriverCall, why: &str) -> DriverError {
    DriverError::new(call, format!("refused before the driver saw it: {why}; this is a defect of xseg"))
}

impl Known {
    fn may_map(&self, at: u64, handle: PhysicalAllocation, bytes: u64) -> Result<(), DriverError> {
        let end = at.checked_add(bytes).ok_or_else(|| refused(DriverCall::Map, "the range overflows"))?;
        if !self.has(handle, bytes) {
            return Err(refused(DriverCall::Map, "the handle does not exist in this size"));
        }
        let inside = self.reservations.range(..=at).next_back().is_some_and(|(start, len)| end <= start + len);
        if !inside {
            return Err(refused(DriverCall::Map, "the range is not in one reservation"));
        }
        let free = self.mappings.range(..end).next_back().is_none_or(|(start, found)| start + found.bytes <= at);
        if free { Ok(()) } else { Err(refused(DriverCall::Map, "something is mapped there")) }
    }

    fn may_unmap(&self, at: u64, bytes: u64) -> Result<Mapping, DriverError> {
        match self.mappings.get(&at) {
            Some(found) if found.bytes == bytes => Ok(*found),
            _ => Err(refused(DriverCall::Unmap, "the range is not exactly one mapping")),
        }
    }

    fn has(&self, handle: PhysicalAllocation, bytes: u64) -> bool {
        self.handles.get(&handle.0).is_some_and(|found| found.0 == bytes)
    }
}

impl Driver {
    pub(crate) fn new(backend: Arc<dyn Backend>, watchers: Vec<MappingCallback>) -> Self {
        let measured = backend.kind() == BackendKind::Cuda;
        let known = Known { peers: backend.peers(), ..Known::default() };
        Self {
            backend,
            process: Process::this(),
            counts: Default::default(),
            nanos: Default::default(),
            measured,
            known: Mutex::new(known),
            watchers,
        }
    }

    pub(crate) fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    /// Is this the process that made it, and no child that was forked off?
    pub(crate) fn is_ours(&self) -> bool {
        self.process.is_this()
    }

    /// Keeps the backend for good, in a forked child: its end would wait for threads that are the parent's.
    pub(crate) fn leave(&self) {
        std::mem::forget(Arc::clone(&self.backend));
    }

    /// I15: no memory call of a child that was forked off reaches the driver.
    fn of_parent(&self, call: DriverCall) -> Result<(), DriverError> {
        if self.is_ours() { Ok(()) } else { Err(DriverError::new(call, FORKED)) }
    }

    pub(crate) fn calls(&self) -> DriverCalls {
        read(&self.counts)
    }

    /// Nanoseconds spent so far, by call.
    pub(crate) fn nanos(&self) -> DriverCalls {
        read(&self.nanos)
    }

    fn tell(&self, change: MappingChange, address: u64, mapping: Mapping) {
        let Mapping { bytes, handle, quiet } = mapping;
        if !self.watchers.is_empty() && !quiet {
            let event = MappingEvent { change, address, bytes, handle, device: self.backend.device() };
            for watcher in &self.watchers {
                // A panic half-way through a transaction would leave it undone for good.
                if catch_unwind(AssertUnwindSafe(|| watcher(&event))).is_err() {
                    tracing::error!(?event, "a mapping callback panicked; the heap goes on without it");
                }
            }
        }
    }

    /// Runs `operation`, then counts and prices the calls it stands for.
    fn count<T>(
        &self,
        calls: &[DriverCall],
        bytes: u64,
        operation: impl FnOnce() -> Result<T, DriverError>,
    ) -> Result<T, DriverError> {
        let start = self.measured.then(std::time::Instant::now);
        let done = operation()?;
        let took = start.map(|start| u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX));
        let modelled: u64 = calls.iter().map(|call| cost::nanos(*call, bytes)).sum();
        for &call in calls {
            let Some(index) = index(call) else { continue };
            self.counts[index].fetch_add(1, Relaxed);
            let model = cost::nanos(call, bytes);
            // What several calls took together is shared out as the model says.
            let nanos = took.map_or(model, |took| match modelled {
                0 => took / calls.len() as u64,
                modelled => (u128::from(took) * u128::from(model) / u128::from(modelled)) as u64,
            });
            self.nanos[index].fetch_add(nanos, Relaxed);
        }
        Ok(done)
    }

    /// Reserves addresses.
    pub(crate) fn reserve(&self, bytes: u64) -> Result<u64, DriverError> {
        self.of_parent(DriverCall::Reserve)?;
        let address = self.count(&[DriverCall::Reserve], bytes, || self.backend.reserve(bytes))?;
        self.known.lock().reservations.insert(address, bytes);
        Ok(address)
    }

    /// Address and bytes of all reservations.
    pub(crate) fn reservations(&self) -> Vec<(u64, u64)> {
        self.known.lock().reservations.iter().map(|(address, bytes)| (*address, *bytes)).collect()
    }

    /// Gives a whole reservation back, in which nothing is mapped.
    pub(crate) fn unreserve(&self, address: u64, bytes: u64) -> Result<(), DriverError> {
        self.of_parent(DriverCall::Unreserve)?;
        let mut known = self.known.lock();
        let empty = known.mappings.range(address..address.saturating_add(bytes)).next().is_none();
        if known.reservations.get(&address) != Some(&bytes) || !empty {
            return Err(refused(DriverCall::Unreserve, "it is no whole, empty reservation"));
        }
        // SAFETY: I10: a whole reservation of `reserve` with nothing mapped in it.
        unsafe { self.backend.unreserve(address, bytes) }?;
        known.reservations.remove(&address);
        Ok(())
    }

    /// Creates a handle.
    pub(crate) fn create(&self, bytes: u64) -> Result<PhysicalAllocation, DriverError> {
        self.of_parent(DriverCall::Create)?;
        let handle = self.count(&[DriverCall::Create], bytes, || self.backend.create(bytes))?;
        self.known.lock().handles.insert(handle.0, (bytes, 1));
        Ok(handle)
    }

    /// Takes a handle of another process, to be released once more than before. It counts as no creation. Its bytes are those
    /// that it is known by, whatever was announced now.
    pub(crate) fn import(
        &self,
        fd: BorrowedFd<'_>,
        start: u64,
        bytes: u64,
    ) -> Result<(PhysicalAllocation, u64), DriverError> {
        self.of_parent(DriverCall::Other)?;
        let mut known = self.known.lock();
        let handle = self.backend.import(fd, start, bytes)?;
        let entry = known.handles.entry(handle.0).or_insert((bytes, 0));
        entry.1 += 1;
        Ok((handle, entry.0))
    }

    /// Maps a handle and makes it accessible; on failure nothing is mapped, unless [`Self::is_mapped`] says otherwise.
    pub(crate) fn map(&self, at: u64, handle: PhysicalAllocation, bytes: u64) -> Result<(), DriverError> {
        self.map_as(at, Mapping { bytes, handle, quiet: false })
    }

    /// As [`Self::map`], of an import: its mappings are not announced, from here to [`Self::unmap`].
    pub(crate) fn map_import(&self, at: u64, handle: PhysicalAllocation, bytes: u64) -> Result<(), DriverError> {
        self.map_as(at, Mapping { bytes, handle, quiet: true })
    }

    /// Does a mapping start here? After a refusal it does where undoing that was refused too.
    pub(crate) fn is_mapped(&self, at: u64) -> bool {
        self.known.lock().mappings.contains_key(&at)
    }

    fn map_as(&self, at: u64, mapping: Mapping) -> Result<(), DriverError> {
        self.of_parent(DriverCall::Map)?;
        let Mapping { bytes, handle, .. } = mapping;
        let mut known = self.known.lock();
        known.may_map(at, handle, bytes)?;
        // SAFETY: I10: the range is in one reservation and nothing is mapped in it.
        self.count(&[DriverCall::Map], bytes, || unsafe { self.backend.map(at, handle, bytes) })?;
        // SAFETY: the range is exactly the mapping made above.
        let access = self.count(&[DriverCall::SetAccess], bytes, || unsafe { self.backend.set_access(at, bytes) });
        if access.is_err() {
            // SAFETY: exactly that mapping, and nobody has used it yet.
            let undone = self.count(&[DriverCall::Unmap], bytes, || unsafe { self.backend.unmap(at, bytes) });
            if undone.is_ok() {
                return access;
            }
        }
        // After a second failure the mapping stays, and is known to.
        known.mappings.insert(at, mapping);
        drop(known);
        self.tell(MappingChange::Mapped, at, mapping);
        access
    }

    /// Unmaps one mapping that no queued or running work uses.
    pub(crate) fn unmap(&self, at: u64, bytes: u64) -> Result<(), DriverError> {
        self.of_parent(DriverCall::Unmap)?;
        let mapping = self.known.lock().may_unmap(at, bytes)?;
        // Memory calls come from one thread at a time, so that what was looked up still holds afterwards.
        self.tell(MappingChange::Unmapping, at, mapping);
        let mut known = self.known.lock();
        // SAFETY: I10: exactly one mapping; I5: the caller has proof that its use has passed.
        let done = self.count(&[DriverCall::Unmap], bytes, || unsafe { self.backend.unmap(at, bytes) });
        if done.is_ok() {
            known.mappings.remove(&at);
            return Ok(());
        }
        drop(known);
        self.tell(MappingChange::Kept, at, mapping);
        done
    }

    /// Moves a mapping that no queued or running work uses; on failure it stays where it is, and nothing else is mapped
    /// unless [`Self::is_mapped`] says otherwise.
    pub(crate) fn relocate(
        &self,
        from: u64,
        to: u64,
        handle: PhysicalAllocation,
        bytes: u64,
    ) -> Result<(), DriverError> {
        const CALLS: [DriverCall; 3] = [DriverCall::Map, DriverCall::SetAccess, DriverCall::Unmap];
        self.of_parent(DriverCall::Map)?;
        let mapping = {
            let known = self.known.lock();
            known.may_map(to, handle, bytes)?;
            known.may_unmap(from, bytes)?
        };
        self.tell(MappingChange::Unmapping, from, mapping);
        let mut known = self.known.lock();
        let mut left = false;
        let done = self.count(&CALLS, bytes, || {
            // SAFETY: I10: `to` is free addresses of one reservation, `from` exactly one mapping; I5 for its use.
            unsafe { self.backend.relocate(from, to, handle, bytes) }.map_err(|unmoved| {
                left = unmoved.left;
                unmoved.error
            })
        });
        if done.is_ok() {
            known.mappings.remove(&from);
        }
        // After a second failure the new mapping stays, too, and is known to.
        let mapped = done.is_ok() || left;
        if mapped {
            known.mappings.insert(to, mapping);
        }
        drop(known);
        if done.is_err() {
            self.tell(MappingChange::Kept, from, mapping);
        }
        if mapped {
            self.tell(MappingChange::Mapped, to, mapping);
        }
        done
    }

    /// A file descriptor for a handle's memory, and where in it the handle starts.
    pub(crate) fn export(&self, handle: PhysicalAllocation) -> Result<(OwnedFd, u64), DriverError> {
        self.of_parent(DriverCall::Other)?;
        let known = self.known.lock();
        if !known.handles.contains_key(&handle.0) {
            return Err(refused(DriverCall::Other, "the handle does not exist"));
        }
        // SAFETY: I10: it exists, and is not released while `known` is locked.
        unsafe { self.backend.export(handle) }
    }

    /// Releases a handle that has no mapping.
    pub(crate) fn release(&self, handle: PhysicalAllocation, bytes: u64) -> Result<(), DriverError> {
        // SAFETY: `release_by` passes on what may be released.
        self.release_by(handle, bytes, |backend| unsafe { backend.release(handle, bytes) })
    }

    /// As [`Self::release`], of memory that other processes may have mapped.
    pub(crate) fn release_shared(&self, handle: PhysicalAllocation, bytes: u64) -> Result<(), DriverError> {
        // SAFETY: as above.
        self.release_by(handle, bytes, |backend| unsafe { backend.release_shared(handle, bytes) })
    }

    /// I10: the handle came from `create` or `import` with this size, and its name is dropped with its last use.
    fn release_by(
        &self,
        handle: PhysicalAllocation,
        bytes: u64,
        release: impl FnOnce(&dyn Backend) -> Result<(), DriverError>,
    ) -> Result<(), DriverError> {
        self.of_parent(DriverCall::Release)?;
        let mut known = self.known.lock();
        if !known.has(handle, bytes) {
            return Err(refused(DriverCall::Release, "the handle does not exist in this size"));
        }
        self.count(&[DriverCall::Release], bytes, || release(&*self.backend))?;
        if let Some(entry) = known.handles.get_mut(&handle.0) {
            entry.1 = entry.1.saturating_sub(1);
            if entry.1 == 0 {
                known.handles.remove(&handle.0);
            }
        }
        Ok(())
    }
}
