//! What the driver's other ways to allocate cost, and what a copy costs: for comparison only, no heap
//! uses any of it.

use super::CudaBackend;
use super::sys::KIND_CALLS;
use crate::backend::Backend;
use crate::error::{DriverCall, DriverError};
use std::time::{Duration, Instant};

/// A way to allocate memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// `cuMemAlloc`.
    Device,
    /// `cuMemAllocAsync`, from the device's default pool, which keeps everything.
    Pool,
    /// `cuMemAllocManaged`, attached to every device.
    Managed,
    /// `cuMemHostAlloc` with these flags (0, portable 1, mapped 2, write-combined 4).
    Pinned(u32),
}

/// What one allocation and one free took, with the driver's return: medians.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KindCost {
    /// Time of the allocation.
    pub allocate: Duration,
    /// Time of the free.
    pub free: Duration,
}

fn median(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

impl CudaBackend {
    fn need_kinds(&self) -> Result<(), DriverError> {
        let missing = self.api().missing(&KIND_CALLS);
        if missing.is_empty() {
            return Ok(());
        }
        Err(DriverError::new(DriverCall::Other, format!("the CUDA driver has no {}", missing.join(", "))))
    }

    /// Times `rounds` allocations of `bytes`, each freed before the next.
    ///
    /// # Errors
    /// When the driver lacks or refuses a call.
    pub fn time_kind(&self, kind: Kind, bytes: u64, rounds: usize) -> Result<KindCost, DriverError> {
        self.time_kind_batch(kind, bytes, 1, rounds)
    }

    /// Times `rounds` batches of `count` allocations of `bytes` that live at once; per batch.
    ///
    /// # Errors
    /// When the driver lacks or refuses a call.
    pub fn time_kind_batch(
        &self,
        kind: Kind,
        bytes: u64,
        count: usize,
        rounds: usize,
    ) -> Result<KindCost, DriverError> {
        self.need_kinds()?;
        let _entered = self.primary.enter(true)?;
        if kind == Kind::Pool {
            self.api().keep_pool(self.primary.device())?;
        }
        let (mut allocate, mut free) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            let mut all = Vec::with_capacity(count);
            let start = Instant::now();
            let made: Result<(), DriverError> = (0..count).try_for_each(|_| {
                all.push(self.allocate_kind(kind, bytes)?);
                Ok(())
            });
            allocate.push(start.elapsed());
            let start = Instant::now();
            for address in all {
                // SAFETY: allocated above in this way and used by nothing.
                unsafe { self.free_kind(kind, address) }?;
            }
            free.push(start.elapsed());
            made?;
        }
        // What a pool freed is the pool's again only when its stream has come there.
        self.quiesce()?;
        Ok(KindCost { allocate: median(&mut allocate), free: median(&mut free) })
    }

    fn allocate_kind(&self, kind: Kind, bytes: u64) -> Result<u64, DriverError> {
        match kind {
            Kind::Device => self.api().allocate_plain(bytes),
            Kind::Pool => self.api().allocate_async(bytes),
            Kind::Managed => self.api().allocate_managed(bytes),
            Kind::Pinned(flags) => self.api().allocate_host(bytes, flags),
        }
    }

    /// # Safety
    /// `address` came from [`CudaBackend::allocate_kind`] with this kind and is not used again.
    unsafe fn free_kind(&self, kind: Kind, address: u64) -> Result<(), DriverError> {
        match kind {
            // SAFETY: the caller's.
            Kind::Device | Kind::Managed => unsafe { self.api().free_plain(address) },
            // SAFETY: the caller's.
            Kind::Pool => unsafe { self.api().free_async(address) },
            // SAFETY: the caller's.
            Kind::Pinned(_) => unsafe { self.api().free_host(address) },
        }
    }

    /// Time of one copy of `bytes` within the device, by `cuMemcpyDtoDAsync`: the median of `rounds`.
    ///
    /// # Errors
    /// When the driver lacks or refuses a call, or has no memory for two buffers.
    pub fn time_copy(&self, bytes: u64, rounds: usize) -> Result<Duration, DriverError> {
        self.need_kinds()?;
        let _entered = self.primary.enter(true)?;
        let from = self.api().allocate_plain(bytes)?;
        let copied = self.api().allocate_plain(bytes).and_then(|to| {
            let mut times = Vec::new();
            let done = (0..=rounds).try_for_each(|round| {
                let start = Instant::now();
                // SAFETY: two buffers of `bytes` that nothing else uses.
                unsafe { self.api().copy_within(to, from, bytes) }?;
                self.api().synchronize()?;
                // The first one warms up.
                if round > 0 {
                    times.push(start.elapsed());
                }
                Ok(())
            });
            // SAFETY: allocated above; freeing waits for the device.
            unsafe { self.api().free_plain(to) }?;
            done.map(|()| median(&mut times))
        });
        // SAFETY: as above.
        unsafe { self.api().free_plain(from) }?;
        copied
    }
}
