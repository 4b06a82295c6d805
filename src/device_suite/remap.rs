//! Remapping scattered handles by a bare loop of driver calls: what the heap is measured against.

use super::memory::{Handles, Reservation, map};
use super::report::{Section, Table};
use super::{Suite, median, micros, shuffled, timed};
use std::time::Duration;
use xseg::Error;
use xseg::backend::Backend;
use xseg::units::{GIB, MIB};

/// Handle sizes in MiB that the section measures.
pub const SIZES: [u64; 3] = [2, 20, 64];

/// Runs the section.
///
/// # Errors
/// When the driver refuses a call.
pub fn run(suite: &Suite) -> Result<Section, Error> {
    let mut section = Section::new("Remap");
    let rounds = suite.choose(9, 2);
    section.text.push(format!(
        "Handles scattered over a reservation are put side by side in another, each by unmap, map, set_access, in a bare loop; medians of {rounds} rounds."
    ));
    let mut table = Table::new(&["handle MiB", "handles", "GiB", "µs per handle", "GB/s"]);
    for size in SIZES {
        let bytes = suite.at_most(suite.choose(8 * GIB, GIB), size * MIB)?;
        let count = (bytes / (size * MIB)) as usize;
        let mut times = bare(suite, size * MIB, count, rounds)?.into_iter().map(micros).collect::<Vec<_>>();
        let time = median(&mut times);
        let moved = size * MIB * count as u64;
        let cells = [moved as f64 / GIB as f64, time / count as f64, moved as f64 / time / 1e3];
        table.row([size.into(), (count as u64).into()].into_iter().chain(cells.map(Into::into)));
    }
    section.tables.push(table);
    Ok(section)
}

/// Times `rounds` rounds of moving `count` handles of `size` bytes from scattered places to a row.
///
/// # Errors
/// When the driver refuses a call.
pub fn bare(suite: &Suite, size: u64, count: usize, rounds: usize) -> Result<Vec<Duration>, Error> {
    let backend = &suite.backend;
    // Every second place of the first range is used, in no order.
    let scattered = Reservation::new(suite, 2 * size * count as u64)?;
    let row = Reservation::new(suite, size * count as u64)?;
    let handles = Handles::new(suite, size, count)?;
    let places: Vec<u64> =
        shuffled(count).into_iter().map(|place| scattered.address + 2 * place as u64 * size).collect();
    let mut times = Vec::with_capacity(rounds);
    for (&place, &handle) in places.iter().zip(&handles.all) {
        // SAFETY: a place of its own for each; nothing on the device uses any of it, here and below.
        unsafe { map(backend, place, handle, size) }?;
    }
    for _ in 0..rounds {
        let ((), time) = timed(|| {
            for (index, (&from, &handle)) in places.iter().zip(&handles.all).enumerate() {
                let to = row.address + index as u64 * size;
                // SAFETY: mapped there.
                unsafe { backend.unmap(from, size) }?;
                // SAFETY: the row is empty there.
                unsafe { backend.map(to, handle, size) }?;
                // SAFETY: mapped just now.
                unsafe { backend.set_access(to, size) }?;
            }
            Ok::<_, Error>(())
        })?;
        times.push(time);
        for (index, (&place, &handle)) in places.iter().zip(&handles.all).enumerate() {
            // SAFETY: the way back.
            unsafe { backend.unmap(row.address + index as u64 * size, size) }?;
            // SAFETY: empty since the move.
            unsafe { map(backend, place, handle, size) }?;
        }
    }
    for &place in &places {
        // SAFETY: mapped there.
        unsafe { backend.unmap(place, size) }?;
    }
    Ok(times)
}
