//! What stands on the CUDA backend, on the stand-in driver: a heap, `cudarc` buffers, the kernels'
//! loader. See `cuda_fake.rs`.
#![cfg(all(feature = "cuda", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "the stand-in has no memory to harm")]

#[path = "fake_cuda/control.rs"]
mod control;

use control::{Control, on_stand_in};
use cudarc::driver::{CudaContext, DevicePtr, DevicePtrMut, DeviceSlice};
use std::sync::Arc;
use xseg::backend::cuda::memory::{Kernels, Mismatches, Stamp};
use xseg::backend::cuda::{CudaBackend, CudaOptions};
use xseg::units::MIB;
use xseg::{DeviceBuffer, Error, Heap, StreamId};

fn open() -> Arc<CudaBackend> {
    Arc::new(CudaBackend::open(0, &CudaOptions::default()).unwrap())
}

fn heap_on(backend: Arc<CudaBackend>) -> xseg::Result<Heap> {
    Heap::builder().conf("limit:256MiB,reserve:4GiB")?.backend(backend).build()
}

/// Everything that the stand-in counts.
fn all(driver: &Control) -> [u64; 9] {
    [0, 1, 2, 3, 4, 5, 6, 7, 8].map(|what| driver.count(what))
}

#[test]
fn a_heap_leaves_nothing_behind() {
    on_stand_in("a_heap_leaves_nothing_behind", &[], &[], |driver| {
        let heap = heap_on(open()).unwrap();
        let blocks: Vec<_> = (1..40).map(|size| heap.alloc(size * MIB / 5, StreamId(size % 3)).unwrap()).collect();
        assert!(driver.count(0) > 0 && driver.count(6) >= driver.count(0));
        heap.check().unwrap();
        drop(blocks);
        assert_eq!(heap.stats().allocated, 0);
        heap.trim();
        drop(heap);
        assert_eq!(all(driver), [0; 9]);
    });
}

#[test]
fn a_heap_survives_any_call_failing() {
    on_stand_in("a_heap_survives_any_call_failing", &[], &[], |driver| {
        let session = |driver: &Control, turn: u64| -> xseg::Result<()> {
            let heap = heap_on(open())?;
            // Opening is `cuda_fake.rs`'s matter; giving up the heap is not disturbed either.
            driver.clear_log();
            driver.fail_at(turn, 999);
            let mut first_error = None;
            let mut kept = Vec::new();
            for round in 0..12u64 {
                match heap.alloc((round % 5 + 1) * 9 * MIB, StreamId(0)) {
                    Ok(block) if round % 3 == 0 => kept.push(block),
                    Ok(block) => drop(block),
                    Err(error) => first_error = first_error.or(Some(error)),
                }
                heap.check().unwrap();
            }
            let missed = driver.fail_pending();
            driver.fail_at(0, 0);
            drop(kept);
            drop(heap);
            if missed { Err(Error::ShutDown) } else { first_error.map_or(Ok(()), Err) }
        };
        let (mut turn, mut refused) = (1, 0);
        loop {
            match session(driver, turn) {
                Err(Error::ShutDown) => break,
                Err(Error::Driver(error)) => {
                    assert!(error.reason.ends_with("CUDA_ERROR_UNKNOWN"), "turn {turn}: {error}");
                    refused += 1;
                }
                Err(error) => panic!("turn {turn}: {error}"),
                Ok(()) => {}
            }
            let left = all(driver);
            let log = driver.log();
            let name = log.iter().find(|line| line.ends_with(" = 999")).unwrap().split(' ').next().unwrap().to_owned();
            if ["cuCtxPopCurrent_v2", "cuThreadExchangeStreamCaptureMode"].contains(&name.as_str()) {
                driver.pop_all();
                driver.set_capture_mode(0);
            }
            assert_eq!(left, [0; 9], "{name} at turn {turn}");
            turn += 1;
        }
        assert!(turn > 30 && refused > 10, "{turn} turns, {refused} refused");
    });
}

#[test]
fn cudarc_takes_buffers() {
    on_stand_in("cudarc_takes_buffers", &[], &[], |driver| {
        let heap = heap_on(open()).unwrap();
        let context = CudaContext::new(0).unwrap();
        let (one, two) = (context.new_stream().unwrap(), context.new_stream().unwrap());
        let stream = one.cu_stream() as u64;
        driver.clear_log();
        let zeros = DeviceBuffer::<f32>::zeros(&heap, &one, 1000).unwrap();
        let address = zeros.address();
        assert!(driver.log().contains(&format!("cuMemsetD8Async {address:x} 0 fa0 {stream:x} = 0")));
        assert_eq!((zeros.len(), zeros.num_bytes(), zeros.allocation().stream()), (1000, 4000, StreamId(stream)));
        assert_eq!(heap.stats().allocated, 4096);

        let mut copy = DeviceBuffer::from_host(&heap, &one, &[1u64, 2, 3]).unwrap();
        assert_ne!(copy.address(), address);
        assert!(driver.log().contains(&format!("cuMemcpyHtoDAsync_v2 {:x} 18 {stream:x} = 0", copy.address())));
        assert_eq!(copy.to_host().unwrap().len(), 3);
        assert!(DeviceBuffer::<u8>::from_host(&heap, &one, &[]).unwrap().to_host().unwrap().is_empty());

        // On its own stream nothing waits; on another, the other waits, and then its own for that.
        let waits = |driver: &Control| {
            let log = driver.log();
            let streams = log.iter().filter_map(|line| line.strip_prefix("cuStreamWaitEvent "));
            streams.map(|line| line.split(' ').next().unwrap().to_owned()).collect::<Vec<_>>()
        };
        driver.clear_log();
        drop(copy.device_ptr_mut(&one));
        assert!(waits(driver).is_empty());
        drop(copy.device_ptr(&two));
        let (one_hex, two_hex) = (format!("{:x}", one.cu_stream() as u64), format!("{:x}", two.cu_stream() as u64));
        assert_eq!(waits(driver), [two_hex.as_str()]);
        drop(copy.device_ptr_mut(&one));
        assert_eq!(waits(driver), [two_hex.as_str(), one_hex.as_str()]);
        zeros.use_on(&two).unwrap();
        assert_eq!(waits(driver).last(), Some(&two_hex));

        drop((zeros, copy));
        assert_eq!(heap.stats().allocated, 0);
        context.check_err().unwrap();
        drop((heap, one, two, context));
        assert_eq!(all(driver), [0; 9]);
    });
}

#[test]
fn buffers_need_a_heap_on_cuda() {
    on_stand_in("buffers_need_a_heap_on_cuda", &[], &[], |_| {
        let stream = CudaContext::new(0).unwrap().default_stream();
        let heap = Heap::builder().conf("backend:sim,limit:64MiB").unwrap().build().unwrap();
        let error = DeviceBuffer::<u8>::zeros(&heap, &stream, 1).map(drop).unwrap_err();
        assert_eq!(error, Error::InvalidArgument("a DeviceBuffer needs a heap on the cuda backend".into()));
    });
}

#[test]
fn kernels_load_and_launch() {
    on_stand_in("kernels_load_and_launch", &[], &[], |driver| {
        let backend = open();
        let kernels = Kernels::load(backend.clone()).unwrap();
        let stream = backend.create_stream().unwrap();
        driver.clear_log();
        let stamp = Stamp { address: 0x1000, value: [1, 2], bytes: 16 };
        // SAFETY: the stand-in has no memory and runs no kernels, here and below.
        unsafe {
            kernels.fill(stream, 0x1000, 1 << 30, 7).unwrap();
            kernels.check(stream, 0x1000, 100, 7).unwrap();
            kernels.stamp(stream, &vec![stamp; 65_000]).unwrap();
            kernels.check_stamps(stream, &vec![stamp; 65_000]).unwrap();
            kernels.copy(stream, 0x2000, 0x1000, 4096).unwrap();
            kernels.spin(stream, 1).unwrap();
        }
        let log = driver.log();
        let grids: Vec<(u64, u64)> = log
            .iter()
            .filter(|line| line.starts_with("cuLaunchKernel"))
            .map(|line| {
                let number = |word: &str| u64::from_str_radix(word, 16).unwrap();
                let words: Vec<&str> = line.split(' ').collect();
                (number(words[2]), number(words[3]))
            })
            .collect();
        assert_eq!(grids, [(1056, 256), (1, 256), (1016, 64), (1016, 64), (1, 256), (1, 1)]);
        // The second list did not fit behind the first.
        assert_eq!(log.iter().filter(|line| line.starts_with("cuCtxSynchronize")).count(), 1);
        assert_eq!(kernels.mismatches().unwrap(), Mismatches::default());
        // SAFETY: created above.
        unsafe { backend.destroy_stream(stream) }.unwrap();
        drop((kernels, backend));
        assert_eq!(all(driver), [0; 9]);
    });
}

#[test]
fn kernels_that_cannot_be_loaded_leave_nothing() {
    on_stand_in("kernels_that_cannot_be_loaded_leave_nothing", &[], &[], |driver| {
        let backend = open();
        let before = all(driver);
        for turn in 1.. {
            driver.fail_at(turn, 999);
            let loaded = Kernels::load(backend.clone());
            if driver.fail_pending() {
                driver.fail_at(0, 0);
                assert!(loaded.is_ok() && turn > 15);
                break;
            }
            drop(loaded);
            driver.pop_all();
            driver.set_capture_mode(0);
            assert_eq!(all(driver), before, "turn {turn}");
        }
    });
}

#[test]
fn a_driver_without_launches() {
    on_stand_in("a_driver_without_launches", &[], &["cuLaunchKernel"], |_| {
        let error = Kernels::load(open()).map(drop).unwrap_err().to_string();
        assert!(error.contains("the CUDA driver has no cuLaunchKernel"), "{error}");
    });
}
