//! A lock for critical sections of nanoseconds: plain stores for the thread that has it again and again, else one atomic
//! exchange to take it, and a plain store to give it back.
//!
//! A thread that took the lock many times in a row becomes its owner, and enters by a store to its own seat
//! ([`seat`]) while it stays so. Any other thread takes the lock by exchange, ends the ownership, and waits
//! until the owner is outside; the lock has no owner then until a thread has taken it many times in a row again, ever more
//! often, so that what ending it costs is a small share of what the owners saved.
//!
//! A lock that can put waiters to sleep pays a second exchange when it is given back, to see whether anyone sleeps.
//! Here who waits looks again by itself, ever less often: first spinning, then giving way to other threads, then in
//! short sleeps, so that a holder at work for long (planning) or taken off its core costs others no processor time.
//! Where several wait, each look takes the lock's line from the holder, and each change of hands all the lines that the
//! lock guards, about a microsecond; so they look as much less often as there are of them, and the holder does many
//! turns in between. No order among those who wait is promised. A holder that panics gives the lock back.
#![allow(unsafe_code, reason = "hands out references to what the lock guards")]

#[cfg(all(test, loom))]
mod loom_tests;
#[cfg(all(test, not(loom)))]
mod sandbox_tests;
mod seat;

#[cfg(all(test, loom))]
use loom::{
    cell::UnsafeCell,
    sync::atomic::{AtomicU32, AtomicUsize, Ordering},
};
use seat::Seat;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::time::Duration;
#[cfg(not(all(test, loom)))]
use std::{
    cell::UnsafeCell,
    sync::atomic::{AtomicU32, AtomicUsize, Ordering},
};

/// Times in a row that a thread takes a lock by exchange before it owns it; so many times more after each time that it was
/// taken from an owner; and at most. Ending an ownership costs 0.4 µs (two cores) to some 10 µs (a hundred), an exchange
/// 4 ns.
const STREAK: u32 = if cfg!(all(test, loom)) { 1 } else { 64 };
const STREAK_GROWS: u32 = 4;
const STREAK_MOST: u32 = 1 << 16;
/// Pauses before a look, for each other thread that waits: some microseconds.
const CROWD: u32 = 128;
/// Rounds of spinning, each twice as long as the one before, and of giving way.
const SPINS: u32 = 6;
const YIELDS: u32 = 20;
/// Sleep after that.
const SLEEP: Duration = Duration::from_micros(50);

/// See the module's text.
pub(crate) struct Lock<T> {
    /// Name of the seat of the thread that owns the lock; 0: none. Written by whoever holds it by exchange.
    owner: AtomicUsize,
    /// Other than 0: taken by exchange.
    held: AtomicUsize,
    /// Threads that wait for it.
    waiting: AtomicU32,
    habit: Habit,
    value: UnsafeCell<T>,
}

/// Who took a lock without an owner of late. Written by whoever holds it by exchange.
struct Habit {
    /// The last one's seat, and how often in a row.
    last: AtomicUsize,
    times: AtomicU32,
    /// How often makes an owner.
    enough: AtomicU32,
}

impl Habit {
    /// Notes who has the lock.
    #[inline]
    fn note(&self, seat: &'static Seat) {
        let again = self.last.load(Ordering::Relaxed) == seat.name();
        let times = if again { self.times.load(Ordering::Relaxed).saturating_add(1) } else { 1 };
        self.last.store(seat.name(), Ordering::Relaxed);
        self.times.store(times, Ordering::Relaxed);
    }

    /// Has this thread had the lock so often in a row that it should own it?
    #[inline]
    fn is_formed(&self, seat: &'static Seat) -> bool {
        self.times.load(Ordering::Relaxed) >= self.enough.load(Ordering::Relaxed)
            && self.last.load(Ordering::Relaxed) == seat.name()
            && seat.is_real()
    }
}

// SAFETY: the value is reached by the one thread that holds the lock, so that sharing the lock sends the value.
unsafe impl<T: Send> Sync for Lock<T> {}

impl<T> fmt::Debug for Lock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lock").finish_non_exhaustive()
    }
}

impl<T: Default> Default for Lock<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T> Lock<T> {
    pub(crate) fn new(value: T) -> Self {
        let habit = Habit { last: AtomicUsize::new(0), times: AtomicU32::new(0), enough: AtomicU32::new(STREAK) };
        let (owner, held, waiting) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicU32::new(0));
        Self { owner, held, waiting, habit, value: UnsafeCell::new(value) }
    }

    /// Takes the lock, when it is free.
    #[inline]
    pub(crate) fn lock(&self) -> Guard<'_, T> {
        match self.enter() {
            Some(guard) => guard,
            None => self.lock_slowly(),
        }
    }

    /// Takes the lock unless another thread holds it. Never waits.
    pub(crate) fn try_lock(&self) -> Option<Guard<'_, T>> {
        if let Some(guard) = self.enter() {
            return Some(guard);
        }
        if self.held.load(Ordering::Relaxed) != 0 || !self.take() {
            return None;
        }
        let guard = self.by_exchange();
        let Some(owner) = self.other_owner() else { return Some(guard) };
        // First without a barrier: most often one that is inside is seen to be.
        if !owner.is_in(self.name()) {
            self.disown();
            if !owner.is_in(self.name()) {
                return Some(guard);
            }
            // It stays what it was, so that whoever takes the lock next knows of it.
            self.owner.store(owner.name(), Ordering::Release);
        }
        None
    }

    /// What seats know the lock by; never 0.
    #[inline]
    fn name(&self) -> usize {
        std::ptr::from_ref(self).cast::<()>() as usize
    }

    /// Takes the lock where that is a matter of course: as its owner, or by an exchange that succeeds at once and
    /// changes nothing about who owns it. Calls nothing.
    #[inline(always)]
    pub(crate) fn enter(&self) -> Option<Guard<'_, T>> {
        let seat = seat::mine();
        match self.enter_as_owner(seat) {
            None => self.enter_by_exchange(seat),
            entered => entered,
        }
    }

    /// As the owner, if the calling thread is that and inside no other lock as its owner.
    #[inline(always)]
    fn enter_as_owner(&self, seat: &'static Seat) -> Option<Guard<'_, T>> {
        if !seat.is_in(0) {
            return None;
        }
        seat.set(self.name());
        seat::light_barrier();
        if self.owner.load(Ordering::Acquire) == seat.name() {
            return Some(Guard { lock: self, taken: &seat.inside, here: PhantomData });
        }
        seat.set(0);
        None
    }

    #[inline(always)]
    fn enter_by_exchange(&self, seat: &'static Seat) -> Option<Guard<'_, T>> {
        let becomes_owner = self.habit.is_formed(seat) && self.waiting.load(Ordering::Relaxed) == 0;
        if seat.is_to_be_found() || becomes_owner || self.owner.load(Ordering::Relaxed) != 0 || !self.take() {
            return None;
        }
        let guard = self.by_exchange();
        // Nobody becomes the owner any more.
        if self.owner.load(Ordering::Relaxed) != 0 {
            return None;
        }
        self.habit.note(seat);
        Some(guard)
    }

    #[inline]
    fn by_exchange(&self) -> Guard<'_, T> {
        Guard { lock: self, taken: &self.held, here: PhantomData }
    }

    #[inline(never)]
    fn lock_slowly(&self) -> Guard<'_, T> {
        if !self.take() {
            self.wait();
        }
        let guard = self.by_exchange();
        if let Some(owner) = self.other_owner() {
            self.disown();
            let mut round = 0;
            while owner.is_in(self.name()) {
                pause(round, 0);
                round = round.saturating_add(1);
            }
        }
        guard
    }

    #[inline]
    fn take(&self) -> bool {
        self.held.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// The owner's seat, if that is another thread. Where there is no owner, the calling thread may become it. The caller has
    /// taken the lock by exchange, so that no owner comes meanwhile but by this.
    fn other_owner(&self) -> Option<&'static Seat> {
        let seat = seat::take();
        match self.owner.load(Ordering::Relaxed) {
            0 if self.habit.is_formed(seat) && self.waiting.load(Ordering::Relaxed) == 0 => {
                if seat::barriers_work() {
                    self.owner.store(seat.name(), Ordering::Release);
                }
                self.habit.times.store(0, Ordering::Relaxed);
            }
            0 => self.habit.note(seat),
            owner if owner != seat.name() => return seat::named(owner),
            // The owner is inside another lock too.
            _ => {}
        }
        None
    }

    /// Ends the ownership: the owner is seen inside afterwards, or does not enter as the owner any more.
    #[cold]
    fn disown(&self) {
        let enough = self.habit.enough.load(Ordering::Relaxed);
        self.habit.enough.store(enough.saturating_mul(STREAK_GROWS).min(STREAK_MOST), Ordering::Relaxed);
        self.owner.store(0, Ordering::Relaxed);
        seat::heavy_barrier();
    }

    #[cold]
    fn wait(&self) {
        let mut others = self.waiting.fetch_add(1, Ordering::Relaxed);
        let mut round = 0;
        loop {
            pause(round, others);
            round = round.saturating_add(1);
            if self.held.load(Ordering::Relaxed) == 0 && self.take() {
                break;
            }
            // At the same time, since it lies beside what was just looked at.
            others = self.waiting.load(Ordering::Relaxed) - 1;
        }
        self.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Asks the operating system for what owners of locks need, which may take milliseconds the first time.
pub(crate) fn prepare() {
    seat::barriers_work();
}

#[cfg(not(all(test, loom)))]
fn pause(round: u32, others: u32) {
    match round {
        _ if round < SPINS => (0..(1 << round) + CROWD * others).for_each(|_| std::hint::spin_loop()),
        _ if round < SPINS + YIELDS => std::thread::yield_now(),
        _ => std::thread::sleep(SLEEP),
    }
}

#[cfg(all(test, loom))]
fn pause(_: u32, _: u32) {
    let _ = (SPINS, CROWD, YIELDS, SLEEP);
    loom::thread::yield_now();
}

/// The right to use the value; gives the lock back when dropped.
pub(crate) struct Guard<'a, T> {
    lock: &'a Lock<T>,
    /// What says that it is taken, by being other than 0: the owner's seat, or the lock.
    taken: &'a AtomicUsize,
    /// It stays with its thread, whose seat it may be about.
    here: PhantomData<*const ()>,
}

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
        unsafe { &*self.lock.value.get() }
    }
}

#[cfg(not(all(test, loom)))]
impl<T> DerefMut for Guard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: I12: as above, and `self` is borrowed for as long.
        unsafe { &mut *self.lock.value.get() }
    }
}

#[cfg(all(test, loom))]
impl<T> Deref for Guard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: I12, which loom watches.
        self.lock.value.with(|value| unsafe { &*value })
    }
}

#[cfg(all(test, loom))]
impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: I12, which loom watches.
        self.lock.value.with_mut(|value| unsafe { &mut *value })
    }
}

impl<T> Drop for Guard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.taken.store(0, Ordering::Release);
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
    fn a_thread_that_takes_it_again_and_again_owns_it_until_another_does() {
        if !seat::barriers_work() {
            return;
        }
        let lock = Lock::new(0);
        assert!(lock.enter_as_owner(seat::mine()).is_none(), "nobody owns it at first");
        (0..=STREAK).for_each(|_| *lock.lock() += 1);
        let held = lock.enter_as_owner(seat::mine()).expect("the owner enters");
        let other = Lock::new(0);
        (0..=2 * STREAK).for_each(|_| *other.lock() += 1);
        assert!(other.enter_as_owner(seat::mine()).is_none(), "one lock at a time is entered so, others by exchange");
        assert_eq!(*other.lock(), 2 * STREAK + 1);
        let tried = std::thread::scope(|scope| scope.spawn(|| lock.try_lock().is_some()).join());
        assert!(!tried.expect("no panic"), "the owner is inside");
        drop(held);
        assert!(lock.enter_as_owner(seat::mine()).is_some(), "it is the owner still");
        std::thread::scope(|scope| drop(scope.spawn(|| *lock.lock() += 1)));
        assert!(lock.enter_as_owner(seat::mine()).is_none(), "not any more");
        (0..=STREAK * STREAK_GROWS).for_each(|_| *lock.lock() += 1);
        assert!(lock.enter_as_owner(seat::mine()).is_some(), "and again, but later");
        assert_eq!(*lock.lock(), STREAK * (1 + STREAK_GROWS) + 3);
    }

    #[test]
    fn an_owner_at_work_loses_nothing_to_threads_that_come_and_go() {
        let lock = Lock::new(0u64);
        let mut more = 0;
        std::thread::scope(|scope| {
            scope.spawn(|| (0..400_000).for_each(|_| *lock.lock() += 1));
            // More threads than there are seats.
            for round in 0..1_500 {
                let tried = scope.spawn(|| {
                    *lock.lock() += 1;
                    lock.try_lock().map_or(0, |mut value| {
                        *value += 1;
                        1
                    })
                });
                more += tried.join().expect("no panic");
                assert!(more <= round + 1);
            }
        });
        assert_eq!(*lock.lock(), 400_000 + 1_500 + more);
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
