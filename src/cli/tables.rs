//! Tables for people. Units stand in the headings.
#![forbid(unsafe_code)]

use crate::backend::cost::MODEL;
use crate::replay::Report;
use crate::suite::report::grid;
use crate::units::{GIB, MIB, counted};
use comfy_table::{Cell, CellAlignment, ColumnConstraint, ContentArrangement, Table, presets};

/// Width of wrapped text where stdout is no terminal.
const WIDTH: u16 = 120;

/// An empty table with these headings, whose texts are wrapped to the terminal.
pub(super) fn wrapped<const N: usize>(headings: [&str; N]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_content_arrangement(ContentArrangement::Dynamic);
    if grid::terminal().is_none() {
        table.set_width(WIDTH);
    }
    table.set_header(headings);
    table
}

fn right(text: impl ToString) -> Cell {
    Cell::new(text).set_alignment(CellAlignment::Right)
}

fn gib(bytes: u64) -> Cell {
    right(format!("{:.3}", bytes as f64 / GIB as f64))
}

/// What `xseg replay` shows.
pub(super) fn replays(reports: &[Report]) -> String {
    let mut table = grid::empty(&[
        "trace",
        "allocator",
        "limit\nGiB",
        "requested\nGiB",
        "reserved\nGiB",
        "ratio",
        "fragm.\n%",
        "handles\nmoved",
        "moved\nGiB",
        "driver\nms",
        "host\nwaits",
        "wall\nms",
        "result",
    ]);
    for report in reports {
        let ratio = report.peak_reserved as f64 / report.peak_requested.max(1) as f64;
        table.add_row([
            Cell::new(&report.trace),
            Cell::new(&report.allocator),
            report.limit.map_or_else(|| right("none"), gib),
            gib(report.peak_requested),
            gib(report.peak_reserved),
            right(format!("{ratio:.4}")),
            right(format!("{:.2}", 100.0 * report.fragmentation())),
            right(report.handles_moved + report.handles_joined),
            gib(report.bytes_moved),
            right(format!("{:.1}", report.driver_ms)),
            right(report.host_waits),
            right(format!("{:.0}", report.wall_ms)),
            Cell::new(result(report)),
        ]);
    }
    if reports.iter().all(|report| report.limit.is_none()) {
        hide(&mut table, 2);
    }
    let legend = "requested, reserved: most at once; ratio: reserved / requested; fragm.: 1 - peak allocated / peak reserved; \
                  moved: by remapping, also where a piece is mapped a second time; nothing is copied";
    format!("{}\n{}", with_footer(table, &[11, 5, 10, 8, 3, 2], reports), grid::wrapped(legend, footer_width()))
}

fn hide(table: &mut Table, column: usize) {
    if let Some(column) = table.column_mut(column) {
        column.set_constraint(ColumnConstraint::Hidden);
    }
}

/// A factor rounded up to what the tables show of it, so that it holds as a limit, too.
fn at_least(factor: f64) -> f64 {
    (factor * 1e4).ceil() / 1e4
}

/// What `xseg least` shows.
pub(super) fn leasts(reports: &[Report]) -> String {
    let mut table = grid::empty(&[
        "trace",
        "allocator",
        "requested\nGiB",
        "least limit\nGiB",
        "least /\nrequested",
        "locked MiB\njust below",
        "handles\nmoved there",
        "driver ms\nthere",
        "driver ms\n+0.2 %",
        "result",
    ]);
    for report in reports {
        let found = report.least.unwrap_or_default();
        table.add_row([
            Cell::new(&report.trace),
            Cell::new(&report.allocator),
            gib(report.peak_requested),
            found.least.map_or_else(|| right("none"), gib),
            right(found.least_factor.map_or_else(|| "none".to_owned(), |factor| format!("{:.4}", at_least(factor)))),
            right(found.failing_locked.map_or_else(String::new, |bytes| format!("{:.0}", bytes as f64 / MIB as f64))),
            right(report.handles_moved + report.handles_joined),
            right(format!("{:.1}", report.driver_ms)),
            right(found.driver_ms_above.map_or_else(|| "fails".to_owned(), |ms| format!("{ms:.1}"))),
            Cell::new(result(report)),
        ]);
    }
    let legend = "requested: most bytes live at once; least / requested: rounded up, so that it completes as a limit; locked just below: free memory beside live blocks in pieces that cannot be \
                  split, when the highest limit that failed below the least one ran out; there: at the least limit; +0.2 %: at 1.002 times that";
    format!("{}\n{}", with_footer(table, &[5, 6, 8, 7, 2], reports), grid::wrapped(legend, footer_width()))
}

fn result(report: &Report) -> String {
    let checked =
        report.stamps_checked.map_or(String::new(), |stamps| format!(", {} checked", counted(stamps, "stamp")));
    match (report.completed, report.mismatches) {
        (_, Some(1)) => format!("1 mismatch{checked}"),
        (_, Some(mismatches @ 2..)) => format!("{mismatches} mismatches{checked}"),
        (true, _) if report.error.is_none() => format!("ok{checked}"),
        (true, _) => "failed at the end".to_owned(),
        (false, _) => {
            let at = report.events_run.unwrap_or(0);
            let why = if report.ooms > 0 { "out of memory" } else { "failed" };
            format!("{why} at event {at} of {}", report.events)
        }
    }
}

/// Which allocators ran on which backend, and where their driver time comes from.
fn ground(reports: &[Report], alike: bool) -> String {
    let mut backends: Vec<&str> = Vec::new();
    for report in reports {
        if !backends.contains(&report.backend.as_str()) {
            backends.push(&report.backend);
        }
    }
    let time = |backend: &str| if backend == "cuda" { "measured".to_owned() } else { format!("modelled by {MODEL}") };
    match (&backends[..], reports.first()) {
        ([one], Some(first)) => {
            let allocators =
                if alike { format!("allocator {}", first.allocator) } else { "several allocators".to_owned() };
            format!("{allocators}, backend {one}, driver time {}", time(one))
        }
        (all, _) => {
            let own = reports.iter().find(|report| report.allocator == "xseg").map_or("sim", |report| &report.backend);
            let times: Vec<String> = all.iter().map(|backend| time(backend)).collect();
            let times = if times.iter().all(|time| *time == times[0]) {
                times[0].clone()
            } else {
                format!("{} on {own}, {} on sim", time(own), time("sim"))
            };
            format!("allocator xseg on backend {own}, the models of other designs on sim; driver time {times}")
        }
    }
}

/// The table, what it was run with, and what was done to the traces.
fn with_footer(mut table: Table, optional: &[usize], reports: &[Report]) -> String {
    let (mut text, mut footer) = (String::new(), String::new());
    if let Some(first) = reports.first() {
        let alike = reports.iter().all(|report| report.allocator == first.allocator);
        if alike {
            hide(&mut table, 1);
        }
        text = grid::fitted(table, grid::terminal(), optional);
        footer += &format!("\n{}", ground(reports, alike));
        let conf = if first.conf.is_empty() { "defaults" } else { &first.conf };
        let common = without_limit(&first.conf);
        footer += &if reports.iter().all(|report| report.conf == first.conf) {
            format!(", settings: {conf}")
        } else if reports.iter().all(|report| without_limit(&report.conf) == common) {
            format!(", settings: {}", [common.as_slice(), &["the limit of each line"]].concat().join(", "))
        } else {
            ", settings: the limit of each line over those of XSEG_CONF and --conf".to_owned()
        };
    }
    let mut last = None;
    for report in reports.iter().filter(|report| !report.notes.is_empty()) {
        if last.replace(&report.trace) != Some(&report.trace) {
            footer += &format!("\n{}: {}", report.trace, report.notes.join("; "));
        }
    }
    for (report, why) in reports.iter().filter_map(|report| Some((report, report.plan_in_vain()?))) {
        footer += &format!("\n{}: {why}", report.trace);
    }
    text + &grid::wrapped(&footer, footer_width())
}

/// The settings but for the limit.
fn without_limit(conf: &str) -> Vec<&str> {
    conf.split(',').filter(|entry| !entry.is_empty() && !entry.starts_with("limit:")).collect()
}

/// Without a terminal lines are left whole, for programs that look at them.
fn footer_width() -> Option<u16> {
    Some(grid::terminal().unwrap_or(u16::MAX))
}
