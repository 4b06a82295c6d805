//! Does a heap ask for what a plan foresaw? A cursor over the plan's blocks.
#![forbid(unsafe_code)]

use super::{Plan, token};

/// Requests in a row that must be those of the plan before it is taken up again.
const GRAM: usize = 16;

/// Requests in a row that were not foreseen after which the plan counts as left.
const STRANGERS: u32 = 16;
/// Requests in a row that must be the ones that were due before a plan that was left is taken up where it was left.
const AGAIN: u32 = 4;

/// What the plan says of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    /// It was foreseen, and is to lie here, in units from the start of the plan's addresses.
    At(u32),
    /// It has no place in the plan, which is followed all the same: it should lie elsewhere.
    Apart,
    /// The plan is not followed at present.
    Anywhere,
}

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Matcher {
    plan: Plan,
    /// The entry that is due, or was when the plan was left; `None`: it is at its end.
    next: Option<u32>,
    /// Requests since then that were not foreseen.
    strangers: u32,
    /// Requests since the plan was left that were those due, one after the other.
    again: u32,
    /// The latest of those that were not foreseen, the newest last.
    window: Vec<u64>,
    gram: usize,
    /// Each `gram` requests of the plan by their hash, with what follows them. Sorted.
    grams: Vec<(u64, u32)>,
    /// Slots of streams in order of appearance.
    roles: Vec<u16>,
    /// Requests so far.
    requests: u64,
}

/// How a plan and the requests so far stand to each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Standing {
    /// Requests so far.
    pub(crate) requests: u64,
    /// A run that was planned as a whole is over.
    pub(crate) ended: bool,
    /// The plan counts as left.
    pub(crate) left: bool,
}

impl Matcher {
    pub(crate) fn new(plan: Plan) -> Self {
        let (end, period) = (plan.entries.len(), plan.step.len());
        let gram = GRAM.min(period);
        // The step's end is followed by its beginning. A run that is planned as a whole is not begun anywhere else.
        let step = plan.step.start as usize..end;
        let again = step.start..(step.start + gram).min(end);
        let tokens: Vec<u64> =
            plan.entries[step].iter().chain(&plan.entries[again]).map(|entry| token(entry.len, entry.role)).collect();
        let windows = tokens.windows(gram.max(1)).enumerate().map(|(at, window)| (hash(window), at + gram));
        let follows = |at: usize| plan.step.start + (at % period.max(1)) as u32;
        let mut grams: Vec<(u64, u32)> = windows.map(|(hash, next)| (hash, follows(next))).collect();
        grams.sort_unstable();
        grams.dedup();
        let (window, roles) = (Vec::with_capacity(gram), Vec::new());
        Self { plan, next: Some(0), strangers: 0, again: 0, window, gram, grams, roles, requests: 0 }
    }

    pub(crate) fn standing(&self) -> Standing {
        Standing { requests: self.requests, ended: self.next.is_none(), left: self.strangers > STRANGERS }
    }

    /// Notes a request of `len` units by the stream with this slot, and says what the plan makes of it.
    pub(crate) fn request(&mut self, len: u32, slot: u16) -> Answer {
        self.requests += 1;
        let token = token(len, self.role(slot));
        if let Some(next) = self.next
            && self.strangers <= STRANGERS
            && token == self.token_of(next)
        {
            return self.foreseen(next);
        }
        self.strangers = self.strangers.saturating_add(1);
        if self.window.len() == self.gram.max(1) {
            self.window.remove(0);
        }
        self.window.push(token);
        if let Some(found) = self.resume() {
            self.forget();
            self.next = Some(found);
            return Answer::Apart;
        }
        match self.next {
            Some(_) if self.strangers <= STRANGERS => Answer::Apart,
            Some(next) => {
                // Counted from the first that was due; a stranger among them starts anew.
                let due = (0..self.again).try_fold(next, |at, _| self.after(at));
                let is_due = |at: u32| token == self.token_of(at);
                self.again = if due.is_some_and(is_due) { self.again + 1 } else { u32::from(is_due(next)) };
                if self.again == AGAIN {
                    self.next = due.and_then(|at| self.after(at));
                    self.forget();
                }
                Answer::Anywhere
            }
            None => Answer::Anywhere,
        }
    }

    /// The request is the one that was due.
    fn foreseen(&mut self, at: u32) -> Answer {
        self.next = self.after(at);
        self.forget();
        self.plan.entries[at as usize].offset.map_or(Answer::Apart, Answer::At)
    }

    fn forget(&mut self) {
        (self.strangers, self.again) = (0, 0);
        self.window.clear();
    }

    fn token_of(&self, at: u32) -> u64 {
        let entry = self.plan.entries[at as usize];
        token(entry.len, entry.role)
    }

    /// The entry after one.
    fn after(&self, at: u32) -> Option<u32> {
        match at + 1 {
            next if next < self.plan.step.end => Some(next),
            _ if self.plan.step.is_empty() => None,
            _ => Some(self.plan.step.start),
        }
    }

    /// Where the plan goes on after the latest requests: the first such place after the one where it was left, else the
    /// first of all.
    fn resume(&self) -> Option<u32> {
        if self.grams.is_empty() || self.window.len() < self.gram {
            return None;
        }
        let hash = hash(&self.window);
        let from = self.grams.partition_point(|gram| *gram < (hash, self.next.unwrap_or(0)));
        let first = self.grams.partition_point(|gram| gram.0 < hash);
        [from, first].into_iter().filter_map(|at| self.grams.get(at)).find(|gram| gram.0 == hash).map(|gram| gram.1)
    }

    /// The stream's number in order of appearance.
    fn role(&mut self, slot: u16) -> u16 {
        let known = self.roles.iter().position(|known| *known == slot);
        known.unwrap_or_else(|| {
            self.roles.push(slot);
            self.roles.len() - 1
        }) as u16
    }

    /// Has the plan a step that repeats?
    pub(crate) fn repeats(&self) -> bool {
        !self.plan.step.is_empty()
    }

    /// Units of addresses that the plan takes.
    pub(crate) fn top(&self) -> u32 {
        self.plan.top
    }
}

/// A number for some requests in a row.
fn hash(tokens: &[u64]) -> u64 {
    // Equal numbers of unlike requests cost a wrong guess, which the next request ends.
    tokens.iter().fold(0, |hash, token| (hash ^ token).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::ahead::RecordedBlock;
    use crate::units::MIB;

    /// A plan of `before` blocks that stay, then rounds of `period` blocks of sizes that no other has.
    fn matcher(before: u32, period: u32, rounds: u32) -> (Matcher, Vec<u32>) {
        let all = before + period * rounds;
        let step = |at: u32| if at < before { at } else { before + (at - before) % period.max(1) };
        let block = |at: u32| RecordedBlock {
            bytes: (2 + u64::from(step(at))) * MIB,
            stream: 7,
            until: if at < before { all } else { at + 1 },
            until_elsewhere: all,
        };
        let recorded: Vec<RecordedBlock> = (0..all).map(block).collect();
        let (plan, found) = Plan::of(&recorded).unwrap();
        assert_eq!((found.before, found.period, found.rounds), (before, period, rounds));
        let lens = recorded.iter().map(|block| (block.bytes / 512) as u32).collect();
        (Matcher::new(plan), lens)
    }

    fn foreseen(answer: Answer) -> bool {
        matches!(answer, Answer::At(_))
    }

    #[test]
    fn a_run_as_recorded_is_foreseen_and_its_step_for_ever() {
        let (mut matcher, lens) = matcher(5, 30, 3);
        assert!(lens.iter().all(|len| foreseen(matcher.request(*len, 4))));
        let first: Vec<Answer> = lens[5..35].iter().map(|len| matcher.request(*len, 4)).collect();
        for _ in 0..4 {
            let again: Vec<Answer> = lens[5..35].iter().map(|len| matcher.request(*len, 4)).collect();
            assert_eq!(again, first);
        }
    }

    #[test]
    fn another_stream_is_a_stranger() {
        let (mut matcher, lens) = matcher(5, 30, 3);
        assert!(foreseen(matcher.request(lens[0], 4)));
        assert_eq!(matcher.request(lens[1], 5), Answer::Apart);
        assert!(foreseen(matcher.request(lens[1], 4)));
    }

    #[test]
    fn a_few_strangers_are_kept_apart_and_many_end_it_until_it_goes_on_where_it_was_left() {
        let (mut matcher, lens) = matcher(5, 30, 3);
        assert!(lens[..20].iter().all(|len| foreseen(matcher.request(*len, 1))));
        assert!((0..16).all(|_| matcher.request(9999, 1) == Answer::Apart));
        assert!(foreseen(matcher.request(lens[20], 1)), "what was due is still due");
        assert!((0..16).all(|_| matcher.request(9999, 1) == Answer::Apart));
        assert!((0..100).all(|_| matcher.request(9999, 1) == Answer::Anywhere));
        // Three that were due may be chance, four are not.
        assert!(lens[21..24].iter().all(|len| matcher.request(*len, 1) == Answer::Anywhere));
        assert_eq!(matcher.request(9999, 1), Answer::Anywhere);
        assert!(lens[21..25].iter().all(|len| matcher.request(*len, 1) == Answer::Anywhere));
        assert!(lens[25..].iter().all(|len| foreseen(matcher.request(*len, 1))));
    }

    #[test]
    fn a_step_that_is_begun_anew_or_in_its_middle_is_taken_up_after_as_many_requests_as_tell() {
        for from in [21, 25, 30] {
            let (mut matcher, lens) = matcher(5, 30, 3);
            assert!(lens[..20].iter().all(|len| foreseen(matcher.request(*len, 1))));
            let later: Vec<u32> = lens[5..35].iter().cycle().skip(from - 5).take(60).copied().collect();
            // What was due when it was left comes later still.
            assert!(!later[..16].iter().any(|len| foreseen(matcher.request(*len, 1))), "{from}");
            assert!(later[16..].iter().all(|len| foreseen(matcher.request(*len, 1))), "{from}");
        }
    }

    #[test]
    fn a_run_planned_as_a_whole_is_followed_once() {
        let (mut matcher, lens) = matcher(40, 0, 0);
        assert!(lens.iter().all(|len| foreseen(matcher.request(*len, 1))));
        assert!(lens.iter().chain(&lens).all(|len| matcher.request(*len, 1) == Answer::Anywhere));
    }

    #[test]
    fn short_steps_too() {
        for period in 1..6 {
            let (mut matcher, lens) = matcher(2, period, 9);
            assert!(lens.iter().all(|len| foreseen(matcher.request(*len, 1))));
            assert!((0..50).all(|_| !foreseen(matcher.request(9999, 1))));
            let more = lens[2..].iter().map(|len| foreseen(matcher.request(*len, 1)));
            assert!(more.skip(8).all(|foreseen| foreseen), "{period}");
        }
    }
}
