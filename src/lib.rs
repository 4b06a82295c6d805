//! xseg: an allocator for GPU memory that owns addresses and physical memory separately.
//!
//! A [`Heap`] reserves a range of addresses, maps physical memory behind it as it grows, and where free memory is
//! scattered moves the physical memory to where it is needed: no live byte is copied, no pointer changes. Its policy is
//! a [`Config`], or the text of `XSEG_CONF` ([`conf`]). Every method may be called from any thread.
//!
//! ```
//! use xseg::{Heap, StreamId};
//!
//! # fn main() -> xseg::Result<()> {
//! let heap = Heap::builder().conf("limit:1GiB,backend:host")?.build()?;
//! let block = heap.alloc(64 << 20, StreamId(0))?;
//! assert_eq!(block.len(), 64 << 20);
//! assert!(heap.stats().reserved >= 64 << 20);
//! # Ok(())
//! # }
//! ```
//!
//! * Streams are numbers: on `cuda` the client's `CUstream`. Memory is reused by the stream that freed it at once, by
//!   others when all streams have passed the free; `Allocation::record_use` declares a use elsewhere.
//! * `DeviceBuffer` (feature `cuda`) is what `cudarc`'s copies, cuBLAS and kernel launches take.
//! * [`Heap::begin_capture`] keeps what a CUDA graph was captured with in its place.
//! * [`backend`] has the devices: `cuda`, `host` (memory that is really remapped) and `sim` (counted and priced calls).
//!
//! Features: `cli` (default) the command line and the benchmark suite; `cuda` the CUDA backend, whose bindings come from
//! `cuda-12080` (default), `cuda-13000` or `cuda-version-from-build-system`: choose one, the last two with
//! `default-features = false`. The driver is loaded at run time; a build needs no CUDA.
pub mod backend;
pub mod baselines;
mod bits;
#[cfg(feature = "cuda")]
mod buffer;
#[cfg(feature = "cli")]
pub mod cli;
pub mod conf;
pub mod config;
mod edges;
mod epoch;
pub mod error;
mod heap;
mod keys;
mod lock;
mod lookup;
#[cfg(feature = "cli")]
pub mod peers;
mod physical;
mod plan;
mod policy;
pub mod process;
#[cfg(feature = "cli")]
pub mod replay;
mod segment;
mod share;
mod shown;
#[cfg(feature = "cli")]
mod subjects;
#[cfg(feature = "cli")]
mod suite;
#[cfg(feature = "cli")]
pub mod trace;
pub mod units;
mod used;

pub use backend::{ClientEvent, StreamId};
#[cfg(feature = "cuda")]
pub use buffer::DeviceBuffer;
pub use config::Config;
pub use error::{Error, Result};
pub use heap::{
    Allocation, Export, Heap, HeapBuilder, Imported, OutOfMemoryCallback, PlanState, PoolId, Region, RegionState,
    Stats, StreamFilter, TrimReport,
};
pub use plan::ahead::{Plan, PlanError, PlanSummary, RecordedBlock};

/// The README's examples run as they stand.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
