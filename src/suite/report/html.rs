//! The report as one page that loads nothing else.

use super::{Quantity, Report, Table, not_best, plots, summary, terminal};
use crate::suite::Measured;
use crate::units::{counted, human};

const STYLE: &str = include_str!("page.css");

/// Text for HTML, also in attributes.
pub(super) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Prose: names between backticks are code.
fn prose(text: &str) -> String {
    let mut out = String::new();
    for (number, part) in escape(text).split('`').enumerate() {
        out += &if number % 2 == 1 { format!("<code>{part}</code>") } else { part.to_owned() };
    }
    out
}

/// A table; nothing for one without rows.
fn element(table: &Table) -> String {
    if table.rows.is_empty() {
        return String::new();
    }
    let class = |column: usize| if table.is_numeric(column) { "number" } else { "" };
    let classes: Vec<&str> = (0..table.headings.len()).map(class).collect();
    let mut out = format!("<table><caption>{}</caption><thead><tr>", escape(&table.title));
    for (heading, class) in table.headings.iter().zip(&classes) {
        out += &format!("<th scope=\"col\" class=\"{class}\">{}</th>", escape(heading));
    }
    out += "</tr></thead><tbody>";
    for row in &table.rows {
        out += "<tr>";
        for (number, (text, class)) in row.iter().zip(&classes).enumerate() {
            let best = if text.ends_with('*') { " best" } else { "" };
            let cell = if number == 0 { "th scope=\"row\"" } else { "td" };
            out += &format!("<{cell} class=\"{class}{best}\">{}</{}>", escape(text), &cell[..2]);
        }
        out += "</tr>";
    }
    out = out.replace(" class=\"\"", "");
    format!("<div class=\"wide\" tabindex=\"0\">{out}</tbody></table></div><p>{}</p>\n", prose(&table.text))
}

/// Everything about one workload.
fn workload(report: &Report, name: &str, group: &[&Measured]) -> Result<String, String> {
    let Some(first) = group.first() else { return Ok(String::new()) };
    let headings = terminal::headings();
    let headings: Vec<&str> = headings.iter().map(String::as_str).collect();
    let mut table = Table::new(report.about(name), &terminal::facts(&first.row), &headings);
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
    let drawn = pictures(group)?;
    Ok(out + &drawn + "</section>\n")
}

/// What is drawn of each allocator, folded away.
fn pictures(group: &[&Measured]) -> Result<String, String> {
    if group.iter().all(|measured| measured.plenty.is_none()) {
        return Ok(String::new());
    }
    let top = plots::top(group);
    let mut out = String::from(
        "<details><summary>Memory over time, with plenty of memory</summary><p>Reserved as an area, allocated dashed, \
         requested as a thin line. All panels of a workload have one scale; what reserves more than it shows is cut off at the \
         top, and says so.</p><div class=\"row small\">",
    );
    for measured in group {
        if let Some(run) = &measured.plenty {
            out += &format!("<figure>{}</figure>", plots::memory(&measured.row.allocator, run, top)?);
        }
    }
    out += "</div></details><details><summary>Address space at the peak, and when memory ran out under the limit</summary>\
            <p>Each strip is the mapped address space from its lowest address (left) to its highest (right), in 120 columns of the \
            same size. A column shows what its addresses hold as shares of its height, from the bottom up: blocks, blocks on moved \
            memory, holes, what a move left behind; what is empty is unmapped, of which no run is shown wider than a fortieth of \
            all (the scale counts what is shown). Memory without holes is a solid bar, scattered memory a ragged one.</p><div class=\"row small wider\">";
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
                "{}, {which}, {when}: {} in {}, largest {}",
                measured.row.allocator,
                human(picture.bytes[2]),
                counted(picture.holes, "hole"),
                human(picture.largest_hole)
            );
            let drawn = plots::addresses(&title, picture)?;
            out += &format!("<figure>{drawn}<figcaption>{}</figcaption></figure>", escape(&title));
        }
    }
    Ok(out + "</div></details>")
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
         <meta name=\"color-scheme\" content=\"light dark\">\
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
        out += "<a href=\"#not-best\">where xseg is not the best</a>";
        if !report.moving.is_empty() || !report.tables.is_empty() {
            out += " <a href=\"#tables\">further tables</a>";
        }
        out += "</nav>\n";
        out += &element(&summary::table(report));
        out += &format!(
            "<h2>How to read this</h2><p>{}</p><figure class=\"legend\">{}</figure>\n",
            escape(terminal::LEGEND),
            plots::legend()?
        );
        let behind = not_best::table(report);
        let behind = if behind.rows.is_empty() { "<p>Nowhere.</p>".to_owned() } else { element(&behind) };
        out += &format!("<section id=\"not-best\"><h2>Where xseg is not the best, and why</h2>{behind}</section>\n");
    }
    for (name, group) in &groups {
        out += &workload(report, name, group)?;
    }
    if !report.moving.is_empty() || !report.tables.is_empty() {
        out += "<section id=\"tables\"><h2>Further tables</h2>";
        for moving in &report.moving {
            out += &format!("{}<figure>{}</figure>", element(&moving.table()), plots::moving(moving)?);
        }
        for table in &report.tables {
            out += &element(table);
        }
        out += "</section>";
    }
    if !report.skipped.is_empty() {
        let items: Vec<String> = report.skipped.iter().map(|why| format!("<li>{}</li>", prose(why))).collect();
        out += &format!("<section><h2>Left out</h2><ul>{}</ul></section>", items.concat());
    }
    Ok(out + "</main></body></html>\n")
}
