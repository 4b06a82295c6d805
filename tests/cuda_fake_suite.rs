//! The device suite on the stand-in driver: the sections of bare driver calls run and the report is
//! written. The stand-in has no memory and runs no kernels: what needs those is reported as failed.
#![cfg(all(feature = "cuda", feature = "cli", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

#[path = "fake_cuda/control.rs"]
mod control;

use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};

/// Sections without a heap.
const BARE: &str = "facts,cost,growth,remap,bandwidth";

fn suite(driver: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_xseg-device"))
        .args(arguments)
        .env("LD_LIBRARY_PATH", driver)
        .env("FAKE_CUDA_MEMORY", (140u64 << 30).to_string())
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn sections_run_and_report() {
    let driver = control::folder(&[]);
    let out = tempfile::tempdir().unwrap();
    let folder = out.path().to_str().unwrap();
    let done = suite(driver.path(), &["--quick", "--only", BARE, "--out", folder, "--commit", "0123abc"]);
    assert_eq!(done.status.code(), Some(1), "{}", text(&done.stderr));
    let errors = text(&done.stderr);
    assert!(!errors.contains("left behind") && !errors.contains("the section ran"), "{errors}");
    assert!(errors.contains("FAILED: one wrong bit is found, and where"), "{errors}");

    let files: Vec<_> = std::fs::read_dir(out.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    let with = |ending: &str| files.iter().find(|path| path.extension().is_some_and(|found| found == ending)).unwrap();
    assert_eq!(files.len(), 2);
    assert_eq!(std::fs::read_to_string(with("md")).unwrap().trim(), text(&done.stdout).trim());
    let report: Value = serde_json::from_slice(&std::fs::read(with("json")).unwrap()).unwrap();
    assert_eq!(
        (&report["gpu"], &report["cuda"], &report["commit"]),
        (&"Stand-in 0".into(), &"12.8".into(), &"0123abc".into())
    );
    assert!(report["command"].as_str().unwrap().ends_with("--commit 0123abc"));
    let sections = report["sections"].as_array().unwrap();
    let found: Vec<(&str, usize)> = sections
        .iter()
        .map(|section| (section["name"].as_str().unwrap(), section["tables"][0]["rows"].as_array().map_or(0, Vec::len)))
        .collect();
    assert_eq!(found, [("facts", 0), ("cost", 9), ("growth", 8), ("remap", 3), ("bandwidth", 7)]);
}

/// What runs without kernels passes; what needs work under way is reported as failed.
#[test]
fn scenarios_run_as_far_as_there_are_no_kernels() {
    let driver = control::folder(&[]);
    let out = tempfile::tempdir().unwrap();
    let done = suite(driver.path(), &["--quick", "--only", "scenarios", "--out", out.path().to_str().unwrap()]);
    assert_eq!(done.status.code(), Some(1), "{}", text(&done.stderr));
    let json = std::fs::read_dir(out.path()).unwrap().map(|entry| entry.unwrap().path());
    let json = json.into_iter().find(|path| path.extension().is_some_and(|found| found == "json")).unwrap();
    let report: Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    let checks = report["sections"][0]["checks"].as_array().unwrap();
    let what = |check: &Value| check["what"].as_str().unwrap().to_owned();
    // Times are no matter of a busy machine's.
    let sure = checks.iter().filter(|check| !what(check).starts_with("25: "));
    let failed: Vec<String> = sure.filter(|check| check["passed"] == false).map(what).collect();
    let expected = ["13: a finished younger event frees", "15: trim with device 1 current leaves memory under"];
    assert_eq!(failed.len(), 2, "{failed:?}");
    assert!(failed.iter().zip(expected).all(|(found, expected)| found.starts_with(expected)), "{failed:?}");
    let of = |number: &str| checks.iter().filter(|check| what(check).starts_with(number)).count();
    let counts = ["6: ", "13: ", "15: ", "21: ", "22: ", "24: ", "25: ", "heaps of"].map(of);
    assert_eq!(counts, [2, 1, 4, 3, 5, 3, 2, 1]);
}

#[test]
fn sections_are_chosen() {
    let driver = control::folder(&[]);
    let out = tempfile::tempdir().unwrap();
    let folder = out.path().to_str().unwrap();
    let done = suite(driver.path(), &["--quick", "--only", "remap,growth", "--skip", "growth", "--out", folder]);
    assert!(done.status.success(), "{}", text(&done.stderr));
    let report = text(&done.stdout);
    assert!(report.contains("## remap: ") && report.matches("\n## ").count() == 1, "{report}");
    let wrong = suite(driver.path(), &["--only", "everything"]);
    assert_eq!(wrong.status.code(), Some(2));
    assert!(text(&wrong.stderr).contains("there is no section everything"));
}

#[test]
fn without_a_device_it_says_so() {
    let driver = control::folder(&["cuMemMap"]);
    let done = suite(driver.path(), &["--quick"]);
    assert_eq!(done.status.code(), Some(1));
    assert!(text(&done.stderr).contains("the cuda backend is not available: the CUDA driver has no cuMemMap"));
}

/// The stand-in's kernels find nothing wrong: what is left to see is that checks are queued at all.
#[test]
fn replays_queue_checks_on_every_stream() {
    let driver = control::folder(&[]);
    let out = tempfile::tempdir().unwrap();
    let run = |traces: &str| {
        suite(driver.path(), &["--only", "replay", "--traces", traces, "--out", out.path().to_str().unwrap()])
    };
    let done = run("gpt2,fsdp");
    assert!(done.status.success(), "{}", text(&done.stderr));
    let report = text(&done.stdout);
    let checked = |name: &str| -> u64 {
        let line =
            report.lines().find(|line| line.contains(&format!("{name} replays with every stamp right"))).unwrap();
        let after = line.split("| 0 of ").nth(1).unwrap();
        after.split(' ').next().unwrap().parse().unwrap()
    };
    // More than two a block: its edges and what lies between.
    let blocks = |name: &str| {
        let trace = xseg::trace::Trace::load(format!("traces/{name}.trace.xz").as_ref()).unwrap();
        trace.blocks.len() as u64
    };
    for name in ["gpt2", "fsdp"] {
        assert!(checked(name) > 2 * blocks(name), "{name}: {} checked, {} blocks", checked(name), blocks(name));
    }
    let wrong = run("gpt2,gpt3");
    assert_eq!(wrong.status.code(), Some(1));
    assert!(text(&wrong.stderr).contains("there is no trace gpt3"), "{}", text(&wrong.stderr));
}
