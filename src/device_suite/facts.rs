//! What the backend and the verification kernels promise, checked on the device at hand.

use super::Suite;
use super::memory::{Handles, Mapped, Reservation, map};
use super::report::Section;
use std::time::{Duration, Instant};
use xseg::Error;
use xseg::backend::cuda::memory::{Stamp, pattern};
use xseg::backend::{Backend, EventScope, StreamId};
use xseg::units::{MIB, human};

/// Runs the section.
///
/// # Errors
/// When the driver refuses a call.
pub fn run(suite: &Suite) -> Result<Section, Error> {
    let mut section = Section::new("Facts");
    let found = suite.backend.capabilities();
    section.text.push(format!(
        "Granularity {}; context events {}; remap beside kernels {}; POSIX-fd export {}; RDMA {}.",
        human(found.granularity),
        found.context_events,
        found.concurrent_remap,
        suite.backend.exportable(),
        suite.backend.rdma()
    ));
    let streams = [suite.backend.create_stream()?, suite.backend.create_stream()?];
    let done = patterns(suite, &mut section)
        .and_then(|()| stamps(suite, &mut section))
        .and_then(|()| double_mapping(suite, &mut section, streams[0]))
        .and_then(|()| events(suite, &mut section, streams))
        .and_then(|()| beside_a_kernel(suite, &mut section, streams[0]));
    suite.backend.quiesce()?;
    for stream in streams {
        // SAFETY: created above; idle.
        unsafe { suite.backend.destroy_stream(stream) }?;
    }
    done?;
    identities(suite, &mut section)?;
    export(suite, &mut section)?;
    leftovers(suite, &mut section)?;
    Ok(section)
}

fn patterns(suite: &Suite, section: &mut Section) -> Result<(), Error> {
    let range = Mapped::new(suite, 2 * MIB, &[1, 0, 2], 0)?;
    let words = 6 * MIB / 4;
    let at = range.address + 3 * MIB;
    let mut word = [0; 4];
    // SAFETY: the range is mapped and used by nobody else; here and below.
    unsafe {
        suite.kernels.fill(StreamId(0), range.address, words, 77)?;
        suite.kernels.check(StreamId(0), range.address, words, 77)?;
    }
    let right = suite.kernels.mismatches()?;
    section.check(
        "a pattern over three handles is read back",
        format!("{} wrong words", right.count),
        right.count == 0,
    );
    // SAFETY: as above.
    unsafe { suite.kernels.read(StreamId(0), at, &mut word) }?;
    let (index, expected) = ((at - range.address) / 4, pattern((at - range.address) / 4, 77));
    let host = u32::from_le_bytes(word);
    section.check("the host knows the pattern", format!("word {index}: {host:#x}"), host == expected);
    // SAFETY: as above.
    unsafe {
        suite.kernels.write(StreamId(0), at, &[word[0] ^ 1])?;
        suite.kernels.check(StreamId(0), range.address, words, 77)?;
    }
    let wrong = suite.kernels.mismatches()?;
    section.check("one wrong bit is found, and where", format!("{wrong:x?}"), (wrong.count, wrong.address) == (1, at));
    Ok(())
}

fn stamps(suite: &Suite, section: &mut Section) -> Result<(), Error> {
    let range = Mapped::new(suite, 2 * MIB, &[0, 1], 0)?;
    // Some odd addresses, among them one across the two handles.
    let all: Vec<Stamp> = (0..1000)
        .map(|index| Stamp { address: range.address + index * 4001, value: [index, !index], bytes: index % 16 + 1 })
        .chain([Stamp { address: range.address + 2 * MIB - 7, value: [3, 4], bytes: 16 }])
        .collect();
    // SAFETY: inside the range, which nobody else uses; here and below.
    unsafe {
        suite.kernels.stamp(StreamId(0), &all)?;
        suite.kernels.check_stamps(StreamId(0), &all)?;
    }
    let right = suite.kernels.mismatches()?;
    section.check("stamps at odd addresses are read back", format!("{} wrong", right.count), right.count == 0);
    let at = range.address + 2 * MIB + 8;
    // SAFETY: as above.
    unsafe {
        suite.kernels.write(StreamId(0), at, &[0xEE])?;
        suite.kernels.check_stamps(StreamId(0), &all)?;
    }
    let wrong = suite.kernels.mismatches()?;
    section.check("a wrong stamp is found, and where", format!("{wrong:x?}"), (wrong.count, wrong.address) == (1, at));
    Ok(())
}

fn double_mapping(suite: &Suite, section: &mut Section, stream: StreamId) -> Result<(), Error> {
    let size = 4 * MIB;
    let range = Reservation::new(suite, 4 * size)?;
    let handles = Handles::new(suite, size, 1)?;
    let (one, two) = (range.address, range.address + 2 * size);
    let words = size / 4;
    // SAFETY: two places of a range that nobody else uses, for one handle; unmapped after the work.
    unsafe {
        map(&suite.backend, one, handles.all[0], size)?;
        suite.kernels.fill(stream, one, words, 5)?;
        map(&suite.backend, two, handles.all[0], size)?;
        suite.kernels.check(stream, two, words, 5)?;
        suite.backend.synchronize(stream)?;
        suite.backend.unmap(one, size)?;
        suite.kernels.check(stream, two, words, 5)?;
    }
    let wrong = suite.kernels.mismatches()?;
    // SAFETY: the device is idle since `mismatches`.
    unsafe { suite.backend.unmap(two, size) }?;
    section.check("data is the same through two mappings", format!("{} wrong words", wrong.count), wrong.count == 0);
    Ok(())
}

fn events(suite: &Suite, section: &mut Section, [long, short]: [StreamId; 2]) -> Result<(), Error> {
    let backend = &suite.backend;
    // SAFETY: streams of this device; the kernel touches no memory.
    unsafe {
        suite.kernels.spin(long, 200_000_000)?;
        suite.kernels.spin(short, 20_000_000)?;
    }
    let own = backend.record(EventScope::Stream(short))?;
    let all = backend.record(if backend.capabilities().context_events {
        EventScope::Context
    } else {
        EventScope::Stream(long)
    })?;
    let start = Instant::now();
    let early = backend.wait(&all, Duration::from_millis(5))?;
    let waited = start.elapsed();
    let in_time = !early && waited >= Duration::from_millis(5) && waited < Duration::from_millis(15);
    section.check("a wait of 5 ms ends in time", format!("{:.2} ms", waited.as_secs_f64() * 1e3), in_time);
    let short_done = backend.wait(&own, Duration::from_secs(5))?;
    let long_runs = !backend.is_done(&all)?;
    let what = "an event of one stream does not wait for another, one of the context does";
    section.check(what, format!("{short_done}, {long_runs}"), short_done && long_runs);
    let finished = backend.wait(&all, Duration::from_secs(5))?;
    section.check("it completes when all streams have", finished, finished);
    for event in [own, all] {
        backend.recycle(event);
    }
    // The costs that the heap's rules count on.
    let rounds = 1000u32;
    let start = Instant::now();
    for _ in 0..rounds {
        let event = backend.record(EventScope::Stream(short))?;
        backend.recycle(event);
    }
    let record = start.elapsed() / rounds;
    let event = backend.record(EventScope::Stream(short))?;
    let start = Instant::now();
    for _ in 0..rounds {
        backend.is_done(&event)?;
    }
    let query = start.elapsed() / rounds;
    let start = Instant::now();
    for _ in 0..rounds {
        backend.stream_key(short).map(drop)?;
    }
    let key = start.elapsed() / rounds;
    let start = Instant::now();
    for _ in 0..rounds {
        backend.is_capturing(short);
    }
    let capturing = start.elapsed() / rounds;
    backend.recycle(event);
    section.text.push(format!(
        "Through the backend: event record {record:?}, event query {query:?}, stream identity {key:?}, capture query {capturing:?} each."
    ));
    Ok(())
}

fn beside_a_kernel(suite: &Suite, section: &mut Section, stream: StreamId) -> Result<(), Error> {
    let size = 20 * MIB;
    let range = Reservation::new(suite, size)?;
    // SAFETY: a stream of this device; the kernel touches no memory.
    unsafe { suite.kernels.spin(stream, 100_000_000) }?;
    let event = suite.backend.record(EventScope::Stream(stream))?;
    let start = Instant::now();
    let handles = Handles::new(suite, size, 1)?;
    // SAFETY: a range of its own that nothing on the device uses.
    unsafe {
        map(&suite.backend, range.address, handles.all[0], size)?;
        suite.backend.unmap(range.address, size)?;
    }
    drop(handles);
    let took = start.elapsed();
    let runs = !suite.backend.is_done(&event)?;
    suite.backend.wait(&event, Duration::from_secs(5))?;
    suite.backend.recycle(event);
    let found = format!("{:.0} µs, kernel still running: {runs}", took.as_secs_f64() * 1e6);
    section.check("create, map, set_access, unmap, release do not wait for a kernel", found, runs);
    Ok(())
}

fn identities(suite: &Suite, section: &mut Section) -> Result<(), Error> {
    let mut keys = Vec::new();
    let mut handles = Vec::new();
    for _ in 0..20 {
        let stream = suite.backend.create_stream()?;
        keys.push(suite.backend.stream_key(stream)?);
        handles.push(stream);
        // SAFETY: created just now.
        unsafe { suite.backend.destroy_stream(stream) }?;
    }
    for list in [&mut keys, &mut handles.iter().map(|stream| stream.0).collect()] {
        list.sort_unstable();
        list.dedup();
    }
    handles.sort_unstable();
    handles.dedup();
    let found = format!("{} identities, {} handles", keys.len(), handles.len());
    section.check("20 streams in a row have 20 identities", found, keys.len() == 20);
    Ok(())
}

fn export(suite: &Suite, section: &mut Section) -> Result<(), Error> {
    if suite.backend.exportable() {
        let handles = Handles::new(suite, 2 * MIB, 1)?;
        // SAFETY: a live handle.
        let done = unsafe { suite.backend.export_fd(handles.all[0]) };
        let found = done.as_ref().map_or_else(ToString::to_string, |_| "a descriptor".into());
        section.check("a handle is exported", found, done.is_ok());
    }
    Ok(())
}

fn leftovers(suite: &Suite, section: &mut Section) -> Result<(), Error> {
    let cycle = || -> Result<u64, Error> {
        let order: Vec<usize> = (0..100).collect();
        drop(Mapped::new(suite, 20 * MIB, &order, 0)?);
        Ok(suite.backend.memory()?.free)
    };
    let (warm, again) = (cycle()?, cycle()?);
    let lost = warm.saturating_sub(again);
    section.check("a second cycle leaves the card within 4 MiB", human(lost), lost <= 4 * MIB);
    Ok(())
}
