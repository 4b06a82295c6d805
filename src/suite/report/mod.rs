//! What was found, for people and for programs: terminal, JSON, CSV, and one page of HTML.

mod files;
mod html;
mod not_best;
mod plots;
mod terminal;

pub(crate) use files::{prepare, write};
pub(crate) use terminal::text;

use super::moving::Moving;
use super::row::Row;
use super::{HOST, Measured, OWN};
use crate::units::GRANULE;
use serde::Serialize;
use std::time::Duration;

/// A table of texts, with units in its headings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Table {
    pub(crate) title: String,
    /// Where the figures come from and what they mean.
    pub(crate) text: String,
    pub(crate) headings: Vec<String>,
    pub(crate) rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new(title: &str, text: &str, headings: &[&str]) -> Self {
        let headings = headings.iter().map(|heading| (*heading).to_owned()).collect();
        Self { title: title.to_owned(), text: text.to_owned(), headings, rows: Vec::new() }
    }

    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let cells: Vec<String> = cells.into_iter().collect();
        debug_assert_eq!(cells.len(), self.headings.len(), "{}", self.title);
        self.rows.push(cells);
    }
}

/// What the suite was run with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Setup {
    pub(crate) version: String,
    /// Settings of xseg that differ from the defaults.
    pub(crate) conf: String,
    pub(crate) model: String,
    pub(crate) seed: u64,
    pub(crate) gpu_lag: String,
    pub(crate) limit: String,
    pub(crate) least: String,
    pub(crate) quick: bool,
}

/// All of a run.
pub(crate) struct Report {
    pub(crate) setup: Setup,
    /// By workload, allocators in the order of reports.
    pub(crate) measured: Vec<Measured>,
    /// A line about each workload, by name.
    pub(crate) about: Vec<(String, String)>,
    pub(crate) moving: Vec<Moving>,
    /// Tables that stand by themselves.
    pub(crate) tables: Vec<Table>,
    /// What was left out, and why.
    pub(crate) skipped: Vec<String>,
}

impl Report {
    pub(crate) fn rows(&self) -> Vec<&Row> {
        self.measured.iter().map(|measured| &measured.row).collect()
    }

    /// Workloads in their order, each with its allocators, the best first.
    fn by_workload(&self) -> Vec<(&str, Vec<&Measured>)> {
        let mut groups: Vec<(&str, Vec<&Measured>)> = Vec::new();
        for measured in &self.measured {
            match groups.last_mut() {
                Some((name, group)) if *name == measured.row.workload => group.push(measured),
                _ => groups.push((&measured.row.workload, vec![measured])),
            }
        }
        for (_, group) in &mut groups {
            group.sort_by_key(|measured| measured.row.order());
            // The same heap on other memory stands beside it.
            if let Some(host) = group.iter().position(|measured| measured.row.allocator == HOST)
                && group.iter().any(|measured| measured.row.allocator == OWN)
            {
                let host = group.remove(host);
                let own = group.iter().position(|measured| measured.row.allocator == OWN).unwrap_or(0);
                group.insert(own + 1, host);
            }
        }
        groups
    }

    fn about(&self, workload: &str) -> &str {
        self.about.iter().find(|(name, _)| name == workload).map_or("", |(_, about)| about)
    }
}

/// A time for people: `5 ms`, `0 s`.
pub(crate) fn duration(time: Duration) -> String {
    match time.as_nanos() {
        0 => "0 s".to_owned(),
        nanos if nanos.is_multiple_of(1_000_000_000) => format!("{} s", nanos / 1_000_000_000),
        nanos if nanos.is_multiple_of(1_000_000) => format!("{} ms", nanos / 1_000_000),
        nanos => format!("{} µs", nanos / 1000),
    }
}

/// A quantity of which less is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Quantity {
    Reserved,
    Least,
    Driver,
    Stall,
}

impl Quantity {
    pub(crate) const ALL: [Self; 4] = [Self::Least, Self::Driver, Self::Reserved, Self::Stall];

    /// Its name with its unit.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Reserved => "reserved without a limit, × requested",
            Self::Least => "least memory, × requested",
            Self::Driver => "driver time under the limit, ms",
            Self::Stall => "longest stall under the limit, µs",
        }
    }

    /// Its value; `None` where it has none: not searched, or not completed.
    pub(crate) fn of(self, row: &Row) -> Option<f64> {
        match self {
            Self::Reserved => row.plenty.completed.then(|| row.reserved_factor()),
            Self::Least => row.least_factor,
            Self::Driver => row.limited.completed.then_some(row.limited.driver_ms),
            Self::Stall => row.limited.stall_us.filter(|_| row.limited.completed).map(|stall| stall.max),
        }
    }

    /// Is `best` less than what `row` has, beyond what can be told apart: the grid of the search, a granule, and 1 % of a time?
    pub(crate) fn is_behind(self, row: &Row, own: f64, best: f64) -> bool {
        let granule = GRANULE as f64 / row.peak_requested_bytes.max(1) as f64;
        let same = match self {
            Self::Least => granule.max(row.least_step_factor),
            Self::Reserved => granule,
            Self::Driver | Self::Stall => 0.01 * own,
        };
        // A hair more, for sums of fractions.
        own - best > same * 1.000_001
    }

    /// The least value among rows.
    pub(crate) fn best<'a>(self, rows: impl IntoIterator<Item = &'a Row>) -> Option<f64> {
        rows.into_iter().filter_map(|row| self.of(row)).min_by(f64::total_cmp)
    }

    /// Is this row as good as the best?
    pub(crate) fn is_best(self, row: &Row, best: Option<f64>) -> bool {
        match (self.of(row), best) {
            (Some(own), Some(best)) => !self.is_behind(row, own, best),
            _ => false,
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
