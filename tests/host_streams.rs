//! Streams and events of the host backend, with worker threads and on the virtual clock.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};
use xseg::backend::host::{HostBackend, HostOptions};
use xseg::backend::timeline::Timeline;
use xseg::backend::{Backend, EventScope, StreamId};
use xseg::error::{DriverCall, Error};

const LONG: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(20);
const DEFAULT: StreamId = StreamId(0);

fn open() -> HostBackend {
    HostBackend::new(HostOptions::default()).unwrap()
}

/// Work that holds a stream until told to go on.
fn gate(backend: &HostBackend, stream: StreamId) -> mpsc::Sender<()> {
    let (open, wait) = mpsc::channel();
    // An error means that the test gave up its end: go on as well.
    backend
        .launch(stream, move || {
            let _ = wait.recv();
        })
        .unwrap();
    open
}

fn done(backend: &HostBackend, scope: EventScope) -> bool {
    let event = backend.record(scope).unwrap();
    let done = backend.is_done(&event).unwrap();
    backend.recycle(event);
    done
}

#[test]
fn work_of_a_stream_runs_in_order() {
    let backend = open();
    let stream = backend.create_stream().unwrap();
    let seen = Arc::new(Mutex::new(Vec::new()));
    for number in 0..1000 {
        let seen = Arc::clone(&seen);
        backend.launch(stream, move || seen.lock().unwrap().push(number)).unwrap();
    }
    backend.quiesce().unwrap();
    assert!(seen.lock().unwrap().iter().copied().eq(0..1000));
}

#[test]
fn an_event_covers_what_was_queued_before_it_and_no_more() {
    let backend = open();
    let stream = backend.create_stream().unwrap();
    let first = gate(&backend, stream);
    let event = backend.record(EventScope::Stream(stream)).unwrap();
    let second = gate(&backend, stream);
    assert!(!backend.is_done(&event).unwrap());
    let start = Instant::now();
    assert!(!backend.wait(&event, SHORT).unwrap());
    assert!(start.elapsed() >= SHORT);
    first.send(()).unwrap();
    assert!(backend.wait(&event, LONG).unwrap());
    assert!(backend.is_done(&event).unwrap());
    assert!(!done(&backend, EventScope::Stream(stream)), "the second piece of work still runs");
    second.send(()).unwrap();
    backend.recycle(event);
    backend.quiesce().unwrap();
    assert!(done(&backend, EventScope::Stream(stream)), "an idle stream has passed");
    assert!(backend.leaks().is_empty());
}

#[test]
fn a_context_event_covers_every_stream() {
    let backend = open();
    let [one, two] = [(); 2].map(|()| backend.create_stream().unwrap());
    let gates = [DEFAULT, one, two].map(|stream| gate(&backend, stream));
    let event = backend.record(EventScope::Context).unwrap();
    for gate in gates {
        assert!(!backend.is_done(&event).unwrap());
        assert!(!backend.wait(&event, SHORT).unwrap());
        gate.send(()).unwrap();
    }
    assert!(backend.wait(&event, LONG).unwrap());
    backend.recycle(event);
}

#[test]
fn a_context_event_covers_destroyed_streams_too() {
    let backend = open();
    let stream = backend.create_stream().unwrap();
    let gate = gate(&backend, stream);
    backend.destroy_stream(stream).unwrap();
    let event = backend.record(EventScope::Context).unwrap();
    assert!(!backend.wait(&event, SHORT).unwrap());
    gate.send(()).unwrap();
    assert!(backend.wait(&event, LONG).unwrap());
    backend.recycle(event);
}

#[test]
fn a_stream_waits_for_another_on_the_device() {
    let backend = open();
    let [producer, consumer] = [(); 2].map(|()| backend.create_stream().unwrap());
    let gate = gate(&backend, producer);
    let produced = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&produced);
    backend.launch(producer, move || flag.store(true, SeqCst)).unwrap();
    let event = backend.record(EventScope::Stream(producer)).unwrap();
    backend.stream_wait(consumer, &event).unwrap();
    backend.recycle(event); // The wait stands without it.
    let seen = Arc::new(Mutex::new(None));
    let result = Arc::clone(&seen);
    backend.launch(consumer, move || *result.lock().unwrap() = Some(produced.load(SeqCst))).unwrap();
    let consumed = backend.record(EventScope::Stream(consumer)).unwrap();
    assert!(!backend.wait(&consumed, SHORT).unwrap());
    gate.send(()).unwrap();
    assert!(backend.wait(&consumed, LONG).unwrap());
    assert_eq!(*seen.lock().unwrap(), Some(true));
    backend.recycle(consumed);
}

#[test]
fn destroyed_streams_are_known_and_keys_are_never_used_again() {
    let backend = open();
    assert_eq!(backend.stream_key(DEFAULT).unwrap(), 0);
    let first = backend.create_stream().unwrap();
    let key = backend.stream_key(first).unwrap();
    backend.destroy_stream(first).unwrap();
    let dead = |result| matches!(result, Err(Error::DeadStream { stream, .. }) if stream == first.0);
    assert!(dead(backend.stream_key(first).map(drop)));
    assert!(dead(backend.launch(first, || ())));
    assert_eq!(backend.record(EventScope::Stream(first)).unwrap_err().call, DriverCall::Event);
    assert!(backend.destroy_stream(first).is_err());
    assert!(backend.destroy_stream(DEFAULT).is_err());

    let second = backend.create_stream().unwrap();
    assert_eq!(second, first, "the id is used again");
    assert_ne!(backend.stream_key(second).unwrap(), key);
}

/// A program names streams before it has work for them: there is nothing to wait for on these.
#[test]
fn a_stream_that_is_only_named_has_no_work() {
    let backend = open();
    for named in [StreamId(7), StreamId(5000), StreamId(u64::MAX)] {
        assert_ne!(backend.stream_key(named).unwrap(), backend.stream_key(DEFAULT).unwrap());
        assert!(done(&backend, EventScope::Stream(named)));
        let event = backend.record(EventScope::Context).unwrap();
        backend.stream_wait(named, &event).unwrap();
        backend.recycle(event);
        assert!(matches!(backend.launch(named, || ()), Err(Error::DeadStream { .. })), "it has no thread");
    }
    assert_ne!(backend.stream_key(StreamId(7)).unwrap(), backend.stream_key(StreamId(8)).unwrap());
}

#[test]
fn streams_are_limited() {
    let backend = open();
    let streams: Vec<_> = std::iter::from_fn(|| backend.create_stream().ok()).collect();
    assert_eq!(streams.len(), 1023);
    backend.destroy_stream(streams[500]).unwrap();
    assert_eq!(backend.create_stream().unwrap(), streams[500]);
}

#[test]
fn the_drop_runs_what_is_queued() {
    let count = Arc::new(AtomicU64::new(0));
    let backend = open();
    for _ in 0..4 {
        let stream = backend.create_stream().unwrap();
        for _ in 0..50 {
            let count = Arc::clone(&count);
            backend
                .launch(stream, move || {
                    count.fetch_add(1, SeqCst);
                })
                .unwrap();
        }
        backend.destroy_stream(stream).unwrap();
    }
    drop(backend);
    assert_eq!(count.load(SeqCst), 200);
}

#[test]
fn work_may_own_the_backend() {
    let (ended, wait) = mpsc::channel();
    let backend = Arc::new(open());
    let owner = Arc::clone(&backend);
    let gate = gate(&backend, DEFAULT);
    backend
        .launch(DEFAULT, move || {
            drop(owner); // The last one: the backend ends on its own thread.
            ended.send(()).unwrap();
        })
        .unwrap();
    drop(backend);
    gate.send(()).unwrap();
    wait.recv_timeout(LONG).unwrap();
}

#[test]
fn a_panic_of_work_is_a_fault_of_the_device() {
    let backend = open();
    let event = backend.record(EventScope::Context).unwrap();
    backend.launch(DEFAULT, || panic!("wrong word")).unwrap();
    let error = backend.quiesce().unwrap_err();
    assert!(error.reason.contains("wrong word"), "{error}");
    assert!(backend.is_done(&event).is_err());
    assert!(backend.record(EventScope::Context).is_err());
    assert!(backend.launch(DEFAULT, || ()).is_err());
    backend.recycle(event);
}

#[test]
fn four_threads_record_and_wait() {
    let backend = open();
    let streams = [(); 4].map(|()| backend.create_stream().unwrap());
    std::thread::scope(|scope| {
        for (stream, next) in streams.iter().zip(streams.iter().cycle().skip(1)) {
            let backend = &backend;
            scope.spawn(move || {
                let counter = Arc::new(AtomicU64::new(0));
                for round in 1..=200 {
                    let mine = Arc::clone(&counter);
                    backend
                        .launch(*stream, move || {
                            mine.fetch_add(1, SeqCst);
                        })
                        .unwrap();
                    let own = backend.record(EventScope::Stream(*stream)).unwrap();
                    backend.stream_wait(*next, &own).unwrap();
                    let all = backend.record(EventScope::Context).unwrap();
                    assert!(backend.wait(&all, LONG).unwrap());
                    assert!(backend.is_done(&own).unwrap(), "the context's event is no earlier");
                    assert_eq!(counter.load(SeqCst), round);
                    backend.recycle(all);
                    backend.recycle(own);
                }
            });
        }
    });
    backend.quiesce().unwrap();
    assert!(backend.leaks().is_empty());
}

#[test]
fn on_a_timeline_events_follow_the_clock() {
    let clock = Timeline::new(Duration::from_millis(2));
    let options = HostOptions { timeline: Some(clock.clone()), ..HostOptions::default() };
    let backend = HostBackend::new(options).unwrap();
    assert_eq!(backend.stream_key(StreamId(7_000)).unwrap(), 7_000, "every id is a stream");
    assert!(backend.create_stream().is_err() && backend.launch(DEFAULT, || ()).is_err());
    clock.queue(StreamId(3), Duration::from_millis(10));
    let own = backend.record(EventScope::Stream(StreamId(4))).unwrap();
    let all = backend.record(EventScope::Context).unwrap();
    clock.advance(Duration::from_millis(5));
    assert!(backend.is_done(&own).unwrap() && !backend.is_done(&all).unwrap());
    assert!(!backend.wait(&all, Duration::from_millis(1)).unwrap());
    assert!(backend.wait(&all, LONG).unwrap());
    assert_eq!(backend.now(), Duration::from_millis(12));
    assert_eq!(backend.leaks().events, 2);
    backend.recycle(own);
    backend.recycle(all);
    assert!(backend.leaks().is_empty());
}
