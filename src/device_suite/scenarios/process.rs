//! What a process has and leaves: descriptors, the card's memory after its end and after a heap's.

use super::{Suite, check, fill, heap, spin};
use crate::device_suite::report::Section;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io::BufRead;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use xseg::backend::cuda::StreamSet;
use xseg::backend::{Backend, StreamId};
use xseg::units::{GIB, MIB, human};
use xseg::{Allocation, Error, Heap};

/// How much less of the card may be free afterwards.
const SPARE: u64 = 4 * MIB;
/// Descriptors that the driver may open for itself.
const OWN: usize = 8;
/// Longest wait for another process.
const PATIENCE: Duration = Duration::from_secs(60);

fn failed(what: impl std::fmt::Display) -> Error {
    Error::InvalidArgument(what.to_string())
}

/// Few file descriptors while this lives.
struct FewDescriptors(Rlimit);

impl FewDescriptors {
    fn new(count: u64) -> Result<Self, Error> {
        let before = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: Some(count), maximum: before.maximum }).map_err(failed)?;
        Ok(Self(before))
    }
}

impl Drop for FewDescriptors {
    fn drop(&mut self) {
        if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: self.0.current, maximum: self.0.maximum }) {
            eprintln!("xseg-device: the limit of file descriptors stays low: {error}");
        }
    }
}

/// Descriptors of this process, the one for looking included.
fn descriptors_open() -> Result<usize, Error> {
    Ok(std::fs::read_dir("/proc/self/fd").map_err(failed)?.count())
}

/// 21: thousands of handles under `ulimit -n 256`, exported when asked for and only then.
pub(super) fn descriptors(suite: &Suite, section: &mut Section) -> Result<(), Error> {
    if !suite.backend.exportable() {
        section.text.push("21 did not run: this device's memory cannot be exported.".into());
        return Ok(());
    }
    let _few = FewDescriptors::new(256)?;
    let heap = heap(suite, "handle_max:2MiB,growth:exact")?;
    let before = descriptors_open()?;
    let blocks = [heap.alloc(512 * MIB, StreamId(0))?, heap.alloc(512 * MIB, StreamId(0))?];
    let (handles, after) = (heap.stats().driver_calls.create, descriptors_open()?);
    let found = format!("{handles} handles, {before} descriptors before and {after} after");
    section.check(
        "21: exportable handles hold no descriptors (ulimit -n 256)",
        found,
        handles >= 512 && after <= before + OWN,
    );

    let one = heap.alloc_contiguous(64 * MIB, StreamId(0))?;
    let mut exports = 0;
    for _ in 0..1000 {
        let exported = heap.export_handles(one.address())?;
        exports += usize::from(exported.len() == 1 && exported[0].handle_bytes == 64 * MIB && exported[0].offset == 0);
    }
    let left = descriptors_open()?;
    let found = format!("{exports} of 1000, {left} descriptors afterwards");
    section.check(
        "21: a handle is exported 1000 times, one descriptor each time",
        found,
        exports == 1000 && left <= after + OWN,
    );

    let all = heap.export_handles(blocks[0].address());
    let left = descriptors_open()?;
    let refused = matches!(&all, Err(Error::Driver(_)));
    let found = all.map_or_else(|error| error.to_string(), |all| format!("{} descriptors", all.len()));
    section.check(
        "21: 256 exports at once are refused, and nothing of them stays open",
        format!("{found}; {left} descriptors afterwards"),
        refused && left <= after + OWN && heap.check().is_ok(),
    );
    Ok(())
}

/// 24: exits with live allocations, frees after the shutdown, and a process that is killed.
pub(super) fn ends(suite: &Suite, section: &mut Section) -> Result<(), Error> {
    let before = suite.backend.memory()?.free;
    for (kind, what) in [
        ("exit", "a process exits with live blocks and a kernel running"),
        ("after", "blocks are freed after the heap's shutdown"),
    ] {
        let mut child = Running::start(suite, kind)?;
        let ready = child.is_ready();
        let status = child.end();
        let left = settled(suite, before)?;
        let text = status.map_or_else(|| "it hangs".into(), |status| status.to_string());
        section.check(
            &format!("24: {what}: no crash, no hang, nothing left on the card"),
            format!("{text}, {} less free", human(left)),
            ready && status.is_some_and(|status| status.success()) && left <= SPARE,
        );
    }
    let (mut most, mut kills) = (0, 0);
    for pause in [0, 7, 20, 55, 150] {
        let mut child = Running::start(suite, "churn")?;
        let ready = child.is_ready();
        std::thread::sleep(Duration::from_millis(pause));
        kills += u32::from(ready && child.kill());
        most = most.max(settled(suite, before)?);
    }
    section.check(
        "24: a process killed while it grows, moves and frees leaves nothing on the card",
        format!("{kills} of 5 killed at work, at most {} less free", human(most)),
        kills == 5 && most <= SPARE,
    );
    Ok(())
}

/// How much less is free than before, when that no longer falls.
fn settled(suite: &Suite, before: u64) -> Result<u64, Error> {
    let start = Instant::now();
    loop {
        let less = before.saturating_sub(suite.backend.memory()?.free);
        if less <= SPARE || start.elapsed() > Duration::from_secs(10) {
            return Ok(less);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// This program again, as one of [`child`].
struct Running {
    process: Child,
    ready: bool,
}

impl Running {
    /// Starts it and waits until it says that it is at work.
    fn start(suite: &Suite, kind: &str) -> Result<Self, Error> {
        let program = std::env::current_exe().map_err(failed)?;
        let mut command = Command::new(program);
        command.args(["--device", &suite.backend.device().to_string(), "--child", kind]);
        let mut process = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().map_err(failed)?;
        let output = process.stdout.take().ok_or_else(|| failed("the child has no output"))?;
        let (told, hears) = channel();
        std::thread::spawn(move || {
            let mut line = String::new();
            let read = std::io::BufReader::new(output).read_line(&mut line);
            // Nobody listens when the patience is over.
            let _ = told.send(read.is_ok() && line.trim() == READY);
        });
        let ready = hears.recv_timeout(PATIENCE).unwrap_or(false);
        Ok(Self { process, ready })
    }

    fn is_ready(&self) -> bool {
        self.ready
    }

    /// Waits for its end; `None` when it does not come.
    fn end(&mut self) -> Option<std::process::ExitStatus> {
        let start = Instant::now();
        while start.elapsed() < PATIENCE {
            match self.process.try_wait() {
                Ok(None) => std::thread::sleep(Duration::from_millis(5)),
                Ok(status) => return status,
                Err(_) => break,
            }
        }
        None
    }

    /// Kills it; was it still at work?
    fn kill(&mut self) -> bool {
        let works = matches!(self.process.try_wait(), Ok(None));
        works && self.process.kill().is_ok() && self.end().is_some_and(|status| status.code().is_none())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.process.kill().is_ok() {
            let _ = self.process.wait();
        }
    }
}

/// What a child prints when it is at work.
const READY: &str = "ready";
/// A heap that nothing drops.
static KEPT: OnceLock<Heap> = OnceLock::new();

/// A process of scenario 24.
///
/// # Errors
/// For an unknown `kind`, and when the heap does not behave.
pub(crate) fn child(device: u32, kind: &str) -> Result<(), Error> {
    let suite = Suite::open(device, true, 1, Vec::new())?;
    let stream = suite.backend.create_stream()?;
    let heap = heap(&suite, "limit:1GiB,handle_max:8MiB")?;
    let first = heap.alloc(256 * MIB, stream)?;
    spin(&suite, stream, 100)?;
    fill(&suite, stream, &first, 1)?;
    match kind {
        "exit" => {
            let _ = KEPT.set(heap);
            println!("{READY}");
            // As at the end of `main`, but nothing of this function is dropped.
            std::process::exit(0);
        }
        "after" => {
            println!("{READY}");
            heap.shut_down();
            let late = heap.alloc(MIB, stream);
            if !matches!(late, Err(Error::ShutDown)) {
                return Err(failed(format!("a heap that is shut down gives {late:?}")));
            }
            drop(first);
            drop(heap);
            Ok(())
        }
        "churn" => {
            drop(first);
            println!("{READY}");
            let start = Instant::now();
            let mut live: Vec<Allocation> = Vec::new();
            for round in 0_u64.. {
                if start.elapsed() > PATIENCE {
                    break;
                }
                let block = heap.alloc((1 + round * 7 % 61) * MIB, stream)?;
                fill(&suite, stream, &block, round as u32)?;
                live.push(block);
                if live.len() > 12 {
                    drop(live.swap_remove((round * 5 % 12) as usize));
                }
                if round % 50 == 0 {
                    heap.trim();
                }
            }
            Err(failed("nobody ended this process"))
        }
        other => Err(failed(format!("there is no child `{other}`"))),
    }
}

/// Heaps that grow, move and are dropped: the card is as it was after the first.
pub(super) fn cycles(suite: &Suite, section: &mut Section) -> Result<(), Error> {
    let bytes = suite.at_most(suite.choose(16 * GIB, GIB), GIB)?;
    let mut frees = Vec::new();
    let mut moved = 0;
    for round in 0..4 {
        let mut streams = StreamSet::new(suite.backend.clone());
        let heap = heap(suite, &format!("limit:{bytes},handle_max:64MiB"))?;
        moved += cycle(suite, &heap, [streams.get(0)?, streams.get(1)?], bytes, round)?;
        drop(heap);
        drop(streams);
        frees.push(suite.backend.memory()?.free);
    }
    let wrong = suite.kernels.mismatches()?.count;
    let most = frees.iter().map(|free| frees[0].saturating_sub(*free)).max().unwrap_or(0);
    section.check(
        &format!("heaps of {} that come and go leave the card within 4 MiB of the first", human(bytes)),
        format!("at most {} less free over 3 more cycles, {moved} handles moved, {wrong} wrong words", human(most)),
        most <= SPARE && moved > 0 && wrong == 0,
    );
    Ok(())
}

/// Fills the heap with blocks, frees every second one, and asks for what only moves can give; handles moved.
fn cycle(suite: &Suite, heap: &Heap, streams: [StreamId; 2], bytes: u64, seed: u32) -> Result<u64, Error> {
    let part = bytes / 32;
    let mut blocks = Vec::new();
    for number in 0..32_usize {
        let block = heap.alloc(part, streams[number % 2])?;
        fill(suite, streams[number % 2], &block, seed)?;
        blocks.push((number, block));
    }
    let (freed, kept): (Vec<_>, Vec<_>) = blocks.into_iter().partition(|(number, _)| number / 2 % 2 == 0);
    drop(freed);
    let large = heap.alloc(bytes / 4, streams[0])?;
    fill(suite, streams[0], &large, seed + 1)?;
    check(suite, streams[0], &large, seed + 1)?;
    for (number, block) in &kept {
        check(suite, streams[number % 2], block, seed)?;
    }
    Ok(heap.stats().handles_moved)
}
