//! Scenario 21 on host memory, in a process of its own that may open few files: the backend has one memfd,
//! however many handles there are. `cuda_fake_captures.rs` has the same for CUDA.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use rustix::process::{Resource, Rlimit, setrlimit};
use std::fs::File;
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::Arc;
use xseg::backend::Backend;
use xseg::backend::host::{HostBackend, HostOptions};
use xseg::error::{DriverCall, DriverError, ShareFault};
use xseg::units::MIB;
use xseg::{Allocation, Error, Heap, StreamId};

const MARK: &str = "XSEG_FEW_DESCRIPTORS";

/// Runs a test of this file again, which knows by `mark` that it may lower limits of its process.
fn in_a_process_of_its_own(test: &str, mark: &str) {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(mark, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn descriptors_do_not_run_out() {
    if std::env::var_os(MARK).is_some() {
        return with_few_descriptors();
    }
    in_a_process_of_its_own("descriptors_do_not_run_out", MARK);
}

fn with_few_descriptors() {
    setrlimit(Resource::Nofile, Rlimit { current: Some(256), maximum: Some(256) }).unwrap();
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let device = Arc::new(HostBackend::new(HostOptions::default()).unwrap());
    let conf = "handle_max:2MiB,reserve:64GiB,growth:exact";
    let heap = Heap::builder().conf(conf).unwrap().backend(device.clone()).build().unwrap();
    let before = open();
    let blocks: Vec<Allocation> = (0..8).map(|_| heap.alloc(1024 * MIB, StreamId(0)).unwrap()).collect();
    assert!(device.leaks().handles >= 4096 && open() == before, "{}", device.leaks());
    let error = heap.export_handles(blocks[0].address()).unwrap_err();
    assert!(error.to_string().contains("Too many open files") && error.to_string().contains("ulimit -n"), "{error}");
    assert_eq!(open(), before, "those before the refusal are closed");
    let few = heap.alloc(200 * MIB, StreamId(0)).unwrap();
    for _ in 0..20 {
        assert_eq!(heap.export_handles(few.address()).unwrap().len(), 100);
    }
    assert_eq!(open(), before);
    each_descriptor_that_is_missing_is_named(&heap);
}

/// With fewer and fewer descriptors left: an export and an import succeed, or say what is missing.
fn each_descriptor_that_is_missing_is_named(heap: &Heap) {
    let there = Heap::builder().conf("backend:host,limit:64MiB").unwrap().build().unwrap();
    let block = heap.alloc(5 * MIB, StreamId(0)).unwrap();
    let said = |what: &str, error: Error| {
        assert!(matches!(error, Error::Share(ShareFault::NoDescriptor(_))), "{what}: {error}");
        assert!(error.to_string().contains("ulimit -n"), "{what}: {error}");
    };
    let (mut exports, mut imports, mut done) = (0, 0, 0);
    for left in 0..20 {
        let mut taken: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
        taken.truncate(taken.len() - left);
        match heap.export(block.address()).map(|export| there.import(export)) {
            Ok(Ok(imported)) => {
                imported.close().unwrap();
                done += 1;
            }
            Ok(Err(error)) => {
                said("import", error);
                imports += 1;
            }
            Err(error) => {
                said("export", error);
                exports += 1;
            }
        }
        heap.tick();
        assert_eq!((heap.stats().exported, there.stats().imported), (0, 0));
    }
    assert!(exports > 0 && imports > 0 && done > 0, "{exports} exports and {imports} imports refused, {done} done");
}

/// What came as a handle is no memory of xseg's: an error of sharing, as the rest that comes from others.
#[test]
fn foreign_memory_is_no_export() {
    let error = xseg::Error::from(DriverError::foreign(DriverCall::Other, "the memfd may shrink"));
    assert!(matches!(error, Error::Share(ShareFault::Malformed(why)) if why.contains("may shrink")));
    let device = HostBackend::new(HostOptions::default()).unwrap();
    let file = File::open("/dev/null").unwrap();
    let error = Backend::import(&device, file.as_fd(), 0, 2 * MIB).unwrap_err();
    assert!(error.foreign && error.reason.contains("no memfd"), "{error}");
}

/// Addresses that the process may not have: how many were wanted, and what is in the way.
#[test]
fn a_limit_of_addresses_is_named() {
    const MARK: &str = "XSEG_FEW_ADDRESSES";
    if std::env::var_os(MARK).is_none() {
        return in_a_process_of_its_own("a_limit_of_addresses_is_named", MARK);
    }
    setrlimit(Resource::As, Rlimit { current: Some(1 << 30), maximum: None }).unwrap();
    let error = Heap::builder().conf("backend:host,reserve:64MiB,limit:64MiB").unwrap().build().unwrap_err();
    assert!(matches!(error, Error::Driver(_)), "{error}");
    let text = error.to_string();
    for part in ["2.000 GiB of addresses were asked for", "this process may have 1.000 GiB (`ulimit -v`)"] {
        assert!(text.contains(part), "{text}");
    }
}
