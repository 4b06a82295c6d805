//! Growth to a given size and back by bare create, map and set_access loops, by handle size.

use super::memory::{Handles, Reservation, map};
use super::report::{Section, Table};
use super::{Suite, median, timed};
use std::time::Duration;
use xseg::Error;
use xseg::backend::Backend;
use xseg::units::{GIB, MIB};

const SIZES: [u64; 7] = [2, 20, 64, 128, 256, 512, 1024];

/// Runs the section.
///
/// # Errors
/// When the driver refuses a call.
pub fn run(suite: &Suite) -> Result<Section, Error> {
    let bytes = suite.at_most(suite.growth, GIB)?;
    let rounds = suite.choose(5, 1);
    let mut section = Section::new("Growth");
    section.text.push(format!(
        "Growth to {} GiB in one go and giving it back, medians of {rounds} rounds in milliseconds; handles of the given size, the rest in one smaller handle.",
        bytes / GIB
    ));
    let mut table = Table::new(&["handle MiB", "handles", "grow ms", "shrink ms", "grow / cuMemAlloc"]);
    let plain = rounds_of(rounds, || plain(suite, bytes))?;
    for size in SIZES {
        let sizes = split(bytes, size * MIB);
        let (grow, shrink) = rounds_of(rounds, || bare(suite, &sizes))?;
        let cells = [size.into(), (sizes.len() as u64).into(), grow.into(), shrink.into(), (grow / plain.0).into()];
        table.row(cells);
    }
    table.row(["cuMemAlloc".into(), 1u64.into(), plain.0.into(), plain.1.into(), 1.0.into()]);
    section.tables.push(table);
    Ok(section)
}

/// Handles of `size`, and one for what is left.
pub fn split(bytes: u64, size: u64) -> Vec<u64> {
    let mut sizes = vec![size; (bytes / size) as usize];
    sizes.extend(Some(bytes % size).filter(|rest| *rest > 0));
    sizes
}

/// Medians in milliseconds of growing and shrinking; the first round is not counted.
fn rounds_of(
    rounds: usize,
    mut once: impl FnMut() -> Result<(Duration, Duration), Error>,
) -> Result<(f64, f64), Error> {
    let (mut grow, mut shrink) = (Vec::new(), Vec::new());
    for round in 0..=rounds {
        let (up, down) = once()?;
        if round > 0 {
            grow.push(up.as_secs_f64() * 1e3);
            shrink.push(down.as_secs_f64() * 1e3);
        }
    }
    Ok((median(&mut grow), median(&mut shrink)))
}

/// Times a bare loop that grows by handles of these sizes, and one that gives them back.
///
/// # Errors
/// When the driver refuses a call.
pub fn bare(suite: &Suite, sizes: &[u64]) -> Result<(Duration, Duration), Error> {
    let backend = &suite.backend;
    let range = Reservation::new(suite, sizes.iter().sum())?;
    let mut handles = Handles::new(suite, 0, 0)?;
    let ((), grow) = timed(|| {
        let mut at = range.address;
        for &size in sizes {
            let handle = backend.create(size)?;
            handles.all.push(handle);
            // SAFETY: the next place of the range, which nothing uses.
            unsafe { map(backend, at, handle, size) }?;
            at += size;
        }
        Ok::<_, Error>(())
    })?;
    let ((), shrink) = timed(|| {
        let mut at = range.address;
        for (&size, handle) in sizes.iter().zip(handles.all.drain(..)) {
            // SAFETY: mapped above, and never used.
            unsafe { backend.unmap(at, size) }?;
            // SAFETY: created above, not named again.
            unsafe { backend.release(handle, size) }?;
            at += size;
        }
        Ok::<_, Error>(())
    })?;
    Ok((grow, shrink))
}

fn plain(suite: &Suite, bytes: u64) -> Result<(Duration, Duration), Error> {
    let (address, grow) = timed(|| suite.backend.allocate_plain(bytes))?;
    // SAFETY: allocated just now, never used.
    let ((), shrink) = timed(|| unsafe { suite.backend.free_plain(address) })?;
    Ok((grow, shrink))
}

#[cfg(test)]
mod tests {
    use super::split;

    #[test]
    fn the_rest_gets_a_handle_of_its_own() {
        assert_eq!(split(64, 20), [20, 20, 20, 4]);
        assert_eq!(split(64, 32), [32, 32]);
    }
}
