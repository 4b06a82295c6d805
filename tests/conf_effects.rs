//! What each key of `XSEG_CONF` changes: one test a key, each with a difference that a client sees.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod support;

use std::time::Duration;
use support::{Lab, MS, S1, S2, out_of_memory, sim, sim_with};
use xseg::backend::BackendKind;
use xseg::backend::sim::SimOptions;
use xseg::units::{GIB, KIB, MIB};
use xseg::{Allocation, Heap};

/// Four blocks of 16 MiB, the first and third freed: 32 MiB lie free in two places, then 32 MiB are asked for.
fn scattered(conf: &str) -> (Lab, Vec<Allocation>) {
    let lab = sim(&format!("growth:exact,handle_max:16MiB,{conf}"));
    let mut blocks: Vec<Allocation> = (0..4).map(|_| lab.alloc(16 * MIB, S1)).collect();
    drop((blocks.remove(2), blocks.remove(0)));
    blocks.push(lab.alloc(32 * MIB, S1));
    lab.check();
    (lab, blocks)
}

#[test]
fn limit() {
    let small = sim("limit:32MiB");
    let block = small.alloc(32 * MIB, S1);
    out_of_memory(small.heap.alloc(1, S1));
    drop(block);
    let large = sim("limit:64MiB");
    drop((large.alloc(32 * MIB, S1), large.alloc(32 * MIB, S1)));
    let options = || SimOptions { total: Some(GIB), ..SimOptions::default() };
    assert_eq!(sim_with("limit:50%", options()).heap.limit(), 512 * MIB);
    assert_eq!(sim_with("", options()).heap.limit(), 512 * MIB, "auto leaves 512 MiB to others");
}

#[test]
fn reserve() {
    let reservations = |conf: &str| {
        let lab = sim(conf);
        let blocks = (lab.alloc(3 * GIB, S1), lab.alloc(3 * GIB, S1));
        let calls = lab.heap.stats().driver_calls.reserve;
        drop(blocks);
        calls
    };
    assert_eq!(reservations("reserve:4GiB"), 2);
    assert_eq!(reservations("reserve:16GiB"), 1);
}

#[test]
fn growth() {
    let reserved = |conf: &str| {
        let lab = sim(conf);
        let first = lab.alloc(64 * MIB, S1);
        let then = lab.alloc(2 * MIB, S1);
        lab.check();
        let reserved = lab.reserved();
        drop((first, then));
        reserved
    };
    assert_eq!(reserved("growth:exact"), 66 * MIB);
    assert_eq!(reserved("growth:step=16MiB"), 80 * MIB);
    assert_eq!(reserved("growth:step=64MiB"), 128 * MIB);
    assert_eq!(reserved("growth:geometric=1.5"), 96 * MIB);
    assert_eq!(reserved("growth:geometric=1.125"), 72 * MIB);
    assert_eq!(reserved("growth:step=1GiB"), GIB);
    assert_eq!(reserved("growth:step=1GiB,limit:4GiB"), 64 * MIB + 62 * MIB, "a 64th of what may be created");
}

#[test]
fn handle_max() {
    let created = |conf: &str| {
        let lab = sim(conf);
        drop(lab.alloc(64 * MIB, S1));
        lab.heap.stats().driver_calls.create
    };
    assert_eq!(created("handle_max:2MiB"), 32);
    assert_eq!(created("handle_max:16MiB"), 4);
    assert_eq!(created("handle_max:64MiB"), 1);
}

#[test]
fn warmup() {
    assert_eq!(sim("").reserved(), 0);
    let lab = sim("warmup:64MiB");
    assert_eq!(lab.reserved(), 64 * MIB);
    let calls = lab.heap.stats().driver_calls;
    drop(lab.alloc(64 * MIB, S2));
    assert_eq!(lab.heap.stats().driver_calls, calls);
}

#[test]
fn shrink_at_an_out_of_memory_error() {
    let left = |conf: &str| {
        let lab = sim(&format!("limit:64MiB,handle_max:16MiB,growth:exact,{conf}"));
        let (kept, freed) = (lab.alloc(32 * MIB, S1), lab.alloc(32 * MIB, S1));
        drop(freed);
        out_of_memory(lab.heap.alloc(64 * MIB, S1));
        let left = lab.reserved();
        drop(kept);
        left
    };
    assert_eq!(left("shrink:never"), 64 * MIB);
    assert_eq!(left("shrink:oom"), 32 * MIB);
}

/// 128 MiB freed, a second goes by, and then what `act` does. Bytes reserved.
fn after_a_second(conf: &str, act: impl Fn(&Lab)) -> u64 {
    let lab = sim(&format!("handle_max:16MiB,growth:exact,{conf}"));
    let kept = lab.alloc(32 * MIB, S1);
    drop(lab.alloc(128 * MIB, S1));
    lab.heap.tick();
    lab.time.advance(Duration::from_secs(1));
    act(&lab);
    lab.check();
    let reserved = lab.reserved();
    drop(kept);
    reserved
}

#[test]
fn shrink_by_time() {
    let tick = |lab: &Lab| lab.heap.tick();
    assert_eq!(after_a_second("shrink:never", tick), 160 * MIB);
    assert_eq!(after_a_second("shrink:idle=5s", tick), 160 * MIB);
    assert_eq!(after_a_second("shrink:idle=500ms", tick), 32 * MIB);
    assert_eq!(after_a_second("shrink:idle=500ms,keep:64MiB", tick), 64 * MIB);
}

#[test]
fn shrink_by_a_watermark() {
    let tick = |lab: &Lab| lab.heap.tick();
    assert_eq!(after_a_second("shrink:watermark=400%", tick), 160 * MIB);
    assert_eq!(after_a_second("shrink:watermark=50%", tick), 48 * MIB);
    assert_eq!(after_a_second("shrink:watermark=50%,keep:96MiB", tick), 96 * MIB);
}

#[test]
fn shrinking_happens_on_calls_too() {
    // A request that grows, and frees of 64 MiB and more.
    let grow = |lab: &Lab| drop(lab.alloc(256 * KIB, S2));
    let free = |lab: &Lab| drop(lab.alloc(64 * MIB, S1));
    assert!(after_a_second("shrink:idle=500ms", grow) <= 50 * MIB);
    assert!(after_a_second("shrink:watermark=50%", grow) <= 50 * MIB);
    assert_eq!(after_a_second("shrink:watermark=50%", free), 48 * MIB);
    assert!(after_a_second("shrink:oom", grow) > 160 * MIB);
    assert_eq!(after_a_second("shrink:oom", free), 160 * MIB);
}

#[test]
fn keep() {
    let left = |conf: &str| {
        let lab = sim(&format!("handle_max:16MiB,{conf}"));
        drop(lab.alloc(64 * MIB, S1));
        lab.heap.trim().reserved
    };
    assert_eq!(left(""), 0);
    assert_eq!(left("keep:32MiB"), 32 * MIB);
}

#[test]
fn defrag() {
    let effect = |conf: &str| {
        let (lab, blocks) = scattered(conf);
        let stats = lab.heap.stats();
        drop(blocks);
        (stats.reserved / MIB, stats.handles_moved, stats.handles_rechunked)
    };
    // Below a limit only `eager` moves; without one so does what live memory once had room for.
    assert_eq!(effect("defrag:on_pressure,limit:1GiB"), (96, 0, 0));
    assert_eq!(effect("defrag:on_pressure"), (64, 2, 0));
    assert_eq!(effect("defrag:off"), (96, 0, 0));
    assert_eq!(effect("defrag:eager").0, 64);
    assert!(effect("defrag:eager").1 >= 1);
    // At the limit, `off` releases and creates instead.
    let (reserved, moved, rechunked) = effect("defrag:on_pressure,limit:64MiB");
    assert!(reserved == 64 && moved >= 1 && rechunked == 0, "{reserved} {moved} {rechunked}");
    let (reserved, moved, rechunked) = effect("defrag:off,limit:64MiB");
    assert!(reserved == 64 && moved == 0 && rechunked >= 1, "{reserved} {moved} {rechunked}");
}

#[test]
fn slack() {
    let effect = |conf: &str| {
        let (lab, blocks) = scattered(conf);
        let stats = lab.heap.stats();
        drop(blocks);
        (stats.reserved / MIB, stats.handles_moved > 0)
    };
    assert_eq!(effect("slack:unlimited"), (96, false));
    assert_eq!(effect("slack:auto"), (64, true));
    // 67.2 MiB may be reserved for 64 MiB that are live.
    assert_eq!(effect("slack:5%"), (66, true));
    assert_eq!(effect("slack:60%"), (96, false));
}

#[test]
fn small_limit() {
    let reserved = |conf: &str| {
        let lab = sim(&format!("growth:exact,{conf}"));
        let blocks = (lab.alloc(4 * KIB, S1), lab.alloc(3 * MIB / 2, S1));
        let reserved = lab.reserved();
        drop(blocks);
        reserved
    };
    assert_eq!(reserved("small_limit:1MiB"), 4 * MIB, "two granules: the small block lies apart");
    assert_eq!(reserved("small_limit:2K"), 2 * MIB, "one granule for both");
}

#[test]
fn cross_stream_decides_what_another_stream_takes() {
    let reserved = |conf: &str| {
        let lab = sim(conf);
        drop(lab.alloc(64 * MIB, S1));
        lab.heap.tick();
        let block = lab.alloc(64 * MIB, S2);
        let reserved = lab.reserved();
        drop(block);
        reserved
    };
    assert_eq!(reserved("cross_stream:passed"), 64 * MIB);
    assert_eq!(reserved("cross_stream:wait"), 64 * MIB);
    assert_eq!(reserved("cross_stream:off"), 128 * MIB);
}

#[test]
fn cross_stream_decides_who_waits_under_pressure() {
    let waits = |conf: &str| {
        let lab = sim(&format!("limit:64MiB,{conf}"));
        let block = lab.alloc(64 * MIB, S1);
        lab.work(S1, &block, 10 * MS);
        drop(block);
        let block = lab.alloc(64 * MIB, S2);
        let stats = lab.heap.stats();
        drop(block);
        (stats.gpu_waits, stats.host_waits, lab.time.now() >= 10 * MS)
    };
    assert_eq!(waits("cross_stream:passed"), (0, 1, true));
    assert_eq!(waits("cross_stream:wait"), (1, 0, false));
}

#[test]
fn remap() {
    let now = |conf: &str, concurrent_remap: bool, act: &dyn Fn(&Lab)| {
        let lab = sim_with(conf, SimOptions { concurrent_remap, ..SimOptions::default() });
        let (block, idle) = (lab.alloc(64 * MIB, S1), lab.alloc(64 * MIB, S2));
        drop(idle);
        lab.heap.tick();
        lab.work(S1, &block, 10 * MS);
        act(&lab);
        let now = lab.time.now();
        drop(block);
        now
    };
    let grow: &dyn Fn(&Lab) = &|lab| drop(lab.alloc(128 * MIB, S1));
    let trim: &dyn Fn(&Lab) = &|lab| assert!(lab.heap.trim().released > 0);
    for (what, act) in [("growth", grow), ("trim", trim)] {
        assert_eq!(now("remap:concurrent", true, act), Duration::ZERO, "{what}");
        assert_eq!(now("remap:quiesce", true, act), 10 * MS, "{what} waits for the device");
        assert_eq!(now("remap:auto", true, act), Duration::ZERO, "{what}");
        assert_eq!(now("remap:auto", false, act), 10 * MS, "{what} on a device that needs it");
    }
}

#[test]
fn backend() {
    let kind = |conf: &str| Heap::builder().conf(conf).unwrap().build().unwrap().backend().kind();
    assert_eq!(kind("backend:sim"), BackendKind::Sim);
    assert_eq!(kind("backend:host"), BackendKind::Host);
}

/// Run by the test below in a process of its own, since it writes to stderr.
#[test]
#[ignore = "a part of `stats`"]
fn heap_for_stats() {
    let conf = std::env::var("CONF_OF_TEST").unwrap();
    let heap = Heap::builder().conf(&conf).unwrap().build().unwrap();
    let _ = heap.alloc(5 * MIB, S1).unwrap().into_raw();
    drop(heap.alloc(3 * MIB, S1).unwrap());
    // Ends it, once: what follows is the drop of a heap that was shut down.
    heap.shut_down();
}

#[test]
fn stats() {
    let printed = |conf: &str| {
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "heap_for_stats", "--include-ignored", "--nocapture"])
            .env("CONF_OF_TEST", conf)
            .output()
            .unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let text = printed("backend:sim,stats:on");
    assert_eq!(text.matches("xseg: Stats").count(), 1, "{text}");
    // Of the moment before the end: what was live then was reserved then, and nothing was given back yet.
    for field in ["peak_allocated: 8388608", "allocated: 5242880", "live_blocks: 1", "reserved: 67108864", "release: 0"]
    {
        assert!(text.contains(&format!("    {field},\n")), "{field} in {text}");
    }
    assert!(!printed("backend:sim,stats:off").contains("xseg: "));
}

#[test]
fn wait_limit() {
    let wait = |conf: &str| {
        let lab = sim(&format!("limit:64MiB,{conf}"));
        let block = lab.alloc(64 * MIB, S1);
        lab.work(S1, &block, Duration::from_secs(5));
        drop(block);
        let served = lab.heap.alloc(64 * MIB, S2).map(drop).is_ok();
        (served, lab.heap.stats().host_waits, lab.time.now())
    };
    assert_eq!(wait("wait_limit:0s"), (false, 0, Duration::ZERO));
    let (served, waits, now) = wait("wait_limit:1s");
    assert!(!served && waits == 1 && (Duration::from_millis(900)..Duration::from_secs(2)).contains(&now), "{now:?}");
    let (served, waits, now) = wait("wait_limit:10s");
    assert!(served && waits == 1 && (Duration::from_secs(5)..Duration::from_secs(6)).contains(&now), "{now:?}");
}
