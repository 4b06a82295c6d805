//! Ways to allocate beside virtual memory, and copies: what measurements compare with.

use super::{Api, check, handle};
use crate::error::{DriverCall, DriverError};
use cudarc::driver::sys;
use std::ptr::{null_mut, with_exposed_provenance_mut};

/// What this file calls beyond the required list; callers ask [`Api::missing`] first.
pub(crate) const KIND_CALLS: [&str; 10] = [
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemAllocAsync",
    "cuMemFreeAsync",
    "cuMemAllocManaged",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemcpyDtoDAsync_v2",
    "cuDeviceGetDefaultMemPool",
    "cuMemPoolSetAttribute",
];

impl Api {
    /// The device's default pool gives nothing back by itself from now on.
    pub(crate) fn keep_pool(&self, device: i32) -> Result<(), DriverError> {
        let mut pool = null_mut();
        // SAFETY: writes one handle.
        let result = unsafe { sys::cuDeviceGetDefaultMemPool(&raw mut pool, device) };
        check(DriverCall::Other, "cuDeviceGetDefaultMemPool", result)?;
        let mut keep = u64::MAX;
        let attribute = sys::CUmemPool_attribute_enum::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        // SAFETY: the attribute is a `cuuint64_t`.
        let result = unsafe { sys::cuMemPoolSetAttribute(pool, attribute, (&raw mut keep).cast()) };
        check(DriverCall::Other, "cuMemPoolSetAttribute", result)
    }

    /// From the default pool, on the legacy stream.
    pub(crate) fn allocate_async(&self, bytes: u64) -> Result<u64, DriverError> {
        let mut address = 0;
        // SAFETY: writes one number.
        let result = unsafe { sys::cuMemAllocAsync(&raw mut address, bytes as usize, handle(super::STREAM_LEGACY)) };
        check(DriverCall::Other, "cuMemAllocAsync", result)?;
        Ok(address)
    }

    /// # Safety
    /// `address` came from [`Api::allocate_async`] and is not used again.
    pub(crate) unsafe fn free_async(&self, address: u64) -> Result<(), DriverError> {
        // SAFETY: the caller's.
        let result = unsafe { sys::cuMemFreeAsync(address, handle(super::STREAM_LEGACY)) };
        check(DriverCall::Other, "cuMemFreeAsync", result)
    }

    /// Freed by [`Api::free_plain`].
    pub(crate) fn allocate_managed(&self, bytes: u64) -> Result<u64, DriverError> {
        let mut address = 0;
        let flags = sys::CUmemAttach_flags::CU_MEM_ATTACH_GLOBAL as u32;
        // SAFETY: writes one number.
        let result = unsafe { sys::cuMemAllocManaged(&raw mut address, bytes as usize, flags) };
        check(DriverCall::Other, "cuMemAllocManaged", result)?;
        Ok(address)
    }

    /// Pinned host memory with flags of `cuMemHostAlloc`.
    pub(crate) fn allocate_host(&self, bytes: u64, flags: u32) -> Result<u64, DriverError> {
        let mut memory = null_mut();
        // SAFETY: writes one pointer.
        let result = unsafe { sys::cuMemHostAlloc(&raw mut memory, bytes as usize, flags) };
        check(DriverCall::Other, "cuMemHostAlloc", result)?;
        Ok(memory.expose_provenance() as u64)
    }

    /// # Safety
    /// `address` came from [`Api::allocate_host`]; neither side uses it again.
    pub(crate) unsafe fn free_host(&self, address: u64) -> Result<(), DriverError> {
        // SAFETY: the caller's.
        let result = unsafe { sys::cuMemFreeHost(with_exposed_provenance_mut(address as usize)) };
        check(DriverCall::Other, "cuMemFreeHost", result)
    }

    /// Queues a copy on the legacy stream.
    ///
    /// # Safety
    /// Both ranges may be used by that stream until it has passed this, and do not overlap.
    pub(crate) unsafe fn copy_within(&self, to: u64, from: u64, bytes: u64) -> Result<(), DriverError> {
        // SAFETY: the caller's.
        let result = unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes as usize, handle(super::STREAM_LEGACY)) };
        check(DriverCall::Other, "cuMemcpyDtoDAsync", result)
    }
}
