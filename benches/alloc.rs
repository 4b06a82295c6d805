//! The hot path: what a pair of `alloc` and `free` costs that needs no driver work, beside a best-fit tree
//! with a hash map (`alloc/tree.rs`) in the same run.
//!
//! On the simulated device, through the public calls, locks included. The table at the end has the least of many
//! short runs, since the machine's other work only ever adds, and the ratios.

#[path = "alloc/patterns.rs"]
mod patterns;
#[path = "alloc/tree.rs"]
mod tree;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion};
use patterns::{Population, STEP, Subject, repeated, threads};
use std::collections::BTreeMap;
use std::time::Duration;
use tree::Tree;
use xseg::Heap;
use xseg::units::{KIB, MIB, human};

/// Pairs of one run: some hundred microseconds, so that some runs are not interrupted. Whole steps.
const RUN: u64 = 64 * STEP as u64;

/// Pairs of each thread: so many that starting the threads is a small part.
const THREAD_RUN: u64 = 100_000;

/// Least nanoseconds a pair: by case, of xseg and of the tree.
#[derive(Default)]
struct Results {
    order: Vec<String>,
    best: BTreeMap<(String, &'static str), f64>,
    /// Bytes of tables a live block, by live blocks.
    metadata: Vec<(usize, f64)>,
}

impl Results {
    fn note(&mut self, case: &str, subject: &'static str, pairs: u64, time: Duration) {
        let nanos = time.as_nanos() as f64 / pairs as f64;
        if !self.order.iter().any(|known| known == case) {
            self.order.push(case.to_owned());
        }
        let best = self.best.entry((case.to_owned(), subject)).or_insert(f64::INFINITY);
        *best = best.min(nanos);
    }

    fn of(&self, case: &str, subject: &'static str) -> Option<f64> {
        self.best.get(&(case.to_owned(), subject)).copied()
    }

    fn print(&self) {
        println!("\n{:<34} {:>9} {:>9} {:>9}", "least of the samples", "xseg ns", "tree ns", "tree/xseg");
        for case in &self.order {
            if let (Some(xseg), Some(tree)) = (self.of(case, "xseg"), self.of(case, "tree")) {
                println!("{case:<34} {xseg:>9.1} {tree:>9.1} {:>9.1}", tree / xseg);
            }
        }
        for pattern in ["churn", "step", "lifo"] {
            let of = |count: u64| self.of(&format!("{pattern}, {count} live"), "xseg");
            if let (Some(few), Some(many)) = (of(1_000), of(1_000_000)) {
                println!("{pattern}: 1,000,000 live blocks cost {:.2} times what 1,000 cost", many / few);
            }
        }
        for (count, bytes) in &self.metadata {
            println!("{count} live blocks: {bytes:.1} B of tables each, beside the block table");
        }
        for kind in ["own", "shared"] {
            let of = |threads: u64| self.of(&format!("{threads} threads, {kind}"), "xseg");
            let one = of(1);
            for threads in [1, 2, 4, 8] {
                if let (Some(one), Some(each)) = (one, of(threads)) {
                    let rate = 1000.0 * threads as f64 / each;
                    let times = threads as f64 * one / each;
                    println!("{threads} threads on {kind} streams: {rate:.1} M pairs/s, {times:.2} times one thread");
                }
            }
        }
    }
}

type Group<'a> = BenchmarkGroup<'a, WallTime>;

/// One case on one subject, in runs of so many pairs.
fn case(
    group: &mut Group<'_>,
    results: &mut Results,
    (name, subject): (&str, &'static str),
    pairs: u64,
    mut run: impl FnMut(u64) -> Duration,
) {
    group.bench_function(BenchmarkId::new(subject, name), |bench| {
        // Whatever is made first is made before anything is measured.
        run(0);
        bench.iter_custom(|runs| {
            let timed = |_| {
                let time = run(pairs);
                results.note(name, subject, pairs, time);
                time
            };
            (0..runs).map(timed).sum()
        });
    });
}

fn heap() -> Heap {
    Heap::builder().conf("backend:sim").and_then(|builder| builder.build()).expect("a heap on sim")
}

/// The figure that the pair of a size starts from: a heap that has seen some of everything.
fn sizes(group: &mut Group<'_>, results: &mut Results) {
    for bytes in [512, 64 * KIB, MIB, 20 * MIB, 128 * MIB] {
        let name = format!("pair of {}", human(bytes));
        let (heap, tree) = (heap(), Tree::default());
        // One that stays: the pairs go on behind it.
        Subject::alloc(&heap, bytes, 0);
        tree.alloc(bytes, 0);
        case(group, results, (&name, "xseg"), RUN, |pairs| repeated(&heap, bytes, 0, pairs));
        case(group, results, (&name, "tree"), RUN, |pairs| repeated(&tree, bytes, 0, pairs));
    }
}

fn populations(group: &mut Group<'_>, results: &mut Results) {
    for count in [1_000, 10_000, 100_000, 1_000_000] {
        let (heap, tree) = (heap(), Tree::default());
        population(group, results, "xseg", &heap, count);
        population(group, results, "tree", &tree, count);
    }
}

/// One of the patterns, for so many pairs.
type Pattern<'a, S> = fn(&mut Population<'a, S>, u64) -> Duration;

fn population<'a, S: Subject>(
    group: &mut Group<'_>,
    results: &mut Results,
    name: &'static str,
    subject: &'a S,
    count: usize,
) {
    // Made by the first case that runs, so that a filter on the command line spares the others' making.
    let mut made = None;
    let patterns: [(_, Pattern<'a, S>); 3] =
        [("churn", Population::churn), ("step", Population::steps), ("lifo", Population::last_in_first_out)];
    for (pattern, run) in patterns {
        case(group, results, (&format!("{pattern}, {count} live"), name), RUN, |pairs| {
            run(made.get_or_insert_with(|| Population::new(subject, count)), pairs)
        });
    }
    if let (Some(_), Some(bytes)) = (made, subject.metadata()) {
        results.metadata.push((count, bytes as f64 / count as f64));
    }
}

fn many_threads(group: &mut Group<'_>, results: &mut Results) {
    for shared in [false, true] {
        for count in [1, 2, 4, 8] {
            let name = format!("{count} threads, {}", if shared { "shared" } else { "own" });
            let (heap, tree) = (heap(), Tree::default());
            case(group, results, (&name, "xseg"), THREAD_RUN, |pairs| threads(&heap, count, shared, pairs));
            case(group, results, (&name, "tree"), THREAD_RUN, |pairs| threads(&tree, count, shared, pairs));
        }
    }
}

fn main() {
    let mut criterion = Criterion::default()
        .warm_up_time(Duration::from_millis(100))
        .measurement_time(Duration::from_millis(400))
        .sample_size(20)
        .nresamples(1000)
        .configure_from_args();
    let mut results = Results::default();
    let mut group = criterion.benchmark_group("alloc");
    sizes(&mut group, &mut results);
    populations(&mut group, &mut results);
    many_threads(&mut group, &mut results);
    group.finish();
    criterion.final_summary();
    results.print();
}
