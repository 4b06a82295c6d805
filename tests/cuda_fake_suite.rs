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

/// The checks of one section, with whether they passed.
fn checks_of(section: &str) -> Vec<(String, bool)> {
    let driver = control::folder(&[]);
    let out = tempfile::tempdir().unwrap();
    let done = suite(driver.path(), &["--quick", "--only", section, "--out", out.path().to_str().unwrap()]);
    let json = std::fs::read_dir(out.path()).unwrap().map(|entry| entry.unwrap().path());
    let json = json.into_iter().find(|path| path.extension().is_some_and(|found| found == "json"));
    let json = json.unwrap_or_else(|| panic!("{}", text(&done.stderr)));
    let report: Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    let checks = report["sections"][0]["checks"].as_array().unwrap().iter();
    checks.map(|check| (check["what"].as_str().unwrap().to_owned(), check["passed"] == true)).collect()
}

/// Two processes on the stand-in: all but what needs work under way.
#[test]
fn sharing_runs_as_far_as_there_are_no_kernels() {
    let checks = checks_of("share");
    let failed: Vec<&str> = checks.iter().filter(|check| !check.1).map(|check| check.0.as_str()).collect();
    assert_eq!(failed, ["an import that is dropped under queued kernels stays until they are done"]);
    let of = |words: &str| checks.iter().filter(|check| check.0.contains(words)).count();
    let counts =
        ["over 129 handles", "over 9 handles", "by the exporter first", "100 imports of", "is killed", "device 1"]
            .map(of);
    assert_eq!((checks.len(), counts), (16, [4, 4, 4, 1, 2, 1]));
}

#[test]
fn several_devices_run_as_far_as_there_are_no_kernels() {
    let checks = checks_of("several");
    let (passed, failed): (Vec<_>, Vec<_>) = checks.iter().partition(|check| check.1);
    assert_eq!((passed.len(), failed.len()), (11, 4), "{failed:?}");
    for (check, _) in failed {
        assert!(check.ends_with("given to nobody") || check.ends_with("keep nothing from it"), "{check}");
    }
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

/// A program in the place of `benches/peers`: it says what a real one said on an H200, and one allocator fails.
fn other_allocators(folder: &Path) -> std::path::PathBuf {
    use std::os::unix::fs::PermissionsExt;
    let lines = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/peers.jsonl");
    let script = format!(
        r#"#!/bin/sh
said() {{ grep "\"allocator\": \"$2\"" '{}' | grep -E "\"kind\": \"($1)\""; }}
case "$1" in
    list) echo torch-native; echo torch-expandable; echo rmm-pool;;
    pairs) said 'program|pairs' "$3";;
    replay)
        for last; do :; done
        grep -q '^a,0,' "$last" || exit 3
        said 'program|replay|least|skipped' "$3";;
esac
if [ "$3" = rmm-pool ]; then echo 'peers: no such luck' >&2; exit 1; fi
"#,
        lines.display()
    );
    let path = folder.join("peers");
    std::fs::write(&path, script).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

#[test]
fn other_allocators_stand_beside_the_heap() {
    let driver = control::folder(&[]);
    let folder = tempfile::tempdir().unwrap();
    let program = other_allocators(folder.path());
    let out = folder.path().join("out");
    let arguments = ["--quick", "--only", "pairs,peers", "--traces", "gpt2", "--report", "peers", "--no-least"];
    let named = ["--peers", program.to_str().unwrap(), "--out", out.to_str().unwrap()];
    let done = suite(driver.path(), &[&arguments[..], &named[..]].concat());
    assert_eq!(done.status.code(), Some(1), "{}", text(&done.stderr));
    let files: Vec<_> = std::fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(files.iter().all(|file| file.file_name().unwrap().to_str().unwrap().starts_with("peers-")), "{files:?}");
    let json = files.iter().find(|path| path.extension().is_some_and(|found| found == "json")).unwrap();
    let report: Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    let [pairs, replays] = [&report["sections"][0], &report["sections"][1]];

    let columns: Vec<&str> =
        pairs["tables"][0]["columns"].as_array().unwrap().iter().map(|c| c.as_str().unwrap()).collect();
    assert_eq!(columns, ["operation", "xseg ns, median", "torch-native ns, median", "torch-native / xseg"]);
    let rows = pairs["tables"][0]["rows"].as_array().unwrap();
    assert_eq!((rows.len(), &rows[0][0], &rows[4][0]), (11, &"pair of 512 B".into(), &"pair of 128 MiB".into()));
    for row in rows {
        let number = |at: usize| row[at].as_f64().unwrap();
        assert!((number(3) - number(2) / number(1)).abs() <= 1e-9 * number(3), "{row}");
    }
    let checks = |section: &Value| -> Vec<(String, bool)> {
        let checks = section["checks"].as_array().unwrap().iter();
        checks.map(|check| (check["what"].as_str().unwrap().to_owned(), check["passed"] == true)).collect()
    };
    for section in [pairs, replays] {
        assert!(checks(section).contains(&("rmm-pool is measured to the end".to_owned(), false)), "{section}");
    }
    assert!(checks(pairs).contains(&("torch-native was asked for what xseg was asked for".to_owned(), true)));
    for memory in ["plenty", "limited"] {
        assert!(checks(replays).contains(&(format!("xseg completes gpt2 with {memory} memory"), true)));
    }

    let table = &replays["tables"][0];
    let at = |name: &str| table["columns"].as_array().unwrap().iter().position(|column| column == name).unwrap();
    let row = |name: &str| {
        let rows = table["rows"].as_array().unwrap();
        rows.iter().find(|row| row[at("trace")] == "gpt2" && row[at("allocator")] == name).unwrap().clone()
    };
    assert_eq!(row("torch-native")[at("least / requested")], "1.0066");
    let reserved = row("torch-native")[at("plenty: peak reserved GiB")].as_f64().unwrap();
    assert!((reserved - 24.506).abs() < 0.001, "{reserved}");
    let own = row("xseg")[at("plenty: reserved / requested")].as_f64().unwrap();
    assert!((1.0..1.1).contains(&own), "{own}");

    // What was told is kept, and found again.
    let recorded = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/peers.jsonl");
    let (kept, told) = (xseg::peers::read(json).unwrap(), xseg::peers::read(&recorded).unwrap());
    let mut told = told.iter().filter(|line| line.allocator() == "torch-native").peekable();
    assert!(told.peek().is_some());
    for line in told {
        assert!(kept.contains(line), "{line:?}");
    }
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
