//! Several GPUs of one host: access for peers, a heap on each device, and copies between them.

use super::memory::{Handles, Reservation};
use super::report::{Section, Table};
use super::scenarios::refused;
use super::{Suite, median, micros, timed};
use cudarc::driver::{CudaContext, result};
use std::sync::Arc;
use std::time::Duration;
use xseg::backend::cuda::memory::Kernels;
use xseg::backend::cuda::{CudaBackend, CudaOptions};
use xseg::backend::{Backend, EventScope, StreamId};
use xseg::units::{MIB, human};
use xseg::{Allocation, Error, Heap};

/// A device with kernels and a stream.
struct Device {
    backend: Arc<CudaBackend>,
    kernels: Kernels,
    stream: StreamId,
}

impl Device {
    fn open(index: u32, peers: &[u32]) -> Result<Self, Error> {
        let backend = Arc::new(CudaBackend::open(index, &CudaOptions { peers: peers.to_vec(), ..Default::default() })?);
        let kernels = Kernels::load(backend.clone())?;
        let stream = backend.create_stream()?;
        Ok(Self { backend, kernels, stream })
    }

    fn heap(&self, conf: &str) -> Result<Heap, Error> {
        Heap::builder().conf(conf)?.backend(self.backend.clone()).build()
    }

    fn fill(&self, block: &Allocation, seed: u32) -> Result<(), Error> {
        // SAFETY: a live block that this device can reach; the callers wait between devices.
        Ok(unsafe { self.kernels.fill(self.stream, block.address(), block.len() / 4, seed) }?)
    }

    /// Wrong words of a block, seen from this device; everything queued on it is done then.
    fn wrong(&self, block: &Allocation, seed: u32) -> Result<u64, Error> {
        // SAFETY: as above.
        unsafe { self.kernels.check(self.stream, block.address(), block.len() / 4, seed) }?;
        Ok(self.kernels.mismatches()?.count)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: created by `open`; the driver ends it when its work is done.
        let _ = unsafe { self.backend.destroy_stream(self.stream) };
    }
}

/// A further stream of a device.
struct Stream<'a> {
    device: &'a Device,
    id: StreamId,
}

impl<'a> Stream<'a> {
    fn new(device: &'a Device) -> Result<Self, Error> {
        Ok(Self { device, id: device.backend.create_stream()? })
    }
}

impl Drop for Stream<'_> {
    fn drop(&mut self) {
        // SAFETY: created by `new`; the driver ends it when its work is done.
        let _ = unsafe { self.device.backend.destroy_stream(self.id) };
    }
}

/// Runs the section; on a machine with one GPU it says so.
///
/// # Errors
/// When the driver refuses a call.
pub(crate) fn run(suite: &Suite) -> Result<Section, Error> {
    let mut section = Section::default();
    let own = suite.backend.device();
    let others: Vec<u32> = suite.driver.devices.iter().map(|info| info.index).filter(|index| *index != own).collect();
    let Some(&other) = others.first() else {
        section.text.push("Skipped: the driver shows one device.".into());
        return Ok(section);
    };
    let (here, there) = (Device::open(own, &[other])?, Device::open(other, &[])?);
    section.check(
        &format!("device {other} can be given access to memory of device {own}"),
        format!("{:?}", here.backend.peers()),
        here.backend.peers() == [other],
    );
    peer_access(&here, &there, &mut section)?;
    later_access(own, &there, &mut section)?;
    wrong_device(&here, &there, &mut section)?;
    right_streams(&here, &there, &mut section)?;
    copies(&here, &there, &mut section)?;
    cost(suite, &others, &mut section)?;
    Ok(section)
}

/// Access that is given while a heap has memory: to that, and to what comes later.
fn later_access(own: u32, there: &Device, section: &mut Section) -> Result<(), Error> {
    let (here, other) = (Device::open(own, &[])?, there.backend.device());
    let heap = here.heap("limit:64MiB,handle_max:2MiB,growth:exact")?;
    let before = heap.alloc(16 * MIB, here.stream)?;
    heap.enable_peer(other)?;
    let after = heap.alloc(16 * MIB, here.stream)?;
    for (block, what) in [(&before, "was there before"), (&after, "came later")] {
        here.fill(block, 4)?;
        here.backend.quiesce()?;
        let wrong = there.wrong(block, 4)?;
        section.check(
            &format!("a device that is given access reads memory that {what}"),
            format!("{wrong} wrong words"),
            wrong == 0,
        );
    }
    let block = heap.alloc_contiguous(2 * MIB, here.stream)?;
    // SAFETY: its one handle is one mapping, and no work of the other device's uses it.
    unsafe { here.backend.set_peer_access(block.address(), 2 * MIB, other, false) }?;
    here.fill(&block, 5)?;
    let wrong = here.wrong(&block, 5)?;
    section.check("the owner's access stays where a peer's is taken back", format!("{wrong} wrong words"), wrong == 0);
    Ok(())
}

/// Blocks of one device are used by another's kernels, also after their memory has moved.
fn peer_access(here: &Device, there: &Device, section: &mut Section) -> Result<(), Error> {
    const PART: u64 = 64 * MIB;
    let heap = here.heap(&format!("limit:{}", 6 * PART))?;
    let mut parts = Vec::new();
    for _ in 0..6 {
        parts.push(heap.alloc(PART, here.stream)?);
    }
    here.fill(&parts[1], 1)?;
    here.backend.quiesce()?;
    let read = there.wrong(&parts[1], 1)?;
    section.check("kernels of a peer read what the owner wrote", format!("{read} wrong words"), read == 0);
    there.fill(&parts[1], 2)?;
    there.backend.quiesce()?;
    let written = here.wrong(&parts[1], 2)?;
    section.check("kernels of the owner read what a peer wrote", format!("{written} wrong words"), written == 0);
    // Every other one goes; what is asked for then lies on moved memory.
    let kept: Vec<Allocation> =
        parts.into_iter().enumerate().filter(|(index, _)| index % 2 == 1).map(|p| p.1).collect();
    let joined = heap.alloc(3 * PART, here.stream)?;
    here.fill(&joined, 3)?;
    here.backend.quiesce()?;
    let (wrong, kept_wrong, stats) = (there.wrong(&joined, 3)?, there.wrong(&kept[0], 2)?, heap.stats());
    section.check(
        "a peer reads memory that was moved, and what lies beside it",
        format!("{wrong} and {kept_wrong} wrong words, {} moved", human(stats.bytes_moved)),
        wrong == 0 && kept_wrong == 0 && stats.bytes_moved == 3 * PART,
    );
    Ok(())
}

/// A heap on each device, each used and trimmed while the other device is current, with work queued.
fn wrong_device(here: &Device, there: &Device, section: &mut Section) -> Result<(), Error> {
    let run = |device: &Device, current: &Arc<CudaContext>| -> Result<(u64, u64, bool), Error> {
        current.bind_to_thread().map_err(refused)?;
        let before = result::ctx::get_current().map_err(refused)?;
        let heap = device.heap("limit:600MiB")?;
        let (mut wrong, mut kept) = (0, true);
        for round in 0..20u32 {
            let blocks = [heap.alloc(200 * MIB, device.stream)?, heap.alloc(130 * MIB, device.stream)?];
            // SAFETY: a stream of this device; the kernel touches no memory.
            unsafe { device.kernels.spin(device.stream, 2_000_000) }?;
            for block in &blocks {
                device.fill(block, round)?;
                // SAFETY: a live block; its stream has filled it before.
                unsafe { device.kernels.check(device.stream, block.address(), block.len() / 4, round) }?;
            }
            drop(blocks);
            heap.trim();
            if round % 5 == 4 {
                // Everything is done then, so that this trim has something to give back.
                wrong += device.kernels.mismatches()?.count;
                heap.trim();
            }
            kept &= result::ctx::get_current().map_err(refused)? == before;
        }
        Ok((wrong, heap.stats().bytes_trimmed, kept && heap.check().is_ok()))
    };
    for (device, current) in [(here, there), (there, here)] {
        let context = CudaContext::new(current.backend.device() as usize).map_err(refused)?;
        let name = format!(
            "device {}'s heap with device {} current, trimmed under queued kernels",
            device.backend.device(),
            current.backend.device()
        );
        // A thread of its own, so that this one's context stays as it is.
        let done = std::thread::scope(|scope| {
            let joined = scope.spawn(|| run(device, &context)).join();
            joined.map_err(|_| Error::InvalidArgument("a thread panicked".into()))?
        });
        let (wrong, trimmed, sound) = done?;
        let found = format!("{wrong} wrong words, {} trimmed, the current device is left: {sound}", human(trimmed));
        section.check(&name, found, wrong == 0 && sound && trimmed > 0);
    }
    Ok(())
}

/// Whose work stands in the way of memory: that of the heap's device, whichever device is current and however busy that is.
fn right_streams(here: &Device, there: &Device, section: &mut Section) -> Result<(), Error> {
    const BYTES: u64 = 200 * MIB;
    const BUSY: u64 = 400_000_000;
    let run = |device: &Device, other: &Device, current: &Arc<CudaContext>| -> Result<[(String, bool); 2], Error> {
        current.bind_to_thread().map_err(refused)?;
        let heap = device.heap("limit:600MiB,growth:exact")?;
        let second = Stream::new(device)?;
        let block = heap.alloc(BYTES, device.stream)?;
        let address = block.address();
        // SAFETY: a stream of this device; the kernel touches no memory. Here and below.
        unsafe { device.kernels.spin(device.stream, BUSY) }?;
        device.fill(&block, 1)?;
        let event = device.backend.record(EventScope::Stream(device.stream))?;
        drop(block);
        let early = heap.trim().released;
        // Another stream of the device gets other memory, and the freeing one the same.
        let elsewhere = heap.alloc(BYTES, second.id)?;
        let same = heap.alloc(BYTES, device.stream)?;
        let apart = elsewhere.address() != address && same.address() == address;
        let queued = !device.backend.is_done(&event)?;
        device.backend.recycle(event);
        drop((elsewhere, same));
        device.backend.quiesce()?;
        let late = released_soon(&heap, 2 * BYTES);
        let found = format!(
            "{} and then {} given back, kernels queued at the first: {queued}, apart: {apart}",
            human(early),
            human(late)
        );
        let own = (found, early == 0 && queued && apart && late == 2 * BYTES);

        // SAFETY: a stream of the other device.
        unsafe { other.kernels.spin(other.stream, BUSY) }?;
        let event = other.backend.record(EventScope::Stream(other.stream))?;
        let block = heap.alloc(BYTES, device.stream)?;
        device.fill(&block, 2)?;
        drop(block);
        device.backend.quiesce()?;
        let given = released_soon(&heap, BYTES);
        let queued = !other.backend.is_done(&event)?;
        other.backend.recycle(event);
        other.backend.quiesce()?;
        let found = format!("{} given back, kernels queued on the current device: {queued}", human(given));
        Ok([own, (found, given == BYTES && queued && heap.check().is_ok())])
    };
    for (device, other) in [(here, there), (there, here)] {
        let context = CudaContext::new(other.backend.device() as usize).map_err(refused)?;
        let (of_heap, of_thread) = (device.backend.device(), other.backend.device());
        let done = std::thread::scope(|scope| {
            let joined = scope.spawn(|| run(device, other, &context)).join();
            joined.map_err(|_| Error::InvalidArgument("a thread panicked".into()))?
        });
        let [(own_found, own), (other_found, free)] = done?;
        let heap = format!("device {of_heap}'s heap with device {of_thread} current");
        section.check(&format!("{heap}: memory under its own device's kernels is given to nobody"), own_found, own);
        section.check(&format!("{heap}: kernels of the current device keep nothing from it"), other_found, free);
    }
    Ok(())
}

/// Trims until so much was given back, for a tenth of a second: an event needs a moment to be seen done.
fn released_soon(heap: &Heap, bytes: u64) -> u64 {
    let mut released = 0;
    for _ in 0..100 {
        released += heap.trim().released;
        if released >= bytes {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    released
}

/// Copies from one device's heap to the other's, where the target may be reached and where it may not.
fn copies(here: &Device, there: &Device, section: &mut Section) -> Result<(), Error> {
    const BYTES: u64 = 256 * MIB;
    let mut table = Table::new(&["from device", "to device", "source's peers", "GB/s", "wrong words"]);
    for (from, to) in [(here, there), (there, here)] {
        let (source_heap, target_heap) = (from.heap("")?, to.heap("")?);
        let (source, target) = (source_heap.alloc(BYTES, from.stream)?, target_heap.alloc(BYTES, to.stream)?);
        let seed = 70 + from.backend.device();
        from.fill(&source, seed)?;
        from.backend.quiesce()?;
        let contexts = [from, to].map(|device| CudaContext::new(device.backend.device() as usize));
        let [from_context, to_context] = contexts;
        let (from_context, to_context) = (from_context.map_err(refused)?, to_context.map_err(refused)?);
        from_context.bind_to_thread().map_err(refused)?;
        let mut times = Vec::new();
        for _ in 0..5 {
            let ((), took) = timed(|| {
                // SAFETY: live blocks of this length in the contexts named; the device is waited for below.
                let copied = unsafe {
                    cudarc::driver::sys::cuMemcpyPeer(
                        target.address(),
                        to_context.cu_ctx(),
                        source.address(),
                        from_context.cu_ctx(),
                        BYTES as usize,
                    )
                };
                copied.result().map_err(refused)?;
                Ok::<_, Error>(from.backend.quiesce()?)
            })?;
            times.push(micros(took));
        }
        to.backend.quiesce()?;
        let wrong = to.wrong(&target, seed)?;
        let rate = BYTES as f64 / median(&mut times) / 1e3;
        let peers = format!("{:?}", from.backend.peers());
        let (from, to) = (u64::from(from.backend.device()), u64::from(to.backend.device()));
        table.row([from.into(), to.into(), peers.as_str().into(), rate.into(), wrong.into()]);
        section.check(
            &format!("a copy from device {from} to device {to} arrives"),
            format!("{wrong} wrong words"),
            wrong == 0,
        );
    }
    section.tables.push(table);
    Ok(())
}

/// What access for peers costs when memory is mapped.
fn cost(suite: &Suite, others: &[u32], section: &mut Section) -> Result<(), Error> {
    const SIZE: u64 = 16 * MIB;
    let count = suite.choose(400, 50) as usize;
    let mut table = Table::new(&["peers with access", "handles of 16 MiB", "map µs", "set_access µs", "unmap µs"]);
    for peers in 0..=others.len() {
        let options = CudaOptions { peers: others[..peers].to_vec(), ..Default::default() };
        let backend = Arc::new(CudaBackend::open(suite.backend.device(), &options)?);
        let room = Reservation::new(suite, count as u64 * SIZE)?;
        let handles = Handles::new(suite, SIZE, count)?;
        let mut calls: [Vec<f64>; 3] = Default::default();
        for (index, handle) in handles.all.iter().enumerate() {
            let at = room.address + index as u64 * SIZE;
            // SAFETY: inside the reservation, whole handles, each mapped once and unmapped below.
            let ((), took) = timed(|| unsafe { backend.map(at, *handle, SIZE) })?;
            calls[0].push(micros(took));
            // SAFETY: mapped just now.
            let ((), took) = timed(|| unsafe { backend.set_access(at, SIZE) })?;
            calls[1].push(micros(took));
        }
        for index in 0..handles.all.len() {
            let at = room.address + index as u64 * SIZE;
            // SAFETY: mapped above; no work uses it.
            let ((), took) = timed(|| unsafe { backend.unmap(at, SIZE) })?;
            calls[2].push(micros(took));
        }
        let medians = calls.each_mut().map(|values| median(values).into());
        table.row([(peers as u64).into(), (count as u64).into()].into_iter().chain(medians));
    }
    section.tables.push(table);
    Ok(())
}
