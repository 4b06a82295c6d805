//! The report's files and tables.

use super::*;
use crate::suite::tests::{GAPS, Told, options};
use crate::suite::workloads::Workload;
use crate::suite::{classic, run};
use crate::trace::Trace;
use crate::units::MIB;

/// A report of two workloads, with a name that needs escaping.
fn report() -> Report {
    let workload = |name: &str| Workload::from_trace(Trace::from_bytes(name, GAPS.as_bytes()).unwrap());
    let workloads = vec![workload("gaps"), workload("<b>&amp")];
    let about = workloads.iter().map(|workload| (workload.name().to_owned(), "two gaps, \"one\" block".to_owned()));
    let about = about.collect();
    let options = options(workloads, &["xseg", HOST, "torch-native", "first-fit", "buddy"], 82 * MIB);
    let measured = run(&options, &Told::default()).unwrap();
    let tables = classic::tables(&options.config, options.lag, &Err("none here".to_owned())).unwrap();
    let setup = Setup {
        version: "1".into(),
        conf: String::new(),
        model: "m".into(),
        seed: 1,
        gpu_lag: duration(options.lag),
        limit: "82 MiB".into(),
        least: "quick".into(),
        quick: true,
    };
    let rate = |handle_mib, bare_gb_s| crate::suite::moving::Rate {
        handle_mib,
        bare_us: 10.0,
        bare_gb_s,
        heap_gb_s: 0.9 * bare_gb_s,
        copy_gb_s: 5.0,
    };
    let moving = Moving {
        backend: "host".into(),
        device: "memory".into(),
        rates: vec![rate(2, 2.0), rate(4, 20.0)],
        crossover_mib: Some(2.6),
    };
    Report { setup, measured, about, moving: vec![moving], tables, skipped: vec!["the GPU: none".into()] }
}

#[test]
fn files_are_written_and_parse() {
    let report = report();
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("new").join("folder");
    let paths = write(&report, &out).unwrap();
    assert_eq!(paths.len(), 3);
    let json: serde_json::Value = serde_json::from_slice(&std::fs::read(out.join("report.json")).unwrap()).unwrap();
    assert_eq!(json["rows"].as_array().unwrap().len(), 10);
    assert_eq!((&json["setup"]["seed"], &json["moving"][0]["crossover_mib"]), (&1.into(), &2.6.into()));
    let mut csv = csv::Reader::from_path(out.join("rows.csv")).unwrap();
    let headings = csv.headers().unwrap().clone();
    let column = |name: &str| headings.iter().position(|heading| heading == name).unwrap_or_else(|| panic!("{name}"));
    let records: Vec<csv::StringRecord> = csv.records().collect::<Result<_, _>>().unwrap();
    assert_eq!(records.len(), 10);
    for (record, row) in records.iter().zip(json["rows"].as_array().unwrap()) {
        assert_eq!(record[column("allocator")], *row["allocator"].as_str().unwrap());
        for (name, value) in [
            ("peak_requested_bytes", &row["peak_requested_bytes"]),
            ("plenty_peak_reserved_bytes", &row["plenty"]["peak_reserved_bytes"]),
            ("limited_driver_ms", &row["limited"]["driver_ms"]),
            ("limited_driver_calls_set_access", &row["limited"]["driver_calls"]["set_access"]),
            ("limited_moved_bytes", &row["limited"]["moved_bytes"]),
        ] {
            assert_eq!(record[column(name)], value.to_string(), "{name}");
        }
        let stall = &row["limited"]["stall_us"]["max"];
        assert_eq!(
            record[column("limited_stall_us_max")],
            if stall.is_null() { String::new() } else { stall.to_string() }
        );
    }
    let unit = |heading: &str| {
        ["_bytes", "_ms", "_us", "_ns", "_percent", "_factor", "_p50", "_p90", "_p99", "_p999", "_max"]
            .iter()
            .any(|unit| heading.ends_with(unit))
    };
    let counts = ["calls", "waits", "handles", "events", "event", "requests", "stamps", "mismatches"];
    let words = ["workload", "origin", "allocator", "backend", "completed", "failure"];
    for heading in &headings {
        let known = counts.iter().chain(&words).any(|word| heading.contains(word));
        assert!(unit(heading) || known, "{heading} names no unit");
    }
}

#[test]
fn the_page_loads_nothing_and_shows_everything() {
    let report = report();
    let page = html::page(&report).unwrap();
    let bare = page.replace("http://www.w3.org/2000/svg", "");
    for outside in ["http:", "https:", "src=", "<link", "<script", "url(", "@import", "<b>"] {
        assert!(!bare.contains(outside), "{outside}");
    }
    assert!(page.contains("&lt;b&gt;&amp;amp"), "names are escaped");
    for (open, close) in [
        ("<svg ", "</svg>"),
        ("<table>", "</table>"),
        ("<figure", "</figure>"),
        ("<section", "</section>"),
        ("<details>", "</details>"),
    ] {
        assert_eq!(page.matches(open).count(), page.matches(close).count(), "{open}");
    }
    // For each workload and model: two bars, stalls; for each allocator that was measured: memory, two pictures.
    assert_eq!(page.matches("<title>memory over time, ").count(), 2 * 4);
    assert_eq!(page.matches("<title>address space, ").count(), 2 * 4 * 2);
    assert_eq!(page.matches("<title>least memory").count(), 2);
    assert_eq!(page.matches("<title>driver time").count(), 2);
    assert_eq!(page.matches("<title>stall of one allocation").count(), 2);
    assert_eq!(page.matches("<title>moving against copying on host").count(), 1);
    for part in
        ["out of memory", "peak", "Where xseg is not the best, and why", "crossover 2.6 MiB", "the GPU: none", "reach"]
    {
        assert!(page.contains(part), "{part}");
    }
    assert!(page.contains("stamps checked") && page.contains("class=\"number best\""));
}

#[test]
fn the_terminal_has_sorted_tables_with_the_best_marked() {
    let text = text(&report());
    for part in [
        "allocator",
        "GiB",
        "µs",
        "ms",
        "1.0000*",
        "host",
        "All workloads",
        "Moving against copying on host",
        "left out: the GPU",
    ] {
        assert!(text.contains(part), "{part} in\n{text}");
    }
    let place = |name: &str| text.find(&format!("│ {name} ")).unwrap_or_else(|| panic!("{name}"));
    assert!(place("xseg") < place("xseg-host") && place("xseg") < place("first-fit"), "the tightest first");
}

#[test]
fn where_xseg_is_not_the_best_is_found_with_a_reason() {
    let report = report();
    let table = not_best::table(&report);
    let column = |name: &str| table.headings.iter().position(|heading| heading == name).unwrap();
    assert!(!table.rows.is_empty(), "something is always cheaper on so small a trace");
    for row in &table.rows {
        let value = |name: &str| row[column(name)].parse::<f64>();
        if let (Ok(own), Ok(best)) = (value("xseg"), value("best")) {
            assert!(own > best, "{row:?}");
        }
        assert!(row[column("by")] != "xseg" && row[column("why")].len() > 20, "{row:?}");
    }
    // Every pair in which another is ahead is there, and no other.
    for (workload, group) in report.by_workload() {
        let own = &group.iter().find(|measured| measured.row.allocator == "xseg").unwrap().row;
        for quantity in Quantity::ALL {
            let best = quantity.best(group.iter().map(|measured| &measured.row)).unwrap();
            let behind = quantity.of(own).is_none_or(|mine| quantity.is_behind(own, mine, best));
            let listed = table.rows.iter().any(|row| row[0] == workload && row[1] == quantity.name());
            assert_eq!(behind, listed, "{workload} {}", quantity.name());
        }
    }
}

#[test]
fn times_for_people() {
    assert_eq!(
        [0, 5_000_000, 2_000_000_000, 1500].map(|n| duration(Duration::from_nanos(n))),
        ["0 s", "5 ms", "2 s", "1 µs"]
    );
}
