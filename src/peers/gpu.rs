//! xseg on a GPU, with all memory, with little, and in the least.

use super::lines::{Line, Replay, Run, Skipped};
use super::own::{How, about, replay, search};
use super::{Limits, OWN};
use crate::Config;
use crate::backend::cuda::{Ballast, CudaBackend, StreamSet};
use crate::backend::{Backend, StreamId};
use crate::config::SizeOrShare;
use crate::error::Error;
use crate::heap::Heap;
use crate::trace::Trace;
use crate::units::{GRANULE, round_down};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Replays every trace on a GPU with all memory, with little, and for the least, as `limits` says; the shortest first.
/// `conf` is over the default settings. Blocks until done; no other work should run on the device.
///
/// # Errors
/// When the driver refuses a call.
pub fn replays(
    device: &Arc<CudaBackend>,
    traces: &[&Trace],
    config: &Config,
    limits: &Limits,
) -> Result<Vec<Line>, Error> {
    let start = Instant::now();
    let in_time = || start.elapsed().as_secs_f64() < limits.seconds;
    let most = Duration::from_secs_f64(limits.seconds_a_run);
    let mut traces = traces.to_vec();
    traces.sort_by_key(|trace| trace.events.len());
    let mut set = StreamSet::new(device.clone());
    let run = |trace: &Trace, set: &mut StreamSet, limit: Option<u64>, how: How| -> Result<Replay, Error> {
        let streams: Result<Vec<StreamId>, _> = trace.streams.iter().map(|stream| set.get(*stream)).collect();
        let free = device.memory()?.free;
        let mut config = config.clone();
        if let Some(limit) = limit {
            config.limit = Some(SizeOrShare::Bytes(round_down(limit, GRANULE)));
        }
        let heap = Heap::builder().config(config).backend(device.clone()).build()?;
        replay(trace, &heap, &streams?, free, how)
    };
    let skipped = |trace: &Trace, run| {
        Line::Skipped(Skipped { allocator: OWN.into(), trace: trace.name.clone(), run, why: "out of time".into() })
    };
    let mut lines = vec![about(&config.to_string())];
    let mut reserved = vec![0; traces.len()];
    for (trace, reserved) in traces.iter().zip(&mut reserved) {
        if !in_time() {
            lines.push(skipped(trace, Run::Plenty));
            continue;
        }
        let done = run(trace, &mut set, None, How { run: Run::Plenty, end_at_oom: false, most })?;
        *reserved = if done.completed { done.peak_reserved_bytes } else { 0 };
        lines.push(Line::Replay(done));
    }
    for trace in &traces {
        if !in_time() {
            lines.push(skipped(trace, Run::Limited));
            continue;
        }
        let mut ballast = Ballast::new(device.clone());
        ballast.leave(limits.left(trace.peak_requested()))?;
        // The rest is for the driver's page tables, as it is for others.
        let limit = limits.left(trace.peak_requested()) - limits.extra;
        lines.push(Line::Replay(run(
            trace,
            &mut set,
            Some(limit),
            How { run: Run::Limited, end_at_oom: false, most },
        )?));
    }
    for (trace, reserved) in traces.iter().zip(reserved).filter(|_| limits.least) {
        if !in_time() || reserved == 0 {
            lines.push(skipped(trace, Run::Least));
            continue;
        }
        let mut ballast = Ballast::new(device.clone());
        let least = search(trace, reserved, in_time, |left| {
            let left = ballast.leave(left)?;
            let done = run(trace, &mut set, Some(left), How { run: Run::Least, end_at_oom: true, most })?;
            Ok::<_, Error>((left, done))
        })?;
        lines.push(Line::Least(least));
    }
    Ok(lines)
}
