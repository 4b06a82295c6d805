//! Allocation traces: what a real run asked for, in a compact form.
//!
//! A file is read by its content, not its name: the text form (`a,ID,BYTES,STREAM,TIME_US` and so on) or a
//! PyTorch snapshot, each plain or compressed by xz or zstd. Files are other people's: whatever is in
//! them, reading ends with a [`Trace`] or a [`TraceError`], in memory bounded by the limits below.

mod error;
mod file;
mod large;
mod pickle;
mod snapshot;
mod text;

pub use error::TraceError;

use crate::units::counted;
use std::collections::HashMap;
use std::path::Path;

/// Most bytes of text that a compressed trace may unfold to.
pub const TEXT_MAX: u64 = 4 << 30;
/// Most bytes of a snapshot pickle, unfolded; reading takes at most some 12 bytes of memory for each.
pub const PICKLE_MAX: u64 = 256 << 20;
/// Most events of one trace (40 bytes of memory each).
pub const EVENTS_MAX: usize = 50_000_000;
/// Largest block in bytes: 256 TiB, more than any address space of a GPU.
pub const BLOCK_MAX: u64 = 1 << 48;
/// Latest time in microseconds, 285 years, so that nanoseconds fit in 64 bits.
pub const TIME_MAX_US: u64 = 9_000_000_000_000_000;

/// What happens to a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// It is allocated, on its stream.
    Alloc,
    /// The client frees it.
    Free,
    /// It is used on the stream with this index in [`Trace::streams`].
    Use(u32),
}

/// One event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// Microseconds since the start of the trace; never falls.
    pub time_us: u64,
    /// Index in [`Trace::blocks`].
    pub block: u32,
    /// What happens.
    pub action: Action,
}

/// One block: an allocation from its birth to its free. A number that a file uses again is another block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// Size in bytes, as requested.
    pub bytes: u64,
    /// Index in [`Trace::streams`].
    pub stream: u32,
}

/// A trace in memory.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Trace {
    /// File name without folder and endings.
    pub name: String,
    /// What the file says about its run, as JSON; empty where it says nothing.
    pub meta_json: String,
    /// Events in order of time.
    pub events: Vec<Event>,
    /// Blocks in order of birth.
    pub blocks: Vec<Block>,
    /// Streams as the run named them, in order of appearance.
    pub streams: Vec<u64>,
    /// What was made up, left out or repaired while reading, in sentences for people.
    pub notes: Vec<String>,
    peak_requested: u64,
    live_at_end: u64,
}

impl Trace {
    /// Reads a trace file of any form.
    ///
    /// # Errors
    /// [`TraceError`] says where the file is wrong and what to do.
    pub fn load(path: &Path) -> Result<Self, TraceError> {
        Self::load_device(path, None)
    }

    /// As [`Trace::load`], of a snapshot's device with this number; `None`: of the one with the longest history, which a note
    /// says where there are others.
    ///
    /// # Errors
    /// As there; also for a device of which the file has no events, and where a device is named for a file that is no snapshot.
    pub fn load_device(path: &Path, device: Option<u32>) -> Result<Self, TraceError> {
        let mut trace = file::load(path, device)?;
        trace.name = name_of(path);
        Ok(trace)
    }

    /// Reads a trace from memory, in any form.
    ///
    /// # Errors
    /// As [`Trace::load`].
    pub fn from_bytes(name: &str, bytes: &[u8]) -> Result<Self, TraceError> {
        let mut trace = file::read_bytes(bytes, None)?;
        name.clone_into(&mut trace.name);
        Ok(trace)
    }

    /// Writes the text form, from which the same events are read back.
    ///
    /// # Errors
    /// `out`'s.
    pub fn write_text(&self, out: &mut impl std::io::Write) -> std::io::Result<()> {
        text::write(self, out)
    }

    /// Most bytes live at once, at the sizes requested: the least memory that any allocator needs.
    #[must_use]
    pub fn peak_requested(&self) -> u64 {
        self.peak_requested
    }

    /// Blocks that are never freed.
    #[must_use]
    pub fn live_at_end(&self) -> u64 {
        self.live_at_end
    }

    /// The stream of a block, as the run named it.
    #[must_use]
    pub fn stream_of(&self, block: u32) -> u64 {
        self.streams[self.blocks[block as usize].stream as usize]
    }
}

/// File name without folder and endings: `runs/gpt2.trace.xz` is `gpt2`.
pub(crate) fn name_of(path: &Path) -> String {
    // It goes into tables and, as a folder's name, back into the file system.
    let name = crate::shown::text(path.file_name().unwrap_or(path.as_os_str()).as_encoded_bytes(), usize::MAX);
    let mut rest: &str = &name;
    for ending in [".xz", ".zst", ".trace", ".pickle", ".pkl"] {
        rest = rest.strip_suffix(ending).filter(|stem| !stem.is_empty()).unwrap_or(rest);
    }
    rest.to_owned()
}

/// Builds a trace event by event, and keeps count.
#[derive(Debug, Default)]
struct Builder {
    trace: Trace,
    stream_index: HashMap<u64, u32>,
    live_bytes: u64,
    /// Events whose time was before their predecessor's.
    out_of_order: u64,
}

impl Builder {
    fn stream(&mut self, stream: u64) -> u32 {
        let next = self.trace.streams.len() as u32;
        let index = *self.stream_index.entry(stream).or_insert(next);
        if index == next {
            self.trace.streams.push(stream);
        }
        index
    }

    fn push(&mut self, time_us: u64, block: u32, action: Action) -> Result<(), TraceError> {
        if self.trace.events.len() >= EVENTS_MAX {
            return Err(TraceError::TooLarge { what: "events", most: EVENTS_MAX as u64 });
        }
        let before = self.trace.events.last().map_or(0, |event| event.time_us);
        self.out_of_order += u64::from(time_us < before);
        self.trace.events.push(Event { time_us: time_us.max(before), block, action });
        Ok(())
    }

    /// Adds a birth; the block's index. `bytes` is at most [`BLOCK_MAX`].
    fn alloc(&mut self, bytes: u64, stream: u64, time_us: u64) -> Result<u32, TraceError> {
        let stream = self.stream(stream);
        // At most EVENTS_MAX blocks of BLOCK_MAX bytes could be live: more than 64 bits.
        let live = self.live_bytes.checked_add(bytes).filter(|live| *live <= u64::MAX / 2);
        self.live_bytes = live.ok_or(TraceError::TooLarge { what: "bytes live at once", most: u64::MAX / 2 })?;
        let block = self.trace.blocks.len() as u32;
        self.push(time_us, block, Action::Alloc)?;
        self.trace.blocks.push(Block { bytes, stream });
        self.trace.peak_requested = self.trace.peak_requested.max(self.live_bytes);
        self.trace.live_at_end += 1;
        Ok(block)
    }

    /// Adds the free of a live block.
    fn free(&mut self, block: u32, time_us: u64) -> Result<(), TraceError> {
        self.live_bytes -= self.trace.blocks[block as usize].bytes;
        self.trace.live_at_end -= 1;
        self.push(time_us, block, Action::Free)
    }

    fn used(&mut self, block: u32, stream: u64, time_us: u64) -> Result<(), TraceError> {
        let stream = self.stream(stream);
        self.push(time_us, block, Action::Use(stream))
    }

    fn finish(mut self) -> Result<Trace, TraceError> {
        if self.trace.blocks.is_empty() {
            return Err(TraceError::Empty);
        }
        if self.out_of_order > 0 {
            self.trace.notes.push(format!(
                "{} earlier than the one before: moved up to it in time",
                counted(self.out_of_order, "event")
            ));
        }
        self.trace.events.shrink_to_fit();
        self.trace.blocks.shrink_to_fit();
        Ok(self.trace)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lose_folder_and_endings() {
        assert_eq!(name_of(Path::new("runs/gpt2.trace.xz")), "gpt2");
        assert_eq!(name_of(Path::new("a.b.pickle.zst")), "a.b");
        assert_eq!(name_of(Path::new("plain")), "plain");
        assert_eq!(name_of(Path::new(".trace")), ".trace");
    }
}
