//! Memory without a heap, counted.

use std::cell::Cell;
use std::rc::Rc;

/// `Vec`s on the host, the driver's own allocations on a GPU; how many bytes of them live.
#[derive(Debug, Clone, Default)]
pub(crate) struct Plain {
    live: Rc<Cell<u64>>,
    peak: Rc<Cell<u64>>,
}

impl Plain {
    /// Counts `bytes` until the result is dropped.
    pub(crate) fn count(&self, bytes: u64) -> Tally {
        self.live.set(self.live.get() + bytes);
        self.peak.set(self.peak.get().max(self.live.get()));
        Tally { bytes, live: self.live.clone() }
    }

    /// Most bytes that lived at once.
    pub(crate) fn peak(&self) -> u64 {
        self.peak.get()
    }
}

/// One allocation of a [`Plain`].
#[derive(Debug)]
pub(crate) struct Tally {
    bytes: u64,
    live: Rc<Cell<u64>>,
}

impl Drop for Tally {
    fn drop(&mut self) {
        self.live.set(self.live.get() - self.bytes);
    }
}
