//! A stand-in for the CUDA driver: the symbols that the CUDA backend uses, with the driver's rules
//! and real bookkeeping but no memory and no work. Tests put it before the real one as `libcuda.so`
//! and steer it through `fake_*` (below) and these variables of the environment:
//!
//! - `FAKE_CUDA_DEVICES`, `FAKE_CUDA_MEMORY` (bytes each), `FAKE_CUDA_COMPUTE` (90 = 9.0);
//! - `FAKE_CUDA_LACK`: what the devices say they lack, of `vmm,fd,rdma,peer`;
//! - `FAKE_CUDA_FAR`: devices that no other reaches;
//! - `FAKE_CUDA_REFUSE`: what they claim and then refuse, of `fd` (at create), `rdma` (at map),
//!   `context_event`;
//! - `FAKE_CUDA_GRANULARITY`;
//! - `FAKE_CUDA_UUID`: what the devices' UUIDs begin with (a number below 256);
//! - `FAKE_CUDA_READS`: what each byte copied to the host is (0: the copy writes nothing).
#![allow(non_snake_case, reason = "the names of the driver")]
#![allow(missing_docs, clippy::missing_safety_doc, reason = "the driver's documentation applies")]

mod nvtx;
mod state;

use state::*;
use std::ffi::{c_char, c_void};

/// Writes a result of a call.
///
/// # Safety
/// As the driver: `to` can be written.
unsafe fn put<T>(to: *mut T, value: T) {
    // SAFETY: the caller's.
    unsafe { to.write(value) }
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Properties {
    kind: u32,
    handle_types: u32,
    location: [i32; 2],
    meta: u64,
    compression: u8,
    rdma: u8,
    usage: u16,
    reserved: [u8; 4],
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct AccessDescription {
    location: [i32; 2],
    flags: u32,
}

macro_rules! driver {
    ($(fn $name:ident($($argument:ident: $kind:ty),*) $needs:ident [$($logged:expr),*] |$state:ident| $body:block)*) => {
        $(#[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $kind),*) -> u32 {
            call(stringify!($name), &[$($logged),*], Needs::$needs, |$state: &mut State| {
                let _ = &$state;
                $body
            })
        })*
    };
}

/// Writes through the driver's out pointer.
macro_rules! out {
    ($to:expr, $value:expr) => {{
        let value = $value;
        // SAFETY: the caller of the driver passes a place for the result.
        unsafe { put($to, value) };
        Ok(())
    }};
}

// After the macros, which they use.
mod share;
mod work;

driver! {
    fn cuInit(flags: u32) Nothing [u64::from(flags)] |s| {
        if s.memory.is_empty() {
            return Err(NO_DEVICE);
        }
        s.initialised = true;
        Ok(())
    }
    fn cuDriverGetVersion(version: *mut i32) Nothing [] |s| { out!(version, 12080) }
    fn cuDeviceGetCount(count: *mut i32) Init [] |s| { out!(count, s.memory.len() as i32) }
    fn cuDeviceGet(device: *mut i32, ordinal: i32) Init [ordinal as u64] |s| {
        s.device(ordinal)?;
        out!(device, ordinal)
    }
    fn cuDeviceGetName(name: *mut c_char, length: i32, device: i32) Init [device as u64] |s| {
        s.device(device)?;
        let text = format!("Stand-in {device}\0");
        if text.len() > length as usize {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller's buffer has `length` bytes.
        unsafe { name.cast::<u8>().copy_from(text.as_ptr(), text.len()) };
        Ok(())
    }
    fn cuDeviceGetAttribute(value: *mut i32, attribute: u32, device: i32) Init [u64::from(attribute), device as u64] |s| {
        s.device(device)?;
        let has = |what| i32::from(!listed("FAKE_CUDA_LACK", what));
        let compute = setting("FAKE_CUDA_COMPUTE", 90) as i32;
        out!(value, match attribute {
            75 => compute / 10,
            76 => compute % 10,
            102 => has("vmm"),
            103 => has("fd"),
            110 => has("rdma"),
            _ => 0,
        })
    }
    fn cuDeviceCanAccessPeer(can: *mut i32, device: i32, peer: i32) Init [device as u64, peer as u64] |s| {
        s.device(device)?;
        s.device(peer)?;
        let far = listed("FAKE_CUDA_LACK", "peer") || [device, peer].iter().any(|one| listed("FAKE_CUDA_FAR", &one.to_string()));
        out!(can, i32::from(device != peer && !far))
    }
    fn cuDevicePrimaryCtxRetain(context: *mut u64, device: i32) Init [device as u64] |s| {
        let index = s.device(device)?;
        s.retained[index] += 1;
        out!(context, context_of(device))
    }
    fn cuDevicePrimaryCtxRelease_v2(device: i32) Init [device as u64] |s| {
        let index = s.device(device)?;
        s.retained[index] = s.retained[index].checked_sub(1).ok_or(INVALID_CONTEXT)?;
        Ok(())
    }
    fn cuCtxGetCurrent(context: *mut u64) Init [] |s| { out!(context, current()) }
    fn cuCtxGetDevice(device: *mut i32) Context [] |s| { out!(device, device_of(current()).ok_or(INVALID_CONTEXT)?) }
    fn cuCtxSetCurrent(context: u64) Init [context] |s| {
        contexts(|stack| {
            stack.pop();
            if context != 0 {
                stack.push(context);
            }
        });
        Ok(())
    }
    fn cuCtxPushCurrent_v2(context: u64) Init [context] |s| {
        device_of(context).ok_or(INVALID_CONTEXT)?;
        contexts(|stack| stack.push(context));
        Ok(())
    }
    fn cuCtxPopCurrent_v2(context: *mut u64) Init [] |s| { out!(context, contexts(Vec::pop).ok_or(INVALID_CONTEXT)?) }
    fn cuCtxSynchronize() Context [] |s| {
        if s.capture.is_some() {
            s.capture_broken = true;
            return Err(CAPTURE_UNSUPPORTED);
        }
        s.complete();
        Ok(())
    }
    fn cuThreadExchangeStreamCaptureMode(mode: *mut u32) Nothing [] |s| {
        // SAFETY: the caller's place holds the new mode.
        let new = unsafe { mode.read() };
        if new > RELAXED {
            return Err(INVALID_VALUE);
        }
        out!(mode, exchange_mode(new))
    }

    fn cuMemGetInfo_v2(free: *mut u64, total: *mut u64) Context [] |s| {
        let device = device_of(current()).ok_or(INVALID_CONTEXT)? as usize;
        // SAFETY: the caller passes two places.
        unsafe { put(total, s.memory[device]) };
        out!(free, s.memory[device] - s.used[device])
    }
    fn cuMemGetAllocationGranularity(bytes: *mut u64, properties: *const Properties, option: u32) Init [u64::from(option)] |s| {
        // SAFETY: the caller passes properties.
        s.device(unsafe { properties.read() }.location[1])?;
        out!(bytes, setting("FAKE_CUDA_GRANULARITY", 2 << 20))
    }
    fn cuMemAddressReserve(address: *mut u64, bytes: u64, alignment: u64, hint: u64, flags: u64) Relaxed [bytes, alignment] |s| {
        if bytes == 0 || !bytes.is_multiple_of(2 << 20) || hint != 0 || flags != 0 {
            return Err(INVALID_VALUE);
        }
        let after = s.reservations.last_key_value().map_or(0x7000_0000_0000, |(start, length)| start + length + (2 << 20));
        let start = after.next_multiple_of(alignment.max(1));
        s.reservations.insert(start, bytes);
        out!(address, start)
    }
    fn cuMemAddressFree(address: u64, bytes: u64) Relaxed [address, bytes] |s| {
        if s.reservations.get(&address) != Some(&bytes) || s.mappings.range(address..address + bytes).next().is_some() {
            return Err(INVALID_VALUE);
        }
        s.reservations.remove(&address);
        Ok(())
    }
    fn cuMemCreate(handle: *mut u64, bytes: u64, properties: *const Properties, flags: u64) Relaxed [bytes] |s| {
        // SAFETY: the caller passes properties.
        let properties = unsafe { properties.read() };
        let posix_fd = properties.handle_types == 1;
        let other = properties.handle_types > 1 || properties.meta != 0 || properties.compression != 0 || properties.usage != 0;
        if properties.kind != 1 || properties.location[0] != 1 || other || properties.reserved != [0; 4] || flags != 0 {
            return Err(INVALID_VALUE);
        }
        if posix_fd && listed("FAKE_CUDA_REFUSE", "fd") {
            return Err(NOT_SUPPORTED);
        }
        let device = properties.location[1];
        let rdma = properties.rdma != 0;
        out!(handle, s.create(Handle { bytes, device, posix_fd, rdma, imported: false, released: false, mappings: 0 })?)
    }
    fn cuMemRelease(handle: u64) Relaxed [handle] |s| { s.release(handle) }
    fn cuMemMap(address: u64, bytes: u64, offset: u64, handle: u64, flags: u64) Relaxed [address, bytes, handle] |s| {
        if offset != 0 || flags != 0 {
            return Err(NOT_SUPPORTED);
        }
        if s.handles.get(&handle).is_some_and(|found| found.rdma) && listed("FAKE_CUDA_REFUSE", "rdma") {
            return Err(NOT_SUPPORTED);
        }
        s.map(address, bytes, handle)
    }
    fn cuMemSetAccess(address: u64, bytes: u64, access: *const AccessDescription, count: usize) Relaxed
        [address, bytes, count as u64] |s| {
        // SAFETY: the caller passes `count` descriptions.
        let access = unsafe { std::slice::from_raw_parts(access, count) };
        for description in access {
            s.device(description.location[1])?;
            if description.location[0] != 1 || ![0, 3].contains(&description.flags) {
                return Err(INVALID_VALUE);
            }
        }
        let found = s.whole_mappings(address, bytes)?;
        if found.iter().map(|start| s.mappings[start].bytes).sum::<u64>() != bytes {
            return Err(INVALID_VALUE);
        }
        // Devices that are not named keep what they have.
        let flagged = |flags| access.iter().filter(|one| one.flags == flags).fold(0, |devices, one| devices | 1 << one.location[1]);
        let (none, all) = (flagged(0), flagged(3));
        for start in found {
            s.mappings.entry(start).and_modify(|mapping| mapping.access = mapping.access & !none | all);
        }
        Ok(())
    }
    fn cuMemUnmap(address: u64, bytes: u64) Relaxed [address, bytes] |s| { s.unmap(address, bytes) }
    fn cuMemAlloc_v2(address: *mut u64, bytes: u64) Relaxed [bytes] |s| {
        let device = device_of(current()).ok_or(INVALID_CONTEXT)? as usize;
        if s.used[device] + bytes > s.memory[device] {
            return Err(OUT_OF_MEMORY);
        }
        s.used[device] += bytes;
        let start = s.fresh(0x10_0000_0000, 1 << 32);
        s.plain.insert(start, bytes);
        out!(address, start)
    }
    fn cuMemFree_v2(address: u64) Relaxed [address] |s| {
        let bytes = s.plain.remove(&address).ok_or(INVALID_VALUE)?;
        let device = device_of(current()).ok_or(INVALID_CONTEXT)? as usize;
        s.used[device] -= bytes;
        Ok(())
    }
    fn cuMemAllocAsync(address: *mut u64, bytes: u64, stream: u64) Relaxed [bytes, stream] |s| {
        s.stream(stream)?;
        let start = s.fresh(0x10_0000_0000, 1 << 32);
        s.plain.insert(start, 0);
        out!(address, start)
    }
    fn cuMemFreeAsync(address: u64, stream: u64) Relaxed [address, stream] |s| { s.plain.remove(&address).map(drop).ok_or(INVALID_VALUE) }
    fn cuMemAllocManaged(address: *mut u64, bytes: u64, flags: u32) Relaxed [bytes, u64::from(flags)] |s| {
        let start = s.fresh(0x10_0000_0000, 1 << 32);
        s.plain.insert(start, 0);
        out!(address, start)
    }
    fn cuDeviceGetDefaultMemPool(pool: *mut u64, device: i32) Init [device as u64] |s| { out!(pool, 0x4000_0000) }
    fn cuMemPoolSetAttribute(pool: u64, attribute: u32, _value: *mut u64) Init [pool, u64::from(attribute)] |s| { Ok(()) }
    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: u64) Context [to, from, bytes as u64, stream] |s| { s.stream(stream).map(drop) }
    fn cuMemHostAlloc(memory: *mut u64, bytes: usize, flags: u32) Relaxed [bytes as u64, u64::from(flags)] |s| {
        let mut block = vec![0u128; bytes.div_ceil(16)];
        let address = block.as_mut_ptr().expose_provenance() as u64;
        s.pinned.insert(address, block);
        out!(memory, address)
    }
    fn cuMemFreeHost(memory: u64) Relaxed [memory] |s| { s.pinned.remove(&memory).map(drop).ok_or(INVALID_VALUE) }
    fn cuMemcpyPeer(to: u64, to_context: u64, from: u64, from_context: u64, bytes: usize) Context
        [to, to_context, from, from_context, bytes as u64] |s| {
        device_of(to_context).and(device_of(from_context)).map(drop).ok_or(INVALID_CONTEXT)
    }
    fn cuMemcpyHtoDAsync_v2(to: u64, _from: *const c_void, bytes: usize, stream: u64) Context [to, bytes as u64, stream] |s| { s.stream(stream).map(drop) }
    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, stream: u64) Context [from, bytes as u64, stream] |s| {
        if let byte @ 1..=255 = setting("FAKE_CUDA_READS", 0) {
            // SAFETY: the caller's buffer has `bytes` bytes.
            unsafe { to.cast::<u8>().write_bytes(byte as u8, bytes) };
        }
        s.stream(stream).map(drop)
    }
    fn cuMemsetD8Async(to: u64, value: u8, bytes: usize, stream: u64) Context [to, u64::from(value), bytes as u64, stream] |s| { s.stream(stream).map(drop) }

    fn cuStreamCreate(stream: *mut u64, flags: u32) Context [u64::from(flags)] |s| {
        let id = s.fresh(100, 1);
        let handle = s.old_streams.pop().unwrap_or(0x5000_0000 + id * 0x40);
        s.streams.insert(handle, id);
        s.note_device(handle);
        if flags & 1 == 0 {
            s.blocking.insert(handle);
        }
        out!(stream, handle)
    }
    fn cuStreamDestroy_v2(stream: u64) Context [stream] |s| {
        s.streams.remove(&stream).ok_or(INVALID_HANDLE)?;
        s.blocking.remove(&stream);
        s.old_streams.push(stream);
        Ok(())
    }
    fn cuStreamSynchronize(stream: u64) Relaxed [stream] |s| {
        s.stream(stream)?;
        s.complete();
        Ok(())
    }
    fn cuStreamGetId(stream: u64, id: *mut u64) Init [stream] |s| {
        let found = s.stream(stream)?;
        // As on an H200, in every mode.
        if s.capture == Some(stream) {
            s.capture_broken = true;
            return Err(CAPTURE_UNSUPPORTED);
        }
        out!(id, found)
    }
    fn cuStreamGetCtx(stream: u64, context: *mut u64) Context [stream] |s| {
        s.stream(stream)?;
        // Of a default stream it is the current one.
        out!(context, s.of.get(&stream).map_or_else(current, |device| context_of(*device)))
    }
    fn cuStreamIsCapturing(stream: u64, status: *mut u32) Context [stream] |s| {
        s.stream(stream)?;
        if stream <= 1 && s.capture.is_some_and(|capture| s.blocking.contains(&capture)) {
            return Err(CAPTURE_IMPLICIT);
        }
        out!(status, u32::from(s.capture == Some(stream)))
    }
    fn cuStreamWaitEvent(stream: u64, event: u64, flags: u32) Relaxed [stream, event, u64::from(flags)] |s| {
        s.stream(stream)?;
        let state = s.events.get(&event).ok_or(INVALID_HANDLE)?;
        if s.capture == Some(stream) && *state != EventState::Captured {
            s.capture_broken = true;
            return Err(CAPTURE_ISOLATION);
        }
        if *state == EventState::Pending {
            s.waiting.insert(stream);
        }
        Ok(())
    }
    fn cuStreamQuery(stream: u64) Relaxed [stream] |s| {
        s.stream(stream)?;
        if s.capture == Some(stream) {
            s.capture_broken = true;
            return Err(CAPTURE_UNSUPPORTED);
        }
        if s.waiting.contains(&stream) { Err(NOT_READY) } else { Ok(()) }
    }

    fn cuEventCreate(event: *mut u64, flags: u32) Relaxed [u64::from(flags)] |s| {
        let handle = s.fresh(0xE000_0000, 0x10);
        s.events.insert(handle, EventState::Fresh);
        s.note_device(handle);
        out!(event, handle)
    }
    fn cuEventDestroy_v2(event: u64) Relaxed [event] |s| { s.events.remove(&event).map(drop).ok_or(INVALID_HANDLE) }
    fn cuEventRecord(event: u64, stream: u64) Relaxed [event, stream] |s| {
        s.stream(stream)?;
        // The driver's rule: both are of one context.
        let whose = s.of.get(&stream).copied().or_else(|| device_of(current()));
        if s.of.get(&event).copied() != whose {
            return Err(INVALID_HANDLE);
        }
        let state = if s.capture == Some(stream) { EventState::Captured } else { s.recorded(stream) };
        *s.events.get_mut(&event).ok_or(INVALID_HANDLE)? = state;
        Ok(())
    }
    fn cuCtxRecordEvent(context: u64, event: u64) Relaxed [context, event] |s| {
        if listed("FAKE_CUDA_REFUSE", "context_event") {
            return Err(NOT_SUPPORTED);
        }
        let device = device_of(context).ok_or(INVALID_CONTEXT)?;
        if s.capture.is_some_and(|stream| s.of.get(&stream).is_none_or(|whose| *whose == device)) {
            s.capture_broken = true;
            return Err(CAPTURE_UNSUPPORTED);
        }
        let state = s.recorded(u64::MAX);
        *s.events.get_mut(&event).ok_or(INVALID_HANDLE)? = state;
        Ok(())
    }
    fn cuEventQuery(event: u64) Relaxed [event] |s| {
        match s.events.get(&event).ok_or(INVALID_HANDLE)? {
            EventState::Fresh | EventState::Done => Ok(()),
            EventState::Pending => Err(NOT_READY),
            EventState::Captured => Err(907),
        }
    }
}

/// Lets the `turn`-th driver call from now fail with `code` (1: the next; 0: none).
#[unsafe(no_mangle)]
pub extern "C" fn fake_fail_at(turn: u64, code: u32) {
    lock().fail = (turn > 0).then_some((turn, code));
}

/// Lets every driver call fail with `code` from now on (0: none).
#[unsafe(no_mangle)]
pub extern "C" fn fake_break(code: u32) {
    lock().broken = code;
}

/// Is the failure that was asked for still to come?
#[unsafe(no_mangle)]
pub extern "C" fn fake_fail_pending() -> bool {
    lock().fail.is_some()
}

/// What exists: 0 handles, 1 mappings, 2 reservations, 3 events, 4 retained contexts, 5 modules,
/// 6 accessible mappings, 7 plain and pinned allocations, 8 streams, 9 graphs.
#[unsafe(no_mangle)]
pub extern "C" fn fake_count(what: u32) -> u64 {
    let state = lock();
    match what {
        0 => state.handles.len() as u64,
        1 => state.mappings.len() as u64,
        2 => state.reservations.len() as u64,
        3 => state.events.len() as u64,
        4 => state.retained.iter().map(|count| u64::from(*count)).sum(),
        5 => u64::from(state.modules),
        6 => state.mappings.values().filter(|mapping| mapping.access != 0).count() as u64,
        7 => (state.plain.len() + state.pinned.len()) as u64,
        8 => state.streams.len() as u64,
        9 => state.graphs.len() as u64,
        _ => u64::MAX,
    }
}

/// Devices (by bit) that may access the mapping at an address; 0 where there is none.
#[unsafe(no_mangle)]
pub extern "C" fn fake_access(address: u64) -> u64 {
    let state = lock();
    let found =
        state.mappings.range(..=address).next_back().filter(|(start, mapping)| *start + mapping.bytes > address);
    found.map_or(0, |(_, mapping)| mapping.access)
}

/// Copies the log (lines of "name arguments = result", numbers in hexadecimal but for the result)
/// and says how long it is.
///
/// # Safety
/// `to` has room for `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_log(to: *mut u8, length: usize) -> usize {
    let text = lock().log.join("\n");
    // SAFETY: the caller's.
    unsafe { to.copy_from(text.as_ptr(), text.len().min(length)) };
    text.len()
}

/// Empties the log.
#[unsafe(no_mangle)]
pub extern "C" fn fake_log_clear() {
    lock().log.clear();
}

/// Keeps events pending from their record on (`true`), or lets all of them complete.
#[unsafe(no_mangle)]
pub extern "C" fn fake_hold_events(hold: bool) {
    let mut state = lock();
    state.hold = hold;
    if !hold {
        state.complete();
    }
}

/// Starts a capture on `stream` (0: ends it) and says whether the one before was broken.
#[unsafe(no_mangle)]
pub extern "C" fn fake_capture(stream: u64) -> bool {
    let mut state = lock();
    state.capture = (stream != 0).then_some(stream);
    std::mem::take(&mut state.capture_broken)
}

/// The calling thread's capture mode.
#[unsafe(no_mangle)]
pub extern "C" fn fake_capture_mode() -> u32 {
    mode()
}

/// From now on what is recorded on a device stays pending (-1: lets all complete).
#[unsafe(no_mangle)]
pub extern "C" fn fake_busy(device: i32) {
    let mut state = lock();
    state.busy = usize::try_from(device).ok();
    if device < 0 {
        state.complete();
    }
}
