//! Streams of other devices, on the stand-in driver: see `cuda_fake.rs`.
#![cfg(all(feature = "cuda", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

#[path = "fake_cuda/clients.rs"]
mod clients;
#[path = "fake_cuda/control.rs"]
mod control;

use clients::{all, heap};
use control::{Control, on_stand_in};
use cudarc::driver::{CudaContext, DevicePtr};
use xseg::units::MIB;
use xseg::{DeviceBuffer, Error, Heap, PoolId, StreamFilter, StreamId};

const CONF: &str = "backend:cuda=0,peers:1,limit:64MiB,reserve:4GiB,growth:exact,wait_limit:0s";
const S0: StreamId = StreamId(0);

/// Streams of device 0 and of device 1; device 0 is current afterwards.
fn streams(driver: &Control) -> [StreamId; 2] {
    driver.push(0xC100);
    let theirs = StreamId(driver.create_stream());
    driver.push(0xC000);
    [StreamId(driver.create_stream()), theirs]
}

/// The heap's whole memory is in use until `busy` has finished, and free for all afterwards.
fn waits_for(driver: &Control, heap: &Heap, busy: i32, declare: impl FnOnce(&xseg::Allocation)) {
    let block = heap.alloc(64 * MIB, S0).unwrap();
    driver.busy(busy);
    declare(&block);
    drop(block);
    heap.tick();
    assert_eq!(heap.stats().pending, 64 * MIB);
    assert!(heap.alloc(64 * MIB, S0).is_err(), "device {busy} still works on it");
    assert_eq!(heap.trim().released, 0);
    driver.busy(-1);
    heap.tick();
    drop(heap.alloc(64 * MIB, S0).unwrap());
    heap.check().unwrap();
}

#[test]
fn a_block_waits_for_streams_of_other_devices() {
    on_stand_in("a_block_waits_for_streams_of_other_devices", &[], &[], |driver| {
        let heap = heap(CONF);
        let [ours, theirs] = streams(driver);
        waits_for(driver, &heap, 0, |block| block.record_use(ours).unwrap());
        waits_for(driver, &heap, 1, |block| block.record_use(theirs).unwrap());
        waits_for(driver, &heap, 1, |block| block.record_use_on(theirs, 1).unwrap());
        // Default streams have the same handles on all devices.
        for handle in [0, 1, 2] {
            waits_for(driver, &heap, 1, |block| block.record_use_on(StreamId(handle), 1).unwrap());
        }
        // Whatever device is current.
        driver.push(0xC100);
        waits_for(driver, &heap, 1, |block| block.record_use(theirs).unwrap());
        assert_eq!(driver.current(), 0xC100);
        let missing = heap.alloc(MIB, S0).unwrap();
        assert!(
            matches!(missing.record_use_on(theirs, 7), Err(Error::InvalidArgument(why)) if why.contains("device 7 does not exist"))
        );
    });
}

#[test]
fn a_use_on_another_device_is_declared_once() {
    on_stand_in("a_use_on_another_device_is_declared_once", &[], &[], |driver| {
        let heap = heap(CONF);
        let [_, theirs] = streams(driver);
        let block = heap.alloc(MIB, S0).unwrap();
        for _ in 0..3 {
            block.record_use(theirs).unwrap();
            block.record_use_on(theirs, 1).unwrap();
            block.record_use_on(S0, 0).unwrap();
        }
        let events = driver.count(3);
        driver.clear_log();
        drop(block);
        let recorded = format!(" {:x} = 0", theirs.0);
        let log = driver.log();
        let behind = log.iter().filter(|line| line.starts_with("cuEventRecord") && line.ends_with(&recorded)).count();
        assert_eq!(behind, 1, "{log:#?}");
        assert!(driver.count(3) <= events + 1, "the event on the other device is gone again");
    });
}

#[test]
fn a_stream_of_another_device_gets_no_memory() {
    on_stand_in("a_stream_of_another_device_gets_no_memory", &[], &[], |driver| {
        let heap = heap(CONF);
        let [ours, theirs] = streams(driver);
        let refused = |result: Result<(), Error>| match result {
            Err(Error::InvalidArgument(why)) => assert!(why.contains("is of another device than the heap, 0"), "{why}"),
            other => panic!("{other:?}"),
        };
        refused(heap.alloc(MIB, theirs).map(drop));
        refused(heap.begin_capture(PoolId(1, 1), StreamFilter::Streams(vec![ours, theirs])));
        assert_eq!(heap.stats().reserved, 0);
        drop(heap.alloc(MIB, ours).unwrap());
        heap.begin_capture(PoolId(1, 1), StreamFilter::Streams(vec![ours])).unwrap();
        heap.end_capture(PoolId(1, 1)).unwrap();
    });
}

#[test]
fn a_stream_that_is_gone_is_waited_for_with_all_of_its_device() {
    on_stand_in("a_stream_that_is_gone_is_waited_for_with_all_of_its_device", &[], &[], |driver| {
        let heap = heap(CONF);
        let [_, theirs] = streams(driver);
        waits_for(driver, &heap, 1, |block| {
            block.record_use(theirs).unwrap();
            driver.destroy_stream(theirs.0);
            driver.push(0xC000);
            assert_eq!(driver.create_stream(), theirs.0, "the handle is another stream's now, of this device");
            driver.clear_log();
        });
        let log = driver.log();
        assert!(log.iter().any(|line| line.starts_with("cuCtxRecordEvent c100 ")), "{log:#?}");
    });
}

#[test]
fn a_stream_of_another_device_that_captures_is_asked_again() {
    on_stand_in("a_stream_of_another_device_that_captures_is_asked_again", &[], &[], |driver| {
        let heap = heap(CONF);
        let [_, theirs] = streams(driver);
        let block = heap.alloc(64 * MIB, S0).unwrap();
        block.record_use(theirs).unwrap();
        driver.capture(theirs.0);
        drop(block);
        for _ in 0..3 {
            heap.tick();
            assert_eq!(heap.stats().pending, 64 * MIB);
        }
        assert!(!driver.end_capture(), "no event became part of it");
        heap.tick();
        assert_eq!(heap.stats().pending, 0);
        drop(heap.alloc(64 * MIB, S0).unwrap());
    });
}

/// A stream that captures cannot be asked whose it is.
#[test]
fn a_stream_that_was_first_seen_in_a_capture_may_be_anyones() {
    on_stand_in("a_stream_that_was_first_seen_in_a_capture_may_be_anyones", &[], &[], |driver| {
        let heap = heap(CONF);
        let both = streams(driver);
        for (device, stream) in both.into_iter().enumerate() {
            let block = heap.alloc(64 * MIB, S0).unwrap();
            driver.capture(stream.0);
            block.record_use(stream).unwrap();
            drop(block);
            heap.tick();
            assert_eq!(heap.stats().pending, 64 * MIB);
            driver.busy(device as i32);
            assert!(!driver.end_capture());
            heap.tick();
            assert_eq!(heap.stats().pending, 64 * MIB, "device {device}");
            driver.busy(-1);
            heap.tick();
            assert_eq!(heap.stats().pending, 0, "device {device}");
        }
        drop(heap.alloc(MIB, both[0]).unwrap());
        assert!(matches!(heap.alloc(MIB, both[1]), Err(Error::InvalidArgument(_))));
        // What was learnt holds within a capture, too.
        driver.capture(both[1].0);
        assert!(matches!(heap.alloc(MIB, both[1]), Err(Error::InvalidArgument(_))));
        assert!(!driver.end_capture());
        waits_for(driver, &heap, 1, |block| {
            driver.capture(both[1].0);
            block.record_use(both[1]).unwrap();
            assert!(!driver.end_capture());
        });
    });
}

#[test]
fn captures_of_other_devices_are_left_alone() {
    on_stand_in("captures_of_other_devices_are_left_alone", &[], &[], |driver| {
        let (here, there) = (heap(CONF), heap("backend:cuda=1,limit:64MiB,reserve:4GiB"));
        let [_, theirs] = streams(driver);
        driver.push(0xC100);
        let other = driver.create_stream();
        // First seen in a capture, and then in no capture: the same stream.
        let [first, second] = [(); 2].map(|()| here.alloc(16 * MIB, S0).unwrap());
        driver.capture(theirs.0);
        first.record_use_on(theirs, 1).unwrap();
        drop(first);
        assert!(!driver.end_capture());
        second.record_use_on(theirs, 1).unwrap();
        drop(second);
        driver.capture(theirs.0);
        here.tick();
        assert!(!driver.end_capture());
        here.tick();
        assert_eq!(here.stats().pending, 0);
        // A stream that is gone, while another one captures.
        let block = here.alloc(16 * MIB, S0).unwrap();
        block.record_use(theirs).unwrap();
        driver.destroy_stream(theirs.0);
        there.begin_capture(PoolId(1, 1), StreamFilter::All).unwrap();
        driver.capture(other);
        drop(block);
        here.tick();
        assert!(!driver.end_capture());
        assert_eq!(here.stats().pending, 16 * MIB);
        there.end_capture(PoolId(1, 1)).unwrap();
        here.tick();
        assert_eq!(here.stats().pending, 0);
        // The end of a heap is the end of what it announced.
        there.begin_capture(PoolId(2, 1), StreamFilter::All).unwrap();
        drop(there);
        let gone = StreamId(driver.create_stream());
        let block = here.alloc(16 * MIB, S0).unwrap();
        block.record_use(gone).unwrap();
        driver.destroy_stream(gone.0);
        drop(block);
        here.tick();
        assert_eq!(here.stats().pending, 0);
    });
}

#[test]
fn a_stream_is_whose_it_is_whatever_is_said() {
    on_stand_in("a_stream_is_whose_it_is_whatever_is_said", &[], &[], |driver| {
        let heap = heap(CONF);
        let [ours, _] = streams(driver);
        waits_for(driver, &heap, 0, |block| block.record_use_on(ours, 1).unwrap());
    });
}

#[test]
fn a_heap_that_ends_waits_for_other_devices() {
    on_stand_in("a_heap_that_ends_waits_for_other_devices", &[], &[], |driver| {
        let heap = heap(CONF);
        let [_, theirs] = streams(driver);
        let block = heap.alloc(64 * MIB, S0).unwrap();
        block.record_use(theirs).unwrap();
        driver.clear_log();
        heap.shut_down();
        let log = driver.log();
        let at = |name: &str, end: &str| log.iter().position(|line| line.starts_with(name) && line.ends_with(end));
        let recorded = at("cuEventRecord", &format!(" {:x} = 0", theirs.0)).unwrap();
        assert!(
            Some(recorded) < at("cuCtxSynchronize", "") && at("cuCtxSynchronize", "") < at("cuMemUnmap", ""),
            "{log:#?}"
        );
        drop((block, heap));
        let left = all(driver);
        assert_eq!((left[0], left[1], left[3], left[4]), (0, 0, 0, 0));
    });
}

/// Many threads wait for one block whose event is refused at first.
#[test]
fn waiting_threads_do_not_keep_each_other_waiting() {
    on_stand_in("waiting_threads_do_not_keep_each_other_waiting", &[], &[], |driver| {
        let heap = heap("backend:cuda=0,limit:64MiB,reserve:4GiB,growth:exact,wait_limit:60s");
        let [_, theirs] = streams(driver);
        let block = heap.alloc(64 * MIB, S0).unwrap();
        block.record_use(theirs).unwrap();
        driver.capture(theirs.0);
        drop(block);
        let blocks = std::thread::scope(|scope| {
            let asking: Vec<_> = (0..16).map(|_| scope.spawn(|| heap.alloc(2 * MIB, S0))).collect();
            std::thread::sleep(std::time::Duration::from_millis(200));
            assert!(!driver.end_capture());
            asking.into_iter().map(|thread| thread.join().unwrap().unwrap()).collect::<Vec<_>>()
        });
        assert_eq!(blocks.len(), 16);
    });
}

#[test]
fn streams_of_other_devices_leave_no_traces() {
    on_stand_in("streams_of_other_devices_leave_no_traces", &[], &[], |driver| {
        let (here, there) =
            (heap("backend:cuda=0,limit:64MiB,reserve:4GiB"), heap("backend:cuda=1,limit:64MiB,reserve:4GiB"));
        let block = there.alloc(MIB, S0).unwrap();
        let ours = here.alloc(MIB, S0).unwrap();
        driver.push(0xC100);
        // More than a heap knows streams.
        for _ in 0..5_000 {
            let stream = StreamId(driver.create_stream());
            // As whoever looks for the heap of a block.
            assert!(matches!(here.record_use(block.address(), stream), Err(Error::InvalidPointer { .. })));
            block.record_use(stream).unwrap();
            ours.record_use(stream).unwrap();
            there.retire_stream(stream).unwrap();
            driver.destroy_stream(stream.0);
            driver.clear_log();
        }
        drop((block, ours));
    });
}

/// One driver call after the other fails: nothing is given out early, lost, or left different.
#[test]
fn any_call_for_another_device_may_fail() {
    on_stand_in("any_call_for_another_device_may_fail", &[], &[], |driver| {
        let heap = heap(CONF);
        let mut refused = 0;
        for turn in 1..200 {
            // One that is not known yet.
            let [_, theirs] = streams(driver);
            let block = heap.alloc(64 * MIB, S0).unwrap();
            driver.busy(1);
            driver.fail_at(turn, 999);
            let declared = block.record_use(theirs);
            if declared.is_ok() {
                drop(block);
            } else {
                refused += 1;
                block.record_use(theirs).unwrap();
                drop(block);
            }
            let over = driver.fail_pending();
            driver.fail_at(0, 0);
            heap.tick();
            assert_eq!(heap.stats().pending, 64 * MIB, "call {turn}");
            driver.busy(-1);
            heap.tick();
            heap.tick();
            assert_eq!((heap.stats().pending, driver.current()), (0, 0xC000), "call {turn}");
            assert_eq!(driver.capture_mode(), 0, "call {turn}");
            if over {
                assert!(turn > 10 && refused > 3, "{turn} calls, {refused} refused");
                drop(heap);
                let left = all(driver);
                assert_eq!((left[0], left[3], left[4]), (0, 0, 0), "handles, events, contexts");
                return;
            }
        }
        panic!("the calls never end");
    });
}

#[test]
fn a_buffer_used_on_another_device() {
    on_stand_in("a_buffer_used_on_another_device", &[], &[], |driver| {
        let heap = heap(CONF);
        let (here, there) = (CudaContext::new(0).unwrap(), CudaContext::new(1).unwrap());
        // From the second stream on `cudarc` orders them.
        let _second = (here.new_stream().unwrap(), there.new_stream().unwrap());
        // Both have handle 0.
        let (ours, theirs) = (here.default_stream(), there.default_stream());
        let buffer = DeviceBuffer::<u8>::zeros(&heap, &ours, 64 << 20).unwrap();
        buffer.use_on(&theirs).unwrap();
        driver.clear_log();
        drop(buffer.device_ptr(&theirs));
        let log = driver.log();
        assert!(log.iter().any(|line| line.starts_with("cuStreamSynchronize")), "{log:#?}");
        driver.busy(1);
        drop(buffer);
        heap.tick();
        assert_eq!(heap.stats().pending, 64 * MIB);
        driver.busy(-1);
        heap.tick();
        assert_eq!(heap.stats().pending, 0);
    });
}

/// A life with another device current, in which one call after the other is refused once: nothing stays behind.
#[test]
fn one_refusal_leaves_everything_as_found() {
    on_stand_in("one_refusal_leaves_everything_as_found", &[], &[], |driver| {
        let life = || -> Result<(), Error> {
            let heap = Heap::builder().conf("backend:cuda=0,peers:all,limit:512MiB,reserve:4GiB")?.build()?;
            drop(heap.alloc(5 * MIB, S0)?);
            heap.trim();
            Ok(())
        };
        life().unwrap();
        driver.push(0xC100);
        let before = all(driver);
        for turn in 1..500 {
            driver.clear_log();
            driver.fail_at(turn, 999);
            let done = life();
            let over = driver.fail_pending();
            driver.fail_at(0, 0);
            let log = driver.log();
            let name = log.iter().find(|line| line.ends_with(" = 999"));
            assert_eq!((driver.current(), driver.capture_mode()), (0xC100, 0), "{name:?}, turn {turn}");
            assert_eq!(all(driver), before, "{name:?}, turn {turn}: {done:?}");
            if over {
                assert!(turn > 100, "{turn}");
                return;
            }
        }
        panic!("more calls than expected");
    });
}
