//! The traces through the heap on this device, checked by kernels, and without room to spare.

use super::Suite;
use super::report::{Section, Table};
use std::collections::HashMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use xseg::backend::cuda::memory::Stamp;
use xseg::backend::{Backend, StreamId};
use xseg::config::{Config, SizeOrShare};
use xseg::trace::{Action, Trace};
use xseg::units::{GIB, GRANULE, MIB, human, round_down};
use xseg::{Error, Heap, Stats};

/// Least limits as multiples of peak requested, found by `xseg least --backend sim`.
const LEAST: [(&str, f64); 7] = [
    ("fsdp", 1.0085),
    ("gpt2", 1.0015),
    ("llama_ckpt", 1.0075),
    ("llama_varlen", 1.0090),
    ("moe", 1.0050),
    ("serve", 1.0085),
    ("vision_multires", 1.0040),
];

/// What a replay came to.
struct Outcome {
    completed: bool,
    stats: Stats,
    wall: Duration,
    why: String,
}

/// Every shipped trace, by name.
///
/// # Errors
/// When a file cannot be read.
pub(crate) fn traces(suite: &Suite) -> Result<Vec<Trace>, Error> {
    let names = LEAST
        .iter()
        .map(|(name, _)| *name)
        .filter(|name| suite.traces.is_empty() || suite.traces.contains(&(*name).to_string()));
    names
        .map(|name| {
            let path = PathBuf::from("traces").join(format!("{name}.trace.xz"));
            Trace::load(&path).map_err(|error| Error::InvalidArgument(format!("{}: {error}", path.display())))
        })
        .collect()
}

/// Stamps of a block: its edges and every granule boundary inside.
fn stamps(id: u32, address: u64, bytes: u64) -> Vec<Stamp> {
    let size = bytes.min(16);
    let end = address + bytes;
    let inside = (address / GRANULE + 1..).map(|granule| granule * GRANULE).take_while(|at| at + size <= end);
    let places = (bytes > 0).then_some(address).into_iter().chain(inside).chain((bytes > 16).then_some(end - size));
    // A place's value depends on the place and the block, so overlapping stamps would differ: they are left out.
    let mut last = 0;
    let apart = places.filter(move |at| {
        let keep = last == 0 || *at >= last + size;
        if keep {
            last = *at;
        }
        keep
    });
    let value = |at: u64| [(at ^ u64::from(id) << 40).wrapping_mul(0x9E37_79B9_7F4A_7C15), u64::from(id)];
    apart.map(|at| Stamp { address: at, value: value(at), bytes: size }).collect()
}

/// Replays a trace, with stamps or without, under a limit in bytes.
fn replay(suite: &Suite, trace: &Trace, limit: u64, verify: bool) -> Result<Outcome, Error> {
    let mut config = Config::default();
    config.limit = Some(SizeOrShare::Bytes(limit));
    let heap = Heap::builder().config(config).backend(suite.backend.clone()).build()?;
    let mut streams = HashMap::new();
    for stream in &trace.streams {
        streams.insert(*stream, suite.backend.create_stream()?);
    }
    let mut live: HashMap<u32, (u64, StreamId)> = HashMap::new();
    let mut why = String::new();
    let start = Instant::now();
    for event in &trace.events {
        let bytes = trace.blocks[event.block as usize].bytes;
        match event.action {
            Action::Alloc => {
                let stream = streams[&trace.stream_of(event.block)];
                match heap.alloc_raw(bytes, stream) {
                    Ok(address) => {
                        if verify {
                            // SAFETY: a live block of this stream.
                            unsafe { suite.kernels.stamp(stream, &stamps(event.block, address, bytes)) }?;
                        }
                        live.insert(event.block, (address, stream));
                    }
                    Err(error @ (Error::OutOfMemory(_) | Error::AddressSpace { .. })) => {
                        why = error.to_string();
                        break;
                    }
                    Err(error) => return Err(error),
                }
            }
            Action::Free => {
                if let Some((address, stream)) = live.remove(&event.block) {
                    if verify {
                        // SAFETY: still a live block of this stream.
                        unsafe { suite.kernels.check_stamps(stream, &stamps(event.block, address, bytes)) }?;
                    }
                    heap.free_raw(address)?;
                }
            }
            Action::Use(index) => {
                if let Some((address, _)) = live.get(&event.block) {
                    heap.record_use(*address, streams[&trace.streams[index as usize]])?;
                }
            }
        }
    }
    let wall = start.elapsed();
    suite.backend.quiesce()?;
    let stats = heap.stats();
    drop(heap);
    for stream in streams.into_values() {
        // SAFETY: created above; the device is idle.
        unsafe { suite.backend.destroy_stream(stream) }?;
    }
    Ok(Outcome { completed: why.is_empty(), stats, wall, why })
}

/// Replays every trace with stamps that kernels write and check, under 1.02 times peak requested.
///
/// # Errors
/// When the driver refuses a call.
pub(crate) fn verified(suite: &Suite) -> Result<Section, Error> {
    let mut section = Section::default();
    section.text.push(
        "Every block is stamped by a kernel when allocated and checked by one when freed, in stream order; limit 1.02 times peak requested.".into(),
    );
    let columns = [
        "trace",
        "peak requested GiB",
        "peak reserved / requested",
        "handles moved",
        "driver ms",
        "host waits",
        "wall ms",
        "wrong stamps",
    ];
    let mut table = Table::new(&columns);
    for trace in traces(suite)? {
        let peak = trace.peak_requested();
        let limit = round_down((peak as f64 * 1.02) as u64, GRANULE);
        let done = replay(suite, &trace, limit, true)?;
        let wrong = suite.kernels.mismatches()?.count;
        table.row([
            trace.name.as_str().into(),
            (peak as f64 / GIB as f64).into(),
            (done.stats.peak_reserved as f64 / peak as f64).into(),
            done.stats.handles_moved.into(),
            (done.stats.driver_nanos as f64 / 1e6).into(),
            done.stats.host_waits.into(),
            (done.wall.as_secs_f64() * 1e3).into(),
            wrong.into(),
        ]);
        section.check(
            &format!("{} replays with every stamp right", trace.name),
            format!("{wrong} wrong {}", done.why),
            done.completed && wrong == 0,
        );
    }
    section.tables.push(table);
    Ok(section)
}

/// Fills the card but for the least memory of each trace plus half a per cent, and replays in what is left.
///
/// # Errors
/// When the driver refuses a call.
pub(crate) fn ballast(suite: &Suite) -> Result<Section, Error> {
    let mut section = Section::default();
    section.text.push("A plain allocation fills the card but for the least memory found on `sim` plus 0.5 %, and 64 MiB for page tables.".into());
    let columns = [
        "trace",
        "left free / peak requested",
        "completed",
        "peak reserved / requested",
        "handles moved",
        "driver ms",
        "modelled ms",
        "measured / modelled",
        "host waits",
    ];
    let mut table = Table::new(&columns);
    for trace in traces(suite)? {
        let peak = trace.peak_requested();
        let least = LEAST.iter().find(|(name, _)| *name == trace.name).map_or(1.01, |(_, least)| *least);
        let limit = round_down((peak as f64 * (least + 0.005)) as u64, GRANULE);
        let free = suite.backend.memory()?.free;
        let fill = round_down(free.saturating_sub(limit + 64 * MIB), GRANULE);
        let filler = suite.backend.allocate_plain(fill)?;
        let left = suite.backend.memory()?.free;
        let done = replay(suite, &trace, limit, false);
        // SAFETY: allocated above and never used.
        unsafe { suite.backend.free_plain(filler) }?;
        let done = done?;
        let measured = done.stats.driver_nanos as f64 / 1e6;
        let modelled = modelled(&trace, limit)?;
        table.row([
            trace.name.as_str().into(),
            (left as f64 / peak as f64).into(),
            if done.completed { "yes" } else { "no" }.into(),
            (done.stats.peak_reserved as f64 / peak as f64).into(),
            done.stats.handles_moved.into(),
            measured.into(),
            modelled.into(),
            (measured / modelled).into(),
            done.stats.host_waits.into(),
        ]);
        let found = if done.completed { human(left) } else { done.why };
        section.check(
            &format!("{} completes in {:.4} times its peak", trace.name, least + 0.005),
            found,
            done.completed,
        );
    }
    section.tables.push(table);
    Ok(section)
}

/// Modelled driver time of the same replay on a simulated device, in milliseconds.
fn modelled(trace: &Trace, limit: u64) -> Result<f64, Error> {
    use xseg::backend::sim::{SimBackend, SimOptions};
    let mut config = Config::default();
    config.limit = Some(SizeOrShare::Bytes(limit));
    let sim = std::sync::Arc::new(SimBackend::new(SimOptions::default()));
    let heap = Heap::builder().config(config).backend(sim).build()?;
    let mut live = HashMap::new();
    for event in &trace.events {
        match event.action {
            Action::Alloc => {
                let stream = StreamId(trace.stream_of(event.block));
                match heap.alloc_raw(trace.blocks[event.block as usize].bytes, stream) {
                    Ok(address) => live.insert(event.block, address),
                    Err(_) => break,
                };
            }
            Action::Free => {
                if let Some(address) = live.remove(&event.block) {
                    heap.free_raw(address)?;
                }
            }
            Action::Use(_) => {}
        }
    }
    Ok(heap.stats().driver_nanos as f64 / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stamps_do_not_overlap_and_reach_both_ends() {
        for (address, bytes) in [(GRANULE - 8, 40), (512, 3), (512, 16), (0x4000, 5 * MIB + 24), (GRANULE, 0)] {
            let all = stamps(7, address, bytes);
            assert!(all.windows(2).all(|pair| pair[0].address + pair[0].bytes <= pair[1].address));
            assert!(all.iter().all(|stamp| stamp.address >= address && stamp.address + stamp.bytes <= address + bytes));
            assert_eq!(all.first().map(|stamp| stamp.address), (bytes > 0).then_some(address));
        }
    }
}
