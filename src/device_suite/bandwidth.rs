//! Bandwidth of a copy kernel on mapped handles, by handle size and layout, beside `cuMemAlloc`.

use super::memory::Mapped;
use super::report::{Section, Table};
use super::{Suite, median, shuffled, timed};
use xseg::backend::{Backend, StreamId};
use xseg::units::{GIB, MIB};
use xseg::{Error, units};

const SIZES: [u64; 6] = [2, 20, 64, 128, 512, 1024];

/// Least share of the plain memory's bandwidth that mapped memory must reach.
const LEAST: f64 = 0.98;

/// Runs the section.
///
/// # Errors
/// When the driver refuses a call.
pub fn run(suite: &Suite) -> Result<Section, Error> {
    let bytes = suite.at_most(suite.choose(8 * GIB, GIB), GIB)?;
    let mut section = Section::new("Bandwidth");
    section.text.push(format!(
        "A copy kernel over {} (source and target of this size), GB/s read and written together, median of repeated runs. \
         Layouts: *in order*; *shuffled*: handles created in another order than mapped; *apart*: the target's addresses start 32 GiB \
         into their reservation; *crossed*: source and target made alternately.",
        units::human(bytes)
    ));
    let plain = plain(suite, bytes)?;
    let mut table = Table::new(&["handle MiB", "in order", "shuffled", "apart", "crossed", "least / cuMemAlloc"]);
    for size in SIZES {
        let count = (bytes / (size * MIB)) as usize;
        let used = count as u64 * size * MIB;
        let order: Vec<usize> = (0..count).collect();
        let mixed = shuffled(count);
        let rates = [
            pair(suite, size * MIB, [&order, &order], 0, used)?,
            pair(suite, size * MIB, [&mixed, &mixed], 0, used)?,
            pair(suite, size * MIB, [&order, &order], 32 * GIB, used)?,
            pair(suite, size * MIB, [&order, &mixed], 2 * MIB, used)?,
        ];
        let least = rates.iter().copied().fold(f64::INFINITY, f64::min) / plain;
        let cells = rates.into_iter().chain([least]).map(Into::into);
        table.row(std::iter::once(size.into()).chain(cells));
        if size <= 64 {
            let what =
                format!("kernel bandwidth on handles of {size} MiB, share of cuMemAlloc memory (at least {LEAST})");
            section.check(&what, format!("{least:.4}"), least >= LEAST);
        }
    }
    table.row(["cuMemAlloc".into(), plain.into(), "".into(), "".into(), "".into(), 1.0.into()]);
    section.tables.push(table);
    Ok(section)
}

fn pair(suite: &Suite, size: u64, orders: [&[usize]; 2], apart: u64, bytes: u64) -> Result<f64, Error> {
    let from = Mapped::new(suite, size, orders[0], 0)?;
    let to = Mapped::new(suite, size, orders[1], apart)?;
    // SAFETY: both ranges are mapped for `bytes` and used by nobody else.
    unsafe { rate(suite, to.address, from.address, bytes) }
}

fn plain(suite: &Suite, bytes: u64) -> Result<f64, Error> {
    let from = suite.backend.allocate_plain(bytes)?;
    let to = match suite.backend.allocate_plain(bytes) {
        Ok(to) => to,
        Err(error) => {
            // SAFETY: allocated above, not used.
            unsafe { suite.backend.free_plain(from) }?;
            return Err(error.into());
        }
    };
    // SAFETY: both were allocated with `bytes`.
    let rate = unsafe { rate(suite, to, from, bytes) };
    // SAFETY: allocated above; freeing waits for the device.
    unsafe { suite.backend.free_plain(from) }?;
    // SAFETY: as above.
    unsafe { suite.backend.free_plain(to) }?;
    rate
}

/// GB/s, read and written together, of copying `bytes`.
///
/// # Errors
/// When the driver refuses a call.
///
/// # Safety
/// Both ranges may be used by the device until this returns.
pub unsafe fn rate(suite: &Suite, to: u64, from: u64, bytes: u64) -> Result<f64, Error> {
    let stream = suite.backend.create_stream()?;
    let rates = measure(suite, stream, to, from, bytes);
    suite.backend.quiesce()?;
    // SAFETY: created above.
    unsafe { suite.backend.destroy_stream(stream) }?;
    Ok(median(&mut rates?))
}

fn measure(suite: &Suite, stream: StreamId, to: u64, from: u64, bytes: u64) -> Result<Vec<f64>, Error> {
    let copies = suite.choose(10, 2);
    let mut rates = Vec::new();
    for round in 0..suite.choose(8, 3) {
        let ((), time) = timed(|| {
            for _ in 0..copies {
                // SAFETY: the ranges are the caller's of `rate`.
                unsafe { suite.kernels.copy(stream, to, from, bytes) }?;
            }
            // SAFETY: a stream of this device.
            unsafe { suite.backend.synchronize(stream) }
        })?;
        // The first round fills the caches of page tables.
        if round > 0 {
            rates.push(2.0 * bytes as f64 * f64::from(copies) / time.as_secs_f64() / 1e9);
        }
    }
    Ok(rates)
}
