//! The hot path: what a pair of `alloc` and `free` costs that needs no driver work, beside a best-fit tree
//! with a hash map (`alloc/tree.rs`) in the same run.
//!
//! On the simulated device, through the public calls, locks included. The table at the end has the least of
//! the samples, since the machine's other work only ever adds, and the ratios.

#[path = "alloc/patterns.rs"]
mod patterns;
#[path = "alloc/tree.rs"]
mod tree;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion};
use patterns::{Population, Subject, repeated, threads};
use std::collections::BTreeMap;
use std::time::Duration;
use tree::Tree;
use xseg::Heap;
use xseg::units::{KIB, MIB, human};

/// Samples with fewer pairs are too short to count.
const LEAST_PAIRS: u64 = 256;

/// Least nanoseconds a pair: by case, of xseg and of the tree.
#[derive(Default)]
struct Results {
    order: Vec<String>,
    best: BTreeMap<(String, &'static str), f64>,
}

impl Results {
    fn note(&mut self, case: &str, subject: &'static str, pairs: u64, time: Duration) {
        if pairs < LEAST_PAIRS {
            return;
        }
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

/// One case on one subject.
fn case(
    group: &mut Group<'_>,
    results: &mut Results,
    name: &str,
    subject: &'static str,
    mut run: impl FnMut(u64) -> Duration,
) {
    group.bench_function(BenchmarkId::new(subject, name), |bench| {
        // Whatever is made first is made before anything is measured.
        run(0);
        bench.iter_custom(|pairs| {
            let time = run(pairs);
            results.note(name, subject, pairs, time);
            time
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
        // Some blocks on either side that stay, so that merging and splitting have something to do.
        for subject in [&heap as &dyn Holds, &tree] {
            subject.hold(bytes);
        }
        case(group, results, &name, "xseg", |pairs| repeated(&heap, bytes, 0, pairs));
        case(group, results, &name, "tree", |pairs| repeated(&tree, bytes, 0, pairs));
    }
}

trait Holds {
    fn hold(&self, bytes: u64);
}

impl<S: Subject> Holds for S {
    fn hold(&self, bytes: u64) {
        let blocks: Vec<u64> = (0..16).map(|_| self.alloc(bytes, 0)).collect();
        blocks.iter().step_by(2).for_each(|address| self.free(*address));
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
        case(group, results, &format!("{pattern}, {count} live"), name, |pairs| {
            run(made.get_or_insert_with(|| Population::new(subject, count)), pairs)
        });
    }
}

fn many_threads(group: &mut Group<'_>, results: &mut Results) {
    for shared in [false, true] {
        for count in [1, 2, 4, 8] {
            let name = format!("{count} threads, {}", if shared { "shared" } else { "own" });
            let (heap, tree) = (heap(), Tree::default());
            case(group, results, &name, "xseg", |pairs| threads(&heap, count, shared, pairs));
            case(group, results, &name, "tree", |pairs| threads(&tree, count, shared, pairs));
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
