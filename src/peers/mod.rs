//! Other allocators as they are, measured on a GPU: not the models of `baselines`, but PyTorch's two, CUDA's
//! two and RMM's pool, each driven by the program of `benches/peers`, and xseg on the same device beside them.
//!
//! The program prints [`Line`]s; so does [`own`], for xseg. A report of the device suite keeps them, and
//! [`read`] finds them there.
#![forbid(unsafe_code)]

#[cfg(feature = "cuda")]
pub mod gpu;
mod lines;
pub mod own;
mod program;

pub use lines::{About, Least, Line, Pairs, Replay, Run, Skipped, read};
pub use program::{Limits, Program, Texts, Told};

use std::path::PathBuf;

/// Name of xseg among the others.
pub const OWN: &str = "xseg";

/// What can go wrong with the program of other allocators, and with what it told.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum PeersError {
    /// It cannot be started.
    #[error("cannot start {}: {source}; build it with `benches/peers/run.sh --build`", program.display())]
    Start {
        /// What was to be started.
        program: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A file cannot be read or written.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A line is none that this version knows.
    #[error(
        "line {line} of {from} is nothing that the program of other allocators prints ({why}); build both from one commit"
    )]
    Line {
        /// Where it was.
        from: String,
        /// Its number, from 1.
        line: usize,
        /// What is wrong.
        why: String,
    },
    /// A file holds no figures of other allocators.
    #[error("{} holds no figures of other allocators; `xseg-device --only peers` and benches/peers/run.sh write them", path.display())]
    Nothing {
        /// The file.
        path: PathBuf,
    },
}

crate::error::debug_is_the_sentence!(PeersError);
