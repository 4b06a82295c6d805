//! Giving memory back: trim, the limit, shrinking by time and by watermark, pins, retiring streams.
#![forbid(unsafe_code)]

use super::after::record_abroad;
use super::inner::{Inner, Slow};
use crate::backend::{Abroad, StreamId};
use crate::config::Shrink;
use crate::error::{Error, PointerFault, Result};
use crate::physical::HandleId;
use crate::plan::Victim;
use crate::plan::source;
use crate::segment::Claim;
use crate::segment::nodes::Kind;
use crate::units::{GRANULE, UNITS_PER_GRANULE};
use std::collections::HashSet;
use std::io::Write;
use std::sync::atomic::Ordering::Relaxed;

impl Inner {
    /// Idle handles of all segments whose use has passed, longest idle first.
    fn idle(&self, slow: &Slow) -> Vec<Victim> {
        let claim = Claim { owner: 0, horizon: self.epochs.passed() };
        let mut idle: Vec<Victim> = Vec::new();
        for index in self.segment_indices() {
            let segment = self.segment(index);
            idle.extend(source::victims(index, &segment, &slow.physical, claim, 0..0));
        }
        idle.retain(|victim| victim.releasable && victim.epoch <= claim.horizon);
        idle.sort_unstable_by_key(|victim| (victim.age, victim.segment, victim.home));
        idle
    }

    /// Releases idle handles until `keep` bytes are reserved, or none is left. Bytes given back.
    pub(crate) fn trim_to(&self, slow: &mut Slow, keep: u64) -> u64 {
        self.housekeep(slow);
        let before = slow.physical.reserved();
        if (before > keep || self.imports_are_due()) && !self.may_edit(slow) {
            return 0;
        }
        self.merge_passed();
        while slow.physical.reserved() > keep {
            let excess = slow.physical.reserved() - keep;
            let Some(granules) = slow.physical.cached().next_back().map(|(granules, _)| granules) else { break };
            if u64::from(granules) * GRANULE > excess && keep > 0 {
                break;
            }
            let Some(id) = slow.physical.take_cached(granules) else { break };
            if self.release_handle(slow, id).is_err() {
                break;
            }
        }
        let mut excess = slow.physical.reserved().saturating_sub(keep);
        for victim in self.idle(slow) {
            let bytes = u64::from(victim.granules) * GRANULE;
            if excess == 0 {
                break;
            }
            if bytes <= excess && self.give_back(slow, &victim) {
                excess -= bytes;
            }
        }
        before - slow.physical.reserved()
    }

    /// Merges what could not be one block when it was freed, in all segments. Says whether anything was.
    pub(crate) fn merge_passed(&self) -> bool {
        let passed = self.epochs.passed();
        self.segment_indices().filter(|index| self.segment(*index).merge_passed(passed)).count() > 0
    }

    /// Releases idle handles until the limit is kept, also one that is larger than what is too much.
    pub(crate) fn obey_limit(&self, slow: &mut Slow) {
        let limit = slow.limit;
        if slow.physical.reserved() <= limit || (self.quiesce && self.capture_under_way()) {
            return;
        }
        self.trim_to(slow, limit);
        let mut idle = self.idle(slow);
        idle.sort_by_key(|victim| std::cmp::Reverse(victim.granules));
        while slow.physical.reserved() > limit {
            let cached = slow.physical.cached().next().map(|(granules, _)| granules);
            let gone = match cached.and_then(|granules| slow.physical.take_cached(granules)) {
                Some(id) => self.release_handle(slow, id).is_ok(),
                None => match idle.pop() {
                    Some(victim) => self.give_back(slow, &victim) || !idle.is_empty(),
                    None => false,
                },
            };
            if !gone {
                break;
            }
        }
    }

    /// Makes page tables safe to edit where that needs the device to be idle (`remap:quiesce`): waits for it.
    fn may_edit(&self, slow: &mut Slow) -> bool {
        if !self.quiesce {
            return true;
        }
        // Waiting for the device would invalidate the capture.
        if self.capture_under_way() {
            return false;
        }
        let quiet = self.quiesce_device(slow);
        if let Err(error) = &quiet {
            tracing::warn!(%error, "the device could not be waited for; nothing is given back");
        }
        quiet.is_ok()
    }

    /// Unmaps and releases one idle handle.
    fn give_back(&self, slow: &mut Slow, victim: &Victim) -> bool {
        let claim = Claim { owner: 0, horizon: self.epochs.passed() };
        let released = self.uncover(slow, claim, victim) && self.release_handle(slow, victim.handle).is_ok();
        if released {
            self.counters.handles_trimmed.fetch_add(1, Relaxed);
            self.counters.bytes_trimmed.fetch_add(u64::from(victim.granules) * GRANULE, Relaxed);
        }
        released
    }

    /// Sets the limit in bytes, and releases idle memory above it as far as that is possible now.
    pub(crate) fn set_limit(&self, bytes: u64) -> u64 {
        let mut slow = self.slow.lock();
        slow.limit = bytes;
        self.limit.store(bytes, Relaxed);
        if slow.physical.reserved() > bytes {
            self.close_epoch();
            self.obey_limit(&mut slow);
        }
        slow.physical.reserved()
    }

    /// Deferred work and time-based shrinking.
    pub(crate) fn tick(&self) {
        let mut slow = self.slow.lock();
        self.close_epoch();
        self.housekeep(&mut slow);
        // Another process waits for its memory, and no request here may ever come.
        if self.imports_are_due() {
            self.may_edit(&mut slow);
        }
        self.obey_limit(&mut slow);
        self.shrink(&mut slow);
    }

    /// Gives idle memory back as `shrink:idle` and `shrink:watermark` say; called on the slow path, after
    /// large frees and by `tick`.
    pub(crate) fn shrink(&self, slow: &mut Slow) {
        match self.config.shrink {
            Shrink::Idle(duration) => {
                let now = u64::try_from(self.driver.backend().now().as_nanos()).unwrap_or(u64::MAX);
                let after = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
                self.merge_passed();
                let idle = self.idle(slow);
                slow.idle_since.retain(|handle, (age, _)| idle.iter().any(|v| v.handle == *handle && v.age == *age));
                let due = slow.idle_since.values().any(|(_, since)| now - since >= after);
                if due && !self.may_edit(slow) {
                    return;
                }
                for victim in idle {
                    let (_, since) = *slow.idle_since.entry(victim.handle).or_insert((victim.age, now));
                    let room = slow.physical.reserved().saturating_sub(self.config.keep);
                    if now - since >= after
                        && u64::from(victim.granules) * GRANULE <= room
                        && self.give_back(slow, &victim)
                    {
                        slow.idle_since.remove(&victim.handle);
                    }
                }
            }
            Shrink::Watermark(share) => {
                let high = (self.live() as f64 * (1.0 + share)) as u64;
                if slow.physical.reserved() > high {
                    self.trim_to(slow, high.max(self.config.keep));
                }
            }
            Shrink::Never | Shrink::Oom => {}
        }
    }

    /// Granules that a range of addresses of the heap touches.
    fn granules_of(&self, address: u64, bytes: u64) -> Result<std::ops::Range<u32>> {
        if bytes == 0 {
            return Err(Error::InvalidArgument(format!("a range of 0 bytes at {address:#x} cannot be pinned")));
        }
        let fault = Error::InvalidPointer { address, why: PointerFault::Foreign };
        let first = self.space.locate(address).ok_or(fault.clone())?;
        let end = address.checked_add(bytes - 1).ok_or(fault.clone())?;
        let last = self.space.locate(end).ok_or(fault)?;
        Ok(first.unit() / UNITS_PER_GRANULE..last.unit() / UNITS_PER_GRANULE + 1)
    }

    pub(crate) fn pin(&self, address: u64, bytes: u64) -> Result<()> {
        let range = self.granules_of(address, bytes)?;
        let mut slow = self.slow.lock();
        let mapped = slow.physical.mapped.count(range.clone());
        if mapped != range.end - range.start {
            return Err(Error::InvalidArgument(format!(
                "pin of {bytes} bytes at {address:#x}: {} of its granules have no memory",
                range.end - range.start - mapped
            )));
        }
        slow.pin(range);
        Ok(())
    }

    pub(crate) fn unpin(&self, address: u64, bytes: u64) -> Result<()> {
        let range = self.granules_of(address, bytes)?;
        let mut slow = self.slow.lock();
        // Those of exports end with their imports alone (I13).
        let of_exports = self.exports.lock().pins_of(&range);
        if slow.pins_of(&range) > of_exports && slow.unpin(&range) {
            return Ok(());
        }
        drop(slow);
        let why = format!("unpin of {bytes} bytes at {address:#x}: that range is not pinned");
        Err(Error::InvalidArgument(why))
    }

    /// Ends a stream: what it freed is everybody's once its epoch has passed.
    pub(crate) fn retire(&self, stream: StreamId) -> Result<()> {
        let backend = self.driver.backend();
        if backend.is_default(stream) {
            let why = "the default stream is never destroyed; retire streams that the program made";
            return Err(Error::InvalidArgument(why.into()));
        }
        let key = backend.stream_key(stream)?;
        // Where events are per stream, none may be missing when the stream is forgotten (I5).
        if !backend.capabilities().context_events && self.capture_under_way() {
            let why = "no stream can be retired while a graph is captured: this driver has no context-wide events";
            return Err(Error::InvalidArgument(why.into()));
        }
        // While the stream is known still: where events are per stream, no later epoch covers its work.
        self.close_epoch_now();
        let Some(stream) = self.streams.retire(key) else {
            return Err(Error::DeadStream {
                stream: stream.0,
                why: "the heap does not know it, or it was retired before".into(),
            });
        };
        backend.retired(stream.id);
        self.retire_uses(key);
        let _slow = self.slow.lock();
        for index in self.segment_indices() {
            self.segment(index).disown(stream.slot);
        }
        self.streams.reuse(stream);
        Ok(())
    }

    /// Releases everything; blocks that are still live go too. Waits for the device first.
    pub(crate) fn shut_down(&self) {
        // What a forked child gives back would be the parent's, and a lock may be held by a thread that it does not have.
        let ours = self.driver.is_ours();
        // What the program did, without what the end does: nothing is reserved after it, and it takes driver time of its own.
        let stats = (ours && self.config.stats && !self.shut.load(Relaxed)).then(|| self.stats());
        if self.shut.swap(true, Relaxed) || !ours {
            return;
        }
        if let Some(stats) = stats {
            // That nobody reads it is no reason to stop.
            let _ = writeln!(std::io::stderr(), "xseg: {stats:#?}");
        }
        self.pools.shut();
        // Dropped without the lock: what a callback owns may use the heap as it ends.
        let _callbacks;
        let mut slow = self.slow.lock();
        let backend = self.driver.backend();
        // Work of other devices that uses blocks: what this device is waited for comes after it.
        self.pending.lock().iter_mut().filter(|one| !one.away.is_empty()).for_each(|one| one.record_away(backend));
        let live: Vec<Abroad> = self.uses.lock().values().flatten().filter_map(|one| one.abroad).collect();
        let abroad: Vec<_> = live.iter().filter_map(|abroad| record_abroad(backend, abroad).ok()).collect();
        if let Err(error) = backend.quiesce() {
            tracing::warn!(%error, "the device could not be waited for at shutdown");
        }
        abroad.into_iter().for_each(|event| backend.recycle(event));
        self.epochs.clear(backend);
        for one in self.pending.lock().drain(..) {
            crate::epoch::recycle(backend, one.events);
        }
        let before = self.driver.nanos().total();
        let report = |what: &str, error: crate::error::DriverError| tracing::warn!(%error, "{what} at shutdown");
        self.end_exports(&mut slow);
        self.end_all_imports(&mut slow);
        let lent = self.exported_handles(&slow);
        // A second try, since a refusal may be of the moment.
        if let Err(error) = self.release_all(&mut slow, &lent).or_else(|_| self.release_all(&mut slow, &lent)) {
            report("memory stays", error);
        }
        slow.physical.forget_cache();
        self.exports.lock().hang_up();
        // A callback may hold this heap.
        _callbacks = std::mem::take(&mut *self.callbacks.lock());
        self.counters.teardown_nanos.fetch_add(self.driver.nanos().total() - before, Relaxed);
        // All that the door knows of: also one that could not be used, and not be given back then.
        for (address, bytes) in self.driver.reservations() {
            let unreserve = || self.driver.unreserve(address, bytes);
            if let Err(error) = unreserve().or_else(|_| unreserve()) {
                report("a reservation stays", error);
            }
        }
    }

    /// Unmaps and releases all that can be; other processes keep what is `lent`. The last refusal.
    fn release_all(
        &self,
        slow: &mut Slow,
        lent: &HashSet<HandleId>,
    ) -> std::result::Result<(), crate::error::DriverError> {
        let mut done = Ok(());
        while !slow.physical.joins.is_empty() {
            slow.physical.parted(0, 0);
        }
        for zombie in std::mem::take(&mut slow.physical.zombies) {
            let address = self.space.address(zombie.at * UNITS_PER_GRANULE);
            match self.driver.unmap(address, u64::from(zombie.granules) * GRANULE) {
                Ok(()) => slow.physical.buried(&zombie),
                Err(error) => {
                    slow.physical.zombies.push(zombie);
                    done = Err(error);
                }
            }
        }
        let handles: Vec<_> = slow.physical.handles().map(|(id, handle)| (id, *handle)).collect();
        for (id, handle) in handles {
            let bytes = u64::from(handle.granules) * GRANULE;
            if let Some(home) = handle.home {
                if let Err(error) = self.driver.unmap(self.space.address(home * UNITS_PER_GRANULE), bytes) {
                    done = Err(error);
                    continue;
                }
                slow.physical.unmapped(home..home + handle.granules);
                slow.physical.take_home(id);
            }
            if slow.physical.handle(id).is_some_and(|handle| handle.zombies > 0) {
                continue;
            }
            let released = match lent.contains(&id) {
                true => self.driver.release_shared(handle.token, bytes),
                false => self.driver.release(handle.token, bytes),
            };
            match released {
                Ok(()) => slow.physical.released(id),
                Err(error) => done = Err(error),
            }
        }
        done
    }

    /// Checks every invariant that can be checked at rest (tests).
    pub(crate) fn check(&self) -> std::result::Result<(), String> {
        let slow = self.slow.lock();
        slow.physical.check()?;
        self.check_exports(&slow)?;
        for index in self.segment_indices() {
            let segment = self.segment(index);
            segment.check().map_err(|why| format!("segment {index}: {why}"))?;
            for id in segment.iter() {
                let node = &segment.nodes[id];
                let range = node.start / UNITS_PER_GRANULE..node.end().div_ceil(UNITS_PER_GRANULE);
                let all = range.end - range.start;
                let (mapped, lent) =
                    (slow.physical.mapped.count(range.clone()), slow.physical.lent.count(range.clone()));
                let zombie = slow.physical.zombie.count(range);
                let right = match node.kind {
                    Kind::Live | Kind::Free | Kind::Pending => mapped == all,
                    Kind::Unmapped => mapped == 0 && zombie == 0 && lent == 0,
                    Kind::Zombie => mapped == 0 && zombie == all,
                    Kind::Lent => mapped == 0 && lent == all,
                    // Nothing is kept unmerged in a segment that was just locked.
                    Kind::Busy | Kind::Cached => false,
                };
                if !right {
                    return Err(format!(
                        "segment {index}: {:?} node at unit {} has {mapped} of {all} granules mapped, {zombie} zombie",
                        node.kind, node.start
                    ));
                }
            }
        }
        Ok(())
    }
}
