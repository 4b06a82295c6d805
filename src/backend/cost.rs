//! The frozen cost model `h200-a`: microseconds per handle and call, by handle size.
//!
//! Source: medians measured on an NVIDIA H200, driver 580.159, CUDA 13.0, one GPU in a virtual
//! machine, one run. Linear between rows, constant outside them. Better models get other names.
#![forbid(unsafe_code)]

use crate::error::DriverCall;

/// Name of the model, as reports print it.
pub const MODEL: &str = "h200-a";

/// Handle size in MiB, then create, map, set_access, unmap, release in microseconds.
const TABLE: [(u64, [f64; 5]); 9] = [
    (2, [9.6, 1.1, 26.0, 17.0, 10.0]),
    (4, [8.3, 0.6, 25.0, 17.0, 11.0]),
    (8, [8.5, 0.6, 25.0, 17.0, 12.0]),
    (20, [9.6, 0.7, 25.0, 17.0, 16.0]),
    (32, [10.9, 0.6, 26.0, 18.0, 24.0]),
    (64, [11.6, 0.6, 27.0, 17.0, 40.0]),
    (128, [11.6, 0.7, 29.0, 17.0, 99.0]),
    (512, [16.5, 2.0, 43.0, 21.0, 186.0]),
    (1024, [27.1, 1.1, 55.0, 26.0, 344.0]),
];

/// Modelled time of one call on one handle of `bytes`, in nanoseconds. Calls that take no handle cost nothing.
#[must_use]
pub fn nanos(call: DriverCall, bytes: u64) -> u64 {
    let column = match call {
        DriverCall::Create => 0,
        DriverCall::Map => 1,
        DriverCall::SetAccess => 2,
        DriverCall::Unmap => 3,
        DriverCall::Release => 4,
        _ => return 0,
    };
    let mib = bytes as f64 / (1u64 << 20) as f64;
    let above = TABLE.partition_point(|row| (row.0 as f64) < mib);
    let micros = if above == 0 {
        TABLE[0].1[column]
    } else if above == TABLE.len() {
        TABLE[above - 1].1[column]
    } else {
        let (low, high) = (&TABLE[above - 1], &TABLE[above]);
        let share = (mib - low.0 as f64) / (high.0 - low.0) as f64;
        low.1[column] + share * (high.1[column] - low.1[column])
    };
    (micros * 1000.0).round() as u64
}

/// The model `h200-b`: what a call costs between other work, on a device that is nearly full. Not frozen.
pub const MODEL_IN_USE: &str = "h200-b";

/// What [`nanos`] leaves out where calls come one by one between other work, in nanoseconds a call.
///
/// Source: the traces replayed on an H200 filled up to their least memory (driver 580.159, 2026-11-29): create 21 to 34,
/// map and `set_access` together 29 to 42, unmap 20 to 40 microseconds a call, against 9 to 11, 26 and 17 in tight loops.
#[must_use]
pub fn in_use_nanos(call: DriverCall) -> u64 {
    match call {
        DriverCall::Create => 16_000,
        DriverCall::Map => 5_500,
        DriverCall::SetAccess => 3_500,
        DriverCall::Unmap => 7_000,
        _ => 0,
    }
}

/// Modelled nanoseconds of growth by one handle: create, map, set_access.
#[must_use]
pub fn grow_nanos(bytes: u64) -> u64 {
    nanos(DriverCall::Create, bytes) + nanos(DriverCall::Map, bytes) + nanos(DriverCall::SetAccess, bytes)
}

/// Modelled nanoseconds of moving one handle: unmap, map, set_access.
#[must_use]
pub fn move_nanos(bytes: u64) -> u64 {
    nanos(DriverCall::Unmap, bytes) + nanos(DriverCall::Map, bytes) + nanos(DriverCall::SetAccess, bytes)
}

/// Modelled nanoseconds of giving one mapped handle back: unmap, release.
#[must_use]
pub fn shrink_nanos(bytes: u64) -> u64 {
    nanos(DriverCall::Unmap, bytes) + nanos(DriverCall::Release, bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::MIB;

    #[test]
    fn rows_and_interpolation() {
        assert_eq!(nanos(DriverCall::Create, 2 * MIB), 9600);
        assert_eq!(nanos(DriverCall::Release, 64 * MIB), 40_000);
        assert_eq!(nanos(DriverCall::Release, 48 * MIB), 32_000);
        assert_eq!(nanos(DriverCall::Release, 4096 * MIB), 344_000);
        assert_eq!(move_nanos(2 * MIB), 44_100);
        assert_eq!(nanos(DriverCall::Reserve, 1 << 40), 0);
    }
}
