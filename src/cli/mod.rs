//! The `xseg` command.
//!
//! Exit status: 0 when all is well, 1 when a replay ran out of memory, failed or found a mismatch, 2 for
//! bad usage or input. Results go to stdout, everything else to stderr.
#![forbid(unsafe_code)]

mod args;
mod bench;
mod files;
mod plan;
mod progress;
mod run;
mod show;
mod tables;

use args::{ConfArgs, InfoArgs, PlanArgs, RunArgs};
use clap::{Parser, Subcommand};
use std::ffi::OsString;
use std::io::{self, Write};
use std::process::ExitCode;

/// A GPU memory allocator that defragments by remapping: replay traces through it, compare, look up settings.
#[derive(Debug, Parser)]
#[command(
    name = "xseg",
    version,
    arg_required_else_help = true,
    after_help = "Example: xseg replay traces --backend sim --limit 1.02x\n\nSettings come from the command line, \
                  then --conf, then XSEG_CONF, then the defaults (see `xseg conf`)."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Replay allocation traces through an allocator and report memory, moves and driver time.
    #[command(after_help = format!("{}\n\n{}", args::REPLAY_EXAMPLES, args::INPUTS))]
    Replay(RunArgs),
    /// Find the least memory limit at which a trace completes.
    // Its own limits are what it searches; the option is known so that its refusal says so.
    #[command(after_help = format!("{}\n\n{}", args::LEAST_EXAMPLES, args::INPUTS), mut_arg("limit", |limit| limit.hide(true)))]
    Least(RunArgs),
    /// Run the defragmentation suite: every allocator on every workload, with a page of HTML.
    #[command(after_help = format!("{}\n\n{}", bench::EXAMPLES, args::INPUTS))]
    Bench(bench::BenchArgs),
    /// Choose ahead where each large block of a recorded run is to lie, for `plan:FILE` in XSEG_CONF.
    #[command(after_help = format!("{}\n\n{}", args::PLAN_EXAMPLES, args::INPUTS))]
    Plan(PlanArgs),
    /// Show every key of XSEG_CONF with its meaning, default and present value.
    #[command(after_help = "Example: XSEG_CONF=limit:40G xseg conf")]
    Conf(ConfArgs),
    /// Show which backends work here, their device, memory and capabilities.
    #[command(after_help = "Examples: xseg info --json, xseg info --conf limit:40G,handles:small")]
    Info(InfoArgs),
}

/// Why a command ends early.
#[derive(Debug)]
enum Failure {
    /// Bad usage or input; the sentence says what to do.
    Usage(String),
    /// Whoever read the output went away.
    Closed,
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::Closed,
            _ => Self::Usage(format!("cannot write the result: {error}; check where stdout goes")),
        }
    }
}

impl From<crate::Error> for Failure {
    fn from(error: crate::Error) -> Self {
        Self::Usage(error.to_string())
    }
}

/// Runs the command that the process's arguments name. For `main`; exits by itself on `--help`.
#[must_use]
pub fn main() -> ExitCode {
    run_command(&Cli::parse().command).into()
}

/// As [`main`], with the words after the program's name given, and the exit status returned. For other programs that carry
/// the command; any thread.
#[must_use]
pub fn main_with(words: impl IntoIterator<Item = OsString>) -> u8 {
    match Cli::try_parse_from(std::iter::once(OsString::from("xseg")).chain(words)) {
        Ok(cli) => run_command(&cli.command),
        Err(asked) => {
            // That nobody reads it is no failure.
            let _ = asked.print();
            u8::try_from(asked.exit_code()).unwrap_or(2)
        }
    }
}

/// Runs `xseg bench` with the process's arguments. For the bench target `defrag`, to which cargo gives
/// `--bench` where benches are run. Where they are only tested it gives nothing: then a small part is run, whose
/// files go to `folder`.
#[must_use]
pub fn bench_main(folder: &str) -> ExitCode {
    let (mark, mut own): (Vec<String>, Vec<String>) = std::env::args().skip(1).partition(|word| word == "--bench");
    if mark.is_empty() && own.is_empty() {
        let part = ["--quick", "--workload", "s01-two-gaps,s08-vpmm", "--skip", "moving", "--out", folder];
        own = part.map(str::to_owned).to_vec();
    }
    let command = ["xseg", "bench"].map(str::to_owned);
    run_command(&Cli::parse_from(command.into_iter().chain(own)).command).into()
}

fn run_command(command: &Command) -> u8 {
    let mut out = io::stdout().lock();
    let result = match command {
        Command::Replay(args) => run::replay(args, &mut out),
        Command::Least(args) => run::least(args, &mut out),
        Command::Bench(args) => bench::bench(args, &mut out),
        Command::Plan(args) => plan::plan(args, &mut out),
        Command::Conf(args) => show::conf(args, &mut out),
        Command::Info(args) => show::info(args, &mut out),
    };
    match result.and_then(|status| out.flush().map_err(Failure::from).map(|()| status)) {
        Ok(status) => status,
        Err(Failure::Closed) => 0,
        Err(Failure::Usage(why)) => {
            complain(&why);
            2
        }
    }
}

/// A sentence on stderr, in which names of files are somebody else's. That stderr is closed is no reason to stop.
fn complain(why: &str) {
    let _ = writeln!(io::stderr(), "xseg: {}", crate::shown::sentence(why));
}
