//! Joins among everything else that a heap does: each granule of memory is one block's at a time, and no other stream's work
//! on it starts before the last one's has ended.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod support;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use support::{Lab, MS, Random, faulty_sim, host, sim};
use xseg::backend::fault::{FaultPlan, FaultRule};
use xseg::backend::host::{HostBackend, HostOptions};
use xseg::backend::{ClientEvent, EventScope, StreamId};
use xseg::units::{GRANULE, MIB, UNIT};
use xseg::{Allocation, Heap, Imported, PoolId, StreamFilter};

/// Physical memory: handle, offset in it, bytes.
type Piece = (u64, u64, u64);

/// A block with what the test knows of it.
struct Block {
    block: Allocation,
    owner: StreamId,
    pieces: Vec<Piece>,
    words: BTreeMap<u64, u64>,
    pool: Option<PoolId>,
}

/// What stays open while other things go on.
#[derive(Default)]
struct Open {
    pins: Vec<(u64, u64)>,
    imports: Vec<Imported>,
}

/// Work on physical memory: by whom, and until when.
struct Work {
    piece: Piece,
    stream: StreamId,
    until: Duration,
}

struct Chaos {
    lab: Lab,
    importer: Option<Heap>,
    random: Random,
    live: Vec<Block>,
    works: Vec<Work>,
    open: Open,
    streams: Vec<StreamId>,
    next_stream: u64,
    word: u64,
    pools: Vec<PoolId>,
    next_pool: u64,
    top: u64,
    served: u64,
    /// Calls of the driver are refused now and then.
    refusing: bool,
}

fn overlap(a: &Piece, b: &Piece) -> bool {
    a.0 == b.0 && a.1 < b.1 + b.2 && b.1 < a.1 + a.2
}

impl Chaos {
    fn new(lab: Lab, on_host: bool, seed: u64) -> Self {
        let importer = on_host.then(|| {
            let device = Arc::new(HostBackend::new(HostOptions::default()).unwrap());
            Heap::builder().conf("reserve:8GiB").unwrap().backend(device).build().unwrap()
        });
        let streams = (1..=4).map(StreamId).collect();
        let (live, works, pools, open) = (Vec::new(), Vec::new(), Vec::new(), Open::default());
        let random = Random(seed);
        Self {
            lab,
            importer,
            random,
            live,
            works,
            open,
            streams,
            next_stream: 5,
            word: seed << 32,
            pools,
            next_pool: 1,
            top: 0,
            served: 0,
            refusing: false,
        }
    }

    /// Memory of handles of many sizes, which is all that may exist.
    fn fill(&mut self, extra: u64) {
        let sizes: Vec<u64> = (0..12).map(|_| GRANULE << self.random.below(6)).collect();
        let blocks: Vec<_> =
            sizes.iter().filter_map(|size| self.lab.heap.alloc_contiguous(*size, self.streams[0]).ok()).collect();
        drop(blocks);
        self.top = self.lab.reserved() + extra;
        self.lab.heap.set_limit(self.top);
    }

    fn stream(&mut self) -> StreamId {
        self.streams[self.random.below(self.streams.len() as u64) as usize]
    }

    fn on_sim(&self) -> bool {
        self.importer.is_none()
    }

    fn now(&self) -> Duration {
        self.lab.time.now()
    }

    /// Work on a block, which must start after what others did to its memory.
    fn work(&mut self, stream: StreamId, index: usize, length: Duration, owner: bool) {
        let block = &self.live[index];
        self.lab.work(stream, &block.block, length);
        let until = self.lab.time.completion(EventScope::Stream(stream));
        let start = until - length;
        let now = self.now();
        self.works.retain(|work| work.until > now);
        if owner {
            for work in self.works.iter().filter(|work| work.stream != stream && work.until > start) {
                let hit = block.pieces.iter().find(|piece| overlap(piece, &work.piece));
                assert!(hit.is_none(), "{stream:?} starts at {start:?} on memory in use by {:?}", work.stream);
            }
        }
        let works = block.pieces.iter().map(|piece| Work { piece: *piece, stream, until });
        self.works.extend(works.collect::<Vec<_>>());
    }

    fn enter(&mut self, block: Allocation, owner: StreamId, pool: Option<PoolId>) {
        let mut pieces = Vec::new();
        if self.on_sim() {
            let found = self.lab.sim().resolve(block.address(), block.size()).expect("a block has memory");
            pieces = found.into_iter().map(|(handle, at, bytes)| (handle.0, at, bytes)).collect();
            for other in &self.live {
                for piece in &other.pieces {
                    assert!(!pieces.iter().any(|one| overlap(one, piece)), "two blocks have one memory");
                }
            }
        }
        let (start, end) = (block.address(), block.address() + block.size());
        let words: BTreeMap<u64, u64> =
            (start..end).step_by(GRANULE as usize).chain([end - 8]).zip(self.word..).collect();
        self.word += words.len() as u64 + 1;
        for (address, word) in &words {
            self.lab.set_word_at(*address, *word);
        }
        self.live.push(Block { block, owner, pieces, words, pool });
        self.served += 1;
        let length = MS * (self.random.below(8) / 5) as u32;
        self.work(owner, self.live.len() - 1, length, true);
    }

    fn verify(&self, one: &Block) {
        for (address, word) in &one.words {
            self.lab.expect_word_at(*address, *word);
        }
        if self.on_sim() {
            let found = self.lab.sim().resolve(one.block.address(), one.block.size()).expect("a block has memory");
            let found: Vec<Piece> = found.into_iter().map(|(handle, at, bytes)| (handle.0, at, bytes)).collect();
            assert_eq!(found, one.pieces, "a live block has moved");
        }
    }

    fn alloc(&mut self) {
        let stream = self.stream();
        let shift = 1 + self.random.below(6);
        let mut bytes = (1 + self.random.below(1 << shift)) * GRANULE;
        bytes = match self.random.below(4) {
            0 => bytes,
            1 => bytes - 512 * self.random.below(4000),
            2 => bytes / (1 + self.random.below(9)) + 1,
            _ => bytes - 512,
        };
        let block = match self.random.below(14) {
            0 | 8..=11 => self.lab.heap.alloc_contiguous(bytes, stream),
            1 => self.lab.heap.alloc_aligned(bytes, GRANULE, stream),
            2 => self.lab.heap.alloc_aligned(bytes, UNIT << self.random.below(12), stream),
            3 => self.lab.heap.alloc(1 + self.random.below(MIB), stream),
            _ => self.lab.heap.alloc(bytes, stream),
        };
        if let Ok(block) = block {
            self.enter(block, stream, None);
        }
    }

    fn free(&mut self) {
        if self.live.is_empty() {
            return;
        }
        let index = self.random.below(self.live.len() as u64) as usize;
        let other = self.stream();
        let how = self.random.below(6);
        if how == 0 {
            self.live[index].block.record_use(other).unwrap();
            self.work(other, index, MS * 3, false);
        }
        let one = self.live.swap_remove(index);
        self.verify(&one);
        if how == 1 {
            let Ok(event) = self.lab.backend().record(EventScope::Stream(other)) else { return };
            let address = one.block.into_raw();
            if self.lab.heap.free_after(address, ClientEvent(event.0)).is_err() {
                assert!(self.refusing);
                self.lab.heap.free_raw(address).unwrap();
            }
            self.lab.backend().recycle(event);
        }
    }

    /// So many steps less one, with a look at the whole heap after every third.
    fn steps(&mut self, end: u64) {
        for step in 1..end {
            if step % 120 == 0 {
                self.renew();
            }
            self.step(step);
            if step % 3 == 0 {
                self.lab.check();
            }
        }
    }

    fn step(&mut self, step: u64) {
        match self.random.below(100) {
            0..=54 => self.alloc(),
            55..=78 => self.free(),
            79..=84 => {
                let by = MS * (1 + self.random.below(12)) as u32;
                self.lab.time.advance(by);
            }
            85..=88 => self.lab.heap.tick(),
            89 if step.is_multiple_of(5) => drop(self.lab.heap.trim()),
            90 if step.is_multiple_of(5) => drop(self.lab.heap.set_limit(self.top / 2)),
            91 => drop(self.lab.heap.set_limit(self.top + self.random.below(8) * GRANULE)),
            92 => drop(self.lab.heap.set_limit(self.top)),
            93 | 94 => self.pin(),
            95 | 96 => self.share(),
            97 if step.is_multiple_of(3) => self.pool(),
            98 if step.is_multiple_of(3) => self.retire(),
            99 => drop(self.lab.heap.layout()),
            _ => {}
        }
    }

    /// Most blocks go, and what is idle becomes large handles again.
    fn renew(&mut self) {
        self.live.truncate(3);
        self.lab.heap.set_limit(u64::MAX);
        self.lab.time.advance(50 * MS);
        self.lab.heap.tick();
        self.lab.heap.trim();
        self.fill(GRANULE * self.random.0.rem_euclid(3));
    }

    fn pin(&mut self) {
        if self.open.pins.len() > 2 || (self.random.below(2) == 0 && !self.open.pins.is_empty()) {
            let (address, bytes) = self.open.pins.swap_remove(0);
            self.lab.heap.unpin(address, bytes).unwrap();
        } else if !self.live.is_empty() {
            let index = self.random.below(self.live.len() as u64) as usize;
            let block = &self.live[index].block;
            let skip = self.random.below(block.size());
            let range = (block.address() + skip, 1 + self.random.below(block.size() - skip));
            self.lab.heap.pin(range.0, range.1).unwrap();
            self.open.pins.push(range);
        }
    }

    fn share(&mut self) {
        let Some(importer) = &self.importer else { return };
        if self.open.imports.len() > 2 || (self.random.below(2) == 0 && !self.open.imports.is_empty()) {
            self.open.imports.swap_remove(0).close().unwrap();
        } else if !self.live.is_empty() {
            let index = self.random.below(self.live.len() as u64) as usize;
            let one = &self.live[index];
            let export = one.block.export().unwrap();
            if self.random.below(3) == 0 {
                return;
            }
            let imported = importer.import(export).unwrap();
            for (address, word) in &one.words {
                let there = imported.address() + (address - one.block.address());
                // SAFETY: the import maps the whole block, and nobody writes to it meanwhile.
                let found = unsafe { std::ptr::read_unaligned(there as *const u64) };
                assert_eq!(found, *word);
            }
            self.open.imports.push(imported);
        }
    }

    fn pool(&mut self) {
        if let Some(pool) = self.pools.pop() {
            self.lab.heap.release_capture(pool).unwrap();
            self.live.retain(|one| one.pool != Some(pool) || one.words.len() % 2 == 0);
            return;
        }
        let (pool, stream) = (PoolId(7, self.next_pool), self.stream());
        self.next_pool += 1;
        if let Err(error) = self.lab.heap.begin_capture(pool, StreamFilter::Streams(vec![stream])) {
            assert!(self.refusing, "{error}");
            return;
        }
        for _ in 0..3 {
            let bytes = (1 + self.random.below(6)) * GRANULE;
            if let Ok(block) = self.lab.heap.alloc(bytes, stream) {
                self.enter(block, stream, Some(pool));
            }
        }
        self.alloc();
        self.free();
        self.lab.heap.end_capture(pool).unwrap();
        self.pools.push(pool);
    }

    fn retire(&mut self) {
        let index = self.random.below(self.streams.len() as u64) as usize;
        let gone = self.streams.swap_remove(index);
        let known = self.lab.heap.retire_stream(gone).is_ok();
        let kept = self.live.iter().any(|one| one.owner == gone);
        assert!(known || !kept || self.refusing);
        self.streams.push(StreamId(self.next_stream));
        self.next_stream += 1;
    }

    /// Ends all of it; how many ends were joined.
    fn finish(mut self, keep: u64) -> u64 {
        for one in &self.live {
            self.verify(one);
        }
        for (address, bytes) in std::mem::take(&mut self.open.pins) {
            self.lab.heap.unpin(address, bytes).unwrap();
        }
        for imported in std::mem::take(&mut self.open.imports) {
            imported.close().unwrap();
        }
        for pool in std::mem::take(&mut self.pools) {
            self.lab.heap.release_capture(pool).unwrap();
        }
        self.live.clear();
        for _ in 0..3 {
            self.lab.time.advance(100 * MS);
            self.lab.heap.tick();
            self.lab.heap.trim();
        }
        let stats = self.lab.heap.stats();
        assert_eq!(stats.handles_joined, stats.joins_ended);
        self.lab.ends_with(keep);
        stats.handles_joined
    }
}

const POLICIES: [&str; 9] = [
    "",
    "small_limit:0",
    "handles:small,growth:step=8MiB",
    "defrag:eager",
    "shrink:idle=2ms",
    "shrink:watermark=1%",
    "remap:quiesce",
    "cross_stream:wait",
    "cross_stream:off,shrink:oom",
];

/// Rounds of each policy: so many, or what the variable says.
fn rounds(few: u64) -> u64 {
    std::env::var("XSEG_CHAOS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(few)
}

fn chaos(make: support::Make, on_host: bool, rounds: u64, least: u64) {
    let mut joined = 0;
    for round in 0..rounds {
        for (policy, conf) in POLICIES.iter().enumerate() {
            let seed = 1 + 1000 * round + 31 * policy as u64;
            // Waits for imports take real time, with this clock standing still.
            let wait = if on_host { "0s" } else { ["1ms", "100ms"][(round % 2) as usize] };
            let conf = format!("reserve:8GiB,wait_limit:{wait},{conf}");
            let mut chaos = Chaos::new(make(conf.trim_end_matches(',')), on_host, seed);
            let extra = chaos.random.below(3) * GRANULE;
            chaos.fill(extra);
            chaos.steps(500);
            assert!(chaos.served > 50, "{conf}: {} blocks", chaos.served);
            joined += chaos.finish(0);
        }
    }
    assert!(joined >= least, "{joined} ends were joined");
}

#[test]
fn memory_is_one_blocks_and_in_order_on_sim() {
    chaos(sim, false, rounds(10), 100);
}

#[test]
fn contents_stay_on_host() {
    chaos(host, true, rounds(1), 5);
}

/// As above, while each n-th call of the driver is refused, with those on events or without.
#[test]
fn refused_calls_change_nothing_of_that() {
    let mut joined = 0;
    for round in 0..rounds(4) {
        for (policy, conf) in POLICIES.iter().enumerate() {
            let seed = 77 + 1000 * round + 31 * policy as u64;
            let conf = format!("reserve:8GiB,wait_limit:1ms,{conf}");
            let (lab, faulty) = faulty_sim(conf.trim_end_matches(','));
            let mut chaos = Chaos::new(lab, false, seed);
            chaos.fill(0);
            chaos.refusing = true;
            let n = [3, 4, 5, 7, 11, 17, 31][chaos.random.below(7) as usize];
            let mut plan = FaultPlan::new(FaultRule::Every(n), seed.is_multiple_of(3));
            plan.events = chaos.random.below(2) == 0;
            faulty.arm(plan);
            chaos.steps(400);
            faulty.disarm();
            joined += chaos.finish(0);
        }
    }
    assert!(joined > 10, "{joined} ends were joined");
}
