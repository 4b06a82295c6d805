//! How large handles are made: pure functions of counters, in granules.
//!
//! The driver's cost is per handle, so handles should be few; a handle cannot be split, so what lies
//! idle beside a live block in a large one is lost to requests elsewhere. Every constant here was
//! chosen by measurement over all traces (`policy-notes.md`).
#![forbid(unsafe_code)]

use crate::config::Handles;

/// A handle of memory that stays is at most this share of the limit.
const STAYING: u64 = 384;
/// A handle of memory that comes and goes is at most this share of the limit.
const CHURNING: u64 = 700;
/// With `handles:small`, at most this share of the limit, whatever the memory.
const SMALL: u64 = 2800;
/// Memory counts as staying until a third of what was allocated has been freed again.
const CHURN_AFTER: u64 = 3;
/// A handle is at most this share of what may still be created: sizes fall as memory fills, so that
/// the last of it is made of handles that fit anywhere.
const LAST: u64 = 16;
/// A request gets handles of up to this share of its own length, where that is more: a block of many handles has idle ends
/// as any other, and only those are lost.
const REQUEST: u64 = 80;
/// Growth beyond what was asked is at most this share of what may still be created, or [`SPARE_LEAST`].
const SPARE: u64 = 64;
const SPARE_LEAST: u64 = 4;

/// Largest handle of `defrag:eager` in granules, as long as the slack is kept.
const EAGER: u32 = 4;
/// The slack counts as exceeded when this share of what it allows lies above that, and [`EAGER`] granules.
const CROWDED: u64 = 250;

/// A handle behind addresses of a plan is at most this share of them, and this many times `handle_max`: what a plan puts there
/// fits as long as it is followed. Where a step repeats, programs come back to it; a run that is planned as a whole
/// may go on otherwise, and what lies idle in partly live handles is then missing.
const PLANNED_STEP: u64 = 128;
const PLANNED_RUN: u64 = 384;
const PLANNED_TIMES: u32 = 4;

/// Largest power of two that is at most `n`; 1 for 0.
const fn floor_pow2(n: u64) -> u32 {
    match n {
        0 => 1,
        n if n >= 1 << 31 => 1 << 31,
        n => 1 << n.ilog2(),
    }
}

/// Largest handle for a large request of `asked` under a limit, while `headroom` may still be created: `taken` and `freed`
/// are what large blocks were given and gave back so far, in any one unit.
pub(crate) fn handle_size(
    handles: Handles,
    asked: u64,
    limit: u64,
    headroom: u64,
    handle_max: u32,
    (taken, freed): (u64, u64),
) -> u32 {
    // Half a granule less: so much is lost at a block's edge whatever the handle, and in a small heap it counts.
    let of_limit = |share: u64| (limit.saturating_mul(2) / share).saturating_sub(1) / 2;
    let share = match handles {
        Handles::Small => of_limit(SMALL),
        Handles::Large if freed.saturating_mul(CHURN_AFTER) < taken.max(1) => limit / STAYING,
        Handles::Large => of_limit(CHURNING),
    };
    handle_max.min(floor_pow2(share.max(asked / REQUEST).min(headroom / LAST)))
}

/// Largest handles for memory that stays and for memory that comes and goes, under a limit and with all of it left, whatever
/// the request: what `handle_max` comes to.
#[cfg(feature = "cli")]
pub(crate) fn largest_handles(handles: Handles, limit: u64, handle_max: u32, eager: bool) -> (u32, u32) {
    let most = if eager { eager_handle_size(0, handle_max) } else { handle_max };
    let size = |churn| handle_size(handles, 0, limit, limit, most, churn);
    (size((1, 0)), size((1, 1)))
}

/// Largest handle of `defrag:eager` after reserved was `crowded` times above what the slack allows when memory was planned
/// for: each time idle memory in partly live handles was in the way, and half the size leaves half of it.
pub(crate) fn eager_handle_size(crowded: u32, handle_max: u32) -> u32 {
    handle_max.min((EAGER >> crowded.min(EAGER.ilog2())).max(1))
}

/// Does so much more than `allowed` exist that handles of `defrag:eager` should be smaller? In granules.
pub(crate) fn is_crowded(reserved: u64, allowed: u64) -> bool {
    reserved.saturating_sub(allowed) > (allowed / CROWDED).max(u64::from(EAGER))
}

/// Largest handle behind addresses of a plan that takes `planned` granules, of a step that repeats or of a run; no smaller
/// than for what comes and goes elsewhere.
pub(crate) fn planned_handle_size(planned: u64, repeats: bool, limit: u64, headroom: u64, handle_max: u32) -> u32 {
    let share = planned / if repeats { PLANNED_STEP } else { PLANNED_RUN };
    let size = handle_max.saturating_mul(PLANNED_TIMES).min(floor_pow2(share));
    size.max(handle_size(Handles::Large, 0, limit, headroom, handle_max, (1, 1)))
}

/// Granules that a growth step creates at least, when `step` is asked for.
pub(crate) fn growth_step(step: u64, headroom: u64) -> u32 {
    u32::try_from(step.min((headroom / SPARE).max(SPARE_LEAST))).unwrap_or(u32::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_fall_with_churn_and_with_what_is_left() {
        let gib = 512;
        let size = |limit, headroom, churn| handle_size(Handles::Large, 64, limit, headroom, 32, churn);
        assert_eq!(size(24 * gib, 24 * gib, (100, 0)), 32);
        assert_eq!(size(24 * gib, 24 * gib, (0, 0)), 32, "the first block");
        assert_eq!(size(24 * gib, 24 * gib, (100, 33)), 32);
        assert_eq!(size(24 * gib, 24 * gib, (100, 34)), 16);
        assert_eq!(size(u64::MAX / 4, u64::MAX / 4, (100, 90)), 32);
        assert_eq!(size(1600, 1600, (100, 90)), 1);
        assert_eq!(size(32, 32, (1, 1)), 1);
        assert_eq!(size(24 * gib, 100, (100, 0)), 4);
        assert_eq!(size(24 * gib, 0, (100, 0)), 1);
    }

    #[test]
    #[cfg(feature = "cli")]
    fn the_largest_handles_are_what_the_limit_allows() {
        let gib = 512;
        assert_eq!(largest_handles(Handles::Large, u64::MAX / 4, 16, false), (16, 16));
        assert_eq!(largest_handles(Handles::Large, 8 * gib, 16, false), (8, 4));
        assert_eq!(largest_handles(Handles::Large, 8 * gib, 16, true), (4, 4));
        assert_eq!(largest_handles(Handles::Large, 1, 16, false), (1, 1));
        assert_eq!(largest_handles(Handles::Small, 24 * gib, 16, false), (2, 2));
    }

    #[test]
    fn small_handles_are_a_share_of_the_limit_whatever_the_memory() {
        let gib = 512;
        let size = |limit, headroom, churn| handle_size(Handles::Small, 64, limit, headroom, 32, churn);
        for churn in [(100, 0), (100, 90)] {
            assert_eq!([9, 24, 26, 48, 140].map(|limit| size(limit * gib, limit * gib, churn)), [1, 2, 4, 8, 16]);
        }
        assert_eq!(size(24 * gib, 32, (100, 0)), 2);
        assert_eq!(
            handle_size(Handles::Small, 4096, 24 * gib, 24 * gib, 32, (1, 1)),
            32,
            "a large request gets larger ones"
        );
    }

    #[test]
    fn a_block_of_many_handles_gets_larger_ones() {
        let size = |asked, headroom, handle_max| handle_size(Handles::Large, asked, 5000, headroom, handle_max, (1, 1));
        assert_eq!([127, 256, 512, 1024, 2048, 4096].map(|asked| size(asked, 1000, 32)), [4, 4, 4, 8, 16, 32]);
        assert_eq!((size(4096, 1000, 1), size(4096, 64, 32)), (1, 4), "handle_max and what is left bound it");
    }

    #[test]
    fn eager_handles_halve_when_the_slack_is_exceeded() {
        assert_eq!([0, 1, 2, 3, u32::MAX].map(|crowded| eager_handle_size(crowded, 32)), [4, 2, 1, 1, 1]);
        assert_eq!([1000, 1004, 1005].map(|reserved| is_crowded(reserved, 1000)), [false, false, true]);
        assert_eq!([10_040, 10_041, 9000].map(|reserved| is_crowded(reserved, 10_000)), [false, true, false]);
        assert_eq!(eager_handle_size(0, 2), 2);
    }

    #[test]
    fn planned_handles_are_a_share_of_the_plan() {
        let gib = 512;
        let size = |planned, repeats, limit| planned_handle_size(planned, repeats, limit, limit, 16);
        assert_eq!((size(24 * gib, true, 24 * gib), size(24 * gib, false, 24 * gib)), (64, 32));
        assert_eq!((size(8 * gib, true, 8 * gib), size(8 * gib, false, 8 * gib)), (32, 8));
        assert_eq!((size(1, true, 24 * gib), size(1, false, 1)), (16, 1), "no smaller than elsewhere");
    }

    #[test]
    fn growth_beyond_the_request_falls_with_what_is_left() {
        assert_eq!(growth_step(32, 1 << 40), 32);
        assert_eq!(growth_step(32, 640), 10);
        assert_eq!(growth_step(32, 0), 4);
        assert_eq!(growth_step(0, 1 << 40), 1);
    }
}
