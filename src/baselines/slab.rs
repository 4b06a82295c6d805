//! Slabs: powers of two up to 1 MiB, cut from slabs of 2 MiB; above, one object of whole 2 MiB a slab.
//!
//! A freed object serves only requests of its own size. Empty slabs go back when memory is short.

use super::classes::{Class, Classes};
use crate::units::{GRANULE, MIB, UNIT, round_up};

pub(super) fn new() -> Classes {
    Classes::new("slab", |bytes| {
        if bytes <= MIB {
            return Some(Class { size: bytes.next_power_of_two().max(UNIT), chunk: GRANULE, kept: true });
        }
        round_up(bytes, GRANULE).map(|size| Class { size, chunk: size, kept: true })
    })
}
