//! xseg: an allocator for GPU memory that owns addresses and physical memory separately.
pub mod backend;
mod bits;
pub mod conf;
pub mod config;
mod driver;
pub mod error;
#[cfg(feature = "cli")]
pub mod replay;
#[cfg(feature = "cli")]
pub mod trace;
pub mod units;

pub use error::{Error, Result};
