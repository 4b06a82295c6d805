//! The report for a terminal. Tables sorted, the best of a column marked by `*`.

use super::{Quantity, Report, grid, is_number, summary};
use crate::suite::Measured;
use crate::suite::row::Row;
use crate::units::{GIB, counted};

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
    let checked =
        run.stamps_checked.map_or_else(String::new, |stamps| format!(", {} checked", counted(stamps, "stamp")));
    match (&run.failure, run.mismatches) {
        (Some(why), _) => format!("failed: {why}"),
        (_, Some(1)) => format!("1 mismatch{checked}"),
        (_, Some(mismatches @ 2..)) => format!("{mismatches} mismatches{checked}"),
        _ if run.refused_requests > 0 => {
            let at = 100.0 * run.first_refused_event.unwrap_or(0) as f64 / row.events.max(1) as f64;
            match run.stamps_checked {
                // A verified replay does not go on: what lies behind is not what the trace means.
                Some(_) => format!("stopped at the first refusal, at {at:.0} %{checked}"),
                None => format!("{} refused from {at:.0} % on", run.refused_requests),
            }
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

/// What a narrow terminal can do without, in this order.
const OPTIONAL: [usize; 11] = [15, 14, 10, 4, 11, 12, 5, 9, 7, 8, 3];

/// The cells of one row; also those of the page.
pub(super) fn cells(row: &Row, group: &[&Measured]) -> [String; 17] {
    let (plenty, limited) = (&row.plenty, &row.limited);
    let dash = || "–".to_owned();
    // What a run cost that left work out is not to be compared with what a whole one cost.
    let whole = |text: String| if limited.completed || text == "–" { text } else { format!("({text})") };
    let stall = |of: fn(&crate::suite::measure::Quantiles) -> f64| {
        whole(limited.stall_us.as_ref().map_or_else(dash, |stall| format!("{:.0}", of(stall))))
    };
    [
        row.allocator.clone(),
        marked(Quantity::Least.shown_or_why(row), Quantity::Least, row, group),
        marked(gib(plenty.peak_reserved_bytes), Quantity::Reserved, row, group),
        format!("{:.2}", plenty.external_fragmentation_percent),
        format!("{:.2}", plenty.internal_fragmentation_percent),
        format!("{:.1}", plenty.driver_ms),
        marked(whole(format!("{:.1}", limited.driver_ms)), Quantity::Driver, row, group),
        whole(limited.driver_calls.total().to_string()),
        whole(limited.host_waits.to_string()),
        whole(gib(limited.moved_bytes)),
        whole(gib(limited.copied_bytes)),
        stall(|stall| stall.p50),
        stall(|stall| stall.p99),
        marked(stall(|stall| stall.max), Quantity::Stall, row, group),
        plenty.hot_path_ns.map_or_else(dash, |nanos| format!("{nanos:.0}")),
        whole(format!("{:.0}", limited.wall_ms)),
        result(row),
    ]
}

/// Headings of [`cells`], in one line each.
pub(super) fn headings() -> Vec<String> {
    HEADINGS.iter().map(|heading| heading.replace('\n', " ")).collect()
}

/// What the columns mean.
pub(super) const LEGEND: &str = "\
least: least memory in which the workload completes; reserved, external and internal fragmentation (shares of peak reserved: free \
memory outside blocks, rounding inside blocks), driver ms plenty and hot path: without a limit; all else: under the limit. Driver time \
and stalls are modelled; a stall is driver time and waiting for the device in one allocation. Moved: by remapping. Hot path, wall: this \
machine's time, for models of other designs that of the model. *: best of the column, alone or with others that show the same. In \
brackets: of a run that left out what was refused, or stopped there. –: not measured or not searched.";

/// Peak, limit and, where the line about the workload does not have it, the number of events.
pub(super) fn facts(row: &Row) -> String {
    let mut text = format!("Peak requested {} GiB, limit {} GiB", gib(row.peak_requested_bytes), gib(row.limit_bytes));
    if row.origin != crate::suite::workloads::Origin::File {
        text += &format!(", {}", counted(row.events, "event"));
    }
    text + "."
}

/// Lines of [`super::not_best`] in a terminal; the page has all.
const NOT_BEST_LINES: usize = 20;

fn not_best(report: &Report, width: Option<u16>) -> String {
    let mut table = super::not_best::table(report);
    let all = table.rows.len();
    if all > NOT_BEST_LINES {
        table.rows.truncate(NOT_BEST_LINES);
        table.text = format!("The {NOT_BEST_LINES} largest of {all}; all are in report.html. {}", table.text);
    }
    if all == 0 { format!("{}: nowhere\n", table.title) } else { grid::shown(&table, width, &[6, 5]) }
}

/// The report as text for a terminal of `width` columns (`None`: no terminal): in short, or with all tables.
pub(crate) fn text(report: &Report, full: bool, width: Option<u16>) -> String {
    let mut out = String::new();
    if full {
        for (workload, group) in report.by_workload() {
            out += &whole(report, workload, &group, width);
        }
    }
    if !report.measured.is_empty() {
        let tables = if full { Vec::new() } else { summary::brief(report) };
        for table in &tables {
            out += &format!("{}\n", grid::shown(table, width, &[]));
        }
        out += &format!("{}\n", grid::shown(&summary::table(report), width, &[5, 7, 4, 3]));
    }
    if full {
        if !report.measured.is_empty() {
            out += &format!("{}\n\n{}\n", grid::wrapped(LEGEND, width), not_best(report, width));
        }
        let moving = report.moving.iter().map(|moving| moving.table());
        for table in moving.chain(report.tables.iter().cloned()).filter(|table| !table.rows.is_empty()) {
            out += &format!("{}\n", grid::shown(&table, width, &[]));
        }
    } else {
        for moving in &report.moving {
            out += &format!("{}\n", grid::wrapped(&moving.sentence(), width));
        }
    }
    for skipped in &report.skipped {
        out += &format!("{}\n", grid::wrapped(&format!("left out: {skipped}"), width));
    }
    out
}

/// All about one workload.
fn whole(report: &Report, workload: &str, group: &[&Measured], width: Option<u16>) -> String {
    let Some(first) = group.first() else { return String::new() };
    let mut table = grid::empty(&HEADINGS);
    for measured in group {
        let cells = cells(&measured.row, group);
        table.add_row(cells.iter().map(|text| grid::cell(text, is_number(text))));
    }
    let about = grid::wrapped(&format!("{workload}: {}\n{}", report.about(workload), facts(&first.row)), width);
    format!("{about}\n{}\n\n", grid::fitted(table, width, &OPTIONAL))
}
