//! What all workloads together say of each allocator, and the short view of each workload.

use super::{Quantity, Report, Table};
use crate::suite::row::Row;
use crate::suite::{HOST, Measured, OWN};
use serde::Serialize;

/// The peer that xseg is shown beside.
pub(super) const PEER: &str = "torch-expandable";

/// One allocator over all workloads. Sums and means are over the workloads that their count says.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Standing {
    pub(super) allocator: String,
    pub(super) workloads: usize,
    pub(super) completed_workloads: usize,
    /// None where no least memory was searched.
    pub(super) best_in_least_workloads: Option<usize>,
    pub(super) best_in_driver_workloads: usize,
    pub(super) mean_least_factor: Option<f64>,
    pub(super) mean_least_workloads: usize,
    pub(super) mean_reserved_factor: Option<f64>,
    pub(super) mean_reserved_workloads: usize,
    /// Of the completed workloads.
    pub(super) driver_ms_sum: Option<f64>,
    /// Of the completed workloads.
    pub(super) host_waits_sum: Option<u64>,
}

/// Geometric mean; of how many.
fn mean(rows: &[&Row], quantity: Quantity) -> (Option<f64>, usize) {
    let values: Vec<f64> = rows.iter().filter_map(|row| quantity.of(row)).collect();
    let logarithms = values.iter().fold(0.0, |sum, value| sum + value.ln());
    let mean = (!values.is_empty()).then(|| (logarithms / values.len() as f64).exp());
    (mean, values.len())
}

/// Every allocator: which completes most first, then which is most often the best.
pub(super) fn standings(report: &Report) -> Vec<Standing> {
    let groups = report.by_workload();
    let mut names: Vec<&str> = Vec::new();
    for row in report.rows() {
        if !names.contains(&row.allocator.as_str()) {
            names.push(&row.allocator);
        }
    }
    let standing = |name: &str| {
        let own: Vec<&Row> = report.rows().into_iter().filter(|row| row.allocator == name).collect();
        let best = |quantity: Quantity| {
            let wins = |(_, group): &&(&str, Vec<&Measured>)| {
                let best = quantity.best(group.iter().map(|measured| &measured.row));
                group.iter().any(|measured| measured.row.allocator == name && quantity.is_best(&measured.row, best))
            };
            groups.iter().filter(wins).count()
        };
        let completed: Vec<&&Row> = own.iter().filter(|row| row.limited.completed).collect();
        let any = !completed.is_empty();
        let (mean_least_factor, mean_least_workloads) = mean(&own, Quantity::Least);
        let (mean_reserved_factor, mean_reserved_workloads) = mean(&own, Quantity::Reserved);
        Standing {
            allocator: name.to_owned(),
            workloads: own.len(),
            completed_workloads: completed.len(),
            best_in_least_workloads: own.iter().any(|row| row.least_searched).then(|| best(Quantity::Least)),
            best_in_driver_workloads: best(Quantity::Driver),
            mean_least_factor,
            mean_least_workloads,
            mean_reserved_factor,
            mean_reserved_workloads,
            // Nothing completed has no driver time, which is not the same as none.
            driver_ms_sum: any.then(|| completed.iter().map(|row| row.limited.driver_ms).fold(0.0, |a, b| a + b)),
            host_waits_sum: any.then(|| completed.iter().map(|row| row.limited.host_waits).sum()),
        }
    };
    let mut standings: Vec<Standing> = names.into_iter().map(standing).collect();
    standings.sort_by_key(|one| std::cmp::Reverse((one.completed_workloads, one.best_in_least_workloads)));
    standings
}

/// How often each allocator is the best, completes, and how it does on average.
pub(super) fn table(report: &Report) -> Table {
    let mut table = Table::new(
        "All workloads",
        "Best: no other is better in the digits shown. Means are over the workloads that the allocator completes with enough \
         memory, sums over those that it completes at the limit; a number such as (3 of 8) says how many these are where not \
         all, and what it stands beside cannot be compared with what is of all.",
        &[
            "allocator",
            "completes at the limit",
            "best in least memory",
            "best in driver time at the limit",
            "mean least × requested",
            "mean reserved × requested, plenty",
            "driver ms at the limit, sum",
            "host waits at the limit",
        ],
    );
    for one in standings(report) {
        let partial = |text: Option<String>, count: usize| match text {
            None => "–".to_owned(),
            Some(text) if count == one.workloads => text,
            Some(text) => format!("{text} ({count} of {})", one.workloads),
        };
        let factor = |value: Option<f64>| value.map(|value| format!("{value:.4}"));
        table.row([
            one.allocator.clone(),
            format!("{} of {}", one.completed_workloads, one.workloads),
            one.best_in_least_workloads.map_or_else(|| "–".to_owned(), |count| count.to_string()),
            one.best_in_driver_workloads.to_string(),
            partial(factor(one.mean_least_factor), one.mean_least_workloads),
            partial(factor(one.mean_reserved_factor), one.mean_reserved_workloads),
            partial(one.driver_ms_sum.map(|sum| format!("{sum:.0}")), one.completed_workloads),
            partial(one.host_waits_sum.map(|sum| sum.to_string()), one.completed_workloads),
        ]);
    }
    table
}

/// For each of two quantities a table: each workload with the best, the peer and xseg.
pub(super) fn brief(report: &Report) -> Vec<Table> {
    let groups = report.by_workload();
    let searched = report.rows().iter().any(|row| row.least_searched);
    let has = |name: &str| report.rows().iter().any(|row| row.allocator == name);
    let beside: Vec<&str> = [PEER, OWN].into_iter().filter(|name| has(name)).collect();
    let mut tables = Vec::new();
    for quantity in [Quantity::Least, Quantity::Driver] {
        if quantity == Quantity::Least && !searched {
            continue;
        }
        let headings: Vec<&str> = ["workload", "best", "by"].into_iter().chain(beside.iter().copied()).collect();
        let name = quantity.name();
        let mut table = Table::new(&format!("{}{}", name[..1].to_uppercase(), &name[1..]), "", &headings);
        for (workload, group) in &groups {
            let rows: Vec<&Row> = group.iter().map(|measured| &measured.row).collect();
            let best = quantity.best(rows.iter().copied());
            let by: Vec<&str> = rows
                .iter()
                .filter(|row| row.allocator != HOST && quantity.is_best(row, best))
                .map(|row| row.allocator.as_str())
                .collect();
            let value = |name: &str| {
                let row = rows.iter().find(|row| row.allocator == name);
                row.map_or_else(|| "–".to_owned(), |row| quantity.shown_or_why(row))
            };
            let best =
                best.zip(rows.first()).map_or_else(|| "none".to_owned(), |(best, row)| quantity.shown(row, best));
            let cells = [(*workload).to_owned(), best, by.join(", ")];
            table.row(cells.into_iter().chain(beside.iter().map(|name| value(name))));
        }
        tables.push(table);
    }
    tables
}
