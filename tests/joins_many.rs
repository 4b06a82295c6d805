//! Joins by the thousand, and on several threads: nothing grows, and nothing is lost when the heap ends meanwhile.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod support;

use std::time::Duration;
use support::{MS, Random, sim};
use xseg::backend::StreamId;
use xseg::units::GRANULE;
use xseg::{Allocation, Error};

/// As many times more than usual as the variable says.
fn rounds(few: u64) -> u64 {
    std::env::var("XSEG_CHAOS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(few)
}

/// However many joins there were, no table is larger for it, and no more addresses are in use.
#[test]
fn nothing_grows_with_the_number_of_joins() {
    let lab = sim("reserve:4GiB,small_limit:0,growth:exact,wait_limit:0s");
    let (own, other) = (StreamId(1), StreamId(2));
    let mut random = Random(5);
    // Each handle is live in a granule at its start or its end.
    let mut kept = Vec::new();
    for number in 0..10 {
        let whole = lab.heap.alloc_contiguous((8 << (number % 3)) * GRANULE, own).unwrap();
        let bytes = whole.size();
        drop(whole);
        let parts = if number % 2 == 0 { [GRANULE, bytes - GRANULE] } else { [bytes - GRANULE, GRANULE] };
        let [first, last] = parts.map(|bytes| lab.alloc(bytes, own));
        kept.push((first, last));
    }
    let (kept, rest): (Vec<_>, Vec<_>) =
        kept.into_iter().map(|(a, b)| if a.size() == GRANULE { (a, b) } else { (b, a) }).unzip();
    lab.heap.set_limit(lab.reserved());
    drop(rest);
    let mut live: Vec<Allocation> = Vec::new();
    let mut seen = Vec::new();
    let steps = 24_000 * rounds(1);
    for step in 0..steps {
        while live.len() > 3 || (!live.is_empty() && random.below(3) == 0) {
            drop(live.swap_remove(random.below(live.len() as u64) as usize));
        }
        let stream = if random.below(8) == 0 { other } else { own };
        if let Ok(block) = lab.heap.alloc((9 + random.below(40)) * GRANULE - 512 * random.below(2), stream) {
            lab.work(stream, &block, MS);
            live.push(block);
        }
        lab.time.advance(Duration::from_micros(700 + random.below(900)));
        if step % (steps / 3) == steps / 3 - 1 {
            live.clear();
            lab.time.advance(100 * MS);
            lab.heap.tick();
            lab.check();
            let stats = lab.heap.stats();
            assert_eq!((stats.zombie, stats.handles_joined), (0, stats.joins_ended));
            seen.push((
                stats.metadata_bytes,
                stats.driver_calls.reserve,
                lab.sim().mapping_count(),
                stats.handles_joined,
            ));
        }
    }
    println!("{seen:?}");
    assert!(seen[2].3 > 2000, "{seen:?}");
    assert_eq!((seen[1].0, seen[1].1, seen[1].2), (seen[2].0, 1, seen[2].2));
    drop(kept);
    lab.ends_with(0);
}

/// Large requests of several threads, blocks that wait for streams (one of which does not end), and whatever takes the driver
/// lock, up to a shutdown in the middle of it.
#[test]
fn threads_join_and_wait_beside_all_else() {
    for round in 0..rounds(4) {
        let lab = sim(&format!(
            "reserve:8GiB,wait_limit:1ms,{}",
            ["small_limit:0", "remap:quiesce", "shrink:idle=1ms"][(round % 3) as usize]
        ));
        let blocks: Vec<_> =
            (0..12).map(|number| lab.heap.alloc_contiguous(GRANULE << (number % 6), StreamId(1)).unwrap()).collect();
        let stuck = lab.alloc(GRANULE, StreamId(1));
        lab.work(StreamId(99), &stuck, Duration::from_secs(60));
        lab.heap.set_limit(lab.reserved());
        drop(blocks);
        let ended = |result: &Error| matches!(result, Error::ShutDown | Error::OutOfMemory(_));
        std::thread::scope(|scope| {
            for number in 1..=3 {
                let lab = &lab;
                scope.spawn(move || {
                    let mut random = Random(100 * round + number);
                    let mut mine: Vec<Allocation> = Vec::new();
                    for _ in 0..400 {
                        match lab.heap.alloc((1 + random.below(30)) * GRANULE, StreamId(number)) {
                            Ok(block) => {
                                if random.below(3) == 0 {
                                    let other = if random.below(12) == 0 { 99 } else { 1 + random.below(3) };
                                    let _ = block.record_use(StreamId(other));
                                }
                                mine.push(block);
                            }
                            Err(error) => assert!(ended(&error), "{error}"),
                        }
                        while mine.len() > 4 || (!mine.is_empty() && random.below(3) == 0) {
                            drop(mine.swap_remove(random.below(mine.len() as u64) as usize));
                        }
                        lab.time.advance(MS / 10);
                    }
                });
            }
            let lab = &lab;
            scope.spawn(move || {
                let mut random = Random(100 * round + 50);
                for step in 0..300 {
                    match random.below(8) {
                        0 => drop(lab.heap.trim()),
                        1 => drop(lab.heap.stats()),
                        2 => drop(lab.heap.layout()),
                        3 => lab.heap.check().unwrap(),
                        _ => lab.heap.tick(),
                    }
                    if round % 2 == 1 && step == 150 {
                        return lab.heap.shut_down();
                    }
                    std::thread::yield_now();
                }
            });
        });
        drop(stuck);
        assert_eq!(lab.sim().violations(), Vec::<String>::new());
        if round % 2 == 0 {
            lab.ends_with(0);
        }
    }
}
