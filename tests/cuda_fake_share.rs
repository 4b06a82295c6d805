//! Exports and imports on the CUDA backend, on the stand-in driver: which calls are made, and what is left when one fails.
//! See `cuda_fake.rs`; `cuda_fake_suite.rs` has two processes.
#![cfg(all(feature = "cuda", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

#[path = "fake_cuda/clients.rs"]
mod clients;
#[path = "fake_cuda/control.rs"]
mod control;

use clients::heap;
use control::{Control, on_stand_in};
use xseg::error::ShareFault;
use xseg::units::{GRANULE, MIB};
use xseg::{Allocation, Error, Heap, Imported, StreamId};

const CONF: &str = "backend:cuda,limit:512MiB,reserve:4GiB,handle_max:2MiB,growth:exact,wait_limit:0s";

fn import(from: &Heap, block: &Allocation, to: &Heap) -> Imported {
    to.import(from.export(block.address()).unwrap()).unwrap()
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Handles, mappings, reservations and retained contexts; events are pooled.
fn held(driver: &Control) -> [u64; 4] {
    [0, 1, 2, 4].map(|what| driver.count(what))
}

/// Memory calls so far, without the numbers of handles and descriptors.
fn calls(driver: &Control) -> Vec<String> {
    driver.log().into_iter().filter(|line| line.starts_with("cuMem")).collect()
}

#[test]
fn calls_of_an_export_and_an_import() {
    on_stand_in("calls_of_an_export_and_an_import", &[], &[], |driver| {
        let (here, there) = (heap(CONF), heap(CONF));
        let _before = here.alloc(1536 << 10, StreamId(0)).unwrap();
        let block = here.alloc(5 * MIB, StreamId(0)).unwrap();
        let skip = block.address() % GRANULE;
        driver.clear_log();
        let exported = here.export(block.address()).unwrap();
        let handles: Vec<String> = calls(driver);
        let count = (skip + 5 * MIB).div_ceil(GRANULE);
        assert_eq!(handles.len() as u64, count);
        assert!(
            handles.iter().all(|line| line.starts_with("cuMemExportToShareableHandle") && line.ends_with(" 1 0 = 0"))
        );
        driver.push(0xC100); // device 1's
        driver.clear_log();
        let imported = there.import(exported).unwrap();
        assert_eq!(driver.current(), 0xC100, "the current device is left");
        assert_eq!((imported.len(), imported.address() % GRANULE), (5 * MIB, skip));
        let base = imported.address() - skip;
        let made = calls(driver);
        assert_eq!(made[0], format!("cuMemAddressReserve {:x} 200000 = 0", count * GRANULE));
        let mut tokens = Vec::new();
        for (number, part) in made[1..].chunks(3).enumerate() {
            let at = base + number as u64 * GRANULE;
            assert_eq!(part[0], "cuMemImportFromShareableHandle 1 = 0");
            let map = part[1].strip_prefix(&format!("cuMemMap {at:x} 200000 ")).unwrap();
            tokens.push(map.strip_suffix(" = 0").unwrap().to_owned());
            assert_eq!(part[2], format!("cuMemSetAccess {at:x} 200000 1 = 0"));
        }
        assert_eq!(tokens.len() as u64, count);
        driver.clear_log();
        imported.close().unwrap();
        let mut expected = Vec::new();
        for (number, token) in tokens.iter().enumerate().rev() {
            expected.push(format!("cuMemUnmap {:x} 200000 = 0", base + number as u64 * GRANULE));
            expected.push(format!("cuMemRelease {token} = 0"));
        }
        expected.push(format!("cuMemAddressFree {base:x} {:x} = 0", count * GRANULE));
        assert_eq!(calls(driver), expected);
        here.tick();
        assert_eq!((here.stats().exported, driver.current()), (0, 0xC100));
    });
}

#[test]
fn memory_of_another_device_is_refused() {
    on_stand_in("memory_of_another_device_is_refused", &[], &[], |driver| {
        let (here, there) = (heap(CONF), heap(&CONF.replace("cuda", "cuda=1")));
        let block = here.alloc(4 * MIB, StreamId(0)).unwrap();
        driver.clear_log();
        let error = there.import(here.export(block.address()).unwrap()).unwrap_err();
        assert!(matches!(error, Error::Share(ShareFault::OtherDevice { .. })));
        let text = error.to_string();
        let named = "it is on the device GPU-01a5a5a5-a5a5-a5a5-a5a5-a5a5a5a5a500, this heap on GPU-01a5a5a5-a5a5-a5a5-a5a5-a5a5a5a5a501";
        assert!(text.contains(named), "{text}");
        assert!(!driver.log().iter().any(|line| line.starts_with("cuMemImport") || line.starts_with("cuMemAddress")));
        here.tick();
        assert_eq!(here.stats().exported, 0);
        // A heap on its device gives its peers access.
        let peers = heap(&format!("{CONF},peers:1"));
        let imported = import(&here, &block, &peers);
        assert_eq!(driver.access(imported.address()), 3);
    });
}

#[test]
fn host_memory_is_not_a_gpus() {
    on_stand_in("host_memory_is_not_a_gpus", &[], &[], |_| {
        let (gpu, host) = (heap(CONF), heap("backend:host,reserve:4GiB"));
        let (on_gpu, on_host) = (gpu.alloc(MIB, StreamId(0)).unwrap(), host.alloc(MIB, StreamId(0)).unwrap());
        let error = host.import(gpu.export(on_gpu.address()).unwrap()).unwrap_err();
        assert_eq!(error, ShareFault::OtherBackend { theirs: "cuda", ours: "host" }.into());
        let error = gpu.import(host.export(on_host.address()).unwrap()).unwrap_err();
        assert!(error.to_string().contains("exported from the host backend and this heap is on cuda"), "{error}");
    });
}

#[test]
fn memory_that_cannot_be_exported() {
    on_stand_in("memory_that_cannot_be_exported", &[("FAKE_CUDA_LACK", "fd")], &[], |_| {
        let here = heap(CONF);
        let block = here.alloc(MIB, StreamId(0)).unwrap();
        let error = here.export(block.address()).unwrap_err();
        assert!(error.to_string().contains("without POSIX-fd export"), "{error}");
        assert_eq!((here.stats().exported, here.stats().pinned), (0, 0));
    });
}

#[test]
fn any_call_of_an_import_may_fail() {
    on_stand_in("any_call_of_an_import_may_fail", &[], &[], |driver| {
        let (here, there) = (heap(CONF), heap(CONF));
        let block = here.alloc(8 * MIB, StreamId(0)).unwrap();
        import(&here, &block, &there).close().unwrap();
        here.tick();
        let (before, open) = (held(driver), descriptors());
        let (mut refused, mut kept, mut turns) = (0, 0, 0);
        loop {
            turns += 1;
            let exported = here.export(block.address()).unwrap();
            driver.clear_log();
            driver.fail_at(turns, 999);
            let imported = there.import(exported);
            let came = imported.is_ok();
            let ended = imported.and_then(Imported::close);
            let missed = driver.fail_pending();
            driver.fail_at(0, 0);
            if missed {
                ended.unwrap();
                break;
            }
            let log = driver.log();
            let name = log.iter().find(|line| line.ends_with(" = 999")).unwrap().split(' ').next().unwrap().to_owned();
            // What these two leave is the thread's context and mode, as in `cuda_fake.rs`.
            driver.pop_all();
            driver.set_capture_mode(0);
            refused += u32::from(!came);
            match ended {
                Ok(()) => {}
                Err(Error::Driver(error)) => assert!(error.reason.contains("CUDA_ERROR_UNKNOWN"), "{name}: {error}"),
                Err(Error::Share(ShareFault::InUse)) => kept += 1,
                Err(error) => panic!("{name} at turn {turns}: {error}"),
            }
            there.tick();
            there.tick();
            here.tick();
            assert_eq!((held(driver), descriptors()), (before, open), "{name} at turn {turns}");
            assert_eq!((there.stats().imported, here.stats().exported, here.stats().pinned), (0, 0, 0), "{name}");
        }
        assert!(turns > 60 && refused > 15 && kept > 3, "{turns} turns, {refused} refused, {kept} kept");

        // And of an export.
        for turn in 1.. {
            driver.fail_at(turn, 999);
            let exported = here.export(block.address());
            if driver.fail_pending() {
                driver.fail_at(0, 0);
                assert!(exported.is_ok() && turn > 12, "{turn}");
                break;
            }
            drop(exported);
            driver.pop_all();
            driver.set_capture_mode(0);
            here.tick();
            assert_eq!((here.stats().exported, here.stats().pinned, descriptors()), (0, 0, open), "turn {turn}");
        }
    });
}

#[test]
fn a_thousand_imports_exhaust_nothing() {
    on_stand_in("a_thousand_imports_exhaust_nothing", &[], &[], |driver| {
        let (here, there) = (heap(CONF), heap(CONF));
        let block = here.alloc(5 * MIB, StreamId(0)).unwrap();
        // More handles than one message carries.
        let large = here.alloc(140 * MIB, StreamId(0)).unwrap();
        import(&here, &block, &there).close().unwrap();
        here.tick();
        let (before, open) = (held(driver), descriptors());
        for round in 0..1000 {
            let imported = import(&here, if round % 50 == 0 { &large } else { &block }, &there);
            if round % 2 == 0 {
                imported.close().unwrap();
            }
            // A batch on its way, and what few imports hold.
            assert!(descriptors() <= open + 80, "round {round}: {}", descriptors());
            if round % 100 == 0 {
                driver.clear_log();
            }
        }
        there.tick();
        here.tick();
        assert_eq!(held(driver), before);
        // A thread that handed over handles closes its end as it ends.
        let start = std::time::Instant::now();
        while descriptors() > open {
            assert!(start.elapsed() < std::time::Duration::from_secs(10), "{} descriptors", descriptors());
            std::thread::yield_now();
        }
        drop((block, large, here, there));
        assert_eq!(driver.counts(), [0; 5]);
    });
}

#[test]
fn an_import_under_queued_work_stays_mapped() {
    on_stand_in("an_import_under_queued_work_stays_mapped", &[], &[], |driver| {
        let (here, there) = (heap(CONF), heap(CONF));
        let block = here.alloc(4 * MIB, StreamId(0)).unwrap();
        let imported = import(&here, &block, &there);
        let mapped = driver.counts()[1];
        driver.hold_events(true);
        drop(imported);
        there.tick();
        there.trim();
        drop(block);
        here.tick();
        assert_eq!(driver.counts()[1], mapped);
        assert_eq!((here.stats().pending, here.stats().exported), (4 * MIB, 4 * MIB));
        driver.hold_events(false);
        there.tick();
        here.tick();
        assert_eq!(driver.counts()[1], mapped - 2);
        assert_eq!((here.stats().pending, here.stats().exported), (0, 0));
    });
}

#[test]
fn a_capture_survives_imports() {
    on_stand_in("a_capture_survives_imports", &[], &[], |driver| {
        let (here, there) = (heap(CONF), heap(CONF));
        driver.push(0xC000);
        let stream = driver.create_stream();
        let block = here.alloc(4 * MIB, StreamId(stream)).unwrap();
        there.begin_capture(xseg::PoolId(1, 1), xseg::StreamFilter::Streams(vec![StreamId(stream)])).unwrap();
        here.begin_capture(xseg::PoolId(1, 1), xseg::StreamFilter::Streams(vec![StreamId(stream)])).unwrap();
        driver.capture(stream);
        let kept = import(&here, &block, &there);
        drop(import(&here, &block, &there));
        let mapped = driver.counts()[1];
        there.tick();
        here.tick();
        assert_eq!(driver.counts()[1], mapped, "nothing is proven while it lasts");
        assert!(!driver.end_capture(), "the capture broke");
        there.end_capture(xseg::PoolId(1, 1)).unwrap();
        here.end_capture(xseg::PoolId(1, 1)).unwrap();
        there.tick();
        assert_eq!(driver.counts()[1], mapped - 2);
        drop(kept);
    });
}
