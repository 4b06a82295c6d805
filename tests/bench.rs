//! `xseg bench` as a user runs it: files, tables, exit status, errors that say what to do.
#![cfg(feature = "cli")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[cfg(all(feature = "cuda", target_os = "linux"))]
#[path = "fake_cuda/control.rs"]
mod control;

use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output, Stdio};

const GAPS: &str = "a,0,33554432,0,0\na,1,16777216,0,10\na,2,33554432,0,20\nf,0,30\nf,2,40\na,3,50331648,0,50\n";

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_xseg"));
    command.arg("bench").args(args).env_remove("XSEG_CONF").stdin(Stdio::null());
    command
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

fn bench(args: &[&str]) -> Output {
    command(args).output().unwrap()
}

fn report(folder: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(folder.join("report.json")).unwrap()).unwrap()
}

/// The figures of a run on an H200, beside models of the same names on the same trace.
#[test]
fn real_allocators_stand_beside_their_models() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let recorded = root.join("tests/data/peers.jsonl");
    let trace = root.join("traces/gpt2.trace.xz");
    let folder = tempfile::tempdir().unwrap();
    let args = [trace.to_str().unwrap(), "--quick", "--allocator", "xseg,torch-native", "--skip", "least"];
    let out = folder.path().to_str().unwrap();
    let done = bench(&[&args[..], &["--out", out, "--peers", recorded.to_str().unwrap()]].concat());
    assert_eq!(done.status.code(), Some(0), "{}", text(&done.stderr));
    let shown = std::fs::read_to_string(folder.path().join("report.html")).unwrap();
    for part in ["Real allocators on a GPU", "real:torch-expandable", "PyTorch 2.11.0", "real allocators on moe"] {
        assert!(shown.contains(part), "{part} in\n{shown}");
    }
    let report = report(folder.path());
    let tables = report["tables"].as_array().unwrap();
    let table = tables.iter().find(|table| table["title"].as_str().unwrap().starts_with("Real allocators")).unwrap();
    let row = table["rows"].as_array().unwrap().iter().find(|row| row[1] == "real:torch-native").unwrap();
    assert_eq!([&row[2], &row[3], &row[4]], ["23.558", "24.506", "24.506"], "the model reserves what the real one did");

    let none = bench(&[&args[..], &["--out", out, "--peers", "no/such/program"]].concat());
    let said = text(&none.stderr);
    assert_eq!(none.status.code(), Some(2), "{said}");
    assert!(said.contains("benches/peers/run.sh"), "it says how to get it: {said}");
}

#[test]
fn a_trace_of_ones_own_is_compared_in_one_command() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("own.trace");
    std::fs::write(&trace, GAPS).unwrap();
    let out = folder.path().join("out");
    let args = [trace.to_str().unwrap(), "--out", out.to_str().unwrap()];
    let done = bench(&args);
    assert_eq!(done.status.code(), Some(0), "{}", text(&done.stderr));
    assert_eq!(text(&done.stderr), "");
    let shown = text(&done.stdout);
    for part in ["Least memory", "Driver time", "xseg-host", "torch-expandable", "report.html", "--also moving,classic"]
    {
        assert!(shown.contains(part), "{part} in\n{shown}");
    }
    assert!(!shown.contains("Where xseg is not the best"), "the short form\n{shown}");
    // With a trace the allocators are compared, and nothing else is done.
    let whole = report(&out);
    assert_eq!((whole["moving"].as_array().unwrap().len(), whole["tables"].as_array().unwrap().len()), (0, 2));
    let rows = report(&out)["rows"].as_array().unwrap().clone();
    assert_eq!(rows.len(), 13, "every allocator, on this trace alone");
    let own = rows.iter().find(|row| row["allocator"] == "xseg").unwrap();
    assert_eq!(
        (&own["workload"], &own["origin"], &own["limited"]["completed"]),
        (&"own".into(), &"file".into(), &true.into())
    );
    let least = own["least_factor"].as_f64().unwrap();
    assert!((1.0..1.1).contains(&least), "{least}");
    let host = rows.iter().find(|row| row["allocator"] == "xseg-host").unwrap();
    assert_eq!((&host["limited"]["mismatches"], &host["backend"]), (&0.into(), &"host".into()));
    let done =
        bench(&[&args[..], &["--full", "--also", "classic", "--skip", "least", "--allocator", "xseg,slab"]].concat());
    let shown = text(&done.stdout);
    for part in ["own: 6 events on 1 stream\n", "Where xseg is not the best", "by cudaMalloc and by pools"] {
        assert!(shown.contains(part), "{part} in\n{shown}");
    }
    assert!(text(&done.stderr).contains("replaces the report in"), "{}", text(&done.stderr));
}

/// Where no folder is named, runs of different things do not replace each other.
#[test]
fn reports_have_folders_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| {
        let done = command(&[args, &["--skip", "least", "--allocator", "slab"]].concat())
            .current_dir(folder.path())
            .output()
            .unwrap();
        assert_eq!(done.status.code(), Some(0), "{}", text(&done.stderr));
        text(&done.stderr).to_owned()
    };
    for name in ["a.trace", "b.trace"] {
        std::fs::write(folder.path().join(name), GAPS).unwrap();
    }
    assert_eq!(run(&["a.trace"]), "");
    assert_eq!(run(&["b.trace"]), "");
    assert_eq!(run(&["a.trace", "b.trace", "--quick"]), "");
    let again = run(&["a.trace"]);
    assert!(again.contains("this run replaces the report in xseg-bench/a when"), "{again}");
    for name in ["a", "b", "a-and-1-more-quick"] {
        assert!(folder.path().join("xseg-bench").join(name).join("report.html").is_file(), "{name}");
    }
}

/// Sums of runs that did not all complete say so, for people and for programs.
#[test]
fn a_sum_says_of_how_many() {
    let folder = tempfile::tempdir().unwrap();
    let traces = ["a", "b"].map(|name| folder.path().join(format!("{name}.trace")));
    std::fs::write(&traces[0], GAPS).unwrap();
    // The second needs no gap to be closed.
    std::fs::write(&traces[1], "a,0,33554432,0,0\na,1,50331648,0,10\n").unwrap();
    let [a, b] = traces.each_ref().map(|path| path.to_str().unwrap());
    let out = folder.path().join("out");
    let fixed = ["--skip", "least", "--limit", "80MiB", "--allocator", "xseg,xseg-host,cuda-malloc-async,tf-bfc"];
    let done = bench(&[&[a, b], &fixed[..], &["--out", out.to_str().unwrap(), "--full"]].concat());
    assert_eq!(done.status.code(), Some(0), "{}", text(&done.stderr));
    let shown = text(&done.stdout);
    let line = |name: &str, part: &str| {
        let found = shown.lines().find(|line| line.contains(&format!("│ {name} ")) && line.contains(part));
        assert!(found.is_some(), "{name} {part} in\n{shown}");
    };
    line("tf-bfc", "(1 of 2)");
    // What the half of a run cost stands in brackets, and is not the best.
    line("tf-bfc", "refused from");
    assert!(!shown.contains(")*") && !shown.contains(" -0"), "{shown}");
    let summary = report(&out)["summary"].as_array().unwrap().clone();
    let bfc = summary.iter().find(|row| row["allocator"] == "tf-bfc").unwrap();
    assert_eq!((&bfc["workloads"], &bfc["completed_workloads"]), (&2.into(), &1.into()));
    let host = summary.iter().find(|row| row["allocator"] == "xseg-host").unwrap();
    assert_eq!((&host["best_in_least_workloads"], &host["completed_workloads"]), (&Value::Null, &2.into()));
    let mut csv = csv::Reader::from_path(out.join("summary.csv")).unwrap();
    assert!(csv.headers().unwrap().iter().any(|name| name == "completed_workloads"));
    assert_eq!(csv.records().count(), 4);
}

/// Parts that need no workload can be run alone.
#[test]
fn no_workload_at_all_leaves_the_tables() {
    let folder = tempfile::tempdir().unwrap();
    let done = bench(&["--workload", "none", "--skip", "moving", "--out", folder.path().to_str().unwrap()]);
    assert_eq!((done.status.code(), text(&done.stderr)), (Some(0), ""));
    let found = report(folder.path());
    assert_eq!(found["rows"].as_array().unwrap().len(), 0);
    assert!(found["tables"].to_string().contains("allocated and freed 1000 times"));
}

#[test]
fn a_quick_part_of_the_suite_is_the_same_twice() {
    let folder = tempfile::tempdir().unwrap();
    let run = |name: &str, jobs: &str| {
        let out = folder.path().join(name);
        let workloads = "s01-two-gaps,s02-survivors,holes";
        let fixed = ["--quick", "--workload", workloads, "--skip", "moving", "--jobs", jobs, "--json"];
        let done = bench(&[&fixed[..], &["--seed", "7", "--out", out.to_str().unwrap()]].concat());
        assert_eq!(done.status.code(), Some(0), "{}", text(&done.stderr));
        let mut rows: Vec<Value> = text(&done.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        for row in &mut rows {
            for run in ["plenty", "limited"] {
                for time in ["wall_ms", "machine_ns", "hot_path_ns"] {
                    row[run][time].take();
                }
            }
        }
        rows
    };
    let one = run("one", "1");
    assert_eq!(one.len(), 3 * 13);
    assert_eq!(one, run("two", "2"));
}

#[test]
fn workloads_are_listed() {
    let done = bench(&["--list"]);
    let shown = text(&done.stdout);
    assert_eq!(done.status.code(), Some(0));
    for name in ["train-varlen", "moe-skew", "zero3", "churn-98", "s12-long-churn"] {
        assert!(shown.lines().any(|line| line.starts_with(name) && line.len() > 30), "{name}");
    }
}

#[test]
fn bad_usage_and_input_are_status_2_with_advice() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let file = folder.path().join("file");
    std::fs::write(&file, "not a folder").unwrap();
    let own = folder.path().join("own.trace");
    std::fs::write(&own, GAPS).unwrap();
    let (out, file, own) = (out.to_str().unwrap(), file.to_str().unwrap(), own.to_str().unwrap());
    let short = ["--workload", "s01-two-gaps", "--allocator", "xseg", "--skip", "moving,classic"];
    let cases: &[(&[&str], &str)] = &[
        (&["--allocator", "jemalloc"], "the allocators are xseg, xseg-host"),
        (&["--workload", "everything"], "the workloads are train-fixed"),
        (&["--limit", "lots"], "1.02x"),
        (&["--skip", "all"], "least, moving, classic"),
        (&["--conf", "limt:4G"], "did you mean `limit`"),
        (&["--workload", "none", "--skip", "moving,classic"], "there is nothing to run"),
        (&["--limit", "1.02"], "1.02x was probably meant"),
        (&["--limit", "0x"], "such as 1.02x"),
        (&[own, "--limit", "0.01x"], "less than one granule"),
        (&["--jobs", "0"], "from 1"),
        (&["--also", "classic", "--skip", "classic"], "keep one of the two"),
        (&["/no/such.trace"], "check the path"),
        (&["/no/such.trace"], "no trace that was named can be used, so nothing was run"),
    ];
    for (args, advice) in cases {
        let done = bench(&[args, &["--out", out][..]].concat());
        assert_eq!(done.status.code(), Some(2), "{args:?}");
        assert!(text(&done.stderr).contains(advice), "{args:?}: {}", text(&done.stderr));
    }
    let done = bench(&["/no/such.trace", "--out", out]);
    assert_eq!(text(&done.stderr).matches("/no/such.trace").count(), 1, "{}", text(&done.stderr));
    let done = bench(&[&short[..], &["--out", file]].concat());
    assert!(done.status.code() == Some(2) && text(&done.stderr).contains("name another folder by --out"));
    // One bad input does not keep the others from being run, and is not forgotten.
    let done = bench(&[&["/no/such.trace"], &short[..], &["--out", out]].concat());
    assert_eq!((done.status.code(), report(Path::new(out))["rows"].as_array().unwrap().len()), (Some(2), 1));
}

/// The stand-in has no memory and no bandwidth; what it shows is that the calls are right.
#[cfg(all(feature = "cuda", target_os = "linux"))]
#[test]
fn where_there_is_a_driver_it_is_measured() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().to_str().unwrap().to_owned();
    let args = ["--quick", "--workload", "s01-two-gaps", "--allocator", "xseg", "--out", &out];
    let run = |without: &[&str]| {
        let driver = control::folder(without);
        let mut command = command(&args);
        command.env("LD_LIBRARY_PATH", driver.path()).env("FAKE_CUDA_MEMORY", (140u64 << 30).to_string());
        let done = command.output().unwrap();
        assert_eq!(done.status.code(), Some(0), "{}", text(&done.stderr));
        report(folder.path())
    };
    let found = run(&[]);
    let moving = found["moving"].as_array().unwrap();
    assert_eq!((moving.len(), &moving[1]["backend"]), (2, &"cuda".into()), "{}", found["left_out"]);
    assert_eq!(moving[1]["rates"].as_array().unwrap().len(), 6);
    let tables = found["tables"].as_array().unwrap();
    let costs = tables.iter().find(|table| table["title"].as_str().unwrap().ends_with("what they cost")).unwrap();
    assert!(costs["text"].as_str().unwrap().contains("measured here on Stand-in 0"));
    assert!(!costs["rows"].to_string().contains('–'), "{costs}");
    // A driver without one of the calls is no reason to stop.
    let found = run(&["cuMemAllocManaged"]);
    assert!(
        found["left_out"].to_string().contains("the CUDA driver has no cuMemAllocManaged"),
        "{}",
        found["left_out"]
    );
    assert_eq!(found["moving"].as_array().unwrap().len(), 1);
}

/// Rows, headings and links go by the name.
#[test]
fn traces_of_one_name_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let paths = ["one", "two"].map(|name| {
        std::fs::create_dir(folder.path().join(name)).unwrap();
        let path = folder.path().join(name).join("run.trace");
        std::fs::write(&path, GAPS).unwrap();
        path.to_str().unwrap().to_owned()
    });
    let out = folder.path().join("out");
    let fixed = ["--skip", "moving,classic,least", "--allocator", "xseg,slab,xseg", "--out", out.to_str().unwrap()];
    let done = bench(&[&[paths[0].as_str(), paths[1].as_str()], &fixed[..]].concat());
    assert_eq!(done.status.code(), Some(0), "{}", text(&done.stderr));
    let report = report(&out);
    let rows = report["rows"].as_array().unwrap();
    let names: Vec<[&str; 2]> =
        rows.iter().map(|row| ["workload", "allocator"].map(|key| row[key].as_str().unwrap())).collect();
    assert_eq!(names, [["run", "xseg"], ["run", "slab"], ["run (2)", "xseg"], ["run (2)", "slab"]]);
    let page = std::fs::read_to_string(out.join("report.html")).unwrap();
    assert!(page.contains(&format!("{}: 6 events", paths[1])), "{page}");
}

/// A run may take long: what cannot be written is told before it.
#[test]
fn a_folder_that_cannot_be_written_is_told_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let taken = folder.path().join("taken");
    std::fs::create_dir_all(taken.join("report.json")).unwrap();
    for out in [&file, &file.join("below"), &taken] {
        // Of all workloads this would take minutes.
        let done = bench(&["--workload", "all", "--out", out.to_str().unwrap()]);
        assert_eq!(done.status.code(), Some(2));
        assert!(text(&done.stderr).contains("name another folder by --out"), "{}", text(&done.stderr));
    }
    assert_eq!(std::fs::read_dir(&taken).unwrap().count(), 1, "nothing is left of the attempt");
}

#[test]
fn more_than_any_device_has_is_refused_or_runs_out_of_memory() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let run = |bytes: u64| {
        let trace = folder.path().join("huge.trace");
        std::fs::write(&trace, format!("a,0,{bytes},0,0\nf,0,1\n")).unwrap();
        let fixed =
            ["--skip", "moving,classic,least", "--allocator", "first-fit,buddy", "--out", out.to_str().unwrap()];
        bench(&[&[trace.to_str().unwrap()], &fixed[..]].concat())
    };
    let done = run((4096 << 30) + 1);
    assert_eq!(done.status.code(), Some(2));
    assert!(text(&done.stderr).contains("more than any device has"), "{}", text(&done.stderr));
    // More addresses than the model of first fit reserves.
    let done = run(1 << 40);
    assert_eq!((done.status.code(), text(&done.stderr)), (Some(0), ""));
    let report = report(&out);
    let first_fit = report["rows"].as_array().unwrap().iter().find(|row| row["allocator"] == "first-fit").unwrap();
    assert_eq!(first_fit["plenty"]["refused_requests"], 1);
    let shown = text(&done.stdout);
    assert!(!shown.contains("-0 "), "{shown}");
}
