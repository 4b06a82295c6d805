//! The report: text, tables and checks, as Markdown and as JSON.

use super::Suite;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};
use xseg::backend::Backend;
use xseg::peers::Line;

/// All of a run.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// First word of the files' names.
    #[serde(skip)]
    name: String,
    date: String,
    gpu: String,
    driver: String,
    cuda: String,
    commit: String,
    command: String,
    free_bytes: u64,
    total_bytes: u64,
    notes: Vec<String>,
    /// What the sections found.
    pub(crate) sections: Vec<Section>,
}

/// What one section found.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Section {
    /// Name on the command line.
    pub(crate) name: String,
    /// A line for people.
    pub(crate) what: String,
    /// How long it took.
    pub(crate) seconds: f64,
    /// Paragraphs before the tables.
    pub(crate) text: Vec<String>,
    /// The tables.
    pub(crate) tables: Vec<Table>,
    /// What must hold.
    pub(crate) checks: Vec<Check>,
    /// Figures of other allocators, and of xseg beside them, as they were told.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) lines: Vec<Line>,
}

/// A table of numbers and texts.
#[derive(Debug, Serialize)]
pub(crate) struct Table {
    columns: Vec<String>,
    rows: Vec<Vec<Cell>>,
}

/// One entry of a table.
#[derive(Debug, Clone, Serialize)]
#[serde(untagged)]
pub(crate) enum Cell {
    /// A number; printed with three digits or so.
    Number(f64),
    /// A text.
    Text(String),
}

/// Something that must hold.
#[derive(Debug, Serialize)]
pub(crate) struct Check {
    /// What.
    pub(crate) what: String,
    /// What was found.
    pub(crate) found: String,
    /// Does it hold?
    pub(crate) passed: bool,
}

impl From<f64> for Cell {
    fn from(number: f64) -> Self {
        Self::Number(number)
    }
}

impl From<u64> for Cell {
    fn from(number: u64) -> Self {
        Self::Number(number as f64)
    }
}

impl From<&str> for Cell {
    fn from(text: &str) -> Self {
        Self::Text(text.into())
    }
}

impl Cell {
    fn text(&self) -> String {
        match self {
            Self::Text(text) => text.clone(),
            Self::Number(number) if number.abs() >= 100.0 || number.fract() == 0.0 => format!("{number:.0}"),
            Self::Number(number) if number.abs() >= 10.0 => format!("{number:.1}"),
            Self::Number(number) => format!("{number:.3}"),
        }
    }
}

impl Table {
    /// A table without rows.
    pub(crate) fn new(columns: &[&str]) -> Self {
        Self { columns: columns.iter().map(|column| (*column).into()).collect(), rows: Vec::new() }
    }

    /// Adds a row.
    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = Cell>) {
        self.rows.push(cells.into_iter().collect());
    }

    fn markdown(&self) -> String {
        let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
        let mut text = line(self.columns.clone()) + &line(vec!["---".into(); self.columns.len()]);
        for row in &self.rows {
            text += &line(row.iter().map(Cell::text).collect());
        }
        text
    }
}

impl Section {
    /// Notes whether something holds.
    pub(crate) fn check(&mut self, what: &str, found: impl ToString, passed: bool) {
        self.checks.push(Check { what: what.into(), found: found.to_string(), passed });
    }
}

impl Report {
    /// An empty report about the suite's device.
    pub(crate) fn new(suite: &Suite, name: &str, commit: &str) -> Self {
        let memory = suite.backend.memory().ok();
        let found = suite.backend.capabilities();
        let (major, minor) = suite.driver.version;
        Self {
            name: name.into(),
            date: now(),
            gpu: found.device.clone(),
            driver: kernel_driver(),
            cuda: format!("{major}.{minor}"),
            commit: commit.into(),
            command: std::env::args().collect::<Vec<_>>().join(" "),
            free_bytes: memory.map_or(0, |memory| memory.free),
            total_bytes: memory.map_or(0, |memory| memory.total),
            notes: found.notes.clone(),
            sections: Vec::new(),
        }
    }

    /// Did all checks pass?
    pub(crate) fn passed(&self) -> bool {
        self.sections.iter().flat_map(|section| &section.checks).all(|check| check.passed)
    }

    /// The report for people.
    pub(crate) fn markdown(&self) -> String {
        let gib = |bytes: u64| bytes as f64 / f64::from(1u32 << 30);
        let mut text = format!(
            "# Device suite: {}\n\n{}, driver {}, CUDA {}, {:.1} of {:.1} GiB free. Commit {}. `{}`\n",
            self.gpu,
            self.date,
            self.driver,
            self.cuda,
            gib(self.free_bytes),
            gib(self.total_bytes),
            self.commit,
            self.command
        );
        for note in &self.notes {
            text += &format!("\nNote: {note}.\n");
        }
        for section in &self.sections {
            text += &format!("\n## {}: {}\n", section.name, section.what);
            for paragraph in &section.text {
                text += &format!("\n{paragraph}\n");
            }
            for table in &section.tables {
                text += &format!("\n{}", table.markdown());
            }
            if !section.checks.is_empty() {
                let mut checks = Table::new(&["check", "found", ""]);
                for check in &section.checks {
                    let mark = if check.passed { "ok" } else { "**failed**" };
                    checks.row([check.what.as_str().into(), check.found.as_str().into(), mark.into()]);
                }
                text += &format!("\n{}", checks.markdown());
            }
            text += &format!("\n({:.1} s)\n", section.seconds);
        }
        text
    }

    /// Where [`Report::write`] writes.
    pub(crate) fn path(&self, folder: &Path, ending: &str) -> PathBuf {
        let plain = |text: &str| text.replace(|letter: char| !letter.is_ascii_alphanumeric(), "-").to_lowercase();
        folder.join(format!("{}-{}-{}.{ending}", plain(&self.name), plain(&self.date[..16]), plain(&self.gpu)))
    }

    /// Writes both forms, over those of the same run.
    ///
    /// # Errors
    /// When the folder or the files cannot be written.
    pub(crate) fn write(&self, folder: &Path) -> std::io::Result<()> {
        std::fs::create_dir_all(folder)?;
        std::fs::write(self.path(folder, "md"), self.markdown())?;
        std::fs::write(self.path(folder, "json"), serde_json::to_string_pretty(self)? + "\n")
    }
}

/// Version of the kernel module, as `nvidia-smi` shows it.
fn kernel_driver() -> String {
    let version = std::fs::read_to_string("/sys/module/nvidia/version");
    version.map_or_else(|_| "unknown".into(), |text| text.trim().into())
}

/// The present time as `2026-01-31 12:00:00 UTC`.
fn now() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let (year, month, day) = date(seconds / 86_400);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{year}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC")
}

/// Year, month and day of a day counted from 1970-01-01.
fn date(days: u64) -> (u64, u64, u64) {
    let leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let (mut year, mut left) = (1970, days);
    while left >= 365 + u64::from(leap(year)) {
        left -= 365 + u64::from(leap(year));
        year += 1;
    }
    let lengths = [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 1;
    for length in lengths {
        if left < length {
            break;
        }
        left -= length;
        month += 1;
    }
    (year, month, left + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        assert_eq!(date(0), (1970, 1, 1));
        assert_eq!(date(59), (1970, 3, 1));
        assert_eq!(date(11_016), (2000, 2, 29));
        assert_eq!(date(20_818), (2026, 12, 31));
        assert_eq!(date(20_819), (2027, 1, 1));
    }

    #[test]
    fn tables_and_numbers() {
        let mut table = Table::new(&["MiB", "µs"]);
        table.row([2u64.into(), 0.12345.into()]);
        table.row(["all".into(), 1234.5.into()]);
        assert_eq!(table.markdown(), "| MiB | µs |\n| --- | --- |\n| 2 | 0.123 |\n| all | 1234 |\n");
        let cells = [Cell::from(12.34), Cell::from(12.0)].map(|cell| cell.text());
        assert_eq!(cells, ["12.3", "12"]);
    }
}
