//! The report as one page that loads nothing else.

use super::{Quantity, Report, Table, not_best, plots, terminal};
use crate::suite::Measured;
use crate::units::human;

const STYLE: &str = include_str!("page.css");

/// What starts with a digit and is shorter is a number, not a sentence.
const NUMBER: usize = 24;

/// Text for HTML, also in attributes.
pub(super) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

fn element(table: &Table) -> String {
    let mut out = format!("<table><caption>{}</caption><thead><tr>", escape(&table.title));
    for heading in &table.headings {
        out += &format!("<th scope=\"col\">{}</th>", escape(heading));
    }
    out += "</tr></thead><tbody>";
    for row in &table.rows {
        out += "<tr>";
        for (number, text) in row.iter().enumerate() {
            let class = match text.chars().next() {
                _ if text.ends_with('*') => " class=\"number best\"",
                Some('0'..='9' | '–' | '-') if text.len() < NUMBER => " class=\"number\"",
                _ => "",
            };
            let cell = if number == 0 { "th scope=\"row\"" } else { "td" };
            out += &format!("<{cell}{class}>{}</{}>", escape(text), &cell[..2]);
        }
        out += "</tr>";
    }
    format!("<div class=\"wide\">{out}</tbody></table></div><p>{}</p>\n", escape(&table.text))
}

/// Everything about one workload.
fn workload(report: &Report, name: &str, group: &[&Measured]) -> Result<String, String> {
    let Some(first) = group.first() else { return Ok(String::new()) };
    let headings = terminal::headings();
    let headings: Vec<&str> = headings.iter().map(String::as_str).collect();
    let text = format!(
        "Peak requested {}, limit {}, {} events.",
        human(first.row.peak_requested_bytes),
        human(first.row.limit_bytes),
        first.row.events
    );
    let mut table = Table::new(report.about(name), &text, &headings);
    for measured in group {
        table.row(terminal::cells(&measured.row, group));
    }
    let mut out = format!("<section id=\"{0}\"><h2>{0}</h2>{1}<div class=\"row\">", escape(name), element(&table));
    for quantity in [Quantity::Least, Quantity::Driver] {
        if quantity == Quantity::Driver || group.iter().any(|measured| measured.row.least_searched) {
            out += &format!("<figure>{}</figure>", plots::bars(quantity, group)?);
        }
    }
    out += &format!("<figure>{}</figure></div>", plots::stalls(group)?);
    let most = plots::most_reserved(group);
    out += "<details><summary>Memory over time, with plenty of memory</summary><div class=\"row small\">";
    for measured in group {
        if let Some(run) = &measured.plenty {
            out += &format!("<figure>{}</figure>", plots::memory(&measured.row.allocator, run, most)?);
        }
    }
    out += "</div></details><details><summary>Address space at the peak, and when memory ran out under the limit</summary><div class=\"row small wider\">";
    for measured in group {
        let runs = [(&measured.plenty, "plenty"), (&measured.limited, "limit")];
        for (run, which) in runs {
            let Some(run) = run else { continue };
            let picture = match (&run.at_refusal, &run.at_peak) {
                (Some(picture), _) => Some((picture, "out of memory")),
                (None, picture) => picture.as_ref().map(|picture| (picture, "peak")),
            };
            let Some((picture, when)) = picture else { continue };
            let title = format!(
                "{}, {which}, {when}: {} in {} holes, largest {}",
                measured.row.allocator,
                human(picture.bytes[2]),
                picture.holes,
                human(picture.largest_hole)
            );
            let drawn = plots::addresses(&title, picture)?;
            out += &format!("<figure>{drawn}<figcaption>{}</figcaption></figure>", escape(&title));
        }
    }
    Ok(out + "</div></details></section>\n")
}

/// The page.
///
/// # Errors
/// What the plotting library says.
pub(super) fn page(report: &Report) -> Result<String, String> {
    let setup = &report.setup;
    let conf = if setup.conf.is_empty() { "defaults" } else { &setup.conf };
    let mut out = format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <title>xseg: defragmentation suite</title><style>{STYLE}</style></head><body><main>\n\
         <h1>Defragmentation suite</h1>\n\
         <p>What each way of managing GPU memory does with each workload. Every allocator but <code>xseg-host</code> runs on a \
         simulated device, whose calls are priced by the model <code>{}</code>; <code>xseg-host</code> is xseg on host memory that is \
         really remapped, every stamp checked under the limit. xseg {}, settings {}, seed {}, limit {}, device {} behind, least memory {}.{}</p>\n",
        escape(&setup.model),
        escape(&setup.version),
        escape(conf),
        setup.seed,
        escape(&setup.limit),
        escape(&setup.gpu_lag),
        escape(&setup.least),
        if setup.quick { " A quick run: short workloads." } else { "" },
    );
    let groups = report.by_workload();
    if !groups.is_empty() {
        out += "<nav>Workloads: ";
        for (name, _) in &groups {
            out += &format!("<a href=\"#{0}\">{0}</a> ", escape(name));
        }
        out += "<a href=\"#not-best\">where xseg is not the best</a> <a href=\"#tables\">further tables</a></nav>\n";
        out += &element(&terminal::summary(report));
        out += &format!(
            "<h2>How to read this</h2><p>{}</p><figure class=\"legend\">{}</figure>\n",
            escape(terminal::LEGEND),
            plots::legend()?
        );
        out += &format!(
            "<section id=\"not-best\"><h2>Where xseg is not the best, and why</h2>{}</section>\n",
            element(&not_best::table(report))
        );
    }
    for (name, group) in &groups {
        out += &workload(report, name, group)?;
    }
    out += "<section id=\"tables\"><h2>Further tables</h2>";
    for moving in &report.moving {
        out += &format!("{}<figure>{}</figure>", element(&moving.table()), plots::moving(moving)?);
    }
    for table in &report.tables {
        out += &element(table);
    }
    for skipped in &report.skipped {
        out += &format!("<p>Left out: {}</p>", escape(skipped));
    }
    Ok(out + "</section></main></body></html>\n")
}
