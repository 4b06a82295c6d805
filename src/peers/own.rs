//! xseg itself, replayed and timed as the program of other allocators does it.

use super::OWN;
use super::lines::{About, Least, Line, Replay, Run};
use crate::backend::StreamId;
use crate::error::Error;
use crate::heap::Heap;
use crate::trace::{Action, Trace};
use serde_json::{Map, Value};
use std::time::{Duration, Instant};

/// Refused requests after which a run ends, as in the program.
const REFUSED_MAX: u64 = 200;

/// How a replay is run.
#[derive(Debug, Clone, Copy)]
pub struct How {
    /// For the line.
    pub run: Run,
    /// End with the first request that is refused.
    pub end_at_oom: bool,
    /// End after this time.
    pub most: Duration,
}

/// Time of one reading of the clock, in nanoseconds.
#[must_use]
pub fn clock_nanos() -> f64 {
    const READINGS: u32 = 100_000;
    let start = Instant::now();
    for _ in 0..READINGS {
        std::hint::black_box(Instant::now());
    }
    nanos(start.elapsed()) / f64::from(READINGS)
}

/// The first line about xseg.
#[must_use]
pub fn about(conf: &str) -> Line {
    let about =
        format!("xseg {}, {}", env!("CARGO_PKG_VERSION"), if conf.is_empty() { "default settings" } else { conf });
    Line::Program(About { allocator: OWN.to_owned(), about, clock_ns: clock_nanos(), more: Map::new() })
}

fn nanos(time: Duration) -> f64 {
    time.as_secs_f64() * 1e9
}

/// The smallest value that at least this share of all does not exceed, of sorted values.
fn quantile(sorted: &[Duration], share: f64) -> f64 {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.max(1) - 1).map_or(0.0, |time| nanos(*time) / 1e3)
}

/// Replays `trace` through `heap`, each call timed; frees what is left. `streams`: by the trace's index. One thread.
///
/// # Errors
/// Any but a lack of memory, which is counted.
pub fn replay(trace: &Trace, heap: &Heap, streams: &[StreamId], free: u64, how: How) -> Result<Replay, Error> {
    let mut blocks = vec![None; trace.blocks.len()];
    let mut latencies = Vec::with_capacity(trace.blocks.len());
    let (mut live, mut peak, mut ooms, mut first_oom) = (0u64, 0u64, 0u64, None);
    let (mut events_run, mut cut_short, mut calls) = (0u64, false, Duration::ZERO);
    let start = Instant::now();
    for event in &trace.events {
        let block = &trace.blocks[event.block as usize];
        let at = &mut blocks[event.block as usize];
        let before = Instant::now();
        if events_run.is_multiple_of(256) && before - start > how.most {
            cut_short = true;
            break;
        }
        match (event.action, *at) {
            (Action::Alloc, _) => {
                let allocated = heap.alloc_raw(block.bytes, streams[block.stream as usize]);
                let took = before.elapsed();
                calls += took;
                latencies.push(took);
                match allocated {
                    Ok(address) => {
                        *at = Some(address);
                        live += block.bytes;
                        peak = peak.max(live);
                    }
                    Err(Error::OutOfMemory(_) | Error::AddressSpace { .. }) => {
                        ooms += 1;
                        first_oom = first_oom.or(Some(events_run));
                        if how.end_at_oom || ooms >= REFUSED_MAX {
                            cut_short = !how.end_at_oom;
                            break;
                        }
                    }
                    Err(error) => return Err(error),
                }
            }
            (Action::Free, Some(address)) => {
                heap.free_raw(address)?;
                calls += before.elapsed();
                live -= block.bytes;
                *at = None;
            }
            (Action::Use(index), Some(address)) => {
                heap.record_use(address, streams[index as usize])?;
                calls += before.elapsed();
            }
            // Its allocation was refused.
            (_, None) => {}
        }
        events_run += 1;
    }
    let wall = start.elapsed();
    let stats = heap.stats();
    for address in blocks.into_iter().flatten() {
        heap.free_raw(address)?;
    }
    latencies.sort_unstable();
    let counters = [
        ("driver_ms", Value::from(stats.driver_nanos as f64 / 1e6)),
        ("handles_moved", stats.handles_moved.into()),
        ("moved_bytes", stats.bytes_moved.into()),
        ("host_waits", stats.host_waits.into()),
        ("slow_allocs", stats.slow_allocs.into()),
    ];
    Ok(Replay {
        allocator: OWN.to_owned(),
        trace: trace.name.clone(),
        run: how.run,
        events: trace.events.len() as u64,
        events_run,
        completed: ooms == 0 && events_run == trace.events.len() as u64,
        cut_short,
        ooms,
        first_oom_event: first_oom,
        trace_peak_requested_bytes: trace.peak_requested(),
        peak_requested_bytes: peak,
        peak_allocated_bytes: stats.peak_allocated,
        peak_reserved_bytes: stats.peak_reserved,
        left_free_bytes: free,
        wall_ms: nanos(wall) / 1e6,
        calls_ms: nanos(calls) / 1e6,
        alloc_p50_us: quantile(&latencies, 0.5),
        alloc_p99_us: quantile(&latencies, 0.99),
        alloc_max_us: quantile(&latencies, 1.0),
        more: counters.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
    })
}

/// Searches the least memory as the program does: by halving between peak requested and what is surely
/// enough, in steps of 0.05 %. `completes` is given what to leave free; what was free, and the replay.
///
/// # Errors
/// The first of `completes`.
pub fn search<E>(
    trace: &Trace,
    reserved: u64,
    mut in_time: impl FnMut() -> bool,
    mut completes: impl FnMut(u64) -> Result<(u64, Replay), E>,
) -> Result<Least, E> {
    let peak = trace.peak_requested();
    let step = (peak / crate::replay::least::STEPS_PER_PEAK).max(1);
    let mut least = Least {
        allocator: OWN.to_owned(),
        trace: trace.name.clone(),
        trace_peak_requested_bytes: peak,
        least_bytes: None,
        enough_bytes: None,
        step_bytes: step,
        tries: 0,
        calls_ms: 0.0,
        cut_short: true,
    };
    let mut enough = |steps: u64| -> Result<bool, E> {
        least.tries += 1;
        let (left, done) = completes(peak + steps * step)?;
        if done.completed {
            least.enough_bytes = Some(left);
            least.calls_ms = done.calls_ms;
        }
        Ok(done.completed)
    };
    // What was reserved with all memory there, and as much again for what the driver needs itself.
    let (mut low, mut high) = (0, (reserved + (128 << 20)).saturating_sub(reserved.min(peak)) / step + 1);
    let mut ended = enough(high)?;
    for _ in 0..4 {
        if ended || !in_time() {
            break;
        }
        low = high + 1;
        high += crate::replay::least::STEPS_PER_PEAK;
        ended = enough(high)?;
    }
    while ended && low < high && in_time() {
        let middle = u64::midpoint(low, high);
        if enough(middle)? {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    if ended && low == high {
        least.least_bytes = least.enough_bytes;
        least.cut_short = false;
    }
    Ok(least)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;
    use crate::backend::sim::{SimBackend, SimOptions};
    use crate::config::SizeOrShare;
    use crate::units::MIB;
    use std::sync::Arc;

    /// Two gaps of 16 MiB between live blocks, then 32 MiB; 64 MiB live at the most.
    const GAPS: &str = "a,0,16777216,0,0\na,1,16777216,0,1\na,2,16777216,5,2\na,3,16777216,0,3\nu,0,5,3\nf,0,4\nf,2,5\na,4,33554432,0,6\nf,4,7\n";
    const HOW: How = How { run: Run::Plenty, end_at_oom: false, most: Duration::from_secs(600) };

    fn heap(limit: u64) -> Heap {
        let config = Config { limit: Some(SizeOrShare::Bytes(limit)), ..Config::default() };
        let sim = Arc::new(SimBackend::new(SimOptions::default()));
        Heap::builder().config(config).backend(sim).build().unwrap()
    }

    #[test]
    fn a_replay_is_measured_and_leaves_nothing_behind() {
        let trace = Trace::from_bytes("gaps", GAPS.as_bytes()).unwrap();
        let heap = heap(64 * MIB);
        let done = replay(&trace, &heap, &[StreamId(1), StreamId(2)], 7, HOW).unwrap();
        assert!(done.completed && done.ooms == 0 && done.first_oom_event.is_none(), "{done:?}");
        assert_eq!((done.events, done.events_run, done.left_free_bytes), (9, 9, 7));
        assert_eq!([done.peak_requested_bytes, done.peak_reserved_bytes], [64 * MIB; 2]);
        assert!(done.alloc_p50_us <= done.alloc_p99_us && done.alloc_p99_us <= done.alloc_max_us);
        assert!(done.calls_ms <= done.wall_ms && done.more["handles_moved"].as_u64().unwrap() > 0);
        assert_eq!(heap.stats().allocated, 0);
    }

    #[test]
    fn refused_requests_are_counted_and_left_out() {
        let trace = Trace::from_bytes("gaps", GAPS.as_bytes()).unwrap();
        let done = replay(&trace, &heap(48 * MIB), &[StreamId(1), StreamId(2)], 0, HOW).unwrap();
        assert_eq!((done.completed, done.ooms, done.first_oom_event, done.events_run), (false, 1, Some(3), 9));
        let end = How { end_at_oom: true, ..HOW };
        let done = replay(&trace, &heap(48 * MIB), &[StreamId(1), StreamId(2)], 0, end).unwrap();
        assert_eq!((done.events_run, done.cut_short), (3, false));
    }

    #[test]
    fn the_least_is_found_by_halving() {
        let trace = Trace::from_bytes("gaps", GAPS.as_bytes()).unwrap();
        let asked = |enough: u64, reserved: u64, tries: u64| {
            let mut left = tries;
            let in_time = move || {
                left = left.saturating_sub(1);
                left > 0
            };
            search(&trace, reserved, in_time, |bytes| {
                let mut done = replay(&trace, &heap(64 * MIB), &[StreamId(1), StreamId(2)], 0, HOW)?;
                done.completed = bytes >= enough;
                Ok::<_, Error>((bytes, done))
            })
            .unwrap()
        };
        let step = 64 * MIB / 2000;
        // At once, after a while, and beyond what was reserved.
        for (enough, reserved) in [(64 * MIB, 64 * MIB), (65 * MIB, 80 * MIB), (300 * MIB, 64 * MIB)] {
            let least = asked(enough, reserved, 1000);
            let found = least.least_bytes.unwrap();
            assert!(found >= enough && found < enough + step && !least.cut_short, "{least:?}");
            assert!(least.tries < 25, "{least:?}");
        }
        let cut = asked(65 * MIB, 80 * MIB, 3);
        assert_eq!((cut.least_bytes, cut.cut_short), (None, true));
        assert!(cut.enough_bytes.unwrap() >= 65 * MIB);
    }
}
