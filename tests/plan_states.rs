//! What a heap says of a plan that it follows, or does not: in its statistics, its notes and its log.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod support;

use std::fmt::{Debug, Write as _};
use std::sync::{Arc, Mutex};
use support::{Lab, S0, sim, sim_with};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};
use xseg::backend::sim::SimOptions;
use xseg::units::{GIB, MIB};
use xseg::{Plan, PlanState, RecordedBlock};

/// A plan of `rounds` rounds of 30 blocks of different sizes, which all live to the end of their round, and its setting.
/// One round is a run that is planned as a whole.
fn planned(rounds: u32) -> (tempfile::TempDir, String) {
    planned_times(1, rounds)
}

/// As [`planned`], of blocks so many times as large.
fn planned_times(times: u64, rounds: u32) -> (tempfile::TempDir, String) {
    let block = |at: u32| RecordedBlock {
        bytes: times * size(at % 30),
        stream: 0,
        until: (at / 30 + 1) * 30,
        until_elsewhere: (at / 30 + 1) * 30,
    };
    let (plan, found) = Plan::of(&(0..30 * rounds).map(block).collect::<Vec<_>>()).unwrap();
    assert_eq!(found.period, if rounds > 1 { 30 } else { 0 });
    let mut text = Vec::new();
    plan.write(&mut text).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.plan");
    std::fs::write(&path, text).unwrap();
    let conf = format!("plan:{}", path.display());
    (folder, conf)
}

fn size(at: u32) -> u64 {
    (2 + u64::from(at)) * MIB
}

/// One round as planned.
fn round(lab: &Lab) {
    let blocks: Vec<_> = (0..30).map(|at| lab.alloc(size(at), S0)).collect();
    drop(blocks);
}

/// Requests that no plan here foresees.
fn strangers(lab: &Lab, count: usize) {
    (0..count).for_each(|_| drop(lab.alloc(99 * MIB, S0)));
}

#[track_caller]
fn state(lab: &Lab) -> PlanState {
    let state = lab.heap.stats().plan;
    let noted: Vec<String> = lab.heap.notes().into_iter().filter(|note| note.contains("plan")).collect();
    let expected: Vec<String> = state.is_in_vain().then(|| state.to_string()).into_iter().collect();
    assert_eq!(noted, expected, "what is in vain is noted, once");
    state
}

#[test]
fn a_plan_is_waited_for_followed_left_and_taken_up_again() {
    assert_eq!(state(&sim("")), PlanState::None);
    let (_folder, plan) = planned(3);
    let lab = sim(&plan);
    assert_eq!(state(&lab), PlanState::Waiting);
    drop(lab.alloc(1000, S0));
    assert_eq!(state(&lab), PlanState::Waiting, "small blocks are not planned");
    round(&lab);
    assert_eq!(state(&lab), PlanState::Followed);
    strangers(&lab, 16);
    assert_eq!(state(&lab), PlanState::Followed, "a few others do not end it");
    strangers(&lab, 1);
    assert_eq!(state(&lab), PlanState::Left);
    round(&lab);
    assert_eq!(state(&lab), PlanState::Followed);
    let (_folder, plan) = planned(1);
    let lab = sim(&plan);
    round(&lab);
    assert_eq!((state(&lab), lab.heap.stats().planned), (PlanState::Ended, 30));
    round(&lab);
    assert_eq!((state(&lab), lab.heap.stats().planned), (PlanState::Ended, 30));
}

/// What was logged as a warning.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<String>>>);

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() == Level::WARN
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &Event<'_>) {
        struct Text(String);
        impl Visit for Text {
            fn record_debug(&mut self, _: &Field, value: &dyn Debug) {
                write!(self.0, "{value:?}").unwrap();
            }
        }
        let mut text = Text(String::new());
        event.record(&mut text);
        self.0.lock().unwrap().push(text.0);
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// Runs `work` on a heap whose plan it makes vain: the state is `expected`, and is logged once.
#[track_caller]
fn in_vain(lab: &Lab, expected: PlanState, work: impl Fn(&Lab)) {
    let log = Log::default();
    tracing::subscriber::with_default(log.clone(), || (0..3).for_each(|_| work(lab)));
    assert_eq!((state(lab), lab.heap.stats().planned), (expected, 0));
    let log = log.0.lock().unwrap();
    assert_eq!(log.len(), 1, "{log:?}");
    let shown = expected.to_string();
    // A count in it goes on.
    assert_eq!(log[0].split(char::is_numeric).next(), shown.split(char::is_numeric).next());
    assert!(shown.contains("not followed") && shown.contains("; "), "what happened; what to do: {shown}");
}

#[test]
fn a_plan_of_something_else_says_so() {
    let (_folder, plan) = planned(3);
    in_vain(&sim(&plan), PlanState::Unmatched { requests: 60 }, |lab| strangers(lab, 20));
}

#[test]
fn a_plan_that_takes_more_than_the_limit_says_so() {
    let (_folder, plan) = planned(3);
    // 2 to 31 MiB: 495, in whole granules.
    let (bytes, limit) = (496 * MIB, 494 * MIB);
    in_vain(&sim(&format!("{plan},limit:494MiB")), PlanState::TooLarge { bytes, limit }, |lab| {
        drop(lab.alloc(size(0), S0));
        drop(lab.alloc(size(1), S0));
    });
    let lab = sim(&format!("{plan},limit:496MiB"));
    round(&lab);
    assert_eq!((state(&lab), lab.heap.stats().planned), (PlanState::Followed, 30));
}

#[test]
fn a_plan_for_which_no_addresses_are_left_says_so() {
    let (_folder, plan) = planned_times(8, 3);
    // The least that a heap reserves, and no reservation is larger.
    let options = SimOptions { reserve_max: Some(2 * GIB), ..SimOptions::default() };
    let lab = sim_with(&format!("{plan},reserve:2GiB"), options);
    in_vain(&lab, PlanState::NoAddresses { bytes: 8 * 495 * MIB }, |lab| {
        drop(lab.alloc(8 * size(0), S0));
        drop(lab.alloc(8 * size(1), S0));
    });
}
