//! A heap on host memory whose blocks a test reads, writes and shares.
#![allow(dead_code, reason = "each test file uses its own part")]
#![allow(unreachable_pub, reason = "a module of several test binaries")]
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::sync::Arc;
use std::time::{Duration, Instant};
use xseg::backend::host::{HostBackend, HostOptions};
use xseg::units::KIB;
use xseg::{Allocation, Heap, Imported, StreamId};

pub const S0: StreamId = StreamId(0);

/// A heap and its device.
pub struct Side {
    pub heap: Heap,
    pub device: Arc<HostBackend>,
}

impl Side {
    pub fn new(conf: &str) -> Self {
        let device = Arc::new(HostBackend::new(HostOptions::default()).unwrap());
        Self::on(conf, device)
    }

    pub fn on(conf: &str, device: Arc<HostBackend>) -> Self {
        let conf = format!("reserve:16GiB,{conf}");
        let heap = Heap::builder().conf(&conf).unwrap().backend(device.clone()).build().unwrap();
        Self { heap, device }
    }

    pub fn import_of(&self, other: &Self, block: &Allocation) -> Imported {
        self.heap.import(other.heap.export(block.address()).unwrap()).unwrap()
    }

    pub fn word(&self, address: u64) -> u64 {
        let mut word = [0; 8];
        self.device.read(address, &mut word).unwrap();
        u64::from_le_bytes(word)
    }

    pub fn set_word(&self, address: u64, word: u64) {
        self.device.write(address, &word.to_le_bytes()).unwrap();
    }

    /// A word in each 256 KiB of a block, the last one at its end.
    pub fn stamp(&self, address: u64, bytes: u64, seed: u64) {
        for at in places(bytes) {
            self.set_word(address + at, seed + at);
        }
    }

    #[track_caller]
    pub fn expect(&self, address: u64, bytes: u64, seed: u64) {
        for at in places(bytes) {
            assert_eq!(self.word(address + at), seed + at, "at {at} of {bytes}");
        }
    }
}

pub fn places(bytes: u64) -> impl Iterator<Item = u64> {
    (0..bytes / (256 * KIB)).map(|at| at * 256 * KIB).chain([bytes - 8])
}

/// Open descriptors, the one for looking included.
pub fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Waits until no more than so many descriptors are open: a thread that handed over handles closes its own as it ends.
#[track_caller]
pub fn no_more_than(open: usize) {
    let start = Instant::now();
    while descriptors() > open {
        assert!(start.elapsed() < Duration::from_secs(10), "{} descriptors are open, not {open}", descriptors());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Nothing but so many reservations (and the events of epochs, which come and go).
#[track_caller]
pub fn holds(device: &HostBackend, reservations: usize) {
    let found = device.leaks();
    assert_eq!((found.reservations, found.mappings, found.handles), (reservations, 0, 0));
}
