//! Physical memory, reservations and mappings.

use super::{Api, check};
use crate::error::{DriverCall, DriverError};
use cudarc::driver::sys;
use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::without_provenance_mut;

/// How physical memory is created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MemoryKind {
    /// Ordinal of the device.
    pub(crate) device: i32,
    /// Can be exported as a file descriptor.
    pub(crate) posix_fd: bool,
    /// Network cards may read and write it.
    pub(crate) rdma: bool,
}

const _: () = assert!(size_of::<sys::CUmemLocation>() == 8 && align_of::<sys::CUmemLocation>() == 4);

/// The location "device `ordinal`". The binding's second field moved into a union in CUDA 13.2.
fn location(ordinal: i32) -> sys::CUmemLocation {
    let kind = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as u32;
    // SAFETY: the C type is an enumeration and an `int`, in this order (asserted: 8 bytes, aligned
    // to 4), and the enumeration's value is one of its own.
    unsafe { std::mem::transmute::<[u32; 2], sys::CUmemLocation>([kind, ordinal.cast_unsigned()]) }
}

fn properties(kind: MemoryKind) -> sys::CUmemAllocationProp {
    // SAFETY: a C struct of numbers and a pointer; zero is a valid value of its enumerations too
    // (`CU_MEM_ALLOCATION_TYPE_INVALID`, `CU_MEM_HANDLE_TYPE_NONE`, no location).
    let mut properties: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
    properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = location(kind.device);
    if kind.posix_fd {
        properties.requestedHandleTypes = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    }
    properties.allocFlags.gpuDirectRDMACapable = u8::from(kind.rdma);
    properties
}

/// Which devices may read and write a mapping, or may no more; ready for the driver, which leaves those that are not named as they are.
#[derive(Clone)]
pub(crate) struct Access(Vec<sys::CUmemAccessDesc>);

impl Access {
    pub(crate) fn new(devices: impl IntoIterator<Item = i32>) -> Self {
        let flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let describe = |device| sys::CUmemAccessDesc { location: location(device), flags };
        Self(devices.into_iter().map(describe).collect())
    }

    /// For the end of a device's access.
    pub(crate) fn none(device: i32) -> Self {
        let flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_NONE;
        Self(vec![sys::CUmemAccessDesc { location: location(device), flags }])
    }
}

impl std::fmt::Debug for Access {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Access({} devices)", self.0.len())
    }
}

impl Api {
    pub(crate) fn memory_info(&self) -> Result<(u64, u64), DriverError> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two numbers.
        let result = unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) };
        check(DriverCall::Other, "cuMemGetInfo", result)?;
        Ok((free as u64, total as u64))
    }

    pub(crate) fn granularity(&self, kind: MemoryKind) -> Result<u64, DriverError> {
        let minimum = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        let (mut bytes, properties) = (0, properties(kind));
        // SAFETY: reads the properties, writes one number.
        let result = unsafe { sys::cuMemGetAllocationGranularity(&raw mut bytes, &raw const properties, minimum) };
        check(DriverCall::Other, "cuMemGetAllocationGranularity", result)?;
        Ok(bytes as u64)
    }

    pub(crate) fn reserve(&self, bytes: u64, alignment: u64) -> Result<u64, DriverError> {
        let mut address = 0;
        // SAFETY: writes one number; nothing is mapped there.
        let result = unsafe { sys::cuMemAddressReserve(&raw mut address, bytes as usize, alignment as usize, 0, 0) };
        check(DriverCall::Reserve, "cuMemAddressReserve", result)?;
        Ok(address)
    }

    /// # Safety
    /// As [`crate::backend::Backend::unreserve`].
    pub(crate) unsafe fn unreserve(&self, address: u64, bytes: u64) -> Result<(), DriverError> {
        // SAFETY: the caller's.
        check(DriverCall::Unreserve, "cuMemAddressFree", unsafe { sys::cuMemAddressFree(address, bytes as usize) })
    }

    pub(crate) fn create(&self, bytes: u64, kind: MemoryKind) -> Result<u64, DriverError> {
        let (mut memory, properties) = (0, properties(kind));
        // SAFETY: reads the properties, writes one number.
        let result = unsafe { sys::cuMemCreate(&raw mut memory, bytes as usize, &raw const properties, 0) };
        check(DriverCall::Create, "cuMemCreate", result)?;
        Ok(memory)
    }

    /// # Safety
    /// As [`crate::backend::Backend::release`].
    pub(crate) unsafe fn release(&self, memory: u64) -> Result<(), DriverError> {
        // SAFETY: the caller's.
        check(DriverCall::Release, "cuMemRelease", unsafe { sys::cuMemRelease(memory) })
    }

    /// # Safety
    /// As [`crate::backend::Backend::map`].
    pub(crate) unsafe fn map(&self, address: u64, memory: u64, bytes: u64) -> Result<(), DriverError> {
        // SAFETY: the caller's.
        check(DriverCall::Map, "cuMemMap", unsafe { sys::cuMemMap(address, bytes as usize, 0, memory, 0) })
    }

    /// As `access` says.
    ///
    /// # Safety
    /// As [`crate::backend::Backend::set_access`].
    pub(crate) unsafe fn set_access(&self, address: u64, bytes: u64, access: &Access) -> Result<(), DriverError> {
        let (first, count) = (access.0.as_ptr(), access.0.len());
        // SAFETY: the range is the caller's; reads `count` descriptions.
        let result = unsafe { sys::cuMemSetAccess(address, bytes as usize, first, count) };
        check(DriverCall::SetAccess, "cuMemSetAccess", result)
    }

    /// # Safety
    /// As [`crate::backend::Backend::unmap`].
    pub(crate) unsafe fn unmap(&self, address: u64, bytes: u64) -> Result<(), DriverError> {
        // SAFETY: the caller's.
        check(DriverCall::Unmap, "cuMemUnmap", unsafe { sys::cuMemUnmap(address, bytes as usize) })
    }

    /// # Safety
    /// `memory` is a live handle.
    pub(crate) unsafe fn export_fd(&self, memory: u64) -> Result<OwnedFd, DriverError> {
        let kind = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        let mut descriptor: c_int = -1;
        let out: *mut c_void = (&raw mut descriptor).cast();
        // SAFETY: the handle is the caller's; for this type the driver writes one `int`.
        let result = unsafe { sys::cuMemExportToShareableHandle(out, memory, kind, 0) };
        check(DriverCall::Other, "cuMemExportToShareableHandle", result)?;
        // SAFETY: a new descriptor that nobody else knows.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
    }

    /// A handle for the memory behind a descriptor of [`Api::export_fd`], of any process. The descriptor stays the caller's.
    pub(crate) fn import_fd(&self, descriptor: BorrowedFd<'_>) -> Result<u64, DriverError> {
        let kind = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        let mut memory = 0;
        // For this type the "handle of the operating system" is the descriptor's number itself.
        let number: *mut c_void = without_provenance_mut(descriptor.as_raw_fd().cast_unsigned() as usize);
        // SAFETY: the descriptor is open during the call; writes one number.
        let result = unsafe { sys::cuMemImportFromShareableHandle(&raw mut memory, number, kind) };
        check(DriverCall::Other, "cuMemImportFromShareableHandle", result)?;
        Ok(memory)
    }
}
