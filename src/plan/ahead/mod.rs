//! Plans made ahead: where each large block of a recorded run is to lie, should the run ask for the same again.
//!
//! [`period`] looks for the step that repeats, [`layout`] chooses the addresses, [`text`] is the file, [`matcher`] says
//! for each request of a running heap whether the plan foresaw it. Nothing here knows a heap.
#![forbid(unsafe_code)]

mod layout;
pub(crate) mod matcher;
mod period;
mod text;

use crate::units::{MIB, RESERVE_MAX, UNIT};
use layout::{Arc, Span};
use std::ops::Range;
use std::path::PathBuf;

/// Requests up to this many bytes are not planned: small pools serve them.
pub(crate) const PLANNED_ABOVE: u64 = MIB;
/// Most blocks of a plan (20 bytes of memory each, 32 while it is followed).
const BLOCKS_MAX: usize = 5_000_000;
/// Most units of addresses.
const TOP_MAX: u64 = RESERVE_MAX / UNIT;
/// A repeating step is planned as such when it covers this share of the large blocks, in per cent.
const COVERED_LEAST: u64 = 50;
/// And when at most this share of its blocks outlives a round.
const OUTLIVING: usize = 8;

/// A large block of a recorded run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordedBlock {
    /// Bytes, as requested.
    pub bytes: u64,
    /// Its stream: any number that tells streams apart.
    pub stream: u64,
    /// Large blocks that were born before its free, itself included: what is born later may have its place. All of
    /// them for a block that is never freed.
    pub until: u32,
    /// The same for blocks of other streams, which must have proof that its last use has passed: as many or more.
    pub until_elsewhere: u32,
}

/// What a plan says of one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    /// Units.
    len: u32,
    /// Streams in order of appearance.
    role: u16,
    /// Entries that were begun before its free; for blocks of the step counted on into its next round.
    until: u32,
    /// Units from the start of the plan's addresses; `None`: not planned.
    offset: Option<u32>,
}

/// Where each large block of a recorded run is to lie: an opening that happens once, and a step that repeats after it, where
/// one was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    entries: Vec<Entry>,
    /// The entries that repeat, up to the last one; empty: none do.
    step: Range<u32>,
    /// Units of addresses.
    top: u32,
}

/// What was found in a recorded run. Sizes in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PlanSummary {
    /// Rounds of the step that repeats; 0: none was found, so that the whole run is planned.
    pub rounds: u32,
    /// Large blocks of one round.
    pub period: u32,
    /// Large blocks before the first round.
    pub before: u32,
    /// Large blocks of all rounds, of the `blocks` that were recorded.
    pub covered: u32,
    /// Large blocks that were recorded.
    pub blocks: u32,
    /// Live in large blocks when the first round begins.
    pub live_before: u64,
    /// Most live at once in what is planned: the least that any placement takes.
    pub peak: u64,
    /// Addresses that the plan takes.
    pub top: u64,
}

/// Why there is no plan, and what to do.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The file cannot be opened or read.
    #[error("cannot read the plan {}: {why}; check the path, or make it by `xseg plan TRACE -o FILE`", path.display())]
    Open {
        /// The path as given.
        path: PathBuf,
        /// The system's words.
        why: String,
    },
    /// The file is something else.
    #[error("the file is no plan: it does not begin with `{HEADER}`; make one by `xseg plan TRACE -o FILE`")]
    Foreign,
    /// The file is a plan of another form.
    #[error("the plan has version `{found}` and this xseg reads {VERSION}; make it anew by `xseg plan TRACE -o FILE`")]
    Version {
        /// What the file says.
        found: String,
    },
    /// A line is not of the form.
    #[error("line {line} of the plan: {why}; the file is damaged, make it anew by `xseg plan TRACE -o FILE`")]
    Line {
        /// Its number, from 1.
        line: u64,
        /// What is wrong.
        why: &'static str,
    },
    /// More or fewer blocks than the file says.
    #[error(
        "the plan says {stated} blocks and holds {found}; the file is cut off, make it anew by `xseg plan TRACE -o FILE`"
    )]
    Count {
        /// Blocks by its second line.
        stated: u64,
        /// Lines of blocks.
        found: u64,
    },
    /// Two blocks that live at the same time share addresses.
    #[error(
        "blocks {first} and {second} of the plan overlap while both live; the file is damaged, make it anew by `xseg plan TRACE -o FILE`"
    )]
    Overlap {
        /// Number of the earlier block, from 0.
        first: u32,
        /// Number of the later one.
        second: u32,
    },
    /// Nothing to plan.
    #[error("the run has no block of more than 1 MiB, and only those are planned; record a longer one")]
    Nothing,
    /// More than a plan may hold.
    #[error("the run has too much to plan: {what}; record a shorter one")]
    TooLarge {
        /// What there is too much of.
        what: &'static str,
    },
}

crate::error::debug_is_the_sentence!(PlanError);

/// First words of a plan's file, and the version that follows them.
const HEADER: &str = "xseg plan";
const VERSION: u32 = 1;

impl Plan {
    /// Makes a plan from a run's large blocks (more than 1 MiB), in order of birth. Takes seconds for 100,000 blocks.
    ///
    /// # Errors
    /// [`PlanError::Nothing`], [`PlanError::TooLarge`].
    pub fn of(recorded: &[RecordedBlock]) -> Result<(Self, PlanSummary), PlanError> {
        let mut roles: Vec<u64> = Vec::new();
        let mut all = Vec::new();
        for block in recorded.iter().filter(|block| block.bytes > PLANNED_ABOVE) {
            let role = roles.iter().position(|stream| *stream == block.stream).unwrap_or_else(|| {
                roles.push(block.stream);
                roles.len() - 1
            });
            let role = u16::try_from(role).map_err(|_| PlanError::TooLarge { what: "more than 65,536 streams" })?;
            let len = block.bytes.div_ceil(UNIT);
            let len = u32::try_from(len).map_err(|_| PlanError::TooLarge { what: "a block of 2 TiB or more" })?;
            all.push((len, role, block.until, block.until_elsewhere));
        }
        if all.is_empty() || all.len() != recorded.len() {
            return Err(PlanError::Nothing);
        }
        if all.len() > BLOCKS_MAX {
            return Err(PlanError::TooLarge { what: "more than 5,000,000 large blocks" });
        }
        let tokens: Vec<u64> = all.iter().map(|(len, role, ..)| token(*len, *role)).collect();
        let found = period::find(&tokens);
        let found = found.filter(|found| {
            // What most of it outlives is no step: a layer of a forward pass.
            let step = found.start..found.start + found.period;
            let outlives = all[step.clone()].iter().zip(step).filter(|(one, at)| one.2 as usize - at > found.period);
            found.covered() as u64 * 100 >= all.len() as u64 * COVERED_LEAST
                && outlives.count() <= found.period / OUTLIVING
        });
        let (before, period, rounds) = found.map_or((all.len(), 0, 0), |f| (f.start, f.period, f.rounds));
        let end = before + period;
        let most = most_frequent(all[..end].iter().map(|block| block.1));
        let mut spans = Vec::with_capacity(end);
        for (at, &(len, role, until, elsewhere)) in all[..end].iter().enumerate() {
            let (mut until, mut elsewhere) = (until as usize, elsewhere as usize);
            if at >= before {
                // As long as in any round; of the last one some may outlive the record.
                for round in 1..rounds - 1 {
                    let later = &all[at + round * period];
                    until = until.max(later.2 as usize - round * period);
                    elsewhere = elsewhere.max(later.3 as usize - round * period);
                }
            }
            let until = until.max(at + 1);
            let elsewhere = if roles.len() == 1 { until } else { elsewhere.max(until) };
            let span = span(at, len, role, until, elsewhere, before, end);
            spans.push(Span { whole: role != most, ..span });
        }
        let layout = layout::layout(&spans, end);
        let top = u32::try_from(layout.top).ok().filter(|top| u64::from(*top) <= TOP_MAX);
        let top = top.ok_or(PlanError::TooLarge { what: "more than 2 TiB live at once" })?;
        let entry = |(span, offset): (&Span, &Option<u32>)| Entry {
            len: span.len,
            role: span.role,
            until: span.until as u32,
            offset: *offset,
        };
        let plan = Self {
            entries: spans.iter().zip(&layout.offsets).map(entry).collect(),
            step: before as u32..end as u32,
            top,
        };
        let live = all[..before].iter().filter(|block| block.2 as usize > before || rounds == 0);
        let live_before = if rounds == 0 { 0 } else { live.map(|block| u64::from(block.0)).sum::<u64>() * UNIT };
        let summary = PlanSummary {
            rounds: rounds as u32,
            period: period as u32,
            before: before as u32,
            covered: (rounds * period) as u32,
            blocks: all.len() as u32,
            live_before,
            peak: layout.bound * UNIT,
            top: u64::from(top) * UNIT,
        };
        Ok((plan, summary))
    }

    /// Blocks that the plan foresees, those of the step once.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Does it foresee nothing? Never so.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Bytes of addresses that the plan takes.
    #[must_use]
    pub fn top(&self) -> u64 {
        u64::from(self.top) * UNIT
    }
}

/// The role of most blocks.
fn most_frequent(roles: impl Iterator<Item = u16>) -> u16 {
    let mut counts: Vec<usize> = Vec::new();
    for role in roles.map(usize::from) {
        counts.resize(counts.len().max(role + 1), 0);
        counts[role] += 1;
    }
    let most = (0..).zip(&counts).max_by_key(|(role, count)| (**count, std::cmp::Reverse(*role)));
    most.map_or(0, |(role, _)| role)
}

/// What a request is known by.
fn token(len: u32, role: u16) -> u64 {
    u64::from(len) << 16 | u64::from(role)
}

/// The times, in births, in which a block holds its place: births before `before` happen once, those from there to `end`
/// again and again.
fn span(at: usize, len: u32, role: u16, until: usize, elsewhere: usize, before: usize, end: usize) -> Span {
    let arcs = |until: usize| -> Option<[Arc; 2]> {
        let until = if at < before && until > end { end } else { until };
        let period = end - before;
        match at {
            at if at < before => Some([at..until.min(end), 0..0]),
            // It would meet itself.
            at if until - at > period => None,
            at if until <= end => Some([at..until, 0..0]),
            at => Some([at..end, before..until - period]),
        }
    };
    let own = arcs(until);
    let wide = arcs(elsewhere).or_else(|| own.is_some().then_some([before..end, 0..0]));
    Span { len, role, whole: false, until: if at < before { until.min(end) } else { until }, own, wide }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A run of `rounds` steps: two blocks that stay, a layer's blocks thrice, freed in reverse order, and a block that
    /// lives on into the next step.
    fn run(rounds: u32) -> Vec<RecordedBlock> {
        let mut all: Vec<RecordedBlock> = Vec::new();
        let born = |all: &mut Vec<RecordedBlock>, mib: u64| {
            all.push(RecordedBlock { bytes: mib * MIB, stream: 3, until: u32::MAX, until_elsewhere: u32::MAX });
            all.len() - 1
        };
        let free = |all: &mut Vec<RecordedBlock>, at: usize| {
            all[at].until = all.len() as u32;
            all[at].until_elsewhere = all.len() as u32;
        };
        born(&mut all, 100);
        born(&mut all, 50);
        let mut carried = None;
        for _ in 0..rounds {
            let layers: Vec<usize> = (0..9).map(|at| born(&mut all, 10 + at % 3)).collect();
            if let Some(carried) = carried.take() {
                free(&mut all, carried);
            }
            for layer in layers.into_iter().rev() {
                let gradient = born(&mut all, 30);
                free(&mut all, layer);
                free(&mut all, gradient);
            }
            carried = Some(born(&mut all, 70));
        }
        let end = all.len() as u32;
        all.iter_mut().for_each(|one| one.until = one.until.min(end));
        all
    }

    #[test]
    fn a_step_is_planned_once_with_all_before_it() {
        let (plan, found) = Plan::of(&run(6)).unwrap();
        assert_eq!((found.rounds, found.period, found.before, found.covered, found.blocks), (6, 19, 2, 114, 116));
        assert_eq!((found.live_before, plan.len()), (150 * MIB, 21));
        // All layers beside what is carried over, and what stays.
        assert_eq!(found.peak, (150 + 3 * (10 + 11 + 12) + 70) * MIB);
        assert_eq!(found.top, found.peak);
        plan.check().unwrap();
    }

    #[test]
    fn what_does_not_come_back_is_planned_as_a_whole() {
        let (plan, found) = Plan::of(&run(1)).unwrap();
        assert_eq!((found.rounds, found.period, found.before), (0, 0, 21));
        assert_eq!((plan.len(), found.blocks, found.covered, found.live_before), (21, 21, 0, 0));
        // Layers whose blocks all stay until the end repeat in size alone.
        let stays =
            |at: u32| RecordedBlock { bytes: u64::from(2 + at % 4) * MIB, stream: 0, until: 400, until_elsewhere: 400 };
        let (_, found) = Plan::of(&(0..400).map(stays).collect::<Vec<_>>()).unwrap();
        assert_eq!((found.rounds, found.before), (0, 400));
    }

    #[test]
    fn what_cannot_be_planned_is_refused() {
        let block = |bytes| RecordedBlock { bytes, stream: 0, until: 9, until_elsewhere: 9 };
        assert_eq!(Plan::of(&[]), Err(PlanError::Nothing));
        assert_eq!(Plan::of(&[block(MIB)]), Err(PlanError::Nothing));
        let much = Plan::of(&[block(1 << 41), block(1 << 40), block(1 << 40)]);
        assert!(matches!(much, Err(PlanError::TooLarge { .. })), "{much:?}");
        assert!(matches!(Plan::of(&[block(u64::MAX)]), Err(PlanError::TooLarge { .. })));
        // Times that cannot be are taken as the nearest that can.
        let odd = RecordedBlock { until: 0, until_elsewhere: u32::MAX, ..block(2 * MIB) };
        let (plan, _) = Plan::of(&[odd, odd]).unwrap();
        plan.check().unwrap();
    }
}
