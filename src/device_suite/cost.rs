//! What each driver call costs, by handle size: medians of single calls.

use super::memory::{Handles, Reservation};
use super::report::{Section, Table};
use super::{Suite, median, micros, timed};
use xseg::Error;
use xseg::backend::Backend;
use xseg::units::{GIB, MIB};

const SIZES: [u64; 9] = [2, 4, 8, 20, 32, 64, 128, 512, 1024];

/// Runs the section.
///
/// # Errors
/// When the driver refuses a call.
pub fn run(suite: &Suite) -> Result<Section, Error> {
    let mut section = Section::new("Driver calls");
    let mut table = Table::new(&[
        "handle MiB",
        "handles",
        "create µs",
        "map µs",
        "set_access µs",
        "unmap µs",
        "release µs",
        "remap µs",
        "remap GB/s",
        "remap p99 µs",
    ]);
    section.text.push(
        "Medians of single calls on an idle device, in microseconds per handle. Remap: unmap, map and set_access of an existing handle at a new address.".into(),
    );
    // The first calls of a process set up page tables and caches.
    measure(suite, 2 * MIB, 64)?;
    for size in SIZES {
        let bytes = suite.at_most(suite.choose(16 * GIB, 2 * GIB), size * MIB)?;
        let count = (bytes / (size * MIB)).min(suite.choose(1000, 50));
        let mut cost = measure(suite, size * MIB, count as usize)?;
        let medians = cost.calls.each_mut().map(|values| median(values));
        let remap = median(&mut cost.remap);
        let p99 = cost.remap.get(cost.remap.len() * 99 / 100).copied().unwrap_or(remap);
        let rate = (size * MIB) as f64 / remap / 1e3;
        let cells = medians.into_iter().chain([remap, rate, p99]).map(Into::into);
        table.row([size.into(), count.into()].into_iter().chain(cells));
    }
    section.tables.push(table);
    Ok(section)
}

/// Microseconds of each call.
#[derive(Debug, Default)]
struct Cost {
    /// Create, map, set_access, unmap, release.
    calls: [Vec<f64>; 5],
    remap: Vec<f64>,
}

fn measure(suite: &Suite, size: u64, count: usize) -> Result<Cost, Error> {
    let backend = &suite.backend;
    let mut cost = Cost::default();
    let range = Reservation::new(suite, 2 * size * count as u64)?;
    let mut handles = Handles::new(suite, size, 0)?;
    for _ in 0..count {
        let (handle, time) = timed(|| backend.create(size))?;
        handles.all.push(handle);
        cost.calls[0].push(micros(time));
    }
    let at = |place: usize| range.address + place as u64 * size;
    for (place, &handle) in handles.all.iter().enumerate() {
        // SAFETY: a place of its own for each handle; nothing on the device uses any of it, here and below.
        let ((), time) = timed(|| unsafe { backend.map(at(place), handle, size) })?;
        cost.calls[1].push(micros(time));
        // SAFETY: mapped just now.
        let ((), time) = timed(|| unsafe { backend.set_access(at(place), size) })?;
        cost.calls[2].push(micros(time));
    }
    for (place, &handle) in handles.all.iter().enumerate() {
        let ((), time) = timed(|| {
            // SAFETY: mapped above.
            unsafe { backend.unmap(at(place), size) }?;
            // SAFETY: the second half of the range is empty.
            unsafe { backend.map(at(count + place), handle, size) }?;
            // SAFETY: mapped just now.
            unsafe { backend.set_access(at(count + place), size) }
        })?;
        cost.remap.push(micros(time));
    }
    for place in 0..count {
        // SAFETY: mapped above.
        let ((), time) = timed(|| unsafe { backend.unmap(at(count + place), size) })?;
        cost.calls[3].push(micros(time));
    }
    for handle in handles.all.drain(..) {
        // SAFETY: created above, not named again.
        let ((), time) = timed(|| unsafe { backend.release(handle, size) })?;
        cost.calls[4].push(micros(time));
    }
    Ok(cost)
}
