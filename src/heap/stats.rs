//! Counters and what they add up to.
#![forbid(unsafe_code)]

use super::inner::Inner;
use super::planned::PlanState;
use crate::backend::DriverCalls;
use crate::segment::nodes::Kind;
use crate::units::UNIT;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counters of what is off the hot path; relaxed, exact when read at rest. What is live is counted in [`super::tally`].
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) ooms: AtomicU64,
    pub(crate) slow_allocs: AtomicU64,
    pub(crate) host_waits: AtomicU64,
    pub(crate) gpu_waits: AtomicU64,
    pub(crate) handles_moved: AtomicU64,
    pub(crate) bytes_moved: AtomicU64,
    pub(crate) handles_joined: AtomicU64,
    pub(crate) bytes_joined: AtomicU64,
    pub(crate) joins_ended: AtomicU64,
    pub(crate) handles_rechunked: AtomicU64,
    pub(crate) bytes_rechunked: AtomicU64,
    pub(crate) handles_trimmed: AtomicU64,
    pub(crate) bytes_trimmed: AtomicU64,
    pub(crate) bytes_created: AtomicU64,
    pub(crate) teardown_nanos: AtomicU64,
    pub(crate) planned: AtomicU64,
    pub(crate) planned_elsewhere: AtomicU64,
}

/// What a heap did and holds. Sizes in bytes. Exact when no other thread is at work on the heap.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Stats {
    /// Bytes in live blocks, rounded to 512 B.
    pub allocated: u64,
    /// Bytes in live blocks as the client asked for them.
    pub requested: u64,
    /// Physical memory of all handles that exist, mapped or not.
    pub reserved: u64,
    /// Most `allocated` at once.
    pub peak_allocated: u64,
    /// Most `requested` at once.
    pub peak_requested: u64,
    /// Most `reserved` at once.
    pub peak_reserved: u64,
    /// Most physical memory that may exist; `u64::MAX`: no bound.
    pub limit: u64,
    /// Live blocks.
    pub live_blocks: u64,
    /// Free bytes behind free addresses.
    pub free: u64,
    /// Largest free range at one place.
    pub largest_free: u64,
    /// Bytes of free ranges that share a granule with a live block (internal to granules: no use to others).
    pub partly_live_granules: u64,
    /// Granules that small blocks hold with less than a quarter of their bytes live (internal fragmentation).
    pub pinned_by_small: u64,
    /// Bytes that freed blocks hold until the streams they were declared used on have passed and imports by other
    /// processes have ended.
    pub pending: u64,
    /// Bytes of addresses whose memory was moved away and that are still mapped.
    pub zombie: u64,
    /// Bytes inside pinned ranges.
    pub pinned: u64,
    /// Bytes of blocks that other processes may use ([`crate::Heap::export`]), live or pending.
    pub exported: u64,
    /// Bytes of other processes' blocks that are mapped here; they count nowhere else.
    pub imported: u64,
    /// Capture pools that exist, also released ones with live blocks.
    pub capture_pools: u64,
    /// Bytes of memory behind addresses of capture pools; their free part counts in `free` too.
    pub captured: u64,
    /// Allocations so far.
    pub allocs: u64,
    /// Frees so far.
    pub frees: u64,
    /// Requests, also those that failed, that needed more than a fitting free block.
    pub slow_allocs: u64,
    /// Requests that ended in an out-of-memory error.
    pub ooms: u64,
    /// Requests that waited on the host.
    pub host_waits: u64,
    /// Waits put on a stream of the device.
    pub gpu_waits: u64,
    /// Handles moved by remapping.
    pub handles_moved: u64,
    /// Bytes moved by remapping: growth that the moves saved.
    pub bytes_moved: u64,
    /// Handles mapped a second time, so that an idle end of them is used while the rest is live elsewhere.
    pub handles_joined: u64,
    /// Bytes of those ends: memory that nothing else could use.
    pub bytes_joined: u64,
    /// Second mappings that ended, so that the handle is one again where it was.
    pub joins_ended: u64,
    /// Idle handles given up so that smaller ones could be created.
    pub handles_rechunked: u64,
    /// Their bytes.
    pub bytes_rechunked: u64,
    /// Handles given back by trimming and shrinking.
    pub handles_trimmed: u64,
    /// Their bytes.
    pub bytes_trimmed: u64,
    /// Bytes created so far.
    pub bytes_created: u64,
    /// Bytes copied: always 0.
    pub bytes_copied: u64,
    /// Blocks that lie where the plan (`plan` in `XSEG_CONF`) says.
    pub planned: u64,
    /// Blocks that the plan foresaw and that lie elsewhere, since their place was not free.
    pub planned_elsewhere: u64,
    /// What became of the plan.
    pub plan: PlanState,
    /// Driver calls so far, in handles.
    pub driver_calls: DriverCalls,
    /// Time in driver calls in nanoseconds: modelled on `sim` and `host`, measured on `cuda`.
    pub driver_nanos: u64,
    /// The same by the kind of call: the fields are nanoseconds here.
    pub driver_call_nanos: DriverCalls,
    /// Host memory that the heap's tables hold, without untouched pages.
    pub metadata_bytes: u64,
}

impl Stats {
    /// 1 − peak allocated / peak reserved (0 when nothing was reserved).
    #[must_use]
    pub fn fragmentation(&self) -> f64 {
        if self.peak_reserved == 0 { 0.0 } else { 1.0 - self.peak_allocated as f64 / self.peak_reserved as f64 }
    }
}

impl Inner {
    pub(crate) fn stats(&self) -> Stats {
        let mut slow = self.slow.lock();
        self.housekeep(&mut slow);
        let counters = &self.counters;
        let get = |counter: &AtomicU64| counter.load(Relaxed);
        let (peak_allocated, peak_requested) = self.peaks.most();
        let mut stats = Stats {
            reserved: slow.physical.reserved(),
            peak_allocated,
            peak_requested,
            peak_reserved: slow.physical.peak_reserved(),
            limit: slow.limit,
            slow_allocs: get(&counters.slow_allocs),
            ooms: get(&counters.ooms),
            host_waits: get(&counters.host_waits),
            gpu_waits: get(&counters.gpu_waits),
            handles_moved: get(&counters.handles_moved),
            bytes_moved: get(&counters.bytes_moved),
            handles_joined: get(&counters.handles_joined),
            bytes_joined: get(&counters.bytes_joined),
            joins_ended: get(&counters.joins_ended),
            handles_rechunked: get(&counters.handles_rechunked),
            bytes_rechunked: get(&counters.bytes_rechunked),
            handles_trimmed: get(&counters.handles_trimmed),
            bytes_trimmed: get(&counters.bytes_trimmed),
            bytes_created: get(&counters.bytes_created),
            planned: get(&counters.planned),
            planned_elsewhere: get(&counters.planned_elsewhere),
            plan: self.plan_state(),
            driver_calls: self.driver.calls(),
            driver_nanos: self.driver.nanos().total(),
            driver_call_nanos: self.driver.nanos(),
            metadata_bytes: (slow.physical.metadata_bytes() + self.used.bytes()) as u64,
            ..Stats::default()
        };
        for tally in self.tallies() {
            let live = tally.live();
            stats.allocated += live.0;
            stats.requested += live.1;
            stats.allocs += tally.allocs();
        }
        // What other threads allocate meanwhile is not in the peaks that were read, or not yet.
        stats.peak_allocated = stats.peak_allocated.max(stats.allocated);
        stats.peak_requested = stats.peak_requested.max(stats.requested);
        self.add_segments(&mut stats);
        if self.shut.load(Relaxed) {
            // What lived and what was free went with all memory; the segments still have them, for frees that come late.
            stats = Stats {
                allocated: 0,
                requested: 0,
                live_blocks: 0,
                free: 0,
                largest_free: 0,
                partly_live_granules: 0,
                pinned_by_small: 0,
                pending: 0,
                captured: 0,
                ..stats
            };
        }
        // Whatever was allocated and does not live was freed.
        stats.frees = stats.allocs.saturating_sub(stats.live_blocks);
        stats.zombie = slow.physical.zombies.iter().map(|z| u64::from(z.granules) * crate::units::GRANULE).sum();
        stats.exported = self.exports.lock().blocks().values().sum();
        stats.imported = self.imports.lock().bytes();
        stats.capture_pools = self.pools.count();
        stats.pinned = slow.physical.pinned.iter().count() as u64 * crate::units::GRANULE;
        stats
    }

    fn add_segments(&self, stats: &mut Stats) {
        for index in self.segment_indices() {
            let segment = self.segment(index);
            stats.live_blocks += segment.live_blocks;
            if segment.private {
                let units = |id| u64::from(segment.nodes[id].len) * u64::from(segment.nodes[id].kind != Kind::Unmapped);
                stats.captured += segment.iter().map(units).sum::<u64>() * UNIT;
            }
            stats.free += segment.free_units() * UNIT;
            stats.largest_free = stats.largest_free.max(u64::from(segment.longest_free()) * UNIT);
            stats.metadata_bytes += segment.nodes.bytes() as u64;
            let shared = segment.shared_granules(index != super::inner::LARGE);
            stats.partly_live_granules += shared.free_units * UNIT;
            stats.pinned_by_small += shared.pinned_by_small;
            stats.pending += shared.pending_units * UNIT;
        }
    }

    pub(crate) fn reset_peaks(&self) {
        self.peaks.reset(self.tallies());
        self.slow.lock().physical.reset_peak();
    }
}
