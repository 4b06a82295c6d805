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
    assert_eq!(paths.len(), 4);
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
        ("<ul>", "</ul>"),
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
    // Light and dark by the reader's choice: no colour but those of the page's style.
    let body = page.split("</style>").nth(1).unwrap();
    assert!(
        page.contains("<meta name=\"color-scheme\" content=\"light dark\">")
            && page.contains("prefers-color-scheme: dark")
    );
    assert!(!body.contains("fill=\"#"), "a fixed colour");
    assert!(!body.contains("stroke=\"#") && body.contains("fill=\"var(--ink)\""), "a fixed colour");
    assert!(!body.contains('`') && !body.contains("<tbody></tbody>"));
}

#[test]
fn the_terminal_has_sorted_tables_with_the_best_marked() {
    let text = text(&report(), true, None);
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
        if let (Ok(own), Ok(best)) = (value("xseg"), value("other")) {
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
fn the_short_form_fits_any_terminal() {
    let report = report();
    for width in [60, 80, 132] {
        for full in [false, true] {
            let text = text(&report, full, Some(width));
            let wide = text.lines().find(|line| line.chars().count() > usize::from(width));
            assert_eq!(wide, None, "{full}");
        }
    }
    let short = text(&report, false, Some(100));
    assert!(
        short.contains("Least memory") && short.contains("Driver time") && short.contains("All workloads"),
        "{short}"
    );
    assert!(short.contains("Moving against copying on host: remapping is faster"), "{short}");
}

#[test]
fn only_the_best_is_marked_and_half_runs_are_in_brackets() {
    let report = report();
    for (_, group) in report.by_workload() {
        let driver =
            group.iter().filter_map(|measured| Quantity::Driver.of(&measured.row)).fold(f64::INFINITY, f64::min);
        for measured in &group {
            let (row, cells) = (&measured.row, terminal::cells(&measured.row, &group));
            let same = format!("{:.1}", row.limited.driver_ms) == format!("{driver:.1}");
            assert_eq!(cells[6].ends_with('*'), row.limited.completed && same, "{cells:?}");
            assert_eq!(cells[6].starts_with('('), !row.limited.completed, "{cells:?}");
            assert_eq!(cells[1] == "–", row.allocator == HOST, "only it is not searched: {cells:?}");
        }
    }
}

#[test]
fn a_verified_replay_that_stops_says_so() {
    let workload = Workload::from_trace(Trace::from_bytes("t", GAPS.as_bytes()).unwrap());
    let measured = run(&options(vec![workload], &[HOST], 64 * MIB), &Told::default()).unwrap();
    let said = terminal::result(&measured[0].row);
    assert!(said.starts_with("stopped at the first refusal, at 33 %"), "{said}");
}

#[test]
fn columns_without_values_are_left_out() {
    let mut table = Table::new("t", "", &["name", "none", "some"]);
    table.row(["a", "–", "–"].map(str::to_owned));
    table.row(["b", "–", "2 of 3"].map(str::to_owned));
    assert!(table.is_numeric(2) && !table.is_numeric(0));
    let table = table.without_empty_columns();
    assert_eq!(
        (table.headings, &table.rows[1][..]),
        (vec!["name".into(), "some".into()], &["b".into(), "2 of 3".into()][..])
    );
    let mut none = Table::new("t", "", &["name", "none"]);
    none.row(["a", "–"].map(str::to_owned));
    assert!(none.without_empty_columns().rows.is_empty());
}

#[test]
fn the_peer_has_a_line_wherever_it_is_ahead_and_causes_are_those_of_the_figures() {
    let trace = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("traces/llama_tiny_snapshot.pickle.xz");
    let workload = Workload::from_trace(Trace::load(&trace).unwrap());
    let limit = workload.trace.peak_requested() / 100 * 102;
    let mut options = options(vec![workload], &["xseg", "torch-expandable", "cuda-malloc", "slab", "vpmm"], limit);
    options.least = crate::suite::Least::No;
    let measured = run(&options, &Told::default()).unwrap();
    let report = Report { measured, moving: Vec::new(), tables: Vec::new(), ..report() };
    let table = not_best::table(&report);
    let rows = report.rows();
    let row = |name: &str| *rows.iter().find(|row| row.allocator == name).unwrap();
    let (own, peer) = (row("xseg"), row("torch-expandable"));
    let line =
        |quantity: Quantity, by: &str| table.rows.iter().find(|line| line[1] == quantity.name() && line[4] == by);
    for quantity in Quantity::ALL {
        let ahead = quantity
            .of(own)
            .zip(quantity.of(peer))
            .is_some_and(|(own_value, theirs)| quantity.is_behind(own, own_value, theirs));
        assert_eq!(line(quantity, "torch-expandable").is_some(), ahead, "{}", quantity.name());
    }
    let driver = &line(Quantity::Driver, "torch-expandable").unwrap()[7];
    let created = [own, peer].map(|row| row.limited.driver_calls.create);
    assert!(
        driver.starts_with(&format!("makes smaller handles: {} creates against {};", created[0], created[1])),
        "{driver}"
    );
    // The best in stalls never waits when it allocates, and its calls are no growth of handles.
    let stall = &line(Quantity::Stall, "cuda-malloc").unwrap()[7];
    let longest = [own, row("cuda-malloc")].map(|row| row.limited.longest_stall.unwrap());
    assert!(longest.iter().all(|stall| stall.waited_ns == 0), "{longest:?}");
    assert!(
        !stall.contains("wait") && stall.contains(&format!("took {} µs in the driver", longest[0].driver_ns / 1000)),
        "{stall}"
    );
    let (_, theirs) = stall.split_once("; cuda-malloc: ").unwrap();
    assert!(theirs.contains("more was taken") && !theirs.contains("handle"), "{stall}");
    // The longest stall is the one that the quantiles end with.
    for row in &rows {
        let (longest, stall) = (row.limited.longest_stall.unwrap(), row.limited.stall_us.unwrap());
        assert!(((longest.waited_ns + longest.driver_ns) as f64 / 1e3 - stall.max).abs() < 1e-6, "{}", row.allocator);
    }
}

#[test]
fn times_for_people() {
    assert_eq!(
        [0, 5_000_000, 2_000_000_000, 1500].map(|n| duration(Duration::from_nanos(n))),
        ["0 s", "5 ms", "2 s", "1 µs"]
    );
}
