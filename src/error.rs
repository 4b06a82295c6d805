//! Errors of the library: each says what happened and what to do.

use crate::units::{RESERVE_MAX, UNIT, human};
use rustix::io::Errno;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Result of the library.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Has `Debug` print the sentence of `Display`: it is what `fn main() -> Result<(), Error>` and `unwrap` show to people. What
/// a program or a test wants to know of an error it has from its variants.
macro_rules! debug_is_the_sentence {
    ($error:ty) => {
        impl ::std::fmt::Debug for $error {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                ::std::fmt::Display::fmt(self, f)
            }
        }
    };
}
pub(crate) use debug_is_the_sentence;

debug_is_the_sentence!(DriverError);
debug_is_the_sentence!(Error);
debug_is_the_sentence!(ShareFault);

/// What an operation of a driver was, for errors and counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DriverCall {
    /// Reserve addresses (`cuMemAddressReserve`).
    Reserve,
    /// Give addresses back (`cuMemAddressFree`).
    Unreserve,
    /// Create physical memory (`cuMemCreate`).
    Create,
    /// Map a handle (`cuMemMap`).
    Map,
    /// Make a mapping accessible (`cuMemSetAccess`).
    SetAccess,
    /// Unmap a mapping (`cuMemUnmap`).
    Unmap,
    /// Release physical memory (`cuMemRelease`).
    Release,
    /// Record, query or wait for an event.
    Event,
    /// Anything else (initialisation, attributes, contexts).
    Other,
}

impl fmt::Display for DriverCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Reserve => "reserve",
            Self::Unreserve => "unreserve",
            Self::Create => "create",
            Self::Map => "map",
            Self::SetAccess => "set_access",
            Self::Unmap => "unmap",
            Self::Release => "release",
            Self::Event => "event",
            Self::Other => "driver",
        })
    }
}

/// A refused driver call.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("the {call} call failed: {reason}")]
pub struct DriverError {
    /// Which call.
    pub call: DriverCall,
    /// The driver's own words (error name, or the system's message).
    pub reason: String,
    /// The device has no memory left for this call; the heap then frees some and tries again.
    pub out_of_memory: bool,
    /// `(used, budget)` where the number of memory mappings of the process stood in the way; the heap
    /// turns it into [`Error::MappingLimit`].
    pub mapping_limit: Option<(u64, u64)>,
    /// A descriptor that came for an import is not of memory that the backend shares; the heap turns it into
    /// [`ShareFault::Malformed`].
    pub foreign: bool,
}

impl DriverError {
    /// A failure other than lack of memory.
    pub fn new(call: DriverCall, reason: impl Into<String>) -> Self {
        Self { call, reason: reason.into(), out_of_memory: false, mapping_limit: None, foreign: false }
    }

    /// A failure for lack of device memory.
    pub fn out_of_memory(call: DriverCall, reason: impl Into<String>) -> Self {
        Self { out_of_memory: true, ..Self::new(call, reason) }
    }

    /// A failure because the process may not have more memory mappings: `used` of `budget` are in use.
    pub fn mapping_limit(call: DriverCall, used: u64, budget: u64) -> Self {
        let reason = format!("{used} of {budget} memory mappings are in use (vm.max_map_count)");
        Self { mapping_limit: Some((used, budget)), ..Self::new(call, reason) }
    }

    /// A failure because what came for an import is no memory that is shared.
    pub fn foreign(call: DriverCall, reason: impl Into<String>) -> Self {
        Self { foreign: true, ..Self::new(call, reason) }
    }
}

/// The state of the heap when a request could not be served. Sizes in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct OutOfMemory {
    /// What was asked for.
    pub requested: u64,
    /// The stream that asked.
    pub stream: u64,
    /// The limit in force (the device's free memory where the driver refused before the limit).
    pub limit: u64,
    /// Physical memory that the heap holds.
    pub reserved: u64,
    /// Bytes in live blocks.
    pub allocated: u64,
    /// Reserved bytes that no live block uses.
    pub free: u64,
    /// Largest free range at one place.
    pub largest_free: u64,
    /// Free bytes that the asking stream may not take yet: freed on other streams, not proven passed.
    pub waiting: u64,
    /// Bytes of freed blocks whose exports are open, here or in other processes.
    pub exported: u64,
    /// Free bytes in handles that live blocks hold (a handle cannot be split).
    pub partly_live: u64,
    /// Free bytes inside pinned ranges.
    pub pinned: u64,
    /// Free bytes of capture pools, which are kept for their graphs.
    pub captured: u64,
    /// Bytes given away by remapping whose old address is still mapped.
    pub zombie: u64,
    /// What the driver said last, where it was the driver that refused.
    pub driver: Option<DriverError>,
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "out of memory: {} asked for on stream {}; limit {}, reserved {}, live {}, free {} (largest range {}; not usable: \
             {} waits for other streams, {} shares handles with live blocks, {} is pinned, {} is kept by capture pools)",
            human(self.requested),
            self.stream,
            human(self.limit),
            human(self.reserved),
            human(self.allocated),
            human(self.free),
            human(self.largest_free),
            human(self.waiting),
            human(self.partly_live),
            human(self.pinned),
            human(self.captured),
        )?;
        if self.exported > 0 {
            write!(
                f,
                "; {} of freed blocks are kept for exports that are open, here or in other processes",
                human(self.exported)
            )?;
        }
        if let Some(driver) = &self.driver {
            write!(f, "; {driver}")?;
        }
        // Frees are no help where nothing is live, nor to a request that the limit alone refuses.
        let helps = self.allocated > 0 && (self.driver.is_some() || self.requested <= self.limit);
        let free = if helps { "free some blocks, " } else { "" };
        write!(f, "; {free}raise `limit`, or use a smaller batch")
    }
}

/// Everything that can go wrong in the library.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No memory for the request, after everything was tried.
    #[error("{0}")]
    OutOfMemory(Box<OutOfMemory>),
    /// The address space of the heap has no range of this length left.
    #[error(
        "no address range of {} is left in the {} reserved; {}",
        human(*requested),
        human(*reserved),
        if *requested > RESERVE_MAX - UNIT { "no block can be that long: one has less than 2 TiB" } else { "raise `reserve`" }
    )]
    AddressSpace {
        /// Bytes asked for.
        requested: u64,
        /// Bytes of addresses that the heap holds.
        reserved: u64,
    },
    /// An address that is no live block of this heap.
    #[error("{address:#x} is not a live block of this heap: {why}")]
    InvalidPointer {
        /// The address.
        address: u64,
        /// What it is instead.
        why: PointerFault,
    },
    /// An argument out of range.
    #[error("invalid argument: {0}")]
    InvalidArgument(String),
    /// A stream that was retired, or that the backend does not know.
    #[error("stream {stream:#x} is dead or unknown: {why}; pass a stream that exists")]
    DeadStream {
        /// The stream's handle.
        stream: u64,
        /// What the backend said.
        why: String,
    },
    /// A refused driver call that is no lack of memory. The heap is as it was before the call.
    #[error(transparent)]
    Driver(DriverError),
    /// The system's limit on the number of memory mappings of a process is near.
    #[error(
        "{used} of {budget} memory mappings are in use (vm.max_map_count); raise it with `sysctl -w vm.max_map_count=N` or use larger handles"
    )]
    MappingLimit {
        /// Mappings in use.
        used: u64,
        /// Mappings that the host backend allows itself.
        budget: u64,
    },
    /// A device has no way to another's memory.
    #[error(
        "device {device} cannot reach the memory of device {of} (`nvidia-smi topo -p2p r` shows which can); copy between them by \
         `cudaMemcpyPeerAsync`, which needs no access"
    )]
    Unreachable {
        /// The one that was to get access.
        device: u32,
        /// The one whose memory it is.
        of: u32,
    },
    /// The backend cannot be used here.
    #[error("the {backend} backend is not available: {why}")]
    Unavailable {
        /// Its name.
        backend: &'static str,
        /// Why, and what to do.
        why: String,
    },
    /// A setting is wrong: of `XSEG_CONF`, which the text then names, of a text in its form, or of the builder.
    #[error("{0}")]
    Config(String),
    /// The file of `plan` in `XSEG_CONF` is no plan that can be followed.
    #[error("plan:{}: {why}", path.display())]
    Plan {
        /// Its path.
        path: PathBuf,
        /// What [`crate::PlanError`] says: what is wrong and what to do.
        why: String,
    },
    /// The heap was shut down.
    #[error("the heap was shut down")]
    ShutDown,
    /// Memory could not be given to or taken from another process.
    #[error("memory cannot be shared: {0}")]
    Share(#[from] ShareFault),
}

/// Why memory is not shared with another process. Both sides are as before.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ShareFault {
    /// The backend has no memory that another process could map.
    #[error("the {backend} backend has no memory to share; use `backend:host` or `backend:cuda`")]
    NoMemory {
        /// Its name.
        backend: &'static str,
    },
    /// The exporter's heap is on another backend.
    #[error("it was exported from the {theirs} backend and this heap is on {ours}; import it with a heap on {theirs}")]
    OtherBackend {
        /// The exporter's.
        theirs: &'static str,
        /// The importer's.
        ours: &'static str,
    },
    /// The memory is on another device than the importing heap.
    #[error(
        "it is on the device {}, this heap on {}; import it with a heap on that device, whose `peers` have access",
        uuid(theirs),
        uuid(ours)
    )]
    OtherDevice {
        /// UUID of the exporter's device.
        theirs: [u8; 16],
        /// UUID of the importer's.
        ours: [u8; 16],
    },
    /// The two processes' libraries speak differently.
    #[error("the exporter speaks version {theirs} and this process {ours}; use one version of xseg in both")]
    OtherVersion {
        /// The exporter's.
        theirs: u32,
        /// This process's.
        ours: u32,
    },
    /// What came is not what an exporter sends.
    #[error("what came is no export: {0}")]
    Malformed(String),
    /// The descriptor was imported before: each stands for one import.
    #[error("the export was imported already; export the block once for each import")]
    Used,
    /// The other process ended, or gave up, before everything was there.
    #[error("the other process ended before all of it was there; export the block again")]
    Ended,
    /// The other process said nothing for so long.
    #[error("nothing came from the other process for {} s; is it stopped?", .0.as_secs())]
    Silent(Duration),
    /// Who waited did not want to go on.
    #[error("the wait for the other process was interrupted; export the block again")]
    Interrupted,
    /// The exporter could not go on, and why.
    #[error("the exporter could not go on: {0}")]
    Refused(String),
    /// There is no such import: it has ended, or the address is none of an import.
    #[error("{address:#x} is the address of no open import")]
    NoImport {
        /// The address.
        address: u64,
    },
    /// Work that may use the memory was not done in time, or cannot be waited for while a graph is captured.
    #[error(
        "work on this device may still use it; it ends by itself when that is done (`tick`, `trim`, or a later import)"
    )]
    InUse,
    /// This process or its user may have no more descriptors, so that one could not be made, or those that came did not all
    /// arrive.
    #[error("{0}; raise the limit of open files (`ulimit -n`) or end imports")]
    NoDescriptor(String),
    /// The system refused something.
    #[error("{0}")]
    System(String),
}

/// A UUID as NVIDIA's tools print it.
fn uuid(bytes: &[u8; 16]) -> String {
    let hex = |range: std::ops::Range<usize>| bytes[range].iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    format!("GPU-{}-{}-{}-{}-{}", hex(0..4), hex(4..6), hex(6..8), hex(8..10), hex(10..16))
}

impl ShareFault {
    /// `what` the system refused, with its reason; whether that is a lack of descriptors is told apart.
    pub fn system(what: impl fmt::Display, error: &io::Error) -> Self {
        let what = format!("{what}: {error}");
        match Errno::from_io_error(error) {
            Some(Errno::MFILE | Errno::NFILE | Errno::TOOMANYREFS) => Self::NoDescriptor(what),
            _ => Self::System(what),
        }
    }
}

impl From<DriverError> for Error {
    fn from(error: DriverError) -> Self {
        match error.mapping_limit {
            Some((used, budget)) => Self::MappingLimit { used, budget },
            None if error.foreign => ShareFault::Malformed(error.reason).into(),
            None => Self::Driver(error),
        }
    }
}

/// What an address is, if it is no live block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PointerFault {
    /// It is outside every range of the heap.
    Foreign,
    /// It lies inside a live block; only the block's start can be freed.
    Interior,
    /// The block was freed already (double free), or never handed out.
    Freed,
}

impl fmt::Display for PointerFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Foreign => "it is outside every range of the heap",
            Self::Interior => "it lies inside a block, pass the block's start",
            Self::Freed => "it was freed already or never handed out",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_is_what_can_be_done() {
        let mut full = OutOfMemory { allocated: 512, exported: 3 << 20, ..OutOfMemory::default() };
        let shown = full.to_string();
        let end = "; 3.000 MiB of freed blocks are kept for exports that are open, here or in other processes; free some blocks, raise `limit`, or use a smaller batch";
        assert!(shown.ends_with(end), "{shown}");
        let advised = |full: &OutOfMemory| full.to_string().contains("free some blocks");
        full.requested = 5;
        assert!(!advised(&full), "more than the limit");
        // Then `limit` is what the device had.
        full.driver = Some(DriverError::out_of_memory(DriverCall::Create, "CUDA_ERROR_OUT_OF_MEMORY"));
        assert!(advised(&full));
        full.allocated = 0;
        assert!(!advised(&full), "nothing is live");
    }

    #[test]
    fn what_main_and_unwrap_print_is_the_sentence() {
        let full = OutOfMemory { requested: 5 << 20, ..OutOfMemory::default() };
        let shown = format!("{:?}", Error::OutOfMemory(Box::new(full)));
        assert!(shown.starts_with("out of memory: 5.000 MiB asked for on stream 0; limit"), "{shown}");
        assert!(shown.ends_with("by capture pools); raise `limit`, or use a smaller batch"), "{shown}");
        let refused = DriverError::new(DriverCall::Map, "CUDA_ERROR_INVALID_VALUE");
        assert_eq!(format!("{refused:?}"), "the map call failed: CUDA_ERROR_INVALID_VALUE");
        let shared = Error::from(ShareFault::Used);
        assert_eq!(
            format!("{shared:#?}"),
            "memory cannot be shared: the export was imported already; export the block once for each import"
        );
    }
}
