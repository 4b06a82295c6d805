//! Kernels, copies, plain allocations and streams: what tests and measurements need and the heap
//! does not. [`Api::missing`] of [`MODULE_CALLS`] comes first.

use super::{Api, check, handle, number};
use crate::error::{DriverCall, DriverError};
use cudarc::driver::sys;
use std::ffi::{CStr, c_void};
use std::ptr::null_mut;

/// The driver's calls behind the wrappers of this file.
pub(crate) const MODULE_CALLS: [&str; 10] = [
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuModuleGetFunction",
    "cuLaunchKernel",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemFreeHost",
];

impl Api {
    /// Compiles and loads PTX text into the current context.
    pub(crate) fn load_module(&self, image: &CStr) -> Result<u64, DriverError> {
        let mut module = null_mut();
        // SAFETY: reads a text that ends with zero, writes one pointer.
        let result = unsafe { sys::cuModuleLoadData(&raw mut module, image.as_ptr().cast()) };
        check(DriverCall::Other, "cuModuleLoadData", result)?;
        Ok(number(module))
    }

    /// # Safety
    /// `module` came from [`Api::load_module`]; none of its kernels runs or is launched again.
    pub(crate) unsafe fn unload_module(&self, module: u64) -> Result<(), DriverError> {
        // SAFETY: the caller's.
        check(DriverCall::Other, "cuModuleUnload", unsafe { sys::cuModuleUnload(handle(module)) })
    }

    /// # Safety
    /// `module` is loaded.
    pub(crate) unsafe fn function(&self, module: u64, name: &CStr) -> Result<u64, DriverError> {
        let mut function = null_mut();
        // SAFETY: the module is the caller's; reads a text, writes one pointer.
        let result = unsafe { sys::cuModuleGetFunction(&raw mut function, handle(module), name.as_ptr()) };
        check(DriverCall::Other, "cuModuleGetFunction", result)?;
        Ok(number(function))
    }

    /// Queues a kernel whose parameters are all 64 bits wide, on a one-dimensional grid.
    ///
    /// # Safety
    /// `function` and `stream` exist; `parameters` are as many as the kernel has, and what the kernel
    /// does with them is allowed until it has run.
    pub(crate) unsafe fn launch(
        &self,
        function: u64,
        (blocks, threads): (u32, u32),
        stream: u64,
        parameters: &[u64],
    ) -> Result<(), DriverError> {
        let mut places: Vec<*mut c_void> =
            parameters.iter().map(|value| std::ptr::from_ref(value).cast_mut().cast()).collect();
        let places = places.as_mut_ptr();
        // SAFETY: the caller's; the parameters are read during the call.
        let result = unsafe {
            sys::cuLaunchKernel(handle(function), blocks, 1, 1, threads, 1, 1, 0, handle(stream), places, null_mut())
        };
        check(DriverCall::Other, "cuLaunchKernel", result)
    }

    /// Queues a copy from the host.
    ///
    /// # Safety
    /// The device's range may be written, and `from` lives until the copy is done, if it is pinned
    /// memory (from other memory the driver copies before it returns).
    pub(crate) unsafe fn copy_in(&self, to: u64, from: &[u8], stream: u64) -> Result<(), DriverError> {
        // SAFETY: the caller's.
        let result = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), from.len(), handle(stream)) };
        check(DriverCall::Other, "cuMemcpyHtoDAsync", result)
    }

    /// Queues a copy to the host.
    ///
    /// # Safety
    /// The device's range may be read, and nobody uses `to` until the stream has passed.
    pub(crate) unsafe fn copy_out(&self, to: &mut [u8], from: u64, stream: u64) -> Result<(), DriverError> {
        // SAFETY: the caller's.
        let result = unsafe { sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from, to.len(), handle(stream)) };
        check(DriverCall::Other, "cuMemcpyDtoHAsync", result)
    }

    pub(crate) fn allocate_plain(&self, bytes: u64) -> Result<u64, DriverError> {
        let mut address = 0;
        // SAFETY: writes one number.
        let result = unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes as usize) };
        check(DriverCall::Other, "cuMemAlloc", result)?;
        Ok(address)
    }

    /// # Safety
    /// `address` came from [`Api::allocate_plain`] and is not used again.
    pub(crate) unsafe fn free_plain(&self, address: u64) -> Result<(), DriverError> {
        // SAFETY: the caller's.
        check(DriverCall::Other, "cuMemFree", unsafe { sys::cuMemFree_v2(address) })
    }

    /// Pinned host memory that the device reaches at the same address.
    pub(crate) fn allocate_pinned(&self, bytes: usize) -> Result<*mut c_void, DriverError> {
        let mut memory = null_mut();
        // SAFETY: writes one pointer.
        let result = unsafe { sys::cuMemHostAlloc(&raw mut memory, bytes, 0) };
        check(DriverCall::Other, "cuMemHostAlloc", result)?;
        Ok(memory)
    }

    /// # Safety
    /// `memory` came from [`Api::allocate_pinned`]; neither side uses it again.
    pub(crate) unsafe fn free_pinned(&self, memory: *mut c_void) -> Result<(), DriverError> {
        // SAFETY: the caller's.
        check(DriverCall::Other, "cuMemFreeHost", unsafe { sys::cuMemFreeHost(memory) })
    }

    /// A new stream that does not wait for the legacy one.
    pub(crate) fn create_stream(&self) -> Result<u64, DriverError> {
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        let mut stream = null_mut();
        // SAFETY: writes one pointer.
        check(DriverCall::Other, "cuStreamCreate", unsafe { sys::cuStreamCreate(&raw mut stream, flags) })?;
        Ok(number(stream))
    }

    /// # Safety
    /// `stream` came from [`Api::create_stream`] and is not named again.
    pub(crate) unsafe fn destroy_stream(&self, stream: u64) -> Result<(), DriverError> {
        // SAFETY: the caller's.
        check(DriverCall::Other, "cuStreamDestroy", unsafe { sys::cuStreamDestroy_v2(handle(stream)) })
    }
}
