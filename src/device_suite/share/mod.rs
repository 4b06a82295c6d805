//! Memory of one process used by another on the same GPU: read and written by kernels of both, freed in either order, with
//! either process killed, and a thousand times over.

mod child;
mod peer;

pub(crate) use child::child;
pub(crate) use peer::KIND;

use super::report::{Section, Table};
use super::{Suite, median, micros, timed};
use peer::{Answer, Ask, Peer};
use std::time::{Duration, Instant};
use xseg::backend::{Backend, StreamId};
use xseg::error::ShareFault;
use xseg::units::{GIB, MIB, human};
use xseg::{Allocation, Error, Heap};

/// How much less of the card may be free afterwards.
const SPARE: u64 = 4 * MIB;
/// Descriptors and KiB of addresses that the driver may take for itself.
const OWN: u64 = 8;
const OWN_ADDRESSES: u64 = 64 << 10;
/// Longest wait for the end of an import.
const PATIENCE: Duration = Duration::from_secs(30);

fn failed(what: impl std::fmt::Display) -> Error {
    Error::InvalidArgument(what.to_string())
}

fn heap(suite: &Suite, conf: &str) -> Result<Heap, Error> {
    Heap::builder().conf(conf)?.backend(suite.backend.clone()).build()
}

/// Queues writing a pattern over a range.
fn fill(suite: &Suite, stream: StreamId, (address, bytes): (u64, u64), seed: u32) -> Result<(), Error> {
    // SAFETY: a live block or import; the processes take turns.
    Ok(unsafe { suite.kernels.fill(stream, address, bytes / 4, seed) }?)
}

/// Queues checking a pattern over a range.
fn check(suite: &Suite, stream: StreamId, (address, bytes): (u64, u64), seed: u32) -> Result<(), Error> {
    // SAFETY: as above.
    Ok(unsafe { suite.kernels.check(stream, address, bytes / 4, seed) }?)
}

/// Wrong words since last asked; everything queued is done then.
fn wrong(suite: &Suite) -> Result<u64, Error> {
    Ok(suite.kernels.mismatches()?.count)
}

/// Descriptors of this process, the one for looking included.
fn descriptors() -> Result<u64, Error> {
    Ok(std::fs::read_dir("/proc/self/fd").map_err(failed)?.count() as u64)
}

fn place(block: &Allocation) -> (u64, u64) {
    (block.address(), block.len())
}

/// Writes a block and waits for that.
fn write(suite: &Suite, block: &Allocation, seed: u32) -> Result<(), Error> {
    fill(suite, block.stream(), place(block), seed)?;
    Ok(suite.backend.quiesce()?)
}

/// Wrong words of a block.
fn read(suite: &Suite, block: &Allocation, seed: u32) -> Result<u64, Error> {
    check(suite, block.stream(), place(block), seed)?;
    wrong(suite)
}

/// Exports a block, for the other process to import; how long the export took, and its answer.
fn hand_over(heap: &Heap, block: &Allocation, peer: &Peer) -> Result<(Duration, Answer), Error> {
    peer.tell(Ask::Receive)?;
    let ((), took) = timed(|| heap.export(block.address())?.send(&peer.socket))?;
    Ok((took, peer.answer()?))
}

/// Ticks until nothing is exported; how long that took.
fn ended(heap: &Heap) -> Option<Duration> {
    let start = Instant::now();
    while start.elapsed() < PATIENCE {
        heap.tick();
        if heap.stats().exported == 0 {
            return Some(start.elapsed());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    None
}

/// Runs the section.
///
/// # Errors
/// When the driver refuses a call, or the other process fails.
pub(crate) fn run(suite: &Suite) -> Result<Section, Error> {
    let mut section = Section::default();
    if !suite.backend.exportable() {
        section.text.push("Skipped: this device's memory cannot be exported.".into());
        return Ok(section);
    }
    let stream = suite.backend.create_stream()?;
    let peer = Peer::start(suite)?;
    let free = suite.backend.memory()?.free;
    let done = large(suite, stream, &peer, &mut section)
        .and_then(|()| under_work(suite, stream, &peer, &mut section))
        .and_then(|()| many(suite, stream, &peer, &mut section))
        .and_then(|()| {
            let less = free.saturating_sub(suite.backend.memory()?.free);
            let what = "all of it leaves the card as it was, with the other process still there";
            section.check(what, format!("{} less free", human(less)), less <= SPARE);
            section.check("the other process ends well", "", peer.end());
            Ok(())
        })
        .and_then(|()| killed_importer(suite, stream, &mut section))
        .and_then(|()| killed_exporter(suite, stream, &mut section))
        .and_then(|()| other_device(suite, stream, &mut section));
    suite.backend.quiesce()?;
    // SAFETY: created above; idle.
    unsafe { suite.backend.destroy_stream(stream) }?;
    done.map(|()| section)
}

/// 3 GiB over many handles, freed in either order.
fn large(suite: &Suite, stream: StreamId, peer: &Peer, section: &mut Section) -> Result<(), Error> {
    let bytes = suite.at_most(suite.choose(3 * GIB, 256 * MIB), MIB)?;
    let mut table = Table::new(&["handles", "MiB", "export and send ms", "import ms", "close ms"]);
    let few = "handle_max:2MiB,growth:exact";
    for (conf, exporter_first) in [(few, true), ("", false), (few, false), ("", true)] {
        let heap = heap(suite, conf)?;
        // So that the block begins in the middle of a handle.
        let before = heap.alloc(1536 << 10, stream)?;
        let block = heap.alloc(bytes, stream)?;
        let handles = heap.stats().driver_calls.create;
        write(suite, &block, 1)?;
        let (export, [length, import, ..]) = hand_over(&heap, &block, peer)?;
        let [seen, ..] = peer.ask(Ask::Check(1))?;
        peer.ask(Ask::Fill(2))?;
        let back = read(suite, &block, 2)?;
        let order = if exporter_first { "the exporter first" } else { "the importer first" };
        let name = format!("{} over {handles} handles, ended by {order}", human(bytes));
        section.check(
            &format!("{name}: what one process's kernels write, the other's read"),
            format!("{seen} and {back} wrong words of {}", human(length)),
            seen == 0 && back == 0 && length == bytes,
        );
        let (close, kept, held) = if exporter_first {
            drop(block);
            heap.tick();
            let held = heap.stats().pending >= bytes;
            // What is allocated meanwhile is other memory.
            let next = heap.alloc(bytes, stream)?;
            write(suite, &next, 9)?;
            let [kept, ..] = peer.ask(Ask::Check(2))?;
            let [close, ..] = peer.ask(Ask::Close)?;
            (close, kept + read(suite, &next, 9)?, held)
        } else {
            let [close, ..] = peer.ask(Ask::Close)?;
            (close, read(suite, &block, 2)?, true)
        };
        let over = ended(&heap);
        let stats = heap.stats();
        section.check(
            &format!("{name}: nothing is lost before its time, and nothing is kept after it"),
            format!("{kept} wrong words, kept while imported: {held}, {} pending", human(stats.pending)),
            kept == 0 && held && over.is_some() && stats.pending == 0 && stats.pinned == 0 && heap.check().is_ok(),
        );
        let milliseconds = |micros: u64| (micros as f64 / 1000.0).into();
        let export = (micros(export) / 1000.0).into();
        table.row([handles.into(), (bytes / MIB).into(), export, milliseconds(import), milliseconds(close)]);
        drop(before);
    }
    section.tables.push(table);
    Ok(())
}

/// An import that is dropped while kernels use it.
fn under_work(suite: &Suite, stream: StreamId, peer: &Peer, section: &mut Section) -> Result<(), Error> {
    let heap = heap(suite, "")?;
    let block = heap.alloc(64 * MIB, stream)?;
    write(suite, &block, 4)?;
    hand_over(&heap, &block, peer)?;
    peer.ask(Ask::Drop(200, 4))?;
    heap.tick();
    let during = heap.stats().exported;
    let [wrong_words, imported, ..] = peer.ask(Ask::Settle)?;
    let over = ended(&heap);
    section.check(
        "an import that is dropped under queued kernels stays until they are done",
        format!("{} exported during, {wrong_words} wrong words, {imported} bytes left", human(during)),
        during == block.size() && wrong_words == 0 && imported == 0 && over.is_some(),
    );
    Ok(())
}

/// Many imports of one block.
fn many(suite: &Suite, stream: StreamId, peer: &Peer, section: &mut Section) -> Result<(), Error> {
    let count = suite.choose(1000, 100);
    let heap = heap(suite, "handle_max:8MiB,growth:exact")?;
    let block = heap.alloc(32 * MIB, stream)?;
    let (handles, open, free) = (heap.stats().driver_calls.create, descriptors()?, suite.backend.memory()?.free);
    let (mut exports, mut imports, mut closes) = (Vec::new(), Vec::new(), Vec::new());
    let (mut wrong_words, mut most) = (0, 0);
    peer.tell(Ask::Many(count))?;
    for round in 0..count {
        if round % 50 == 0 {
            write(suite, &block, round)?;
        }
        let ((), took) = timed(|| heap.export(block.address())?.send(&peer.socket))?;
        exports.push(micros(took));
        let [import, close, found, ..] = peer.answer()?;
        imports.push(import as f64);
        closes.push(close as f64);
        wrong_words += found;
        most = most.max(descriptors()?);
    }
    let [fds, fds_after, reserved, reserved_after, addresses, addresses_after] = peer.answer()?;
    let over = ended(&heap);
    let (after, less) = (descriptors()?, free.saturating_sub(suite.backend.memory()?.free));
    let grown = addresses_after.saturating_sub(addresses);
    section.check(
        &format!("{count} imports of {} take no descriptors, addresses or memory with them", human(block.size())),
        format!(
            "descriptors {open}, at most {most}, {after} here, {fds} and {fds_after} there; {reserved} and {reserved_after} \
             reservations and {grown} KiB more addresses there; {} less free",
            human(less)
        ),
        after <= open + OWN
            && fds_after <= fds + OWN
            && reserved_after == reserved
            && grown <= OWN_ADDRESSES
            && less <= SPARE
            && over.is_some(),
    );
    section.check("every 50th is read by kernels", format!("{wrong_words} wrong words"), wrong_words == 0);
    let mut table = Table::new(&["handles of 8 MiB", "imports", "export and send µs", "import µs", "close µs"]);
    let medians = [&mut exports, &mut imports, &mut closes].map(|times| median(times).into());
    table.row([handles.into(), u64::from(count).into()].into_iter().chain(medians));
    section.tables.push(table);
    Ok(())
}

/// A process that is killed while its kernels write what it imported.
fn killed_importer(suite: &Suite, stream: StreamId, section: &mut Section) -> Result<(), Error> {
    const BYTES: u64 = 256 * MIB;
    let peer = Peer::start(suite)?;
    // Room for the block alone, so that what comes next is on its memory.
    let heap = heap(suite, &format!("limit:{BYTES},wait_limit:30s"))?;
    let block = heap.alloc(BYTES, stream)?;
    write(suite, &block, 1)?;
    hand_over(&heap, &block, &peer)?;
    peer.ask(Ask::Write)?;
    drop(block);
    heap.tick();
    let during = heap.stats().exported;
    let killed = peer.kill();
    let (next, took) = timed(|| heap.alloc(BYTES, stream))?;
    write(suite, &next, 7)?;
    std::thread::sleep(Duration::from_millis(500));
    let wrong_words = read(suite, &next, 7)?;
    section.check(
        "an importer that is killed while its kernels write is waited for, and writes no more",
        format!(
            "{} kept until then, memory back after {:.0} ms, {wrong_words} wrong words",
            human(during),
            took.as_secs_f64() * 1e3
        ),
        killed && during == BYTES && wrong_words == 0 && heap.stats().exported == 0,
    );
    Ok(())
}

/// A process that is killed after it exported.
fn killed_exporter(suite: &Suite, stream: StreamId, section: &mut Section) -> Result<(), Error> {
    let peer = Peer::start(suite)?;
    let heap = heap(suite, "")?;
    peer.tell(Ask::Send(256, 3))?;
    let imported = heap.receive(&peer.socket)?;
    peer.answer()?;
    let range = (imported.address(), imported.len());
    let killed = peer.kill();
    check(suite, stream, range, 3)?;
    let seen = wrong(suite)?;
    fill(suite, stream, range, 8)?;
    check(suite, stream, range, 8)?;
    let back = wrong(suite)?;
    let closed = imported.close();
    section.check(
        "memory of an exporter that is killed is read and written on",
        format!("{seen} and {back} wrong words; closed: {closed:?}"),
        killed && seen == 0 && back == 0 && closed.is_ok() && heap.stats().imported == 0,
    );
    Ok(())
}

/// Memory is not imported by another device's heap.
fn other_device(suite: &Suite, stream: StreamId, section: &mut Section) -> Result<(), Error> {
    let own = suite.backend.device();
    let Some(other) = suite.driver.devices.iter().map(|info| info.index).find(|index| *index != own) else {
        return Ok(());
    };
    let there = Heap::builder().conf(&format!("backend:cuda={other}"))?.build()?;
    let heap = heap(suite, "")?;
    let block = heap.alloc(MIB, stream)?;
    let refused = there.import(heap.export(block.address())?);
    section.check(
        &format!("memory of device {own} is refused by a heap on device {other}"),
        refused.as_ref().map_or_else(ToString::to_string, |imported| format!("{imported:?}")),
        matches!(refused, Err(Error::Share(ShareFault::OtherDevice { .. }))),
    );
    Ok(())
}
