//! The engine and the verification against a heap of one page a block, on a tiny memory.
#![allow(unsafe_code, reason = "the toy heap calls a backend")]

use super::*;
use crate::backend::inject::tests::FakeBackend;
use crate::backend::inject::{Fault, InjectBackend};
use crate::backend::{Backend, Event, EventScope, PhysicalAllocation};
use crate::units::GRANULE;
use std::sync::Arc;

impl MemoryAccess for FakeBackend {
    fn write(&self, pieces: &[Piece]) -> Result<(), AccessFault> {
        for piece in pieces {
            for (address, byte) in (piece.address..).zip(piece.bytes()) {
                self.put(address, *byte).ok_or(AccessFault { address, reason: "not mapped".into() })?;
            }
        }
        Ok(())
    }

    fn read(&self, pieces: &mut [Piece]) -> Result<(), AccessFault> {
        for piece in pieces {
            let start = piece.address;
            for (address, byte) in (start..).zip(piece.bytes_mut()) {
                *byte = self.get(address).ok_or(AccessFault { address, reason: "not mapped".into() })?;
            }
        }
        Ok(())
    }
}

/// When a toy heap takes a freed page again.
#[derive(Clone, Copy, PartialEq)]
enum Reuse {
    /// In place by any stream, at once: right with one stream only.
    AtOnce,
    /// In place, by its own stream at once, by others and after `record_use` when an event has passed.
    WhenPassed,
    /// At another address, the old one unmapped once an event has passed.
    Moved,
}

struct Freed {
    address: u64,
    stream: Option<u64>,
    event: Event,
}

/// One granule a block; at most `pages` of them.
struct Toy {
    backend: Arc<InjectBackend>,
    reuse: Reuse,
    pages: usize,
    live: std::collections::HashMap<u64, (u64, PhysicalAllocation, bool)>,
    free: Vec<(Freed, PhysicalAllocation)>,
    next: u64,
    figures: Figures,
}

impl Subject for Toy {
    fn name(&self) -> &str {
        "toy"
    }

    fn alloc(&mut self, bytes: u64, stream: u64) -> Result<u64, SubjectError> {
        assert!(bytes <= GRANULE);
        let usable = self.free.iter().position(|(freed, _)| match self.reuse {
            Reuse::AtOnce => true,
            Reuse::WhenPassed => freed.stream == Some(stream) || self.backend.is_done(&freed.event).unwrap(),
            Reuse::Moved => self.backend.is_done(&freed.event).unwrap(),
        });
        let (address, handle) = match usable.map(|at| self.free.swap_remove(at)) {
            Some((freed, handle)) => {
                let from = freed.address;
                self.backend.recycle(freed.event);
                if self.reuse == Reuse::Moved {
                    self.next += GRANULE;
                    // SAFETY: `from` is mapped, `next` was never used.
                    unsafe { self.backend.relocate(from, self.next, handle, GRANULE) }.unwrap();
                    (self.next, handle)
                } else {
                    (from, handle)
                }
            }
            None if self.live.len() + self.free.len() == self.pages => {
                return Err(SubjectError::OutOfMemory("full".into()));
            }
            None => {
                self.next += GRANULE;
                let handle = self.backend.create(GRANULE).unwrap();
                // SAFETY: an address that was never used.
                unsafe { self.backend.map(self.next, handle, GRANULE) }.unwrap();
                // SAFETY: mapped in the line above.
                unsafe { self.backend.set_access(self.next, GRANULE) }.unwrap();
                self.figures.peak_reserved += GRANULE;
                (self.next, handle)
            }
        };
        self.live.insert(address, (stream, handle, false));
        self.figures.peak_allocated = self.figures.peak_allocated.max(self.live.len() as u64 * GRANULE);
        Ok(address)
    }

    fn free(&mut self, address: u64) -> Result<(), SubjectError> {
        let (stream, handle, shared) = self.live.remove(&address).ok_or(SubjectError::Other("unknown".into()))?;
        let event = self.backend.record(EventScope::Context).unwrap();
        self.free.push((Freed { address, stream: (!shared).then_some(stream), event }, handle));
        Ok(())
    }

    fn record_use(&mut self, address: u64, _stream: u64) -> Result<(), SubjectError> {
        self.live.get_mut(&address).ok_or(SubjectError::Other("unknown".into()))?.2 = true;
        Ok(())
    }

    fn figures(&self) -> Figures {
        self.figures.clone()
    }

    fn finish(&mut self) -> Result<(), SubjectError> {
        self.figures.driver_nanos += 1_000_000;
        Ok(())
    }
}

/// Replays on a device of `pages` granules with a lag of 100 µs.
fn verified(text: &str, reuse: Reuse, pages: usize, fault: Option<Fault>) -> Outcome {
    let trace = Trace::from_bytes("toy", text.as_bytes()).unwrap();
    let clock = Timeline::new(Duration::from_micros(100));
    let fake = Arc::new(FakeBackend::new(&clock));
    let device = Device::new(&clock, fake.clone(), trace.streams.len() == 1);
    let due = device.clone();
    let backend = Arc::new(InjectBackend::new(fake, fault).on_clock(move || due.run_due()));
    let (live, figures) = Default::default();
    let mut toy = Toy { backend, reuse, pages, live, free: Vec::new(), next: 0, figures };
    let mut options = Options { clock: Some(clock), device: Some(Arc::new(device)), progress: None };
    replay(&trace, &mut toy, &mut options)
}

fn mismatches(outcome: &Outcome) -> u64 {
    outcome.findings.as_ref().unwrap().mismatches
}

/// Blocks that live for 30 µs each, every 20 µs, besides eight that stay.
fn churn(streams: u64, uses: bool) -> String {
    let mut text: String = (0..8).map(|id| format!("a,{id},2097152,0,0\n")).collect();
    for id in 8..200u64 {
        let (time, own) = (id * 20, id / 2 % streams);
        text += &format!("a,{id},{},{own},{time}\n", id % 40 * 1000);
        if uses {
            text += &format!("u,{id},{},{}\n", (own + 1) % streams, time + 5);
        }
        if id > 8 {
            text += &format!("f,{},{}\n", id - 1, time + 10);
        }
    }
    text
}

#[test]
fn a_right_heap_passes() {
    for (streams, uses) in [(1, false), (2, false), (3, true)] {
        for reuse in [Reuse::WhenPassed, Reuse::Moved] {
            let outcome = verified(&churn(streams, uses), reuse, 40, None);
            assert!(outcome.completed() && outcome.ooms() == 0);
            assert_eq!(mismatches(&outcome), 0, "{streams} streams: {:?}", outcome.findings);
            assert!(outcome.findings.unwrap().stamps_checked > 350);
            assert_eq!(outcome.teardown, Duration::from_millis(1));
        }
    }
    assert_eq!(mismatches(&verified(&churn(1, false), Reuse::AtOnce, 10, None)), 0);
}

#[test]
fn every_injected_fault_is_found() {
    for fault in [Fault::Swap, Fault::Lost, Fault::EarlyUnmap] {
        let outcome = verified(&churn(1, false), Reuse::Moved, 40, Some(fault));
        assert!(mismatches(&outcome) > 0, "{fault:?}");
    }
    let lost = verified(&churn(1, false), Reuse::Moved, 40, Some(Fault::Lost));
    assert!(lost.findings.unwrap().examples[0].ends_with("holds zeros"));
    let early = verified(&churn(1, false), Reuse::Moved, 40, Some(Fault::EarlyUnmap));
    assert!(early.findings.unwrap().examples[0].contains("not mapped"));
}

#[test]
fn reuse_across_streams_without_proof_is_found() {
    assert!(mismatches(&verified(&churn(2, false), Reuse::AtOnce, 40, None)) > 0);
    assert!(mismatches(&verified(&churn(2, true), Reuse::AtOnce, 40, None)) > 0);
    assert!(mismatches(&verified(&churn(2, true), Reuse::WhenPassed, 40, Some(Fault::EarlyUnmap))) > 0);
}

#[test]
fn the_first_failed_allocation_ends_a_replay() {
    let outcome = verified("a,0,10,0,0\na,1,10,0,1\na,2,10,0,2\nf,0,3\n", Reuse::WhenPassed, 2, None);
    assert_eq!((outcome.completed(), outcome.ooms(), outcome.events_run), (false, 1, 2));
    assert_eq!(outcome.findings.as_ref().unwrap().stamps_checked, 2, "what lives at the end is checked");
    let trace = Trace::from_bytes("toy", b"a,0,10,0,0\n").unwrap();
    let report = Report::new(&trace, "toy", "host", String::new(), None, &outcome);
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!((&json["error"], &json["limit"], &json["mismatches"]), (&"full".into(), &().into(), &0.into()));
    assert_eq!((report.is_good(), json["peak_reserved"].as_u64()), (false, Some(2 * GRANULE)));
    assert!(json.get("least").is_none() && json["driver_calls"]["set_access"] == 0);
}
