//! Units of size and address that every layer shares.
//!
//! Two grids matter. Blocks start and end on the **unit** grid (512 B, the alignment that CUDA
//! libraries expect of an allocation). Physical memory comes in **granules** (2 MiB, the smallest
//! multiple that `cuMemCreate` takes on every data-centre GPU). Inside a heap, addresses are
//! counted in units from the start of the heap's address space, so that they fit in 32 bits
//! (2 TiB); only backends see real addresses.

/// Bytes in one unit: the grid on which blocks are split and coalesced.
pub const UNIT: u64 = 512;

/// Bytes in one granule: the smallest piece of physical memory (brief, section 2).
pub const GRANULE: u64 = 2 << 20;

/// Units in one granule.
pub const UNITS_PER_GRANULE: u32 = (GRANULE / UNIT) as u32;

/// One kibibyte in bytes.
pub const KIB: u64 = 1 << 10;
/// One mebibyte in bytes.
pub const MIB: u64 = 1 << 20;
/// One gibibyte in bytes.
pub const GIB: u64 = 1 << 30;
/// Most addresses of one heap in bytes, as they are counted in 32 bits of units, and so the longest block.
pub(crate) const RESERVE_MAX: u64 = UNIT << 32;

/// Rounds `bytes` up to a multiple of `to`; `None` on overflow. `to` must not be zero.
#[must_use]
pub const fn round_up(bytes: u64, to: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(to)
}

/// Rounds `bytes` down to a multiple of `to`. `to` must not be zero.
#[must_use]
pub const fn round_down(bytes: u64, to: u64) -> u64 {
    bytes - bytes % to
}

/// Granules needed to hold `bytes`.
#[must_use]
pub const fn granules_for(bytes: u64) -> u64 {
    bytes.div_ceil(GRANULE)
}

/// First granule boundary at or after `unit`, in granules.
#[must_use]
pub(crate) const fn granule_ceil(unit: u32) -> u32 {
    unit.div_ceil(UNITS_PER_GRANULE)
}

/// Granule that holds `unit`.
#[must_use]
pub(crate) const fn granule_floor(unit: u32) -> u32 {
    unit / UNITS_PER_GRANULE
}

/// A size for people: `12.000 MiB`, `1.500 GiB`, `512 B`.
#[must_use]
pub fn human(bytes: u64) -> String {
    match bytes {
        b if b >= GIB => format!("{:.3} GiB", b as f64 / GIB as f64),
        b if b >= MIB => format!("{:.3} MiB", b as f64 / MIB as f64),
        b if b >= KIB => format!("{:.1} KiB", b as f64 / KIB as f64),
        b => format!("{b} B"),
    }
}

/// A count with its noun: `1 event`, `2 events`. For nouns whose plural ends in a plain s.
#[cfg(feature = "cli")]
#[must_use]
pub(crate) fn counted(count: u64, noun: &str) -> String {
    if count == 1 { format!("1 {noun}") } else { format!("{count} {noun}s") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding() {
        assert_eq!(round_up(0, GRANULE), Some(0));
        assert_eq!(round_up(1, GRANULE), Some(GRANULE));
        assert_eq!(round_up(u64::MAX, GRANULE), None);
        assert_eq!(round_down(GRANULE + 1, GRANULE), GRANULE);
        assert_eq!(granules_for(GRANULE + 1), 2);
        assert_eq!(granule_ceil(UNITS_PER_GRANULE + 1), 2);
        assert_eq!(granule_floor(UNITS_PER_GRANULE + 1), 1);
    }

    #[cfg(feature = "cli")]
    #[test]
    fn counts_for_people() {
        assert_eq!([0, 1, 2].map(|n| counted(n, "event")), ["0 events", "1 event", "2 events"]);
    }

    #[test]
    fn sizes_for_people() {
        assert_eq!(human(512), "512 B");
        assert_eq!(human(3 * MIB / 2), "1.500 MiB");
        assert_eq!(human(70 * GIB), "70.000 GiB");
    }
}
