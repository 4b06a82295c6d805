//! Other allocators as they are on a GPU, beside their models.

use super::report::Table;
use super::row::Row;
use crate::peers::{Least, Line, OWN, Replay, Run};
use crate::units::GIB;

/// What stands before a name, since models bear the same.
const REAL: &str = "real:";

/// The table, one line a workload and allocator, for the workloads of `rows`; what of `lines` is about others, in words.
pub(crate) fn table(lines: &[Line], source: &str, rows: &[&Row]) -> (Option<Table>, Vec<String>) {
    let mut table = Table::new(
        "Real allocators on a GPU, beside their models",
        &format!(
            "{source}. Plenty: all of the card. Little: what was left free beside a ballast. Least: the least free memory in which the workload completes, to 0.05 %. \
             Calls: time inside the allocator, kernels left out. Model: that of the same name in this run (xseg: the simulated device), its own limit and search; –: none, or it does not say."
        ),
        &[
            "workload",
            "allocator",
            "requested GiB",
            "reserved GiB, plenty",
            "model's GiB",
            "off by %",
            "least × requested",
            "model's ×",
            "off by %, least",
            "little × requested",
            "refused with little",
            "calls ms, plenty",
            "calls ms, little",
            "alloc p50 µs",
            "alloc p99 µs",
            "alloc max µs",
        ],
    );
    let mut others: Vec<String> = Vec::new();
    for line in lines {
        let Line::Replay(plenty) = line else { continue };
        if plenty.run != Run::Plenty {
            continue;
        }
        let same =
            |row: &&&Row| row.workload == plenty.trace && row.peak_requested_bytes == plenty.trace_peak_requested_bytes;
        if !rows.iter().any(|row| same(&row)) {
            if !others.contains(&plenty.trace) {
                others.push(plenty.trace.clone());
            }
            continue;
        }
        let model = rows.iter().filter(same).find(|row| row.allocator == plenty.allocator);
        table.row(cells(lines, plenty, model.copied()));
    }
    let others = others.into_iter().map(|name| format!("real allocators on {name}: this run has no such workload"));
    ((!table.rows.is_empty()).then_some(table), others.collect())
}

fn cells(lines: &[Line], plenty: &Replay, model: Option<&Row>) -> [String; 16] {
    let about = |trace: &str, allocator: &str| trace == plenty.trace && allocator == plenty.allocator;
    let limited = lines.iter().find_map(|line| match line {
        Line::Replay(run) if run.run == Run::Limited && about(&run.trace, &run.allocator) => Some(run),
        _ => None,
    });
    let least = lines.iter().find_map(|line| match line {
        Line::Least(least) if about(&least.trace, &least.allocator) => Some(least),
        _ => None,
    });
    let dash = || "–".to_owned();
    let whole = plenty.completed.then_some(plenty);
    let gib = |bytes: u64| format!("{:.3}", bytes as f64 / GIB as f64);
    let off = |model: Option<f64>, real: Option<f64>| match (model, real) {
        (Some(model), Some(real)) if real > 0.0 => format!("{:+.2}", 100.0 * (model / real - 1.0)),
        _ => dash(),
    };
    let reserved = whole.map(|run| run.peak_reserved_bytes);
    let modelled = model.filter(|row| row.plenty.completed).map(|row| row.plenty.peak_reserved_bytes);
    let (factor, modelled_factor) = (least.and_then(Least::factor), model.and_then(|row| row.least_factor));
    let refused = limited.map_or_else(dash, |run| match run.cut_short {
        true => format!("{} or more", run.ooms),
        false => run.ooms.to_string(),
    });
    let millis =
        |run: Option<&Replay>| run.filter(|run| run.completed).map_or_else(dash, |run| format!("{:.1}", run.calls_ms));
    [
        plenty.trace.clone(),
        format!("{REAL}{}", plenty.allocator),
        gib(plenty.trace_peak_requested_bytes),
        reserved.map_or_else(dash, gib),
        modelled.map_or_else(dash, gib),
        off(modelled.map(|bytes| bytes as f64), reserved.map(|bytes| bytes as f64)),
        factor.map_or_else(dash, |factor| format!("{factor:.4}")),
        modelled_factor.map_or_else(dash, |factor| format!("{factor:.4}")),
        off(modelled_factor, factor),
        limited.map_or_else(dash, |run| {
            format!("{:.4}", run.left_free_bytes as f64 / run.trace_peak_requested_bytes.max(1) as f64)
        }),
        refused,
        millis(Some(plenty)),
        millis(limited),
        format!("{:.2}", plenty.alloc_p50_us),
        format!("{:.2}", plenty.alloc_p99_us),
        format!("{:.0}", plenty.alloc_max_us),
    ]
}

/// What was measured, in a sentence: the allocators with their versions.
pub(crate) fn source(lines: &[Line], from: &str) -> String {
    let mut about: Vec<String> = Vec::new();
    for line in lines {
        let Line::Program(line) = line else { continue };
        let text = match line.allocator.as_str() {
            OWN => line.about.clone(),
            name => format!("{name}: {}", line.about),
        };
        if !about.contains(&text) {
            about.push(text);
        }
    }
    format!("Measured, {from}: {}", about.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suite::workloads::Workload;
    use crate::suite::{Least as Search, Options, run};
    use crate::trace::Trace;
    use std::path::Path;
    use std::time::Duration;

    struct Quiet;

    impl crate::suite::Progress for Quiet {
        fn length(&self, _: u64) {}
        fn done(&self, _: u64) {}
        fn doing(&self, _: &str) {}
    }

    /// The real ones, measured on an H200, beside the models on the same trace: the models are within 1 % of them.
    #[test]
    fn the_models_of_pytorch_are_within_one_percent_of_the_real_ones() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let lines = crate::peers::read(&root.join("tests/data/peers.jsonl")).unwrap();
        let trace = Trace::load(&root.join("traces/gpt2.trace.xz")).unwrap();
        let options = Options {
            workloads: vec![Workload::from_trace(trace)],
            allocators: ["xseg", "torch-native", "torch-expandable"].map(str::to_owned).to_vec(),
            config: crate::Config::default(),
            limit: Box::new(|peak| peak / 100 * 102),
            lag: Duration::ZERO,
            least: Search::Quick,
            jobs: 1,
        };
        let measured = run(&options, &Quiet).unwrap();
        let rows: Vec<&Row> = measured.iter().map(|measured| &measured.row).collect();
        let (table, others) = table(&lines, &source(&lines, "recorded"), &rows);
        let table = table.unwrap();
        assert_eq!(others, ["real allocators on moe: this run has no such workload"]);
        assert!(
            table.text.contains("torch-native: PyTorch 2.11.0") && table.text.contains("recorded"),
            "{}",
            table.text
        );
        let column = |name: &str| table.headings.iter().position(|heading| heading == name).unwrap();
        let names: Vec<&str> = table.rows.iter().map(|row| row[1].as_str()).collect();
        assert_eq!(names, ["real:xseg", "real:cuda-malloc", "real:torch-native", "real:torch-expandable"]);
        for row in table.rows.iter().filter(|row| row[1].contains("torch")) {
            for name in ["off by %", "off by %, least"] {
                let off: f64 = row[column(name)].parse().unwrap();
                assert!(off.abs() <= 1.0, "{row:?}");
            }
            assert_eq!((row[column("refused with little")].as_str(), row[0].as_str()), ("0", "gpt2"));
        }
        let plain = &table.rows[1];
        assert_eq!([&plain[column("model's GiB")], &plain[column("least × requested")]], ["–", "–"]);
    }
}
