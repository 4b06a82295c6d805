//! The step that repeats in a sequence of requests.
#![forbid(unsafe_code)]

use std::collections::HashMap;

/// Requests in a row by which places are compared when candidates are looked for.
const GRAM: usize = 16;
/// Periods that are tried, those that most places speak for.
const CANDIDATES: usize = 32;

/// A step of `period` requests that is asked for `rounds` times in a row, first at `start`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Repeat {
    pub(super) start: usize,
    pub(super) period: usize,
    /// Two at least.
    pub(super) rounds: usize,
}

impl Repeat {
    /// Requests of all rounds.
    pub(super) fn covered(self) -> usize {
        self.period * self.rounds
    }
}

/// The repeat that covers most; of those that cover as much, the one with the shortest period.
pub(super) fn find(tokens: &[u64]) -> Option<Repeat> {
    let mut best: Option<Repeat> = None;
    for period in candidates(tokens) {
        let Some(found) = longest(tokens, period) else { continue };
        let better = best.is_none_or(|best| {
            (found.covered(), std::cmp::Reverse(found.period)) > (best.covered(), std::cmp::Reverse(best.period))
        });
        if better {
            best = Some(found);
        }
    }
    best
}

/// Distances between places that look alike, the frequent ones first.
fn candidates(tokens: &[u64]) -> Vec<usize> {
    let mut last: HashMap<&[u64], usize> = HashMap::new();
    let mut votes: HashMap<usize, usize> = HashMap::new();
    let gram = GRAM.min(tokens.len() / 8).max(1);
    for (at, gram) in tokens.windows(gram).enumerate() {
        if let Some(before) = last.insert(gram, at) {
            *votes.entry(at - before).or_default() += 1;
        }
    }
    let mut found: Vec<(usize, usize)> = votes.into_iter().map(|(distance, votes)| (votes, distance)).collect();
    found.sort_unstable_by_key(|(votes, distance)| (std::cmp::Reverse(*votes), *distance));
    found.into_iter().take(CANDIDATES).map(|(_, distance)| distance).collect()
}

/// The longest run of whole rounds of this period.
fn longest(tokens: &[u64], period: usize) -> Option<Repeat> {
    let mut best: Option<Repeat> = None;
    let mut start = 0;
    for at in 0..=tokens.len() - period {
        if at + period < tokens.len() && tokens[at] == tokens[at + period] {
            continue;
        }
        // What lies from `start` to here equals what comes a period later.
        let rounds = (at - start) / period + 1;
        if rounds >= 2 && best.is_none_or(|best| rounds > best.rounds) {
            best = Some(Repeat { start, period, rounds });
        }
        start = at + 1;
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers without order.
    fn noise(seed: u64, len: usize) -> Vec<u64> {
        let mut state = seed;
        let step = |_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            state >> 40
        };
        (0..len).map(step).collect()
    }

    #[test]
    fn equal_steps_are_found_behind_an_opening_and_before_an_end() {
        for (before, period, rounds) in [(0, 1, 9), (7, 3, 2), (100, 50, 20), (1, 700, 3)] {
            let (opening, step) = (noise(1, before), noise(2, period));
            let tokens = [opening, step.repeat(rounds), noise(3, period / 2)].concat();
            assert_eq!(find(&tokens), Some(Repeat { start: before, period, rounds }));
        }
    }

    #[test]
    fn a_step_of_equal_layers_is_one_step() {
        let layers = noise(1, 12).repeat(24);
        let step = [noise(2, 5), layers, noise(3, 9)].concat();
        let found = find(&step.repeat(8)).unwrap();
        assert_eq!(found, Repeat { start: 0, period: step.len(), rounds: 8 });
    }

    #[test]
    fn what_does_not_repeat_has_no_step() {
        for seed in 0..50 {
            assert_eq!(find(&noise(seed, 3000)), None);
        }
        // One request twice in a row, in a sequence of few sizes, covers next to nothing.
        let few: Vec<u64> = noise(9, 3000).iter().map(|n| n % 8).collect();
        assert!(find(&few).is_none_or(|found| found.covered() < 30));
        assert_eq!(find(&[]), None);
        assert_eq!(find(&[1]), None);
    }
}
