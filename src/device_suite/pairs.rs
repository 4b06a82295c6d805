//! Pairs of an allocation and a free that need no driver work: the patterns of `benches/peers/pairs.cpp`,
//! request by request, through the heap.

use super::median;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use xseg::peers::{Line, OWN, Pairs};
use xseg::units::{KIB, MIB};
use xseg::{Error, Heap, StreamId};

const SAMPLES: usize = 31;
const SAMPLES_MIN: usize = 3;
/// A pattern ends after this time, once it has enough samples.
const PATTERN: Duration = Duration::from_secs(1);
/// Time of one sample of pairs.
const SAMPLE: Duration = Duration::from_millis(4);
/// Threads of the patterns with several.
pub(crate) const THREADS: usize = 8;

/// The same numbers as in the program.
struct Random(u64);

impl Random {
    fn new() -> Self {
        Self(0x9E37_79B9_7F4A_7C15)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }

    /// 512 B to 1 MiB, each power of two as often.
    fn size(&mut self) -> u64 {
        let base = 512 << self.below(11);
        base + self.below(base)
    }
}

/// The default stream, which programs use first: the patterns of one stream are on it, those of threads on streams that
/// were created.
const DEFAULT: StreamId = StreamId(0);

/// The heap and the streams that it serves, one for each thread.
pub(crate) struct Ground<'a> {
    pub(crate) heap: &'a Heap,
    pub(crate) streams: [StreamId; THREADS],
    /// As few samples as will do.
    pub(crate) quick: bool,
}

/// Measures every pattern.
///
/// # Errors
/// When the heap refuses a request.
pub(crate) fn measure(ground: &Ground<'_>) -> Result<Vec<Line>, Error> {
    let mut lines = Vec::new();
    for bytes in [512, 64 * KIB, MIB, 20 * MIB, 128 * MIB] {
        lines.push(one_size(ground, bytes)?);
    }
    lines.push(churn(ground, 10_000)?);
    lines.extend(many_live(ground, 20_000)?);
    for (threads, streams) in [(1, 1), (THREADS, THREADS), (THREADS, 1)] {
        lines.push(several(ground, threads, streams)?);
    }
    Ok(lines.into_iter().map(Line::Pairs).collect())
}

/// Calls `once` until there are enough samples or the time is up; the times of all but the first, a warm-up.
fn sample<T>(quick: bool, mut once: impl FnMut() -> Result<T, Error>) -> Result<Vec<T>, Error> {
    let (start, most) = (Instant::now(), if quick { SAMPLES_MIN } else { SAMPLES });
    once()?;
    let mut taken = Vec::new();
    while taken.len() < most && (taken.len() < SAMPLES_MIN || start.elapsed() < PATTERN) {
        taken.push(once()?);
    }
    Ok(taken)
}

/// What a line says besides its times.
struct Pattern {
    pattern: &'static str,
    operation: &'static str,
    bytes: u64,
    live: usize,
    threads: usize,
    streams: usize,
    operations: usize,
    requested_bytes: u64,
}

impl Pattern {
    fn line(&self, times: &[Duration]) -> Pairs {
        let each = |time: &Duration| time.as_secs_f64() * 1e9 / self.operations as f64;
        let mut values: Vec<f64> = times.iter().map(each).collect();
        Pairs {
            allocator: OWN.into(),
            pattern: self.pattern.into(),
            operation: self.operation.into(),
            bytes: self.bytes,
            live: self.live as u64,
            threads: self.threads as u64,
            streams: self.streams as u64,
            operations: self.operations as u64,
            samples: times.len() as u64,
            requested_bytes: self.requested_bytes,
            median_ns: median(&mut values),
            min_ns: values.first().copied().unwrap_or(0.0),
        }
    }
}

/// Time of `count` pairs of one size.
fn pairs(heap: &Heap, bytes: u64, stream: StreamId, count: usize) -> Result<Duration, Error> {
    let start = Instant::now();
    for _ in 0..count {
        heap.free_raw(heap.alloc_raw(bytes, stream)?)?;
    }
    Ok(start.elapsed())
}

/// Pairs that take about the time of a sample.
fn pairs_a_sample(heap: &Heap, bytes: u64, stream: StreamId) -> Result<usize, Error> {
    let mut count = 16;
    while count < 1 << 20 && pairs(heap, bytes, stream, count)? < SAMPLE {
        count *= 2;
    }
    Ok(count)
}

fn one_size(ground: &Ground<'_>, bytes: u64) -> Result<Pairs, Error> {
    let (heap, stream) = (ground.heap, DEFAULT);
    let operations = pairs_a_sample(heap, bytes, stream)?;
    let times = sample(ground.quick, || pairs(heap, bytes, stream, operations))?;
    let requested_bytes = bytes * operations as u64;
    let pattern = Pattern {
        pattern: "pair",
        operation: "pair",
        bytes,
        live: 1,
        threads: 1,
        streams: 1,
        operations,
        requested_bytes,
    };
    Ok(pattern.line(&times))
}

/// A block of those that live is freed and one of another size allocated, at random.
fn churn(ground: &Ground<'_>, live: usize) -> Result<Pairs, Error> {
    let (heap, stream) = (ground.heap, DEFAULT);
    let mut random = Random::new();
    let mut blocks = (0..live).map(|_| heap.alloc_raw(random.size(), stream)).collect::<Result<Vec<u64>, _>>()?;
    let mut steps = vec![(0, 0); live];
    let mut requested_bytes = 0;
    let times = sample(ground.quick, || {
        for (slot, bytes) in &mut steps {
            *slot = random.below(live as u64) as usize;
            *bytes = random.size();
        }
        if requested_bytes == 0 {
            requested_bytes = steps.iter().map(|(_, bytes)| bytes).sum();
        }
        let start = Instant::now();
        for (slot, bytes) in &steps {
            heap.free_raw(blocks[*slot])?;
            blocks[*slot] = heap.alloc_raw(*bytes, stream)?;
        }
        Ok(start.elapsed())
    })?;
    blocks.into_iter().try_for_each(|address| heap.free_raw(address))?;
    let (bytes, operations) = (0, live);
    let pattern = Pattern {
        pattern: "churn",
        operation: "pair",
        bytes,
        live,
        threads: 1,
        streams: 1,
        operations,
        requested_bytes,
    };
    Ok(pattern.line(&times))
}

/// So many blocks of random sizes are allocated in order and freed in a scattered order.
fn many_live(ground: &Ground<'_>, live: usize) -> Result<[Pairs; 2], Error> {
    let (heap, stream) = (ground.heap, DEFAULT);
    let mut random = Random::new();
    let sizes: Vec<u64> = (0..live).map(|_| random.size()).collect();
    let mut order: Vec<usize> = (0..live).collect();
    for last in (1..live).rev() {
        order.swap(last, random.below(last as u64 + 1) as usize);
    }
    let mut blocks = vec![0; live];
    let times = sample(ground.quick, || {
        let start = Instant::now();
        for (block, bytes) in blocks.iter_mut().zip(&sizes) {
            *block = heap.alloc_raw(*bytes, stream)?;
        }
        let middle = Instant::now();
        for at in &order {
            heap.free_raw(blocks[*at])?;
        }
        Ok((middle - start, middle.elapsed()))
    })?;
    let (allocs, frees): (Vec<Duration>, Vec<Duration>) = times.into_iter().unzip();
    let line = |operation, times: &[Duration]| {
        let (bytes, requested_bytes, operations) = (0, sizes.iter().sum(), live);
        let pattern =
            Pattern { pattern: "live", operation, bytes, live, threads: 1, streams: 1, operations, requested_bytes };
        pattern.line(times)
    };
    Ok([line("alloc", &allocs), line("free", &frees)])
}

/// Pairs of one size on several threads at once: time over all pairs of all threads.
fn several(ground: &Ground<'_>, threads: usize, streams: usize) -> Result<Pairs, Error> {
    let (heap, bytes) = (ground.heap, 64 * KIB);
    // One thread's sample, so that several take about as long or longer.
    let each = (pairs_a_sample(heap, bytes, ground.streams[0])? / 2).max(16);
    let times = sample(ground.quick, || {
        let (ready, go) = (AtomicUsize::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let (ready, go) = (&ready, &go);
            let work = |stream| {
                move || {
                    let warm = pairs(heap, bytes, stream, 16);
                    ready.fetch_add(1, Ordering::AcqRel);
                    while !go.load(Ordering::Acquire) {
                        std::hint::spin_loop();
                    }
                    warm.and_then(|_| pairs(heap, bytes, stream, each)).map(|_| Instant::now())
                }
            };
            let all: Vec<_> = (0..threads).map(|number| scope.spawn(work(ground.streams[number % streams]))).collect();
            while ready.load(Ordering::Acquire) < threads {
                std::thread::yield_now();
            }
            let start = Instant::now();
            go.store(true, Ordering::Release);
            let mut last = start;
            for thread in all {
                let end = thread.join().map_err(|_| Error::InvalidArgument("a thread of a pattern panicked".into()))?;
                last = last.max(end?);
            }
            Ok(last - start)
        })
    })?;
    let operations = each * threads;
    let requested_bytes = bytes * operations as u64;
    let pattern = Pattern {
        pattern: "threads",
        operation: "pair",
        bytes,
        live: 1,
        threads,
        streams,
        operations,
        requested_bytes,
    };
    Ok(pattern.line(&times))
}

#[cfg(test)]
mod tests {
    use super::*;
    use xseg::config::BackendChoice;
    use xseg::peers::read;

    #[test]
    fn every_pattern_asks_for_what_the_program_asks_for() {
        let mut config = xseg::Config::default();
        config.backend = BackendChoice::Sim;
        let heap = Heap::builder().config(config).build().unwrap();
        let streams = std::array::from_fn(|number| StreamId(number as u64 + 1));
        let own = measure(&Ground { heap: &heap, streams, quick: true }).unwrap();
        assert_eq!(heap.stats().allocated, 0);
        let pairs = |lines: Vec<Line>| -> Vec<Pairs> {
            lines.into_iter().filter_map(|line| if let Line::Pairs(line) = line { Some(line) } else { None }).collect()
        };
        let printed = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/peers.jsonl");
        let (own, theirs) = (pairs(own), pairs(read(&printed).unwrap()));
        assert_eq!(own.len(), 11);
        let key = |line: &Pairs| {
            let sure = line.bytes == 0;
            let asked = if sure { (line.operations, line.requested_bytes) } else { (0, 0) };
            (line.pattern.clone(), line.operation.clone(), line.bytes, line.live, line.threads, line.streams, asked)
        };
        assert_eq!(own.iter().map(key).collect::<Vec<_>>(), theirs.iter().map(key).collect::<Vec<_>>());
        for line in &own {
            assert!(line.min_ns > 0.0 && line.min_ns <= line.median_ns && line.samples == 3, "{line:?}");
            assert_eq!(line.bytes * line.operations, if line.bytes == 0 { 0 } else { line.requested_bytes });
        }
    }
}
