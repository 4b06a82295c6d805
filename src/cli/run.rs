//! `xseg replay` and `xseg least`.
#![forbid(unsafe_code)]

use super::args::{self, RunArgs};
use super::progress::Progress;
use super::{Failure, complain, files, tables};
use crate::backend::BackendKind;
use crate::config::{BackendChoice, Config, Peers};
use crate::replay::{Options, Outcome, Report, least};
use crate::subjects::{self, Request, subject_for};
use crate::trace::Trace;
use crate::units::GRANULE;
use std::io::Write;

/// Exit status: a replay did not complete or found a mismatch.
const BAD_RUN: u8 = 1;
/// Exit status: an input could not be read or used.
const BAD_INPUT: u8 = 2;

/// Runs `xseg replay`; the exit status.
pub(super) fn replay(args: &RunArgs, out: &mut dyn Write) -> Result<u8, Failure> {
    let mut session = Session::new(args)?;
    session.each(out, |session, trace, allocator| {
        let limit = session.args.limit.map(|limit| limit.bytes(trace.peak_requested()));
        session.report(trace, allocator, limit)
    })?;
    session.finish(out, tables::replays)
}

/// `xseg least` tells driver time at this share above the least limit, too: at the least one itself it is a matter of luck.
const ABOVE: u64 = 500;

/// Runs `xseg least`; the exit status.
pub(super) fn least(args: &RunArgs, out: &mut dyn Write) -> Result<u8, Failure> {
    if args.limit.is_some() {
        return Err(Failure::Usage("`least` searches the limit itself; leave --limit out".into()));
    }
    let mut session = Session::new(args)?;
    session.each(out, |session, trace, allocator| {
        let peak = trace.peak_requested();
        let mut failed = Vec::new();
        // No heap has less than a granule.
        let from = peak.max(GRANULE);
        let found = least::search(from, |limit| {
            let factor = limit as f64 / peak as f64;
            session.progress.spin(format!("{} with {allocator}: trying {factor:.4} times peak requested", trace.name));
            let Run { outcome, .. } = session.run(trace, allocator, Some(limit), false)?;
            if !outcome.completed() {
                failed.push((limit, outcome.locked));
            }
            Ok::<_, String>(outcome.completed())
        })?;
        let mut report = session.report(trace, allocator, Some(found.unwrap_or(4 * from)))?;
        let below = |limit: u64| found.is_none_or(|found| limit < found);
        let mut above = None;
        if let Some(least) = found {
            let Run { outcome, .. } = session.run(trace, allocator, Some(least + least / ABOVE), false)?;
            above = outcome.completed().then_some(outcome.figures.driver_nanos as f64 / 1e6);
        }
        report.set_least(found, failed.into_iter().filter(|one| below(one.0)).max_by_key(|one| one.0), above);
        Ok(report)
    })?;
    session.finish(out, tables::leasts)
}

/// One run with what it ran on.
struct Run {
    outcome: Outcome,
    backend: BackendKind,
    limit: Option<u64>,
    config: Config,
}

struct Session<'a> {
    args: &'a RunArgs,
    config: Config,
    allocators: Vec<&'a str>,
    progress: Progress,
    reports: Vec<Report>,
    status: u8,
}

impl<'a> Session<'a> {
    fn new(args: &'a RunArgs) -> Result<Self, Failure> {
        let mut config = args::layered(args.conf.as_deref()).map_err(Failure::Usage)?;
        if let Some(backend) = &args.backend {
            config.backend = args::backend(backend).map_err(Failure::Usage)?;
        }
        let names = subjects::names();
        let allocators = match args.allocator.as_str() {
            "all" => names,
            one if names.contains(&one) => vec![one],
            other => {
                let known = names.join(", ");
                return Err(Failure::Usage(format!(
                    "there is no allocator `{other}`; the allocators are {known}, all"
                )));
            }
        };
        if let Some(model) = allocators.iter().find(|name| **name != "xseg") {
            if args.verify || args.inject.is_some() {
                return Err(Failure::Usage(format!(
                    "--verify and --inject are for xseg; `{model}` is a model, which has no memory; give --allocator xseg"
                )));
            }
            if allocators.len() == 1 && !matches!(config.backend, BackendChoice::Auto | BackendChoice::Sim) {
                return Err(Failure::Usage(format!(
                    "`{model}` is a model of another design and runs on sim only, whatever the hardware; give --backend sim"
                )));
            }
        }
        Ok(Self { args, config, allocators, progress: Progress::new(), reports: Vec::new(), status: 0 })
    }

    /// Calls `one` for every trace and allocator. What is wrong with one trace does not stop the others.
    fn each(
        &mut self,
        out: &mut dyn Write,
        mut one: impl FnMut(&Self, &Trace, &str) -> Result<Report, String>,
    ) -> Result<(), Failure> {
        let (files, wrong) = files::expand(&self.args.traces);
        wrong.iter().for_each(|why| self.complain(why, BAD_INPUT));
        for file in &files {
            self.progress.spin(format!("reading {}", file.display()));
            let trace = match Trace::load_device(file, self.args.device) {
                Ok(trace) => trace,
                Err(error) => {
                    self.complain(&files::unreadable(file, &error), BAD_INPUT);
                    continue;
                }
            };
            for allocator in self.allocators.clone() {
                match one(self, &trace, allocator) {
                    Ok(report) => self.add(report, out)?,
                    Err(why) => self.complain(&format!("{}: {why}", trace.name), BAD_INPUT),
                }
            }
        }
        Ok(())
    }

    fn run(&self, trace: &Trace, allocator: &str, limit: Option<u64>, show: bool) -> Result<Run, String> {
        let mut config = args::with_limit(&self.config, limit)?;
        if allocator != "xseg" && config.backend != BackendChoice::Auto {
            // Beside an xseg that runs elsewhere; `backend` of the result says it too.
            config.backend = BackendChoice::Sim;
            config.peers = Peers::None;
        }
        let request = Request {
            allocator,
            config: config.clone(),
            lag: self.args.gpu_lag,
            verify: self.args.verify,
            fault: self.args.inject,
            watch: false,
            one_stream: trace.streams.len() == 1,
        };
        let mut opened = subject_for(&request)?;
        if show {
            self.progress.bar(format!("{} with {allocator}", trace.name), trace.events.len() as u64);
        }
        let mut step = |at: usize| self.progress.at(at as u64);
        let progress: Option<&mut dyn FnMut(usize)> = if show { Some(&mut step) } else { None };
        let mut options = Options { clock: opened.clock, device: opened.device, progress };
        let outcome = crate::replay::replay(trace, &mut *opened.subject, &mut options);
        Ok(Run { outcome, backend: opened.backend, limit: opened.limit, config })
    }

    fn report(&self, trace: &Trace, allocator: &str, limit: Option<u64>) -> Result<Report, String> {
        let Run { outcome, backend, limit, config } = self.run(trace, allocator, limit, true)?;
        let report = Report::new(trace, allocator, backend.name(), config.to_string(), limit, &outcome);
        for example in outcome.findings.iter().flat_map(|findings| &findings.examples) {
            self.progress.aside(|| complain(&format!("{}: mismatch: {example}", trace.name)));
        }
        Ok(report)
    }

    fn add(&mut self, report: Report, out: &mut dyn Write) -> Result<(), Failure> {
        if let Some(error) = &report.error {
            self.complain(&format!("{} with {}: {error}", report.trace, report.allocator), BAD_RUN);
        }
        if !report.is_good() {
            self.status = self.status.max(BAD_RUN);
        }
        if self.args.json {
            let line = serde_json::to_string(&report).map_err(std::io::Error::from)?;
            self.progress.aside(|| writeln!(out, "{line}").and_then(|()| out.flush()))?;
        }
        self.reports.push(report);
        Ok(())
    }

    fn complain(&mut self, why: &str, status: u8) {
        self.progress.aside(|| complain(why));
        self.status = self.status.max(status);
    }

    fn finish(self, out: &mut dyn Write, table: impl FnOnce(&[Report]) -> String) -> Result<u8, Failure> {
        let Self { args, reports, status, progress, .. } = self;
        drop(progress);
        if !args.json && !reports.is_empty() {
            writeln!(out, "{}", table(&reports))?;
        }
        Ok(status)
    }
}
