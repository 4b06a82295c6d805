//! Measures against small traces worked out by hand, and the suite as a whole.

use super::*;
use crate::trace::Trace;
use crate::units::MIB;
use std::sync::atomic::AtomicU64;

/// Counts what it is told.
#[derive(Debug, Default)]
pub(super) struct Told {
    length: AtomicU64,
    done: AtomicU64,
}

impl Told {
    pub(super) fn so_far(&self) -> u64 {
        self.done.load(Relaxed)
    }
}

impl Progress for Told {
    fn length(&self, work: u64) {
        self.length.store(work, Relaxed);
    }

    fn done(&self, work: u64) {
        self.done.fetch_add(work, Relaxed);
    }

    fn doing(&self, what: &str) {
        assert!(what.contains(" with ") || what.contains("moving"), "{what}");
    }
}

/// 2 blocks of 32 MiB with one of 16 MiB between, then one of 48 MiB that fits only if pages move.
pub(super) const GAPS: &str =
    "a,0,33554432,0,0\na,1,16777216,0,10\na,2,33554432,0,20\nf,0,30\nf,2,40\na,3,50331648,0,50000\n";

fn workload(name: &str, text: &str) -> Workload {
    Workload::from_trace(Trace::from_bytes(name, text.as_bytes()).unwrap())
}

pub(super) fn options(workloads: Vec<Workload>, allocators: &[&str], limit: u64) -> Options {
    Options {
        workloads,
        allocators: allocators.iter().map(|name| (*name).to_owned()).collect(),
        config: Config::default(),
        limit: Box::new(move |_| limit),
        lag: Duration::from_millis(5),
        least: Least::Quick,
        jobs: 1,
    }
}

fn row(text: &str, allocator: &str, limit: u64) -> Row {
    let mut all = run(&options(vec![workload("t", text)], &[allocator], limit), &Told::default()).unwrap();
    assert_eq!(all.len(), 1);
    all.remove(0).row
}

#[test]
fn native_by_hand() {
    // 3 MiB and 1 KiB: segments of 20 and 2 MiB. Then 19 MiB: one of its own of 20 MiB,
    // whose last MiB is not split off (remainders up to 1 MiB are not).
    let row = row("a,0,3145728,0,0\na,1,1000,0,10\na,2,19922944,0,20\nf,0,30\n", "torch-native", 42 * MIB);
    assert_eq!(row.peak_requested_bytes, 22 * MIB + 1000);
    assert_eq!(row.plenty.peak_allocated_bytes, 23 * MIB + 1024);
    assert_eq!(row.plenty.peak_reserved_bytes, 42 * MIB);
    assert_eq!((row.plenty.driver_calls.create, row.plenty.driver_calls.total()), (3, 3));
    let external = 100.0 * (19 * MIB - 1024) as f64 / (42 * MIB) as f64;
    assert!((row.plenty.external_fragmentation_percent - external).abs() < 1e-9);
    assert!((row.plenty.internal_fragmentation_percent - 100.0 * (MIB + 24) as f64 / (42 * MIB) as f64).abs() < 1e-9);
    assert!(row.limited.completed && row.limited.refused_requests == 0);
    // The model's price: 30.5 µs for up to 1 MiB, 67.5 at 128 MiB, straight between.
    let price = |mib: f64| 30.5 + 37.0 * (mib - 1.0) / 127.0;
    let ms = (price(2.0) + 2.0 * price(20.0)) / 1e3;
    assert!((row.plenty.driver_ms - ms).abs() < 1e-5, "{} {ms}", row.plenty.driver_ms);
    let stall = row.plenty.stall_us.unwrap();
    assert!((stall.max - price(20.0)).abs() < 1e-3 && (stall.p50 - price(20.0)).abs() < 1e-3, "{stall:?}");
}

#[test]
fn a_refused_request_is_left_out_and_the_rest_goes_on() {
    // 40 MiB do not fit in 32; its free and the block after it do no harm.
    let row = row("a,0,8388608,0,0\na,1,41943040,0,10\nu,1,7,15\nf,1,20\na,2,8388608,0,30\n", "cuda-malloc", 32 * MIB);
    assert_eq!((row.limited.refused_requests, row.limited.first_refused_event), (1, Some(1)));
    assert!(!row.limited.completed && row.plenty.completed);
    assert_eq!((row.plenty.peak_reserved_bytes, row.limited.peak_reserved_bytes), (48 * MIB, 16 * MIB));
    assert_eq!(row.limited.internal_fragmentation_percent, 0.0, "of what was live in this run");
}

#[test]
fn waits_are_counted_and_stall() {
    // Each free of cudaMalloc waits for the device, 5 ms behind; frees are not allocations.
    let waits = row("a,0,8388608,0,0\nf,0,10\na,1,8388608,0,20\nf,1,30\n", "cuda-malloc", 32 * MIB).limited;
    assert_eq!((waits.host_waits, waits.stall_us.unwrap().max < 100.0), (2, true));
    // Native frees segments only when memory runs out: a wait within the allocation.
    let flush = row("a,0,20971520,0,0\nf,0,10\na,1,33554432,0,20\n", "torch-native", 40 * MIB).limited;
    assert!(flush.completed && flush.host_waits == 1, "{flush:?}");
    assert!(flush.stall_us.unwrap().max >= 5000.0);
}

#[test]
fn xseg_moves_and_its_gauge_agrees_with_its_figures() {
    let mut all = run(&options(vec![workload("gaps", GAPS)], &["xseg", HOST], 80 * MIB), &Told::default()).unwrap();
    let (host, own) = (all.remove(1).row, all.remove(0));
    let limited = &own.row.limited;
    assert!(limited.completed && limited.handles_moved > 0 && limited.copied_bytes == 0);
    assert_eq!((limited.peak_allocated_bytes, limited.peak_reserved_bytes), (80 * MIB, 80 * MIB));
    let last = own.limited.as_ref().unwrap().samples.iter().max_by_key(|sample| sample.allocated).unwrap();
    assert_eq!((last.allocated, last.requested), (80 * MIB, 80 * MIB));
    let picture = own.limited.as_ref().unwrap().at_peak.as_ref().unwrap();
    assert_eq!(picture.bytes[..3].iter().sum::<u64>(), 80 * MIB, "{picture:?}");
    // On host memory the same happens, and nothing is overwritten.
    assert_eq!((host.backend.as_str(), host.limited.mismatches), ("host", Some(0)));
    assert!(host.limited.stamps_checked > Some(10));
    assert_eq!(host.limited.handles_moved, limited.handles_moved);
    assert_eq!(host.limited.driver_calls, limited.driver_calls);
}

#[test]
fn a_moved_picture_shows_what_moved() {
    let text = GAPS.to_owned() + "f,3,60000\na,4,50331648,0,70000\n";
    let mut all = run(&options(vec![workload("gaps", &text)], &["xseg"], 80 * MIB), &Told::default()).unwrap();
    let run = all.remove(0).limited.unwrap();
    // The peak of 80 MiB is before the move; the picture of the end is not kept, that of a refusal is.
    assert_eq!(run.at_peak.unwrap().bytes[1], 0);
    let more = text + "a,5,33554432,0,80000\n";
    let mut all = super::run(&options(vec![workload("gaps", &more)], &["xseg"], 80 * MIB), &Told::default()).unwrap();
    let run = all.remove(0).limited.unwrap();
    assert_eq!(run.refused, 1);
    assert!(run.at_refusal.unwrap().bytes[1] > 0, "blocks on moved memory");
}

#[test]
fn the_quick_search_agrees_with_the_full_one_to_its_grid() {
    for allocator in ["xseg", "torch-expandable", "cuda-malloc"] {
        let mut options = options(vec![workload("gaps", GAPS)], &[allocator], 100 * MIB);
        let quick = run(&options, &Told::default()).unwrap()[0].row.clone();
        options.least = Least::Full;
        let full = run(&options, &Told::default()).unwrap()[0].row.clone();
        let (quick, full) = (quick.least_bytes.unwrap(), full.least_bytes.unwrap());
        assert!(quick.abs_diff(full) <= 80 * MIB / QUICK_STEPS + GRANULE, "{allocator}: {quick} {full}");
    }
    assert_eq!(quick_least(100 * MIB, |_| Ok(false)), Ok(None));
    assert_eq!(quick_least(100 * MIB, |_| Ok(true)), Ok(Some(100 * MIB)));
    assert_eq!(quick_least(100 * MIB, |limit| Ok(limit >= 150 * MIB)), Ok(Some(150 * MIB)));
}

/// A report's figures without what differs from run to run.
fn timeless(mut row: Row) -> Row {
    for run in [&mut row.plenty, &mut row.limited] {
        run.wall_ms = 0.0;
        run.machine_ns = None;
        run.hot_path_ns = None;
    }
    row
}

#[test]
fn two_runs_give_the_same_figures_whatever_the_threads() {
    let make = |jobs| {
        let named = |entry: &&workloads::Entry| ["holes", "s01-two-gaps", "moe-skew"].contains(&entry.name);
        let workloads = workloads::CATALOGUE.iter().filter(named).map(|entry| entry.make(3, 1).unwrap()).collect();
        let told = Told::default();
        let mut options = options(workloads, &["xseg", HOST, "torch-expandable", "vpmm"], 0);
        options.limit = Box::new(|peak| peak + peak / 20);
        options.jobs = jobs;
        options.least = Least::No;
        let rows: Vec<Row> = run(&options, &told).unwrap().into_iter().map(|measured| timeless(measured.row)).collect();
        assert_eq!(told.length.load(Relaxed), told.done.load(Relaxed));
        rows
    };
    let (one, two) = (make(1), make(3));
    assert_eq!(one.len(), 12);
    assert_eq!(one, two);
    assert!(one.iter().all(|row| row.plenty.completed), "{one:?}");
}

#[test]
fn no_more_threads_than_pairs() {
    let mut options = options(vec![workload("gaps", GAPS)], &["xseg"], 80 * MIB);
    options.jobs = usize::MAX;
    assert_eq!(run(&options, &Told::default()).unwrap().len(), 1);
}

#[test]
fn a_configuration_that_cannot_be_is_an_error() {
    let mut options = options(vec![workload("gaps", GAPS)], &["xseg"], 80 * MIB);
    options.config.warmup = 1 << 30;
    assert!(run(&options, &Told::default()).unwrap_err().contains("warmup"));
}

#[test]
fn quantiles_are_ranks() {
    let mut values: Vec<u64> = (1..=1000).rev().collect();
    let found = measure::Quantiles::of(&mut values, 1.0);
    assert_eq!((found.p50, found.p90, found.p99, found.p999, found.max), (500.0, 900.0, 990.0, 999.0, 1000.0));
    assert_eq!(measure::Quantiles::of(&mut [7000], 1e3).p50, 7.0);
    assert_eq!(measure::Quantiles::of(&mut [], 1.0).max, 0.0);
}
