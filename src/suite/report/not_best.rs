//! Where xseg is not the best, and why, worked out from the figures.

use super::{Quantity, Report, Table};
use crate::backend::DriverCalls;
use crate::suite::row::{Measures, Row};
use crate::suite::{HOST, OWN};
use crate::units::{MIB, human};

/// Every workload and quantity in which another is better.
pub(super) fn table(report: &Report) -> Table {
    let mut table = Table::new(
        "Where xseg is not the best",
        "Each workload and quantity in which another allocator is better beyond rounding, worst first, with what the figures say about the reason. \
         An allocator that does not complete under the limit has no driver time to compare. Beware of two rows: first-fit takes all work \
         as one stream's and grows by one call whatever the size, which no real design can; each free of cuda-malloc waits for the device.",
        &["workload", "quantity", "xseg", "best", "by", "times the best", "also ahead", "why"],
    );
    let mut lines = Vec::new();
    for (workload, group) in report.by_workload() {
        let rows: Vec<&Row> = group.iter().map(|measured| &measured.row).collect();
        let Some(own) = rows.iter().find(|row| row.allocator == OWN) else { continue };
        for quantity in Quantity::ALL {
            let with =
                rows.iter().filter(|row| row.allocator != HOST).filter_map(|row| Some((quantity.of(row)?, *row)));
            let Some((best, other)) = with.min_by(|a, b| a.0.total_cmp(&b.0)) else { continue };
            let mine = quantity.of(own);
            if mine.is_some_and(|mine| !quantity.is_behind(own, mine, best)) {
                continue;
            }
            let ahead = |row: &&&Row| match (quantity.of(row), mine) {
                (Some(theirs), Some(mine)) => quantity.is_behind(own, mine, theirs),
                (theirs, _) => theirs.is_some(),
            };
            let others = rows.iter().filter(|row| ![OWN, HOST, &other.allocator].contains(&row.allocator.as_str()));
            let others: Vec<&str> = others.filter(ahead).map(|row| row.allocator.as_str()).collect();
            let times = mine.map_or(f64::INFINITY, |mine| mine / best.max(1e-9));
            lines.push((
                times,
                [
                    workload.to_owned(),
                    quantity.name().to_owned(),
                    mine.map_or_else(|| "none".to_owned(), number),
                    number(best),
                    other.allocator.clone(),
                    if times.is_finite() && best > 0.0 { number(times) } else { "–".to_owned() },
                    if others.is_empty() { "–".to_owned() } else { others.join(", ") },
                    why(quantity, own, other),
                ],
            ));
        }
    }
    lines.sort_by(|a, b| b.0.total_cmp(&a.0));
    lines.into_iter().for_each(|(_, cells)| table.row(cells));
    table
}

fn number(value: f64) -> String {
    match value {
        value if value >= 100.0 => format!("{value:.0}"),
        value if value >= 10.0 => format!("{value:.1}"),
        value => format!("{value:.4}"),
    }
}

fn calls(calls: &DriverCalls) -> String {
    let parts = [
        (calls.create, "created"),
        (calls.map.saturating_sub(calls.create), "mapped again"),
        (calls.release, "released"),
    ];
    let parts: Vec<String> =
        parts.iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{count} {what}")).collect();
    if parts.is_empty() { "no calls".to_owned() } else { parts.join(", ") }
}

/// Mean size of the handles behind the peak, in MiB.
fn handle_mib(run: &Measures) -> f64 {
    let existing = run.driver_calls.create.saturating_sub(run.driver_calls.release).max(1);
    run.peak_reserved_bytes as f64 / existing as f64 / MIB as f64
}

fn why(quantity: Quantity, own: &Row, other: &Row) -> String {
    match quantity {
        Quantity::Driver => driver(&own.limited, &other.limited),
        Quantity::Stall => stall(&own.limited, &other.limited),
        Quantity::Reserved => reserved(own, other),
        Quantity::Least => least(own, other),
    }
}

fn reserved(own: &Row, other: &Row) -> String {
    let more = human(own.plenty.peak_reserved_bytes.saturating_sub(other.plenty.peak_reserved_bytes));
    let calls = &own.plenty.driver_calls;
    if own.plenty.external_fragmentation_percent < 1.0 {
        return format!(
            "{more} more: growth is rounded up to whole handles, {:.0} MiB on average",
            handle_mib(&own.plenty)
        );
    }
    format!(
        "{more} more: without a limit memory is created before it is moved (defrag:on_pressure; {} created, {} moved), and free memory in partly live handles stays",
        calls.create, own.plenty.handles_moved
    )
}

fn least(own: &Row, other: &Row) -> String {
    let Some(bytes) = own.least_bytes else { return "it does not complete at four times the peak".to_owned() };
    let more = human(bytes.saturating_sub(other.least_bytes.unwrap_or(bytes)));
    let mean = handle_mib(&own.limited);
    if mean > 2.5 {
        return format!(
            "{more} more: a handle that is partly live can be neither moved nor released, and handles are {mean:.0} MiB on average at the limit (handle_max:2MiB is tighter and dearer)"
        );
    }
    format!(
        "{more} more: blocks end inside granules, whose rest no block of another kind can use, though handles are as small as they get"
    )
}

fn driver(own: &Measures, other: &Measures) -> String {
    let growth = own.driver_calls.create;
    let moves = own.handles_moved + own.handles_joined;
    let cause = match () {
        () if !own.completed => "it runs out of memory under this limit",
        () if moves > growth => "moves outnumber growth",
        () if own.driver_calls.release > growth / 2 && growth > 0 => {
            "handles are given up so that others fit under the limit"
        }
        () if other.driver_calls.map == 0 => {
            "the other takes large pieces by cudaMalloc, one call each, without map and set_access"
        }
        () if growth > other.driver_calls.create => "it makes more and smaller handles than this workload needs",
        () => "its calls are dearer each",
    };
    format!("{cause}: xseg {}; the other {}", calls(&own.driver_calls), calls(&other.driver_calls))
}

fn stall(own: &Measures, other: &Measures) -> String {
    if !own.completed {
        return "it runs out of memory under this limit".to_owned();
    }
    if own.host_waits > 0 {
        return format!(
            "xseg waited for the device {} times before it would have failed, the other {}",
            own.host_waits, other.host_waits
        );
    }
    let mean = human(own.peak_reserved_bytes / own.driver_calls.create.max(1));
    format!(
        "one request is backed by many handles ({mean} on average), each created, mapped and made accessible by a call of its own; the other's growth is {} calls in all",
        other.driver_calls.total()
    )
}
