//! How large handles are made: pure functions of counters, in granules.
//!
//! The driver's cost is per handle, so handles should be few; a handle cannot be split, so what lies
//! idle beside a live block in a large one is lost to requests elsewhere. Every constant here was
//! chosen by measurement over all traces (`policy-notes.md`).
#![forbid(unsafe_code)]

/// A handle of memory that stays is at most this share of the limit.
const STAYING: u64 = 384;
/// A handle of memory that comes and goes is at most this share of the limit.
const CHURNING: u64 = 1024;
/// Memory counts as staying until a quarter of what was allocated has been freed again.
const CHURN_AFTER: u64 = 4;
/// A handle is at most this share of what may still be created: sizes fall as memory fills, so that
/// the last of it is made of handles that fit anywhere.
const LAST: u64 = 16;

/// Largest power of two that is at most `n`; 1 for 0.
pub(crate) const fn floor_pow2(n: u64) -> u32 {
    match n {
        0 => 1,
        n if n >= 1 << 31 => 1 << 31,
        n => 1 << n.ilog2(),
    }
}

/// Largest handle for large blocks under a limit: `taken` and `freed` are what large blocks were given
/// and gave back so far, in any one unit.
pub(crate) fn handle_cap(limit: u64, handle_max: u32, taken: u64, freed: u64) -> u32 {
    if freed.saturating_mul(CHURN_AFTER) < taken {
        return handle_max.min(floor_pow2(limit / STAYING));
    }
    // Half a granule less: so much is lost at a block's edge whatever the handle, and in a small heap it counts.
    let halves = (limit.saturating_mul(2) / CHURNING).saturating_sub(1);
    handle_max.min(floor_pow2(halves / 2))
}

/// Largest handle while `budget` may still be created.
pub(crate) fn handle_size(budget: u64, cap: u32) -> u32 {
    cap.min(floor_pow2(budget / LAST))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_fall_with_churn_and_with_what_is_left() {
        let gib = 512;
        assert_eq!(handle_cap(24 * gib, 32, 100, 0), 32);
        assert_eq!(handle_cap(24 * gib, 32, 100, 25), 8);
        assert_eq!(handle_cap(u64::MAX / 4, 32, 100, 90), 32);
        assert_eq!(handle_cap(2374, 32, 100, 90), 1);
        assert_eq!(handle_cap(32, 32, 1, 1), 1);
        assert_eq!(handle_size(512, 32), 32);
        assert_eq!(handle_size(100, 32), 4);
        assert_eq!(handle_size(0, 32), 1);
    }
}
