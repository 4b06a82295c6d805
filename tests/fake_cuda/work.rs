//! Modules, kernels that do nothing, and captured graphs that hold no work.

#![allow(unreachable_pub, reason = "exported by name")]

use crate::put;
use crate::state::*;
use std::ffi::{c_char, c_void};

driver! {
    fn cuModuleLoadData(module: *mut u64, image: *const c_char) Context [] |s| {
        // SAFETY: the caller passes a text that ends with zero.
        if !unsafe { std::ffi::CStr::from_ptr(image) }.to_string_lossy().contains(".version ") {
            return Err(INVALID_VALUE);
        }
        s.modules += 1;
        out!(module, 0xD000)
    }
    fn cuModuleUnload(module: u64) Context [module] |s| {
        s.modules -= 1;
        Ok(())
    }
    fn cuModuleGetFunction(function: *mut u64, module: u64, _name: *const c_char) Context [module] |s| { out!(function, s.fresh(0xF000, 1)) }

    fn cuStreamBeginCapture_v2(stream: u64, mode: u32) Context [stream, u64::from(mode)] |s| {
        if s.stream(stream)? <= 1 || mode > RELAXED || s.capture.is_some() {
            return Err(INVALID_VALUE);
        }
        s.capture = Some(stream);
        s.capture_broken = false;
        Ok(())
    }
    fn cuStreamEndCapture(stream: u64, graph: *mut u64) Context [stream] |s| {
        if s.capture != Some(stream) {
            return Err(ILLEGAL_STATE);
        }
        s.capture = None;
        // SAFETY: the caller of the driver passes a place for the result.
        unsafe { put(graph, 0) };
        if std::mem::take(&mut s.capture_broken) {
            return Err(CAPTURE_INVALIDATED);
        }
        out!(graph, s.graph())
    }
    fn cuGraphInstantiateWithFlags(executable: *mut u64, graph: u64, flags: u64) Context [graph, flags] |s| {
        if !s.graphs.contains(&graph) {
            return Err(INVALID_VALUE);
        }
        out!(executable, s.graph())
    }
    fn cuGraphLaunch(executable: u64, stream: u64) Context [executable, stream] |s| {
        s.stream(stream)?;
        if s.graphs.contains(&executable) { Ok(()) } else { Err(INVALID_VALUE) }
    }
    fn cuGraphExecDestroy(executable: u64) Context [executable] |s| {
        if s.graphs.remove(&executable) { Ok(()) } else { Err(INVALID_VALUE) }
    }
    fn cuGraphDestroy(graph: u64) Context [graph] |s| {
        if s.graphs.remove(&graph) { Ok(()) } else { Err(INVALID_VALUE) }
    }
}

// The signature is longer than the macro's form is good for.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments, reason = "the driver's signature")]
pub unsafe extern "C" fn cuLaunchKernel(
    function: u64,
    grid_x: u32,
    _grid_y: u32,
    _grid_z: u32,
    block_x: u32,
    _block_y: u32,
    _block_z: u32,
    _shared: u32,
    stream: u64,
    _arguments: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> u32 {
    let logged = [function, u64::from(grid_x), u64::from(block_x), stream];
    call("cuLaunchKernel", &logged, Needs::Context, |state| state.stream(stream).map(drop))
}
