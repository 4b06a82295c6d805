//! What the device can do, found out by doing it once.

use super::CudaOptions;
use super::enter::Primary;
use super::peers::{self, Peers};
use super::sys::{Access, Attribute, MemoryKind, undo};
use crate::backend::Capabilities;
use crate::error::{DriverError, Error};
use crate::units::GRANULE;

/// What the probe found.
#[derive(Debug)]
pub(super) struct Probed {
    pub(super) capabilities: Capabilities,
    pub(super) memory: MemoryKind,
    pub(super) peers: Peers,
}

/// First compute capability (major) on which page tables are edited beside running kernels: a card
/// of 7.0 faulted in public reports.
const CONCURRENT_REMAP_MAJOR: i32 = 8;

pub(super) fn unavailable(why: impl Into<String>) -> Error {
    Error::Unavailable { backend: "cuda", why: why.into() }
}

/// Probes the device whose context is current.
pub(super) fn probe(primary: &Primary, ordinal: i32, options: &CudaOptions) -> Result<Probed, Error> {
    let (api, device) = (primary.api(), primary.device());
    let name = api.device_name(device)?;
    if api.attribute(Attribute::VirtualMemory, device)? == 0 {
        return Err(unavailable(format!(
            "{name} has no virtual memory management (vGPU profiles and very old cards lack it); use another device or backend"
        )));
    }
    let mut notes = Vec::new();
    let plain = MemoryKind { device: ordinal, posix_fd: false, rdma: false };
    let granularity = api.granularity(plain)?;
    if granularity == 0 || !GRANULE.is_multiple_of(granularity) {
        return Err(unavailable(format!(
            "{name} maps memory in pieces of {granularity} bytes, which do not divide 2 MiB"
        )));
    }

    let peers = Peers::new(ordinal, peers::reachable(primary, options, &mut notes)?);

    let posix_fd = options.exportable && wanted(primary, Attribute::PosixHandles, "POSIX-fd export", &mut notes)?;
    let rdma = options.rdma && wanted(primary, Attribute::RdmaWithVirtualMemory, "RDMA", &mut notes)?;
    let memory = best_kind(primary, MemoryKind { posix_fd, rdma, ..plain }, &peers.access(), &mut notes)?;

    let context_events = context_events(primary, &mut notes)?;
    if !api.has_stream_ids() {
        notes.push("the driver has no stream identities (cuStreamGetId): streams are known by their handles".into());
    }
    let major = api.attribute(Attribute::ComputeMajor, device)?;
    let minor = api.attribute(Attribute::ComputeMinor, device)?;
    let concurrent_remap = major >= CONCURRENT_REMAP_MAJOR;
    if !concurrent_remap {
        notes.push(format!("compute capability {major}.{minor}: page tables are edited only when the device is idle"));
    }
    let capabilities = Capabilities { granularity, context_events, concurrent_remap, device: name, notes };
    Ok(Probed { capabilities, memory, peers })
}

/// Does the device claim the property? If not, a note says that it was dropped.
fn wanted(primary: &Primary, attribute: Attribute, what: &str, notes: &mut Vec<String>) -> Result<bool, DriverError> {
    let has = primary.api().attribute(attribute, primary.device())? != 0;
    if !has {
        notes.push(format!("{what} dropped: the device does not offer it"));
    }
    Ok(has)
}

/// The first kind of memory, from the one wished for down to the plain one, that can be mapped.
fn best_kind(
    primary: &Primary,
    wish: MemoryKind,
    access: &Access,
    notes: &mut Vec<String>,
) -> Result<MemoryKind, DriverError> {
    let plain = MemoryKind { posix_fd: false, rdma: false, ..wish };
    let mut refusal: Option<DriverError> = None;
    for kind in [wish, MemoryKind { rdma: false, ..wish }, MemoryKind { posix_fd: false, ..wish }] {
        if kind == plain || (kind == wish && refusal.is_some()) {
            continue;
        }
        match trial(primary, kind, access) {
            Ok(()) => {
                if let Some(reason) = refusal {
                    notes.push(format!("{} dropped: {reason}", if kind.rdma { "POSIX-fd export" } else { "RDMA" }));
                }
                return Ok(kind);
            }
            // A full card refuses every kind: that says nothing about this one.
            Err(error) if error.out_of_memory => return Err(error),
            Err(error) => refusal = refusal.or(Some(error)),
        }
    }
    trial(primary, plain, access)?;
    if let Some(reason) = refusal {
        let dropped = match (wish.posix_fd, wish.rdma) {
            (true, true) => "POSIX-fd export and RDMA",
            (true, false) => "POSIX-fd export",
            _ => "RDMA",
        };
        notes.push(format!("{dropped} dropped: {reason}"));
    }
    Ok(plain)
}

/// Reserves, creates, maps, opens, and undoes it all again; also when a step fails. That something cannot be undone says
/// nothing of the kind.
fn trial(primary: &Primary, kind: MemoryKind, access: &Access) -> Result<(), DriverError> {
    let api = primary.api();
    let address = api.reserve(GRANULE, GRANULE)?;
    let mapped = api.create(GRANULE, kind).and_then(|memory| {
        // SAFETY: a whole new handle over a whole new reservation.
        let mapped = unsafe { api.map(address, memory, GRANULE) }.and_then(|()| {
            // SAFETY: the mapping made just now.
            let opened = unsafe { api.set_access(address, GRANULE, access) };
            // SAFETY: the same mapping; no work has ever used it.
            undo("a mapping of the probe stays", || unsafe { api.unmap(address, GRANULE) });
            opened
        });
        // SAFETY: created above, not named again.
        undo("a handle of the probe stays", || unsafe { api.release(memory) });
        mapped
    });
    // SAFETY: reserved above, and nothing is mapped in it (unless unmapping was refused: then this is too).
    undo("a reservation of the probe stays", || unsafe { api.unreserve(address, GRANULE) });
    mapped
}

/// Records a context-wide event once.
fn context_events(primary: &Primary, notes: &mut Vec<String>) -> Result<bool, DriverError> {
    let api = primary.api();
    if !api.has_context_events() {
        notes.push("context-wide events dropped: the driver has no cuCtxRecordEvent (12.5 and later have)".into());
        return Ok(false);
    }
    let event = api.create_event()?;
    // SAFETY: a new event of this context.
    let recorded = unsafe { api.record_context(event, primary.context()) };
    // SAFETY: created above, not named again; destroying a recorded event is allowed at any time.
    undo("an event of the probe stays", || unsafe { api.destroy_event(event) });
    if let Err(error) = &recorded {
        notes.push(format!("context-wide events dropped: {error}"));
    }
    Ok(recorded.is_ok())
}
