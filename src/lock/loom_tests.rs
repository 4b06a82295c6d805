//! Every meeting of threads in the lock, explored by loom (`.ci/loom`).

use super::*;
use loom::sync::Arc;

#[test]
fn no_two_threads_are_inside_and_nothing_is_lost() {
    loom::model(|| {
        let lock = Arc::new(Lock::new(0u32));
        let other = lock.clone();
        let thread = loom::thread::spawn(move || {
            *other.lock() += 1;
            if let Some(mut value) = other.try_lock() {
                *value += 10;
            }
        });
        *lock.lock() += 100;
        thread.join().unwrap();
        let value = *lock.lock();
        assert!(value == 111 || value == 101, "{value}");
    });
}

/// A lock that the calling thread owns.
fn owned() -> Arc<Lock<u32>> {
    let lock = Arc::new(Lock::new(0));
    (0..=STREAK).for_each(|_| *lock.lock() += 1);
    assert!(lock.enter_as_owner(seat::mine()).is_some(), "it enters as the owner");
    lock
}

#[test]
fn an_owner_and_another_thread_are_not_inside_together() {
    loom::model(|| {
        let lock = owned();
        let other = lock.clone();
        let thread = loom::thread::spawn(move || *other.lock() += 10);
        *lock.lock() += 100;
        thread.join().unwrap();
        assert_eq!(*lock.lock(), 111 + STREAK);
    });
}

#[test]
fn who_tries_leaves_an_owner_that_is_inside_alone() {
    loom::model(|| {
        let lock = owned();
        let other = lock.clone();
        let thread = loom::thread::spawn(move || match other.try_lock() {
            Some(mut value) => {
                *value += 10;
                10
            }
            None => 0,
        });
        *lock.lock() += 100;
        *lock.lock() += 100;
        let tried = thread.join().unwrap();
        assert_eq!(*lock.lock(), 201 + STREAK + tried);
    });
}

#[test]
fn a_third_thread_knows_of_an_owner_that_was_left_alone() {
    // Only one of them waits, since loom lets threads that wait take turns for ever.
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let lock = owned();
        let [tries, takes] = [lock.clone(), lock.clone()];
        let tries = loom::thread::spawn(move || drop(tries.try_lock()));
        let takes = loom::thread::spawn(move || *takes.lock() += 10);
        let mut added = 0;
        for _ in 0..2 {
            if let Some(mut value) = lock.enter_as_owner(seat::mine()) {
                *value += 100;
                added += 100;
            }
        }
        tries.join().unwrap();
        takes.join().unwrap();
        assert_eq!(*lock.lock(), 11 + STREAK + added);
    });
}

#[test]
fn the_owner_changes_and_both_threads_count() {
    loom::model(|| {
        let lock = owned();
        let other = lock.clone();
        // Taken away, owned by the other thread, and taken away from that.
        let thread = loom::thread::spawn(move || (0..2 * STREAK + 1).for_each(|_| *other.lock() += 10));
        *lock.lock() += 100;
        thread.join().unwrap();
        assert_eq!(*lock.lock(), 101 + STREAK + 10 * (2 * STREAK + 1));
    });
}
