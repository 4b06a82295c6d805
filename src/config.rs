//! Policy of a heap: what `XSEG_CONF` and the builder set.
#![forbid(unsafe_code)]

use crate::units::MIB;
use std::path::PathBuf;
use std::time::Duration;

/// A size in bytes, or a share of the device's memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum SizeOrShare {
    /// Bytes.
    Bytes(u64),
    /// Share of the device's total memory, above 0.
    Share(f64),
}

/// How much physical memory one growth step creates.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Growth {
    /// What the request misses, no more.
    Exact,
    /// This many bytes at least, but no more beyond the request than a 64th of what may still be created (or 8 MiB).
    Step(u64),
    /// What makes this factor of what is reserved (1.1 = a tenth more), within the same bound.
    Geometric(f64),
}

/// When idle memory goes back to the driver.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Shrink {
    /// Never, but by `trim`.
    Never,
    /// When the driver or the limit refuses growth (the driver's memory may be others' by then).
    Oom,
    /// What no block has used for this long, checked on calls and on `tick`.
    Idle(Duration),
    /// When reserved exceeds live by more than this share of live, checked on calls and on `tick`.
    Watermark(f64),
}

/// When pages move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Defrag {
    /// Only when memory cannot be created: at the limit, or at the configured slack.
    OnPressure,
    /// Before memory is created: reserved stays close to live.
    Eager,
    /// Never: idle handles are released and created anew instead.
    Off,
}

/// What another stream needs before it takes a free block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CrossStream {
    /// Proof that every stream of the context has passed the free.
    Passed,
    /// Nothing of another stream is ever taken.
    Off,
    /// As `Passed`; under pressure a GPU-side wait instead of the proof.
    Wait,
}

/// How large pieces of physical memory are under a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Handles {
    /// Few and large: the least driver time.
    Large,
    /// Many and small: the least memory.
    Small,
}

/// How a CUDA stream is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamHandles {
    /// The driver is asked on each request which stream a handle stands for now.
    Checked,
    /// A handle is one stream until it is retired.
    Trusted,
}

/// How page tables are edited beside running kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RemapMode {
    /// `Concurrent` where the device is known to allow it, else `Quiesce`.
    Auto,
    /// Beside running kernels.
    Concurrent,
    /// After waiting for the device.
    Quiesce,
}

/// Which backend `Heap::from_env` opens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackendChoice {
    /// `cuda` where there is a device, else `host`.
    Auto,
    /// A real GPU, by index.
    Cuda(u32),
    /// Host memory.
    Host,
    /// No memory.
    Sim,
}

/// Devices that get access to a GPU's memory besides itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Peers {
    /// None.
    None,
    /// All that can reach it.
    All,
    /// These, by index, as far as they can reach it.
    Listed(Vec<u32>),
}

/// The policy. Sizes in bytes.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Config {
    /// Most physical memory that may exist. `None`: the device's total less 512 MiB or 1 %, whichever is more.
    pub limit: Option<SizeOrShare>,
    /// Addresses reserved at start. `None`: four times the device's memory (1 TiB where that is unbounded).
    pub reserve: Option<u64>,
    /// How much one growth step creates.
    pub growth: Growth,
    /// Largest handle; whole granules.
    pub handle_max: u64,
    /// How large handles are under a limit, up to `handle_max`.
    pub handles: Handles,
    /// Memory created and mapped at start.
    pub warmup: u64,
    /// When idle memory goes back.
    pub shrink: Shrink,
    /// Physical memory that shrinking leaves.
    pub keep: u64,
    /// When pages move.
    pub defrag: Defrag,
    /// Pages move before memory is created when reserved exceeds (1 + slack) times the most that was live.
    /// `None`: a slack that the heap chooses; infinite: no such bound.
    pub slack: Option<f64>,
    /// Idle ends of partly live handles are used at second mappings where memory runs out.
    pub joins: bool,
    /// Largest request of the small pools; at most 1 MiB.
    pub small_limit: u64,
    /// What another stream needs before it takes a free block.
    pub cross_stream: CrossStream,
    /// How a CUDA stream is known.
    pub streams: StreamHandles,
    /// How page tables are edited beside running kernels.
    pub remap: RemapMode,
    /// Which backend.
    pub backend: BackendChoice,
    /// Devices that get access to the memory, on `cuda`.
    pub peers: Peers,
    /// A plan's file (`xseg plan`), which the heap follows as long as requests are those that it foresees.
    pub plan: Option<PathBuf>,
    /// Print statistics to stderr when the heap ends, of the moment before its memory goes back.
    pub stats: bool,
    /// Ranges for NVIDIA's profilers around growth and moves, where the NVTX library is installed.
    pub nvtx: bool,
    /// Longest host wait, for the device and for exports that are open, before an out-of-memory error.
    pub wait_limit: Duration,
}

impl Config {
    /// The limit in bytes on a device with `total` bytes of memory; `u64::MAX`: none.
    pub(crate) fn limit_on(&self, total: u64) -> u64 {
        match self.limit {
            Some(SizeOrShare::Bytes(bytes)) => bytes,
            // A share of no bound is none.
            Some(SizeOrShare::Share(_)) | None if total == u64::MAX => u64::MAX,
            Some(SizeOrShare::Share(share)) => (total as f64 * share) as u64,
            // Others need some: the driver loads kernels into it.
            None => total - (total / 100).max(512 * MIB).min(total),
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            limit: None,
            reserve: None,
            growth: Growth::Step(64 * MIB),
            handle_max: 32 * MIB,
            handles: Handles::Large,
            warmup: 0,
            shrink: Shrink::Oom,
            keep: 0,
            defrag: Defrag::OnPressure,
            slack: None,
            joins: true,
            small_limit: MIB,
            cross_stream: CrossStream::Passed,
            streams: StreamHandles::Checked,
            remap: RemapMode::Auto,
            backend: BackendChoice::Auto,
            peers: Peers::None,
            plan: None,
            stats: false,
            nvtx: false,
            wait_limit: Duration::from_secs(10),
        }
    }
}

/// Largest value of `small_limit`: small pools have a list for each length up to it.
pub(crate) const SMALL_LIMIT_MAX: u64 = MIB;
