//! A lock for critical sections of nanoseconds: one atomic exchange to take it, a plain store to give it back.
//!
//! A lock that can put waiters to sleep pays a second exchange when it is given back, to see whether anyone sleeps.
//! Here who waits looks again by itself, ever less often: first spinning, then giving way to other threads, then in
//! short sleeps, so that a holder at work for long (planning) or taken off its core costs others no processor time.
//! No order among those who wait is promised. A holder that panics gives the lock back.
#![allow(unsafe_code, reason = "hands out references to what the lock guards")]

#[cfg(all(test, loom))]
use loom::{
    cell::UnsafeCell,
    sync::atomic::{AtomicBool, Ordering},
};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::time::Duration;
#[cfg(not(all(test, loom)))]
use std::{
    cell::UnsafeCell,
    sync::atomic::{AtomicBool, Ordering},
};

/// Rounds of spinning, each twice as long as the one before, and of giving way.
const SPINS: u32 = 6;
const YIELDS: u32 = 20;
/// Sleep after that.
const SLEEP: Duration = Duration::from_micros(50);

/// See the module's text.
#[derive(Default)]
pub(crate) struct Lock<T> {
    held: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached by the one thread that holds the lock, so that sharing the lock sends the value.
unsafe impl<T: Send> Sync for Lock<T> {}

impl<T> fmt::Debug for Lock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lock").finish_non_exhaustive()
    }
}

impl<T> Lock<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { held: AtomicBool::new(false), value: UnsafeCell::new(value) }
    }

    /// Takes the lock, when it is free.
    #[inline]
    pub(crate) fn lock(&self) -> Guard<'_, T> {
        if !self.take() {
            self.wait();
        }
        Guard(self)
    }

    /// Takes the lock unless another thread holds it.
    #[inline]
    pub(crate) fn try_lock(&self) -> Option<Guard<'_, T>> {
        (!self.held.load(Ordering::Relaxed) && self.take()).then(|| Guard(self))
    }

    #[inline]
    fn take(&self) -> bool {
        self.held.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    #[cold]
    fn wait(&self) {
        let mut round = 0;
        loop {
            pause(round);
            round = round.saturating_add(1);
            if !self.held.load(Ordering::Relaxed) && self.take() {
                return;
            }
        }
    }
}

#[cfg(not(all(test, loom)))]
fn pause(round: u32) {
    match round {
        _ if round < SPINS => (0..1 << round).for_each(|_| std::hint::spin_loop()),
        _ if round < SPINS + YIELDS => std::thread::yield_now(),
        _ => std::thread::sleep(SLEEP),
    }
}

#[cfg(all(test, loom))]
fn pause(_: u32) {
    let _ = (SPINS, YIELDS, SLEEP);
    loom::thread::yield_now();
}

/// The right to use the value; gives the lock back when dropped.
pub(crate) struct Guard<'a, T>(&'a Lock<T>);

impl<T: fmt::Debug> fmt::Debug for Guard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

#[cfg(not(all(test, loom)))]
impl<T> Deref for Guard<'_, T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: I12: this guard is the only one, and the reference lives no longer than it.
        unsafe { &*self.0.value.get() }
    }
}

#[cfg(not(all(test, loom)))]
impl<T> DerefMut for Guard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: I12: as above, and `self` is borrowed for as long.
        unsafe { &mut *self.0.value.get() }
    }
}

#[cfg(all(test, loom))]
impl<T> Deref for Guard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: I12, which loom watches.
        self.0.value.with(|value| unsafe { &*value })
    }
}

#[cfg(all(test, loom))]
impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: I12, which loom watches.
        self.0.value.with_mut(|value| unsafe { &mut *value })
    }
}

impl<T> Drop for Guard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.0.held.store(false, Ordering::Release);
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
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
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn increments_of_many_threads_are_all_there() {
        let lock = Lock::new(0u64);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..20_000).for_each(|_| *lock.lock() += 1));
            }
        });
        assert_eq!(*lock.lock(), 80_000);
    }

    #[test]
    fn a_held_lock_is_not_taken_and_a_panic_gives_it_back() {
        let lock = Lock::new(7);
        let held = lock.lock();
        assert!(lock.try_lock().is_none());
        drop(held);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _held = lock.lock();
            panic!("within");
        }));
        assert!(panicked.is_err());
        assert_eq!(lock.try_lock().map(|value| *value), Some(7));
    }
}
