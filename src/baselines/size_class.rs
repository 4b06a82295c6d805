//! Size classes: small ones from 1 KiB to 1 MiB, medium ones to 256 MiB, and large requests as they are.
//!
//! Four classes a doubling. Small objects are cut from chunks of 2 MiB, a medium one is a chunk that is
//! kept after its free, a large one goes straight to the device and back.

use super::classes::{Class, Classes};
use crate::units::{GRANULE, KIB, MIB, round_up};

/// Rounds up to one of four steps between powers of two.
fn step(bytes: u64) -> u64 {
    bytes.next_multiple_of((bytes.next_power_of_two() / 8).max(1))
}

pub(super) fn new() -> Classes {
    Classes::new("size-class", |bytes| match bytes {
        ..=MIB => Some(Class { size: step(bytes.max(KIB)), chunk: GRANULE, kept: true }),
        bytes if bytes <= 256 * MIB => {
            let size = step(bytes).next_multiple_of(GRANULE);
            Some(Class { size, chunk: size, kept: true })
        }
        bytes => round_up(bytes, GRANULE).map(|size| Class { size, chunk: size, kept: false }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn four_steps_between_powers_of_two() {
        assert_eq!([step(1024), step(1025), step(1281), step(1537), step(1793)], [1024, 1280, 1536, 1792, 2048]);
        // At most a fifth is lost to rounding.
        assert!((1024..100_000).all(|bytes| step(bytes) >= bytes && step(bytes) * 4 <= bytes * 5));
    }
}
