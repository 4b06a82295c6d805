//! One replay as one JSON object.
#![forbid(unsafe_code)]

use super::{DriverCalls, Outcome};
use crate::trace::Trace;
use serde::Serialize;
use std::time::Duration;

/// What `--json` prints for one trace and allocator. Sizes in bytes, times in milliseconds.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Report {
    /// File name without folder and endings.
    pub trace: String,
    /// The allocator.
    pub allocator: String,
    /// The backend.
    pub backend: String,
    /// The settings that differ from the defaults, as `XSEG_CONF` takes them.
    pub conf: String,
    /// Events of the trace.
    pub events: u64,
    /// All were run.
    pub completed: bool,
    /// Allocations that failed for lack of memory; the first ends the replay.
    pub ooms: u64,
    /// Most bytes live at once, as requested.
    pub peak_requested: u64,
    /// Most bytes in blocks, as the allocator rounds them.
    pub peak_allocated: u64,
    /// Most physical memory, mapped or not.
    pub peak_reserved: u64,
    /// The limit in bytes, also where it was set as a share of the backend's memory; none where none was set, or memory has no
    /// bound.
    pub limit: Option<u64>,
    /// Driver calls, in handles touched.
    pub driver_calls: DriverCalls,
    /// Driver time from the first to the last event, with the unmapping of zombies left over.
    pub driver_ms: f64,
    /// Driver time of giving everything back.
    pub teardown_ms: f64,
    /// Times that the host waited for the device.
    pub host_waits: u64,
    /// Waits queued on the device.
    pub gpu_waits: u64,
    /// Handles mapped elsewhere whole.
    pub handles_moved: u64,
    /// Handles whose idle part was mapped a second time.
    pub handles_joined: u64,
    /// Bytes of those idle parts, where the allocator says so.
    pub bytes_joined: u64,
    /// Second mappings of them that ended, where the allocator says so.
    pub joins_ended: u64,
    /// Bytes of handles moved or, where `bytes_joined` says nothing, joined.
    pub bytes_moved: u64,
    /// Bytes of live data copied.
    pub bytes_copied: u64,
    /// Time of the replay on the machine's clock.
    pub wall_ms: f64,
    /// Stamps compared, in a verified replay.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stamps_checked: Option<u64>,
    /// Stamps that were wrong or out of reach, in a verified replay.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mismatches: Option<u64>,
    /// Events run before the end, in a replay that ended early.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub events_run: Option<u64>,
    /// Why it ended early, or why giving everything back failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// What reading the trace made up, left out or repaired.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// What else the allocator has to say: of xseg with a plan, what became of that.
    #[serde(skip_serializing_if = "serde_json::Value::is_null")]
    pub detail: serde_json::Value,
    /// What `xseg least` found; null inside where no limit was enough.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub least: Option<LeastFields>,
}

/// What `xseg least` adds.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct LeastFields {
    /// The least limit in bytes.
    pub least: Option<u64>,
    /// It divided by peak requested.
    pub least_factor: Option<f64>,
    /// The highest limit below it that was tried and failed, in bytes; none where the lowest one completed.
    pub failing_limit: Option<u64>,
    /// Free bytes in handles that live blocks hold, when the replay failed there: what smaller handles would have given.
    pub failing_locked: Option<u64>,
    /// Driver time in ms at a limit of 1.002 times the least one, where that completes.
    pub driver_ms_above: Option<f64>,
}

impl Report {
    /// Puts an outcome together with what it was run with.
    #[must_use]
    pub fn new(
        trace: &Trace,
        allocator: &str,
        backend: &str,
        conf: String,
        limit: Option<u64>,
        outcome: &Outcome,
    ) -> Self {
        let figures = &outcome.figures;
        let error = outcome.stopped.as_ref().or(outcome.teardown_error.as_ref());
        Self {
            trace: trace.name.clone(),
            allocator: allocator.to_owned(),
            backend: backend.to_owned(),
            conf,
            events: trace.events.len() as u64,
            completed: outcome.completed(),
            ooms: outcome.ooms(),
            peak_requested: trace.peak_requested(),
            peak_allocated: figures.peak_allocated,
            peak_reserved: figures.peak_reserved,
            limit,
            driver_calls: figures.driver_calls,
            driver_ms: figures.driver_nanos as f64 / 1e6,
            teardown_ms: millis(outcome.teardown),
            host_waits: figures.host_waits,
            gpu_waits: figures.gpu_waits,
            handles_moved: figures.handles_moved,
            handles_joined: figures.handles_joined,
            bytes_joined: figures.bytes_joined,
            joins_ended: figures.joins_ended,
            bytes_moved: figures.bytes_moved,
            bytes_copied: figures.bytes_copied,
            wall_ms: millis(outcome.wall),
            stamps_checked: outcome.findings.as_ref().map(|findings| findings.stamps_checked),
            mismatches: outcome.findings.as_ref().map(|findings| findings.mismatches),
            events_run: (!outcome.completed()).then_some(outcome.events_run as u64),
            error: error.map(ToString::to_string),
            notes: trace.notes.clone(),
            detail: figures.detail.clone(),
            least: None,
        }
    }

    /// Adds the answer of `xseg least`, in bytes; `None`: no limit was enough. `failing`: the highest limit below it that
    /// failed, and what was locked in partly live handles then. `above`: driver time in ms at 1.002 times the least.
    pub fn set_least(&mut self, least: Option<u64>, failing: Option<(u64, Option<u64>)>, above: Option<f64>) {
        let least_factor = least.map(|least| least as f64 / self.peak_requested as f64);
        let (failing_limit, failing_locked) = (failing.map(|one| one.0), failing.and_then(|one| one.1));
        self.least = Some(LeastFields { least, least_factor, failing_limit, failing_locked, driver_ms_above: above });
    }

    /// Completed, gave everything back, and found no mismatch?
    #[must_use]
    pub fn is_good(&self) -> bool {
        self.completed && self.error.is_none() && self.mismatches.unwrap_or(0) == 0
    }

    /// Why the plan of the settings was of no use, if it was.
    #[must_use]
    pub fn plan_in_vain(&self) -> Option<&str> {
        let plan = &self.detail["plan"];
        plan["state"].as_str().filter(|_| plan["in_vain"] == true)
    }

    /// Share of the physical memory that no block needed at the peaks: 1 − peak allocated / peak reserved.
    #[must_use]
    pub fn fragmentation(&self) -> f64 {
        if self.peak_reserved == 0 { 0.0 } else { 1.0 - self.peak_allocated as f64 / self.peak_reserved as f64 }
    }
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
