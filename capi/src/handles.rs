//! Handles: numbers dressed as pointers, which are looked up and never followed.

use crate::status::{Failure, guard, xseg_status};
use crate::{noted, record};
use parking_lot::lock_api::RawRwLock as _;
use parking_lot::{RawRwLock, RwLock};
use std::marker::{PhantomData, PhantomPinned};
use std::sync::Once;
use xseg::Heap;
use xseg::process::{FORKED, Process};

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
    heap: Option<Kept>,
}

#[derive(Debug)]
struct Kept {
    heap: Heap,
    /// The process's heap of a device, which nobody destroys.
    shared: bool,
    /// Who made it: a forked child has a copy of the slot, and no heap.
    process: Process,
}

/// No other thread is inside while the child's copy is made: there nobody would let go of it.
extern "C" fn before_fork() {
    std::mem::forget(SLOTS.write());
}

extern "C" fn in_parent() {
    // SAFETY: `before_fork` took it, on this thread.
    unsafe { SLOTS.force_unlock_write() };
}

extern "C" fn in_child() {
    noted::in_child();
    // SAFETY: no guard is there but the one that `before_fork` forgot.
    let raw = std::ptr::from_ref(unsafe { SLOTS.raw() }).cast_mut();
    // SAFETY: the child has one thread, and a lock is made of atomics. As new: to let go of it would wake threads of the parent's.
    unsafe { raw.write(RawRwLock::INIT) };
}

static SLOTS: RwLock<Vec<Slot>> = RwLock::new(Vec::new());
/// Low bits of a handle: the number of its slot and one more, so that no handle is null.
const SLOT_BITS: u32 = 16;

fn name(slot: usize, filled: u32) -> *mut xseg_heap {
    std::ptr::without_provenance_mut((filled as usize) << SLOT_BITS | (slot + 1))
}

/// A handle for `heap`.
pub(crate) fn enter(heap: Heap, shared: bool) -> Result<*mut xseg_heap, Failure> {
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        // SAFETY: in the child the function only changes atomics.
        let _ = unsafe { libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) };
    });
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
    slots[at].heap = Some(Kept { heap, shared, process: Process::this() });
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

/// The heap of a handle, in the process that made it.
pub(crate) fn heap(handle: *const xseg_heap) -> Result<Heap, Failure> {
    let (at, filled) = place(handle);
    let slots = SLOTS.read();
    let slot = slots.get(at).filter(|slot| slot.filled == filled);
    let kept = slot.and_then(|slot| slot.heap.as_ref()).ok_or_else(|| stale(handle))?;
    if kept.process.is_this() {
        return Ok(kept.heap.clone());
    }
    Err(Failure { status: xseg_status::XSEG_UNAVAILABLE, why: FORKED.into() })
}

/// Ends a heap: waits for the device, releases all of its memory, live blocks too, and makes the handle stale.
/// Calls on other threads that are under way fail with `XSEG_SHUT_DOWN`. A recording of the heap ends, as by `xseg_record_stop`.
#[unsafe(no_mangle)]
pub extern "C" fn xseg_heap_destroy(handle: *mut xseg_heap) -> xseg_status {
    guard(|| {
        let (at, filled) = place(handle);
        let taken = {
            let mut slots = SLOTS.write();
            let slot = slots.get_mut(at).filter(|slot| slot.filled == filled);
            if slot.as_ref().and_then(|slot| slot.heap.as_ref()).is_some_and(|kept| kept.shared) {
                return Err(Failure::argument("a device's heap lives as long as the process"));
            }
            slot.and_then(|slot| slot.heap.take())
        };
        let kept = taken.ok_or_else(|| stale(handle))?;
        // A forked child only drops its copy: a recording, too, is the parent's to end.
        if !kept.process.is_this() {
            return Ok(());
        }
        kept.heap.shut_down();
        record::end(handle)
    })
}
