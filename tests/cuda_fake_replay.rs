//! `xseg replay --backend cuda --verify` on the stand-in driver, which runs no kernels: that stamps are
//! queued, that what the kernels report decides, and what is said without a driver.
#![cfg(all(feature = "cuda", feature = "cli", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

#[path = "fake_cuda/control.rs"]
mod control;

use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};

/// Two streams; one uses the other's block; the last block fits only if pages move.
const TRACE: &str = "# test\n# {}\na,0,33554432,0,0\na,1,16777216,0,10\na,2,33554432,7,20\nu,2,0,25\nf,0,30\nf,2,40\n\
                     a,3,50331648,0,50\nf,3,60\na,4,5,7,70\n";

fn replay(driver: &Path, reads: &str, more: &[&str]) -> Output {
    replay_of(TRACE, driver, reads, more)
}

fn replay_of(text: &str, driver: &Path, reads: &str, more: &[&str]) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("small.trace");
    std::fs::write(&trace, text).unwrap();
    Command::new(env!("CARGO_BIN_EXE_xseg"))
        .args(["replay", trace.to_str().unwrap(), "--backend", "cuda", "--verify", "--json"])
        .args(more)
        .env_remove("XSEG_CONF")
        .env("LD_LIBRARY_PATH", driver)
        .env("FAKE_CUDA_READS", reads)
        .output()
        .unwrap()
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn report(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", errors(output)))
}

#[test]
fn stamps_are_queued_and_read_back() {
    let driver = control::folder(&[]);
    let done = replay(driver.path(), "0", &["--limit", "1.2x"]);
    assert_eq!(done.status.code(), Some(0), "{}", errors(&done));
    let report = report(&done);
    assert_eq!(
        (&report["backend"], &report["completed"], &report["mismatches"]),
        (&"cuda".into(), &true.into(), &0.into())
    );
    // At least one stamp a granule of the four blocks, one of which is checked on two streams.
    let granules = (16 + 8 + 2 * 16 + 24) as u64;
    assert!(report["stamps_checked"].as_u64() > Some(granules), "{report}");
    assert!(report["handles_moved"].as_u64() > Some(0), "{report}");
}

#[test]
fn what_kernels_find_fails_the_replay() {
    let driver = control::folder(&[]);
    let done = replay(driver.path(), "1", &[]);
    assert_eq!(done.status.code(), Some(1), "{}", errors(&done));
    assert_eq!(report(&done)["mismatches"], 0x0101_0101_0101_0101_u64);
    let text = errors(&done);
    assert!(text.contains("small: mismatch: the stamp at 0x101010101010101 holds something else"), "{text}");
}

#[test]
fn a_fault_that_was_never_made_is_told() {
    let driver = control::folder(&[]);
    let one = "# test\n# {}\na,0,5,0,0\nf,0,10\n";
    let done = replay_of(one, driver.path(), "0", &["--inject", "swap"]);
    assert_eq!(done.status.code(), Some(1), "{}", errors(&done));
    assert!(errors(&done).contains("the fault to inject was never made"), "{}", errors(&done));
    let made = replay(driver.path(), "0", &["--inject", "swap", "--conf", "handle_max:2MiB"]);
    assert!(!errors(&made).contains("never made"), "{}", errors(&made));
}

#[test]
fn a_driver_that_lacks_what_kernels_need_is_told() {
    let driver = control::folder(&["cuModuleLoadData"]);
    let done = replay(driver.path(), "0", &[]);
    assert_eq!(done.status.code(), Some(2), "{}", errors(&done));
    assert!(errors(&done).contains("the CUDA driver has no cuModuleLoadData"), "{}", errors(&done));
}

#[test]
fn without_a_driver_it_says_so() {
    // A library that is none: it comes before the machine's own, if there is one.
    let folder = tempfile::tempdir().unwrap();
    for name in ["libcuda.so", "libcuda.so.1"] {
        std::fs::write(folder.path().join(name), "").unwrap();
    }
    let done = replay(folder.path(), "0", &[]);
    let text = errors(&done);
    if done.status.code() == Some(0) {
        // The loader went on to the machine's driver.
        assert_eq!(report(&done)["mismatches"], 0);
        return;
    }
    assert_eq!(done.status.code(), Some(2), "{text}");
    assert!(text.contains("the cuda backend is not available"), "{text}");
    assert!(text.contains("install it") && !text.contains("panicked"), "{text}");
    // One way out, said once; what the programs' options are is theirs to say.
    assert!(text.matches("install").count() == 1 && !text.contains("--backend"), "{text}");
}
