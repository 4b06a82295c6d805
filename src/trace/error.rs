//! Why a trace cannot be read.
#![forbid(unsafe_code)]

use std::path::PathBuf;

const FORM: &str =
    "lines are a,ID,BYTES,STREAM,TIME_US or f,ID,TIME_US or u,ID,STREAM,TIME_US, and comments start with #";

/// Why a trace cannot be read, where, and what to do.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The file cannot be opened.
    #[error("cannot open {}: {why}; check the path and its permissions", path.display())]
    Open {
        /// The path as given.
        path: PathBuf,
        /// The system's words.
        why: String,
    },
    /// Reading or unfolding failed on the way.
    #[error("the file cannot be read after line {line}: {why}; it is cut off or damaged, so copy or record it again")]
    Read {
        /// Whole lines read before (0 in a snapshot).
        line: u64,
        /// The system's or the decompressor's words.
        why: String,
    },
    /// A line is not of the form.
    #[error("line {line} (`{text}`): {why}; {FORM}")]
    Line {
        /// Its number, from 1.
        line: u64,
        /// Its beginning, escaped where it is no readable text.
        text: String,
        /// What is wrong.
        why: &'static str,
    },
    /// A block is allocated under a number that is live.
    #[error("line {line}: block {id} is allocated again before its free; give each live block its own number")]
    Duplicate {
        /// The line's number, from 1.
        line: u64,
        /// The block's number in the file.
        id: u64,
    },
    /// A free or use names no live block.
    #[error(
        "line {line}: block {id} is not live (never allocated, or freed already); remove the line or add the allocation"
    )]
    Unknown {
        /// The line's number, from 1.
        line: u64,
        /// The block's number in the file.
        id: u64,
    },
    /// The file goes beyond a limit that keeps memory bounded.
    #[error("the file holds more than {most} {what}; record a shorter run or cut the file")]
    TooLarge {
        /// What there is too much of.
        what: &'static str,
        /// The limit.
        most: u64,
    },
    /// A snapshot is larger than what is read into memory.
    #[error(
        "the snapshot is larger than {} MiB; record it without stacks, \
         torch.cuda.memory._record_memory_history(context=None), or with fewer events (max_entries=N)",
        most >> 20
    )]
    SnapshotTooLarge {
        /// The limit in bytes, unfolded.
        most: u64,
    },
    /// A snapshot pickle is damaged or not of the kind that PyTorch writes.
    #[error("the pickle is not readable at byte {offset}: {why}; write it with torch.cuda.memory._dump_snapshot(path)")]
    Pickle {
        /// Offset in the (unfolded) pickle.
        offset: usize,
        /// What is wrong.
        why: &'static str,
    },
    /// A file whose name is a pickle's, and whose first line is neither that nor a trace.
    #[error(
        "the file is no pickle, though it is named like one: it begins with `{start}`; write it with torch.cuda.memory._dump_snapshot(path)"
    )]
    NoPickle {
        /// Its beginning, escaped where it is no readable text.
        start: String,
    },
    /// A pickle that is no snapshot with history.
    #[error(
        "the pickle is no PyTorch memory snapshot with history: {0}; call torch.cuda.memory._record_memory_history() \
         before the run and torch.cuda.memory._dump_snapshot(path) after it"
    )]
    NotASnapshot(String),
    /// A snapshot has no events of the device that was named.
    #[error("the snapshot has no events of device {device}; it has some of {}", listed(there))]
    NoDevice {
        /// The device's number.
        device: u32,
        /// Numbers of those of which there are events.
        there: Vec<u32>,
    },
    /// A device was named for a file that names none.
    #[error(
        "the file is a trace and no PyTorch snapshot, so that it names no devices to choose from; leave `--device` out"
    )]
    NoDevices,
    /// No event is in the file.
    #[error("the file holds no allocation; give a trace ({FORM}) or a PyTorch snapshot pickle")]
    Empty,
}

/// `device 0`, `devices 0, 1 and 3`.
pub(super) fn listed(devices: &[u32]) -> String {
    let texts: Vec<String> = devices.iter().map(u32::to_string).collect();
    match &texts[..] {
        [one] => format!("device {one}"),
        [first @ .., last] => format!("devices {} and {last}", first.join(", ")),
        [] => "no device".to_owned(),
    }
}

crate::error::debug_is_the_sentence!(TraceError);
