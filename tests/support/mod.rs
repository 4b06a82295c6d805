//! What the tests of the heap share: a heap on a device whose clock the test drives.
#![allow(dead_code, reason = "each test file uses its own part")]
#![allow(unreachable_pub, reason = "a module of several test binaries")]
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use xseg::backend::fault::FaultyBackend;
use xseg::backend::host::{HostBackend, HostGraph, HostOptions};
use xseg::backend::sim::{SimBackend, SimGraph, SimOptions};
use xseg::backend::timeline::Timeline;
use xseg::backend::{Backend, MappingCallback, MappingChange, MappingEvent};
use xseg::error::OutOfMemory;
use xseg::{Allocation, Error, Heap, StreamId};

pub const S0: StreamId = StreamId(0);
pub const S1: StreamId = StreamId(1);
pub const S2: StreamId = StreamId(2);
pub const MS: Duration = Duration::from_millis(1);

/// Makes a heap with a policy; scenarios take one, so that they run on every backend.
pub type Make = fn(&str) -> Lab;

/// A heap, its device and the device's clock. Dropped in this order, so that a simulated device
/// checks that the heap left nothing behind.
pub struct Lab {
    pub heap: Heap,
    pub time: Timeline,
    device: Device,
}

enum Device {
    Sim(Arc<SimBackend>),
    Host(Orderly),
}

/// A host device that must hold nothing when its heap is gone; `sim` sees to that itself.
struct Orderly(Arc<HostBackend>);

impl Drop for Orderly {
    fn drop(&mut self) {
        let leaks = self.0.leaks();
        assert!(std::thread::panicking() || leaks.is_empty(), "left behind: {leaks}");
    }
}

/// Makes tests of functions over [`Make`], one on each backend.
#[allow(unused_macros, reason = "each test program uses a part of this file")]
macro_rules! on_each_backend {
    ($($name:ident),* $(,)?) => {
        mod on_sim {
            $(#[test] fn $name() { super::$name(super::support::sim) })*
        }
        mod on_host {
            $(#[test] fn $name() { super::$name(super::support::host) })*
        }
    };
}
#[allow(unused_imports, reason = "each test file uses its own part")]
pub(crate) use on_each_backend;

/// A heap on a simulated device without bound.
pub fn sim(conf: &str) -> Lab {
    sim_with(conf, SimOptions::default())
}

pub fn sim_with(conf: &str, options: SimOptions) -> Lab {
    let time = options.timeline.clone();
    let device = Arc::new(SimBackend::new(options));
    let heap = Heap::builder().conf(conf).unwrap().backend(device.clone()).build().unwrap();
    Lab { heap, time, device: Device::Sim(device) }
}

/// As [`sim`], with calls of the driver that fail when armed.
pub fn faulty_sim(conf: &str) -> (Lab, Arc<FaultyBackend<SimBackend>>) {
    let options = SimOptions::default();
    let time = options.timeline.clone();
    let device = Arc::new(SimBackend::new(options));
    let faulty = Arc::new(FaultyBackend::new(device.clone()));
    let heap = Heap::builder().conf(conf).unwrap().backend(faulty.clone()).build().unwrap();
    (Lab { heap, time, device: Device::Sim(device) }, faulty)
}

/// A heap on host memory of 1 TiB (nominal), on a clock as on `sim`.
pub fn host(conf: &str) -> Lab {
    let time = Timeline::default();
    let options = HostOptions { timeline: Some(time.clone()), ..HostOptions::default() };
    let device = Arc::new(HostBackend::new(options).unwrap());
    let heap = Heap::builder().conf(conf).unwrap().backend(device.clone()).build().unwrap();
    Lab { heap, time, device: Device::Host(Orderly(device)) }
}

/// A captured graph of either device.
pub enum Graph {
    Sim(SimGraph),
    Host(HostGraph),
}

impl Lab {
    pub fn backend(&self) -> &dyn Backend {
        self.heap.backend()
    }

    pub fn begin_capture(&self, stream: StreamId) {
        match &self.device {
            Device::Sim(sim) => sim.begin_capture(stream).unwrap(),
            Device::Host(host) => host.0.begin_capture(stream).unwrap(),
        }
    }

    /// The graph, if nothing invalidated the capture.
    #[track_caller]
    pub fn end_capture(&self, stream: StreamId) -> Graph {
        match &self.device {
            Device::Sim(sim) => Graph::Sim(sim.end_capture(stream).unwrap()),
            Device::Host(host) => Graph::Host(host.0.end_capture(stream).unwrap()),
        }
    }

    /// Captures work that sets the first word of `to` to one more than that of `from`; it takes 2 ms.
    pub fn capture_step(&self, stream: StreamId, from: &Allocation, to: &Allocation) {
        match &self.device {
            Device::Sim(sim) => {
                sim.queue_work(stream, from.address(), from.size(), MS).unwrap();
                sim.queue_work(stream, to.address(), to.size(), MS).unwrap();
            }
            Device::Host(host) => {
                let (device, from, to) = (Arc::downgrade(&host.0), from.address(), to.address());
                let step = move || {
                    let (device, mut word) = (device.upgrade().unwrap(), [0; 8]);
                    device.read(from, &mut word).unwrap();
                    device.write(to, &(u64::from_le_bytes(word) + 1).to_le_bytes()).unwrap();
                };
                host.0.capture(stream, step).unwrap();
            }
        }
    }

    /// Queues a graph's work; on `sim` the memory behind its addresses is compared with that of the capture.
    #[track_caller]
    pub fn replay(&self, graph: &Graph, stream: StreamId) {
        match (graph, &self.device) {
            (Graph::Sim(graph), Device::Sim(sim)) => drop(sim.replay(graph, stream).unwrap()),
            (Graph::Host(graph), Device::Host(host)) => {
                host.0.replay(graph, stream).unwrap();
                // Closures run at once on a virtual clock: their time is queued beside.
                self.time.queue(stream, 2 * MS * graph.nodes() as u32);
            }
            _ => panic!("the graph is another device's"),
        }
    }

    /// Writes the first word of a block, where there is memory.
    pub fn set_word(&self, block: &Allocation, word: u64) {
        self.set_word_at(block.address(), word);
    }

    pub fn set_word_at(&self, address: u64, word: u64) {
        if let Device::Host(host) = &self.device {
            host.0.write(address, &word.to_le_bytes()).unwrap();
        }
    }

    /// The first word of a block is this one, where there is memory.
    #[track_caller]
    pub fn expect_word(&self, block: &Allocation, word: u64) {
        self.expect_word_at(block.address(), word);
    }

    #[track_caller]
    pub fn expect_word_at(&self, address: u64, word: u64) {
        if let Device::Host(host) = &self.device {
            let mut found = [0; 8];
            host.0.read(address, &mut found).unwrap();
            assert_eq!(u64::from_le_bytes(found), word, "at {address:#x}");
        }
    }

    pub fn sim(&self) -> &SimBackend {
        match &self.device {
            Device::Sim(sim) => sim,
            Device::Host(_) => panic!("this test needs the simulated device"),
        }
    }

    /// Queues work of a length on a stream; on `sim` the range is then in use until the work is done.
    pub fn work(&self, stream: StreamId, block: &Allocation, length: Duration) {
        self.work_at(stream, block.address(), block.size(), length);
    }

    pub fn work_at(&self, stream: StreamId, address: u64, bytes: u64, length: Duration) {
        match &self.device {
            Device::Sim(sim) => {
                sim.queue_work(stream, address, bytes, length).expect("the range is accessible");
            }
            Device::Host(host) => {
                assert!(host.0.is_mapped(address, bytes), "work on {address:#x}, which is not mapped");
                self.time.queue(stream, length);
            }
        }
    }

    pub fn alloc(&self, bytes: u64, stream: StreamId) -> Allocation {
        self.heap.alloc(bytes, stream).unwrap_or_else(|error| panic!("{error}"))
    }

    pub fn reserved(&self) -> u64 {
        self.heap.stats().reserved
    }

    /// The heap's invariants hold, and no rule of the driver was broken.
    #[track_caller]
    pub fn check(&self) {
        if let Err(why) = self.heap.check() {
            panic!("an invariant is broken: {why}");
        }
        if let Device::Sim(sim) = &self.device {
            assert_eq!(sim.violations(), Vec::<String>::new());
            assert_eq!(sim.memory_in_use(), self.heap.stats().reserved, "the heap counts what the device holds");
        }
    }

    /// With all blocks freed: waits for the device, trims, and finds nothing left but `keep`.
    #[track_caller]
    pub fn ends_with(&self, keep: u64) {
        self.time.advance(Duration::from_secs(3600));
        self.heap.tick();
        self.heap.trim();
        self.check();
        let stats = self.heap.stats();
        assert_eq!((stats.live_blocks, stats.allocated, stats.requested), (0, 0, 0));
        assert_eq!((stats.pending, stats.zombie), (0, 0));
        assert_eq!(stats.reserved, keep);
    }
}

/// The fields of an out-of-memory error.
#[track_caller]
pub fn out_of_memory<T: std::fmt::Debug>(result: Result<T, Error>) -> OutOfMemory {
    match result {
        Err(Error::OutOfMemory(fields)) => *fields,
        other => panic!("an out-of-memory error was expected, not {other:?}"),
    }
}

/// Mappings as the callbacks tell them: handles by address.
pub type Book = Arc<Mutex<BTreeMap<u64, u64>>>;

/// A book, and the callback that keeps it: nothing is mapped twice, and nothing goes that is not there.
pub fn book() -> (Book, MappingCallback) {
    let book = Book::default();
    let kept = book.clone();
    let told = move |event: &MappingEvent| {
        let mut book = kept.lock().unwrap();
        let before = match event.change {
            MappingChange::Unmapping => book.remove(&event.address),
            MappingChange::Mapped | MappingChange::Kept => book.insert(event.address, event.handle.0),
        };
        assert_eq!(before, (event.change == MappingChange::Unmapping).then_some(event.handle.0));
    };
    (book, Arc::new(told))
}

/// A small generator, so that runs repeat.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        (self.next() >> 16) % end
    }
}
