//! The last steps before an out-of-memory error: the client's callbacks, a wait on the device, waits of the host.
#![forbid(unsafe_code)]

use super::inner::{Inner, Wanted};
use crate::backend::{Backend, Event};
use crate::epoch::{Closing, recycle};
use crate::error::DriverError;
use crate::segment::nodes::Kind;
use std::cell::RefCell;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

thread_local! {
    /// Heaps whose callbacks run on this thread, by address.
    static ASKING: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// The heap's callbacks run on this thread while this lives.
struct Asking;

impl Asking {
    /// `None` when they do already.
    fn begin(heap: usize) -> Option<Self> {
        // A thread that is ending and has no such list any more asks nobody.
        let begun = ASKING.try_with(|heaps| {
            let mut heaps = heaps.borrow_mut();
            let new = !heaps.contains(&heap);
            new.then(|| {
                heaps.push(heap);
                Self
            })
        });
        begun.ok().flatten()
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        // Also after a panic of a callback; the last one in is the first one out.
        let _ = ASKING.try_with(|heaps| heaps.borrow_mut().pop());
    }
}

/// Waits for each of these events. An error when the driver says of one neither that it has passed nor that it has
/// not: a wait alone may be refused.
fn waits(backend: &dyn Backend, events: &[Event], slice: Duration) -> Result<(), DriverError> {
    let mut done = Ok(());
    for event in events {
        if let Err(error) = backend.wait(event, slice)
            && backend.is_done(event).is_err()
        {
            done = Err(error);
        }
    }
    done
}

impl Inner {
    /// Asks the client's functions for as long as they free anything, since none need know how much is enough: did they free any?
    /// `asked` is what was live when they were last asked; they are asked again below that.
    pub(super) fn ask_clients(&self, bytes: u64, asked: &mut u64) -> bool {
        let mut freed = false;
        loop {
            let (live, first) = (self.live(), *asked == u64::MAX);
            // No freeing makes room for what is larger than the limit.
            if live >= *asked || !(first || bytes <= self.limit.load(Relaxed)) {
                return freed;
            }
            let more = self.out_of_memory_callbacks(bytes);
            *asked = if more { live } else { 0 };
            freed |= more;
            // A look for room is long where many blocks are free, and in vain while the limit has none.
            if !more || !self.is_full_for(bytes) {
                return freed;
            }
        }
    }

    /// Asks the client's functions to free memory; no lock is held. Not for what such a function asks for itself.
    fn out_of_memory_callbacks(&self, bytes: u64) -> bool {
        let callbacks = self.callbacks.lock().clone();
        if callbacks.is_empty() {
            return false;
        }
        let Some(_asking) = Asking::begin(std::ptr::from_ref(self).addr()) else { return false };
        // All are asked: each may hold a part of what is missing.
        callbacks.iter().filter(|callback| callback(bytes)).count() > 0
    }

    /// Makes the asking stream wait on the device for everything freed so far: the last epoch that it covers.
    pub(super) fn gpu_wait(&self, wanted: &Wanted) -> Option<u32> {
        let backend = self.driver.backend();
        let stream = wanted.stream;
        if backend.is_capturing(stream.id) {
            return None;
        }
        self.close_epoch();
        let mut waited = 0;
        let mut refused = false;
        // All of them: where events are per stream, the last one does not cover streams that were retired.
        for (epoch, events) in self.epochs.waiting() {
            refused |= !events.iter().all(|event| backend.stream_wait(stream.id, event).is_ok());
            waited = if refused { waited } else { epoch };
            recycle(backend, events);
        }
        if waited > 0 {
            self.streams.set_waited(stream.slot, waited);
            self.counters.gpu_waits.fetch_add(1, Relaxed);
        }
        (waited > 0).then_some(waited)
    }

    /// Waits on the host for the oldest thing that may free memory. False: there is nothing to wait for.
    ///
    /// # Errors
    /// What the driver says when it cannot tell whether that has passed.
    pub(super) fn wait_for_progress(&self, slice: Duration) -> Result<bool, DriverError> {
        let backend = self.driver.backend();
        let unpassed = self.first_unpassed();
        if unpassed.is_some_and(|epoch| epoch >= self.epochs.open()) {
            self.close_epoch();
        }
        // Epochs pass in order, so that the oldest is in the way of all others.
        if let Some((_, events)) = unpassed.and_then(|_| self.epochs.oldest()) {
            let done = waits(backend, &events, slice);
            recycle(backend, events);
            return done.map(|()| true);
        }
        // It stays in the list: others wait for it too, and its pool has a block that waits.
        let (events, unit, away) = {
            let mut pending = self.pending.lock();
            let Some(first) = pending.front() else { return Ok(false) };
            let away = !first.away.is_empty();
            // Those that are asked for again are nobody's to hold.
            let events = if away { Closing::default() } else { Closing::clone(&first.events) };
            let first = (events, first.unit, away);
            pending.rotate_left(1);
            first
        };
        if away {
            // They are asked for again each time that the list is looked at.
            std::thread::sleep(slice);
            return Ok(true);
        }
        let done = waits(backend, &events, slice);
        recycle(backend, events);
        self.wait_for_import(unit, slice);
        done.map(|()| true)
    }

    /// The first epoch whose end would let free memory, a pending block or a zombie be used.
    fn first_unpassed(&self) -> Option<u32> {
        let passed = self.epochs.passed();
        let slow = self.slow.lock();
        let zombies = slow.physical.zombies.iter().map(|zombie| zombie.epoch).min();
        let refused = self.pending.lock().iter().filter(|one| one.refused).map(|one| one.stamp.epoch).min();
        let mut first = [zombies, refused].into_iter().flatten().filter(|epoch| *epoch > passed).min();
        for index in self.segment_indices() {
            let segment = self.segment(index);
            let free = segment.iter().map(|id| &segment.nodes[id]).filter(|node| node.kind == Kind::Free);
            first = free.map(|node| node.epoch).filter(|epoch| *epoch > passed).chain(first).min();
        }
        first
    }
}
