//! Tables and prose in a terminal: never wider than it.

use super::Table;
use comfy_table::{Cell, CellAlignment, ColumnConstraint, ContentArrangement, Width, presets};

/// Width of prose and of tables of short cells where stdout is no terminal.
const PROSE: u16 = 120;
/// Width there of tables with sentences in their cells.
const SENTENCES: u16 = 200;

/// Columns of the terminal that stdout is; `None` where it is none.
pub(crate) fn terminal() -> Option<u16> {
    // One that was told no size is as none.
    comfy_table::Table::new().width().filter(|width| *width > 0)
}

/// An empty table with these headings.
pub(crate) fn empty(headings: &[&str]) -> comfy_table::Table {
    let mut table = comfy_table::Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(headings);
    table
}

fn widest(text: &str) -> usize {
    text.lines().map(|line| line.chars().count()).max().unwrap_or(0)
}

/// The table, at most `width` wide: columns in `optional` are left out in that order until it fits, and named below;
/// what is still too wide is wrapped.
pub(crate) fn fitted(mut table: comfy_table::Table, width: Option<u16>, optional: &[usize]) -> String {
    let mut text = table.to_string();
    let Some(width) = width else { return text };
    let headings: Vec<String> = table
        .header()
        .into_iter()
        .flat_map(|row| row.cell_iter())
        .map(|cell| cell.content().replace('\n', " "))
        .collect();
    let mut left_out = Vec::new();
    for &number in optional {
        if widest(&text) <= usize::from(width) {
            break;
        }
        let Some(column) = table.column_mut(number) else { continue };
        if column.constraint() != Some(&ColumnConstraint::Hidden) {
            column.set_constraint(ColumnConstraint::Hidden);
            left_out.push(headings.get(number).map_or("", String::as_str));
            text = table.to_string();
        }
    }
    if widest(&text) > usize::from(width) {
        table.set_content_arrangement(ContentArrangement::Dynamic);
        table.set_width(width);
        text = table.to_string();
    }
    if !left_out.is_empty() {
        text += "\n";
        text += &wrapped(&format!("left out, for the width of the terminal: {}", left_out.join(", ")), Some(width));
    }
    text
}

/// Prose in lines of at most `width`; longer words stand by themselves.
pub(crate) fn wrapped(text: &str, width: Option<u16>) -> String {
    let width = usize::from(width.unwrap_or(PROSE));
    let mut lines = Vec::new();
    for paragraph in text.lines() {
        let (mut line, mut length) = (String::new(), 0);
        for word in paragraph.split_whitespace() {
            let more = word.chars().count();
            if length > 0 && length + 1 + more > width {
                lines.push(std::mem::take(&mut line));
                length = 0;
            }
            if length > 0 {
                line.push(' ');
                length += 1;
            }
            line += word;
            length += more;
        }
        lines.push(line);
    }
    lines.join("\n")
}

/// As wide as the longest word of each column, borders and all.
fn narrowest(words: &[usize]) -> usize {
    words.iter().map(|word| word + 3).sum::<usize>() + 1
}

/// A table of the report with its title and text. Cells are wrapped at words; where not even these fit, columns in
/// `optional` are left out in that order.
pub(super) fn shown(table: &Table, width: Option<u16>, optional: &[usize]) -> String {
    let headings: Vec<&str> = table.headings.iter().map(String::as_str).collect();
    let mut out = empty(&headings);
    let numeric: Vec<bool> = (0..headings.len()).map(|column| table.is_numeric(column)).collect();
    for row in &table.rows {
        out.add_row(row.iter().zip(&numeric).map(|(text, numeric)| cell(text, *numeric)));
    }
    let long = table.rows.iter().flatten().any(|text| text.len() > usize::from(PROSE) / 2);
    let most = width.unwrap_or(if long { SENTENCES } else { PROSE });
    let width = Some(most);
    let title = wrapped(&table.title, width);
    let mut text = wrapped(&table.text, Some(most.min(PROSE)));
    if !text.is_empty() {
        text += "\n";
    }
    let most = usize::from(most);
    let longest = |column: usize| {
        let texts = table.rows.iter().filter_map(|row| row.get(column)).chain(table.headings.get(column));
        texts.flat_map(|text| text.split_whitespace()).map(|word| word.chars().count()).max().unwrap_or(0)
    };
    let mut columns: Vec<(usize, usize)> = (0..headings.len()).map(|column| (column, longest(column))).collect();
    let needed = |columns: &[(usize, usize)]| narrowest(&columns.iter().map(|column| column.1).collect::<Vec<_>>());
    let mut left_out = Vec::new();
    for &column in optional {
        if needed(&columns) > most {
            columns.retain(|(kept, _)| *kept != column);
            out.column_mut(column).map(|column| column.set_constraint(ColumnConstraint::Hidden));
            left_out.push(headings[column]);
        }
    }
    if needed(&columns) <= most {
        for (column, longest) in columns {
            let least = Width::Fixed(u16::try_from(longest + 2).unwrap_or(u16::MAX));
            out.column_mut(column).map(|column| column.set_constraint(ColumnConstraint::LowerBoundary(least)));
        }
    }
    if !left_out.is_empty() {
        text += &wrapped(&format!("left out, for the width of the terminal: {}", left_out.join("; ")), width);
        text += "\n";
    }
    format!("{title}\n{}\n{text}", fitted(out, width, &[]))
}

/// A cell of a column of numbers, or of words.
pub(super) fn cell(text: &str, number: bool) -> Cell {
    Cell::new(text).set_alignment(if number { CellAlignment::Right } else { CellAlignment::Left })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> comfy_table::Table {
        let mut table = empty(&["name", "needed\nMiB", "extra\nMiB"]);
        table.add_row(["one", "123456", "654321"]);
        table
    }

    #[test]
    fn what_is_too_wide_loses_columns_and_says_which() {
        let whole = fitted(table(), None, &[2]);
        assert_eq!(widest(&whole), 26, "{whole}");
        assert_eq!(fitted(table(), Some(26), &[2]), whole);
        let narrow = fitted(table(), Some(25), &[2]);
        assert!(!narrow.contains("654321") && narrow.contains("123456"), "{narrow}");
        assert!(narrow.replace('\n', " ").contains("extra MiB") && widest(&narrow) <= 25, "{narrow}");
        let wrapped = fitted(table(), Some(20), &[]);
        assert!(widest(&wrapped) <= 20, "{wrapped}");
    }

    #[test]
    fn words_stay_whole_as_long_as_they_fit() {
        let mut table = Table::new("t", "", &["allocator", "a long heading", "another heading"]);
        table.row(["torch-expandable", "1", "2"].map(str::to_owned));
        let text = shown(&table, Some(41), &[2]);
        assert!(widest(&text) <= 41 && text.contains("torch-expandable") && text.contains("another"), "{text}");
        let text = shown(&table, Some(38), &[2]);
        assert!(widest(&text) <= 38 && text.contains("torch-expandable"), "{text}");
        assert!(text.contains("terminal: another heading"), "{text}");
        assert!(widest(&shown(&table, Some(20), &[])) <= 20);
    }

    #[test]
    fn prose_is_wrapped_at_words() {
        assert_eq!(wrapped("one two  three\nfour", Some(8)), "one two\nthree\nfour");
        assert_eq!(wrapped("µµµµ µµµµ", Some(9)), "µµµµ µµµµ");
        assert_eq!(wrapped("unbreakable it is", Some(4)), "unbreakable\nit\nis");
    }
}
