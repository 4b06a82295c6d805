//! The heap's promises beside running kernels, and its speed against bare driver calls.

use super::report::{Section, Table};
use super::{Suite, growth, median, micros, remap, timed};
use std::time::{Duration, Instant};
use xseg::backend::{Backend, EventScope, StreamId};
use xseg::units::{GIB, GRANULE, MIB, human};
use xseg::{Allocation, Error, Heap};

const SPIN: u64 = 200_000_000;
const PART: u64 = 16 * MIB;

fn heap(suite: &Suite, conf: &str) -> Result<Heap, Error> {
    Heap::builder().conf(conf)?.backend(suite.backend.clone()).build()
}

/// Queues a long kernel and then late writes to a block.
fn late_writes(suite: &Suite, stream: StreamId, block: &Allocation, seed: u32) -> Result<(), Error> {
    // SAFETY: a live block of this stream.
    unsafe { suite.kernels.fill(stream, block.address(), block.len() / 4, seed) }?;
    Ok(())
}

/// Fills a block and checks it, in stream order; wrong words.
fn fill_and_check(suite: &Suite, stream: StreamId, block: &Allocation, seed: u32) -> Result<(), Error> {
    // SAFETY: a live block of this stream.
    unsafe { suite.kernels.fill(stream, block.address(), block.len() / 4, seed) }?;
    // SAFETY: as above.
    unsafe { suite.kernels.check(stream, block.address(), block.len() / 4, seed) }?;
    Ok(())
}

/// Memory asked for while a kernel of 200 ms uses all that is free.
///
/// # Errors
/// When the driver refuses a call.
pub(crate) fn busy(suite: &Suite) -> Result<Section, Error> {
    let mut section = Section::default();
    let streams = [suite.backend.create_stream()?, suite.backend.create_stream()?];
    let done = same_stream(suite, &mut section, streams)
        .and_then(|()| busy_times(suite, &mut section, streams[0]))
        .and_then(|()| other_memory(suite, &mut section, streams))
        .and_then(|()| other_stream(suite, &mut section, streams, "passed"))
        .and_then(|()| other_stream(suite, &mut section, streams, "wait"))
        .and_then(|()| undeclared(suite, &mut section, streams));
    suite.backend.quiesce()?;
    for stream in streams {
        // SAFETY: created above; idle.
        unsafe { suite.backend.destroy_stream(stream) }?;
    }
    done?;
    Ok(section)
}

/// Two free parts with a live one between them, all that the limit allows.
fn scattered(suite: &Suite, heap: &Heap, stream: StreamId) -> Result<[Allocation; 3], Error> {
    let parts = [heap.alloc(PART, stream)?, heap.alloc(PART, stream)?, heap.alloc(PART, stream)?];
    // SAFETY: a stream of this device; the kernel touches no memory.
    unsafe { suite.kernels.spin(stream, SPIN) }?;
    Ok(parts)
}

/// How long a request takes that moves memory of a busy block, over and over; a single sample may hold a rare slow call.
fn busy_times(suite: &Suite, section: &mut Section, one: StreamId) -> Result<(), Error> {
    let limit = Duration::from_millis(suite.choose(1, 10));
    let mut taken = Vec::new();
    for round in 0..suite.choose(9, 3) {
        let heap = heap(suite, "limit:48MiB,handle_max:8MiB,growth:exact")?;
        let [a, live, c] = scattered(suite, &heap, one)?;
        late_writes(suite, one, &a, 1)?;
        late_writes(suite, one, &c, 2)?;
        drop((a, c));
        let before = heap.stats().driver_nanos;
        let (block, took) = timed(|| heap.alloc(2 * PART, one))?;
        let driver = Duration::from_nanos(heap.stats().driver_nanos - before);
        fill_and_check(suite, one, &block, round as u32)?;
        taken.push((took, driver));
        drop((block, live));
    }
    let wrong = suite.kernels.mismatches()?.count;
    taken.sort_unstable();
    let (median, (worst, calls)) = (taken[taken.len() / 2].0, taken[taken.len() - 1]);
    let found = format!(
        "median {:.0} µs, worst {:.0} µs, of which {:.0} in driver calls, in {} rounds; {wrong} wrong words",
        micros(median),
        micros(worst),
        micros(calls),
        taken.len()
    );
    // What the driver's own calls take at worst is not the heap's to bound.
    let right = median < limit && worst.saturating_sub(calls) < limit && wrong == 0;
    section.check("same stream: memory of a busy block in under 1 ms, while the kernel runs", found, right);
    Ok(())
}

fn same_stream(suite: &Suite, section: &mut Section, [one, _]: [StreamId; 2]) -> Result<(), Error> {
    let heap = heap(suite, "limit:48MiB,handle_max:8MiB,growth:exact")?;
    let [a, live, c] = scattered(suite, &heap, one)?;
    late_writes(suite, one, &a, 1)?;
    late_writes(suite, one, &c, 2)?;
    let end = suite.backend.record(EventScope::Stream(one))?;
    drop((a, c));
    let before = heap.stats().driver_nanos;
    let (block, took) = timed(|| heap.alloc(2 * PART, one))?;
    let stats = heap.stats();
    fill_and_check(suite, one, &block, 3)?;
    let found = format!(
        "{:.0} µs, of which {:.0} in driver calls, {} handles moved, {} of old addresses still mapped, {} host waits",
        micros(took),
        micros(Duration::from_nanos(stats.driver_nanos - before)),
        stats.handles_moved,
        human(stats.zombie),
        stats.host_waits
    );
    let right = stats.handles_moved > 0 && stats.zombie > 0 && stats.host_waits == 0;
    section.check("same stream: memory of a busy block at another address", found, right);
    // What may unmap looks again and again; a late write to an address without memory would be a fault.
    let before = Instant::now();
    while before.elapsed() < Duration::from_millis(50) {
        heap.tick();
        heap.trim();
        std::thread::sleep(Duration::from_millis(5));
    }
    let (zombie, running) = (heap.stats().zombie, !suite.backend.is_done(&end)?);
    suite.backend.recycle(end);
    section.check(
        "same stream: the old addresses stay mapped while the kernel runs",
        format!("{} of {} still mapped, kernel still running: {running}", human(zombie), human(stats.zombie)),
        running && zombie == stats.zombie,
    );
    let wrong = suite.kernels.mismatches()?.count;
    section.check("same stream: no late write is seen", format!("{wrong} wrong words"), wrong == 0);
    heap.tick();
    let left = heap.stats().zombie;
    section.check("same stream: the old addresses are unmapped after the kernel", human(left), left == 0);
    drop((block, live));
    Ok(())
}

/// Where the limit leaves memory, another stream gets that and waits for nothing.
fn other_memory(suite: &Suite, section: &mut Section, [one, two]: [StreamId; 2]) -> Result<(), Error> {
    let heap = heap(suite, "limit:80MiB,handle_max:8MiB,growth:exact")?;
    let [a, live, c] = scattered(suite, &heap, one)?;
    let busy = [&a, &c].map(|block| block.address()..block.address() + block.size());
    late_writes(suite, one, &a, 1)?;
    late_writes(suite, one, &c, 2)?;
    let end = suite.backend.record(EventScope::Stream(one))?;
    drop((a, c));
    let (block, took) = timed(|| heap.alloc(2 * PART, two))?;
    fill_and_check(suite, two, &block, 5)?;
    let stats = heap.stats();
    let running = !suite.backend.is_done(&end)?;
    suite.backend.recycle(end);
    let apart = busy.iter().all(|range| block.address() >= range.end || block.address() + block.size() <= range.start);
    let found = format!(
        "{:.0} µs, kernel still running: {running}, other addresses: {apart}, {} handles moved, {} host waits, {} GPU waits",
        micros(took),
        stats.handles_moved,
        stats.host_waits,
        stats.gpu_waits
    );
    let waits = stats.host_waits + stats.gpu_waits;
    let right = running
        && apart
        && stats.handles_moved == 0
        && waits == 0
        && took < suite.choose(Duration::from_millis(2), Duration::from_millis(20));
    section.check("other stream: other memory where there is any, without a wait", found, right);
    let wrong = suite.kernels.mismatches()?.count;
    section.check("other stream (other memory): no late write is seen", format!("{wrong} wrong words"), wrong == 0);
    drop((block, live));
    Ok(())
}

fn other_stream(suite: &Suite, section: &mut Section, [one, two]: [StreamId; 2], mode: &str) -> Result<(), Error> {
    let heap = heap(suite, &format!("limit:48MiB,handle_max:8MiB,growth:exact,cross_stream:{mode}"))?;
    let [a, live, c] = scattered(suite, &heap, one)?;
    late_writes(suite, one, &a, 1)?;
    late_writes(suite, one, &c, 2)?;
    drop((a, c));
    let (block, took) = timed(|| heap.alloc(2 * PART, two))?;
    fill_and_check(suite, two, &block, 4)?;
    let stats = heap.stats();
    let found =
        format!("{:.2} ms, {} host waits, {} GPU waits", took.as_secs_f64() * 1e3, stats.host_waits, stats.gpu_waits);
    let right = if mode == "wait" {
        took < Duration::from_millis(suite.choose(1, 10)) && stats.gpu_waits > 0 && stats.host_waits == 0
    } else {
        took > Duration::from_millis(100) && stats.host_waits == 1 && stats.gpu_waits == 0
    };
    let what = if mode == "wait" { "behind a GPU-side wait, in under 1 ms" } else { "by one host wait, the last step" };
    section.check(&format!("other stream: memory of a busy block {what}"), found, right);
    let wrong = suite.kernels.mismatches()?.count;
    section.check(&format!("other stream ({mode}): no late write is seen"), format!("{wrong} wrong words"), wrong == 0);
    drop((block, live));
    Ok(())
}

/// A block that another stream still reads when it is freed, undeclared but ordered after its writer.
fn undeclared(suite: &Suite, section: &mut Section, [one, two]: [StreamId; 2]) -> Result<(), Error> {
    let heap = heap(suite, "limit:32MiB,handle_max:8MiB,growth:exact")?;
    let read = heap.alloc(2 * PART, one)?;
    late_writes(suite, one, &read, 9)?;
    suite.backend.quiesce()?;
    // SAFETY: a stream of this device; the kernel touches no memory.
    unsafe { suite.kernels.spin(two, SPIN) }?;
    // SAFETY: the block is live while this is queued, and kept from others until every stream has passed.
    unsafe { suite.kernels.check(two, read.address(), read.len() / 4, 9) }?;
    drop(read);
    let third = suite.backend.create_stream()?;
    let (block, took) = timed(|| heap.alloc(2 * PART, third))?;
    fill_and_check(suite, third, &block, 10)?;
    let wrong = suite.kernels.mismatches()?.count;
    let found =
        format!("{wrong} wrong words; the other stream got the memory after {:.0} ms", took.as_secs_f64() * 1e3);
    section.check(
        "an undeclared read on another stream is never overwritten by a third",
        found,
        wrong == 0 && took > Duration::from_millis(100),
    );
    drop(block);
    suite.backend.quiesce()?;
    // SAFETY: created above; idle.
    unsafe { suite.backend.destroy_stream(third) }?;
    Ok(())
}

/// Growth in one request, and remapping through the heap, beside bare loops in the same run.
///
/// # Errors
/// When the driver refuses a call.
pub(crate) fn speed(suite: &Suite) -> Result<Section, Error> {
    let mut section = Section::default();
    let bytes = suite.at_most(suite.growth, GIB)?;
    let rounds = suite.choose(8, 1);
    let mut table = Table::new(&["handle_max MiB", "handles", "heap ms", "bare loop ms", "heap / bare"]);
    for size in [64u64, 128, 256] {
        let (mut own, mut bare, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        // What the heap makes of its bound on this device; the bare loop creates as many.
        let handles = grown(suite, bytes, size)?.1;
        let same = growth::split(bytes, bytes.div_ceil(handles).next_multiple_of(GRANULE));
        for round in 0..rounds {
            let mut pair = [0.0; 2];
            // Each goes first in turn: what was given back just before makes the next creates dearer.
            for turn in [round % 2, 1 - round % 2] {
                pair[turn] =
                    if turn == 0 { grown(suite, bytes, size)?.0 } else { micros(growth::bare(suite, &same)?.0) / 1e3 };
            }
            own.push(pair[0]);
            bare.push(pair[1]);
            ratios.push(pair[0] / pair[1]);
        }
        let (own, bare, ratio) = (median(&mut own), median(&mut bare), median(&mut ratios));
        table.row([size.into(), handles.into(), own.into(), bare.into(), ratio.into()]);
        section.check(
            &format!("growth to {} with handle_max:{size}MiB is within 1.1 of a bare loop", human(bytes)),
            format!(
                "{own:.1} ms, {handles} handles, {} in the bare loop; median of {rounds} rounds' ratios {ratio:.2}",
                same.len()
            ),
            ratio <= 1.1,
        );
    }
    section.tables.push(table);
    let mut table = Table::new(&["handle MiB", "handles", "heap GB/s", "bare GB/s", "heap / bare"]);
    for size in [2u64, 20, 64] {
        let count = suite.choose((4 * GIB / (size * MIB)) as usize, 8);
        let (mut own, mut bare) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            own.push(micros(remapped(suite, size * MIB, count)?));
            bare.extend(remap::bare(suite, size * MIB, count, 1)?.into_iter().map(micros));
        }
        let moved = (size * MIB * count as u64) as f64;
        let (own, bare) = (moved / median(&mut own) / 1e3, moved / median(&mut bare) / 1e3);
        table.row([size.into(), (count as u64).into(), own.into(), bare.into(), (own / bare).into()]);
        section.check(
            &format!("remap of {size} MiB handles at 95 % of a bare loop"),
            format!("{:.3}", own / bare),
            own >= 0.95 * bare,
        );
    }
    section.tables.push(table);
    Ok(section)
}

/// Milliseconds of one request that a new heap serves by growth, and how many handles it created.
fn grown(suite: &Suite, bytes: u64, handle_mib: u64) -> Result<(f64, u64), Error> {
    let heap = heap(suite, &format!("handle_max:{handle_mib}MiB,growth:exact"))?;
    let (block, took) = timed(|| heap.alloc(bytes, StreamId(0)))?;
    drop(block);
    Ok((micros(took) / 1e3, heap.stats().driver_calls.create))
}

/// Time of one request that is served by moving `count` scattered handles of `size` bytes.
fn remapped(suite: &Suite, size: u64, count: usize) -> Result<Duration, Error> {
    // A handle for each block; then the limit leaves nothing to create.
    let heap = heap(suite, &format!("handle_max:{}MiB,growth:exact", size / MIB))?;
    let blocks: Vec<Allocation> = (0..2 * count).map(|_| heap.alloc(size, StreamId(0))).collect::<Result<_, _>>()?;
    let keep: Vec<Allocation> =
        blocks.into_iter().enumerate().filter_map(|(index, block)| (index % 2 == 1).then_some(block)).collect();
    suite.backend.quiesce()?;
    heap.tick();
    heap.set_limit(heap.stats().reserved);
    let (block, took) = timed(|| heap.alloc(size * count as u64, StreamId(0)))?;
    let moved = heap.stats().handles_moved;
    if moved != count as u64 {
        return Err(Error::InvalidArgument(format!("{moved} handles of {size} bytes moved instead of {count}")));
    }
    drop((block, keep));
    Ok(took)
}
