//! Handles: numbers dressed as pointers, which are looked up and never followed.

use crate::status::{Failure, guard, xseg_status};
use parking_lot::RwLock;
use std::marker::{PhantomData, PhantomPinned};
use xseg::Heap;

/// A heap. Only pointers to it exist, and only the library knows what they stand for.
#[repr(C)]
#[derive(Debug)]
pub struct xseg_heap {
    _opaque: [u8; 0],
    _not_sync: PhantomData<(*mut u8, PhantomPinned)>,
}

#[derive(Debug, Default)]
struct Slot {
    /// How often the slot was filled: a handle of an earlier filling is stale.
    filled: u32,
    heap: Option<Heap>,
    /// The process's heap of a device, which nobody destroys.
    shared: bool,
}

static SLOTS: RwLock<Vec<Slot>> = RwLock::new(Vec::new());
/// Low bits of a handle: the number of its slot and one more, so that no handle is null.
const SLOT_BITS: u32 = 16;

fn name(slot: usize, filled: u32) -> *mut xseg_heap {
    std::ptr::without_provenance_mut((filled as usize) << SLOT_BITS | (slot + 1))
}

/// A handle for `heap`.
pub(crate) fn enter(heap: Heap, shared: bool) -> Result<*mut xseg_heap, Failure> {
    let mut slots = SLOTS.write();
    let at = match slots.iter().position(|slot| slot.heap.is_none()) {
        Some(at) => at,
        None if slots.len() < (1 << SLOT_BITS) - 1 => {
            slots.push(Slot::default());
            slots.len() - 1
        }
        None => return Err(Failure::argument("too many heaps; destroy some")),
    };
    slots[at].filled += 1;
    slots[at].heap = Some(heap);
    slots[at].shared = shared;
    Ok(name(at, slots[at].filled))
}

fn place(handle: *const xseg_heap) -> (usize, u32) {
    let number = handle.addr();
    // A number that no filling has stands for none.
    let filled = u32::try_from(number >> SLOT_BITS).unwrap_or(0);
    ((number & ((1 << SLOT_BITS) - 1)).wrapping_sub(1), filled)
}

fn stale(handle: *const xseg_heap) -> Failure {
    if handle.is_null() {
        return Failure::argument("the heap is a null pointer");
    }
    let why = format!("{handle:p} is no heap's handle, or its heap was destroyed");
    Failure { status: xseg_status::XSEG_STALE_HANDLE, why }
}

/// The heap of a handle.
pub(crate) fn heap(handle: *const xseg_heap) -> Result<Heap, Failure> {
    let (at, filled) = place(handle);
    let slots = SLOTS.read();
    let slot = slots.get(at).filter(|slot| slot.filled == filled);
    slot.and_then(|slot| slot.heap.clone()).ok_or_else(|| stale(handle))
}

/// Ends a heap: waits for the device, releases all of its memory, live blocks too, and makes the handle stale.
/// Calls on other threads that are under way fail with [`XSEG_SHUT_DOWN`](xseg_status::XSEG_SHUT_DOWN).
#[unsafe(no_mangle)]
pub extern "C" fn xseg_heap_destroy(handle: *mut xseg_heap) -> xseg_status {
    guard(|| {
        let (at, filled) = place(handle);
        let taken = {
            let mut slots = SLOTS.write();
            let slot = slots.get_mut(at).filter(|slot| slot.filled == filled);
            if slot.as_ref().is_some_and(|slot| slot.shared) {
                return Err(Failure::argument("a device's heap lives as long as the process"));
            }
            slot.and_then(|slot| slot.heap.take())
        };
        taken.ok_or_else(|| stale(handle))?.shut_down();
        Ok(())
    })
}
