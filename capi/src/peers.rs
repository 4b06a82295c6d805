//! Access of other devices to a heap's memory.

use crate::devices::{device, whose};
use crate::handles::{heap, xseg_heap};
use crate::status::{guard, xseg_status};
use std::ffi::c_int;

/// From now on the GPU `device` reads and writes all of the heap's memory: what is mapped, imports too, and what will be,
/// wherever it moves. That is for good. Ordering the work of both devices is the caller's. For a device that has access, by this or by
/// `peers` of the policy, and for the heap's own nothing is done. Takes a driver call for each mapping there is. Refused by the driver
/// (`XSEG_DRIVER`) the device has access to nothing that it had none to; one that cannot reach the heap's device at all gives
/// `XSEG_UNAVAILABLE`, one that does not exist, and memory of no GPU, `XSEG_INVALID_ARGUMENT`. Also while a graph is captured.
#[unsafe(no_mangle)]
pub extern "C" fn xseg_enable_peer(heap: *mut xseg_heap, device: c_int) -> xseg_status {
    guard(|| Ok(self::heap(heap)?.enable_peer(whose(device)?)?))
}

/// As `xseg_enable_peer`, of the process's heap of the GPU `memory`, which is made if it is not there yet (see `xseg_device_heap`): `device`
/// gets access to it. Access is one way; the other one is a call of its own.
#[unsafe(no_mangle)]
pub extern "C" fn xseg_device_enable_peer(memory: c_int, device: c_int) -> xseg_status {
    guard(|| {
        let heap = &self::device(memory)?.heap;
        // On host memory the heap does not know for which device it stands.
        if memory == device { Ok(()) } else { Ok(heap.enable_peer(whose(device)?)?) }
    })
}
