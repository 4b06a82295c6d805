//! Memory of one process used by another, on host memory: the test program starts itself again, with a socket as its input.
//!
//! `XSEG_SHARE_BYTES` sets the length of the large block, 96 MiB by default (`XSEG_SHARE_BYTES=3221225472` is 3 GiB, of which
//! few pages are touched).
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

#[path = "support/side.rs"]
mod side;

use side::{S0, Side, descriptors, holds};
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use xseg::units::MIB;
use xseg::{Allocation, Error, Imported};

const ROLE: &str = "XSEG_SHARE_ROLE";
const PATIENCE: Duration = Duration::from_secs(60);
/// Small handles, so that blocks have many.
const CONF: &str = "limit:8GiB,handle_max:2MiB,growth:exact";

fn large() -> u64 {
    std::env::var("XSEG_SHARE_BYTES").map_or(96 * MIB, |bytes| bytes.parse().unwrap())
}

/// The other process, which ends with this.
struct Other {
    process: Child,
    socket: UnixStream,
    _turn: MutexGuard<'static, ()>,
}

/// One test at a time: they share the process's descriptors, which some count.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Other {
    fn start(role: &str) -> Self {
        let _turn = turn();
        let (socket, theirs) = UnixStream::pair().unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        let process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "the_other_process", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Self { process, socket, _turn }
    }

    fn say(&self, word: u8) {
        say(&self.socket, word);
    }

    /// The next word; `None` when the process is gone.
    fn hear(&self) -> Option<u8> {
        hear(&self.socket)
    }

    #[track_caller]
    fn expect(&self, word: u8) {
        assert_eq!(self.hear().map(char::from), Some(char::from(word)));
    }

    fn kill(mut self) {
        self.process.kill().unwrap();
        let status = self.process.wait().unwrap();
        assert_eq!(status.code(), None, "it lived when it was killed");
    }

    /// Waits for its end.
    #[track_caller]
    fn ends(mut self) {
        let start = Instant::now();
        let status: ExitStatus = loop {
            match self.process.try_wait().unwrap() {
                Some(status) => break status,
                None => std::thread::sleep(Duration::from_millis(2)),
            }
            assert!(start.elapsed() < PATIENCE, "the other process does not end");
        };
        assert!(status.success(), "{status}");
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        if self.process.kill().is_ok() {
            let _ = self.process.wait();
        }
    }
}

fn say(mut socket: &UnixStream, word: u8) {
    socket.write_all(&[word]).unwrap();
}

fn hear(mut socket: &UnixStream) -> Option<u8> {
    let mut word = [0];
    match socket.read(&mut word) {
        Ok(1) => Some(word[0]),
        _ => None,
    }
}

/// Ticks until nothing of the heap is exported.
#[track_caller]
fn no_longer_exported(side: &Side) {
    let start = Instant::now();
    while side.heap.stats().exported > 0 {
        assert!(start.elapsed() < PATIENCE, "an import does not end");
        side.heap.tick();
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A block that starts in the middle of a handle, with what lies before it.
fn odd_block(side: &Side, bytes: u64) -> (Allocation, Allocation) {
    (side.heap.alloc(1536 << 10, S0).unwrap(), side.heap.alloc(bytes, S0).unwrap())
}

/// Not a test by itself: what the other process does.
#[test]
fn the_other_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let socket = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned().unwrap());
    let side = Side::new("limit:8GiB");
    match role.as_str() {
        "reader" => reader(&side, &socket),
        "writer" => writer(&Side::new(CONF), &socket),
        "many" => many(&side, &socket),
        "takes" => takes(&side, &socket),
        "inherits" => inherits(&side, &socket),
        other => panic!("there is no role {other}"),
    }
}

/// Receives a block, checks and writes it, and ends it when it is told to.
fn reader(side: &Side, socket: &UnixStream) {
    let imported = side.heap.receive(socket).unwrap();
    side.expect(imported.address(), imported.len(), 1);
    side.stamp(imported.address(), imported.len(), 1_000_000);
    say(socket, b'w');
    match hear(socket) {
        // The exporter has freed it.
        Some(b'c') => {
            side.expect(imported.address(), imported.len(), 1_000_000);
            imported.close().unwrap();
            holds(&side.device, 1);
            say(socket, b'c');
        }
        Some(b'd') => drop(imported),
        // It is killed here.
        other => assert_eq!(other, None),
    }
}

/// Exports a block; the other side kills it, or lets it free and end.
fn writer(side: &Side, socket: &UnixStream) {
    let (_before, block) = odd_block(side, large());
    side.stamp(block.address(), block.len(), 1);
    side.heap.export(block.address()).unwrap().send(socket).unwrap();
    match hear(socket) {
        Some(b'f') => {
            drop(block);
            side.heap.tick();
            assert_ne!(side.heap.stats().exported, 0);
            say(socket, b'f');
            assert_eq!(hear(socket), Some(b'c'));
            no_longer_exported(side);
            assert_eq!((side.heap.stats().pending, side.heap.stats().pinned), (0, 0));
        }
        other => assert_eq!(other, None),
    }
}

/// Imports 1,000 blocks one after the other.
fn many(side: &Side, socket: &UnixStream) {
    let (open, leaks, pieces) = (descriptors(), side.device.leaks(), side.device.mapping_budget().0);
    for round in 0..1000 {
        let imported = side.heap.receive(socket).unwrap();
        assert_eq!(side.word(imported.address()), round);
        match round % 2 {
            0 => drop(imported),
            _ => imported.close().unwrap(),
        }
        assert!(descriptors() <= open + 4);
        say(socket, b'n');
    }
    side.heap.tick();
    assert_eq!((descriptors(), side.device.leaks(), side.device.mapping_budget().0), (open, leaks, pieces));
}

/// Keeps all that comes.
fn takes(side: &Side, socket: &UnixStream) {
    let mut all = Vec::new();
    while let Ok(imported) = side.heap.receive(socket) {
        all.push(imported);
    }
}

/// Its input is the export itself.
fn inherits(side: &Side, socket: &UnixStream) {
    let imported: Imported = side.heap.import(socket.try_clone().unwrap()).unwrap();
    side.expect(imported.address(), imported.len(), 1);
    side.stamp(imported.address(), imported.len(), 1_000_000);
    imported.close().unwrap();
}

#[test]
fn read_and_written_on_both_sides_and_freed_by_the_exporter_first() {
    let (side, other) = (Side::new(CONF), Other::start("reader"));
    let (before, block) = odd_block(&side, large());
    side.stamp(block.address(), block.len(), 1);
    side.heap.export(block.address()).unwrap().send(&other.socket).unwrap();
    other.expect(b'w');
    side.expect(block.address(), block.len(), 1_000_000);
    let size = block.size();
    drop(block);
    side.heap.tick();
    let stats = side.heap.stats();
    assert_eq!((stats.pending, stats.exported), (size, size));
    // What is allocated meanwhile is other memory.
    let next = side.heap.alloc(size, S0).unwrap();
    side.stamp(next.address(), next.len(), 9);
    other.say(b'c');
    other.expect(b'c');
    other.ends();
    side.heap.tick();
    let stats = side.heap.stats();
    assert_eq!((stats.pending, stats.exported, stats.pinned), (0, 0, 0));
    side.expect(next.address(), next.len(), 9);
    drop((next, before));
    side.heap.check().unwrap();
    side.heap.trim();
    assert_eq!(side.heap.stats().reserved, 0);
}

#[test]
fn ended_by_the_importer_first() {
    let (side, other) = (Side::new(CONF), Other::start("reader"));
    let (_before, block) = odd_block(&side, large());
    side.stamp(block.address(), block.len(), 1);
    side.heap.export(block.address()).unwrap().send(&other.socket).unwrap();
    other.expect(b'w');
    other.say(b'd');
    other.ends();
    side.heap.tick();
    assert_eq!((side.heap.stats().exported, side.heap.stats().pinned), (0, 0));
    side.expect(block.address(), block.len(), 1_000_000);
    drop(block);
    side.heap.tick();
    assert_eq!(side.heap.stats().pending, 0);
}

#[test]
fn a_killed_importer_counts_as_done() {
    for freed in [true, false] {
        let (side, other) = (Side::new(CONF), Other::start("reader"));
        let (_before, block) = odd_block(&side, large());
        side.stamp(block.address(), block.len(), 1);
        side.heap.export(block.address()).unwrap().send(&other.socket).unwrap();
        other.expect(b'w');
        let kept = if freed {
            drop(block);
            None
        } else {
            Some(block)
        };
        side.heap.tick();
        assert_ne!(side.heap.stats().exported, 0);
        other.kill();
        no_longer_exported(&side);
        assert_eq!((side.heap.stats().pending, side.heap.stats().pinned), (0, 0));
        if let Some(block) = kept {
            side.expect(block.address(), block.len(), 1_000_000);
        }
        side.heap.check().unwrap();
    }
}

#[test]
fn a_killed_exporter_leaves_the_memory() {
    let (side, other) = (Side::new("limit:8GiB"), Other::start("writer"));
    let imported = side.heap.receive(&other.socket).unwrap();
    side.expect(imported.address(), imported.len(), 1);
    other.kill();
    side.expect(imported.address(), imported.len(), 1);
    side.stamp(imported.address(), imported.len(), 5);
    side.expect(imported.address(), imported.len(), 5);
    imported.close().unwrap();
    holds(&side.device, 1);
}

#[test]
fn an_exporter_that_frees_first_gets_its_memory_back() {
    let (side, other) = (Side::new("limit:8GiB"), Other::start("writer"));
    let imported = side.heap.receive(&other.socket).unwrap();
    other.say(b'f');
    other.expect(b'f');
    side.expect(imported.address(), imported.len(), 1);
    imported.close().unwrap();
    other.say(b'c');
    other.ends();
}

#[test]
fn an_export_that_was_sent_to_a_process_that_is_killed_ends() {
    let side = Side::new(CONF);
    // Handles beyond the first message too, which a thread waits to hand over.
    let block = side.heap.alloc(300 * MIB, S0).unwrap();
    // Killed before, while, or after it takes them.
    for pause in [0, 5, 20, 60] {
        let other = Other::start("takes");
        for _ in 0..3 {
            side.heap.export(block.address()).unwrap().send(&other.socket).unwrap();
        }
        std::thread::sleep(Duration::from_millis(pause));
        other.kill();
        no_longer_exported(&side);
        assert_eq!(side.heap.stats().pinned, 0);
    }
}

#[test]
fn a_thousand_imports_in_another_process() {
    let (side, other) = (Side::new("limit:64MiB"), Other::start("many"));
    let block = side.heap.alloc(3 * MIB, S0).unwrap();
    let open = descriptors();
    for round in 0..1000 {
        side.set_word(block.address(), round);
        side.heap.export(block.address()).unwrap().send(&other.socket).unwrap();
        other.expect(b'n');
        assert!(descriptors() <= open + 24, "round {round}: {}", descriptors());
    }
    other.ends();
    side.heap.tick();
    assert_eq!((side.heap.stats().exported, side.heap.stats().pinned), (0, 0));
}

/// The descriptor of an export goes to a child by inheritance, without any other socket.
#[test]
fn an_export_is_inherited() {
    let _turn = turn();
    let side = Side::new(CONF);
    let (_before, block) = odd_block(&side, large());
    side.stamp(block.address(), block.len(), 1);
    let export = side.heap.export(block.address()).unwrap();
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "the_other_process", "--nocapture", "--test-threads=1"])
        .env(ROLE, "inherits")
        .stdin(Stdio::from(OwnedFd::from(export)))
        .stdout(Stdio::null())
        .status()
        .unwrap();
    assert!(status.success());
    side.expect(block.address(), block.len(), 1_000_000);
    // A process that another test is starting has a copy of the descriptor until it is its own program.
    no_longer_exported(&side);
}

#[test]
fn an_exporter_that_is_gone_is_said_to_be() {
    let (side, other) = (Side::new("limit:8GiB"), Other::start("reader"));
    let socket = other.socket.try_clone().unwrap();
    other.kill();
    let error = side.heap.receive(&socket).unwrap_err();
    assert!(matches!(error, Error::Share(_)), "{error}");
    let block = side.heap.alloc(MIB, S0).unwrap();
    let error = side.heap.export(block.address()).unwrap().send(&socket).unwrap_err();
    assert!(error.to_string().contains("the other process ended"), "{error}");
    // A process that another test is starting has a copy of the descriptor until it is its own program.
    no_longer_exported(&side);
}
