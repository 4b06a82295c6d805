//! The classic claims about pools, beside what the suite's workloads show.

use super::super::report::Table;
use super::super::row::Row;

/// Workloads of the claims, with the fragmentation claimed without and with a pool, in percent.
const CLAIMS: [(&str, &str, u32, u32); 3] = [
    ("train-small", "small-model training", 18, 3),
    ("infer-large", "large-model inference", 12, 2),
    ("mixed", "mixed load", 25, 5),
];
/// Without a pool and with ever better ones.
const COLUMNS: [&str; 6] =
    ["first-fit", "cuda-malloc", "cuda-malloc-async", "torch-native", "torch-expandable", "xseg"];

fn find<'a>(rows: &'a [&'a Row], workload: &str, allocator: &str) -> Option<&'a Row> {
    rows.iter().find(|row| row.workload == workload && row.allocator == allocator).copied()
}

/// Fragmentation with and without a pool; `None` if none of its workloads was run.
pub(crate) fn fragmentation(rows: &[&Row]) -> Option<Table> {
    let headings: Vec<String> = COLUMNS.iter().map(|name| format!("{name} %")).collect();
    let headings: Vec<&str> = ["workload"]
        .into_iter()
        .chain(headings.iter().map(String::as_str))
        .chain(["claimed without → with a pool %"])
        .collect();
    let mut table = Table::new(
        "Fragmentation with and without a pool",
        "Modelled, without a limit: 1 − peak requested / peak reserved, rounding inside blocks counted. No pool: cuda-malloc; one \
         heap with a free list: first-fit; pools: the others.",
        &headings,
    );
    for (workload, name, without, with) in CLAIMS {
        if !rows.iter().any(|row| row.workload == workload) {
            continue;
        }
        let cells = COLUMNS.map(|allocator| match find(rows, workload, allocator) {
            Some(row) => format!("{:.1}", row.plenty.fragmentation_percent()),
            None => "–".to_owned(),
        });
        let first = std::iter::once(format!("{name} ({workload})"));
        table.row(first.chain(cells).chain([format!("{without} → {with}")]));
    }
    (!table.rows.is_empty()).then_some(table)
}

/// Share of the memory that a workload can use: peak requested over the least memory; `None` where no
/// least memory was searched.
pub(crate) fn usable(rows: &[&Row]) -> Option<Table> {
    let mut table = Table::new(
        "Share of memory that is usable",
        "Modelled: peak requested / least memory in which the workload completes, over all workloads that the allocator \
         completes at four times its peak. The claim to compare with: 78 % without and 92 % with a pool.",
        &["allocator", "mean %", "worst %", "worst workload", "workloads", "not completed"],
    );
    let mut names: Vec<&str> = Vec::new();
    for row in rows.iter().filter(|row| row.least_searched) {
        if !names.contains(&row.allocator.as_str()) {
            names.push(&row.allocator);
        }
    }
    let mut lines = Vec::new();
    for name in names {
        let own = rows.iter().filter(|row| row.least_searched && row.allocator == name);
        let (found, not): (Vec<&&Row>, Vec<&&Row>) = own.partition(|row| row.least_factor.is_some());
        let share = |row: &&&Row| 100.0 / row.least_factor.unwrap_or(f64::INFINITY);
        let Some(worst) = found.iter().min_by(|a, b| share(a).total_cmp(&share(b))) else { continue };
        let mean = found.iter().map(&share).sum::<f64>() / found.len() as f64;
        lines.push((
            mean,
            [
                name.to_owned(),
                format!("{mean:.1}"),
                format!("{:.1}", share(worst)),
                worst.workload.clone(),
                found.len().to_string(),
                not.len().to_string(),
            ],
        ));
    }
    lines.sort_by(|a, b| b.0.total_cmp(&a.0));
    lines.into_iter().for_each(|(_, cells)| table.row(cells));
    (!table.rows.is_empty()).then_some(table)
}
