//! `xseg plan` as a user runs it, and replays that follow what it wrote.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output, Stdio};

fn xseg(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_xseg"));
    command.args(args).env_remove("XSEG_CONF").stdin(Stdio::null()).output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// The one object of a command that must succeed.
fn json(args: &[&str]) -> Value {
    let output = xseg(args);
    assert_eq!(output.status.code(), Some(0), "{args:?}: {}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn refused(args: &[&str]) -> String {
    let output = xseg(args);
    assert_eq!(output.status.code(), Some(2), "{args:?}: {}", text(&output.stdout));
    text(&output.stderr).to_owned()
}

fn shipped(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("traces").join(format!("{name}.trace.xz"));
    path.to_str().unwrap().to_owned()
}

/// A file in a folder that is gone at the end.
struct File(#[allow(dead_code, reason = "the folder goes with it")] tempfile::TempDir, String);

impl File {
    fn new(name: &str, content: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name).to_str().unwrap().to_owned();
        if !content.is_empty() {
            std::fs::write(&path, content).unwrap();
        }
        Self(folder, path)
    }
}

#[test]
fn a_shipped_trace_is_planned_and_replayed_in_a_thousandth_more_than_is_live() {
    let (trace, plan) = (shipped("gpt2"), File::new("gpt2.plan", ""));
    let found = json(&["plan", &trace, "-o", &plan.1, "--json"]);
    assert_eq!((&found["trace"], &found["events"], &found["blocks"]), (&"gpt2".into(), &6503.into(), &2218.into()));
    assert_eq!((&found["rounds"], &found["period"], &found["before"]), (&0.into(), &0.into(), &2218.into()));
    let (peak, top) = (found["peak"].as_u64().unwrap(), found["top"].as_u64().unwrap());
    assert!(top >= peak && top - peak <= peak / 1000, "{found}");
    let conf = format!("plan:{}", plan.1);
    let run = json(&["replay", &trace, "--backend", "sim", "--limit", "1.001x", "--conf", &conf, "--json"]);
    assert_eq!((&run["completed"], &run["handles_moved"], &run["host_waits"]), (&true.into(), &0.into(), &0.into()));
    assert!(run["conf"].as_str().unwrap().contains(&conf), "{run}");
    let without = xseg(&["replay", &trace, "--backend", "sim", "--limit", "1.001x", "--json"]);
    assert_eq!(without.status.code(), Some(1), "without the plan it does not fit");
}

#[test]
fn what_was_found_is_told() {
    let mut steps = String::from("a,0,9000000,0,0\na,1,500,0,0\n");
    let mut at = 2;
    for step in 1..6 {
        for bytes in [3_000_000, 5_000_000, 7_000_000] {
            steps += &format!("a,{at},{bytes},0,{step}\n");
            at += 1;
        }
        (at - 3..at).for_each(|block| steps += &format!("f,{block},{step}\n"));
    }
    let trace = File::new("steps.trace", &steps);
    let told = xseg(&["plan", &trace.1]);
    let lines: Vec<&str> = text(&told.stdout).lines().collect();
    assert_eq!(
        lines,
        [
            "steps: 32 events with 16 blocks of more than 1 MiB",
            "a step of 6 events with 3 blocks repeats: 5 rounds, 93.8 % of all events",
            "before it 1 block, of which 8.583 MiB live when it begins",
            "planned: most live at once 22.889 MiB, addresses 22.889 MiB, 0.00 % more",
            "not written: name a file by -o",
        ]
    );
    let whole = xseg(&["plan", &shipped("gpt2")]);
    assert!(text(&whole.stdout).contains("no step repeats, so the whole run is planned"), "{whole:?}");
}

/// Two streams, the device 20 ms behind, every block stamped and checked.
#[test]
fn verified_replays_with_a_plan_find_nothing_wrong_and_every_defect() {
    let (trace, plan) = (shipped("fsdp"), File::new("fsdp.plan", ""));
    json(&["plan", &trace, "-o", &plan.1, "--json"]);
    let conf = format!("plan:{}", plan.1);
    let base = ["replay", &trace, "--backend", "host", "--verify", "--conf", &conf, "--gpu-lag", "20ms", "--json"];
    let run = json(&[&base[..], &["--limit", "1.005x"]].concat());
    assert_eq!((&run["completed"], &run["mismatches"], &run["host_waits"]), (&true.into(), &0.into(), &0.into()));
    assert!(run["stamps_checked"].as_u64().unwrap() > 100_000, "{run}");
    let broken = xseg(&[&base[..], &["--limit", "1.005x", "--inject", "swap"]].concat());
    let report: Value = serde_json::from_slice(&broken.stdout).unwrap();
    assert!(broken.status.code() == Some(1) && report["mismatches"].as_u64().unwrap() > 0, "{report}");
}

/// A plan of another run, in a limit that is tight: the ordinary rules go on, and no block is wrong.
#[test]
fn a_plan_of_another_run_breaks_nothing() {
    let plan = File::new("moe.plan", "");
    json(&["plan", &shipped("moe"), "-o", &plan.1, "--json"]);
    let conf = format!("plan:{}", plan.1);
    let trace = shipped("llama_varlen");
    let run = json(&["replay", &trace, "--backend", "host", "--verify", "--conf", &conf, "--limit", "1.02x", "--json"]);
    assert_eq!((&run["completed"], &run["mismatches"]), (&true.into(), &0.into()));
}

/// Why a plan was of no use stands in the JSON, and under the table.
#[test]
fn a_plan_in_vain_is_told_where_results_are() {
    let (trace, plan) = (shipped("fsdp"), File::new("fsdp.plan", ""));
    json(&["plan", &trace, "-o", &plan.1, "--apart", "1ms", "--json"]);
    let conf = format!("plan:{}", plan.1);
    let run = |more: &[&str]| {
        let base = ["replay", &trace, "--backend", "sim", "--limit", "1.02x", "--conf", &conf];
        xseg(&[&base[..], more].concat())
    };
    let state = |more: &[&str]| -> Value {
        let report: Value = serde_json::from_slice(&run(&[more, &["--json"]].concat()).stdout).unwrap();
        report["detail"]["plan"].clone()
    };
    let followed = state(&[]);
    assert_eq!(followed["state"], "the plan was followed to its end");
    assert_eq!((&followed["in_vain"], &followed["planned"]), (&false.into(), &46_548.into()));
    // Later than planned for.
    let late = state(&["--gpu-lag", "50ms"]);
    let why = late["state"].as_str().unwrap();
    assert!(late["in_vain"] == true && why.starts_with("the plan was given up after "), "{late}");
    let table = run(&["--gpu-lag", "50ms"]);
    assert!(text(&table.stdout).contains(&format!("fsdp: {why}")), "{}", text(&table.stdout));
    assert!(!text(&run(&[]).stdout).contains("the plan was"), "nothing where all is well");
    let other = xseg(&["replay", &shipped("moe"), "--backend", "sim", "--conf", &conf]);
    assert!(
        text(&other.stdout).contains("moe: the plan is not followed: it foresaw none of 22508 requests"),
        "{}",
        text(&other.stdout)
    );
}

#[test]
fn wrong_inputs_are_refused_in_a_sentence() {
    let small = File::new("small.trace", "a,0,1000,0,0\nf,0,1\n");
    assert!(refused(&["plan", &small.1]).contains("no block of more than 1 MiB"));
    assert!(refused(&["plan", "/nowhere.trace"]).contains("cannot open /nowhere.trace"));
    assert!(refused(&["plan", &shipped("gpt2"), "-o", "/nowhere/at/all.plan"]).contains("cannot write the plan"));
    assert!(refused(&["plan"]).contains("TRACE"));
    let replay = |conf: &str| refused(&["replay", &shipped("gpt2"), "--backend", "sim", "--conf", conf]);
    assert!(replay("plan:/nowhere.plan").contains("cannot read the plan /nowhere.plan"));
    assert!(replay(&format!("plan:{}", small.1)).contains("is no plan"));
    assert!(replay("plan:").contains("names no file"));
}
