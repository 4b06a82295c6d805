//! Planning: which addresses a request gets and which handles go behind them.
//!
//! Pure functions of a segment's nodes, the page table and counters; nothing here calls the driver or
//! changes state. [`place`] chooses the addresses, [`source`] the memory, [`join`] memory that nothing else can use (idle ends
//! of partly live handles), [`contiguous`] both for blocks on one handle; the heap executes the result in one place
//! (`heap::execute`).
#![forbid(unsafe_code)]

pub(crate) mod ahead;
pub(crate) mod contiguous;
pub(crate) mod join;
pub(crate) mod place;
pub(crate) mod source;

use crate::physical::HandleId;
use crate::segment::nodes::NodeId;
use std::ops::Range;

/// Where a request goes. Positions in units from the start of the heap's addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Placement {
    /// First node of the range.
    pub(crate) first: NodeId,
    /// The block's addresses.
    pub(crate) block: Range<u32>,
    /// Addresses that the transaction claims: the block and the rest of granules that it newly backs.
    pub(crate) claim: Range<u32>,
    /// Runs of granules without memory, ascending.
    pub(crate) missing: Vec<Range<u32>>,
    /// Addresses without memory that follow the claim, up to which growth may go on, in granules.
    pub(crate) room: u32,
    /// The same before the claim, where the block's first granule misses.
    pub(crate) before: u32,
}

/// A whole handle that lies idle behind free addresses and may be moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Victim {
    pub(crate) handle: HandleId,
    pub(crate) granules: u32,
    /// First granule of its addresses.
    pub(crate) home: u32,
    pub(crate) segment: u16,
    /// The free node that covers it.
    pub(crate) node: NodeId,
    /// When its memory was freed; the smaller the longer ago.
    pub(crate) age: u64,
    /// Epoch of its stamp.
    pub(crate) epoch: u32,
    /// No old mapping of it is left, so that releasing it would free its memory.
    pub(crate) releasable: bool,
}

/// Whole granules at a handle's start or end that lie idle while others of it do not. They may be used at a second mapping of
/// the handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct End {
    /// The handle; node, age and epoch are those of the idle part.
    pub(crate) whole: Victim,
    /// The idle part, in granules from the handle's start.
    pub(crate) from: u32,
    pub(crate) to: u32,
}

impl End {
    /// Idle granules.
    pub(crate) fn len(&self) -> u32 {
        self.to - self.from
    }

    /// Granules of addresses of the idle part, where the handle is mapped at `at`.
    pub(crate) fn granules_at(&self, at: u32) -> Range<u32> {
        at + self.from..at + self.to
    }
}

impl Placement {
    /// Granules without memory.
    pub(crate) fn missing(&self) -> u64 {
        self.missing.iter().map(|run| u64::from(run.end - run.start)).sum()
    }
}

impl Victim {
    /// Was it freed at `age` or before?
    fn freed_by(&self, age: u64) -> bool {
        self.age <= age
    }
}

/// Where the memory of a run of granules comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// A handle from the cache, of this many granules.
    Cached,
    /// A new handle.
    Create,
    /// A handle that lies idle elsewhere.
    Move(Victim),
    /// A second mapping of a handle, of which the idle end is used here and the rest stays where it is.
    Join(End),
}

/// One handle to put at `at`. Sizes in granules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fill {
    pub(crate) at: u32,
    pub(crate) granules: u32,
    pub(crate) source: Source,
}

/// The memory side of a plan.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Supply {
    /// Idle handles released first, so that smaller ones may be created (re-chunking).
    pub(crate) release: Vec<Victim>,
    /// Cached handles released first, as (granules, how many).
    pub(crate) drop_cached: Vec<u32>,
    pub(crate) fills: Vec<Fill>,
}

impl Supply {
    /// Granules of handles that lie idle and are moved, joined or released.
    pub(crate) fn touched(&self) -> u64 {
        let moved = self.fills.iter().filter(|fill| matches!(fill.source, Source::Move(_) | Source::Join(_)));
        let released = self.release.iter().map(|victim| victim.granules).chain(self.drop_cached.iter().copied());
        moved.map(|fill| fill.granules).chain(released).map(u64::from).sum()
    }
}
