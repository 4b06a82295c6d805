//! Captures, client's events, peers, export and NVTX of a heap on the stand-in driver: which calls are made
//! while a graph is captured, and what is left when one fails. See `cuda_fake.rs`.
#![cfg(all(feature = "cuda", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

#[path = "fake_cuda/clients.rs"]
mod clients;
#[path = "fake_cuda/control.rs"]
mod control;

use clients::{all, heap};
use control::{on_stand_in, on_stand_in_with_nvtx};
use rustix::process::{Resource, Rlimit, setrlimit};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use xseg::backend::cuda::{CudaBackend, CudaOptions};
use xseg::backend::{Backend, MappingEvent};
use xseg::units::{GRANULE, MIB};
use xseg::{Allocation, ClientEvent, Error, Heap, PoolId, StreamFilter, StreamId};

const POOL: PoolId = PoolId(5, 6);

/// Calls of a kind in the log.
fn calls(log: &[String], name: &str) -> usize {
    log.iter().filter(|line| line.split(' ').next() == Some(name)).count()
}

/// Every second of eight blocks is free, at a limit that is reached.
fn scattered(heap: &Heap, stream: StreamId) -> Vec<Allocation> {
    let blocks: Vec<Allocation> = (0..8).map(|_| heap.alloc(4 * MIB, stream).unwrap()).collect();
    let mut number = 0;
    let half = |_: &Allocation| {
        number += 1;
        number % 2 == 0
    };
    blocks.into_iter().filter(half).collect()
}

#[test]
fn nothing_that_a_capture_forbids_is_called() {
    on_stand_in("nothing_that_a_capture_forbids_is_called", &[], &[], |driver| {
        driver.set_capture_mode(1);
        let heap = heap("backend:cuda,limit:32MiB,reserve:4GiB,growth:exact");
        driver.push(0xC000);
        // The legacy stream does not see this one capture.
        let [captured, beside] = [(); 2].map(|()| StreamId(driver.create_stream()));
        let live = scattered(&heap, beside);
        heap.begin_capture(POOL, StreamFilter::Streams(vec![captured])).unwrap();
        driver.capture(captured.0);
        driver.clear_log();
        let kept = heap.alloc(12 * MIB, captured).unwrap();
        assert!(heap.stats().handles_moved > 0);
        let shared = heap.alloc(MIB, beside).unwrap();
        shared.record_use(captured).unwrap();
        drop(shared);
        heap.tick();
        heap.trim();
        drop(heap.alloc(2 * MIB, captured));
        let large = heap.alloc(64 * MIB, captured);
        assert!(matches!(large, Err(Error::OutOfMemory(_))), "{large:?}");
        let log = driver.log();
        assert_eq!((calls(&log, "cuCtxRecordEvent"), calls(&log, "cuCtxSynchronize")), (0, 0));
        assert!(calls(&log, "cuMemMap") > 0 && calls(&log, "cuMemSetAccess") > 0 && calls(&log, "cuEventQuery") > 0);
        assert_eq!(driver.capture_mode(), 1, "the thread's mode is as it was");
        assert!(!driver.end_capture(), "the capture broke");
        heap.end_capture(POOL).unwrap();
        driver.clear_log();
        heap.tick();
        assert!(calls(&driver.log(), "cuCtxRecordEvent") > 0, "epochs go on");
        heap.check().unwrap();
        drop((kept, live));
        heap.release_capture(POOL).unwrap();
        heap.tick();
        heap.trim();
        assert_eq!((heap.stats().reserved, heap.stats().capture_pools), (0, 0));
        drop(heap);
        assert_eq!(all(driver), [0; 8]);
    });
}

/// One that waits still ends the asking of a request, four that do not are all that it looks at, and a capture asks for none.
#[test]
fn large_requests_ask_little_of_blocks_that_wait() {
    on_stand_in("large_requests_ask_little_of_blocks_that_wait", &[], &[], |driver| {
        let heap = heap("backend:cuda,limit:256MiB,reserve:4GiB");
        driver.push(0xC000);
        let [one, side] = [(); 2].map(|()| StreamId(driver.create_stream()));
        let longer = heap.alloc(96 * MIB, one).unwrap();
        let waiting: Vec<Allocation> = (0..32).map(|_| heap.alloc(2 * MIB, one).unwrap()).collect();
        waiting.iter().for_each(|block| block.record_use(side).unwrap());
        driver.hold_events(true);
        drop((waiting, longer));
        let mut kept = Vec::new();
        let mut asked = |mebibytes: &[u64], stream: StreamId| {
            driver.clear_log();
            kept.extend(mebibytes.iter().map(|size| heap.alloc(size * MIB, stream).unwrap()));
            calls(&driver.log(), "cuEventQuery")
        };
        assert_eq!(asked(&[3, 4, 5], one), 3);
        heap.begin_capture(POOL, StreamFilter::Streams(vec![side])).unwrap();
        driver.capture(side.0);
        drop(heap.alloc(32 * MIB, side).unwrap());
        assert_eq!(asked(&[3, 4, 5], side), 0);
        assert!(!driver.end_capture(), "the capture broke");
        heap.end_capture(POOL).unwrap();
        driver.hold_events(false);
        assert_eq!(asked(&[3, 4, 5], one), 12);
        assert_eq!(heap.stats().pending, 0, "statistics look at all");
        heap.check().unwrap();
    });
}

#[test]
fn captures_that_the_backend_sees() {
    on_stand_in("captures_that_the_backend_sees", &[], &[], |driver| {
        let backend = CudaBackend::open(0, &CudaOptions::default()).unwrap();
        driver.push(0xC000);
        let stream = StreamId(driver.create_blocking_stream());
        driver.capture(stream.0);
        assert!(backend.quiesce().is_err() && driver.end_capture());
        // A capture that the legacy stream does not wait for is seen on its own stream alone.
        let hidden = driver.create_stream();
        assert!(!backend.any_capturing(&[]));
        driver.capture(stream.0);
        assert!(backend.any_capturing(&[]));
        driver.end_capture();
        driver.capture(hidden);
        assert!(!backend.any_capturing(&[stream]) && backend.any_capturing(&[stream, StreamId(hidden)]));
        assert!(!driver.end_capture());
    });
}

/// Without an announcement: the slow path sees the stream, and the legacy stream any that waits for it.
#[test]
fn a_capture_that_nobody_announced() {
    on_stand_in("a_capture_that_nobody_announced", &[], &[], |driver| {
        let heap = heap("backend:cuda,limit:64MiB,reserve:4GiB");
        driver.push(0xC000);
        let hidden = StreamId(driver.create_stream());
        driver.capture(hidden.0);
        let block = heap.alloc(8 * MIB, hidden).unwrap();
        heap.tick();
        drop(block);
        heap.trim();
        assert!(!driver.end_capture());
        driver.capture(driver.create_blocking_stream());
        heap.tick();
        heap.trim();
        assert!(!driver.end_capture());
        driver.clear_log();
        heap.tick();
        assert!(calls(&driver.log(), "cuCtxRecordEvent") > 0);
    });
}

#[test]
fn a_capture_survives_any_call_failing() {
    on_stand_in("a_capture_survives_any_call_failing", &[], &[], |driver| {
        drop(heap("backend:cuda,reserve:4GiB"));
        driver.push(0xC000);
        let [captured, beside] = [(); 2].map(|()| StreamId(driver.create_stream()));
        driver.pop_all();
        let session = |turn: u64| -> (bool, u64) {
            let heap = heap("backend:cuda,limit:32MiB,reserve:4GiB,growth:exact,wait_limit:0s");
            let live = scattered(&heap, beside);
            heap.begin_capture(POOL, StreamFilter::Streams(vec![captured])).unwrap();
            driver.capture(captured.0);
            driver.clear_log();
            driver.fail_at(turn, 999);
            let mut kept = Vec::new();
            let mut refused = 0;
            for round in 0..4 {
                let made = match round {
                    3 => heap.alloc_contiguous(2 * MIB, captured),
                    _ => heap.alloc(5 * MIB, captured),
                };
                match made {
                    Ok(block) if round % 2 == 0 => kept.push(block),
                    Ok(block) => drop(block),
                    Err(Error::Driver(error)) => {
                        assert!(error.reason.ends_with("CUDA_ERROR_UNKNOWN"), "turn {turn}: {error}");
                        refused += 1;
                    }
                    Err(Error::DeadStream { why, .. }) => {
                        assert!(why.ends_with("CUDA_ERROR_UNKNOWN"), "turn {turn}: {why}")
                    }
                    Err(error) => assert!(matches!(error, Error::OutOfMemory(_)), "turn {turn}: {error}"),
                }
                heap.check().unwrap();
            }
            heap.tick();
            heap.trim();
            let missed = driver.fail_pending();
            driver.fail_at(0, 0);
            let log = driver.log();
            let failed =
                log.iter().find(|line| line.ends_with(" = 999")).map_or("", |line| line.split(' ').next().unwrap());
            // What undoes a change of the thread is asked for once: refused, the change stays.
            let undo = ["cuCtxPopCurrent_v2", "cuThreadExchangeStreamCaptureMode"].contains(&failed);
            assert!(undo || (driver.current(), driver.capture_mode()) == (0, 0), "{failed} at turn {turn}");
            driver.pop_all();
            driver.set_capture_mode(0);
            assert!(!driver.end_capture(), "{failed} at turn {turn} broke the capture");
            heap.end_capture(POOL).unwrap();
            drop((kept, live));
            heap.release_capture(POOL).unwrap();
            drop(heap);
            assert_eq!(all(driver), [0; 8], "{failed} at turn {turn}");
            (missed, refused)
        };
        let (mut turn, mut refused) = (1, 0);
        loop {
            let (missed, errors) = session(turn);
            refused += errors;
            if missed {
                break;
            }
            turn += 1;
        }
        assert!(turn > 100 && refused > 10, "{turn} turns, {refused} refused");
    });
}

#[test]
fn clients_events_are_theirs_again_at_once() {
    on_stand_in("clients_events_are_theirs_again_at_once", &[], &[], |driver| {
        let heap = heap("backend:cuda,limit:256MiB,reserve:4GiB");
        driver.push(0xC000);
        let stream = StreamId(driver.create_stream());
        let mut blocks: Vec<Allocation> = (0..40).map(|_| heap.alloc(4 * MIB, stream).unwrap()).collect();
        driver.hold_events(true);
        for block in blocks.drain(..39) {
            let event = driver.recorded_event(stream.0);
            heap.free_after(block.into_raw(), ClientEvent(event)).unwrap();
            assert_eq!(driver.raw_destroy_event(event), 0);
        }
        assert_eq!(heap.stats().pending, 39 * 4 * MIB);
        assert_eq!(driver.count(8), 1 + 32, "streams that wait, up to a bound");
        driver.hold_events(false);
        assert_eq!(heap.stats().pending, 0);
        let error = heap.free_after(blocks[0].address(), ClientEvent(1)).unwrap_err();
        assert!(error.to_string().contains("cuStreamWaitEvent: CUDA_ERROR_INVALID_HANDLE"), "{error}");
        assert_eq!(heap.stats().live_blocks, 1);
        drop((blocks, heap));
        driver.destroy_stream(stream.0);
        assert_eq!((all(driver), driver.count(8)), ([0; 8], 0));
    });
}

fn with_peers(test: &'static str, conf: &'static str, devices: u64, note: &'static str) {
    let env = [("FAKE_CUDA_DEVICES", "4"), ("FAKE_CUDA_FAR", "2")];
    on_stand_in(test, &env, &[], |driver| {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let told = seen.clone();
        let callback = move |event: &MappingEvent| told.lock().unwrap().push(*event);
        let conf = format!("{conf},limit:32MiB,reserve:4GiB,growth:exact");
        let heap = Heap::builder().conf(&conf).unwrap().on_mapping(Arc::new(callback)).build().unwrap();
        assert_eq!(heap.backend().capabilities().notes.join("; "), note);
        driver.clear_log();
        let live = scattered(&heap, StreamId(0));
        let moved = heap.alloc(12 * MIB, StreamId(0)).unwrap();
        assert!(heap.stats().handles_moved > 0);
        for block in live.iter().chain([&moved]) {
            for at in (block.address()..block.address() + block.size()).step_by(GRANULE as usize) {
                assert_eq!(driver.access(at), devices);
            }
        }
        // One call a mapping, whoever has access.
        let log = driver.log();
        assert_eq!(calls(&log, "cuMemSetAccess"), calls(&log, "cuMemMap"));
        let seen = seen.lock().unwrap();
        assert!(!seen.is_empty() && seen.iter().all(|event| event.device == heap.backend().device()));
    });
}

#[test]
fn all_peers_that_reach_the_device_get_access() {
    let note = "peer 2 dropped: it cannot reach this device's memory";
    with_peers("all_peers_that_reach_the_device_get_access", "backend:cuda=1,peers:all", 0b1011, note);
}

#[test]
fn listed_peers_get_access() {
    with_peers("listed_peers_get_access", "backend:cuda,peers:3", 0b1001, "");
}

#[test]
fn without_peers_only_the_device_has_access() {
    with_peers("without_peers_only_the_device_has_access", "backend:cuda", 0b0001, "");
}

#[test]
fn a_peer_that_does_not_exist_is_an_error() {
    on_stand_in("a_peer_that_does_not_exist_is_an_error", &[], &[], |driver| {
        let error = Heap::builder().conf("backend:cuda,peers:1+7").unwrap().build().map(drop).unwrap_err();
        assert!(error.to_string().contains("peer 7 does not exist, there are 2 devices"), "{error}");
        assert_eq!(all(driver), [0; 8]);
    });
}

/// 21: rocm-systems#10604. Thousands of handles take no descriptor; those that are asked for are closed again.
#[test]
fn descriptors_do_not_run_out() {
    let env = [("FAKE_CUDA_MEMORY", "17179869184")];
    on_stand_in("descriptors_do_not_run_out", &env, &[], |driver| {
        let few = Rlimit { current: Some(256), maximum: Some(256) };
        setrlimit(Resource::Nofile, few).unwrap();
        let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let heap = heap("backend:cuda,handle_max:2MiB,reserve:64GiB,growth:exact");
        let before = open();
        let blocks: Vec<Allocation> = (0..8).map(|_| heap.alloc(1024 * MIB, StreamId(0)).unwrap()).collect();
        assert!(driver.count(0) >= 4096 && open() == before, "{} handles", driver.count(0));
        let error = heap.export_handles(blocks[0].address()).unwrap_err();
        assert!(error.to_string().contains("cuMemExportToShareableHandle: CUDA_ERROR_OPERATING_SYSTEM"), "{error}");
        assert_eq!(open(), before, "those before the refusal are closed");
        let one = heap.alloc_contiguous(1024 * MIB, StreamId(0)).unwrap();
        for _ in 0..1000 {
            let exported = heap.export_handles(one.address()).unwrap();
            assert_eq!((exported.len(), exported[0].offset, exported[0].handle_bytes), (1, 0, 1024 * MIB));
        }
        assert_eq!(open(), before);
    });
}

#[test]
fn ranges_show_growth_and_moves() {
    on_stand_in_with_nvtx("ranges_show_growth_and_moves", &[], |_, nvtx| {
        let quiet = heap("backend:cuda,limit:32MiB,reserve:4GiB,growth:exact");
        drop(scattered(&quiet, StreamId(0)));
        assert!(nvtx.log().is_empty() && quiet.notes().is_empty());
        let heap = heap("backend:cuda,limit:32MiB,reserve:4GiB,growth:exact,nvtx:on");
        let live = scattered(&heap, StreamId(0));
        let moved = heap.alloc(12 * MIB, StreamId(0)).unwrap();
        let log = nvtx.log();
        assert_eq!(log.first().map(String::as_str), Some("push xseg grow"));
        assert_eq!(log[log.len() - 2..], ["push xseg move", "pop"]);
        assert_eq!(log.iter().filter(|line| *line == "pop").count() * 2, log.len());
        drop((live, moved));
    });
}

#[test]
fn without_the_library_there_are_no_ranges() {
    on_stand_in("without_the_library_there_are_no_ranges", &[], &[], |_| {
        let heap = heap("backend:cuda,limit:32MiB,reserve:4GiB,nvtx:on");
        drop(heap.alloc(MIB, StreamId(0)).unwrap());
        // Where the machine has the library, it is found.
        assert!(heap.notes().iter().all(|note| note.contains("no NVTX ranges: the NVTX library cannot be loaded")));
    });
}

#[test]
fn a_backend_of_the_clients_names_its_device() {
    on_stand_in("a_backend_of_the_clients_names_its_device", &[], &[], |_| {
        let backend = Arc::new(CudaBackend::open(1, &CudaOptions::default()).unwrap());
        let seen = Arc::new(AtomicU64::new(0));
        let told = seen.clone();
        let callback = move |event: &MappingEvent| told.store(u64::from(event.device), Relaxed);
        let builder = Heap::builder().conf("limit:32MiB,reserve:4GiB").unwrap();
        let heap = builder.backend(backend).on_mapping(Arc::new(callback)).build().unwrap();
        drop(heap.alloc(MIB, StreamId(0)).unwrap());
        assert_eq!(seen.load(Relaxed), 1);
    });
}
