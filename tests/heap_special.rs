//! Blocks on one handle, frees behind the client's events, callbacks at map and unmap, export.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod support;

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use support::{MS, Make, S0, S1, S2, on_each_backend, out_of_memory, sim};
use xseg::backend::host::{HostBackend, HostOptions};
use xseg::backend::{EventScope, MappingChange, MappingEvent};
use xseg::units::{GRANULE, KIB, MIB};
use xseg::{Allocation, ClientEvent, Error, Heap, PoolId, StreamFilter};

on_each_backend! {
    a_contiguous_block_is_one_handle,
    contiguous_blocks_use_idle_handles_of_their_size,
    contiguous_blocks_under_pressure,
    contiguous_blocks_of_a_capture,
    a_block_is_freed_when_its_event_completes,
    an_event_that_is_refused_leaves_the_block,
}

/// Calls of create so far.
fn created(heap: &Heap) -> u64 {
    heap.stats().driver_calls.create
}

fn a_contiguous_block_is_one_handle(make: Make) {
    let lab = make("limit:256MiB,handle_max:2MiB,growth:exact");
    for bytes in [0, 1, 512, 2 * MIB, 2 * MIB + 1, 37 * MIB, 100 * MIB] {
        let (before, reserved) = (created(&lab.heap), lab.reserved());
        let block = lab.heap.alloc_contiguous(bytes, S1).unwrap();
        let whole = bytes.max(1).next_multiple_of(GRANULE);
        assert_eq!((created(&lab.heap), lab.reserved()), (before + 1, reserved + whole), "{bytes}");
        assert_eq!((block.len(), block.size()), (bytes, whole));
        assert_eq!(block.address() % GRANULE, 0);
        assert_eq!(lab.heap.block_size(block.address()).unwrap(), (bytes, whole));
        lab.check();
        drop(block);
        lab.heap.trim();
    }
    // Freed, it is ordinary memory.
    drop(lab.heap.alloc_contiguous(64 * MIB, S1).unwrap());
    let before = created(&lab.heap);
    let parts: Vec<Allocation> = (0..16).map(|_| lab.alloc(4 * MIB, S1)).collect();
    assert_eq!(created(&lab.heap), before);
    drop(parts);
    lab.ends_with(0);
}

fn contiguous_blocks_use_idle_handles_of_their_size(make: Make) {
    let lab = make("limit:256MiB,growth:exact");
    let block = lab.heap.alloc_contiguous(12 * MIB, S1).unwrap();
    let address = block.address();
    drop(block);
    // Where it lies, though it is part of a longer free range.
    drop(lab.alloc(32 * MIB, S1));
    let before = created(&lab.heap);
    assert_eq!(lab.heap.alloc_contiguous(11 * MIB, S1).unwrap().address(), address);
    assert_eq!(created(&lab.heap), before);
    // Another stream takes it when all have passed.
    let block = lab.heap.alloc_contiguous(12 * MIB, S1).unwrap();
    lab.work(S1, &block, MS);
    drop(block);
    let elsewhere = lab.heap.alloc_contiguous(12 * MIB, S2).unwrap();
    assert_eq!(created(&lab.heap), before + 1);
    lab.time.advance(MS);
    let same = lab.heap.alloc_contiguous(12 * MIB, S2).unwrap();
    assert_eq!((created(&lab.heap), same.address()), (before + 1, address));
    lab.check();
    drop((elsewhere, same));
    lab.ends_with(0);
}

/// Idle memory of other sizes makes room; a live contiguous block stays where it is.
fn contiguous_blocks_under_pressure(make: Make) {
    let lab = make("limit:64MiB,growth:exact");
    let blocks: Vec<Allocation> = (0..8).map(|_| lab.alloc(8 * MIB, S1)).collect();
    let mut live = Vec::new();
    for (number, block) in blocks.into_iter().enumerate() {
        if number % 2 == 0 {
            live.push(block);
        }
    }
    let block = lab.heap.alloc_contiguous(30 * MIB, S1).unwrap();
    let (address, stats) = (block.address(), lab.heap.stats());
    assert!(stats.reserved <= 64 * MIB && stats.handles_rechunked > 0, "{stats:?}");
    assert!(lab.backend().memory().unwrap().total >= 64 * MIB);
    lab.set_word(&block, 1234);
    drop(live);
    let filling = lab.alloc(32 * MIB, S1);
    lab.set_word(&filling, 1);
    assert_eq!(block.address(), address);
    lab.expect_word(&block, 1234);
    let fields = out_of_memory(lab.heap.alloc_contiguous(4 * MIB, S1));
    assert_eq!(fields.requested, 4 * MIB);
    // A handle of the very size moves: the other half of the memory is one already.
    drop(filling);
    lab.check();
    drop(block);
    lab.ends_with(0);
}

fn contiguous_blocks_of_a_capture(make: Make) {
    let lab = make("limit:64MiB,growth:exact");
    let pool = PoolId(3, 4);
    lab.heap.begin_capture(pool, StreamFilter::All).unwrap();
    lab.begin_capture(S1);
    let block = lab.heap.alloc_contiguous(10 * MIB, S1).unwrap();
    let address = block.address();
    drop(block);
    assert_eq!(lab.heap.alloc_contiguous(10 * MIB, S1).unwrap().address(), address);
    assert_eq!(lab.heap.stats().captured, 10 * MIB);
    lab.end_capture(S1);
    lab.heap.end_capture(pool).unwrap();
    assert_ne!(lab.heap.alloc_contiguous(10 * MIB, S1).unwrap().address(), address);
    lab.heap.release_capture(pool).unwrap();
    lab.ends_with(0);
}

fn a_block_is_freed_when_its_event_completes(make: Make) {
    let lab = make("limit:32MiB,wait_limit:0s");
    let block = lab.alloc(32 * MIB, S1);
    let address = block.address();
    lab.work_at(S2, address, 32 * MIB, 5 * MS);
    let event = lab.backend().record(EventScope::Stream(S2)).unwrap();
    let client = ClientEvent(event.0);
    lab.heap.free_after(block.into_raw(), client).unwrap();
    // The client's event is the client's again.
    lab.backend().recycle(event);
    assert_eq!((lab.heap.stats().allocated, lab.heap.stats().pending), (0, 32 * MIB));
    assert!(matches!(lab.heap.free_raw(address), Err(Error::InvalidPointer { .. })));
    out_of_memory(lab.heap.alloc(MIB, S1));
    assert_eq!(lab.time.now(), Duration::ZERO, "nothing waits");
    lab.time.advance(5 * MS);
    assert_eq!(lab.alloc(32 * MIB, S1).address(), address);
    // Together with a declared use, both count.
    let block = lab.alloc(16 * MIB, S1);
    let event = lab.backend().record(EventScope::Context).unwrap();
    block.record_use(S2).unwrap();
    lab.work(S2, &block, MS);
    lab.heap.free_after(block.into_raw(), ClientEvent(event.0)).unwrap();
    lab.backend().recycle(event);
    assert_eq!(lab.heap.stats().pending, 16 * MIB);
    lab.time.advance(MS);
    assert_eq!(lab.heap.stats().pending, 0);
    // A shutdown with one under way leaves nothing behind.
    let block = lab.alloc(MIB, S1);
    lab.work(S1, &block, MS);
    let event = lab.backend().record(EventScope::Context).unwrap();
    lab.heap.free_after(block.into_raw(), ClientEvent(event.0)).unwrap();
    lab.backend().recycle(event);
}

fn an_event_that_is_refused_leaves_the_block(make: Make) {
    let lab = make("limit:32MiB");
    let block = lab.alloc(4 * MIB, S1);
    let error = lab.heap.free_after(block.address(), ClientEvent(999)).unwrap_err();
    assert!(error.to_string().contains("event 999 was not recorded here"), "{error}");
    assert!(matches!(lab.heap.free_after(block.address() + 512, ClientEvent(999)), Err(Error::InvalidPointer { .. })));
    assert!(matches!(lab.heap.free_after(1, ClientEvent(999)), Err(Error::InvalidPointer { .. })));
    assert_eq!(lab.heap.stats().live_blocks, 1);
    drop(block);
    lab.ends_with(0);
}

/// The callbacks of a run give its mappings at every moment.
#[test]
fn callbacks_tell_every_mapping() {
    #[derive(Default)]
    struct Seen {
        now: BTreeMap<u64, (u64, u64)>,
        all: u64,
        unmappings: u64,
    }
    let seen = Arc::new(Mutex::new(Seen::default()));
    let watch = seen.clone();
    let told = move |event: &MappingEvent| {
        let mut seen = watch.lock().unwrap();
        let mapping = (event.bytes, event.handle.0);
        match event.change {
            MappingChange::Mapped => {
                seen.all += 1;
                assert_eq!(seen.now.insert(event.address, mapping), None);
            }
            MappingChange::Unmapping => {
                seen.unmappings += 1;
                assert_eq!(seen.now.remove(&event.address), Some(mapping));
            }
            MappingChange::Kept => panic!("nothing is refused here"),
        }
        assert_eq!(event.device, 0);
    };
    let device = Arc::new(HostBackend::new(HostOptions::default()).unwrap());
    let builder = Heap::builder().conf("limit:64MiB,growth:exact,warmup:8MiB").unwrap();
    let heap = builder.backend(device.clone()).on_mapping(Arc::new(told)).build().unwrap();
    assert_eq!(seen.lock().unwrap().now.values().map(|mapping| mapping.0).sum::<u64>(), 8 * MIB);
    let blocks: Vec<Allocation> = (0..16).map(|_| heap.alloc(4 * MIB, S0).unwrap()).collect();
    let mut number = 0;
    let kept: Vec<Allocation> = blocks
        .into_iter()
        .filter(|_| {
            number += 1;
            number % 2 == 0
        })
        .collect();
    let large = heap.alloc(24 * MIB, S0).unwrap();
    let stats = heap.stats();
    {
        let seen = seen.lock().unwrap();
        assert!(stats.handles_moved > 0 && seen.unmappings > 0);
        assert_eq!(seen.all, stats.driver_calls.map);
        assert_eq!(seen.now.len(), device.leaks().mappings);
        assert!(seen.now.iter().all(|(at, mapping)| device.is_mapped(*at, mapping.0)));
    }
    drop((kept, large));
    heap.trim();
    drop(heap);
    assert!(seen.lock().unwrap().now.is_empty(), "the shutdown is told too");
}

/// What a descriptor shows is the block, at the offset that is given.
#[test]
fn exported_memory_is_the_blocks() {
    let device = Arc::new(HostBackend::new(HostOptions::default()).unwrap());
    let conf = "limit:64MiB,handle_max:4MiB,growth:exact";
    let heap = Heap::builder().conf(conf).unwrap().backend(device.clone()).build().unwrap();
    let first = heap.alloc(1536 * KIB, S0).unwrap();
    let block = heap.alloc(9 * MIB, S0).unwrap();
    let bytes: Vec<u8> = (0..block.len()).map(|at| (at / 4096 % 251) as u8).collect();
    device.write(block.address(), &bytes).unwrap();
    let exported = heap.export_handles(block.address()).unwrap();
    assert!(exported.len() > 2, "{exported:?}");
    assert_eq!(exported.iter().map(|part| part.bytes).sum::<u64>(), block.size());
    assert_eq!(exported[0].offset % GRANULE, block.address() % GRANULE);
    let mut at = 0;
    for part in exported {
        assert!(part.bytes <= part.handle_bytes);
        let mut seen = vec![0; part.bytes as usize];
        std::fs::File::from(part.fd).read_exact_at(&mut seen, part.offset).unwrap();
        assert!(seen == bytes[at..at + seen.len()]);
        at += seen.len();
    }
    let one = heap.alloc_contiguous(20 * MIB, S0).unwrap();
    let exported = heap.export_handles(one.address()).unwrap();
    assert_eq!((exported.len(), exported[0].bytes, exported[0].handle_bytes), (1, 20 * MIB, 20 * MIB));
    assert!(matches!(heap.export_handles(one.address() + MIB), Err(Error::InvalidPointer { .. })));
    drop((first, block, one));
}

#[test]
fn a_device_without_memory_exports_nothing() {
    let lab = sim("limit:64MiB");
    let block = lab.alloc(MIB, S1);
    let error = lab.heap.export_handles(block.address()).unwrap_err();
    assert!(error.to_string().contains("the sim backend has no memory to export"), "{error}");
    drop(block);
}
