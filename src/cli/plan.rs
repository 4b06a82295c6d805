//! `xseg plan`.
#![forbid(unsafe_code)]

use super::args::PlanArgs;
use super::{Failure, files};
use crate::plan::ahead::{PLANNED_ABOVE, Plan, PlanSummary};
use crate::trace::{Action, Trace};
use crate::units::{counted, human};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

/// Runs `xseg plan`; the exit status.
pub(super) fn plan(args: &PlanArgs, out: &mut dyn Write) -> Result<u8, Failure> {
    let trace = Trace::load_device(&args.trace, args.device)
        .map_err(|error| Failure::Usage(files::unreadable(&args.trace, &error)))?;
    let recorded = trace.large_blocks(args.apart);
    let (plan, found) = Plan::of(&recorded).map_err(|error| Failure::Usage(format!("{}: {error}", trace.name)))?;
    if let Some(path) = &args.out {
        write(&plan, path).map_err(|error| {
            Failure::Usage(format!("cannot write the plan to {}: {error}; choose another place", path.display()))
        })?;
    }
    if args.json {
        writeln!(out, "{}", json(&trace, &found, args.out.as_deref()))?;
    } else {
        tell(&trace, &found, out)?;
        if let Some(path) = &args.out {
            writeln!(out, "written to {}: follow it by XSEG_CONF=plan:{}", path.display(), path.display())?;
        } else {
            writeln!(out, "not written: name a file by -o")?;
        }
    }
    Ok(0)
}

fn write(plan: &Plan, path: &Path) -> std::io::Result<()> {
    let mut file = BufWriter::new(File::create(path)?);
    plan.write(&mut file)?;
    file.into_inner().map_err(std::io::IntoInnerError::into_error)?.sync_all()
}

fn tell(trace: &Trace, found: &PlanSummary, out: &mut dyn Write) -> std::io::Result<()> {
    let blocks = counted(u64::from(found.blocks), "block");
    writeln!(out, "{}: {} with {blocks} of more than 1 MiB", trace.name, counted(trace.events.len() as u64, "event"))?;
    match found.rounds {
        0 => writeln!(
            out,
            "no step repeats, so the whole run is planned: for a run that asks for the same again, as far as it does"
        )?,
        rounds => {
            let (period, covered) = events(trace, found);
            let covered = 100.0 * covered as f64 / trace.events.len().max(1) as f64;
            let blocks = counted(u64::from(found.period), "block");
            writeln!(
                out,
                "a step of {period} events with {blocks} repeats: {rounds} rounds, {covered:.1} % of all events"
            )?;
            let before = counted(u64::from(found.before), "block");
            writeln!(out, "before it {before}, of which {} live when it begins", human(found.live_before))?;
        }
    }
    // What was left out of the trace is not planned.
    if !trace.notes.is_empty() {
        writeln!(out, "of the trace: {}", trace.notes.join("; "))?;
    }
    let above = 100.0 * (found.top as f64 / found.peak.max(1) as f64 - 1.0);
    writeln!(out, "planned: most live at once {}, addresses {}, {above:.2} % more", human(found.peak), human(found.top))
}

/// Events of one round of the step, and of all of them.
fn events(trace: &Trace, found: &PlanSummary) -> (usize, usize) {
    let births = trace.events.iter().enumerate().filter(|(_, event)| event.action == Action::Alloc);
    let large = births.filter(|(_, event)| trace.blocks[event.block as usize].bytes > PLANNED_ABOVE);
    let births: Vec<usize> = large.map(|(number, _)| number).collect();
    let at = |block: u32| births.get(block as usize).copied().unwrap_or(trace.events.len());
    let (first, second, last) = (found.before, found.before + found.period, found.before + found.covered);
    (at(second) - at(first), at(last) - at(first))
}

fn json(trace: &Trace, found: &PlanSummary, file: Option<&Path>) -> serde_json::Value {
    let (period_events, covered_events) = events(trace, found);
    serde_json::json!({
        "trace": trace.name, "events": trace.events.len(), "blocks": found.blocks, "rounds": found.rounds,
        "period": found.period, "period_events": period_events, "covered": found.covered,
        "covered_events": covered_events, "before": found.before, "live_before": found.live_before, "peak": found.peak,
        "top": found.top, "notes": trace.notes, "file": file.map(|file| file.display().to_string()),
    })
}
