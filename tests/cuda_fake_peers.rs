//! Access of other devices that is granted at run time (`Heap::enable_peer`), on the stand-in driver: who reaches what, by how
//! many calls, and what is left when one fails. See `cuda_fake.rs`.
#![cfg(all(feature = "cuda", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

#[path = "fake_cuda/clients.rs"]
mod clients;
#[path = "fake_cuda/control.rs"]
mod control;

use clients::heap;
use control::{Control, on_stand_in};
use std::sync::Arc;
use xseg::backend::cuda::{CudaBackend, CudaOptions};
use xseg::backend::fault::{FaultPlan, FaultRule, FaultyBackend};
use xseg::backend::gauge::GaugeBackend;
use xseg::error::DriverCall;
use xseg::units::{GRANULE, MIB};
use xseg::{Allocation, Error, Heap, StreamId};

const CONF: &str = "backend:cuda,limit:32MiB,reserve:4GiB,growth:exact,handle_max:2MiB,wait_limit:0s";
/// Four devices, of which 2 has no way to any other.
const FOUR: [(&str, &str); 2] = [("FAKE_CUDA_DEVICES", "4"), ("FAKE_CUDA_FAR", "2")];

fn alloc(heap: &Heap, mib: u64) -> Allocation {
    heap.alloc(mib * MIB, StreamId(0)).unwrap()
}

/// Every granule that the heap has mapped, with the devices that reach it, by bit.
fn reach(driver: &Control, heap: &Heap) -> Vec<(u64, u64)> {
    let mut found = Vec::new();
    for region in heap.layout() {
        let first = region.address / GRANULE * GRANULE;
        found
            .extend((first..region.address + region.bytes).step_by(GRANULE as usize).map(|at| (at, driver.access(at))));
    }
    found.dedup();
    found
}

/// All that the heap has mapped is reached by exactly these.
fn is_reached_by(driver: &Control, heap: &Heap, devices: u64) {
    let found = reach(driver, heap);
    assert!(!found.is_empty() && found.iter().all(|one| one.1 == devices), "{devices:b}: {found:x?}");
}

/// How many devices each call that sets access names.
fn named(driver: &Control) -> Vec<u32> {
    let log = driver.log();
    let set = log.iter().filter_map(|line| line.strip_prefix("cuMemSetAccess "));
    set.map(|line| u32::from_str_radix(line.split(' ').nth(2).unwrap(), 16).unwrap()).collect()
}

fn maps(driver: &Control) -> usize {
    driver.log().iter().filter(|line| line.starts_with("cuMemMap ")).count()
}

#[test]
fn what_is_mapped_and_what_comes_later() {
    on_stand_in("what_is_mapped_and_what_comes_later", &FOUR, &[], |driver| {
        let heap = heap(CONF);
        driver.push(0xC100); // device 1's
        driver.set_capture_mode(1);
        let _first = alloc(&heap, 10);
        is_reached_by(driver, &heap, 0b0001);
        let before = heap.stats().driver_calls.set_access;
        driver.clear_log();
        heap.enable_peer(1).unwrap();
        is_reached_by(driver, &heap, 0b0011);
        assert_eq!(named(driver), [1; 5], "one call a mapping, for the new one alone");
        assert_eq!(heap.stats().driver_calls.set_access, before + 5);
        driver.clear_log();
        let _second = alloc(&heap, 8);
        assert_eq!((named(driver), maps(driver)), (vec![2; 4], 4), "the owner and the peer in one call");
        heap.enable_peer(3).unwrap();
        let _third = alloc(&heap, 4);
        is_reached_by(driver, &heap, 0b1011);
        assert_eq!(heap.backend().peers(), [1, 3]);
        driver.clear_log();
        for device in [1, 3, 0] {
            heap.enable_peer(device).unwrap();
        }
        assert!(driver.log().is_empty(), "who has access costs no call: {:?}", driver.log());
        assert_eq!((driver.current(), driver.capture_mode()), (0xC100, 1));
        heap.check().unwrap();
    });
}

#[test]
fn access_goes_where_memory_moves() {
    on_stand_in("access_goes_where_memory_moves", &FOUR, &[], |driver| {
        let heap = heap(CONF);
        let mut blocks: Vec<_> = (0..8).map(|_| alloc(&heap, 4)).collect();
        heap.enable_peer(3).unwrap();
        for at in (0..4).rev() {
            drop(blocks.remove(2 * at));
        }
        driver.clear_log();
        let moved = alloc(&heap, 12);
        assert!(heap.stats().handles_moved > 0);
        is_reached_by(driver, &heap, 0b1001);
        assert!(!named(driver).is_empty() && named(driver).iter().all(|count| *count == 2));
        // One that comes after moves, with what they left behind.
        heap.enable_peer(1).unwrap();
        is_reached_by(driver, &heap, 0b1011);
        drop((blocks, moved));
        heap.tick();
        heap.check().unwrap();
    });
}

#[test]
fn imports_are_reached_too() {
    on_stand_in("imports_are_reached_too", &FOUR, &[], |driver| {
        let (here, there) = (heap(CONF), heap(CONF));
        let (one, two) = (alloc(&here, 4), alloc(&here, 4));
        let import = |block: &Allocation| there.import(here.export(block.address()).unwrap()).unwrap();
        let before = import(&one);
        there.enable_peer(1).unwrap();
        let after = import(&two);
        assert_eq!([&before, &after].map(|imported| driver.access(imported.address())), [0b0011; 2]);
        is_reached_by(driver, &here, 0b0001);
    });
}

#[test]
fn devices_that_get_no_access() {
    on_stand_in("devices_that_get_no_access", &FOUR, &[], |driver| {
        let heap = heap(CONF);
        let _block = alloc(&heap, 6);
        driver.clear_log();
        let error = heap.enable_peer(4).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument(_)));
        assert!(error.to_string().contains("device 4 does not exist, the driver shows 4"), "{error}");
        assert!(matches!(heap.enable_peer(u32::MAX).unwrap_err(), Error::InvalidArgument(_)));
        let error = heap.enable_peer(2).unwrap_err();
        assert_eq!(error, Error::Unreachable { device: 2, of: 0 });
        assert!(error.to_string().contains("`cudaMemcpyPeerAsync`"), "{error}");
        assert!(named(driver).is_empty());
        is_reached_by(driver, &heap, 0b0001);
        heap.shut_down();
        assert_eq!(heap.enable_peer(1).unwrap_err(), Error::ShutDown);
    });
}

#[test]
fn memory_of_no_gpu_has_no_peers() {
    for (conf, kind) in [("backend:host", "host"), ("backend:sim,limit:64MiB", "sim")] {
        let heap = heap(conf);
        let error = heap.enable_peer(1).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument(_)));
        let text = error.to_string();
        assert!(text.contains(&format!("the {kind} backend")) && text.contains("`backend:cuda`"), "{text}");
        heap.enable_peer(0).unwrap();
    }
}

#[test]
fn a_capture_stays_whole_and_an_old_device_is_waited_for() {
    let env = [("FAKE_CUDA_COMPUTE", "70")];
    on_stand_in("a_capture_stays_whole_and_an_old_device_is_waited_for", &env, &[], |driver| {
        let waits = |driver: &Control| driver.log().iter().filter(|line| line.starts_with("cuCtxSynchronize")).count();
        for captured in [true, false] {
            let heap = heap(CONF);
            driver.push(0xC000);
            let stream = StreamId(driver.create_stream());
            let _block = heap.alloc(6 * MIB, stream).unwrap();
            let pool = xseg::PoolId(0, 1);
            if captured {
                heap.begin_capture(pool, xseg::StreamFilter::Streams(vec![stream])).unwrap();
                driver.capture(stream.0);
            }
            driver.clear_log();
            heap.enable_peer(1).unwrap();
            is_reached_by(driver, &heap, 0b11);
            assert_eq!(waits(driver), usize::from(!captured));
            assert!(!driver.end_capture());
            if captured {
                heap.end_capture(pool).unwrap();
            }
            driver.pop_all();
        }
    });
}

#[test]
fn those_of_the_policy_and_of_a_shared_backend() {
    on_stand_in("those_of_the_policy_and_of_a_shared_backend", &FOUR, &[], |driver| {
        let configured = heap(&format!("{CONF},peers:1"));
        let _block = alloc(&configured, 4);
        driver.clear_log();
        configured.enable_peer(1).unwrap();
        assert!(driver.log().is_empty());
        configured.enable_peer(3).unwrap();
        is_reached_by(driver, &configured, 0b1011);
        // What one heap's peer gets of a backend, another's has to ask for, for what is mapped already.
        let backend = Arc::new(CudaBackend::open(0, &CudaOptions::default()).unwrap());
        let watched = Arc::new(GaugeBackend::new(backend));
        let made = || Heap::builder().conf(CONF).unwrap().backend(watched.clone()).build().unwrap();
        let (one, two) = (made(), made());
        let (_one, _two) = (alloc(&one, 4), alloc(&two, 4));
        one.enable_peer(1).unwrap();
        is_reached_by(driver, &one, 0b0011);
        is_reached_by(driver, &two, 0b0001);
        two.enable_peer(1).unwrap();
        is_reached_by(driver, &two, 0b0011);
        driver.clear_log();
        made().enable_peer(1).unwrap();
        assert!(named(driver).is_empty(), "what is mapped from now on has it");
    });
}

/// After a refused call the thread's context or capture mode may be left, by the driver's own word.
fn tidy(driver: &Control) {
    driver.fail_at(0, 0);
    driver.pop_all();
    driver.set_capture_mode(0);
}

#[test]
fn any_call_of_a_grant_may_fail() {
    on_stand_in("any_call_of_a_grant_may_fail", &FOUR, &[], |driver| {
        for turn in 1.. {
            let heap = heap(CONF);
            let mut blocks = vec![alloc(&heap, 6)];
            heap.enable_peer(3).unwrap();
            let before = reach(driver, &heap);
            driver.clear_log();
            driver.fail_at(turn, 999);
            let done = heap.enable_peer(1);
            let missed = driver.fail_pending();
            tidy(driver);
            match done {
                Ok(()) => is_reached_by(driver, &heap, 0b1011),
                Err(error) => {
                    assert!(error.to_string().contains("CUDA_ERROR_UNKNOWN"), "turn {turn}: {error}");
                    assert_eq!((reach(driver, &heap), heap.backend().peers()), (before, vec![3]), "turn {turn}");
                    blocks.push(alloc(&heap, 4));
                    is_reached_by(driver, &heap, 0b1001);
                    heap.enable_peer(1).unwrap();
                }
            }
            blocks.push(alloc(&heap, 6));
            is_reached_by(driver, &heap, 0b1011);
            heap.check().unwrap();
            if missed {
                assert!(turn > 3 + 3 * 4, "{turn} turns");
                break;
            }
        }
    });
}

type Faulty = Arc<FaultyBackend<CudaBackend>>;

fn faulty() -> (Faulty, Heap) {
    let backend = CudaBackend::open(0, &CudaOptions::default()).unwrap();
    let backend = Arc::new(FaultyBackend::new(Arc::new(backend)));
    let heap = Heap::builder().conf(CONF).unwrap().backend(backend.clone()).build().unwrap();
    (backend, heap)
}

fn only_access(rule: FaultRule) -> FaultPlan {
    FaultPlan { only: Some(DriverCall::SetAccess), ..FaultPlan::new(rule, true) }
}

#[test]
fn taking_back_is_tried_again() {
    on_stand_in("taking_back_is_tried_again", &FOUR, &[], |driver| {
        for turn in 1.. {
            let (backend, heap) = faulty();
            let _block = alloc(&heap, 6);
            // The grant of the third mapping is refused, and on the way back any call of the driver's.
            backend.arm(only_access(FaultRule::At(3)));
            driver.fail_at(turn, 999);
            let error = heap.enable_peer(1).unwrap_err();
            let missed = driver.fail_pending();
            tidy(driver);
            assert!(matches!(error, Error::Driver(_)));
            is_reached_by(driver, &heap, 0b0001);
            backend.disarm();
            heap.enable_peer(1).unwrap();
            is_reached_by(driver, &heap, 0b0011);
            if missed {
                assert!(turn > 3 + 4 * 4, "{turn} turns");
                break;
            }
        }
    });
}

#[test]
fn what_cannot_be_taken_back_stays_and_the_heap_works() {
    on_stand_in("what_cannot_be_taken_back_stays_and_the_heap_works", &FOUR, &[], |driver| {
        let (backend, heap) = faulty();
        let _block = alloc(&heap, 6);
        backend.arm(only_access(FaultRule::From(3)));
        backend.clear_log();
        let error = heap.enable_peer(1).unwrap_err();
        assert!(matches!(error, Error::Driver(refused) if refused.call == DriverCall::SetAccess));
        assert_eq!(backend.log().len(), 3 + 2 * 2, "each is tried twice");
        backend.disarm();
        let devices: Vec<u64> = reach(driver, &heap).into_iter().map(|one| one.1).collect();
        assert_eq!(devices, [0b11, 0b11, 0b01]);
        let _more = alloc(&heap, 4);
        assert_eq!(reach(driver, &heap).last().unwrap().1, 0b01, "the list is as it was");
        heap.enable_peer(1).unwrap();
        is_reached_by(driver, &heap, 0b11);
        heap.check().unwrap();
    });
}

/// Of two heaps on one backend the other has given access already.
#[test]
fn what_another_heap_has_given_is_not_taken_away() {
    on_stand_in("what_another_heap_has_given_is_not_taken_away", &FOUR, &[], |driver| {
        let backend = CudaBackend::open(0, &CudaOptions::default()).unwrap();
        let backend = Arc::new(FaultyBackend::new(Arc::new(backend)));
        let make = || Heap::builder().conf(CONF).unwrap().backend(backend.clone()).build().unwrap();
        let (one, two) = (make(), make());
        one.enable_peer(1).unwrap();
        let _block = alloc(&two, 6);
        is_reached_by(driver, &two, 0b11);
        backend.arm(FaultPlan { only: Some(DriverCall::SetAccess), ..FaultPlan::new(FaultRule::At(3), true) });
        assert!(two.enable_peer(1).is_err());
        backend.disarm();
        is_reached_by(driver, &two, 0b11);
        two.enable_peer(1).unwrap();
        is_reached_by(driver, &two, 0b11);
    });
}
