//! Tables for a terminal. Sorted, the best of a column marked by `*`.

use super::{Quantity, Report, Table};
use crate::suite::Measured;
use crate::suite::row::Row;
use crate::units::GIB;
use comfy_table::{Cell, CellAlignment, ContentArrangement, presets};

/// Width of wrapped text where stdout is no terminal.
const WIDTH: u16 = 200;

fn grid(headings: &[String]) -> comfy_table::Table {
    let mut table = comfy_table::Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(headings);
    table
}

fn cell(text: &str) -> Cell {
    let number =
        text.len() < 24 && text.starts_with(|first: char| first.is_ascii_digit() || first == '–' || first == '-');
    Cell::new(text).set_alignment(if number { CellAlignment::Right } else { CellAlignment::Left })
}

fn gib(bytes: u64) -> String {
    format!("{:.3}", bytes as f64 / GIB as f64)
}

/// `text`, marked where the row is the best of its group in `quantity`.
fn marked(text: String, quantity: Quantity, row: &Row, group: &[&Measured]) -> String {
    let best = quantity.best(group.iter().map(|measured| &measured.row));
    if quantity.is_best(row, best) { format!("{text}*") } else { text }
}

/// How a run under the limit went.
pub(super) fn result(row: &Row) -> String {
    let run = &row.limited;
    let checked = run.stamps_checked.map_or_else(String::new, |stamps| format!(", {stamps} stamps checked"));
    match (&run.failure, run.mismatches) {
        (Some(why), _) => format!("failed: {why}"),
        (_, Some(mismatches @ 1..)) => format!("{mismatches} mismatches{checked}"),
        _ if run.refused_requests > 0 => {
            let at = run.first_refused_event.unwrap_or(0) as f64 / row.events.max(1) as f64;
            format!("{} refused from {:.0} %", run.refused_requests, 100.0 * at)
        }
        _ => format!("ok{checked}"),
    }
}

const HEADINGS: [&str; 17] = [
    "allocator",
    "least\n× requested",
    "reserved\nGiB",
    "external\nfragm. %",
    "internal\nfragm. %",
    "driver ms\nplenty",
    "driver ms\nat limit",
    "driver\ncalls",
    "host\nwaits",
    "moved\nGiB",
    "copied\nGiB",
    "stall\np50 µs",
    "stall\np99 µs",
    "stall\nmax µs",
    "hot path\nns",
    "wall\nms",
    "at the limit",
];

/// The cells of one row; also those of the page.
pub(super) fn cells(row: &Row, group: &[&Measured]) -> [String; 17] {
    let (plenty, limited) = (&row.plenty, &row.limited);
    let dash = || "–".to_owned();
    let stall = |of: fn(&crate::suite::measure::Quantiles) -> f64| {
        limited.stall_us.as_ref().map_or_else(dash, |stall| format!("{:.0}", of(stall)))
    };
    let least = match (row.least_factor, row.least_searched) {
        (Some(factor), _) => format!("{factor:.4}"),
        (None, true) => "over 4".to_owned(),
        (None, false) => dash(),
    };
    [
        row.allocator.clone(),
        marked(least, Quantity::Least, row, group),
        marked(gib(plenty.peak_reserved_bytes), Quantity::Reserved, row, group),
        format!("{:.2}", plenty.external_fragmentation_percent),
        format!("{:.2}", plenty.internal_fragmentation_percent),
        format!("{:.1}", plenty.driver_ms),
        marked(format!("{:.1}", limited.driver_ms), Quantity::Driver, row, group),
        limited.driver_calls.total().to_string(),
        limited.host_waits.to_string(),
        gib(limited.moved_bytes),
        gib(limited.copied_bytes),
        stall(|stall| stall.p50),
        stall(|stall| stall.p99),
        marked(stall(|stall| stall.max), Quantity::Stall, row, group),
        plenty.hot_path_ns.map_or_else(dash, |nanos| format!("{nanos:.0}")),
        format!("{:.0}", limited.wall_ms),
        result(row),
    ]
}

/// Headings of [`cells`], in one line each.
pub(super) fn headings() -> Vec<String> {
    HEADINGS.iter().map(|heading| heading.replace('\n', " ")).collect()
}

fn plain(table: &Table) -> String {
    let mut out = grid(&table.headings);
    for row in &table.rows {
        out.add_row(row.iter().map(|text| cell(text)));
    }
    format!("{}\n{out}\n{}\n", table.title, table.text)
}

/// How often each allocator is the best, completes, and how it does on average.
pub(super) fn summary(report: &Report) -> Table {
    let groups = report.by_workload();
    let mut table = Table::new(
        "All workloads",
        "Best: as good as the best of a workload, beyond rounding. Means over what the allocator completes.",
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
    let mut names: Vec<&str> = Vec::new();
    for row in report.rows() {
        if !names.contains(&row.allocator.as_str()) {
            names.push(&row.allocator);
        }
    }
    let mut lines = Vec::new();
    for name in names {
        let own: Vec<&Row> = report.rows().into_iter().filter(|row| row.allocator == name).collect();
        let best = |quantity: Quantity| {
            let wins = |(_, group): &&(&str, Vec<&Measured>)| {
                let best = quantity.best(group.iter().map(|measured| &measured.row));
                group.iter().any(|measured| measured.row.allocator == name && quantity.is_best(&measured.row, best))
            };
            groups.iter().filter(wins).count()
        };
        let mean = |quantity: Quantity| {
            let values: Vec<f64> = own.iter().filter_map(|row| quantity.of(row)).collect();
            match values.len() {
                0 => "–".to_owned(),
                count => format!("{:.4}", (values.iter().map(|value| value.ln()).sum::<f64>() / count as f64).exp()),
            }
        };
        let completed = own.iter().filter(|row| row.limited.completed).count();
        let driver: Vec<f64> = own.iter().filter_map(|row| Quantity::Driver.of(row)).collect();
        // Nothing completed has no driver time, which is not the same as none.
        let driver = if driver.is_empty() { "–".to_owned() } else { format!("{:.0}", driver.iter().sum::<f64>()) };
        let waits: u64 = own.iter().map(|row| row.limited.host_waits).sum();
        lines.push((
            std::cmp::Reverse((completed, best(Quantity::Least))),
            [
                name.to_owned(),
                format!("{completed} of {}", own.len()),
                best(Quantity::Least).to_string(),
                best(Quantity::Driver).to_string(),
                mean(Quantity::Least),
                mean(Quantity::Reserved),
                driver,
                waits.to_string(),
            ],
        ));
    }
    lines.sort_by_key(|(order, _)| *order);
    lines.into_iter().for_each(|(_, cells)| table.row(cells));
    table
}

/// Lines of [`super::not_best`] in a terminal; the page has all.
const NOT_BEST_LINES: usize = 20;

fn not_best(report: &Report) -> String {
    let mut table = super::not_best::table(report);
    let all = table.rows.len();
    table.rows.truncate(NOT_BEST_LINES);
    let mut out = grid(&table.headings);
    out.set_content_arrangement(ContentArrangement::Dynamic);
    if out.width().is_none() {
        out.set_width(WIDTH);
    }
    for row in &table.rows {
        out.add_row(row.iter().map(|text| cell(text)));
    }
    let more = if all > NOT_BEST_LINES {
        format!("the {NOT_BEST_LINES} largest of {all}; all are in report.html. ")
    } else {
        String::new()
    };
    format!("{}\n{out}\n{more}{}\n", table.title, table.text)
}

/// What the columns mean.
pub(super) const LEGEND: &str = "\
least: least memory in which the workload completes; reserved, external and internal fragmentation (shares of peak reserved: free \
memory outside blocks, rounding inside blocks), driver ms plenty and hot path: without a limit; all else: under the limit. Driver time \
and stalls are modelled; a stall is driver time and waiting for the device in one allocation. Moved: by remapping. Hot path, wall: this \
machine's time, for models of other designs that of the model. *: best of the column.";

/// Everything, as text.
pub(crate) fn text(report: &Report) -> String {
    let mut out = String::new();
    for (workload, group) in report.by_workload() {
        let Some(first) = group.first() else { continue };
        let (peak, limit) = (gib(first.row.peak_requested_bytes), gib(first.row.limit_bytes));
        out += &format!("{workload}: {}\n", report.about(workload));
        out += &format!("peak requested {peak} GiB, limit {limit} GiB, {} events\n", first.row.events);
        let mut table = grid(&HEADINGS.map(str::to_owned));
        for measured in &group {
            table.add_row(cells(&measured.row, &group).iter().map(|text| cell(text)));
        }
        out += &format!("{table}\n\n");
    }
    if !report.measured.is_empty() {
        out += &format!("{LEGEND}\n\n{}\n{}\n", plain(&summary(report)), not_best(report));
    }
    for table in report.moving.iter().map(|moving| moving.table()).chain(report.tables.iter().cloned()) {
        out += &format!("{}\n", plain(&table));
    }
    for skipped in &report.skipped {
        out += &format!("left out: {skipped}\n");
    }
    out
}
