//! Handing the memory behind a block to other processes: bare handles, and imports whose end is known (I13).
#![forbid(unsafe_code)]

use super::inner::{Inner, Slow};
use crate::backend::{BackendKind, ExportedHandle, PhysicalAllocation};
use crate::error::{DriverCall, DriverError, Error, Result, ShareFault};
use crate::physical::HandleId;
use crate::segment::nodes::Kind;
use crate::share::{self, BATCH, FIRST, Lease, Offer, Patience, Piece, Server};
use crate::units::{GRANULE, UNIT, UNITS_PER_GRANULE, granule_ceil, granule_floor};
use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// One import that is open.
#[derive(Debug)]
struct Open {
    /// First unit of the block.
    unit: u32,
    /// Bytes of the block.
    bytes: u64,
    /// Granules of the block, pinned once for each import.
    granules: Range<u32>,
    lease: Lease,
}

/// Imports of this heap's blocks that are open.
#[derive(Debug, Default)]
pub(crate) struct Exports(Vec<Open>);

impl Exports {
    /// May another process use the block that starts at this unit?
    pub(super) fn contains(&self, unit: u32) -> bool {
        self.0.iter().any(|open| open.unit == unit)
    }

    /// Pins of a range that imports hold.
    pub(super) fn pins_of(&self, granules: &Range<u32>) -> usize {
        self.0.iter().filter(|open| open.granules == *granules).count()
    }

    /// First units and bytes of the blocks that other processes may use.
    pub(super) fn blocks(&self) -> BTreeMap<u32, u64> {
        self.0.iter().map(|open| (open.unit, open.bytes)).collect()
    }

    /// At the heap's end: importers keep what they have, and are not talked to any more.
    pub(super) fn hang_up(&mut self) {
        self.0.drain(..).for_each(|open| open.lease.hang_up());
    }
}

/// Number of a backend in an offer.
pub(super) const fn number(kind: BackendKind) -> u32 {
    match kind {
        BackendKind::Cuda => 1,
        BackendKind::Host => 2,
        BackendKind::Sim => 3,
    }
}

/// A handle behind a block.
#[derive(Debug, Clone, Copy)]
struct Behind {
    token: PhysicalAllocation,
    granules: u32,
    /// First unit of the handle's mapping.
    start: u32,
}

/// A block that was exported once, for one import: a descriptor that another process turns into an
/// [`Imported`](super::Imported).
///
/// Dropped or lost on its way, the export ends; the block is then as if it had never been. A copy of the descriptor in a forked child
/// counts, as any does: the export ends with the last one. Up to 16 descriptors of the block's
/// memory wait in it, which the system counts against the user's limit of open files; of a block with more handles they are
/// made as the importer asks for them, by a thread that ends with that.
#[derive(Debug)]
#[must_use = "the export ends when this is dropped"]
pub struct Export(OwnedFd);

impl Export {
    /// Sends it over a Unix socket that is connected (a `UnixStream`; any type that keeps bytes or messages in order). The
    /// other side calls [`Heap::receive`](super::Heap::receive). Waits 10 s at most where the socket is full.
    ///
    /// # Errors
    /// [`Error::Share`]; the export has ended then.
    pub fn send(self, socket: impl AsFd) -> Result<()> {
        Ok(share::pass_on(socket.as_fd(), self.0.as_fd(), Patience::default())?)
    }

    /// As [`Self::send`]; while it waits, `go_on` is asked again and again whether it is to.
    ///
    /// # Errors
    /// As there, and [`ShareFault::Interrupted`].
    pub fn send_while(self, socket: impl AsFd, go_on: impl FnMut() -> bool + Send + 'static) -> Result<()> {
        Ok(share::pass_on(socket.as_fd(), self.0.as_fd(), Patience::asking(Box::new(go_on)))?)
    }
}

impl AsFd for Export {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<Export> for OwnedFd {
    /// The descriptor, which the other process gives to [`Heap::import`](super::Heap::import).
    fn from(export: Export) -> Self {
        export.0
    }
}

impl From<OwnedFd> for Export {
    /// An export that came as a descriptor, to be passed on. Whether it is one is seen by who imports it.
    fn from(export: OwnedFd) -> Self {
        Self(export)
    }
}

impl super::Allocation {
    /// See [`Heap::export`](super::Heap::export).
    ///
    /// # Errors
    /// As there.
    pub fn export(&self) -> Result<Export> {
        self.heap.export(self.block.address)
    }
}

impl Inner {
    /// The handles behind a range of units, in address order.
    fn behind(&self, slow: &Slow, block: Range<u32>) -> Result<Vec<Behind>> {
        let mut found = Vec::new();
        let mut at = block.start;
        while at < block.end {
            let page = slow.physical.page(at / UNITS_PER_GRANULE);
            let Some(handle) = slow.physical.handle(page.handle) else {
                let why = "a granule of the block has no handle; this is a defect of xseg";
                return Err(DriverError::new(DriverCall::Other, why).into());
            };
            let start = (at / UNITS_PER_GRANULE - page.offset) * UNITS_PER_GRANULE;
            found.push(Behind { token: handle.token, granules: handle.granules, start });
            at = start + handle.granules * UNITS_PER_GRANULE;
        }
        Ok(found)
    }

    /// A descriptor for each handle behind a live block, in address order. When one is refused, those
    /// before it are closed again.
    pub(crate) fn export_handles(&self, address: u64) -> Result<Vec<ExportedHandle>> {
        // Handles stay where they are while this is held.
        let slow = self.slow.lock();
        if self.shut.load(Relaxed) {
            return Err(Error::ShutDown);
        }
        let block = {
            let (_, segment, id) = self.live_block(address)?;
            segment.nodes[id].start..segment.nodes[id].end()
        };
        let mut exported = Vec::new();
        for Behind { token, granules, start, .. } in self.behind(&slow, block.clone())? {
            let first = start.max(block.start);
            let stop = (start + granules * UNITS_PER_GRANULE).min(block.end);
            let (fd, at) = self.driver.export(token)?;
            exported.push(ExportedHandle {
                fd,
                offset: at + u64::from(first - start) * UNIT,
                bytes: u64::from(stop - first) * UNIT,
                handle_bytes: u64::from(granules) * GRANULE,
            });
        }
        Ok(exported)
    }

    /// Exports a live block for one import.
    pub(super) fn export(self: &Arc<Self>, address: u64) -> Result<Export> {
        let kind = self.driver.backend().kind();
        if kind == BackendKind::Sim {
            return Err(ShareFault::NoMemory { backend: kind.name() }.into());
        }
        let mut slow = self.slow.lock();
        if self.shut.load(Relaxed) {
            return Err(Error::ShutDown);
        }
        // What has ended gives its descriptors back for this one.
        self.end_exports(&mut slow);
        let export = self.offer(&mut slow, address);
        if export.is_err() {
            // Its other end was dropped, so that it has ended.
            self.end_exports(&mut slow);
        }
        export
    }

    fn offer(self: &Arc<Self>, slow: &mut Slow, address: u64) -> Result<Export> {
        let (lease, export) = share::pair()?;
        let (block, slack) = {
            let (place, mut segment, id) = self.live_block(address)?;
            // From here on a free finds the export, so that the block and its handles stay (I13).
            let node = &mut segment.nodes[id];
            node.has_uses = true;
            let block = node.start..node.end();
            let granules = granule_floor(block.start)..granule_ceil(block.end);
            let bytes = u64::from(node.len) * UNIT;
            let open = Open { unit: place.unit(), bytes, granules: granules.clone(), lease: lease.clone() };
            self.exports.lock().0.push(open);
            slow.pin(granules);
            (block, node.slack)
        };
        let behind = self.behind(slow, block.clone())?;
        let backend = self.driver.backend();
        let size = u64::from(block.end - block.start) * UNIT;
        let offer = Offer {
            backend: number(backend.kind()),
            device: backend.device_id(),
            handles: behind.len() as u32,
            mapped: behind.iter().map(|one| u64::from(one.granules) * GRANULE).sum(),
            offset: behind.first().map_or(0, |first| u64::from(block.start - first.start) * UNIT),
            size,
            len: size - u64::from(slack),
        };
        let few = behind.len() <= FIRST;
        let first = behind.iter().filter(|_| few).map(|one| self.piece(one)).collect::<Result<Vec<_>>>()?;
        let queued = lease.offer(&offer, &first)?;
        let rest = if few && queued { Vec::new() } else { behind };
        if !rest.is_empty() {
            serve(Arc::downgrade(self), lease.server(), rest)?;
        }
        Ok(Export(export))
    }

    fn piece(&self, one: &Behind) -> Result<(Piece, OwnedFd)> {
        let (fd, start) = self.driver.export(one.token).map_err(|error| {
            share::no_descriptor("no descriptor of the memory can be made").map_or_else(|| error.into(), Error::from)
        })?;
        Ok((Piece { start, bytes: u64::from(one.granules) * GRANULE }, fd))
    }

    /// Looks which imports have ended. Never waits.
    pub(super) fn end_exports(&self, slow: &mut Slow) {
        let ended: Vec<Open> = {
            let mut exports = self.exports.lock();
            if exports.0.is_empty() {
                return;
            }
            let mut hung_up = share::hung_up(exports.0.iter().map(|open| &open.lease)).into_iter();
            let over = |open: &mut Open| hung_up.next() != Some(false) && open.lease.is_over(Duration::ZERO);
            exports.0.extract_if(.., over).collect()
        };
        for open in ended {
            slow.unpin(&open.granules);
        }
    }

    /// Waits for an import of the block at a unit, at most `limit`.
    pub(super) fn wait_for_import(&self, unit: u32, limit: Duration) {
        let lease = self.exports.lock().0.iter().find(|open| open.unit == unit).map(|open| open.lease.clone());
        if let Some(lease) = lease {
            // Whether it has ended is looked at with the rest.
            lease.is_over(limit);
        }
    }

    /// Checks I13: what is exported is live or pending, has its handles and is pinned.
    pub(super) fn check_exports(&self, slow: &Slow) -> Result<(), String> {
        let blocks: Vec<(u32, Range<u32>)> =
            self.exports.lock().0.iter().map(|open| (open.unit, open.granules.clone())).collect();
        for (unit, granules) in blocks {
            let all = granules.end - granules.start;
            let kinds = self.segment_indices().find_map(|index| {
                let segment = self.segment(index);
                segment.iter().find(|id| segment.nodes[*id].start == unit).map(|id| segment.nodes[id].kind)
            });
            let kept = matches!(kinds, Some(Kind::Live | Kind::Pending));
            let (mapped, pinned) = (slow.physical.mapped.count(granules.clone()), slow.physical.pinned.count(granules));
            if !kept || mapped != all || pinned != all {
                return Err(format!(
                    "the exported block at unit {unit} is {kinds:?}, {mapped} of {all} granules mapped, {pinned} pinned"
                ));
            }
        }
        Ok(())
    }

    /// Handles that other processes may use.
    pub(super) fn exported_handles(&self, slow: &Slow) -> HashSet<HandleId> {
        let exports = self.exports.lock();
        let granules = exports.0.iter().flat_map(|open| open.granules.clone());
        granules.map(|granule| slow.physical.page(granule).handle).collect()
    }
}

/// Hands over a block's handles as the importer asks for them, on a thread that ends with it.
fn serve(heap: Weak<Inner>, server: Server, rest: Vec<Behind>) -> Result<(), ShareFault> {
    let hand_over = move || {
        for batch in rest.chunks(BATCH) {
            if !server.is_asked() {
                return;
            }
            let Some(heap) = heap.upgrade() else { return };
            let pieces = batch.iter().map(|one| heap.piece(one)).collect::<Result<Vec<_>>>();
            // Its end has released the handles, and hangs up by itself.
            if heap.shut.load(Relaxed) {
                return;
            }
            drop(heap);
            let queued = pieces.map_err(|error| match error {
                Error::Share(fault) => fault.to_string(),
                error => error.to_string(),
            });
            let queued = queued.and_then(|pieces| server.queue(&pieces).map_err(|error| error.to_string()));
            if let Err(why) = queued {
                return server.refuse(&why);
            }
        }
    };
    let thread = std::thread::Builder::new().name("xseg export".into()).spawn(hand_over);
    thread.map(drop).map_err(|error| ShareFault::System(format!("no thread to hand over handles: {error}")))
}
