//! What lies where: for pictures of memory and snapshots.
#![forbid(unsafe_code)]

use super::captures::PoolId;
use super::inner::{FIRST_POOL, Inner};
use crate::backend::StreamId;
use crate::segment::nodes::Kind;
use crate::units::UNIT;

/// What a range of mapped addresses is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RegionState {
    /// A block of the client.
    Live,
    /// Free memory.
    Free,
    /// Freed, waiting for the streams that it was declared used on, or for exports of it that are open.
    Pending,
    /// Still mapped, but its memory was given to another address, also a part that is used there (a joined handle).
    Zombie,
}

/// One range of mapped addresses, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Region {
    /// First address.
    pub address: u64,
    /// Length.
    pub bytes: u64,
    /// What the client asked for; 0 where it has nothing.
    pub requested: u64,
    /// What it is.
    pub state: RegionState,
    /// The stream that it was allocated on, or freed by; `None`: any may have it.
    pub stream: Option<StreamId>,
    /// The capture pool that it belongs to.
    pub pool: Option<PoolId>,
    /// It is memory for small blocks.
    pub small: bool,
}

impl Inner {
    /// All mapped ranges, by address.
    pub(crate) fn layout(&self) -> Vec<Region> {
        // Nothing is mapped, moved or unmapped while this is held.
        let slow = self.slow.lock();
        let streams = self.streams.all();
        let mut regions = Vec::new();
        for index in self.segment_indices() {
            let pool = self.pools.owner(index);
            let segment = self.segment(index);
            for node in segment.iter().map(|id| &segment.nodes[id]) {
                let state = match node.kind {
                    Kind::Live => RegionState::Live,
                    Kind::Free | Kind::Cached => RegionState::Free,
                    Kind::Pending => RegionState::Pending,
                    Kind::Zombie | Kind::Lent => RegionState::Zombie,
                    // Claims are made under the driver lock only, so that none is under way.
                    Kind::Unmapped | Kind::Busy => continue,
                };
                let bytes = u64::from(node.len) * UNIT;
                let live = state == RegionState::Live;
                regions.push(Region {
                    address: self.space.address(node.start),
                    bytes,
                    requested: if live { bytes - u64::from(node.slack) } else { 0 },
                    state,
                    stream: streams.iter().find(|stream| stream.slot == node.owner).map(|stream| stream.id),
                    pool: pool.map(|pool| pool.0),
                    small: pool.map_or(index >= FIRST_POOL, |pool| pool.1),
                });
            }
        }
        drop(slow);
        regions.sort_unstable_by_key(|region| region.address);
        regions
    }
}
