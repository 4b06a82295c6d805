//! The client's out-of-memory callbacks: when they are asked, and how often.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod support;

use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, mpsc};
use support::{MS, S1, S2, out_of_memory, sim};
use xseg::backend::EventScope;
use xseg::units::MIB;
use xseg::{Allocation, Error, Heap};

type Cache = Arc<Mutex<Vec<Allocation>>>;

/// So many blocks of `bytes`, of which the heap's callback frees one a call; also the number of its calls.
fn cache(lab: &support::Lab, blocks: usize, bytes: u64) -> (Cache, Arc<AtomicU64>) {
    let cache: Cache = Arc::new(Mutex::new((0..blocks).map(|_| lab.alloc(bytes, S1)).collect()));
    let (held, calls) = (cache.clone(), Arc::new(AtomicU64::new(0)));
    let counter = calls.clone();
    lab.heap.on_out_of_memory(Box::new(move |_| {
        counter.fetch_add(1, Relaxed);
        held.lock().unwrap().pop().is_some()
    }));
    (cache, calls)
}

#[test]
fn callbacks_free_memory_before_the_error() {
    let lab = sim("limit:64MiB");
    let cache = Arc::new(Mutex::new(vec![lab.alloc(32 * MIB, S1), lab.alloc(16 * MIB, S1)]));
    let asked = Arc::new(AtomicU64::new(0));
    let (held, heap, count) = (cache.clone(), lab.heap.clone(), asked.clone());
    lab.heap.on_out_of_memory(Box::new(move |bytes| {
        count.fetch_add(bytes, Relaxed);
        // No lock is held: the heap can be used.
        assert!(heap.stats().allocated > 0);
        held.lock().unwrap().pop().is_some()
    }));
    let first = lab.alloc(20 * MIB, S1);
    assert_eq!((asked.load(Relaxed), cache.lock().unwrap().len()), (20 * MIB, 1));
    out_of_memory(lab.heap.alloc(50 * MIB, S1));
    assert_eq!(cache.lock().unwrap().len(), 0, "asked again for the next request");
    out_of_memory(lab.heap.alloc(50 * MIB, S1));
    // Twice for the first of these two requests, since the callback said that it had freed something.
    assert_eq!((asked.load(Relaxed), lab.heap.stats().ooms), (170 * MIB, 2));
    drop(first);
    drop(lab.alloc(50 * MIB, S1));
    // The callback holds the heap, so that only this ends it.
    lab.heap.shut_down();
}

#[test]
fn callbacks_are_asked_for_as_long_as_they_free_anything() {
    let lab = sim("limit:64MiB");
    let (cache, calls) = cache(&lab, 3, 20 * MIB);
    let block = lab.alloc(30 * MIB, S1);
    assert_eq!((calls.load(Relaxed), cache.lock().unwrap().len()), (2, 1));
    drop(block);
    lab.heap.shut_down();
}

#[test]
fn a_callback_that_frees_nothing_is_asked_once() {
    let lab = sim("limit:4MiB,wait_limit:0s");
    let calls = Arc::new(AtomicU64::new(0));
    let counter = calls.clone();
    lab.heap.on_out_of_memory(Box::new(move |_| counter.fetch_add(1, Relaxed) < 1000));
    out_of_memory(lab.heap.alloc(8 * MIB, S1));
    assert_eq!(calls.load(Relaxed), 1, "nothing less is live after it");
}

#[test]
fn callbacks_are_asked_once_for_what_is_larger_than_the_limit() {
    let lab = sim("limit:64MiB");
    let (cache, calls) = cache(&lab, 3, 4 * MIB);
    out_of_memory(lab.heap.alloc(65 * MIB, S1));
    assert_eq!((calls.load(Relaxed), cache.lock().unwrap().len()), (1, 2), "what they free more is of no use");
    lab.heap.shut_down();
}

#[test]
fn while_there_is_no_room_callbacks_are_asked_without_a_look_for_it() {
    let lab = sim("limit:64MiB");
    let (cache, _) = cache(&lab, 15, 4 * MIB);
    // Each look records an event, where anything was freed since the last one.
    let events = || {
        let event = lab.heap.backend().record(EventScope::Context).unwrap();
        let number = event.0;
        lab.heap.backend().recycle(event);
        number
    };
    let before = events();
    let block = lab.alloc(50 * MIB, S1);
    let recorded = events() - before - 1;
    assert_eq!(cache.lock().unwrap().len(), 3);
    assert!(recorded <= 2, "{recorded} looks, of which one finds it");
    drop(block);
    lab.heap.shut_down();
}

/// A callback whose own request fails is not called again for that.
#[test]
fn a_callback_that_allocates_is_not_called_for_that() {
    let lab = sim("limit:4MiB,wait_limit:0s");
    let (heap, calls) = (lab.heap.clone(), Arc::new(AtomicU64::new(0)));
    let counter = calls.clone();
    lab.heap.on_out_of_memory(Box::new(move |_| {
        counter.fetch_add(1, Relaxed);
        heap.alloc(8 * MIB, S1).is_ok()
    }));
    for round in 1..=2 {
        out_of_memory(lab.heap.alloc(8 * MIB, S2));
        assert_eq!(calls.load(Relaxed), round);
    }
    assert_eq!(lab.heap.stats().ooms, 4);
    lab.heap.shut_down();
}

/// Requests that a thread's own values make as the thread ends.
#[test]
fn a_thread_that_ends_is_out_of_memory_as_others_are() {
    struct Last(Heap, mpsc::Sender<Result<(), Error>>);
    impl Drop for Last {
        fn drop(&mut self) {
            self.1.send(self.0.alloc(8 * MIB, S1).map(drop)).unwrap();
        }
    }
    thread_local! {
        static LAST: RefCell<Option<Last>> = const { RefCell::new(None) };
    }
    let lab = sim("limit:4MiB,wait_limit:0s");
    lab.heap.on_out_of_memory(Box::new(|_| false));
    let (sender, done) = mpsc::channel();
    let heap = lab.heap.clone();
    let thread = std::thread::spawn(move || {
        // Made before the heap's own value of the thread, so that it ends after that.
        LAST.set(Some(Last(heap.clone(), sender)));
        out_of_memory(heap.alloc(8 * MIB, S1));
    });
    thread.join().unwrap();
    out_of_memory(done.recv().unwrap());
    assert_eq!(lab.heap.stats().ooms, 2);
    lab.heap.shut_down();
}

/// What they freed is enough, once the device is done with it.
#[test]
fn the_device_is_waited_for_before_callbacks_are_asked_again() {
    for (stream, waits) in [(S1, 0), (S2, 1)] {
        for bytes in [4 * MIB, 12 * MIB] {
            let lab = sim("limit:64MiB");
            let (cache, calls) = cache(&lab, 16, 4 * MIB);
            for block in cache.lock().unwrap().iter() {
                lab.work(S1, block, MS);
            }
            let block = lab.alloc(bytes, stream);
            let (calls, left) = (calls.load(Relaxed), cache.lock().unwrap().len() as u64);
            let enough = bytes / (4 * MIB);
            assert_eq!((calls, left), (enough, 16 - enough), "{bytes} bytes on {stream:?}");
            assert_eq!(lab.heap.stats().host_waits, waits);
            drop(block);
            lab.heap.shut_down();
        }
    }
}

/// Blocks that are pinned may not move, so that room is no place.
#[test]
fn callbacks_are_asked_again_where_there_is_room_and_no_place() {
    let lab = sim("limit:64MiB,growth:exact");
    let (cache, calls) = cache(&lab, 32, 2 * MIB);
    for block in cache.lock().unwrap().iter() {
        lab.heap.pin(block.address(), 2 * MIB).unwrap();
    }
    // Every other block is freed first: their memory is pinned, and no two lie side by side.
    let (even, odd): (Vec<_>, Vec<_>) = cache.lock().unwrap().drain(..).enumerate().partition(|(at, _)| at % 2 == 0);
    cache.lock().unwrap().extend(even.into_iter().chain(odd).map(|(_, block)| block).rev());
    let block = lab.alloc(4 * MIB, S1);
    let (calls, left) = (calls.load(Relaxed), cache.lock().unwrap().len() as u64);
    assert_eq!((calls, left), (17, 15), "sixteen blocks with a live one after each, and one of those");
    drop(block);
    lab.heap.shut_down();
}
