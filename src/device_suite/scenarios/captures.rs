//! Captured graphs.

use super::{Suite, check, fill, heap, refused, spin};
use crate::device_suite::report::{Section, Table};
use crate::device_suite::{micros, timed};
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, CudaGraph, CudaStream};
use std::sync::Arc;
use xseg::backend::cuda::StreamSet;
use xseg::backend::{Backend, StreamId};
use xseg::units::{GRANULE, MIB, human};
use xseg::{Allocation, Error, Heap, PoolId, StreamFilter};

const POOL: PoolId = PoolId(22, 25);

/// A stream from which graphs are captured.
struct Capturing {
    stream: Arc<CudaStream>,
    id: StreamId,
}

impl Capturing {
    fn new(suite: &Suite) -> Result<Self, Error> {
        let context = CudaContext::new(suite.backend.device() as usize).map_err(refused)?;
        let stream = context.new_stream().map_err(refused)?;
        let id = StreamId(stream.cu_stream().expose_provenance() as u64);
        Ok(Self { stream, id })
    }

    /// Captures what `body` queues, into the pool; in the strictest mode.
    fn capture<T>(&self, heap: &Heap, body: impl FnOnce() -> Result<T, Error>) -> Result<(T, CudaGraph), Error> {
        heap.begin_capture(POOL, StreamFilter::Streams(vec![self.id]))?;
        let begun = self.stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL).map_err(refused);
        let made = begun.and_then(|()| {
            let made = body();
            // Ended also when the body failed: else the stream captures on.
            let graph = self.stream.end_capture(CUgraphInstantiate_flags(0)).map_err(refused);
            let graph = graph?.ok_or_else(|| Error::InvalidArgument("the capture was invalidated".into()))?;
            Ok((made?, graph))
        });
        heap.end_capture(POOL)?;
        made
    }
}

/// Queues copying one block's first 2 MiB to another's.
fn copy(suite: &Suite, stream: StreamId, from: &Allocation, to: &Allocation) -> Result<(), Error> {
    // SAFETY: two live blocks of at least that size.
    Ok(unsafe { suite.kernels.copy(stream, to.address(), from.address(), 2 * MIB) }?)
}

/// Queues checking the first 2 MiB of a block.
fn check_part(suite: &Suite, stream: StreamId, block: &Allocation, seed: u32) -> Result<(), Error> {
    // SAFETY: a live block of at least that size.
    Ok(unsafe { suite.kernels.check(stream, block.address(), 2 * MIB / 4, seed) }?)
}

/// Drops every second block.
fn thin(blocks: &mut Vec<(u32, Allocation)>) {
    let mut number = 0;
    blocks.retain(|_| {
        number += 1;
        number % 2 == 0
    });
}

/// 22: pressure during a capture and after it moves all that may move; the graph replays right.
pub(super) fn pressure(suite: &Suite, section: &mut Section) -> Result<(), Error> {
    const LIMIT: u64 = 96 * MIB;
    let mut streams = StreamSet::new(suite.backend.clone());
    let (other, one) = (streams.get(0)?, Capturing::new(suite)?);
    let heap = heap(suite, "limit:96MiB,growth:exact")?;
    let mut ordinary = Vec::new();
    for seed in 100..112 {
        let block = heap.alloc(8 * MIB, one.id)?;
        fill(suite, one.id, &block, seed)?;
        ordinary.push((seed, block));
    }
    // The driver may load a kernel when it is first launched, and a capture is no place for that. The target
    // is among those that are freed next.
    copy(suite, one.id, &ordinary[0].1, &ordinary[2].1)?;
    thin(&mut ordinary);
    heap.tick();
    suite.backend.quiesce()?;

    let ((input, output), graph) = one.capture(&heap, || {
        let input = heap.alloc(2 * MIB, one.id)?;
        // Scattered free memory moves into the pool: nothing can be created at the limit.
        let scratch = heap.alloc(16 * MIB, one.id)?;
        copy(suite, one.id, &input, &scratch)?;
        heap.tick();
        let output = heap.alloc(2 * MIB, one.id)?;
        copy(suite, one.id, &scratch, &output)?;
        drop(scratch);
        heap.trim();
        // Freed inside, used again inside.
        let again = heap.alloc(16 * MIB, one.id)?;
        fill(suite, one.id, &again, 4)?;
        drop(again);
        // Others go on meanwhile, under pressure too.
        let beside = heap.alloc(16 * MIB, other)?;
        fill(suite, other, &beside, 3)?;
        check(suite, other, &beside, 3)?;
        drop(beside);
        heap.tick();
        Ok((input, output))
    })?;
    let stats = heap.stats();
    let (moved, captured) = (stats.handles_moved, stats.captured);
    let found = format!("{moved} handles moved, {} in the pool, {} host waits", human(captured), stats.host_waits);
    let right = moved > 0 && (20 * MIB..=26 * MIB).contains(&captured);
    section.check("22: memory is moved into a capture under way, which stays valid", found, right);

    suite.backend.quiesce()?;
    let left = LIMIT - captured - 48 * MIB;
    let refused = heap.alloc(left + GRANULE, other).map(drop);
    let told = matches!(&refused, Err(Error::OutOfMemory(fields)) if fields.captured >= 16 * MIB);
    let found = refused.map_or_else(|error| error.to_string(), |()| "it was given".into());
    section.check("22: free memory of a live graph's pool is not given to others", found, told);

    let mut all = Vec::new();
    for _ in 0..left / (2 * MIB) {
        let block = heap.alloc(2 * MIB, other)?;
        fill(suite, other, &block, 7)?;
        all.push((7, block));
    }
    heap.set_limit(32 * MIB);
    heap.trim();
    heap.set_limit(LIMIT);
    thin(&mut all);
    heap.tick();
    suite.backend.quiesce()?;
    let room = left / 2 / (2 * MIB) * (2 * MIB);
    let large = heap.alloc(room, other)?;
    fill(suite, other, &large, 8)?;
    let moved = heap.stats().handles_moved - moved;
    let mut wrong = 0;
    for round in 0..3 {
        fill(suite, one.id, &input, 50 + round)?;
        fill(suite, one.id, &output, 60 + round)?;
        graph.launch().map_err(super::refused)?;
        check_part(suite, one.id, &output, 50 + round)?;
        wrong += suite.kernels.mismatches()?.count;
    }
    section.check(
        "22: a captured graph replays right after pressure moved all that may move",
        format!("{moved} handles moved since the capture, 3 replays, {wrong} wrong words"),
        moved > 0 && wrong == 0,
    );
    for (seed, block) in ordinary.iter().chain(&all).chain(&[(8, large)]) {
        check(suite, other, block, *seed)?;
    }
    let wrong = suite.kernels.mismatches()?.count;
    section.check("22: replays write to nothing of others", format!("{wrong} wrong words"), wrong == 0);

    // The graph's inputs and outputs are freed before it: their memory is the pool's all the same.
    drop((all, ordinary, input, output));
    suite.backend.quiesce()?;
    heap.tick();
    heap.trim();
    graph.launch().map_err(super::refused)?;
    suite.backend.quiesce()?;
    let kept = heap.stats().reserved;
    drop(graph);
    heap.release_capture(POOL)?;
    heap.tick();
    suite.backend.quiesce()?;
    let whole = heap.alloc(LIMIT, one.id).map(drop);
    let text = whole.as_ref().map_or_else(ToString::to_string, |()| "all of the limit given".into());
    section.check(
        "22: a pool keeps its memory until it is released, and then nothing is lost",
        format!("{} kept of {}, then {text}", human(kept), human(captured)),
        kept == captured && whole.is_ok() && heap.check().is_ok(),
    );
    drop(heap);
    Ok(())
}

/// Microseconds of one allocation and free, when memory is at hand, and of one that makes the heap grow.
struct Cost {
    pair: f64,
    growth: f64,
}

fn measure(heap: &Heap, stream: StreamId) -> Result<Cost, Error> {
    const PAIRS: u32 = 20_000;
    const GROWTHS: u32 = 200;
    drop(heap.alloc(4 * MIB, stream)?);
    let ((), pairs) = timed(|| {
        for _ in 0..PAIRS {
            drop(heap.alloc(4 * MIB, stream)?);
        }
        Ok::<_, Error>(())
    })?;
    let mut live = Vec::with_capacity(GROWTHS as usize);
    let ((), growths) = timed(|| {
        for _ in 0..GROWTHS {
            live.push(heap.alloc(2 * MIB, stream)?);
        }
        Ok::<_, Error>(())
    })?;
    Ok(Cost { pair: micros(pairs) / f64::from(PAIRS), growth: micros(growths) / f64::from(GROWTHS) })
}

/// 25: what allocations cost while a graph is captured, beside many streams with work and pending frees.
pub(super) fn cost(suite: &Suite, section: &mut Section) -> Result<(), Error> {
    const SIDES: u64 = 64;
    let mut table = Table::new(&["pending frees", "alloc + free µs", "capturing", "growing alloc µs", "capturing"]);
    let (mut ratios, mut unlike) = (Vec::new(), Vec::new());
    for pending in [0, SIDES] {
        let mut streams = StreamSet::new(suite.backend.clone());
        let one = Capturing::new(suite)?;
        // Each growth makes one handle, in the capture and outside.
        let heap = heap(suite, "handle_max:2MiB,growth:exact,limit:4GiB")?;
        for number in 0..pending {
            let side = streams.get(number)?;
            let block = heap.alloc(2 * MIB, one.id)?;
            block.record_use(side)?;
            spin(suite, side, 300)?;
        }
        let outside = measure(&heap, one.id)?;
        let outside_again = measure(&heap, one.id)?;
        let (inside, graph) = one.capture(&heap, || {
            let inside = measure(&heap, one.id)?;
            // A graph without work is none to instantiate.
            spin(suite, one.id, 0)?;
            Ok(inside)
        })?;
        drop(graph);
        // The second time nothing grows outside: only the first has the cost of growth.
        let pair = outside.pair.min(outside_again.pair);
        table.row([pending.into(), pair.into(), inside.pair.into(), outside.growth.into(), inside.growth.into()]);
        ratios.extend([inside.pair / pair, inside.growth / outside.growth]);
        unlike.push(inside);
        heap.release_capture(POOL)?;
        suite.backend.quiesce()?;
    }
    section.tables.push(table);
    let most = ratios.iter().copied().fold(0.0, f64::max);
    let found = format!("at most {most:.2} times (a report has 20)");
    section.check("25: an allocation while capturing costs at most 3 times one outside", found, most <= 3.0);
    let [none, many] = [&unlike[0], &unlike[1]];
    let found = format!("{:.2} and {:.2} times", many.pair / none.pair, many.growth / none.growth);
    section.check(
        &format!("25: and no more than twice as much with {SIDES} frees pending as with none"),
        found,
        many.pair <= 2.0 * none.pair && many.growth <= 2.0 * none.growth,
    );
    Ok(())
}
