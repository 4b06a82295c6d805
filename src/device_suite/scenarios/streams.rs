//! Several streams, with work queued.

use super::{Suite, check, fill, heap, order, refused, spin};
use crate::device_suite::report::Section;
use crate::device_suite::timed;
use cudarc::driver::{CudaContext, result};
use std::collections::VecDeque;
use std::sync::Arc;
use xseg::backend::cuda::StreamSet;
use xseg::backend::{Backend, EventScope};
use xseg::units::{GIB, MIB, human};
use xseg::{Allocation, Error, Heap};

/// 6: free memory that every stream has passed belongs to the device. `PyTorch` climbs from 2 to 16 GiB.
pub(super) fn new_streams(suite: &Suite, section: &mut Section) -> Result<(), Error> {
    let bytes = suite.choose(GIB, 64 * MIB);
    for limit in [String::new(), format!("limit:{}", 2 * bytes)] {
        let heap = heap(suite, &limit)?;
        for round in 0..8 {
            let mut streams = StreamSet::new(suite.backend.clone());
            let pair = [streams.get(0)?, streams.get(1)?];
            let blocks = [heap.alloc(bytes, pair[0])?, heap.alloc(bytes, pair[1])?];
            for (stream, block) in pair.into_iter().zip(&blocks) {
                fill(suite, stream, block, round)?;
                check(suite, stream, block, round)?;
            }
            drop(blocks);
            suite.backend.quiesce()?;
            for stream in pair {
                heap.retire_stream(stream)?;
            }
        }
        let (stats, wrong) = (heap.stats(), suite.kernels.mismatches()?.count);
        let found =
            format!("{} at most, {} host waits, {wrong} wrong words", human(stats.peak_reserved), stats.host_waits);
        let what = if limit.is_empty() { "no limit".to_owned() } else { limit };
        section.check(
            &format!("6: 8 times two new streams with {} each take {} ({what})", human(bytes), human(2 * bytes)),
            found,
            stats.peak_reserved == 2 * bytes && stats.host_waits == 0 && wrong == 0,
        );
    }
    Ok(())
}

/// 13: blocks wait for side streams of which the oldest is the slowest.
pub(super) fn younger_event(suite: &Suite, section: &mut Section) -> Result<(), Error> {
    const BYTES: u64 = 648 * MIB;
    let mut streams = StreamSet::new(suite.backend.clone());
    let own = streams.get(0)?;
    let sides = [streams.get(1)?, streams.get(2)?, streams.get(3)?];
    let heap = heap(suite, "limit:1944MiB")?;
    let blocks = [heap.alloc(BYTES, own)?, heap.alloc(BYTES, own)?, heap.alloc(BYTES, own)?];
    for (number, (block, side)) in blocks.iter().zip(sides).enumerate() {
        fill(suite, own, block, number as u32)?;
        order(suite, side, own)?;
        block.record_use(side)?;
        spin(suite, side, if number == 0 { 500 } else { 2 })?;
        check(suite, side, block, number as u32)?;
    }
    let slow = suite.backend.record(EventScope::Stream(sides[0]))?;
    for block in blocks {
        drop(block);
        heap.tick();
    }
    for side in &sides[1..] {
        // SAFETY: a stream of the set.
        unsafe { suite.backend.synchronize(*side) }?;
    }
    let (again, took) = timed(|| heap.alloc(BYTES, own))?;
    let stats = heap.stats();
    fill(suite, own, &again, 9)?;
    let runs = !suite.backend.is_done(&slow)?;
    suite.backend.recycle(slow);
    let wrong = suite.kernels.mismatches()?.count;
    let found = format!(
        "after {:.2} ms, the slow stream still running: {runs}, {} waiting for it, {} host waits, {wrong} wrong words",
        took.as_secs_f64() * 1e3,
        human(stats.pending),
        stats.host_waits
    );
    let right = runs && stats.host_waits == 0 && stats.pending == BYTES && wrong == 0;
    section.check("13: a finished younger event frees its 648 MiB although an older one is pending", found, right);
    Ok(())
}

/// 15: memory is never unmapped under queued work; the right device's streams are asked.
pub(super) fn come_and_go(suite: &Suite, section: &mut Section) -> Result<(), Error> {
    let elsewhere = Elsewhere::open(suite)?;
    for (conf, at_once) in [("", 3), ("limit:300MiB", 3), ("limit:180MiB,shrink:idle=1ms", 2)] {
        let mut streams = StreamSet::new(suite.backend.clone());
        let heap = heap(suite, conf)?;
        churn(suite, &heap, &mut streams, at_once, &elsewhere)?;
        let wrong = suite.kernels.mismatches()?.count;
        let (stats, sound) = (heap.stats(), heap.check());
        let found = format!(
            "{wrong} wrong words, {} host waits, {} trimmed, {} moved",
            stats.host_waits,
            human(stats.bytes_trimmed),
            human(stats.bytes_moved)
        );
        let conf = if conf.is_empty() { "default" } else { conf };
        section.check(
            &format!("15: 200 blocks of 56 MiB come and go under queued work ({conf})"),
            found,
            wrong == 0 && sound.is_ok() && stats.bytes_trimmed > 0,
        );
    }
    last_block(suite, section, &elsewhere)
}

fn churn(
    suite: &Suite,
    heap: &Heap,
    streams: &mut StreamSet,
    at_once: usize,
    elsewhere: &Elsewhere,
) -> Result<(), Error> {
    let side = streams.get(77)?;
    let mut live: VecDeque<Allocation> = VecDeque::new();
    for number in 0..200_u32 {
        let stream = streams.get(u64::from(number % 4))?;
        let block = heap.alloc(56 * MIB, stream)?;
        fill(suite, stream, &block, number)?;
        spin(suite, stream, 1)?;
        check(suite, stream, &block, number)?;
        // Read on a side stream that the heap is not told of.
        order(suite, side, stream)?;
        spin(suite, side, 1)?;
        check(suite, side, &block, number)?;
        // As programs do that declare nothing: what the block's own stream does later comes after that read.
        order(suite, stream, side)?;
        if number % 3 == 0 {
            let other = streams.get(u64::from((number + 1) % 4))?;
            block.record_use(other)?;
            order(suite, other, stream)?;
            check(suite, other, &block, number)?;
        }
        live.push_back(block);
        if live.len() >= at_once {
            live.pop_front();
        }
        if number % 5 == 0 {
            elsewhere.trim(heap)?;
        }
        if number % 8 == 7 {
            heap.tick();
            // Else the host runs ahead of all that is queued, and nothing is given back in between.
            // SAFETY: a stream of the set.
            unsafe { suite.backend.synchronize(side) }?;
        }
    }
    Ok(())
}

/// The memory of a block that was freed under queued work stays until that is done.
fn last_block(suite: &Suite, section: &mut Section, elsewhere: &Elsewhere) -> Result<(), Error> {
    let mut streams = StreamSet::new(suite.backend.clone());
    let (own, side) = (streams.get(0)?, streams.get(1)?);
    let heap = heap(suite, "")?;
    let block = heap.alloc(56 * MIB, own)?;
    fill(suite, own, &block, 5)?;
    order(suite, side, own)?;
    spin(suite, side, 200)?;
    check(suite, side, &block, 5)?;
    drop(block);
    elsewhere.trim(&heap)?;
    let during = heap.stats().reserved;
    let wrong = suite.kernels.mismatches()?.count;
    elsewhere.trim(&heap)?;
    let after = heap.stats().reserved;
    section.check(
        &format!("15: trim with {} leaves memory under queued work, and gives it back afterwards", elsewhere.what()),
        format!("{} during, {} after, {wrong} wrong words", human(during), human(after)),
        during >= 56 * MIB && after == 0 && wrong == 0,
    );
    Ok(())
}

/// A thread's place that is not the suite's device: another one's context is current, or none.
struct Elsewhere(Option<Arc<CudaContext>>);

impl Elsewhere {
    fn open(suite: &Suite) -> Result<Self, Error> {
        let own = suite.backend.device();
        let other = suite.driver.devices.iter().map(|info| info.index).find(|index| *index != own);
        // A thread of its own, so that this one's context stays as it is.
        let opened = std::thread::spawn(move || other.map(|index| CudaContext::new(index as usize)).transpose());
        let context = opened.join().map_err(|_| Error::InvalidArgument("a thread panicked".into()))?;
        Ok(Self(context.map_err(refused)?))
    }

    fn what(&self) -> String {
        self.0.as_ref().map_or("no context".into(), |context| format!("device {}", context.ordinal())) + " current"
    }

    /// Trims there; the context that is current must be the same afterwards.
    fn trim(&self, heap: &Heap) -> Result<(), Error> {
        let kept = std::thread::scope(|scope| {
            let trimmed = scope.spawn(|| {
                if let Some(context) = &self.0 {
                    context.bind_to_thread()?;
                }
                let before = result::ctx::get_current()?;
                heap.trim();
                Ok(result::ctx::get_current()? == before)
            });
            trimmed.join().map_err(|_| Error::InvalidArgument("a thread panicked".into()))?.map_err(refused)
        })?;
        if kept { Ok(()) } else { Err(Error::InvalidArgument("trim changed the thread's current context".into())) }
    }
}
