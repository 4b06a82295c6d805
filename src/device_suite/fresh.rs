//! The first growth of all, before the device's memory was used: what a program pays at its start.

use super::report::{Section, Table};
use super::{Suite, bandwidth, growth, micros, timed};
use xseg::backend::StreamId;
use xseg::units::{GIB, MIB, human};
use xseg::{Error, Heap};

const HANDLE: u64 = 64 * MIB;

/// Runs the section; it must be the first.
///
/// # Errors
/// When the driver refuses a call.
pub(crate) fn run(suite: &Suite) -> Result<Section, Error> {
    let mut section = Section::default();
    let bytes = suite.at_most(suite.growth, GIB)?;
    section.text.push(format!(
        "Growth to {} in one go, each way once, in this order: memory that was given back costs more to get again. \
         GB/s of a copy kernel from one half of it to the other, read and written together.",
        human(bytes)
    ));
    let mut table = Table::new(&["order", "way", "ms", "copy GB/s"]);
    let (mut heap_times, mut bare_times, mut rates) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..2u64 {
        let conf = format!("handle_max:{}MiB,growth:exact", HANDLE / MIB);
        let heap = Heap::builder().conf(&conf)?.backend(suite.backend.clone()).build()?;
        let (block, took) = timed(|| heap.alloc(bytes, StreamId(0)))?;
        let half = bytes / 2;
        // SAFETY: both halves are of a live block that nothing else uses.
        let rate = unsafe { bandwidth::rate(suite, block.address() + half, block.address(), half) }?;
        let ms = micros(took) / 1e3;
        heap_times.push(ms);
        rates.push(rate);
        table.row([(3 * round + 1).into(), "heap, handles of 64 MiB".into(), ms.into(), rate.into()]);
        drop((block, heap));
        let bare = micros(growth::bare(suite, &growth::split(bytes, HANDLE))?.0) / 1e3;
        bare_times.push(bare);
        table.row([(3 * round + 2).into(), "bare create, map, set_access".into(), bare.into(), "".into()]);
        let (plain, took) = timed(|| suite.backend.allocate_plain(bytes))?;
        // SAFETY: allocated above with this length.
        let rate = unsafe { bandwidth::rate(suite, plain + half, plain, half) };
        // SAFETY: allocated above; nothing uses it any more.
        unsafe { suite.backend.free_plain(plain) }?;
        let (ms, rate) = (micros(took) / 1e3, rate?);
        rates.push(rate);
        table.row([(3 * round + 3).into(), "one cuMemAlloc".into(), ms.into(), rate.into()]);
    }
    section.tables.push(table);
    let share = rates[0].min(rates[2]) / rates[1].max(rates[3]);
    section.check(
        "kernel bandwidth on what the heap grew, share of cuMemAlloc memory (at least 0.98)",
        format!("{share:.4}"),
        share >= 0.98,
    );
    // What the driver takes differs from lease to lease: 48 to 82 ms for a bare loop.
    section.check(
        &format!("the first growth to {} takes at most 50 ms, or 1.1 times a bare loop after it", human(bytes)),
        format!("{:.1} ms, bare {:.1} ms", heap_times[0], bare_times[0]),
        heap_times[0] <= 50.0 || heap_times[0] <= 1.1 * bare_times[0],
    );
    Ok(section)
}
