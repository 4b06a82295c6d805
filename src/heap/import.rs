//! Memory of other processes, mapped into this one.
#![forbid(unsafe_code)]

use super::Heap;
use super::export::number;
use super::inner::{Inner, Slow};
use super::space::no_addresses;
use crate::backend::{BackendKind, PhysicalAllocation};
use crate::error::{DriverCall, DriverError, Error, Result, ShareFault};
use crate::share::{Offer, Patience, Piece, Tie, no_descriptor, take_over};
use std::collections::HashMap;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// One slice of a wait for the work that uses an import.
const SLICE: Duration = Duration::from_micros(200);

/// A mapped handle of another process, in bytes.
#[derive(Debug, Clone, Copy)]
struct Part {
    at: u64,
    bytes: u64,
    handle: PhysicalAllocation,
    mapped: bool,
}

/// An import. What it holds is given back by [`Inner::take_apart`] alone.
#[derive(Debug, Default)]
pub(crate) struct Import {
    /// Address and bytes of the reservation.
    range: Option<(u64, u64)>,
    parts: Vec<Part>,
    tie: Option<Tie>,
    /// The block's address, and its bytes.
    address: u64,
    size: u64,
    /// Once it was ended: the epoch that must pass.
    epoch: u32,
}

/// Imports of one heap.
#[derive(Debug, Default)]
pub(crate) struct Imports {
    /// By the block's address.
    live: HashMap<u64, Import>,
    /// Ended, waiting for the work that uses them.
    ending: Vec<Import>,
}

impl Imports {
    /// Bytes of the blocks, with ended ones that are still mapped.
    pub(super) fn bytes(&self) -> u64 {
        self.live.values().chain(&self.ending).map(|import| import.size).sum()
    }
}

/// Where an import lies.
#[derive(Debug, Clone, Copy)]
pub(super) struct Found {
    address: u64,
    len: u64,
    size: u64,
}

impl Inner {
    /// Maps an exported block here. The exporter has `patience`.
    pub(super) fn import(&self, export: OwnedFd, patience: Patience) -> Result<Found> {
        let (tie, offer) = Tie::open(export, patience)?;
        self.may_import(&offer)?;
        tie.hello()?;
        let mut import = Import { tie: Some(tie), size: offer.size, ..Import::default() };
        let done = self.bring_in(&mut import, &offer);
        let mut slow = self.slow.lock();
        let done = if self.shut.load(Relaxed) { done.and(Err(Error::ShutDown)) } else { done };
        match done {
            Ok(()) => {
                let address = import.address;
                self.imports.lock().live.insert(address, import);
                Ok(Found { address, len: offer.len, size: offer.size })
            }
            Err(error) => {
                // No work has used it; what cannot be given back now is tried again later.
                self.imports.lock().ending.push(import);
                let quiet = |slow: &mut Slow| !self.capture_under_way() && self.quiesce_device(slow).is_ok();
                if !self.quiesce || self.shut.load(Relaxed) || quiet(&mut slow) {
                    self.end_imports(&mut slow, 0);
                }
                Err(error)
            }
        }
    }

    /// Is it memory of a device that this heap's maps?
    fn may_import(&self, offer: &Offer) -> Result<(), ShareFault> {
        let backend = self.driver.backend();
        let kinds = [BackendKind::Cuda, BackendKind::Host];
        if !kinds.contains(&backend.kind()) {
            return Err(ShareFault::NoMemory { backend: backend.kind().name() });
        }
        let theirs = kinds.into_iter().find(|kind| number(*kind) == offer.backend);
        if theirs != Some(backend.kind()) {
            let theirs = theirs.map_or("unknown", BackendKind::name);
            return Err(ShareFault::OtherBackend { theirs, ours: backend.kind().name() });
        }
        let (ours, unknown) = (backend.device_id(), [0; 16]);
        if ours != offer.device && ours != unknown && offer.device != unknown {
            return Err(ShareFault::OtherDevice { theirs: offer.device, ours });
        }
        Ok(())
    }

    /// Reserves addresses for exactly the handles, and maps them in order. What was done is in `import`, also after an error.
    fn bring_in(&self, import: &mut Import, offer: &Offer) -> Result<()> {
        {
            let mut slow = self.slow.lock();
            self.housekeep(&mut slow);
            let base = self.driver.reserve(offer.mapped).map_err(|error| no_addresses(error, offer.mapped))?;
            import.range = Some((base, offer.mapped));
            import.address = base + offer.offset;
        }
        let mut at = import.address - offer.offset;
        let end = at + offer.mapped;
        while import.parts.len() < offer.handles as usize {
            let Some(tie) = import.tie.as_mut() else { return Err(ShareFault::Ended.into()) };
            // Without a lock: the other process may take its time.
            let pieces = tie.next()?;
            let mut slow = self.slow.lock();
            if self.shut.load(Relaxed) {
                return Err(Error::ShutDown);
            }
            self.quiet_for_edit(&mut slow)?;
            for (Piece { start, bytes }, descriptor) in pieces {
                if bytes > end - at || import.parts.len() == offer.handles as usize {
                    return Err(ShareFault::Malformed("more handles came than were announced".into()).into());
                }
                let (handle, known) = self.driver.import(descriptor.as_fd(), start, bytes).map_err(|error| {
                    no_descriptor("no descriptor of the memory can be kept").map_or_else(|| error.into(), Error::from)
                })?;
                let done = if known == bytes {
                    self.driver.map_import(at, handle, bytes)
                } else {
                    let why = format!("{bytes} bytes were announced for a handle that has {known}");
                    Err(DriverError::new(DriverCall::Other, why))
                };
                // A refusal may leave the mapping behind, when undoing it is refused too.
                import.parts.push(Part { at, bytes: known, handle, mapped: self.driver.is_mapped(at) });
                done?;
                at += bytes;
            }
        }
        if at != end {
            return Err(ShareFault::Malformed("the handles have fewer bytes than were announced".into()).into());
        }
        Ok(())
    }

    /// Waits for the device where page tables may not be edited beside running kernels.
    pub(super) fn quiet_for_edit(&self, slow: &mut Slow) -> Result<()> {
        if self.quiesce && !self.capture_under_way() { self.quiesce_device(slow) } else { Ok(()) }
    }

    /// Unmaps and releases an import, gives its addresses back and tells the exporter. After an error what is left stays
    /// in it.
    fn take_apart(&self, import: &mut Import) -> Result<(), DriverError> {
        while let Some(part) = import.parts.last_mut() {
            if part.mapped {
                self.driver.unmap(part.at, part.bytes)?;
                part.mapped = false;
            }
            self.driver.release(part.handle, part.bytes)?;
            import.parts.pop();
        }
        if let Some((base, bytes)) = import.range {
            self.driver.unreserve(base, bytes)?;
            import.range = None;
        }
        if let Some(tie) = import.tie.take() {
            tie.done();
        }
        Ok(())
    }

    /// Gives back imports that were ended and whose use has passed. Called with the driver lock held.
    pub(super) fn end_imports(&self, _slow: &mut Slow, passed: u32) {
        let due: Vec<Import> = self.imports.lock().ending.extract_if(.., |import| import.epoch <= passed).collect();
        for mut import in due {
            if let Err(error) = self.take_apart(&mut import) {
                tracing::warn!(%error, "an import could not be given back; it is tried again");
                self.imports.lock().ending.push(import);
            }
        }
    }

    /// Were imports ended whose use has passed, that wait only for the device to be quiet?
    pub(super) fn imports_are_due(&self) -> bool {
        let passed = self.epochs.passed();
        self.quiesce && self.imports.lock().ending.iter().any(|import| import.epoch <= passed)
    }

    /// At the heap's end, with the device idle: gives back all imports.
    pub(super) fn end_all_imports(&self, slow: &mut Slow) {
        {
            let mut imports = self.imports.lock();
            let Imports { live, ending } = &mut *imports;
            ending.extend(live.drain().map(|(_, import)| import));
        }
        // A second try, since a refusal may be of the moment.
        (0..2).for_each(|_| self.end_imports(slow, u32::MAX));
    }

    /// Ends an import: it is given back when the work queued so far has passed.
    pub(super) fn end_import(&self, address: u64) -> Result<(), ShareFault> {
        let mut imports = self.imports.lock();
        let mut import = imports.live.remove(&address).ok_or(ShareFault::NoImport { address })?;
        import.epoch = self.epochs.open();
        imports.ending.push(import);
        Ok(())
    }

    /// Gives back what can be now, unless another thread is at work on the heap, who will.
    fn hurry_imports(&self) {
        if let Some(mut slow) = self.slow.try_lock()
            && !self.shut.load(Relaxed)
        {
            self.housekeep(&mut slow);
        }
    }

    /// Waits until an import that was ended is given back, at most the policy's `wait_limit`.
    pub(super) fn wait_for_end(&self, address: u64) -> Result<()> {
        let backend = self.driver.backend();
        let start = backend.now();
        let mut stuck = false;
        loop {
            let oldest = {
                let mut slow = self.slow.lock();
                self.housekeep(&mut slow);
                self.quiet_for_edit(&mut slow)?;
                // With the driver lock: nobody else ends it between these two looks.
                if !self.imports.lock().ending.iter().any(|import| import.address == address) {
                    return Ok(());
                }
                self.epochs.oldest()
            };
            // A free on another thread may have seen the epoch pass since it was asked above; not so twice.
            let nothing_to_wait_for = oldest.is_none() && std::mem::replace(&mut stuck, true);
            let late = backend.now().saturating_sub(start) >= self.config.wait_limit;
            if let Some((_, events)) = oldest {
                let waited = match late {
                    true => Ok(()),
                    false => events.iter().try_for_each(|event| backend.wait(event, SLICE).map(drop)),
                };
                crate::epoch::recycle(backend, events);
                waited?;
            }
            if late || nothing_to_wait_for {
                return Err(ShareFault::InUse.into());
            }
        }
    }
}

/// A block of another process, mapped for this heap's device until this is dropped.
///
/// What is read must have been written before: the heaps order nothing between processes. Both sides may write. Work that
/// was queued before the drop may still use it; the memory is then unmapped when that has passed, and the exporter told.
#[must_use = "the memory is unmapped when this is dropped"]
pub struct Imported {
    heap: Heap,
    found: Found,
    owned: bool,
}

impl Imported {
    /// First address of the block, in this process.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.found.address
    }

    /// Bytes that the exporter asked for.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.found.len
    }

    /// Was nothing asked for?
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.found.len == 0
    }

    /// Bytes that the block takes up, a multiple of 512.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.found.size
    }

    /// Waits for the work queued so far, at most the policy's `wait_limit`, unmaps the memory and tells the exporter.
    ///
    /// # Errors
    /// [`ShareFault::InUse`] when the work is not done in time, or while a graph is captured: the memory is then given back
    /// later, by itself. [`Error::Driver`] when the device cannot be waited for.
    pub fn close(mut self) -> Result<()> {
        self.owned = false;
        // A child that was forked off only forgets its copy (I15).
        if !self.heap.inner.driver.is_ours() {
            return Ok(());
        }
        self.heap.close_import(self.found.address)
    }

    /// The bare address; the import is ended by [`Heap::close_import`] from now on.
    #[must_use]
    pub fn into_raw(mut self) -> u64 {
        self.owned = false;
        self.found.address
    }
}

impl fmt::Debug for Imported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Imported({} B at {:#x})", self.found.len, self.found.address)
    }
}

impl Drop for Imported {
    fn drop(&mut self) {
        // An error where the heap was shut down, which gave it back.
        if self.owned && self.heap.inner.driver.is_ours() {
            let _ = self.heap.end_import(self.found.address);
        }
    }
}

/// Memory that several processes use. Neither side needs a privilege.
///
/// ```no_run
/// # fn main() -> xseg::Result<()> {
/// use std::os::unix::net::UnixStream;
/// use xseg::{Heap, StreamId};
///
/// # fn connected() -> UnixStream { unimplemented!() }
/// // One process, when what it wrote is done:
/// let heap = Heap::from_env()?;
/// let block = heap.alloc(64 << 20, StreamId(0))?;
/// heap.export(block.address())?.send(connected())?;
///
/// // Another one:
/// let heap = Heap::from_env()?;
/// let imported = heap.receive(connected())?;
/// assert_eq!(imported.len(), 64 << 20);
/// imported.close()?;
/// # Ok(())
/// # }
/// ```
impl Heap {
    /// Exports a live block for one import by another process (or this one): see [`Export`](super::Export). The block may be
    /// freed at any time afterwards; its memory is kept from others until the import has ended, by the importer's word or with
    /// its process, which is looked at on the slow path and by [`Heap::tick`]. A handle is mapped whole, so that an importer
    /// can reach what lies beside the block in its first and last one; [`Heap::alloc_contiguous`] has nothing beside it. (On
    /// `host` the descriptors are of the one memfd, through which an importer can reach all of the device's memory.)
    /// Any thread. Costs a descriptor until the import has ended, and a driver call for each handle (39 µs on an H200).
    ///
    /// # Errors
    /// [`Error::InvalidPointer`]; [`Error::Share`] on `sim` and where the system gives no descriptors; [`Error::Driver`]
    /// when the driver does not export the memory.
    pub fn export(&self, address: u64) -> Result<super::Export> {
        self.inner.ours()?;
        self.inner.export(address)
    }

    /// Maps a block that another process exported: `export` is the descriptor of its [`Export`](super::Export). Reserves exactly
    /// the bytes of the block's handles; they do not count towards the limit. Any thread; waits 10 s at most for a process
    /// that has more than 16 handles to give.
    ///
    /// # Errors
    /// [`Error::Share`] for a descriptor that is no export, was used, or comes from another backend, device or version;
    /// [`Error::Driver`] and [`Error::MappingLimit`]. Nothing is left mapped or open then.
    pub fn import(&self, export: impl Into<OwnedFd>) -> Result<Imported> {
        self.import_with(export.into(), Patience::default())
    }

    /// As [`Heap::import`]; while it waits, `go_on` is asked again and again whether it is to.
    ///
    /// # Errors
    /// As there, and [`ShareFault::Interrupted`]: the export is used up then, too.
    pub fn import_while(
        &self,
        export: impl Into<OwnedFd>,
        go_on: impl FnMut() -> bool + Send + 'static,
    ) -> Result<Imported> {
        self.import_with(export.into(), Patience::asking(Box::new(go_on)))
    }

    fn import_with(&self, export: OwnedFd, patience: Patience) -> Result<Imported> {
        let found = self.inner.ours()?.import(export, patience)?;
        Ok(Imported { heap: self.clone(), found, owned: true })
    }

    /// Takes an export from a Unix socket to which the other process has sent it by [`Export::send`](super::Export::send), and
    /// maps it as [`Heap::import`] does. Waits 10 s at most for the other process, for the export and its handles together.
    ///
    /// # Errors
    /// As [`Heap::import`].
    pub fn receive(&self, socket: impl AsFd) -> Result<Imported> {
        self.receive_with(socket.as_fd(), Patience::default())
    }

    /// As [`Heap::receive`], with another longest wait: `limit` for the export and its handles together, of which only
    /// waiting counts.
    ///
    /// # Errors
    /// As [`Heap::import`].
    pub fn receive_within(&self, socket: impl AsFd, limit: Duration) -> Result<Imported> {
        self.receive_with(socket.as_fd(), Patience::new(limit))
    }

    /// As [`Heap::receive`]; while it waits, `go_on` is asked again and again whether it is to.
    ///
    /// # Errors
    /// As [`Heap::import`], and [`ShareFault::Interrupted`]. Before anything came the socket is as it was.
    pub fn receive_while(&self, socket: impl AsFd, go_on: impl FnMut() -> bool + Send + 'static) -> Result<Imported> {
        self.receive_with(socket.as_fd(), Patience::asking(Box::new(go_on)))
    }

    fn receive_with(&self, socket: BorrowedFd<'_>, mut patience: Patience) -> Result<Imported> {
        self.inner.ours()?;
        let export = take_over(socket, &mut patience)?;
        self.import_with(export, patience)
    }

    /// As dropping an [`Imported`], for an address of [`Imported::into_raw`]. Never waits.
    ///
    /// # Errors
    /// [`ShareFault::NoImport`].
    pub fn end_import(&self, address: u64) -> Result<()> {
        self.inner.ours()?.end_import(address)?;
        self.inner.hurry_imports();
        Ok(())
    }

    /// As [`Imported::close`], for an address of [`Imported::into_raw`].
    ///
    /// # Errors
    /// As there, and [`ShareFault::NoImport`].
    pub fn close_import(&self, address: u64) -> Result<()> {
        self.inner.ours()?.end_import(address)?;
        self.inner.wait_for_end(address)
    }
}
