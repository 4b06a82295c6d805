//! The sections of the device suite, and what they share.

pub(crate) mod bandwidth;
pub(crate) mod cost;
pub(crate) mod facts;
pub(crate) mod fresh;
pub(crate) mod growth;
pub(crate) mod heap;
pub(crate) mod memory;
pub(crate) mod pairs;
pub(crate) mod peers;
pub(crate) mod remap;
pub(crate) mod replay;
pub(crate) mod report;
pub(crate) mod scenarios;
pub(crate) mod several;
pub(crate) mod share;

pub(crate) use peers::Peers;
pub(crate) use report::Report;

use report::Section;
use std::sync::Arc;
use std::time::{Duration, Instant};
use xseg::Error;
use xseg::backend::Backend;
use xseg::backend::cuda::memory::Kernels;
use xseg::backend::cuda::{CudaBackend, CudaOptions, DriverInfo, driver_info};
use xseg::units::{GIB, round_down};

/// One section: its name on the command line, what it does, and how.
pub(crate) struct Entry {
    /// Name on the command line and in the report.
    pub(crate) name: &'static str,
    /// A line for people.
    pub(crate) what: &'static str,
    /// Runs it. An error ends the section, not the suite.
    pub(crate) run: fn(&Suite) -> Result<Section, Error>,
}

/// All sections in the order in which they run.
pub(crate) const SECTIONS: &[Entry] = &[
    Entry { name: "fresh", what: "the first growth, before the memory was used", run: fresh::run },
    Entry { name: "facts", what: "what the backend and the kernels promise, checked on this device", run: facts::run },
    Entry { name: "cost", what: "what each driver call costs, by handle size", run: cost::run },
    Entry { name: "growth", what: "growth and its undoing by bare driver calls, by handle size", run: growth::run },
    Entry { name: "remap", what: "remapping scattered handles by bare driver calls", run: remap::run },
    Entry { name: "bandwidth", what: "a copy kernel on mapped handles and on cuMemAlloc memory", run: bandwidth::run },
    Entry { name: "busy", what: "memory asked for while kernels use all that is free", run: heap::busy },
    Entry { name: "speed", what: "growth and remapping through the heap beside bare loops", run: heap::speed },
    Entry { name: "pairs", what: "pairs of an allocation and a free, beside other allocators", run: peers::pairs },
    Entry { name: "scenarios", what: "patterns from public reports, on this device", run: scenarios::run },
    Entry { name: "share", what: "memory that two processes use: kernels of both, ends in any order", run: share::run },
    Entry { name: "several", what: "several GPUs of one host: peers, a heap on each, copies", run: several::run },
    Entry { name: "replay", what: "the traces, stamped and checked by kernels", run: replay::verified },
    Entry { name: "ballast", what: "the traces in the least memory that sim needs", run: replay::ballast },
    Entry { name: "peers", what: "the traces through other allocators as they are", run: peers::replays },
];

/// The opened device and how much to do.
#[derive(Debug)]
pub(crate) struct Suite {
    /// The device.
    pub(crate) backend: Arc<CudaBackend>,
    /// Kernels on it.
    pub(crate) kernels: Kernels,
    /// The driver and its devices.
    pub(crate) driver: DriverInfo,
    /// Do less.
    pub(crate) quick: bool,
    /// Bytes to grow to.
    pub(crate) growth: u64,
    /// Only these traces, by name; all if empty.
    pub(crate) traces: Vec<String>,
    /// Other allocators.
    pub(crate) peers: Peers,
}

impl Suite {
    /// Opens a device.
    ///
    /// # Errors
    /// Without a driver or device, and when it refuses the kernels.
    pub(crate) fn open(device: u32, quick: bool, growth_gib: u64, traces: Vec<String>) -> Result<Self, Error> {
        let driver = driver_info()?;
        let backend = Arc::new(CudaBackend::open(device, &CudaOptions::default())?);
        let kernels = Kernels::load(backend.clone())?;
        let growth = if quick { 2 * GIB } else { growth_gib * GIB };
        Ok(Self { backend, kernels, driver, quick, growth, traces, peers: Peers::default() })
    }

    /// At most `bytes`, and at most 80 % of what is free now; a multiple of `of`.
    ///
    /// # Errors
    /// When the driver refuses to say what is free.
    pub(crate) fn at_most(&self, bytes: u64, of: u64) -> Result<u64, Error> {
        let free = self.backend.memory()?.free;
        Ok(round_down(bytes.min(free / 10 * 8), of).max(of))
    }

    /// `full`, or `quick` in a quick run.
    pub(crate) fn choose<T>(&self, full: T, quick: T) -> T {
        if self.quick { quick } else { full }
    }
}

/// Runs `call` and says how long it took.
///
/// # Errors
/// `call`'s.
pub(crate) fn timed<T, E>(call: impl FnOnce() -> Result<T, E>) -> Result<(T, Duration), E> {
    let start = Instant::now();
    let done = call()?;
    Ok((done, start.elapsed()))
}

/// The middle value; 0 for none.
pub(crate) fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// Microseconds.
pub(crate) fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// The numbers below `count` in an order that is always the same and looks random.
pub(crate) fn shuffled(count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    for last in (1..count).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        order.swap(last, (state >> 33) as usize % (last + 1));
    }
    order
}
