//! The `xseg` command as a user runs it: output, exit status, errors that say what to do.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// 2 blocks of 32 MiB with one of 16 MiB between, then one of 48 MiB that fits only if pages move.
const GAPS: &str =
    "# test\n# {}\na,0,33554432,0,0\na,1,16777216,0,10\na,2,33554432,0,20\nf,0,30\nf,2,40\na,3,50331648,0,50\n";
const MIB: u64 = 1 << 20;

fn xseg(args: &[&str]) -> Output {
    with_conf(args, None)
}

fn with_conf(args: &[&str], conf: Option<&str>) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_xseg"));
    command.args(args).env_remove("XSEG_CONF").stdin(Stdio::null());
    if let Some(conf) = conf {
        command.env("XSEG_CONF", conf);
    }
    command.output().unwrap()
}

fn out(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).unwrap()
}

fn err(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).unwrap()
}

fn json(output: &Output) -> Vec<Value> {
    out(output).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn file(folder: &tempfile::TempDir, name: &str, text: &str) -> String {
    let path = folder.path().join(name);
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

fn shipped(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("traces").join(name)
}

#[test]
fn replay_prints_every_field_of_the_contract() {
    let folder = tempfile::tempdir().unwrap();
    let trace = file(&folder, "gaps.trace", GAPS);
    let output = xseg(&["replay", &trace, "--backend", "sim", "--limit", "1.2x", "--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", err(&output));
    let [report] = &json(&output)[..] else { panic!("{}", out(&output)) };
    for (field, value) in [
        ("trace", Value::from("gaps")),
        ("allocator", "xseg".into()),
        ("backend", "sim".into()),
        ("events", 6.into()),
        ("completed", true.into()),
        ("ooms", 0.into()),
        ("peak_requested", (80 * MIB).into()),
        ("peak_allocated", (80 * MIB).into()),
        ("limit", (96 * MIB).into()),
        ("conf", "limit:96MiB,backend:sim".into()),
        ("bytes_copied", 0.into()),
        ("host_waits", 0.into()),
    ] {
        assert_eq!(report[field], value, "{field}");
    }
    for field in ["peak_reserved", "gpu_waits", "handles_moved", "handles_joined", "bytes_moved"] {
        assert!(report[field].is_u64(), "{field}");
    }
    for field in ["driver_ms", "teardown_ms", "wall_ms"] {
        assert!(report[field].as_f64().is_some_and(|ms| ms > 0.0), "{field}");
    }
    for field in ["create", "map", "set_access", "unmap", "release", "reserve"] {
        assert!(report["driver_calls"][field].is_u64(), "{field}");
    }
    assert!(report.get("mismatches").is_none() && report.get("least").is_none());
    assert!(report["peak_reserved"].as_u64() <= Some(96 * MIB));
}

#[test]
fn out_of_memory_is_status_1_and_ends_the_replay() {
    let folder = tempfile::tempdir().unwrap();
    let trace = file(&folder, "gaps.trace", GAPS);
    let output = xseg(&["replay", &trace, "--backend", "sim", "--limit", "64MiB", "--json"]);
    assert_eq!(output.status.code(), Some(1));
    let report = &json(&output)[0];
    assert_eq!((&report["completed"], &report["ooms"], &report["events_run"]), (&false.into(), &1.into(), &2.into()));
    assert!(err(&output).contains("gaps with xseg: out of memory: 32.000 MiB asked for"), "{}", err(&output));
}

#[test]
fn a_verified_replay_passes_and_finds_injected_faults() {
    let trace = shipped("gpt2.trace.xz");
    let args = ["replay", trace.to_str().unwrap(), "--backend", "host", "--verify", "--limit", "1.05x", "--json"];
    let output = xseg(&args);
    assert_eq!(output.status.code(), Some(0), "{}", err(&output));
    let report = &json(&output)[0];
    assert_eq!(report["mismatches"], 0);
    let late = xseg(&[&args[..], &["--gpu-lag", "20ms"]].concat());
    assert_eq!((late.status.code(), &json(&late)[0]["mismatches"]), (Some(0), &0.into()));
    assert!(report["stamps_checked"].as_u64() > Some(10_000), "{report}");
    for fault in ["swap", "lost", "early-unmap"] {
        let output = xseg(&[&args[..], &["--inject", fault]].concat());
        assert_eq!(output.status.code(), Some(1), "{fault}: {}", out(&output));
        assert!(json(&output)[0]["mismatches"].as_u64() > Some(0), "{fault}");
        assert!(err(&output).contains("mismatch: block"), "{fault}: {}", err(&output));
    }
}

#[test]
fn a_peak_below_a_granule_gets_one() {
    let folder = tempfile::tempdir().unwrap();
    let trace = file(&folder, "little.trace", "a,0,1000,0,0\nf,0,10\n");
    let report = json(&xseg(&["replay", &trace, "--limit", "1.02x", "--json"])).remove(0);
    assert_eq!((report["limit"].as_u64(), &report["completed"]), (Some(2 * MIB), &true.into()), "{report}");
    let least = json(&xseg(&["least", &trace, "--json", "--backend", "sim"])).remove(0);
    assert_eq!(least["least"].as_u64(), Some(2 * MIB), "{least}");
}

#[test]
fn least_is_the_first_of_21_steps() {
    let folder = tempfile::tempdir().unwrap();
    let trace = file(&folder, "gaps.trace", GAPS);
    let output = xseg(&["least", &trace, "--backend", "sim", "--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", err(&output));
    let report = &json(&output)[0];
    let least = report["least"].as_u64().unwrap();
    assert_eq!((report["limit"].as_u64(), report["completed"].as_bool()), (Some(least), Some(true)));
    assert!((80 * MIB..=100 * MIB).contains(&least), "{report}");
    assert_eq!(report["least_factor"].as_f64(), Some(least as f64 / (80 * MIB) as f64));
    assert_eq!((&report["failing_limit"], &report["failing_locked"]), (&Value::Null, &Value::Null), "none below");
    let misused = xseg(&["least", &trace, "--limit", "1G"]);
    assert!(misused.status.code() == Some(2) && err(&misused).contains("leave --limit out"));
}

/// What was locked just below the least limit is what the error there says of handles shared with live blocks.
#[test]
fn least_says_what_partly_live_handles_kept_just_below_it() {
    let trace = shipped("gpt2.trace.xz");
    let trace = trace.to_str().unwrap();
    let report = json(&xseg(&["least", trace, "--backend", "sim", "--json"])).remove(0);
    let (limit, least) = (report["failing_limit"].as_u64().unwrap(), report["least"].as_u64().unwrap());
    let step = report["peak_requested"].as_u64().unwrap() / 2000;
    assert!(limit < least && least - limit <= step + 2 * MIB, "the step below: {report}");
    let failed = xseg(&["replay", trace, "--backend", "sim", "--limit", &limit.to_string(), "--json"]);
    assert_eq!(failed.status.code(), Some(1));
    let error = json(&failed).remove(0)["error"].as_str().unwrap().to_owned();
    let locked = report["failing_locked"].as_u64().unwrap();
    assert!(
        error.contains(&format!("{:.3} MiB shares handles with live blocks", locked as f64 / MIB as f64)),
        "{error}"
    );
    assert!(locked > 10 * MIB, "{locked}");
    let shown = xseg(&["least", trace, "--backend", "sim"]);
    let cell = out(&shown).lines().find(|line| line.contains("gpt2 ")).unwrap().split('┆').nth(4).unwrap();
    assert_eq!(cell.trim(), format!("{:.0}", locked as f64 / MIB as f64));
    // Models of other designs do not know.
    let report = json(&xseg(&["least", trace, "--backend", "sim", "--allocator", "torch-native", "--json"])).remove(0);
    assert!(report["failing_limit"].as_u64().is_some() && report["failing_locked"].is_null(), "{report}");
}

/// What `least` shows, typed back as a limit, is enough.
#[test]
fn the_factor_that_least_shows_completes() {
    let trace = format!("{}/traces/llama_ckpt.trace.xz", env!("CARGO_MANIFEST_DIR"));
    let output = xseg(&["least", &trace, "--backend", "sim"]);
    let line = out(&output).lines().find(|line| line.contains("llama_ckpt ")).unwrap();
    let factor = line.split('┆').nth(3).unwrap().trim();
    let replayed = xseg(&["replay", &trace, "--backend", "sim", "--limit", &format!("{factor}x")]);
    assert_eq!(replayed.status.code(), Some(0), "{factor}: {}", out(&replayed));
}

#[test]
fn every_allocator_replays_with_the_same_limit() {
    let folder = tempfile::tempdir().unwrap();
    let trace = file(&folder, "gaps.trace", GAPS);
    let output = xseg(&["replay", &trace, "--allocator", "all", "--backend", "sim", "--limit", "200MiB", "--json"]);
    let reports = json(&output);
    let names: Vec<_> = reports.iter().map(|report| report["allocator"].as_str().unwrap()).collect();
    assert_eq!((names[0], names.contains(&"torch-expandable")), ("xseg", true));
    for report in &reports {
        let name = &report["allocator"];
        assert_eq!((&report["limit"], &report["backend"]), (&(200 * MIB).into(), &"sim".into()), "{name}");
        assert_eq!((&report["completed"], report.get("error")), (&true.into(), None), "{name}");
        assert!((80 * MIB..=200 * MIB).contains(&report["peak_reserved"].as_u64().unwrap()), "{report}");
        assert!(report["teardown_ms"].as_f64().unwrap() > 0.0, "{report}");
    }
    let refused = xseg(&["replay", &trace, "--allocator", "slab", "--backend", "host"]);
    assert!(refused.status.code() == Some(2) && err(&refused).contains("give --backend sim"));
}

#[test]
fn tables_are_for_people() {
    let folder = tempfile::tempdir().unwrap();
    file(&folder, "b.trace", GAPS);
    file(&folder, "a.trace", GAPS);
    file(&folder, "notes.txt", "not a trace");
    let output = xseg(&["replay", folder.path().to_str().unwrap(), "--backend", "sim"]);
    assert_eq!((output.status.code(), err(&output)), (Some(0), ""));
    let text = out(&output);
    for part in
        ["fragm.", "GiB", "handles", "driver", "modelled by h200-a", "settings: backend:sim", "allocator xseg", "ok"]
    {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert!(text.find(" a ").unwrap() < text.find(" b ").unwrap(), "in order of name");
    // Limits that are factors differ from line to line, and the other settings are shown all the same.
    file(&folder, "c.trace", "a,0,4194304,0,0\n");
    let text = ["replay", folder.path().to_str().unwrap(), "--conf", "handles:small,backend:sim", "--limit", "2x"];
    let shown = xseg(&text);
    assert!(out(&shown).contains("settings: handles:small, backend:sim, the limit of each line"), "{shown:?}");
}

#[test]
fn a_snapshot_replays_and_is_explained() {
    let output = xseg(&["replay", shipped("llama_tiny_snapshot.pickle.xz").to_str().unwrap(), "--backend", "sim"]);
    assert_eq!(output.status.code(), Some(0), "{}", err(&output));
    assert!(out(&output).contains("86 segment_map"));
}

#[test]
fn the_command_line_is_stronger_than_conf_and_conf_than_the_environment() {
    let folder = tempfile::tempdir().unwrap();
    let trace = file(&folder, "gaps.trace", GAPS);
    let conf = |args: &[&str]| {
        let all = [&["replay", &trace, "--json"], args].concat();
        let output = with_conf(&all, Some("backend:host,limit:1G,defrag:eager"));
        assert_eq!(output.status.code(), Some(0), "{}", err(&output));
        json(&output)[0]["conf"].as_str().unwrap().to_owned()
    };
    assert_eq!(conf(&[]), "limit:1GiB,defrag:eager,backend:host");
    assert_eq!(conf(&["--conf", "limit:2G,backend:sim"]), "limit:2GiB,defrag:eager,backend:sim");
    let all = ["--conf", "limit:2G,backend:host", "--limit", "3G", "--backend", "sim"];
    assert_eq!(conf(&all), "limit:3GiB,defrag:eager,backend:sim");
}

/// A share comes to the bytes that `xseg info` shows, and the table has a column for it as for a size.
#[test]
fn a_limit_that_is_a_share_is_shown_in_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let trace = file(&folder, "gaps.trace", GAPS);
    let conf = Some("limit:50%,backend:host");
    let bytes = json(&with_conf(&["info", "--json"], conf)).remove(1)["limit"].as_u64().unwrap();
    let report = json(&with_conf(&["replay", &trace, "--json"], conf)).remove(0);
    assert_eq!((report["limit"].as_u64(), &report["conf"]), (Some(bytes), &"limit:50%,backend:host".into()));
    let shown = with_conf(&["replay", &trace], conf);
    let gib = format!("{:.3}", bytes as f64 / (1u64 << 30) as f64);
    let line = out(&shown).lines().find(|line| line.contains("gaps ")).unwrap();
    assert_eq!(line.split('┆').nth(1).unwrap().trim(), gib, "{}", out(&shown));
    // A share of memory without a bound is none, and so is no setting.
    for conf in ["limit:50%,backend:sim", "backend:host"] {
        assert_eq!(json(&with_conf(&["replay", &trace, "--json"], Some(conf)))[0]["limit"], Value::Null, "{conf}");
    }
}

#[test]
fn statistics_at_the_end_are_those_of_the_replay() {
    let folder = tempfile::tempdir().unwrap();
    let trace = file(&folder, "gaps.trace", GAPS);
    let output = with_conf(&["replay", &trace, "--json"], Some("stats:on,backend:host"));
    let field = |name: &str| {
        let line = err(&output).lines().find_map(|line| line.trim().strip_prefix(&format!("{name}: ")));
        line.unwrap().trim_end_matches(',').parse::<u64>().unwrap()
    };
    // One block of 16 MiB and one of 48 live on.
    assert_eq!((field("live_blocks"), field("allocated")), (2, 64 * MIB));
    assert_eq!(field("reserved"), field("allocated") + field("free"), "{}", err(&output));
    let report = json(&output).remove(0);
    assert_eq!((Some(field("peak_reserved")), 0), (report["peak_reserved"].as_u64(), field("zombie")));
    assert_eq!(Some(field("driver_nanos") as f64 / 1e6), report["driver_ms"].as_f64(), "without the teardown");
    assert_eq!(err(&output).matches("Stats").count(), 1);
}

#[test]
fn conf_shows_every_key_with_default_and_present_value() {
    let output = with_conf(&["conf"], Some("limit:40G,shrink:idle=5s"));
    assert_eq!(output.status.code(), Some(0));
    assert!(out(&output).contains("XSEG_CONF for the present values: limit:40GiB,shrink:idle=5s"));
    let output = with_conf(&["conf", "--json", "--conf", "limit:1G"], Some("limit:40G"));
    let keys = json(&output);
    assert_eq!(keys.len(), xseg::conf::KEYS.len());
    assert_eq!(
        (&keys[0]["key"], &keys[0]["value"], &keys[0]["default"]),
        (&"limit".into(), &"1GiB".into(), &"auto".into())
    );
    assert!(keys.iter().all(|key| key["meaning"].as_str().is_some_and(|text| !text.is_empty())));
}

#[test]
fn info_lists_the_backends() {
    let output = xseg(&["info", "--json"]);
    assert_eq!(output.status.code(), Some(0));
    let backends = json(&output);
    let names: Vec<_> = backends.iter().map(|backend| backend["backend"].as_str().unwrap()).collect();
    assert_eq!(names, ["cuda", "host", "sim"]);
    assert_eq!((&backends[2]["available"], &backends[2]["total"]), (&true.into(), &Value::Null));
    let picked: Vec<_> = backends.iter().filter(|backend| backend["auto"] == true).collect();
    let first = backends.iter().find(|backend| backend["available"] == true).unwrap();
    assert_eq!((picked.len(), &picked[0]["backend"]), (1, &first["backend"]));
    let shown = with_conf(&["info"], Some("backend:sim"));
    let name = first["backend"].as_str().unwrap();
    for part in ["modelled by h200-a", &format!("backend:auto is {name} here"), "XSEG_CONF sets backend:sim"] {
        assert!(out(&shown).contains(part), "{part} in {}", out(&shown));
    }
}

#[test]
fn info_shows_what_the_settings_come_to() {
    let of_sim = |conf: &str| json(&with_conf(&["info", "--json"], Some(conf))).remove(2);
    let sizes = |info: &Value| ["limit", "handles_staying", "handles_churning"].map(|field| info[field].as_u64());
    assert_eq!(sizes(&of_sim("")), [None, Some(32 * MIB), Some(32 * MIB)]);
    assert_eq!(sizes(&of_sim("limit:8GiB")), [Some(8 << 30), Some(16 * MIB), Some(8 * MIB)]);
    assert_eq!(sizes(&of_sim("limit:8GiB,handle_max:4MiB")), [Some(8 << 30), Some(4 * MIB), Some(4 * MIB)]);
    let shown = with_conf(&["info"], Some("limit:8GiB"));
    let line = "limit: 8.000 GiB; pieces of memory of up to 16.000 MiB, 8.000 MiB once memory comes and goes";
    assert!(out(&shown).contains(line), "{}", out(&shown));
    // `--conf` over the variable, as for the other commands.
    let over = |conf: &str| with_conf(&["info", "--conf", conf], Some("limit:4GiB,backend:sim"));
    assert!(out(&over("limit:8GiB")).contains(line) && out(&over("limit:8GiB")).contains("XSEG_CONF sets backend:sim"));
    assert!(out(&over("backend:host")).contains("--conf sets backend:host"), "{:?}", over("backend:host"));
    assert!(err(&over("limt:8GiB")).contains("--conf: there is no key `limt`"), "{:?}", over("limt:8GiB"));
    assert!(err(&over("plan:/no/such.plan")).contains("plan in --conf: "), "{:?}", over("plan:/no/such.plan"));
    // A plan that does not fit, and one that is none.
    let folder = tempfile::tempdir().unwrap();
    let plan = file(&folder, "run.plan", "xseg plan 1\nblocks 1 step 1 top 8192\n8192 0 1 0\n");
    let plan = format!("backend:sim,plan:{plan}");
    assert!(!out(&with_conf(&["info"], Some(&plan))).contains("plan is not followed"));
    let shown = with_conf(&["info"], Some(&format!("{plan},limit:2MiB")));
    assert!(
        out(&shown).contains("the plan is not followed: it takes 4.000 MiB and the limit is 2.000 MiB"),
        "{shown:?}"
    );
    let refused = with_conf(&["info"], Some("plan:/no/such.plan"));
    assert!(refused.status.code() == Some(2) && err(&refused).contains("cannot read the plan"), "{refused:?}");
}

/// Where the backend of `XSEG_CONF` cannot be used, no program that reads it can start.
#[test]
fn info_fails_where_the_backend_that_is_set_does_not_work() {
    let output = with_conf(&["info"], Some("backend:cuda=999"));
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(
        err(&output).contains("XSEG_CONF sets backend:cuda=999, and the cuda backend is not available"),
        "{output:?}"
    );
    assert!(out(&output).contains("cuda: not available") && out(&output).contains("sim: simulated device"));
}

#[test]
fn bad_usage_and_input_are_status_2_with_advice() {
    let folder = tempfile::tempdir().unwrap();
    let good = file(&folder, "good.trace", GAPS);
    let bad = file(&folder, "bad.trace", "a,0,10,0,0\nf,1,2\n");
    let empty = tempfile::tempdir().unwrap();
    let empty = empty.path().to_str().unwrap();
    let cases: &[(&[&str], &str)] = &[
        (&["replay"], "required"),
        (&["replay", "/no/such.trace", "--backend", "sim"], "check the path"),
        (&["replay", empty], "holds no trace"),
        (&["plan", empty], "one file is needed"),
        (&["replay", &bad, "--backend", "sim"], "line 2: block 1 is not live"),
        (&["replay", &good, "--backend", "tpu"], "auto, cuda, cuda=N"),
        (&["replay", &good, "--limit", "lots"], "1.02x"),
        (&["replay", &good, "--limit", "1"], "1x was probably meant"),
        (&["replay", &good, "--limit", "1.02"], "1.02x was probably meant"),
        (&["least", &good, "--limit", "1.02"], "1.02x was probably meant"),
        (&["replay", &good, "--limit", "0"], "at least 2MiB"),
        (&["replay", &good, "--conf", "limit:1.02x"], "a factor of a trace's peak is for `--limit`"),
        (&["least", &good, "--limit", "1.02x"], "leave --limit out"),
        (&["replay", &good, "--limit", "0x"], "such as 1.02x"),
        (&["replay", &good, "--limit", "0.01x"], "at least 2MiB"),
        (&["replay", &good, "--allocator", "all", "--verify"], "give --allocator xseg"),
        (&["replay", &good, "--allocator", "slab", "--conf", "backend:host"], "give --backend sim"),
        (&["replay", &good, "--gpu-lag", "5"], "no unit"),
        (&["replay", &good, "--allocator", "jemalloc"], "the allocators are xseg"),
        (&["replay", &good, "--inject", "swap"], "--verify"),
        (&["replay", &good, "--verify", "--inject", "fire"], "swap, lost and early-unmap"),
        (&["replay", &good, "--backend", "sim", "--verify"], "give --backend host"),
        (&["replay", &good, "--conf", "limt:4G"], "did you mean `limit`"),
        (&["replay", &good, "--backend", "sim", "--conf", "warmup:1G", "--limit", "100MiB"], "lower `warmup`"),
        (&["conf", "--conf", "stats:maybe"], "on or off"),
    ];
    for (args, advice) in cases {
        let output = xseg(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", err(&output));
        assert!(err(&output).contains(advice), "{args:?}: {}", err(&output));
        assert_eq!(out(&output), "", "{args:?}");
    }
    // One bad trace does not keep the others from being replayed.
    let output = xseg(&["replay", &bad, &good, "--backend", "sim", "--json"]);
    assert_eq!((output.status.code(), json(&output).len()), (Some(2), 1));
    // Nor does a file's name or content reach a terminal as anything but text.
    let strange = file(&folder, "\u{1b}[2Jbad.pickle", "\u{1b}[31m\u{7}\n");
    let output = xseg(&["replay", &strange]);
    let said =
        r"\u{1b}[2Jbad.pickle: the file is no pickle, though it is named like one: it begins with `\u{1b}[31m\u{7}`";
    assert!(output.status.code() == Some(2) && err(&output).contains(said), "{}", err(&output));
    assert!(!err(&output).trim_end().contains(char::is_control), "{}", err(&output));
    assert_eq!(err(&xseg(&["replay", "/no/such.trace"])).matches("/no/such.trace").count(), 1);
    let output = with_conf(&["info"], Some("foo:1"));
    assert_eq!((output.status.code(), out(&output)), (Some(2), ""));
    assert!(err(&output).contains("there is no key `foo`"), "{}", err(&output));
    let output = with_conf(&["conf"], Some("limit"));
    assert!(output.status.code() == Some(2) && err(&output).contains("XSEG_CONF: `limit` has no value"));
}

#[test]
fn models_run_on_sim_beside_an_xseg_that_runs_elsewhere() {
    let folder = tempfile::tempdir().unwrap();
    let trace = file(&folder, "gaps.trace", GAPS);
    let output = with_conf(&["replay", &trace, "--allocator", "all", "--json"], Some("backend:host"));
    assert_eq!((output.status.code(), err(&output)), (Some(0), ""));
    for report in json(&output) {
        let backend = if report["allocator"] == "xseg" { "host" } else { "sim" };
        assert_eq!(report["backend"], backend, "{}", report["allocator"]);
        assert!(report["conf"].as_str().unwrap().contains(&format!("backend:{backend}")), "{report}");
    }
    let output = xseg(&["replay", &trace, "--allocator", "all", "--backend", "host"]);
    let said = "allocator xseg on backend host, the models of other designs on sim; driver time modelled by h200-a";
    assert!(out(&output).contains(said), "{}", out(&output));
}

#[test]
fn least_offers_no_limit() {
    let help = |command: &str| out(&xseg(&[command, "--help"])).to_owned();
    assert!(help("replay").contains("--limit <") && !help("least").contains("--limit <"));
    assert!(["replay", "least", "bench"].iter().all(|command| help(command).contains("256 MiB")));
}

#[test]
fn help_has_an_example_for_every_command() {
    for command in ["replay", "least", "bench", "conf", "info"] {
        let output = xseg(&[command, "--help"]);
        assert_eq!(output.status.code(), Some(0));
        assert!(out(&output).contains("Example"), "{command}");
        assert!(out(&output).contains(&format!("xseg {command}")), "{command}");
    }
}

#[test]
fn a_reader_that_goes_away_is_no_panic() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_xseg"));
    let mut child = command.args(["conf", "--json"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), err(&output)), (Some(0), ""));
}
