//! Patterns without a model behind them: what makes free memory unusable, at its purest.

use super::script::Script;
use crate::units::MIB;
use rand::RngExt;

/// Every second of equal blocks goes, then blocks of twice the size are wanted; and again at the next size.
pub(super) fn alternating_holes(script: &mut Script, rounds: u64) {
    for round in 0..2 * rounds {
        let mut bytes = (8 + round % 3) * MIB;
        let mut live = script.alloc_all((0..256).map(|_| bytes), 0);
        for _ in 0..3 {
            let mut keep = Vec::new();
            let mut count = 0;
            for (number, id) in live.into_iter().enumerate() {
                if number % 2 == 0 {
                    script.free(id);
                    count += 1;
                } else {
                    keep.push(id);
                }
            }
            bytes *= 2;
            keep.extend(script.alloc_all((0..count / 2).map(|_| bytes), 0));
            live = keep;
        }
        script.free_all(live);
        script.pause(10_000);
    }
}

/// Share of the limit that is live in [`churn`], in percent.
pub(super) const CHURN_FULL: u64 = 98;

/// Blocks of random size come and go while as much as possible below a bound is live.
pub(super) fn churn(script: &mut Script, rounds: u64) {
    const BOUND: u64 = 8192 * MIB;
    let mut live = Vec::new();
    let mut bytes = 0;
    for _ in 0..1500 * rounds {
        // Sizes over four powers of two, small ones as often as large ones.
        let size = (1u64 << script.rng.random_range(20..=27)) + script.rng.random_range(0..1 << 20);
        while bytes + size > BOUND {
            let (id, size) = live.swap_remove(script.rng.random_range(0..live.len()));
            script.free(id);
            bytes -= size;
        }
        live.push((script.alloc(size, 0), size));
        bytes += size;
    }
}
