//! The device suite: measures and checks on a real GPU, and writes a report.
//!
//! Each section is a file of `src/device_suite`; see [`device_suite::SECTIONS`].

#[path = "../device_suite/mod.rs"]
mod device_suite;

use clap::Parser;
use device_suite::{Peers, Report, SECTIONS, Suite, report, scenarios, share};
use std::path::PathBuf;
use std::process::ExitCode;
use xseg::peers::Limits;

/// Measures and checks xseg on a real GPU and writes a report in Markdown and JSON.
#[derive(Debug, Parser)]
#[command(version, after_help = sections())]
struct Arguments {
    /// Index of the device.
    #[arg(long, default_value_t = 0)]
    device: u32,
    /// Folder for the report (FILE.md and FILE.json; FILE holds the date and the GPU).
    #[arg(long, default_value = "benches/results")]
    out: PathBuf,
    /// Commit that was built, for the report.
    #[arg(long, default_value = "unknown")]
    commit: String,
    /// Only these sections, in their own order.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Not these sections.
    #[arg(long, value_delimiter = ',')]
    skip: Vec<String>,
    /// Less memory and fewer rounds: to see that everything works, not to measure.
    #[arg(long)]
    quick: bool,
    /// GiB that the growth section grows to (at most 80 % of what is free).
    #[arg(long, default_value_t = 64)]
    growth: u64,
    /// Only these traces in the sections that replay them.
    #[arg(long, value_delimiter = ',')]
    traces: Vec<String>,
    /// First word of the report's name.
    #[arg(long, value_name = "NAME", default_value = "device")]
    report: String,
    /// The program of other allocators, for the sections pairs and peers (benches/peers/run.sh builds it).
    #[arg(long, value_name = "PROGRAM")]
    peers: Option<PathBuf>,
    /// Only these other allocators.
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    allocators: Vec<String>,
    /// Seconds after which no replay of the section peers is started, for each allocator.
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0)]
    seconds: f64,
    /// No search for the least memory in the section peers.
    #[arg(long)]
    no_least: bool,
    /// Run as a process of the sections scenarios and share, which start this program again.
    #[arg(long, hide = true)]
    child: Option<String>,
}

fn sections() -> String {
    let lines = SECTIONS.iter().map(|section| format!("  {:<12} {}", section.name, section.what));
    format!("Sections:\n{}", lines.collect::<Vec<_>>().join("\n"))
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let known = |name: &String| SECTIONS.iter().any(|section| section.name == name);
    if let Some(name) = arguments.only.iter().chain(&arguments.skip).find(|name| !known(name)) {
        eprintln!("xseg-device: there is no section {name}; {}", sections());
        return ExitCode::from(2);
    }
    let done = match arguments.child.as_deref() {
        Some(share::KIND) => share::child(arguments.device).map(|()| true).map_err(Into::into),
        Some(kind) => scenarios::process::child(arguments.device, kind).map(|()| true).map_err(Into::into),
        None => run(&arguments),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("xseg-device: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the sections; says whether all checks passed. The report is written after each section, so
/// that a run which is cut short leaves what it had.
fn run(arguments: &Arguments) -> Result<bool, Box<dyn std::error::Error>> {
    let limits = Limits { least: !arguments.no_least, seconds: arguments.seconds, ..Limits::default() };
    let peers = Peers { program: arguments.peers.clone(), allocators: arguments.allocators.clone(), limits };
    let mut suite = Suite::open(arguments.device, arguments.quick, arguments.growth, arguments.traces.clone())?;
    suite.peers = peers;
    let mut report = Report::new(&suite, &arguments.report, &arguments.commit);
    let chosen = SECTIONS.iter().filter(|section| {
        let listed = |names: &[String]| names.iter().any(|name| name == section.name);
        (arguments.only.is_empty() || listed(&arguments.only)) && !listed(&arguments.skip)
    });
    for section in chosen {
        eprintln!("xseg-device: {} ({})", section.name, section.what);
        let start = std::time::Instant::now();
        let mut done = (section.run)(&suite).unwrap_or_else(|error| {
            let mut failed = report::Section::default();
            failed.check("the section ran", error.to_string(), false);
            failed
        });
        done.name = section.name.into();
        done.what = section.what.into();
        done.seconds = start.elapsed().as_secs_f64();
        for check in done.checks.iter().filter(|check| !check.passed) {
            eprintln!("xseg-device: FAILED: {}: {}", check.what, check.found);
        }
        report.sections.push(done);
        report.write(&arguments.out)?;
    }
    println!("{}", report.markdown());
    eprintln!("xseg-device: written to {}", report.path(&arguments.out, "md").display());
    Ok(report.passed())
}
