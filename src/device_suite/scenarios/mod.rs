//! Patterns from public reports that made other allocators fail, waste memory or break, on the real device.
//! The numbers are those of the tests that run the same patterns on the other backends.

mod captures;
pub(crate) mod process;
mod streams;

use super::report::{Section, Table};
use super::{Suite, timed};
use xseg::backend::{Backend, EventScope, StreamId};
use xseg::error::{DriverCall, DriverError};
use xseg::{Allocation, Error, Heap};

/// One pattern: number, where it was reported, what it is, and how it runs.
type Scenario = (u64, &'static str, &'static str, fn(&Suite, &mut Section) -> Result<(), Error>);

const ALL: [Scenario; 8] = [
    (6, "vllm-project/vllm#52950", "new streams reuse what old ones freed", streams::new_streams),
    (13, "pytorch/pytorch#71616", "a younger event frees its block before an older one", streams::younger_event),
    (15, "vllm-project/vllm#43020", "blocks come and go under queued work", streams::come_and_go),
    (21, "ROCm/rocm-systems#10604", "handles without descriptors", process::descriptors),
    (22, "pytorch/pytorch#159594", "pressure beside a captured graph", captures::pressure),
    (24, "vLLM's cumem reports", "the end of a process and of a heap", process::ends),
    (25, "pytorch/pytorch#162186", "the cost of allocating while capturing", captures::cost),
    (0, "", "heaps that come and go leave the card as it was", process::cycles),
];

/// Runs the section. A scenario that fails does not stop the others.
///
/// # Errors
/// When the device can no longer be waited for, as after a kernel's fault.
pub(crate) fn run(suite: &Suite) -> Result<Section, Error> {
    let mut section = Section::default();
    let mut table = Table::new(&["scenario", "source", "pattern", "checks", "seconds"]);
    for (number, source, what, scenario) in ALL {
        let before = section.checks.len();
        let (done, took) = timed(|| Ok::<_, Error>(scenario(suite, &mut section)))?;
        if let Err(error) = done {
            section.check(&format!("{what}: it ran"), error, false);
        }
        suite.backend.quiesce()?;
        let name = if number > 0 { number.to_string() } else { "-".into() };
        let cells = [name.as_str().into(), source.into(), what.into()];
        let numbers = [((section.checks.len() - before) as u64).into(), took.as_secs_f64().into()];
        table.row(cells.into_iter().chain(numbers));
    }
    section.tables.push(table);
    Ok(section)
}

/// A heap on the suite's device.
fn heap(suite: &Suite, conf: &str) -> Result<Heap, Error> {
    Heap::builder().conf(conf)?.backend(suite.backend.clone()).build()
}

/// Queues writing a block's pattern.
fn fill(suite: &Suite, stream: StreamId, block: &Allocation, seed: u32) -> Result<(), Error> {
    // SAFETY: a live block; what uses it elsewhere was ordered before by the caller.
    Ok(unsafe { suite.kernels.fill(stream, block.address(), block.len() / 4, seed) }?)
}

/// Queues checking a block's pattern.
fn check(suite: &Suite, stream: StreamId, block: &Allocation, seed: u32) -> Result<(), Error> {
    // SAFETY: a live block, or one whose memory is kept until this stream has passed.
    Ok(unsafe { suite.kernels.check(stream, block.address(), block.len() / 4, seed) }?)
}

/// Queues work that takes time.
fn spin(suite: &Suite, stream: StreamId, milliseconds: u64) -> Result<(), Error> {
    // SAFETY: a stream of this device; the kernel touches no memory.
    Ok(unsafe { suite.kernels.spin(stream, milliseconds * 1_000_000) }?)
}

/// Later work of `stream` comes after the work queued so far on `other`, as programs order a use elsewhere.
pub(crate) fn order(suite: &Suite, stream: StreamId, other: StreamId) -> Result<(), Error> {
    let event = suite.backend.record(EventScope::Stream(other))?;
    let waits = suite.backend.stream_wait(stream, &event);
    suite.backend.recycle(event);
    Ok(waits?)
}

/// `cudarc`'s error asks the driver for a text when it is formatted; its code does not.
pub(crate) fn refused(error: cudarc::driver::DriverError) -> Error {
    DriverError::new(DriverCall::Other, format!("{:?}", error.0)).into()
}
