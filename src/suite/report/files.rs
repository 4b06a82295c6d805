//! The files of a report.

use super::{Report, html, not_best, terminal};
use crate::suite::measure::Quantiles;
use crate::suite::row::{Measures, Row};
use serde::Serialize;
use std::io;
use std::path::{Path, PathBuf};

/// Names of the files, the page first.
pub(crate) const NAMES: [&str; 3] = ["report.html", "report.json", "rows.csv"];

/// Makes `folder` if it is not there, and sees whether a report can be written there.
///
/// # Errors
/// What the system refuses.
pub(crate) fn prepare(folder: &Path) -> io::Result<()> {
    std::fs::create_dir_all(folder)?;
    if let Some(name) = NAMES.iter().find(|name| folder.join(name).is_dir()) {
        return Err(io::Error::other(format!("{name} is a folder there")));
    }
    for name in NAMES {
        std::fs::write(part(folder, name), "")?;
        std::fs::remove_file(part(folder, name))?;
    }
    Ok(())
}

/// Where a file is written before it takes its place.
fn part(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("{name}.part"))
}

/// Writes all files into `folder`, which is made if it is not there; their paths. Until all are written, those of a
/// run before stay as they are.
///
/// # Errors
/// What the system refuses.
pub(crate) fn write(report: &Report, folder: &Path) -> io::Result<Vec<PathBuf>> {
    std::fs::create_dir_all(folder)?;
    let contents = [html::page(report).map_err(io::Error::other)?, json(report)?, csv(report)?];
    let mut paths = Vec::new();
    for (name, content) in NAMES.iter().zip(contents) {
        std::fs::write(part(folder, name), content)?;
    }
    for name in NAMES {
        let path = folder.join(name);
        std::fs::rename(part(folder, name), &path)?;
        paths.push(path);
    }
    Ok(paths)
}

/// Everything but curves and pictures.
fn json(report: &Report) -> io::Result<String> {
    let rows = report.rows();
    let standing: Vec<_> =
        [terminal::summary(report), not_best::table(report)].into_iter().chain(report.tables.iter().cloned()).collect();
    let all = serde_json::json!({
        "setup": report.setup,
        "rows": rows,
        "moving": report.moving,
        "tables": standing,
        "left_out": report.skipped,
    });
    Ok(serde_json::to_string_pretty(&all).map_err(io::Error::from)? + "\n")
}

/// One line a row.
fn csv(report: &Report) -> io::Result<String> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    for (number, row) in report.rows().into_iter().enumerate() {
        let fields = fields(row);
        if number == 0 {
            writer.write_record(fields.iter().map(|field| field.0.as_str())).map_err(io::Error::other)?;
        }
        writer.write_record(fields.iter().map(|field| field.1.as_str())).map_err(io::Error::other)?;
    }
    let bytes = writer.into_inner().map_err(|error| io::Error::other(error.to_string()))?;
    String::from_utf8(bytes).map_err(io::Error::other)
}

/// A row as flat fields: nested names joined by `_`, as its JSON has them.
fn fields(row: &Row) -> Vec<(String, String)> {
    let mut out = Vec::new();
    let mut add = |name: &str, value: String| out.push((name.to_owned(), value));
    add("workload", row.workload.clone());
    add("origin", plain(row.origin));
    add("allocator", row.allocator.clone());
    add("backend", row.backend.clone());
    add("events", row.events.to_string());
    add("peak_requested_bytes", row.peak_requested_bytes.to_string());
    add("limit_bytes", row.limit_bytes.to_string());
    add("least_bytes", plain(row.least_bytes));
    add("least_step_factor", plain(row.least_step_factor));
    add("least_factor", plain(row.least_factor));
    measures("plenty", &row.plenty, &mut out);
    measures("limited", &row.limited, &mut out);
    out
}

/// A scalar as text; nothing for null.
fn plain(value: impl Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::Null) | Err(_) => String::new(),
        Ok(serde_json::Value::String(text)) => text,
        Ok(other) => other.to_string(),
    }
}

fn measures(prefix: &str, run: &Measures, out: &mut Vec<(String, String)>) {
    let mut add = |name: &str, value: String| out.push((format!("{prefix}_{name}"), value));
    add("completed", run.completed.to_string());
    add("refused_requests", run.refused_requests.to_string());
    add("first_refused_event", plain(run.first_refused_event));
    add("failure", plain(&run.failure));
    add("peak_allocated_bytes", run.peak_allocated_bytes.to_string());
    add("peak_reserved_bytes", run.peak_reserved_bytes.to_string());
    add("external_fragmentation_percent", plain(run.external_fragmentation_percent));
    add("internal_fragmentation_percent", plain(run.internal_fragmentation_percent));
    let calls = &run.driver_calls;
    for (name, count) in [
        ("create", calls.create),
        ("map", calls.map),
        ("set_access", calls.set_access),
        ("unmap", calls.unmap),
        ("release", calls.release),
        ("reserve", calls.reserve),
    ] {
        add(&format!("driver_calls_{name}"), count.to_string());
    }
    add("driver_ms", plain(run.driver_ms));
    add("teardown_ms", plain(run.teardown_ms));
    add("host_waits", run.host_waits.to_string());
    add("gpu_waits", run.gpu_waits.to_string());
    add("handles_moved", run.handles_moved.to_string());
    add("handles_joined", run.handles_joined.to_string());
    add("moved_bytes", run.moved_bytes.to_string());
    add("copied_bytes", run.copied_bytes.to_string());
    for (name, quantiles) in [("stall_us", run.stall_us), ("machine_ns", run.machine_ns)] {
        let value = |of: fn(Quantiles) -> f64| plain(quantiles.map(of));
        add(&format!("{name}_p50"), value(|q| q.p50));
        add(&format!("{name}_p90"), value(|q| q.p90));
        add(&format!("{name}_p99"), value(|q| q.p99));
        add(&format!("{name}_p999"), value(|q| q.p999));
        add(&format!("{name}_max"), value(|q| q.max));
    }
    add("hot_path_ns", plain(run.hot_path_ns));
    add("wall_ms", plain(run.wall_ms));
    add("stamps_checked", plain(run.stamps_checked));
    add("mismatches", plain(run.mismatches));
}
