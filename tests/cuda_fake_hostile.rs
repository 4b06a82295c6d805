//! Hostile clients and devices, on the stand-in driver: see `cuda_fake.rs`.
#![cfg(all(feature = "cuda", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

#[path = "fake_cuda/clients.rs"]
mod clients;
#[path = "fake_cuda/control.rs"]
mod control;

use clients::{all, heap};
use control::on_stand_in;
use cudarc::driver::CudaContext;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};
use xseg::backend::MappingEvent;
use xseg::units::{GRANULE, MIB};
use xseg::{Allocation, ClientEvent, DeviceBuffer, Error, Heap, PoolId, StreamFilter, StreamId};

struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % end
    }
}

#[test]
fn odd_requests() {
    on_stand_in("odd_requests", &[], &[], |driver| {
        let heap = heap("backend:cuda,limit:64MiB,reserve:4GiB,wait_limit:0s");
        let stream = StreamId(0);
        let mut kept = Vec::new();
        for bytes in [0, 1, 511, 512, 513, MIB, MIB + 1, GRANULE - 1, GRANULE + 1, 5 * MIB + 17] {
            for block in [heap.alloc(bytes, stream).unwrap(), heap.alloc_contiguous(bytes, stream).unwrap()] {
                assert_eq!(heap.block_size(block.address()).unwrap().0, bytes);
                assert!(block.size() >= bytes.max(1));
                let handles = heap.export_handles(block.address()).unwrap();
                assert_eq!(handles.iter().map(|one| one.bytes).sum::<u64>(), block.size());
                assert_eq!(heap.pin(block.address(), bytes).is_ok(), bytes > 0);
                assert_eq!(heap.unpin(block.address(), bytes).is_ok(), bytes > 0);
                assert!(heap.unpin(block.address(), bytes).is_err());
                kept.push(block);
                if kept.len() > 4 {
                    kept.clear();
                }
            }
        }
        for bytes in [u64::MAX, u64::MAX - 511, u64::MAX - 512, 1 << 63, 1 << 48, 1 << 41, (1 << 41) - 1, 65 * MIB] {
            for error in [
                heap.alloc(bytes, stream).map(drop).unwrap_err(),
                heap.alloc_contiguous(bytes, stream).map(drop).unwrap_err(),
                heap.alloc_aligned(bytes, GRANULE, stream).map(drop).unwrap_err(),
            ] {
                assert!(matches!(error, Error::OutOfMemory(_) | Error::AddressSpace { .. }), "{bytes}: {error}");
            }
        }
        for align in [0, 3, GRANULE * 2, u64::MAX, 1 << 63] {
            assert!(matches!(heap.alloc_aligned(1, align, stream), Err(Error::InvalidArgument(_))), "{align}");
        }
        for align in [1, 2, 256, 512, 4096, GRANULE] {
            assert!(heap.alloc_aligned(100, align, stream).unwrap().address().is_multiple_of(align.max(512)));
        }
        let block = heap.alloc(3 * MIB, stream).unwrap();
        for (address, bytes) in
            [(block.address(), u64::MAX), (u64::MAX, 1), (0, 0), (block.address(), 1 << 40), (u64::MAX, u64::MAX)]
        {
            assert!(heap.pin(address, bytes).is_err());
            assert!(heap.unpin(address, bytes).is_err());
        }
        for address in [0, 1, u64::MAX, block.address() + 1, block.address() + 512, block.address() - 512] {
            assert!(matches!(heap.free_raw(address), Err(Error::InvalidPointer { .. })));
            assert!(heap.free_after(address, ClientEvent(0)).is_err());
            assert!(heap.record_use(address, stream).is_err());
            assert!(heap.block_size(address).is_err());
            assert!(heap.export_handles(address).is_err());
        }
        assert!(heap.free_after(block.address(), ClientEvent(12345)).is_err());
        assert_eq!(heap.block_size(block.address()).unwrap().0, 3 * MIB, "a refused event leaves the block");
        for limit in [0, 1, u64::MAX, GRANULE + 1, 64 * MIB] {
            heap.set_limit(limit);
            heap.check().unwrap();
        }
        for pool in [PoolId(0, 0), PoolId(u64::MAX, u64::MAX)] {
            assert!(heap.end_capture(pool).is_err() && heap.release_capture(pool).is_err());
        }
        assert!(heap.retire_stream(StreamId(777)).is_err());
        assert!(heap.begin_capture(PoolId(0, 0), StreamFilter::Streams(vec![StreamId(777)])).is_err());
        drop((block, kept));
        heap.check().unwrap();
        let clone = heap.clone();
        drop(heap);
        clone.shut_down();
        clone.shut_down();
        assert!(matches!(clone.alloc(1, stream), Err(Error::ShutDown)));
        clone.tick();
        clone.trim();
        clone.set_limit(5);
        let _ = clone.retire_stream(stream);
        let _ = clone.stats();
        drop(clone);
        assert_eq!(all(driver), [0; 8]);
    });
}

#[test]
fn a_broken_device_is_told_soon() {
    on_stand_in("a_broken_device_is_told_soon", &[], &[], |driver| {
        let heap = heap("backend:cuda,limit:32MiB,reserve:4GiB,growth:exact");
        driver.push(0xC000);
        let [one, two] = [(); 2].map(|()| StreamId(driver.create_stream()));
        driver.pop_all();
        let mut blocks: Vec<Allocation> = (0..8).map(|_| heap.alloc(4 * MIB, one).unwrap()).collect();
        driver.hold_events(true);
        blocks.truncate(4);
        blocks[0].record_use(two).unwrap();
        drop(blocks.remove(0));
        heap.tick();
        driver.break_all(700);
        let start = Instant::now();
        let error = heap.alloc(8 * MIB, two).map(drop).unwrap_err();
        let took = start.elapsed();
        heap.tick();
        heap.trim();
        drop(blocks);
        drop(heap);
        assert!(took < Duration::from_secs(1), "{took:?}: {error}");
        assert!(matches!(error, Error::Driver(_)), "{error}");
    });
}

#[test]
fn a_broken_device_at_the_limit() {
    on_stand_in("a_broken_device_at_the_limit", &[], &[], |driver| {
        let heap = heap("backend:cuda,limit:32MiB,reserve:4GiB,growth:exact");
        driver.push(0xC000);
        let one = StreamId(driver.create_stream());
        driver.pop_all();
        let blocks: Vec<Allocation> = (0..8).map(|_| heap.alloc(4 * MIB, one).unwrap()).collect();
        driver.hold_events(true);
        drop(blocks);
        heap.tick();
        driver.break_all(700);
        let start = Instant::now();
        // The legacy stream has an identity without the driver.
        let error = heap.alloc(8 * MIB, StreamId(0)).map(drop).unwrap_err();
        let took = start.elapsed();
        assert!(took < Duration::from_secs(1), "{took:?}: {error}");
        assert!(matches!(error, Error::Driver(_)), "{error}");
    });
}

#[test]
fn tiny_devices() {
    on_stand_in("tiny_devices", &[("FAKE_CUDA_MEMORY", "4194304")], &[], |driver| {
        let heap = heap("backend:cuda,wait_limit:0s");
        let error = heap.alloc(1, StreamId(0)).map(drop).unwrap_err();
        assert!(matches!(error, Error::OutOfMemory(_)) && heap.limit() == 0, "{error}");
        drop(heap);
        let heap = Heap::builder().conf("backend:cuda,limit:100%,wait_limit:0s").unwrap().build().unwrap();
        let block = heap.alloc(4 * MIB, StreamId(0)).unwrap();
        assert!(heap.alloc(1, StreamId(0)).is_err());
        drop((block, heap));
        assert_eq!(all(driver), [0; 8]);
    });
}

#[test]
fn callbacks_that_panic() {
    on_stand_in("callbacks_that_panic", &[], &[], |driver| {
        let armed = Arc::new(AtomicU64::new(0));
        let turn = armed.clone();
        let heap = Heap::builder()
            .conf("backend:cuda,limit:32MiB,reserve:4GiB,growth:exact,wait_limit:0s")
            .unwrap()
            .on_mapping(Arc::new(move |_: &MappingEvent| {
                if turn.load(Relaxed) > 0 && turn.fetch_sub(1, Relaxed) == 1 {
                    panic!("the client's");
                }
            }))
            .build()
            .unwrap();
        let stream = StreamId(0);
        let mut kept: Vec<Allocation> = (0..4).map(|_| heap.alloc(4 * MIB, stream).unwrap()).collect();
        let mut panics = 0;
        for turn in 1..4 {
            armed.store(turn, Relaxed);
            let made = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| heap.alloc(9 * MIB, stream)));
            assert!(made.is_ok(), "turn {turn}");
            panics += u64::from(armed.swap(0, Relaxed) == 0);
            heap.check().unwrap();
            kept.pop();
            drop(heap.alloc(2 * MIB, stream).unwrap());
        }
        assert!(panics > 0);
        drop(kept);
        armed.store(1, Relaxed);
        heap.trim();
        assert_eq!((armed.load(Relaxed), heap.stats().reserved), (0, 0));
        drop(heap);
        assert_eq!(all(driver), [0; 8]);
    });
}

#[test]
fn many_threads_do_everything() {
    on_stand_in("many_threads_do_everything", &[], &[], |driver| {
        let heap = heap("backend:cuda,limit:64MiB,reserve:16GiB,growth:exact,wait_limit:5ms,shrink:watermark=50%");
        heap.on_out_of_memory(Box::new(|_| false));
        let stop = AtomicBool::new(false);
        let errors = std::sync::Mutex::new(std::collections::BTreeMap::<String, u64>::new());
        let served = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for thread in 0..6u64 {
                let (heap, stop, errors, served) = (&heap, &stop, &errors, &served);
                scope.spawn(move || {
                    driver.push(0xC100);
                    driver.push(0xC000);
                    let mut random = Random(thread + 77);
                    let mut streams: Vec<StreamId> = (0..2).map(|_| StreamId(driver.create_stream())).collect();
                    let mut context = 0;
                    driver.raw_pop(&raw mut context);
                    streams.extend([StreamId(0), StreamId(2)]);
                    let mut blocks: Vec<Allocation> = Vec::new();
                    let note = |error: Error| {
                        let text = format!("{error}");
                        *errors
                            .lock()
                            .unwrap()
                            .entry(text.chars().filter(|c| !c.is_ascii_digit()).take(90).collect())
                            .or_default() += 1;
                    };
                    while !stop.load(Relaxed) {
                        let stream = streams[random.below(streams.len() as u64) as usize];
                        match random.below(20) {
                            0..=7 => {
                                let size = match random.below(4) {
                                    0 => random.below(1 << 20),
                                    1 => random.below(16 << 20),
                                    _ => random.below(4 << 20),
                                };
                                match heap.alloc(size, stream) {
                                    Ok(block) => {
                                        served.fetch_add(1, Relaxed);
                                        blocks.push(block);
                                    }
                                    Err(error) => note(error),
                                }
                            }
                            8 => match heap.alloc_contiguous(random.below(6 << 20), stream) {
                                Ok(block) => blocks.push(block),
                                Err(error) => note(error),
                            },
                            9..=12 if !blocks.is_empty() => {
                                let at = random.below(blocks.len() as u64) as usize;
                                drop(blocks.swap_remove(at));
                            }
                            13 if !blocks.is_empty() => {
                                let at = random.below(blocks.len() as u64) as usize;
                                if let Err(error) = blocks[at].record_use(stream) {
                                    note(error);
                                }
                            }
                            14 => drop(heap.trim()),
                            15 => heap.tick(),
                            16 => drop(heap.set_limit([64 * MIB, 48 * MIB, 30 * MIB][random.below(3) as usize])),
                            17 => {
                                driver.push(0xC000);
                                let old = streams[0];
                                if let Err(error) = heap.retire_stream(old) {
                                    note(error);
                                }
                                driver.destroy_stream(old.0);
                                streams[0] = StreamId(driver.create_stream());
                                driver.raw_pop(&raw mut context);
                            }
                            18 => {
                                let pool = PoolId(thread, random.below(3));
                                match heap.begin_capture(pool, StreamFilter::Streams(vec![streams[1]])) {
                                    Ok(()) => {
                                        if let Ok(block) = heap.alloc(random.below(3 << 20), streams[1]) {
                                            blocks.push(block);
                                        }
                                        if let Err(error) = heap.end_capture(pool) {
                                            note(error);
                                        }
                                        if let Err(error) = heap.release_capture(pool) {
                                            note(error);
                                        }
                                    }
                                    Err(error) => note(error),
                                }
                            }
                            _ if !blocks.is_empty() => {
                                let at = random.below(blocks.len() as u64) as usize;
                                match heap.export_handles(blocks[at].address()) {
                                    Ok(handles) => {
                                        assert_eq!(handles.iter().map(|one| one.bytes).sum::<u64>(), blocks[at].size())
                                    }
                                    Err(error) => note(error),
                                }
                            }
                            _ => {}
                        }
                        if blocks.len() > 12 {
                            blocks.truncate(4);
                        }
                        if random.below(50) == 0 {
                            driver.clear_log();
                        }
                        assert_eq!(driver.current(), 0xC100);
                    }
                });
            }
            let start = Instant::now();
            let mut held = false;
            while start.elapsed() < Duration::from_secs(3) {
                std::thread::sleep(Duration::from_millis(20));
                held = !held;
                driver.hold_events(held);
            }
            driver.hold_events(false);
            stop.store(true, Relaxed);
        });
        assert!(served.load(Relaxed) > 1000, "{served:?} served: {:#?}", errors.lock().unwrap());
        heap.check().unwrap();
        let stats = heap.stats();
        assert_eq!((stats.live_blocks, stats.allocated, stats.requested), (0, 0, 0));
        heap.set_limit(64 * MIB);
        heap.tick();
        heap.tick();
        heap.trim();
        heap.check().unwrap();
        let stats = heap.stats();
        assert_eq!((stats.reserved, stats.zombie, stats.pending, stats.capture_pools), (0, 0, 0, 0), "{stats:#?}");
        drop(heap);
        assert_eq!(all(driver), [0; 8]);
    });
}

#[test]
fn buffers_of_odd_kinds() {
    on_stand_in("buffers_of_odd_kinds", &[], &[], |driver| {
        #[derive(Clone, Copy)]
        #[repr(C, align(4096))]
        struct Page([u8; 4096]);
        // SAFETY: plain bytes.
        unsafe impl cudarc::driver::DeviceRepr for Page {}
        // SAFETY: as above.
        unsafe impl cudarc::driver::ValidAsZeroBits for Page {}
        let heap = heap("backend:cuda,limit:64MiB,reserve:4GiB,wait_limit:0s");
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        let small = DeviceBuffer::<u8>::zeros(&heap, &stream, 1).unwrap();
        let pages = DeviceBuffer::<Page>::zeros(&heap, &stream, 3).unwrap();
        assert!(pages.address().is_multiple_of(4096), "{:#x}", pages.address());
        for len in [usize::MAX, usize::MAX / 8, usize::MAX / 8 + 1, 1 << 45] {
            // SAFETY: it is refused.
            let error = unsafe { DeviceBuffer::<u64>::uninit(&heap, &stream, len) }.map(drop).unwrap_err();
            let told = matches!(error, Error::InvalidArgument(_) | Error::AddressSpace { .. } | Error::OutOfMemory(_));
            assert!(told, "{len}: {error}");
        }
        let empty = DeviceBuffer::<f64>::zeros(&heap, &stream, 0).unwrap();
        assert_eq!(empty.to_host().unwrap(), Vec::<f64>::new());
        let other = CudaContext::new(1).unwrap();
        let foreign = other.new_stream().unwrap();
        let made = DeviceBuffer::<u8>::zeros(&heap, &foreign, 100).map(drop);
        assert!(matches!(made, Err(Error::InvalidArgument(_))), "a stream of another device: {made:?}");
        drop(heap);
        std::thread::spawn(move || drop((small, pages, empty))).join().unwrap();
        drop((stream, foreign, context, other));
        assert_eq!(all(driver), [0; 8]);
    });
}
