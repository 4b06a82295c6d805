//! The CUDA backend on a stand-in driver (`tests/fake_cuda`): which calls it makes, and what is left
//! when one of them fails. Each test runs in a process of its own, which loads the stand-in as
//! `libcuda.so` from a folder of its own.
#![cfg(all(feature = "cuda", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "the stand-in has no memory to harm and checks the rules")]

#[path = "fake_cuda/control.rs"]
mod control;

use control::{Control, on_stand_in};
use std::time::{Duration, Instant};
use xseg::Error;
use xseg::backend::cuda::{CudaBackend, CudaOptions, NullStream, driver_info};
use xseg::backend::{Backend, ClientEvent, Event, EventScope, PhysicalAllocation, StreamId};
use xseg::units::{GRANULE, MIB};

fn open() -> CudaBackend {
    CudaBackend::open(0, &CudaOptions::default()).unwrap()
}

fn error_of(result: Result<CudaBackend, Error>) -> String {
    result.map(drop).unwrap_err().to_string()
}

#[test]
fn opening_tries_what_it_promises() {
    on_stand_in("opening_tries_what_it_promises", &[], &[], |driver| {
        let backend = open();
        let names: Vec<String> =
            driver.log().iter().filter_map(|line| line.split(' ').next().map(String::from)).collect();
        let trial = ["cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease"];
        let start = names.iter().position(|name| name == trial[0]).unwrap();
        assert_eq!(names[start..start + 6], trial);
        assert_eq!(names[start + 6], "cuMemAddressFree");
        assert_eq!(names.iter().filter(|name| *name == "cuMemCreate").count(), 1);
        assert_eq!(names[0], "cuInit");
        assert!(names.contains(&"cuCtxRecordEvent".to_owned()));
        let found = backend.capabilities();
        assert_eq!((found.granularity, found.device.as_str()), (GRANULE, "Stand-in 0"));
        assert!(found.context_events && found.concurrent_remap && found.notes.is_empty(), "{found:?}");
        assert!(backend.exportable() && backend.rdma());
        assert_eq!(driver.counts(), [0, 0, 0, 0, 1]);
        drop(backend);
        assert_eq!(driver.counts(), [0; 5]);
        let info = driver_info().unwrap();
        assert_eq!((info.version, info.devices.len(), info.devices[1].compute), ((12, 8), 2, (9, 0)));
    });
}

#[test]
fn memory_calls_and_their_arguments() {
    on_stand_in("memory_calls_and_their_arguments", &[], &[], |driver| {
        let backend = open();
        driver.clear_log();
        let size = 4 * MIB;
        let address = backend.reserve(64 * MIB).unwrap();
        let handle = backend.create(size).unwrap();
        let to = address + 32 * MIB;
        // SAFETY: the stand-in has no memory; it checks the rules itself, here and below.
        unsafe {
            backend.map(address, handle, size).unwrap();
            backend.set_access(address, size).unwrap();
            backend.relocate(address, to, handle, size).unwrap();
            assert_eq!(driver.accessible(), 1);
            assert_eq!(
                backend.map(to + GRANULE, handle, size).unwrap_err().reason,
                "cuMemMap: CUDA_ERROR_INVALID_VALUE"
            );
            backend.unmap(to, size).unwrap();
            backend.release(handle, size).unwrap();
            backend.unreserve(address, 64 * MIB).unwrap();
        }
        let calls: Vec<String> = driver.log().into_iter().filter(|line| line.starts_with("cuMem")).collect();
        let handle = handle.0;
        let expected = [
            "cuMemAddressReserve 4000000 200000 = 0".to_owned(),
            "cuMemCreate 400000 = 0".into(),
            format!("cuMemMap {address:x} 400000 {handle:x} = 0"),
            format!("cuMemSetAccess {address:x} 400000 1 = 0"),
            format!("cuMemMap {to:x} 400000 {handle:x} = 0"),
            format!("cuMemSetAccess {to:x} 400000 1 = 0"),
            format!("cuMemUnmap {address:x} 400000 = 0"),
            format!("cuMemMap {:x} 400000 {handle:x} = 1", to + GRANULE),
            format!("cuMemUnmap {to:x} 400000 = 0"),
            format!("cuMemRelease {handle:x} = 0"),
            format!("cuMemAddressFree {address:x} 4000000 = 0"),
        ];
        assert_eq!(calls, expected);
    });
}

#[test]
fn lack_of_memory_is_told_apart() {
    on_stand_in("lack_of_memory_is_told_apart", &[("FAKE_CUDA_MEMORY", "8388608")], &[], |_| {
        let backend = open();
        assert_eq!(backend.memory().unwrap().total, 8 * MIB);
        let all = backend.create(8 * MIB).unwrap();
        assert_eq!(backend.memory().unwrap().free, 0);
        let error = backend.create(GRANULE).unwrap_err();
        assert!(error.out_of_memory);
        assert_eq!(error.to_string(), "the create call failed: cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY");
        // A full card says nothing about what it can do: opening fails instead of dropping all.
        let second = CudaBackend::open(0, &CudaOptions::default()).map(drop).unwrap_err();
        assert!(matches!(second, Error::Driver(error) if error.out_of_memory));
        // SAFETY: created above.
        unsafe { backend.release(all, 8 * MIB) }.unwrap();
    });
}

fn notes_with(test: &'static str, env: &[(&str, &str)], without: &[&str], check: fn(&CudaBackend, &str)) {
    on_stand_in(test, env, without, |driver| {
        let backend = open();
        check(&backend, &backend.capabilities().notes.join("; "));
        drop(backend);
        assert_eq!(driver.counts(), [0; 5]);
    });
}

#[test]
fn refused_rdma_is_dropped() {
    notes_with("refused_rdma_is_dropped", &[("FAKE_CUDA_REFUSE", "rdma")], &[], |backend, notes| {
        assert!(backend.exportable() && !backend.rdma());
        assert_eq!(notes, "RDMA dropped: the map call failed: cuMemMap: CUDA_ERROR_NOT_SUPPORTED");
    });
}

#[test]
fn refused_export_is_dropped() {
    notes_with("refused_export_is_dropped", &[("FAKE_CUDA_REFUSE", "fd")], &[], |backend, notes| {
        assert!(!backend.exportable() && backend.rdma());
        assert_eq!(notes, "POSIX-fd export dropped: the create call failed: cuMemCreate: CUDA_ERROR_NOT_SUPPORTED");
    });
}

#[test]
fn refused_export_and_rdma_are_dropped() {
    notes_with("refused_export_and_rdma_are_dropped", &[("FAKE_CUDA_REFUSE", "fd,rdma")], &[], |backend, notes| {
        assert!(!backend.exportable() && !backend.rdma());
        assert!(notes.starts_with("POSIX-fd export and RDMA dropped: "), "{notes}");
    });
}

#[test]
fn an_old_device_and_driver() {
    let env = [("FAKE_CUDA_LACK", "fd,rdma"), ("FAKE_CUDA_COMPUTE", "70")];
    notes_with("an_old_device_and_driver", &env, &["cuCtxRecordEvent", "cuStreamGetId"], |backend, notes| {
        assert!(!backend.exportable() && !backend.rdma());
        assert!(!backend.capabilities().context_events && !backend.capabilities().concurrent_remap);
        assert_eq!(notes.split("; ").count(), 5, "{notes}");
        assert!(backend.record(EventScope::Context).is_err());
        assert_eq!(backend.stream_key(StreamId(0x5555_0000)).unwrap(), 0x5555_0000);
    });
}

#[test]
fn refused_context_events_are_dropped() {
    let env = [("FAKE_CUDA_REFUSE", "context_event")];
    notes_with("refused_context_events_are_dropped", &env, &[], |backend, notes| {
        assert!(!backend.capabilities().context_events);
        assert!(notes.contains("cuCtxRecordEvent: CUDA_ERROR_NOT_SUPPORTED"), "{notes}");
    });
}

#[test]
fn a_driver_without_a_needed_call() {
    on_stand_in("a_driver_without_a_needed_call", &[], &["cuMemMap"], |_| {
        let error = error_of(CudaBackend::open(0, &CudaOptions::default()));
        assert!(error.contains("the CUDA driver has no cuMemMap; install one"), "{error}");
        assert!(driver_info().is_err());
    });
}

#[test]
fn no_device() {
    on_stand_in("no_device", &[("FAKE_CUDA_DEVICES", "0")], &[], |_| {
        let error = error_of(CudaBackend::open(0, &CudaOptions::default()));
        assert!(error.contains("cuInit: CUDA_ERROR_NO_DEVICE") && error.contains("CUDA_VISIBLE_DEVICES"), "{error}");
    });
}

#[test]
fn wrong_devices() {
    on_stand_in("wrong_devices", &[("FAKE_CUDA_LACK", "vmm")], &[], |driver| {
        let error = error_of(CudaBackend::open(2, &CudaOptions::default()));
        assert!(error.contains("device 2 does not exist, the driver shows 2"), "{error}");
        let error = error_of(CudaBackend::open(1, &CudaOptions::default()));
        assert!(error.contains("Stand-in 1 has no virtual memory management"), "{error}");
        assert_eq!(driver.counts(), [0; 5]);
    });
}

#[test]
fn an_odd_granularity() {
    on_stand_in("an_odd_granularity", &[("FAKE_CUDA_GRANULARITY", "3145728")], &[], |_| {
        let error = error_of(CudaBackend::open(0, &CudaOptions::default()));
        assert!(error.contains("pieces of 3145728 bytes, which do not divide 2 MiB"), "{error}");
    });
}

#[test]
fn no_driver() {
    control::without_driver("no_driver", || {
        // A machine with a real driver finds that one: nothing to see then.
        if let Err(error) = CudaBackend::open(0, &CudaOptions::default()) {
            assert!(matches!(error, Error::Unavailable { backend: "cuda", .. }), "{error:?}");
            assert!(
                ["libcuda.so.1 cannot be loaded", "install it", "backend:host"]
                    .iter()
                    .all(|part| error.to_string().contains(part)),
                "{error}"
            );
        }
    });
}

#[test]
fn peers_get_access() {
    on_stand_in("peers_get_access", &[], &[], |driver| {
        let backend = CudaBackend::open(0, &CudaOptions { peers: vec![1, 0, 1], ..CudaOptions::default() }).unwrap();
        assert_eq!(backend.peers(), [1]);
        assert!(driver.log().iter().any(|line| line.starts_with("cuMemSetAccess") && line.ends_with(" 2 = 0")));
        let error = error_of(CudaBackend::open(0, &CudaOptions { peers: vec![7], ..CudaOptions::default() }));
        assert!(error.contains("peer 7 does not exist"), "{error}");
    });
}

#[test]
fn peers_out_of_reach_are_dropped() {
    on_stand_in("peers_out_of_reach_are_dropped", &[("FAKE_CUDA_LACK", "peer")], &[], |_| {
        let backend = CudaBackend::open(0, &CudaOptions { peers: vec![1], ..CudaOptions::default() }).unwrap();
        assert!(backend.peers().is_empty());
        assert_eq!(backend.capabilities().notes, ["peer 1 dropped: it cannot reach this device's memory"]);
    });
}

#[test]
fn export_gives_a_descriptor() {
    on_stand_in("export_gives_a_descriptor", &[], &[], |driver| {
        let backend = open();
        assert!(!driver.log().iter().any(|line| line.starts_with("cuMemExport")));
        let handle = backend.create(GRANULE).unwrap();
        // SAFETY: created above.
        let file = std::fs::File::from(unsafe { backend.export_fd(handle) }.unwrap());
        assert!(file.metadata().is_ok());
        let plain = CudaBackend::open(0, &CudaOptions { exportable: false, ..CudaOptions::default() }).unwrap();
        // SAFETY: as above.
        assert!(unsafe { plain.export_fd(handle) }.unwrap_err().reason.contains("without POSIX-fd export"));
    });
}

#[test]
fn context_and_capture_mode_are_left_as_found() {
    on_stand_in("context_and_capture_mode_are_left_as_found", &[], &[], |driver| {
        let backend = open();
        let other = CudaBackend::open(1, &CudaOptions::default()).unwrap();
        assert_eq!((driver.current(), driver.capture_mode()), (0, 0));
        driver.push(0xC100); // device 1's
        driver.set_capture_mode(1);
        driver.capture(0x5000_0040);
        driver.clear_log();
        every_call(&backend).unwrap();
        every_call(&other).unwrap();
        assert_eq!((driver.current(), driver.capture_mode()), (0xC100, 1));
        let log = driver.log();
        let count = |name: &str| log.iter().filter(|line| line.starts_with(name)).count();
        assert_eq!(count("cuCtxPushCurrent_v2 c000"), count("cuCtxPopCurrent_v2"));
        assert_eq!(count("cuCtxPushCurrent_v2 c100"), 0);
        // The calls that no mode makes safe are not among them.
        assert!(!driver.end_capture(), "the capture broke");
    });
}

/// Every memory and event call once, with what a careful caller does when one is refused.
fn every_call(backend: &CudaBackend) -> Result<(), Error> {
    backend.memory()?;
    let address = backend.reserve(GRANULE)?;
    let done = backend.create(GRANULE).and_then(|handle| mapped(backend, address, handle));
    // SAFETY: reserved above, nothing is mapped there.
    twice(|| unsafe { backend.unreserve(address, GRANULE) })?;
    done?;
    let event = backend.record(EventScope::Stream(StreamId(2)))?;
    let done = events(backend, &event);
    backend.recycle(event);
    done
}

fn mapped(backend: &CudaBackend, address: u64, handle: PhysicalAllocation) -> Result<(), xseg::error::DriverError> {
    // SAFETY: a new handle and an empty reservation; undone in order.
    unsafe {
        let done = backend.map(address, handle, GRANULE).and_then(|()| {
            let done = backend.set_access(address, GRANULE);
            twice(|| backend.unmap(address, GRANULE)).and(done)
        });
        twice(|| backend.release(handle, GRANULE)).and(done)
    }
}

fn events(backend: &CudaBackend, event: &Event) -> Result<(), Error> {
    backend.is_done(event)?;
    assert!(backend.wait(event, Duration::from_secs(1))?);
    backend.stream_wait(StreamId(2), event)?;
    let adopted = backend.adopt(ClientEvent(event.0))?;
    let done = backend.is_done(&adopted);
    backend.recycle(adopted);
    assert!(done?);
    backend.is_capturing(StreamId(2));
    backend.any_capturing(&[StreamId(2)]);
    backend.stream_key(StreamId(2)).map(drop)
}

/// What gives memory back is tried again once.
fn twice<E>(mut call: impl FnMut() -> Result<(), E>) -> Result<(), E> {
    call().or_else(|_| call())
}

/// Calls by which the backend itself undoes something: when one of these is refused, the one thing
/// stays that it was to undo.
const UNDO: [&str; 6] = [
    "cuMemUnmap",
    "cuMemRelease",
    "cuMemAddressFree",
    "cuEventDestroy_v2",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxPopCurrent_v2",
];

#[test]
fn any_call_may_fail() {
    on_stand_in("any_call_may_fail", &[], &[], |driver| {
        let session = |driver: &Control| -> (Result<(), Error>, usize) {
            let done = CudaBackend::open(0, &CudaOptions::default()).map(|backend| {
                let done = every_call(&backend).and_then(|()| Ok(backend.quiesce()?));
                let done = done.and_then(|()| Ok(backend.record(EventScope::Context)?));
                let before_drop = driver.log().len();
                (done.map(|event| backend.recycle(event)), before_drop)
            });
            done.unwrap_or_else(|error| (Err(error), usize::MAX))
        };
        session(driver).0.unwrap();
        let (mut clean, mut excused) = (0, 0);
        for turn in 1..500 {
            driver.clear_log();
            let before = driver.counts();
            driver.fail_at(turn, 999);
            let (done, before_drop) = session(driver);
            if driver.fail_pending() {
                driver.fail_at(0, 0);
                done.unwrap();
                assert!(clean > 40 && excused > 0 && excused < clean, "{clean} clean, {excused} excused");
                return;
            }
            let log = driver.log();
            let failed = log.iter().position(|line| line.ends_with(" = 999")).unwrap();
            let name = log[failed].split(' ').next().unwrap();
            let restored = driver.current() == 0 && driver.capture_mode() == 0;
            let after = driver.counts();
            if UNDO.contains(&name) || !restored || failed >= before_drop {
                assert!(
                    UNDO.contains(&name) || name == "cuThreadExchangeStreamCaptureMode" || failed >= before_drop,
                    "{name}"
                );
                let left: u64 = after.iter().zip(before).map(|(after, before)| after - before).sum();
                assert!(left <= 3, "{name}, turn {turn}: {after:?}");
                driver.set_capture_mode(0);
                driver.pop_all();
                excused += 1;
            } else {
                assert_eq!(after, before, "{name}, turn {turn}");
                let text = done.map_or_else(|error| error.to_string(), |()| "went on".into());
                assert!(text.contains("CUDA_ERROR_UNKNOWN") || text == "went on", "{name}: {text}");
                clean += 1;
            }
        }
        panic!("more calls than expected");
    });
}

#[test]
fn events_complete_when_the_device_has() {
    on_stand_in("events_complete_when_the_device_has", &[], &[], |driver| {
        let backend = open();
        driver.hold_events(true);
        let first = backend.record(EventScope::Context).unwrap();
        let second = backend.record(EventScope::Stream(StreamId(0))).unwrap();
        assert_ne!(first, second);
        assert!(!backend.is_done(&first).unwrap());
        let start = Instant::now();
        assert!(!backend.wait(&second, Duration::from_millis(20)).unwrap());
        let waited = start.elapsed();
        assert!(waited >= Duration::from_millis(20) && waited < Duration::from_secs(5), "{waited:?}");
        driver.hold_events(false);
        assert!(backend.is_done(&first).unwrap() && backend.wait(&second, Duration::ZERO).unwrap());
        // Held events are never recorded again; recycled ones are.
        let token = first.0;
        backend.recycle(first);
        let third = backend.record(EventScope::Context).unwrap();
        assert_eq!(third.0, token);
        assert_eq!(driver.counts()[3], 2);
        backend.recycle(second);
        drop(third);
        drop(backend);
        assert_eq!(driver.counts(), [0; 5]);
    });
}

#[test]
fn capturing_streams_are_refused_and_stay_whole() {
    on_stand_in("capturing_streams_are_refused_and_stay_whole", &[], &[], |driver| {
        let backend = open();
        driver.push(0xC000);
        let stream = StreamId(driver.create_blocking_stream());
        driver.capture(stream.0);
        assert!(
            backend.is_capturing(stream) && backend.is_capturing(StreamId(0)) && !backend.is_capturing(StreamId(2))
        );
        assert!(backend.record(EventScope::Stream(stream)).unwrap_err().reason.contains("capturing"));
        let event = backend.record(EventScope::Stream(StreamId(2))).unwrap();
        assert!(backend.stream_wait(stream, &event).unwrap_err().reason.contains("capturing"));
        backend.recycle(event);
        assert!(!driver.end_capture());
        // The stand-in has the driver's rule that this one breaks a capture.
        driver.capture(stream.0);
        let error = backend.record(EventScope::Context).unwrap_err();
        assert_eq!(error.reason, "cuCtxRecordEvent: CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED");
        assert!(driver.end_capture());
    });
}

#[test]
fn streams_are_known_by_identity() {
    on_stand_in("streams_are_known_by_identity", &[], &[], |driver| {
        let backend = open();
        driver.push(0xC000);
        let stream = driver.create_stream();
        let key = backend.stream_key(StreamId(stream)).unwrap();
        driver.destroy_stream(stream);
        let dead = backend.stream_key(StreamId(stream)).unwrap_err();
        assert_eq!(dead, Error::DeadStream { stream, why: "cuStreamGetId: CUDA_ERROR_INVALID_HANDLE".into() });
        assert_eq!(driver.create_stream(), stream, "the handle is used again");
        assert_ne!(backend.stream_key(StreamId(stream)).unwrap(), key);

        let legacy = backend.stream_key(StreamId(0)).unwrap();
        assert_eq!(backend.stream_key(StreamId(1)).unwrap(), legacy);
        let mine = backend.stream_key(StreamId(2)).unwrap();
        assert_eq!(backend.stream_key(StreamId(2)).unwrap(), mine);
        let others =
            std::thread::scope(|scope| scope.spawn(|| backend.stream_key(StreamId(2)).unwrap()).join().unwrap());
        assert!(mine != others && mine != legacy && others != legacy);

        let options = CudaOptions { null_stream: NullStream::PerThread, ..CudaOptions::default() };
        let per_thread = CudaBackend::open(0, &options).unwrap();
        assert_eq!(per_thread.stream_key(StreamId(0)).unwrap(), mine);
        assert_eq!(per_thread.stream_key(StreamId(1)).unwrap(), legacy);
        driver.clear_log();
        let event = per_thread.record(EventScope::Stream(StreamId(0))).unwrap();
        assert!(driver.log().contains(&format!("cuEventRecord {:x} 2 = 0", event.0)));
        per_thread.recycle(event);
    });
}
