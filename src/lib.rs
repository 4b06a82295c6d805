//! xseg: an allocator for GPU memory that owns addresses and physical memory separately.
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
mod lookup;
mod physical;
mod plan;
mod policy;
#[cfg(feature = "cli")]
pub mod replay;
mod segment;
#[cfg(feature = "cli")]
mod subjects;
#[cfg(feature = "cli")]
mod suite;
#[cfg(feature = "cli")]
pub mod trace;
pub mod units;

pub use backend::{ClientEvent, StreamId};
#[cfg(feature = "cuda")]
pub use buffer::DeviceBuffer;
pub use config::Config;
pub use error::{Error, Result};
pub use heap::{
    Allocation, Heap, HeapBuilder, OutOfMemoryCallback, PoolId, Region, RegionState, Stats, StreamFilter, TrimReport,
};
