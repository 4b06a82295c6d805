//! The least limit at which a replay completes.
//!
//! Limits lie on a grid: step `k` is peak requested × (1 + `k` × 0.0005), rounded down to a granule. The
//! answer is the lowest step that completes together with the 20 steps above it; a single lucky step
//! below does not count. The search is exact on that grid without trying every step:
//! 1. steps 0, 1, 3, 7, … until one completes, then bisection, give a step that completes above one that fails;
//! 2. from there up: 21 steps in a row must complete; at a failure the row starts again above it;
//! 3. from the failure below the row down: a lower row would have to fit between two failures, so one failing
//!    step in every 21 rules out all of them; a step that completes there is looked at from both sides, and
//!    a row of 21 becomes the new answer.
#![forbid(unsafe_code)]

use crate::units::{GRANULE, round_down};
use std::collections::BTreeMap;

/// Steps above the answer that must complete too.
pub const STEPS_ABOVE: u64 = 20;
/// Steps of peak requested in one.
pub const STEPS_PER_PEAK: u64 = 2000;
/// Highest step tried: four times peak requested.
const STEP_MAX: u64 = 3 * STEPS_PER_PEAK;

/// The limit of a step in bytes.
#[must_use]
pub fn limit_of(peak_requested: u64, step: u64) -> u64 {
    let above = u128::from(peak_requested) * u128::from(step) / u128::from(STEPS_PER_PEAK);
    let limit = u128::from(peak_requested) + above;
    round_down(u64::try_from(limit).unwrap_or(u64::MAX), GRANULE)
}

/// Searches the least limit in bytes; `None` if even four times peak requested is not enough.
/// `completes` replays under a limit; it is asked once for each limit, of 0 never.
///
/// # Errors
/// The first error of `completes`.
pub fn search<E>(peak_requested: u64, completes: impl FnMut(u64) -> Result<bool, E>) -> Result<Option<u64>, E> {
    let mut search = Search { peak_requested, completes, known: BTreeMap::new() };
    let Some(start) = search.start()? else { return Ok(None) };
    let Some(mut row) = search.row_from(start)? else { return Ok(None) };
    let mut failing = row.checked_sub(1);
    while let Some(below) = failing.and_then(|failing| failing.checked_sub(STEPS_ABOVE + 1)) {
        if !search.at(below)? {
            failing = Some(below);
            continue;
        }
        let bottom = search.bottom_of(below)?;
        if search.row_from_within(bottom)? {
            row = bottom;
        }
        failing = bottom.checked_sub(1);
    }
    Ok(Some(limit_of(peak_requested, row)))
}

struct Search<F> {
    peak_requested: u64,
    completes: F,
    known: BTreeMap<u64, bool>,
}

impl<E, F: FnMut(u64) -> Result<bool, E>> Search<F> {
    fn at(&mut self, step: u64) -> Result<bool, E> {
        let limit = limit_of(self.peak_requested, step);
        // A heap needs a granule.
        if limit == 0 {
            return Ok(false);
        }
        if let Some(known) = self.known.get(&limit) {
            return Ok(*known);
        }
        let completes = (self.completes)(limit)?;
        self.known.insert(limit, completes);
        Ok(completes)
    }

    /// A step that completes whose predecessor, if any, fails.
    fn start(&mut self) -> Result<Option<u64>, E> {
        let (mut failed, mut step) = (None, 0);
        while !self.at(step)? {
            if step >= STEP_MAX {
                return Ok(None);
            }
            failed = Some(step);
            step = (2 * step + 1).min(STEP_MAX);
        }
        while let Some(low) = failed.filter(|low| low + 1 < step) {
            let middle = u64::midpoint(low, step);
            if self.at(middle)? {
                step = middle;
            } else {
                failed = Some(middle);
            }
        }
        Ok(Some(step))
    }

    /// The first step from `step` up that begins a whole row.
    fn row_from(&mut self, mut step: u64) -> Result<Option<u64>, E> {
        let mut next = step;
        while next <= step + STEPS_ABOVE {
            if !self.at(next)? {
                step = next + 1;
            }
            if step > STEP_MAX {
                return Ok(None);
            }
            next += 1;
        }
        Ok(Some(step))
    }

    fn row_from_within(&mut self, step: u64) -> Result<bool, E> {
        for next in step..=step + STEPS_ABOVE {
            if !self.at(next)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The lowest step of the run of completing steps that `step` belongs to.
    fn bottom_of(&mut self, mut step: u64) -> Result<u64, E> {
        while step > 0 && self.at(step - 1)? {
            step -= 1;
        }
        Ok(step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    const PEAK: u64 = 2000 * GRANULE;

    /// Result in steps, and how many limits were tried.
    fn steps(fails: impl Fn(u64) -> bool) -> (Option<u64>, usize) {
        let mut tried = 0;
        let found = search::<Infallible>(PEAK, |limit| {
            tried += 1;
            Ok(!fails((limit - PEAK) / GRANULE))
        });
        (found.unwrap().map(|limit| (limit - PEAK) / GRANULE), tried)
    }

    fn by_trying_all(fails: impl Fn(u64) -> bool) -> Option<u64> {
        (0..6000).find(|first| (*first..=first + STEPS_ABOVE).all(|step| !fails(step)))
    }

    #[test]
    fn clear_cuts() {
        assert_eq!(steps(|_| false).0, Some(0));
        assert_eq!(steps(|step| step < 7).0, Some(7));
        assert_eq!(steps(|_| true).0, None);
        let (found, tried) = steps(|step| step < 400);
        assert_eq!(found, Some(400));
        assert!(tried < 70, "{tried}");
    }

    #[test]
    fn a_lucky_step_does_not_count() {
        assert_eq!(steps(|step| step < 50 && step != 31).0, Some(50));
        assert_eq!(steps(|step| step < 50 || step == 60).0, Some(61));
        // A whole row below a failure does.
        assert_eq!(steps(|step| step < 10 || step == 100).0, Some(10));
        assert_eq!(steps(|step| step < 10 || step == 30).0, Some(31));
    }

    #[test]
    fn agrees_with_trying_every_step() {
        for seed in 0..300u64 {
            let hash = |step: u64| super::super::stamp::mix((step / (1 + seed % 29)) ^ (seed << 32));
            // The chance to fail falls with the step.
            let fails = |step: u64| hash(step) % 300 > 200 + step / 2;
            assert_eq!(steps(fails).0, by_trying_all(fails), "{seed}");
        }
    }

    #[test]
    fn small_peaks_and_errors() {
        assert_eq!(search::<Infallible>(0, |_| Ok(true)), Ok(None));
        assert_eq!(search::<Infallible>(GRANULE + 5, |_| Ok(true)), Ok(Some(GRANULE)));
        assert_eq!(search(GRANULE, |_| Err("broken")), Err("broken"));
        assert_eq!(limit_of(1000 * GRANULE + 3, 1), 1000 * GRANULE);
        assert_eq!(limit_of(u64::MAX, 6000), round_down(u64::MAX, GRANULE));
    }
}
