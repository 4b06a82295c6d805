//! What work on the device and tests of it use: streams to run closures on, and access to memory.

use super::*;

impl HostBackend {
    /// Opens a stream. Its thread starts with its first work. Ids of destroyed streams are used again.
    ///
    /// # Errors
    /// 1024 streams exist, or streams are virtual.
    pub fn create_stream(&self) -> Result<StreamId, DriverError> {
        self.streams.create()
    }

    /// Ends a stream: it takes no more work, what is queued still runs. Does not wait.
    ///
    /// # Errors
    /// The stream does not exist, is the default stream, or streams are virtual.
    pub fn destroy_stream(&self, stream: StreamId) -> Result<(), DriverError> {
        self.streams.destroy(stream)
    }

    /// Queues `work` on a stream, after everything queued there before. It may hold the backend; the
    /// backend's drop waits for it. If it panics, every later stream or event call fails, as after a
    /// fault of a GPU.
    ///
    /// # Errors
    /// [`Error::DeadStream`]; [`Error::Driver`] after a panic, for a stream that captures, where streams are
    /// virtual, and where the system gives no thread.
    pub fn launch(&self, stream: StreamId, work: impl FnOnce() + Send + 'static) -> Result<(), Error> {
        self.not_capturing(stream)?;
        self.streams.launch(stream, Box::new(work))
    }

    /// Writes `bytes` at `address`.
    ///
    /// # Errors
    /// The range is not mapped and accessible.
    pub fn write(&self, address: u64, bytes: &[u8]) -> Result<(), AccessError> {
        self.write_pieces(&[(address, bytes)])
    }

    /// Fills `bytes` from `address`.
    ///
    /// # Errors
    /// The range is not mapped and accessible.
    pub fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), AccessError> {
        self.read_pieces(&mut [(address, bytes)])
    }

    /// Writes many pieces, about 1000 a system call.
    ///
    /// # Errors
    /// A piece is not mapped and accessible; pieces before it were written.
    pub fn write_pieces(&self, pieces: &[(u64, &[u8])]) -> Result<(), AccessError> {
        let reservations = self.reservations.read();
        for (address, bytes) in pieces {
            within(&reservations, *address, bytes.len())?;
        }
        // SAFETY: the addresses are in reservations (H1), which cannot go while the lock is held, and
        // no Rust object lies there (H6).
        match unsafe { access::write(pieces) } {
            Ok(()) => Ok(()),
            Err(Refused::At(address)) => Err(AccessError::new(address, "not mapped")),
            Err(Refused::Call) => {
                pieces.iter().try_for_each(|(address, bytes)| self.by_table(*address, Side::Write(bytes)))
            }
        }
    }

    /// Reads many pieces, about 1000 a system call.
    ///
    /// # Errors
    /// A piece is not mapped and accessible; pieces before it were read.
    pub fn read_pieces(&self, pieces: &mut [(u64, &mut [u8])]) -> Result<(), AccessError> {
        let reservations = self.reservations.read();
        for (address, bytes) in &*pieces {
            within(&reservations, *address, bytes.len())?;
        }
        match access::read(pieces) {
            Ok(()) => Ok(()),
            Err(Refused::At(address)) => Err(AccessError::new(address, "not mapped")),
            Err(Refused::Call) => {
                pieces.iter_mut().try_for_each(|(address, bytes)| self.by_table(*address, Side::Read(bytes)))
            }
        }
    }

    /// Access through the memfd where a sandbox forbids `process_vm_readv`: by the own table instead of
    /// the page table.
    fn by_table(&self, address: u64, mut side: Side<'_>) -> Result<(), AccessError> {
        let space = self.space.lock();
        let mut done = 0;
        while done < side.len() {
            let at = address + done as u64;
            let (start, mapping) = space
                .table
                .at(at)
                .filter(|(_, mapping)| mapping.accessible)
                .ok_or_else(|| AccessError::new(at, "not mapped"))?;
            let inside = at - start;
            let end = side.len().min(done + (mapping.bytes - inside) as usize);
            let (file, offset) = (space.physical.file_of(mapping.file), mapping.offset + inside);
            match &mut side {
                Side::Read(bytes) => file.read_exact_at(&mut bytes[done..end], offset),
                Side::Write(bytes) => file.write_all_at(&bytes[done..end], offset),
            }
            .map_err(|error| AccessError::new(at, error.to_string()))?;
            done = end;
        }
        Ok(())
    }

    /// A view of part of a handle that does not go through any mapping of the backend, to prove that
    /// bytes followed their page. `offset` and `bytes` lie in the handle, `offset` on a page boundary.
    ///
    /// # Errors
    /// The handle does not exist, the range is not in it, or the system refuses the mapping.
    ///
    /// # Safety
    /// Nobody writes to that part of the handle, nor releases it, while the view exists.
    pub unsafe fn view_physical(
        &self,
        handle: PhysicalAllocation,
        offset: u64,
        bytes: usize,
    ) -> Result<Mmap, DriverError> {
        let refused = |reason: String| DriverError::new(DriverCall::Other, reason);
        let space = self.space.lock();
        let run = space.physical.get(handle.0).map_err(refused)?;
        if offset.checked_add(bytes as u64).is_none_or(|end| end > run.bytes) {
            return Err(refused(format!("the range is not in the {} of handle {}", human(run.bytes), handle.0)));
        }
        let mut options = MmapOptions::new();
        let view = options.offset(run.offset + offset).len(bytes);
        // SAFETY: the file is never truncated; the caller keeps the bytes as they are.
        unsafe { view.map(space.physical.file_of(run.file)) }.map_err(|error| refused(error.to_string()))
    }
}

enum Side<'a> {
    Read(&'a mut [u8]),
    Write(&'a [u8]),
}

impl Side<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Read(bytes) => bytes.len(),
            Self::Write(bytes) => bytes.len(),
        }
    }
}

fn within(reservations: &BTreeMap<u64, Reservation>, address: u64, bytes: usize) -> Result<(), AccessError> {
    let at = reservations.range(..=address).next_back();
    match at.is_some_and(|(_, reservation)| reservation.contains(address, bytes as u64)) {
        true => Ok(()),
        false => Err(AccessError::new(address, "outside of every reservation")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_way_around_a_sandbox_reaches_the_same_bytes() {
        let backend = HostBackend::new(HostOptions::default()).unwrap();
        let base = backend.reserve(4 * GRANULE).unwrap();
        let handles: Vec<_> = (0..2).map(|_| backend.create(GRANULE).unwrap()).collect();
        // The second handle first, so that offsets do not simply go on.
        for (place, handle) in handles.iter().rev().enumerate() {
            // SAFETY: free places of the reservation.
            unsafe { backend.map(base + place as u64 * GRANULE, *handle, GRANULE) }.unwrap();
            // SAFETY: mapped in the line above.
            unsafe { backend.set_access(base + place as u64 * GRANULE, GRANULE) }.unwrap();
        }
        let seam = base + GRANULE - 2;
        backend.write(seam, &[1, 2, 3, 4]).unwrap();
        let mut seen = [0; 4];
        backend.by_table(seam, Side::Read(&mut seen)).unwrap();
        assert_eq!(seen, [1, 2, 3, 4]);
        backend.by_table(seam, Side::Write(&[5, 6, 7, 8])).unwrap();
        backend.read(seam, &mut seen).unwrap();
        assert_eq!(seen, [5, 6, 7, 8]);
        let error = backend.by_table(base + 2 * GRANULE - 1, Side::Read(&mut seen)).unwrap_err();
        assert_eq!(error, AccessError::new(base + 2 * GRANULE, "not mapped"));
        assert_eq!(backend.read(base + 2 * GRANULE - 1, &mut seen), Err(error));
    }
}
