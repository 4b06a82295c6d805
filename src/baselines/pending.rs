//! Blocks that were freed while work on other streams still uses them.

use super::device::Device;
use std::collections::{HashMap, HashSet};
use std::time::Duration;

/// Which streams use which live block, and which freed blocks wait for their events.
#[derive(Debug, Default)]
pub(super) struct Pending {
    uses: HashMap<u64, Vec<u64>>,
    /// When the block's events are done, and its address; in the order of the frees.
    waiting: Vec<(Duration, u64)>,
    /// The addresses in `waiting`.
    held: HashSet<u64>,
}

impl Pending {
    /// Notes a use of the block at `address`.
    pub(super) fn record(&mut self, address: u64, stream: u64) {
        let uses = self.uses.entry(address).or_default();
        if !uses.contains(&stream) {
            uses.push(stream);
        }
    }

    /// At a free: must the block wait for other streams? One event each, as of now.
    pub(super) fn holds(&mut self, device: &Device, address: u64) -> bool {
        let Some(uses) = self.uses.remove(&address) else { return false };
        let done = uses.iter().map(|id| device.passed(*id)).max();
        match done {
            Some(when) if when > device.timeline.now() => {
                self.waiting.push((when, address));
                self.held.insert(address);
                true
            }
            _ => false,
        }
    }

    /// Blocks whose events are done by now, in the order of their frees.
    pub(super) fn passed(&mut self, device: &Device) -> Vec<u64> {
        if self.waiting.is_empty() {
            return Vec::new();
        }
        let now = device.timeline.now();
        let (done, waiting) = self.waiting.drain(..).partition::<Vec<_>, _>(|(when, _)| *when <= now);
        self.waiting = waiting;
        let done: Vec<u64> = done.into_iter().map(|(_, address)| address).collect();
        done.iter().for_each(|address| _ = self.held.remove(address));
        done
    }

    /// Was the block freed already, and waits?
    pub(super) fn is_held(&self, address: u64) -> bool {
        self.held.contains(&address)
    }

    /// Lets the host wait for every event.
    pub(super) fn wait_all(&mut self, device: &mut Device) -> Vec<u64> {
        if let Some(last) = self.waiting.iter().map(|(when, _)| *when).max() {
            device.wait_until(last);
        }
        self.passed(device)
    }
}
