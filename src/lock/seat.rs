//! Seats: where a thread says which lock it is inside, for others to see without its help.
//!
//! Taking a lock by an atomic exchange costs 20 cycles and empties the store buffer, although nearly always the thread that
//! had the lock last has it next. Such a thread enters by a store to its seat and a look at who owns the lock. That is
//! right only if the store is seen before the look is made, for which the processor would need a barrier as dear as the
//! exchange. Here whoever takes the lock away from its owner pays for both: the operating system has every running
//! thread of the process pass a barrier (`membarrier`, 0.4 µs with two cores), after which the owner has either seen
//! that the lock is not its own any more, or is seen inside.
#![forbid(unsafe_code)]

#[cfg(all(test, loom))]
use loom::sync::atomic::{AtomicUsize, Ordering};
use std::cell::Cell;
#[cfg(not(all(test, loom)))]
use std::sync::atomic::{AtomicUsize, Ordering};

/// Threads that have seats at a time. Others take locks by exchange.
const SEATS: usize = if cfg!(all(test, loom)) { 3 } else { 1024 };

/// Of one thread, on lines of its own.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct Seat {
    /// Address of the lock that the thread entered as its owner; 0: none. Written by the thread alone.
    pub(super) inside: AtomicUsize,
}

/// What the seats say that stand for none, so that they are never free: of threads that did not ask for one yet, and of
/// those for which there is none. No lock has such an address.
const TO_BE_FOUND: usize = 1;
const NONE_LEFT: usize = 2;

impl Seat {
    #[cfg(not(all(test, loom)))]
    const fn new(inside: usize) -> Self {
        Self { inside: AtomicUsize::new(inside) }
    }

    #[cfg(all(test, loom))]
    fn new(inside: usize) -> Self {
        Self { inside: AtomicUsize::new(inside) }
    }

    /// What locks know it by; never 0.
    #[inline]
    pub(super) fn name(&'static self) -> usize {
        std::ptr::from_ref(self) as usize
    }

    /// Is its thread inside this lock as the owner?
    #[inline]
    pub(super) fn is_in(&self, lock: usize) -> bool {
        // Acquire: whoever sees that the owner has left sees what it did inside.
        self.inside.load(Ordering::Acquire) == lock
    }

    /// Does it stand for that of a thread that has not asked for one?
    #[inline]
    pub(super) fn is_to_be_found(&self) -> bool {
        self.is_in(TO_BE_FOUND)
    }

    /// Is it a thread's own?
    #[inline]
    pub(super) fn is_real(&self) -> bool {
        !self.is_in(TO_BE_FOUND) && !self.is_in(NONE_LEFT)
    }

    /// Says that its thread, the caller, is inside a lock, or with 0 that it is not.
    #[inline]
    pub(super) fn set(&self, lock: usize) {
        // Release also on entering, so that whoever sees the next lock here sees what was done inside the last one.
        self.inside.store(lock, Ordering::Release);
    }
}

/// The owner's half of the barrier: nothing but that the compiler keeps the order.
#[inline]
pub(super) fn light_barrier() {
    #[cfg(not(all(test, loom)))]
    std::sync::atomic::compiler_fence(Ordering::SeqCst);
    // What both halves together are worth.
    #[cfg(all(test, loom))]
    loom::sync::atomic::fence(Ordering::SeqCst);
}

#[cfg(not(all(test, loom)))]
pub(super) use threads::{barriers_work, heavy_barrier, mine, named, take};

#[cfg(not(all(test, loom)))]
mod threads {
    use super::{Cell, NONE_LEFT, SEATS, Seat, TO_BE_FOUND};
    use parking_lot::Mutex;
    use rustix::thread::{MembarrierCommand, membarrier};
    use std::sync::Once;
    use std::sync::atomic::{AtomicBool, Ordering, fence};
    use std::time::Duration;

    /// Long enough for every processor's stores to have reached memory, many times over.
    const DRAINED: Duration = Duration::from_millis(10);

    static WORK: AtomicBool = AtomicBool::new(false);
    static ALL: [Seat; SEATS] = [const { Seat::new(0) }; SEATS];
    static LATER: Seat = Seat::new(TO_BE_FOUND);
    static NONE: Seat = Seat::new(NONE_LEFT);
    /// Seats of threads that have ended, and the first that no thread ever had.
    static FREE: Mutex<(Vec<&'static Seat>, usize)> = Mutex::new((Vec::new(), 0));

    thread_local! {
        static MINE: Cell<&'static Seat> = const { Cell::new(&LATER) };
        static LEAVING: Leaving = const { Leaving };
    }

    /// Gives the thread's seat back when the thread ends.
    struct Leaving;

    impl Drop for Leaving {
        fn drop(&mut self) {
            let seat = MINE.replace(&NONE);
            if seat.is_in(0) {
                FREE.lock().0.push(seat);
            }
        }
    }

    /// The calling thread's seat, or one that is never free.
    #[inline]
    pub(in crate::lock) fn mine() -> &'static Seat {
        MINE.get()
    }

    /// The calling thread's seat, a new one if need be, or one that is never free where there is none.
    pub(in crate::lock) fn take() -> &'static Seat {
        if mine().is_to_be_found() {
            // None for a thread that ends.
            let lives = LEAVING.try_with(|_| ()).is_ok();
            MINE.set(if lives && barriers_work() { find() } else { &NONE });
        }
        mine()
    }

    fn find() -> &'static Seat {
        let mut free = FREE.lock();
        if let Some(seat) = free.0.pop() {
            return seat;
        }
        free.1 += 1;
        ALL.get(free.1 - 1).unwrap_or(&NONE)
    }

    /// The seat of a name.
    pub(in crate::lock) fn named(name: usize) -> Option<&'static Seat> {
        ALL.get((name - ALL[0].name()) / size_of::<Seat>())
    }

    /// Every thread of the process passes a barrier before this returns.
    pub(in crate::lock) fn heavy_barrier() {
        if membarrier(MembarrierCommand::PrivateExpedited).is_err() {
            barrier_refused();
        }
    }

    /// The call answered before and is refused now: the process is in a sandbox since, or was restored from a checkpoint that
    /// forgot its registration.
    #[cold]
    fn barrier_refused() {
        if registered() {
            return;
        }
        // No thread becomes an owner any more, so that this is done for those that are and never again.
        WORK.store(false, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        // What a thread has stored is seen by others within a microsecond, though nothing orders it with what it reads next.
        std::thread::sleep(DRAINED);
    }

    /// Registers the process for the barrier. False: the operating system has none, or forbids it.
    fn registered() -> bool {
        membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok()
            && membarrier(MembarrierCommand::PrivateExpedited).is_ok()
    }

    /// Does the operating system have the barrier? Asked once, and until it is refused.
    pub(in crate::lock) fn barriers_work() -> bool {
        static ASKED: Once = Once::new();
        ASKED.call_once(|| WORK.store(registered(), Ordering::Relaxed));
        WORK.load(Ordering::Relaxed)
    }
}

#[cfg(all(test, loom))]
pub(super) use modelled::{barriers_work, heavy_barrier, mine, named, take};

#[cfg(all(test, loom))]
mod modelled {
    use super::{AtomicUsize, Cell, NONE_LEFT, Ordering, SEATS, Seat, TO_BE_FOUND};

    loom::lazy_static! {
        static ref ALL: [Seat; SEATS] = std::array::from_fn(|_| Seat::new(0));
        static ref LATER: Seat = Seat::new(TO_BE_FOUND);
        static ref NONE: Seat = Seat::new(NONE_LEFT);
        static ref NEXT: AtomicUsize = AtomicUsize::new(0);
    }

    loom::thread_local! {
        static MINE: Cell<Option<&'static Seat>> = Cell::new(None);
    }

    pub(in crate::lock) fn mine() -> &'static Seat {
        MINE.with(Cell::get).unwrap_or_else(|| &*LATER)
    }

    pub(in crate::lock) fn take() -> &'static Seat {
        MINE.with(Cell::get).unwrap_or_else(|| {
            let seat = ALL.get(NEXT.fetch_add(1, Ordering::Relaxed)).unwrap_or_else(|| &*NONE);
            MINE.with(|mine| mine.set(Some(seat)));
            seat
        })
    }

    pub(in crate::lock) fn named(name: usize) -> Option<&'static Seat> {
        ALL.iter().find(|seat| seat.name() == name)
    }

    pub(in crate::lock) fn barriers_work() -> bool {
        true
    }

    pub(in crate::lock) fn heavy_barrier() {
        loom::sync::atomic::fence(Ordering::SeqCst);
    }
}
