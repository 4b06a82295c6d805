//! The simulated driver keeps the driver's rules, and the faulty one fails where it is told to.
#![allow(unsafe_code, clippy::unwrap_used, reason = "tests call the driver's operations directly")]
#![allow(
    clippy::undocumented_unsafe_blocks,
    clippy::multiple_unsafe_ops_per_block,
    reason = "the simulated driver checks every promise itself"
)]

use std::sync::Arc;
use std::time::Duration;
use xseg::backend::fault::{FaultPlan, FaultRule, FaultyBackend, LoggedCall};
use xseg::backend::sim::{SimBackend, SimOptions};
use xseg::backend::timeline::Timeline;
use xseg::backend::{Backend, EventScope, PhysicalAllocation, StreamId};
use xseg::error::DriverCall;
use xseg::units::{GIB, GRANULE, MIB};

const MS: Duration = Duration::from_millis(1);

fn sim(total: u64) -> SimBackend {
    SimBackend::new(SimOptions { total: Some(total), ..SimOptions::default() })
}

/// Reserves a GiB and maps one accessible handle of `bytes` at its start.
fn mapped(backend: &impl Backend, bytes: u64) -> (u64, PhysicalAllocation) {
    let at = backend.reserve(GIB).unwrap();
    let handle = backend.create(bytes).unwrap();
    unsafe { backend.map(at, handle, bytes).unwrap() };
    unsafe { backend.set_access(at, bytes).unwrap() };
    (at, handle)
}

fn give_back(backend: &impl Backend, at: u64, handle: PhysicalAllocation, bytes: u64) {
    unsafe { backend.unmap(at, bytes).unwrap() };
    unsafe { backend.release(handle, bytes).unwrap() };
    unsafe { backend.unreserve(at, GIB).unwrap() };
}

#[test]
fn a_clean_life_leaves_nothing() {
    let backend = sim(64 * MIB);
    let (at, handle) = mapped(&backend, 32 * MIB);
    assert_eq!((backend.mapping_count(), backend.handle_count(), backend.memory_in_use()), (1, 1, 32 * MIB));
    assert_eq!(backend.memory().unwrap().free, 32 * MIB);
    assert!(backend.create(34 * MIB).unwrap_err().out_of_memory);
    give_back(&backend, at, handle, 32 * MIB);
    assert!(backend.violations().is_empty() && backend.leftovers().is_empty());
    assert_eq!(SimBackend::new(SimOptions::default()).memory().unwrap().total, u64::MAX);
}

#[test]
fn released_memory_lives_until_its_last_mapping_is_gone() {
    let backend = sim(4 * MIB);
    let (at, handle) = mapped(&backend, GRANULE);
    unsafe { backend.map(at + GRANULE, handle, GRANULE).unwrap() };
    unsafe { backend.release(handle, GRANULE).unwrap() };
    unsafe { backend.unmap(at, GRANULE).unwrap() };
    assert_eq!(backend.memory_in_use(), GRANULE);
    assert!(backend.create(4 * MIB).unwrap_err().out_of_memory);
    unsafe { backend.unmap(at + GRANULE, GRANULE).unwrap() };
    assert_eq!(backend.memory_in_use(), 0);
    unsafe { backend.unreserve(at, GIB).unwrap() };
}

#[test]
fn every_broken_rule_is_an_error_and_is_noted() {
    let backend = sim(GIB);
    backend.disarm();
    let (at, handle) = mapped(&backend, 4 * MIB);
    let other = backend.create(4 * MIB).unwrap();
    let (last, far) = (at + GIB - GRANULE, at + 2 * GIB);
    let broken = unsafe {
        [
            backend.map(at + GRANULE, other, 4 * MIB),
            backend.map(last, other, 4 * MIB),
            backend.map(far, other, 4 * MIB),
            backend.map(at + 8 * MIB + 512, other, 4 * MIB),
            backend.map(at + 8 * MIB, other, GRANULE),
            backend.map(at + 8 * MIB, PhysicalAllocation(99), GRANULE),
            backend.set_access(at, GRANULE),
            backend.set_access(at + 8 * MIB, GRANULE),
            backend.unmap(at, GRANULE),
            backend.unmap(at + GRANULE, GRANULE),
            backend.unmap(at, 8 * MIB),
            backend.unreserve(at, GIB),
            backend.unreserve(at, GRANULE),
            backend.release(PhysicalAllocation(99), GRANULE),
            backend.release(handle, GRANULE),
            backend.use_until(at, 4 * MIB + 1, MS),
        ]
    };
    assert!(broken.iter().all(|done| done.as_ref().is_err_and(|e| !e.out_of_memory)), "{broken:?}");
    assert_eq!(backend.violations().len(), broken.len());
    assert_eq!(backend.reserve(1).unwrap_err().call, DriverCall::Reserve);
    assert_eq!(backend.create(GRANULE + 512).unwrap_err().call, DriverCall::Create);
    // None of it changed anything.
    assert_eq!((backend.mapping_count(), backend.handle_count(), backend.memory_in_use()), (1, 2, 8 * MIB));
    assert_eq!(backend.leftovers(), ["1 mappings left over", "2 handles left over", "1 reservations left over"]);
    // A released handle is not mapped again.
    unsafe { backend.release(other, 4 * MIB).unwrap() };
    assert!(unsafe { backend.map(at + 8 * MIB, other, 4 * MIB) }.is_err());
}

#[test]
#[should_panic(expected = "1 handles left over")]
fn leftovers_panic() {
    let backend = sim(GIB);
    backend.create(GRANULE).unwrap();
}

#[test]
#[should_panic(expected = "events left over")]
fn lost_events_panic() {
    let backend = sim(GIB);
    let event = backend.record(EventScope::Context).unwrap();
    drop(event);
}

#[test]
fn work_needs_access_and_holds_its_range() {
    let timeline = Timeline::new(Duration::ZERO);
    let backend = SimBackend::new(SimOptions { timeline: timeline.clone(), ..SimOptions::default() });
    backend.disarm();
    let (at, handle) = mapped(&backend, 4 * MIB);
    unsafe { backend.unmap(at, 4 * MIB).unwrap() };
    unsafe { backend.map(at, handle, 4 * MIB).unwrap() };
    // Access does not outlive its mapping.
    assert!(backend.queue_work(StreamId(1), at, 512, MS).is_err());
    unsafe { backend.set_access(at, 4 * MIB).unwrap() };
    assert_eq!(backend.queue_work(StreamId(1), at + 512, 512, MS).unwrap(), MS);
    assert_eq!(backend.queue_work(StreamId(1), at, 512, MS).unwrap(), 2 * MS);
    let event = backend.record(EventScope::Context).unwrap();
    timeline.advance(MS);
    assert!(unsafe { backend.unmap(at, 4 * MIB) }.is_err());
    assert!(backend.wait(&event, Duration::MAX).unwrap());
    backend.recycle(event);
    assert_eq!(backend.now(), 2 * MS);
    give_back(&backend, at, handle, 4 * MIB);
    assert_eq!(backend.violations().len(), 2);
    assert!(backend.leftovers().is_empty());
}

#[test]
fn what_a_device_lacks_is_refused_without_being_a_violation() {
    let options = SimOptions { reserve_max: Some(GIB), context_events: false, ..SimOptions::default() };
    let backend = SimBackend::new(options);
    assert!(backend.reserve(2 * GIB).is_err() && backend.record(EventScope::Context).is_err());
}

#[test]
fn calls_that_cover_every_stream_invalidate_captures() {
    let backend = sim(GIB);
    let stream = StreamId(3);
    backend.begin_capture(stream).unwrap();
    assert!(backend.is_capturing(stream) && !backend.is_capturing(StreamId(4)));
    // Refused, but harmless.
    assert!(backend.record(EventScope::Stream(stream)).is_err());
    let event = backend.record(EventScope::Stream(StreamId(4))).unwrap();
    assert!(backend.stream_wait(stream, &event).is_err());
    backend.recycle(event);
    assert_eq!(backend.end_capture(stream).unwrap().nodes(), 0);
    let event = backend.record(EventScope::Context).unwrap();
    backend.recycle(event);
    assert!(backend.violations().is_empty());

    for spoil in [|b: &SimBackend| b.record(EventScope::Context).map(drop), |b: &SimBackend| b.quiesce()] {
        backend.begin_capture(stream).unwrap();
        assert!(spoil(&backend).is_err());
        assert!(backend.end_capture(stream).unwrap_err().reason.contains("invalidated"));
    }
    assert_eq!(backend.violations().len(), 2);
    backend.disarm();
}

#[test]
fn a_graph_needs_the_memory_that_it_was_captured_with() {
    let backend = sim(GIB);
    let stream = StreamId(3);
    let at = backend.reserve(8 * MIB).unwrap();
    let handles = [(); 2].map(|()| backend.create(2 * MIB).unwrap());
    // SAFETY: the backend checks its own rules and has no memory, here and below.
    unsafe {
        backend.map(at, handles[0], 2 * MIB).unwrap();
        backend.set_access(at, 2 * MIB).unwrap();
    }
    backend.begin_capture(stream).unwrap();
    assert_eq!(backend.queue_work(stream, at + MIB, MIB, MS).unwrap(), Duration::ZERO);
    let graph = backend.end_capture(stream).unwrap();
    assert_eq!(backend.replay(&graph, stream).unwrap(), MS);
    backend.timeline().advance(MS);
    unsafe {
        backend.unmap(at, 2 * MIB).unwrap();
        backend.map(at, handles[1], 2 * MIB).unwrap();
        backend.set_access(at, 2 * MIB).unwrap();
    }
    assert!(backend.replay(&graph, stream).unwrap_err().reason.contains("other memory"));
    backend.disarm();
}

/// Calls that succeed of reserve, create, map, access, relocate, and all the way back.
fn try_all(backend: &impl Backend) -> Vec<bool> {
    let mut done = Vec::new();
    let Ok(at) = backend.reserve(GIB) else { return vec![false] };
    if let Ok(handle) = backend.create(GRANULE) {
        if unsafe { backend.map(at, handle, GRANULE) }.is_ok() {
            done.push(unsafe { backend.set_access(at, GRANULE) }.is_ok());
            let moved = unsafe { backend.relocate(at, at + GRANULE, handle, GRANULE) }.is_ok();
            done.push(moved);
            let now_at = if moved { at + GRANULE } else { at };
            let gone = unsafe { backend.unmap(now_at, GRANULE) }.or_else(|_| unsafe { backend.unmap(now_at, GRANULE) });
            done.push(gone.is_ok());
        }
        let gone = unsafe { backend.release(handle, GRANULE) }.or_else(|_| unsafe { backend.release(handle, GRANULE) });
        done.push(gone.is_ok());
    }
    if unsafe { backend.unreserve(at, GIB) }.is_err() {
        unsafe { backend.unreserve(at, GIB).unwrap() };
    }
    done
}

#[test]
fn each_call_can_be_made_to_fail_and_leaves_the_device_clean() {
    let backend = FaultyBackend::new(Arc::new(sim(GIB)));
    assert_eq!(try_all(&backend), [true; 4]);
    let log = backend.log();
    let kinds: Vec<_> = log.iter().map(|entry| entry.call).collect();
    use DriverCall::{Create, Map, Release, Reserve, SetAccess, Unmap, Unreserve};
    // The move shows as its three parts.
    assert_eq!(kinds, [Reserve, Create, Map, SetAccess, Map, SetAccess, Unmap, Unmap, Release, Unreserve]);
    assert_eq!(log[1], LoggedCall { call: Create, address: 0, bytes: GRANULE, failed: false });
    assert_eq!(log[4].address, log[2].address + GRANULE);
    for k in 1..=10 {
        backend.arm(FaultPlan::new(FaultRule::At(k), false));
        backend.clear_log();
        try_all(&backend);
        assert_eq!(backend.injected(), 1);
        assert_eq!(backend.log().iter().position(|entry| entry.failed), Some(k as usize - 1));
        assert!(backend.inner().leftovers().is_empty(), "after call {k}: {:?}", backend.inner().leftovers());
    }
    backend.disarm();
    assert_eq!(try_all(&backend), [true; 4]);
}

#[test]
fn rules_of_failure() {
    let shared = Arc::new(sim(GIB));
    let backend = FaultyBackend::new(shared.clone());
    let outcome = |plan: FaultPlan| {
        backend.arm(plan);
        let made: Vec<_> = (0..4).map(|_| backend.create(GRANULE)).collect();
        let good = made.iter().map(Result::is_ok).collect::<Vec<_>>();
        backend.disarm();
        for handle in made.into_iter().flatten() {
            unsafe { backend.release(handle, GRANULE).unwrap() };
        }
        good
    };
    assert_eq!(outcome(FaultPlan::new(FaultRule::From(3), true)), [true, true, false, false]);
    assert_eq!(outcome(FaultPlan::new(FaultRule::Every(2), true)), [true, false, true, false]);
    let maps = FaultPlan { only: Some(DriverCall::Map), ..FaultPlan::new(FaultRule::From(1), true) };
    assert_eq!(outcome(maps), [true; 4]);
    backend.arm(FaultPlan::new(FaultRule::At(1), true));
    let event = backend.record(EventScope::Context).unwrap();
    assert_eq!(backend.counted(), 0);
    assert!(backend.create(GRANULE).unwrap_err().out_of_memory);
    backend.arm(FaultPlan { events: true, ..FaultPlan::new(FaultRule::At(1), false) });
    assert_eq!(backend.is_done(&event).unwrap_err().call, DriverCall::Event);
    assert!(backend.is_done(&event).unwrap());
    backend.recycle(event);
    assert_eq!(shared.handle_count(), 0);
}
