//! The figures of one allocator on one workload, as reports print them. Units stand in the names.

use super::measure::{Longest, Quantiles, Run};
use super::workloads::{Origin, Workload};
use crate::replay::{DriverCalls, Outcome};
use serde::Serialize;
use std::time::Duration;

/// How one run went: with plenty of memory, or under the limit.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Measures {
    /// All events were run and no request was refused.
    pub(crate) completed: bool,
    /// Requests refused for lack of memory. A verified replay ends with the first.
    pub(crate) refused_requests: u64,
    /// Event of the first one, counted from 0.
    pub(crate) first_refused_event: Option<u64>,
    /// A failure that is no lack of memory.
    pub(crate) failure: Option<String>,
    pub(crate) peak_allocated_bytes: u64,
    pub(crate) peak_reserved_bytes: u64,
    /// Free memory outside blocks: (peak reserved − peak allocated) / peak reserved.
    pub(crate) external_fragmentation_percent: f64,
    /// Rounding inside blocks: (peak allocated − peak requested) / peak reserved.
    pub(crate) internal_fragmentation_percent: f64,
    /// In handles touched.
    pub(crate) driver_calls: DriverCalls,
    pub(crate) driver_ms: f64,
    pub(crate) teardown_ms: f64,
    pub(crate) host_waits: u64,
    pub(crate) gpu_waits: u64,
    pub(crate) handles_moved: u64,
    pub(crate) handles_joined: u64,
    pub(crate) moved_bytes: u64,
    pub(crate) copied_bytes: u64,
    /// Driver time and waiting in one allocation.
    pub(crate) stall_us: Option<Quantiles>,
    pub(crate) longest_stall: Option<Longest>,
    /// The machine's time of one allocation. Differs from run to run.
    pub(crate) machine_ns: Option<Quantiles>,
    /// Median of it without a stall. Differs from run to run.
    pub(crate) hot_path_ns: Option<f64>,
    /// The machine's time in all calls. Differs from run to run.
    pub(crate) wall_ms: f64,
    /// Stamps compared and found wrong, in a verified replay.
    pub(crate) stamps_checked: Option<u64>,
    pub(crate) mismatches: Option<u64>,
}

/// One allocator on one workload.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Row {
    pub(crate) workload: String,
    pub(crate) origin: Origin,
    pub(crate) allocator: String,
    pub(crate) backend: String,
    pub(crate) events: u64,
    pub(crate) peak_requested_bytes: u64,
    /// Without a limit.
    pub(crate) plenty: Measures,
    pub(crate) limit_bytes: u64,
    /// Under the limit.
    pub(crate) limited: Measures,
    /// The least limit at which the replay completes; not asked for where `least_searched` is false.
    pub(crate) least_bytes: Option<u64>,
    pub(crate) least_searched: bool,
    /// The grid of the search, in times peak requested.
    pub(crate) least_step_factor: f64,
    /// In times peak requested.
    pub(crate) least_factor: Option<f64>,
}

fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { 100.0 * part as f64 / whole as f64 }
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

impl Measures {
    fn new(requested: u64, figures: &crate::replay::Figures) -> Self {
        Self {
            completed: true,
            refused_requests: 0,
            first_refused_event: None,
            failure: None,
            peak_allocated_bytes: figures.peak_allocated,
            peak_reserved_bytes: figures.peak_reserved,
            external_fragmentation_percent: percent(
                figures.peak_reserved.saturating_sub(figures.peak_allocated),
                figures.peak_reserved,
            ),
            internal_fragmentation_percent: percent(
                figures.peak_allocated.saturating_sub(requested),
                figures.peak_reserved,
            ),
            driver_calls: figures.driver_calls,
            driver_ms: figures.driver_nanos as f64 / 1e6,
            teardown_ms: 0.0,
            host_waits: figures.host_waits,
            gpu_waits: figures.gpu_waits,
            handles_moved: figures.handles_moved,
            handles_joined: figures.handles_joined,
            moved_bytes: figures.bytes_moved,
            copied_bytes: figures.bytes_copied,
            stall_us: None,
            longest_stall: None,
            machine_ns: None,
            hot_path_ns: None,
            wall_ms: 0.0,
            stamps_checked: None,
            mismatches: None,
        }
    }

    /// Of a measured run. `requested`: most bytes live at once in it.
    pub(crate) fn of_run(requested: u64, run: &Run) -> Self {
        Self {
            completed: run.refused == 0 && run.failure.is_none(),
            refused_requests: run.refused,
            first_refused_event: run.first_refused.map(|event| event as u64),
            failure: run.failure.clone(),
            teardown_ms: millis(run.teardown),
            stall_us: Some(run.stall_us),
            longest_stall: run.longest,
            machine_ns: Some(run.machine_ns),
            hot_path_ns: run.hot_path_ns,
            wall_ms: millis(run.wall),
            ..Self::new(requested, &run.figures)
        }
    }

    /// Of a verified replay.
    pub(crate) fn of_outcome(requested: u64, outcome: &Outcome) -> Self {
        let failure = outcome.stopped.as_ref().filter(|_| outcome.ooms() == 0).or(outcome.teardown_error.as_ref());
        let findings = outcome.findings.as_ref();
        let mismatches = findings.map(|findings| findings.mismatches);
        Self {
            completed: outcome.completed() && failure.is_none() && mismatches.unwrap_or(0) == 0,
            refused_requests: outcome.ooms(),
            first_refused_event: (outcome.ooms() > 0).then_some(outcome.events_run as u64),
            failure: failure.map(ToString::to_string),
            teardown_ms: millis(outcome.teardown),
            wall_ms: millis(outcome.wall),
            stamps_checked: findings.map(|findings| findings.stamps_checked),
            mismatches,
            ..Self::new(requested, &outcome.figures)
        }
    }

    /// Both kinds of fragmentation together, in percent of peak reserved.
    pub(crate) fn fragmentation_percent(&self) -> f64 {
        self.external_fragmentation_percent + self.internal_fragmentation_percent
    }
}

impl Row {
    /// Of the two runs.
    pub(crate) fn new(
        workload: &Workload,
        allocator: &str,
        backend: &str,
        limit: u64,
        plenty: Measures,
        limited: Measures,
    ) -> Self {
        Self {
            workload: workload.name().to_owned(),
            origin: workload.origin,
            allocator: allocator.to_owned(),
            backend: backend.to_owned(),
            events: workload.trace.events.len() as u64,
            peak_requested_bytes: workload.trace.peak_requested(),
            plenty,
            limit_bytes: limit,
            limited,
            least_bytes: None,
            least_searched: false,
            least_step_factor: 0.0,
            least_factor: None,
        }
    }

    /// Adds what the search for the least limit found, on a grid of `step` times peak requested.
    pub(crate) fn set_least(&mut self, least: Option<u64>, step: f64) {
        self.least_searched = true;
        self.least_step_factor = step;
        self.least_bytes = least;
        self.least_factor = least.map(|bytes| bytes as f64 / self.peak_requested_bytes.max(1) as f64);
    }

    /// Peak reserved with plenty of memory, in times peak requested.
    pub(crate) fn reserved_factor(&self) -> f64 {
        self.plenty.peak_reserved_bytes as f64 / self.peak_requested_bytes.max(1) as f64
    }

    /// For sorting: least memory first (or, where that was not asked for, completion), then driver time.
    pub(crate) fn order(&self) -> (bool, u64, u64, u64) {
        let least = self.least_bytes.unwrap_or(u64::MAX);
        // Whole nanoseconds, which order as the milliseconds do.
        let driver = (self.limited.driver_ms * 1e6) as u64;
        (!self.limited.completed, least, driver, self.plenty.peak_reserved_bytes)
    }
}
