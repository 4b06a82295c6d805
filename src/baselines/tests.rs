//! What is characteristic of each baseline.

use super::*;
use crate::units::{GIB, GRANULE, KIB, MIB};
use std::time::Duration;

fn subject(name: &str) -> Box<dyn Subject> {
    create(name, Some(GIB), Timeline::default()).unwrap()
}

#[test]
fn every_name_makes_a_subject_that_keeps_its_books() {
    assert!(create("nobody", None, Timeline::default()).is_none());
    for name in NAMES {
        let mut s = subject(name);
        assert_eq!(s.name(), *name);
        let blocks: Vec<u64> = (1..60).map(|i| s.alloc(i * 37 * KIB, i % 3).unwrap()).collect();
        let full = s.figures();
        assert!(full.allocated >= (1..60).sum::<u64>() * 37 * KIB && full.reserved >= full.allocated, "{name}");
        for at in &blocks {
            s.record_use(*at, 5).unwrap();
            s.free(*at).unwrap();
        }
        assert!(matches!(s.free(blocks[0]), Err(SubjectError::Other(_))), "{name}: double free");
        assert!(matches!(s.free(512), Err(SubjectError::Other(_))), "{name}: foreign address");
        assert!(matches!(s.alloc(2 * GIB, 0), Err(SubjectError::OutOfMemory(_))), "{name}");
        // Cached memory of any shape serves after a flush; only a heap that never shrinks need not.
        assert!(s.alloc(900 * MIB, 9).is_ok() || *name == "buddy", "{name}");
        let end = s.figures();
        assert_eq!((end.peak_allocated.max(full.allocated), end.bytes_copied), (end.peak_allocated, 0));
        s.finish().unwrap();
        assert_eq!(s.figures().reserved, 0, "{name}");
    }
}

#[test]
fn a_block_in_use_elsewhere_waits_for_its_event() {
    for name in NAMES {
        let timeline = Timeline::new(Duration::from_millis(1));
        let mut s = create(name, Some(GIB), timeline.clone()).unwrap();
        let first = s.alloc(4 * MIB, 1).unwrap();
        s.record_use(first, 2).unwrap();
        s.free(first).unwrap();
        if *name == "cuda-malloc" {
            // Its free waited instead.
            assert_eq!((s.figures().host_waits, timeline.now()), (1, Duration::from_millis(1)));
            continue;
        }
        assert!(s.free(first).is_err(), "{name}: double free while it waits");
        let second = s.alloc(4 * MIB, 1).unwrap();
        assert_ne!(first, second, "{name}");
        timeline.advance(Duration::from_millis(2));
        s.alloc(4 * MIB, 1).unwrap();
        assert_eq!(s.figures().allocated, 8 * MIB, "{name}");
        assert_eq!(s.figures().host_waits, 0, "{name}");
    }
}

#[test]
fn cuda_malloc_calls_the_driver_each_time() {
    let mut s = subject("cuda-malloc");
    for _ in 0..10 {
        let at = s.alloc(MIB, 0).unwrap();
        s.free(at).unwrap();
    }
    let f = s.figures();
    assert_eq!((f.calls.create, f.calls.release, f.reserved), (10, 10, 0));
    // Rounded to 2 MiB, at 61 µs a pair and a little more.
    assert_eq!((f.peak_allocated, f.driver_nanos / 10 / 1000), (2 * MIB, 61));
}

#[test]
fn the_pool_passes_blocks_between_streams() {
    let timeline = Timeline::new(Duration::from_millis(1));
    let mut s = create("cuda-malloc-async", None, timeline).unwrap();
    let at = s.alloc(20 * MIB, 1).unwrap();
    s.free(at).unwrap();
    assert_eq!(s.alloc(20 * MIB, 2).unwrap(), at);
    let f = s.figures();
    assert_eq!((f.calls.create, f.reserved, f.gpu_waits, f.host_waits), (1, 32 * MIB, 1, 0));
}

#[test]
fn first_fit_takes_the_lowest_hole_and_best_fit_the_smallest() {
    for (name, hole) in [("first-fit", 0), ("torch-expandable", 2)] {
        let mut s = subject(name);
        let blocks: Vec<u64> = [8, 2, 4, 2].iter().map(|mib| s.alloc(mib * MIB, 0).unwrap()).collect();
        s.free(blocks[0]).unwrap();
        s.free(blocks[2]).unwrap();
        assert_eq!(s.alloc(3 * MIB, 0).unwrap(), blocks[hole], "{name}");
    }
}

#[test]
fn first_fit_grows_by_what_is_missing() {
    let mut s = subject("first-fit");
    s.alloc(3 * MIB, 0).unwrap();
    assert_eq!(s.figures().reserved, 4 * MIB);
    s.alloc(6 * MIB, 0).unwrap();
    let f = s.figures();
    assert_eq!((f.reserved, f.calls.create, f.calls.reserve), (10 * MIB, 2, 1));
}

#[test]
fn buddies_round_to_powers_of_two_and_join_again() {
    let mut s = subject("buddy");
    let blocks: Vec<u64> = (0..4).map(|_| s.alloc(5 * MIB, 0).unwrap()).collect();
    // Three eighths of each block are internal fragmentation.
    assert_eq!((s.figures().allocated, s.figures().reserved), (32 * MIB, 32 * MIB));
    blocks.iter().for_each(|at| s.free(*at).unwrap());
    assert_eq!(s.alloc(32 * MIB, 0).unwrap(), blocks[0]);
    assert_eq!(s.figures().reserved, 32 * MIB);
}

#[test]
fn a_slab_serves_one_size_only() {
    let mut s = subject("slab");
    let at = s.alloc(3 * MIB, 0).unwrap();
    s.free(at).unwrap();
    s.alloc(2 * MIB, 0).unwrap();
    assert_eq!(s.figures().reserved, 6 * MIB);
    assert_eq!(s.alloc(3 * MIB + 1, 0).unwrap(), at);
    s.alloc(600, 0).unwrap();
    assert_eq!((s.figures().allocated, s.figures().reserved), (6 * MIB + KIB, 8 * MIB));
}

#[test]
fn large_size_classes_go_straight_back() {
    let mut s = subject("size-class");
    let (medium, large) = (s.alloc(130 * MIB, 0).unwrap(), s.alloc(257 * MIB, 0).unwrap());
    assert_eq!(s.figures().allocated, (160 + 258) * MIB);
    s.free(large).unwrap();
    assert_eq!(s.figures().reserved, 160 * MIB);
    s.free(medium).unwrap();
    assert_eq!((s.figures().reserved, s.figures().calls.release), (160 * MIB, 1));
}

#[test]
fn bfc_doubles_its_regions_and_keeps_close_fits_whole() {
    let mut s = subject("tf-bfc");
    let at = s.alloc(3 * MIB, 0).unwrap();
    assert_eq!((s.figures().reserved, s.figures().allocated), (4 * MIB, 4 * MIB));
    s.free(at).unwrap();
    s.alloc(2 * MIB, 0).unwrap();
    assert_eq!((s.figures().reserved, s.figures().allocated), (4 * MIB, 2 * MIB));
    s.alloc(GRANULE + 1, 0).unwrap();
    assert_eq!(s.figures().reserved, 8 * MIB);
    s.alloc(4 * MIB, 0).unwrap();
    assert_eq!(s.figures().reserved, 16 * MIB);
}

#[test]
fn vpmm_maps_free_pages_again_and_creates_only_what_is_missing() {
    let timeline = Timeline::new(Duration::from_millis(1));
    let mut s = create("vpmm", Some(16 * MIB), timeline.clone()).unwrap();
    let blocks: Vec<u64> = [4, 2, 4].iter().map(|mib| s.alloc(mib * MIB, 1).unwrap()).collect();
    s.free(blocks[0]).unwrap();
    s.free(blocks[2]).unwrap();
    s.alloc(10 * MIB, 1).unwrap();
    let f = s.figures();
    assert_eq!((f.handles_moved, f.bytes_moved, f.calls.create, f.reserved), (4, 8 * MIB, 6, 12 * MIB));
    assert_eq!((f.calls.unmap, f.gpu_waits), (0, 0));
    // The old addresses go at the first call after their work.
    timeline.advance(Duration::from_millis(2));
    s.alloc(2 * MIB, 2).unwrap();
    assert_eq!(s.figures().calls.unmap, 4);
    // Another stream takes a page whose work is not done by waiting on the device.
    s.free(blocks[1]).unwrap();
    s.alloc(4 * MIB, 2).unwrap();
    assert_eq!((s.figures().gpu_waits, s.figures().host_waits, s.figures().reserved), (1, 0, 16 * MIB));
}

#[test]
fn gmlake_stitches_large_requests_and_keeps_the_stitches() {
    let mut s = create("gmlake", Some(GIB), Timeline::default()).unwrap();
    let blocks: Vec<u64> = [300, 100, 300].iter().map(|mib| s.alloc(mib * MIB, 1).unwrap()).collect();
    s.free(blocks[0]).unwrap();
    s.free(blocks[2]).unwrap();
    let wide = s.alloc(600 * MIB, 1).unwrap();
    let f = s.figures();
    assert_eq!((f.handles_joined, f.reserved, f.calls.create, f.calls.unmap), (300, 700 * MIB, 350, 0));
    assert!(s.free(blocks[0]).is_err());
    s.free(wide).unwrap();
    // Again without a call; and its parts serve on their own.
    assert_eq!(s.alloc(600 * MIB, 1).unwrap(), wide);
    s.free(wide).unwrap();
    assert_eq!(s.alloc(300 * MIB, 1).unwrap(), blocks[0]);
    assert_eq!(s.figures().calls.map, f.calls.map);
    // A stitched range is not cut: two thirds of this one are used, and all of it is taken.
    s.free(blocks[0]).unwrap();
    assert_eq!(s.alloc(400 * MIB, 1).unwrap(), wide);
    assert_eq!(s.figures().allocated, 700 * MIB);
    // Below the limit for stitching it grows, after the unused ranges went.
    s.free(wide).unwrap();
    s.free(blocks[1]).unwrap();
    s.alloc(580 * MIB, 2).unwrap();
    let f = s.figures();
    assert_eq!((f.retries, f.handles_joined, f.reserved), (1, 300, 580 * MIB));
}
