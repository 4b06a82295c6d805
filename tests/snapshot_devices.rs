//! Snapshots of several devices: which is read, that it is said, and that another can be named.
#![cfg(feature = "cli")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "support/pickle.rs"]
mod pickle;

use pickle::{Py, entry};
use std::process::{Command, Output, Stdio};
use xseg::trace::{Trace, TraceError};

const MIB: u64 = 1 << 20;
const NOTE: &str =
    "read device 2, which has the longest history; left out: 1 event of device 0, which `--device` reads";

/// One block of 8 MiB on device 0, nothing on 1, one of 4 MiB that comes and goes on 2.
fn two() -> (tempfile::TempDir, String) {
    let histories = vec![
        Py::List(vec![entry("alloc", 1 << 30, 8 * MIB, 10)]),
        Py::List(vec![]),
        Py::List(vec![entry("alloc", 1 << 30, 4 * MIB, 20), entry("free_requested", 1 << 30, 4 * MIB, 21)]),
    ];
    let snapshot = Py::Dict(vec![("segments", Py::List(vec![])), ("device_traces", Py::List(histories))]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("two.pickle");
    std::fs::write(&path, snapshot.pickle()).unwrap();
    let path = path.to_str().unwrap().to_owned();
    (folder, path)
}

fn xseg(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_xseg"));
    command.args(args).env_remove("XSEG_CONF").stdin(Stdio::null()).output().unwrap()
}

/// What a command says: its status, stdout and stderr.
fn said(args: &[&str]) -> (i32, String, String) {
    let output = xseg(args);
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

#[test]
fn the_longest_history_or_the_one_that_is_named() {
    let (folder, path) = two();
    let load = |device| Trace::load_device(path.as_ref(), device);
    let found = |device| load(device).map(|trace| (trace.peak_requested(), trace.notes));
    assert_eq!(found(None), Ok((4 * MIB, vec![NOTE.to_owned()])));
    assert_eq!((found(Some(0)), found(Some(2))), (Ok((8 * MIB, vec![])), Ok((4 * MIB, vec![]))));
    for device in [1, 3, u32::MAX] {
        let error = load(Some(device)).unwrap_err();
        assert_eq!(error, TraceError::NoDevice { device, there: vec![0, 2] });
        let end = format!("no events of device {device}; it has some of devices 0 and 2");
        assert!(error.to_string().ends_with(&end), "{error}");
    }
    let trace = folder.path().join("a.trace");
    std::fs::write(&trace, "a,0,10,0,0\n").unwrap();
    assert_eq!(Trace::load_device(&trace, Some(0)), Err(TraceError::NoDevices));
    std::fs::write(&trace, "a,0,10\n").unwrap();
    assert!(matches!(Trace::load_device(&trace, Some(0)), Err(TraceError::Line { .. })));
}

#[test]
fn every_command_reads_the_device_and_says_what_it_left_out() {
    let (folder, path) = two();
    let report = folder.path().join("report");
    let report = report.to_str().unwrap();
    let commands: [&[&str]; 4] = [
        &["replay", &path, "--backend", "sim"],
        &["least", &path, "--backend", "sim"],
        &["plan", &path],
        &["bench", &path, "--allocator", "xseg", "--skip", "least", "--out", report],
    ];
    for command in commands {
        for json in [&[][..], &["--json"]] {
            let run = |more: &[&str]| {
                let (status, out, err) = said(&[command, json, more].concat());
                assert_eq!(status, 0, "{command:?} {json:?} {more:?}: {err}");
                out + &err
            };
            let all = run(&[]);
            assert!(all.contains(NOTE), "{command:?} {json:?}: {all}");
            let (other, this) = (run(&["--device", "0"]), run(&["--device", "2"]));
            assert!(!other.contains("longest history") && !this.contains("longest history"), "{other} {this}");
        }
        let (status, _, err) = said(&[command, &["--device", "1"]].concat());
        let why = format!("xseg: {path}: the snapshot has no events of device 1; it has some of devices 0 and 2");
        assert!(status == 2 && err.contains(&why), "{command:?}: {err}");
        let shipped = concat!(env!("CARGO_MANIFEST_DIR"), "/traces/gpt2.trace.xz");
        let of_trace: Vec<&str> = command.iter().map(|word| if *word == path { shipped } else { *word }).collect();
        let (status, _, err) = said(&[&of_trace[..], &["--device", "0"]].concat());
        let why = format!("{shipped}: the file is a trace and no PyTorch snapshot");
        assert!(status == 2 && err.contains(&why) && err.contains("leave `--device` out"), "{command:?}: {err}");
    }
    let peak = |device: &str| said(&["plan", &path, "--device", device, "--json"]).1;
    assert!(
        peak("0").contains(&format!("\"peak\":{}", 8 * MIB)) && peak("2").contains(&format!("\"peak\":{}", 4 * MIB))
    );
    let (status, _, err) = said(&["bench", "--quick", "--device", "0"]);
    assert!(status == 2 && err.contains("TRACE"), "{err}");
}
