//! Where xseg is not the best, and why, worked out from the figures.

use super::summary::PEER;
use super::{Quantity, Report, Table};
use crate::backend::{DriverCalls, cost};
use crate::error::DriverCall;
use crate::suite::measure::Longest;
use crate::suite::row::{Measures, Row};
use crate::suite::{HOST, OWN};
use crate::units::{MIB, counted, human};

/// Every workload and quantity in which another is better; one line for the best, and one for the peer where that is
/// ahead too.
pub(super) fn table(report: &Report) -> Table {
    let mut table = Table::new(
        "Where xseg is not the best",
        "Each workload and quantity in which another allocator is better by more than can be told apart (a step of the search, a \
         granule, 1 % of a time), worst first, with what the figures say about the reason; torch-expandable has a line of its own \
         wherever it is ahead. An allocator that does not complete under the limit has no driver time or stall to compare. Beware \
         of two: first-fit takes all work as one stream's and grows by one call whatever the size, which no real design can; \
         cuda-malloc has nothing to wait for when it allocates, but each of its frees waits for the device.",
        &["workload", "quantity", "xseg", "other", "by", "times the other", "also ahead", "why"],
    );
    let mut lines = Vec::new();
    for (workload, group) in report.by_workload() {
        let rows: Vec<&Row> = group.iter().map(|measured| &measured.row).collect();
        let Some(own) = rows.iter().find(|row| row.allocator == OWN) else { continue };
        for quantity in Quantity::ALL {
            let mine = quantity.of(own);
            let is_ahead = |row: &&&Row| match (quantity.of(row), mine) {
                (Some(theirs), Some(mine)) => quantity.is_behind(own, mine, theirs),
                (theirs, _) => theirs.is_some(),
            };
            let others = rows.iter().filter(|row| ![OWN, HOST].contains(&row.allocator.as_str()));
            let mut ahead: Vec<(f64, &Row)> =
                others.filter(is_ahead).filter_map(|row| Some((quantity.of(row)?, *row))).collect();
            ahead.sort_by(|a, b| a.0.total_cmp(&b.0));
            for (place, (theirs, other)) in ahead.iter().enumerate() {
                if place > 0 && other.allocator != PEER {
                    continue;
                }
                let also = ahead.iter().filter(|(_, row)| place == 0 && row.allocator != other.allocator);
                let also: Vec<&str> = also.map(|(_, row)| row.allocator.as_str()).collect();
                let times = mine.map_or(f64::INFINITY, |mine| mine / theirs.max(1e-9));
                lines.push((
                    times,
                    [
                        workload.to_owned(),
                        quantity.name().to_owned(),
                        mine.map_or_else(|| "none".to_owned(), number),
                        number(*theirs),
                        other.allocator.clone(),
                        if times.is_finite() && *theirs > 0.0 { number(times) } else { "–".to_owned() },
                        if also.is_empty() { "–".to_owned() } else { also.join(", ") },
                        why(quantity, own, other),
                    ],
                ));
            }
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
        value if value >= 2.0 => format!("{value:.2}"),
        value => format!("{value:.4}"),
    }
}

/// Does it take memory in whole pieces, by one call each, without handles?
fn is_plain(run: &Measures) -> bool {
    run.driver_calls.map == 0
}

/// What a run asked of the driver.
fn calls(run: &Measures) -> String {
    let DriverCalls { create, map, release, .. } = run.driver_calls;
    if is_plain(run) {
        let back = if release > 0 { format!(", {release} given back") } else { String::new() };
        return format!("{} taken{back}", counted(create, "piece"));
    }
    let parts = [(create, "created"), (map.saturating_sub(create), "mapped elsewhere"), (release, "released")];
    let parts: Vec<String> =
        parts.iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{count} {what}")).collect();
    if parts.is_empty() { "no handles".to_owned() } else { format!("handles {}", parts.join(", ")) }
}

/// Mean size of the handles behind the peak, in MiB.
fn handle_mib(run: &Measures) -> f64 {
    let existing = run.driver_calls.create.saturating_sub(run.driver_calls.release).max(1);
    run.peak_reserved_bytes as f64 / existing as f64 / MIB as f64
}

fn why(quantity: Quantity, own: &Row, other: &Row) -> String {
    match quantity {
        Quantity::Driver => driver(own, other),
        Quantity::Stall => stall(own, other),
        Quantity::Reserved => reserved(own, other),
        Quantity::Least => least(own, other),
    }
}

fn reserved(own: &Row, other: &Row) -> String {
    let more = human(own.plenty.peak_reserved_bytes.saturating_sub(other.plenty.peak_reserved_bytes));
    let [mine, theirs] = [own, other].map(|row| row.plenty.external_fragmentation_percent);
    let rounding = other.plenty.internal_fragmentation_percent;
    format!(
        "{more} more: {mine:.2} % of what xseg reserves at its peak is free memory outside blocks, where growth was rounded up to whole \
         handles ({:.0} MiB on average) and holes could not be used; with {} that is {theirs:.2} %, rounding inside blocks {rounding:.2} %",
        handle_mib(&own.plenty),
        other.allocator
    )
}

fn least(own: &Row, other: &Row) -> String {
    let Some(bytes) = own.least_bytes else { return "it does not complete at four times the peak".to_owned() };
    let more = human(bytes.saturating_sub(other.least_bytes.unwrap_or(bytes)));
    let mean = handle_mib(&own.limited);
    let theirs = match is_plain(&other.limited) {
        true => format!("{} takes memory in pieces, not in handles", other.allocator),
        false => format!("those of {} are {:.0} MiB", other.allocator, handle_mib(&other.limited)),
    };
    // Granules and what is little more.
    if mean > 2.5 {
        return format!(
            "{more} more: a handle that is partly live can be neither moved nor released, and handles are {mean:.0} MiB on \
             average at the limit (handle_max:2MiB is tighter and dearer); {theirs}"
        );
    }
    format!(
        "{more} more: blocks end inside granules, whose rest no block of another kind can use, though handles are as small as \
         they get; {theirs}"
    )
}

/// What the frozen model asks for each kind of work on a handle, in microseconds: growth, a move, a release.
fn prices(run: &Measures) -> [f64; 3] {
    let bytes = (handle_mib(run) * MIB as f64) as u64;
    let release = cost::nanos(DriverCall::Unmap, bytes) + cost::nanos(DriverCall::Release, bytes);
    [cost::grow_nanos(bytes), cost::move_nanos(bytes), release].map(|nanos| nanos as f64 / 1e3)
}

fn driver(own: &Row, other: &Row) -> String {
    let (mine, theirs) = (&own.limited, &other.limited);
    if !mine.completed {
        return "xseg runs out of memory under this limit".to_owned();
    }
    let shown = format!("xseg: {}; {}: {}", calls(mine), other.allocator, calls(theirs));
    if is_plain(theirs) {
        return format!(
            "{} takes each piece by one call, without the map and set_access that a handle needs; {shown}",
            other.allocator
        );
    }
    let work = |run: &Measures| {
        let DriverCalls { create, map, release, .. } = run.driver_calls;
        let prices = prices(run);
        let counts = [create, map.saturating_sub(create), release];
        [0, 1, 2].map(|kind| counts[kind] as f64 * prices[kind] / 1e3)
    };
    let (mine_ms, theirs_ms) = (work(mine), work(theirs));
    let more = [0, 1, 2].map(|kind| mine_ms[kind] - theirs_ms[kind]);
    let largest = [0, 1, 2].into_iter().max_by(|a, b| more[*a].total_cmp(&more[*b])).unwrap_or(0);
    let [created, created_there] = [mine, theirs].map(|run| run.driver_calls.create);
    let cause = match largest {
        _ if more[largest] <= 0.0 => {
            let each = |run: &Measures| 1e3 * run.driver_ms / run.driver_calls.total().max(1) as f64;
            format!("its calls are dearer: {:.1} µs on average against {:.1}", each(mine), each(theirs))
        }
        0 if created > created_there => {
            let smaller = if handle_mib(mine) < handle_mib(theirs) { "smaller handles" } else { "more handles" };
            format!("makes {smaller}: {created} creates against {created_there}")
        }
        0 => "its handles cost more each to create".to_owned(),
        1 => format!(
            "moves under the limit: {} against {}",
            counted(mine.handles_moved + mine.handles_joined, "handle"),
            theirs.handles_moved + theirs.handles_joined
        ),
        _ => format!(
            "gives up handles so that others fit under the limit: {} released against {}",
            mine.driver_calls.release, theirs.driver_calls.release
        ),
    };
    format!("{cause}; {shown}")
}

fn micros(nanos: u64) -> String {
    format!("{} µs", nanos / 1000)
}

fn stall(own: &Row, other: &Row) -> String {
    if !own.limited.completed {
        return "xseg runs out of memory under this limit".to_owned();
    }
    let (Some(mine), Some(theirs)) = (own.limited.longest_stall, other.limited.longest_stall) else {
        return "not measured".to_owned();
    };
    format!("xseg: {}; {}: {}", longest(&own.limited, &mine), other.allocator, longest(&other.limited, &theirs))
}

/// What the longest stall of a run is made of.
fn longest(run: &Measures, stall: &Longest) -> String {
    let request = format!("a request of {}", human(stall.requested_bytes));
    let (waited, driver) = (micros(stall.waited_ns), micros(stall.driver_ns));
    if stall.waited_ns >= stall.driver_ns && stall.waited_ns > 0 {
        return format!("{request} waited {waited} for the device, beside {driver} in the driver");
    }
    let grown = match stall.grown_bytes {
        // What is moved or exchanged leaves the sum as it was.
        0 => "existing memory was moved or exchanged".to_owned(),
        bytes if is_plain(run) => format!("{} more was taken", human(bytes)),
        bytes => {
            let mean = handle_mib(run);
            let growth = bytes as f64 / (mean * MIB as f64) * prices(run)[0];
            let moves = run.handles_moved + run.handles_joined > 0 && stall.driver_ns as f64 / 1e3 > 2.0 * growth;
            let moves = if moves { ", and handles were moved" } else { "" };
            format!("memory grew by {} in handles of {mean:.0} MiB on average{moves}", human(bytes))
        }
    };
    let also = if stall.waited_ns > 0 { format!(", and {waited} of waiting") } else { String::new() };
    format!("{request} took {driver} in the driver: {grown}{also}")
}
