//! Recorded training runs need no more memory than was found (counts of bytes, the same on every machine).
#![cfg(feature = "cli")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use serde_json::Value;
use std::process::{Command, Stdio};

/// `xseg replay` of a recording on `sim`: its exit status and its line.
fn replay(name: &str, more: &[&str]) -> (Option<i32>, Value) {
    let trace = format!("{}/benches/recordings/{name}.trace.xz", env!("CARGO_MANIFEST_DIR"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_xseg"));
    command.args(["replay", &trace, "--backend", "sim", "--json"]).args(more);
    let output = command.env_remove("XSEG_CONF").stdin(Stdio::null()).output().unwrap();
    (output.status.code(), serde_json::from_slice(&output.stdout).unwrap())
}

#[test]
fn offloaded_activations_do_not_scatter_memory() {
    let (status, plenty) = replay("lora_offload", &[]);
    let (reserved, requested) = (plenty["peak_reserved"].as_u64().unwrap(), plenty["peak_requested"].as_u64().unwrap());
    // 1.105 times while blocks with declared uses were looked after on the slow path only.
    assert!(status == Some(0) && reserved < requested / 100 * 103, "{plenty}");
    let (status, tight) = replay("lora_offload", &["--limit", "1.01x"]);
    assert_eq!((status, &tight["host_waits"], &tight["gpu_waits"]), (Some(0), &0.into(), &0.into()), "{tight}");
}

#[test]
fn small_handles_complete_where_large_ones_do_not() {
    let (status, small) = replay("gpt2_medium", &["--limit", "1.006x", "--conf", "handles:small"]);
    assert_eq!((status, &small["host_waits"]), (Some(0), &0.into()), "{small}");
    let (status, large) = replay("gpt2_medium", &["--limit", "1.006x"]);
    assert_eq!((status, &large["ooms"]), (Some(1), &1.into()), "{large}");
}
