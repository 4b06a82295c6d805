//! Handles as descriptors: a file that is nowhere says what the handle was, in this process or another.

#![allow(unreachable_pub, reason = "exported by name")]

use crate::put;
use crate::state::*;
use std::ffi::c_void;
use std::fs::{File, OpenOptions};
use std::os::fd::{BorrowedFd, IntoRawFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

const MAGIC: u64 = 0x6661_6b65_6375_6461;

/// What a descriptor says of its handle.
fn describe(words: [u64; 3]) -> std::io::Result<File> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let name = format!("fake-cuda-{}-{}", std::process::id(), NUMBER.fetch_add(1, Relaxed));
    let path = std::env::temp_dir().join(name);
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path)?;
    std::fs::remove_file(path)?;
    let bytes: Vec<u8> = words.into_iter().flat_map(u64::to_le_bytes).collect();
    file.write_all_at(&bytes, 0)?;
    Ok(file)
}

fn read(descriptor: i32) -> Option<[u64; 3]> {
    // SAFETY: the caller of the driver says that it is open.
    let file = File::from(unsafe { BorrowedFd::borrow_raw(descriptor) }.try_clone_to_owned().ok()?);
    let mut bytes = [0; 24];
    file.read_exact_at(&mut bytes, 0).ok()?;
    let mut words = bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default()));
    Some([words.next()?, words.next()?, words.next()?])
}

driver! {
    fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: i32) Init [device as u64] |s| {
        s.device(device)?;
        let mut bytes = [0xA5; 16];
        (bytes[0], bytes[15]) = (setting("FAKE_CUDA_UUID", 1) as u8, device as u8);
        out!(uuid, bytes)
    }
    fn cuMemExportToShareableHandle(out: *mut c_void, handle: u64, kind: u32, flags: u64) Relaxed [handle, u64::from(kind), flags] |s| {
        let found = s.handles.get(&handle).filter(|found| found.posix_fd && kind == 1 && !found.released);
        let found = found.ok_or(INVALID_VALUE)?;
        let file = describe([MAGIC, found.bytes, u64::from(found.device.cast_unsigned())]);
        out!(out.cast::<i32>(), file.map_err(|_| OPERATING_SYSTEM)?.into_raw_fd())
    }
    fn cuMemImportFromShareableHandle(handle: *mut u64, descriptor: *mut c_void, kind: u32) Relaxed [u64::from(kind)] |s| {
        let [magic, bytes, device] = read(descriptor.addr() as i32).ok_or(INVALID_VALUE)?;
        if magic != MAGIC || kind != 1 {
            return Err(INVALID_VALUE);
        }
        let device = device as i32;
        s.device(device)?;
        let imported = Handle { bytes, device, posix_fd: true, rdma: false, imported: true, released: false, mappings: 0 };
        out!(handle, s.enter(imported))
    }
}
