//! Streams that come and go, on the stand-in driver: see `cuda_fake.rs`.
#![cfg(all(feature = "cuda", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

#[path = "fake_cuda/clients.rs"]
mod clients;
#[path = "fake_cuda/control.rs"]
mod control;

use clients::heap;
use control::{Control, on_stand_in};
use cudarc::driver::{CudaContext, DevicePtr};
use xseg::units::MIB;
use xseg::{DeviceBuffer, PoolId, StreamFilter, StreamId};

#[test]
fn a_use_on_a_retired_stream_whose_handle_is_used_again() {
    on_stand_in("a_use_on_a_retired_stream_whose_handle_is_used_again", &[], &[], |driver| {
        let heap = heap("backend:cuda,limit:8MiB,reserve:4GiB,wait_limit:0s,growth:exact");
        driver.push(0xC000);
        let [own, user] = [(); 2].map(|()| StreamId(driver.create_stream()));
        let block = heap.alloc(8 * MIB, own).unwrap();
        block.record_use(user).unwrap();
        driver.hold_events(true);
        heap.retire_stream(user).unwrap();
        driver.destroy_stream(user.0);
        let again = driver.create_stream();
        assert_eq!(again, user.0, "the handle is used again");
        driver.clear_log();
        drop(block);
        let log = driver.log();
        assert!(
            !log.iter().any(|line| line.starts_with("cuEventRecord") && line.contains(&format!(" {again:x} "))),
            "{log:#?}"
        );
        assert!(heap.alloc(8 * MIB, own).is_err(), "the retired stream's work may still run");
        driver.hold_events(false);
        heap.tick();
        heap.tick();
        drop(heap.alloc(8 * MIB, own).unwrap());
    });
}

#[test]
fn a_use_on_another_threads_own_stream() {
    on_stand_in("a_use_on_another_threads_own_stream", &[], &[], |driver| {
        let heap = heap("backend:cuda,limit:8MiB,reserve:4GiB,wait_limit:0s,growth:exact");
        driver.push(0xC000);
        let own = StreamId(driver.create_stream());
        let block = heap.alloc(8 * MIB, own).unwrap();
        std::thread::scope(|scope| scope.spawn(|| block.record_use(StreamId(2)).unwrap()).join().unwrap());
        driver.clear_log();
        drop(block);
        let log = driver.log();
        assert!(
            !log.iter().any(|line| line.starts_with("cuEventRecord") && line.ends_with(" 2 = 0")),
            "an event on this thread's stream says nothing of that thread's: {log:#?}"
        );
        heap.tick();
        heap.tick();
        drop(heap.alloc(8 * MIB, own).unwrap());
    });
}

#[test]
fn a_capture_on_a_stream_whose_handle_was_retired() {
    on_stand_in("a_capture_on_a_stream_whose_handle_was_retired", &[], &[], |driver| {
        let heap = heap("backend:cuda,limit:64MiB,reserve:4GiB");
        driver.push(0xC000);
        let stream = StreamId(driver.create_stream());
        drop(heap.alloc(MIB, stream).unwrap());
        heap.retire_stream(stream).unwrap();
        driver.destroy_stream(stream.0);
        assert_eq!(driver.create_stream(), stream.0, "the handle is used again");
        heap.begin_capture(PoolId(1, 1), StreamFilter::All).unwrap();
        driver.capture(stream.0);
        let block = heap.alloc(MIB, stream);
        assert!(!driver.end_capture());
        heap.end_capture(PoolId(1, 1)).unwrap();
        drop(block.unwrap());
    });
}

#[test]
fn without_identities_a_retired_handle_is_used_again() {
    on_stand_in("without_identities_a_retired_handle_is_used_again", &[], &["cuStreamGetId"], |driver| {
        let heap = heap("backend:cuda,limit:64MiB,reserve:4GiB");
        driver.push(0xC000);
        let stream = StreamId(driver.create_stream());
        drop(heap.alloc(MIB, stream).unwrap());
        heap.retire_stream(stream).unwrap();
        driver.destroy_stream(stream.0);
        assert_eq!(driver.create_stream(), stream.0, "the handle is used again");
        drop(heap.alloc(MIB, stream).unwrap());
    });
}

/// Without events of the context, an event on this thread's own stream says nothing of another thread's.
#[test]
fn threads_own_streams_without_context_events() {
    on_stand_in("threads_own_streams_without_context_events", &[], &["cuCtxRecordEvent"], |driver| {
        let heap = heap("backend:cuda,limit:64MiB,reserve:4GiB");
        let elsewhere = || drop(heap.alloc(8 * MIB, StreamId(2)).unwrap());
        std::thread::scope(|scope| scope.spawn(elsewhere).join().unwrap());
        driver.clear_log();
        heap.tick();
        let log = driver.log();
        let recorded: Vec<&String> = log.iter().filter(|line| line.starts_with("cuEventRecord")).collect();
        // The legacy stream waits for those of all threads.
        assert!(!recorded.is_empty() && recorded.iter().all(|line| line.ends_with(" 1 = 0")), "{recorded:?}");
    });
}

/// Else its memory could be given away while that stream still uses it.
#[test]
fn a_use_that_the_heap_cannot_be_told_of_is_waited_for() {
    on_stand_in("a_use_that_the_heap_cannot_be_told_of_is_waited_for", &[], &[], |driver| {
        let heap = heap("backend:cuda,limit:64MiB,reserve:4GiB");
        let context = CudaContext::new(0).unwrap();
        let (own, other) = (context.new_stream().unwrap(), context.new_stream().unwrap());
        let buffer = DeviceBuffer::<u8>::zeros(&heap, &own, 1000).unwrap();
        let synchronized = |driver: &Control| {
            let line = format!("cuStreamSynchronize {:x} = 0", other.cu_stream() as u64);
            driver.log().contains(&line)
        };
        drop(buffer.device_ptr(&other));
        assert!(!synchronized(driver));
        heap.retire_stream(StreamId(other.cu_stream() as u64)).unwrap();
        drop(buffer.device_ptr(&other));
        assert!(synchronized(driver));
    });
}
