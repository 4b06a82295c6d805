//! The driver operations: rules are checked against the table first, then the kernel is asked, then
//! the table follows, so that a refused call leaves both as they were.

use super::*;
use parking_lot::{MutexGuard, RwLockReadGuard};
use rustix::io::Errno;
use std::os::fd::{BorrowedFd, OwnedFd};

/// Both locks of a memory operation, and what it needs of the backend.
struct Edit<'a> {
    call: DriverCall,
    budget: u64,
    reservations: RwLockReadGuard<'a, BTreeMap<u64, Reservation>>,
    space: MutexGuard<'a, Space>,
}

impl HostBackend {
    fn edit(&self, call: DriverCall) -> Edit<'_> {
        Edit { call, budget: self.budget, reservations: self.reservations.read(), space: self.space.lock() }
    }
}

impl Edit<'_> {
    fn refuse(&self, reason: impl Into<String>) -> DriverError {
        DriverError::new(self.call, reason)
    }

    fn pieces(&self) -> u64 {
        self.reservations.len() as u64 + self.space.table.pieces()
    }

    /// May the kernel's list grow by `growth` pieces (H5)? Shrinking is always allowed.
    fn afford(&self, growth: i64) -> Result<(), DriverError> {
        let used = self.pieces();
        match growth > 0 && used.saturating_add_signed(growth) > self.budget {
            true => Err(DriverError::mapping_limit(self.call, used, self.budget)),
            false => Ok(()),
        }
    }

    /// The kernel's answer, with what is known of its usual reason.
    fn kernel(&self, answer: Result<(), Errno>) -> Result<(), DriverError> {
        answer.map_err(|error| match error {
            Errno::NOMEM if self.pieces() > self.budget => {
                DriverError::mapping_limit(self.call, self.pieces(), self.budget)
            }
            Errno::NOMEM => self.refuse(format!("{error} (vm.max_map_count may be too low)")),
            _ => self.refuse(error.to_string()),
        })
    }

    /// What a mapping of `handle` would be, if the rules allow it at `address`.
    fn plan(&self, address: u64, handle: PhysicalAllocation, bytes: u64) -> Result<Mapping, DriverError> {
        let run = self.space.physical.get(handle.0).map_err(|reason| self.refuse(reason))?;
        if run.bytes != bytes {
            return Err(self.refuse(format!("handle {} has {} bytes, not {bytes}", handle.0, run.bytes)));
        }
        if !address.is_multiple_of(GRANULE) {
            return Err(self.refuse(format!("address {address:#x} is no multiple of a granule")));
        }
        let inside = self.reservations.range(..=address).next_back().is_some_and(|(_, at)| at.contains(address, bytes));
        if !inside {
            return Err(self.refuse(format!("{bytes} bytes at {address:#x} are not inside one reservation")));
        }
        if let Some(other) = self.space.table.overlap(address, bytes) {
            return Err(self.refuse(format!("{bytes} bytes at {address:#x} overlap the mapping at {other:#x}")));
        }
        Ok(Mapping { handle: handle.0, file: run.file, offset: run.offset, bytes, accessible: false })
    }

    fn exact(&self, address: u64, bytes: u64) -> Result<Mapping, DriverError> {
        self.space.table.exact(address, bytes).map_err(|reason| self.refuse(reason))
    }

    fn show(&mut self, address: u64, mapping: Mapping) -> Result<(), DriverError> {
        self.afford(self.space.table.growth(address, &mapping))?;
        let file = self.space.physical.file_of(mapping.file);
        // SAFETY: a whole mapping of the table that the kernel does not have yet, so a hole of one
        // reservation (H1, H3).
        let answer = unsafe { sys::map_run(address, mapping.bytes, file, mapping.offset) };
        self.kernel(answer)?;
        self.space.table.remove(address);
        self.space.table.insert(address, Mapping { accessible: true, ..mapping });
        Ok(())
    }

    /// # Safety
    /// Nobody uses the mapping.
    unsafe fn hide(&mut self, address: u64, mapping: Mapping) -> Result<(), DriverError> {
        if mapping.accessible {
            // SAFETY: a whole mapping of the table (H1, H3); the caller vouches for its disuse.
            let answer = unsafe { sys::leave_hole(address, mapping.bytes) };
            self.kernel(answer)?;
        }
        self.space.table.remove(address);
        self.space.physical.unmapped(mapping.handle);
        Ok(())
    }
}

impl Backend for HostBackend {
    fn kind(&self) -> BackendKind {
        BackendKind::Host
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn memory(&self) -> Result<MemoryInfo, DriverError> {
        let space = self.space.lock();
        let total = space.physical.total();
        Ok(MemoryInfo { free: total - space.physical.used(), total })
    }

    fn reserve(&self, bytes: u64) -> Result<u64, DriverError> {
        whole(DriverCall::Reserve, bytes)?;
        self.edit(DriverCall::Reserve).afford(1)?;
        let reservation = Reservation::new(bytes).map_err(|reason| DriverError::new(DriverCall::Reserve, reason))?;
        let base = reservation.base;
        self.reservations.write().insert(base, reservation);
        Ok(base)
    }

    unsafe fn unreserve(&self, address: u64, bytes: u64) -> Result<(), DriverError> {
        let mut reservations = self.reservations.write();
        let refuse = |reason| Err(DriverError::new(DriverCall::Unreserve, reason));
        if reservations.get(&address).is_none_or(|reservation| reservation.bytes != bytes) {
            return refuse(format!("{bytes} bytes at {address:#x} are no reservation"));
        }
        if let Some(mapping) = self.space.lock().table.overlap(address, bytes) {
            return refuse(format!("there is still a mapping at {mapping:#x}"));
        }
        reservations.remove(&address);
        Ok(())
    }

    fn create(&self, bytes: u64) -> Result<PhysicalAllocation, DriverError> {
        whole(DriverCall::Create, bytes)?;
        self.space.lock().physical.create(bytes).map(PhysicalAllocation)
    }

    unsafe fn map(&self, address: u64, handle: PhysicalAllocation, bytes: u64) -> Result<(), DriverError> {
        let mut edit = self.edit(DriverCall::Map);
        let mapping = edit.plan(address, handle, bytes)?;
        // Paid when it is made accessible, but refused here, where the heap expects it.
        edit.afford(edit.space.table.growth(address, &mapping))?;
        edit.space.table.insert(address, mapping);
        edit.space.physical.mapped(handle.0);
        Ok(())
    }

    unsafe fn set_access(&self, address: u64, bytes: u64) -> Result<(), DriverError> {
        let mut edit = self.edit(DriverCall::SetAccess);
        let mapping = edit.exact(address, bytes)?;
        if mapping.accessible {
            return Ok(());
        }
        edit.show(address, mapping)
    }

    unsafe fn unmap(&self, address: u64, bytes: u64) -> Result<(), DriverError> {
        let mut edit = self.edit(DriverCall::Unmap);
        let mapping = edit.exact(address, bytes)?;
        // SAFETY: the caller's.
        unsafe { edit.hide(address, mapping) }
    }

    unsafe fn release(&self, handle: PhysicalAllocation, bytes: u64) -> Result<(), DriverError> {
        let mut edit = self.edit(DriverCall::Release);
        let run = edit.space.physical.get(handle.0).map_err(|reason| edit.refuse(reason))?;
        if run.bytes != bytes {
            return Err(edit.refuse(format!("handle {} has {} bytes, not {bytes}", handle.0, run.bytes)));
        }
        edit.space.physical.release(handle.0);
        Ok(())
    }

    unsafe fn relocate(&self, from: u64, to: u64, handle: PhysicalAllocation, bytes: u64) -> Result<(), Unmoved> {
        let mut edit = self.edit(DriverCall::Map);
        let target = edit.plan(to, handle, bytes)?;
        let source = edit.exact(from, bytes)?;
        if source.handle != handle.0 {
            let why = format!("handle {} is mapped at {from:#x}, not {}", source.handle, handle.0);
            return Err(edit.refuse(why).into());
        }
        let target = Mapping { accessible: true, ..target };
        // The budget is for what is left afterwards; the margin below the system's limit bears more.
        let before = edit.pieces();
        edit.space.table.remove(from);
        let growth = edit.space.table.growth(to, &target);
        let growth = edit.pieces().saturating_add_signed(growth) as i64 - before as i64;
        edit.space.table.insert(from, source);
        edit.afford(growth)?;

        if self.moves && source.accessible {
            // SAFETY: two ranges of reservations (H1): a hole, and a whole mapping (H3) that by the
            // caller's word nobody uses.
            let answer = unsafe { sys::move_run(from, to, bytes) };
            edit.kernel(answer)?;
        } else {
            // SAFETY: `to` is a hole of one reservation (H1).
            let answer = unsafe { sys::map_run(to, bytes, edit.space.physical.file_of(target.file), target.offset) };
            edit.kernel(answer)?;
            // SAFETY: nobody uses `from`, by the caller's word.
            let left = if source.accessible { unsafe { sys::leave_hole(from, bytes) } } else { Ok(()) };
            if let Err(error) = edit.kernel(left) {
                // SAFETY: the mapping at `to` is new, nobody uses it.
                let left = unsafe { sys::leave_hole(to, bytes) }.is_err();
                if left {
                    edit.space.table.insert(to, target);
                    edit.space.physical.mapped(handle.0);
                }
                return Err(Unmoved { error, left });
            }
        }
        edit.space.table.remove(from);
        edit.space.table.insert(to, target);
        Ok(())
    }

    fn stream_key(&self, stream: StreamId) -> Result<u64, Error> {
        self.streams.key(stream)
    }

    fn is_lasting(&self, _stream: StreamId) -> bool {
        self.streams.are_virtual()
    }

    fn record(&self, scope: EventScope) -> Result<Event, DriverError> {
        match scope {
            EventScope::Context => self.outside_captures(DriverCall::Event, "an event over the whole context")?,
            EventScope::Stream(stream) => self.not_capturing(stream)?,
        }
        self.streams.record(scope)
    }

    fn is_done(&self, event: &Event) -> Result<bool, DriverError> {
        self.streams.is_done(event)
    }

    fn wait(&self, event: &Event, limit: Duration) -> Result<bool, DriverError> {
        self.streams.wait(event, limit)
    }

    fn stream_wait(&self, stream: StreamId, event: &Event) -> Result<(), DriverError> {
        self.not_capturing(stream)?;
        self.streams.stream_wait(stream, event)
    }

    fn adopt(&self, event: ClientEvent) -> Result<Event, DriverError> {
        self.streams.adopt(event.0)
    }

    fn recycle(&self, event: Event) {
        self.streams.recycle(event);
    }

    fn quiesce(&self) -> Result<(), DriverError> {
        self.outside_captures(DriverCall::Other, "a wait for the device")?;
        self.streams.quiesce()
    }

    fn is_capturing(&self, stream: StreamId) -> bool {
        self.captures.contains(stream)
    }

    /// All handles are runs of one memfd, so that the descriptor stands for all of the device's memory.
    unsafe fn export(&self, handle: PhysicalAllocation) -> Result<(OwnedFd, u64), DriverError> {
        let refused = |why: String| DriverError::new(DriverCall::Other, why);
        let space = self.space.lock();
        let run = space.physical.get(handle.0).map_err(refused)?;
        let file = space.physical.file_of(run.file).try_clone().map_err(|error| {
            let few = matches!(Errno::from_io_error(&error), Some(Errno::MFILE | Errno::NFILE));
            let advice = if few { "; raise the limit of open files (`ulimit -n`)" } else { "" };
            refused(format!("{error}{advice}"))
        })?;
        Ok((file.into(), run.offset))
    }

    fn import(&self, fd: BorrowedFd<'_>, start: u64, bytes: u64) -> Result<PhysicalAllocation, DriverError> {
        whole(DriverCall::Other, bytes)?;
        let imported = self.space.lock().physical.import(fd, start, bytes);
        imported.map(PhysicalAllocation).map_err(|why| DriverError::foreign(DriverCall::Other, why))
    }

    unsafe fn release_shared(&self, handle: PhysicalAllocation, bytes: u64) -> Result<(), DriverError> {
        self.space.lock().physical.lend(handle.0);
        // SAFETY: the caller's.
        unsafe { self.release(handle, bytes) }
    }

    fn now(&self) -> Duration {
        self.clock.as_ref().map_or_else(|| self.started.elapsed(), Timeline::now)
    }
}

impl Drop for HostBackend {
    fn drop(&mut self) {
        // Work still queued may use the memory: it ends first.
        self.streams.finish();
        let leaks = self.leaks();
        if !leaks.is_empty() {
            tracing::warn!(%leaks, "the host backend ends with things not given back");
        }
    }
}

fn whole(call: DriverCall, bytes: u64) -> Result<(), DriverError> {
    match bytes > 0 && bytes.is_multiple_of(GRANULE) {
        true => Ok(()),
        false => Err(DriverError::new(call, format!("{bytes} bytes are no multiple of a granule"))),
    }
}
