//! Recordings: a heap's allocations, frees and uses as a trace that `xseg replay` reads.

use crate::handles::{heap, xseg_heap};
use crate::heap::text;
use crate::noted::{self, Block};
use crate::quiet::Quiet;
use crate::status::{Failure, guard, xseg_status};
use parking_lot::Mutex;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::ffi::c_char;
use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write};
use std::os::unix::fs::MetadataExt;
use std::time::Instant;
use xseg::RegionState;

/// A heap's recording that is under way.
#[derive(Debug)]
struct Recording {
    heap: usize,
    number: u32,
    blocks: u64,
    began: Instant,
    out: BufWriter<Quiet>,
    path: String,
    /// Device and inode of the file.
    file: (u64, u64),
    /// Why the file could not be written.
    failed: Option<std::io::Error>,
}

/// A block in a recording.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Recorded {
    recording: u32,
    block: u64,
}

#[derive(Debug)]
struct Recordings {
    /// Recordings begun so far.
    begun: u32,
    now: Vec<Recording>,
}

static RECORDINGS: Mutex<Recordings> = Mutex::new(Recordings { begun: 0, now: Vec::new() });

impl Recording {
    /// Writes a line that ends with the time. Under the lock, so that times rise.
    fn line(&mut self, text: std::fmt::Arguments<'_>) {
        if self.failed.is_none() {
            let time = self.began.elapsed().as_micros();
            self.failed = writeln!(self.out, "{text},{time}").err();
        }
    }
}

fn with(number: u32, call: impl FnOnce(&mut Recording)) {
    let mut recordings = RECORDINGS.lock();
    // None for a block of a recording that has ended.
    if let Some(recording) = recordings.now.iter_mut().find(|recording| recording.number == number) {
        call(recording);
    }
}

pub(crate) fn allocated(block: &Block) -> Option<Recorded> {
    let mut recordings = RECORDINGS.lock();
    let recording = recordings.now.iter_mut().find(|recording| recording.heap == block.heap)?;
    recording.blocks += 1;
    let number = recording.blocks;
    recording.line(format_args!("a,{number},{},{}", block.requested, block.stream));
    Some(Recorded { recording: recording.number, block: number })
}

pub(crate) fn freed(recorded: Recorded) {
    with(recorded.recording, |recording| recording.line(format_args!("f,{}", recorded.block)));
}

pub(crate) fn used(recorded: Recorded, stream: u64) {
    with(recorded.recording, |recording| recording.line(format_args!("u,{},{stream}", recorded.block)));
}

/// Whether the recording that a block is in is under way.
pub(crate) fn is_current(recorded: Recorded) -> bool {
    RECORDINGS.lock().now.iter().any(|recording| recording.number == recorded.recording)
}

/// A file that nobody records to, emptied. Its lock ends with this process, and with the children that were forked off meanwhile,
/// however they end.
fn create(path: &str) -> Result<File, Failure> {
    let failed = |error: std::io::Error| unwritten(path, &error);
    let file = OpenOptions::new().write(true).create(true).truncate(false).open(path).map_err(failed)?;
    // A file system that has no locks leaves it to the caller.
    if flock(&file, FlockOperation::NonBlockingLockExclusive) == Err(Errno::WOULDBLOCK) {
        return Err(taken_already(path, ", by another process"));
    }
    file.set_len(0).map_err(failed)?;
    Ok(file)
}

fn taken_already(path: &str, by: &str) -> Failure {
    Failure::argument(format!("{path} is being recorded to already{by}; name another file"))
}

fn unwritten(path: &str, error: &std::io::Error) -> Failure {
    Failure { status: xseg_status::XSEG_IO, why: format!("the recording {path} cannot be written: {error}") }
}

/// From now on every allocation, free and declared use of a heap is written to a trace file, which `xseg replay` reads,
/// beginning with the blocks that are live. Times are microseconds since the call. A heap has one recording at a time, and a file, too, of
/// whichever process: a second one is refused by `XSEG_INVALID_ARGUMENT`. What other
/// threads allocate or free while this is called may stay live in the trace. Only allocations by this interface are seen. What cannot be
/// written is said by `xseg_record_stop`, raises no signal, and disturbs nothing else. The path may be a pipe's: allocations of all heaps that
/// are being recorded then wait for a reader that is slow.
///
/// # Safety
/// `path` is null or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_record_start(handle: *mut xseg_heap, path: *const c_char) -> xseg_status {
    guard(|| {
        let found = heap(handle)?;
        // SAFETY: the caller's.
        let path = unsafe { text(path, "path") }?;
        // A pipe is opened when somebody reads it: nobody else's allocations wait for that.
        let pipe = std::fs::metadata(path).is_ok_and(|there| !there.is_file());
        let opened = if pipe { Some(File::create(path).map_err(|error| unwritten(path, &error))?) } else { None };
        {
            let mut recordings = RECORDINGS.lock();
            if recordings.now.iter().any(|recording| recording.heap == handle.addr()) {
                return Err(Failure::argument("the heap is being recorded already; stop that recording first"));
            }
            // Before it is emptied: two recordings would write over each other.
            if let Ok(there) = std::fs::metadata(path)
                && there.is_file()
                && recordings.now.iter().any(|recording| recording.file == (there.dev(), there.ino()))
            {
                return Err(taken_already(path, ""));
            }
            let file = opened.map_or_else(|| create(path), Ok)?;
            let found_at = file.metadata().map_err(|error| unwritten(path, &error))?;
            let mut out = BufWriter::with_capacity(1 << 18, Quiet(file));
            let backend = format!("{:?}", found.backend().kind()).to_lowercase();
            let heads = writeln!(out, "# recorded by xseg {}", env!("CARGO_PKG_VERSION"))
                .and_then(|()| writeln!(out, "# {{\"source\": \"xseg\", \"backend\": \"{backend}\"}}"));
            heads.map_err(|error| unwritten(path, &error))?;
            noted::want(noted::RECORDINGS);
            // The heap may have been destroyed since. One that is destroyed from here on finds what is entered now, and ends it.
            self::heap(handle)?;
            recordings.begun += 1;
            let number = recordings.begun;
            let (heap, path) = (handle.addr(), path.to_owned());
            let (file, began) = ((found_at.dev(), found_at.ino()), Instant::now());
            recordings.now.push(Recording { heap, number, blocks: 0, began, out, path, file, failed: None });
        }
        let device = crate::devices::number(handle.addr());
        for region in found.layout() {
            if region.state == RegionState::Live {
                let stream = region.stream.unwrap_or_default().0;
                noted::found(
                    region.address,
                    Block { heap: handle.addr(), device, requested: region.requested, stream },
                );
            }
        }
        Ok(())
    })
}

/// Ends the recording of a heap; its file is whole when this returns. To be called before the process ends, unless
/// `xseg_heap_destroy` is.
#[unsafe(no_mangle)]
pub extern "C" fn xseg_record_stop(handle: *mut xseg_heap) -> xseg_status {
    guard(|| {
        // In a forked child it is refused: the recording is the parent's to end.
        heap(handle)?;
        finish(taken(handle).ok_or_else(|| Failure::argument("the heap is not being recorded"))?)
    })
}

/// Ends the recording of a heap that is no more, if there is one.
pub(crate) fn end(handle: *const xseg_heap) -> Result<(), Failure> {
    taken(handle).map_or(Ok(()), finish)
}

fn taken(handle: *const xseg_heap) -> Option<Recording> {
    // Nor for a heap of a forked child's, where a thread of the parent's may have the lock.
    if !noted::recorded() {
        return None;
    }
    let mut recordings = RECORDINGS.lock();
    let at = recordings.now.iter().position(|recording| recording.heap == handle.addr())?;
    Some(recordings.now.swap_remove(at))
}

fn finish(mut ended: Recording) -> Result<(), Failure> {
    let flushed = ended.out.flush();
    // A child that was forked off has a copy of the descriptor, which would keep the lock.
    let _ = flock(&ended.out.get_ref().0, FlockOperation::Unlock);
    match ended.failed.or(flushed.err()) {
        Some(error) => Err(unwritten(&ended.path, &error)),
        None => Ok(()),
    }
}
