//! What the other process does.

use super::peer::{Answer, Ask, Asked, DONE};
use super::{check, descriptors, failed, fill, wrong};
use crate::device_suite::{Suite, timed};
use std::sync::Arc;
use std::time::Duration;
use xseg::backend::cuda::CudaBackend;
use xseg::backend::fault::FaultyBackend;
use xseg::backend::{Backend, StreamId};
use xseg::error::DriverCall;
use xseg::units::MIB;
use xseg::{Allocation, Error, Heap, Imported};

/// One such process.
struct Other {
    suite: Suite,
    /// Counts the heap's calls.
    calls: Arc<FaultyBackend<CudaBackend>>,
    heap: Heap,
    stream: StreamId,
    imported: Option<Imported>,
    /// Blocks of its own, which it sent.
    sent: Vec<Allocation>,
}

/// Does what it is asked for until there is nothing more.
///
/// # Errors
/// When the heap or the device does not behave, or the suite's process is gone.
pub(crate) fn child(device: u32) -> Result<(), Error> {
    let suite = Suite::open(device, true, 1, Vec::new())?;
    let calls = Arc::new(FaultyBackend::new(suite.backend.clone()));
    let heap = Heap::builder().backend(calls.clone()).build()?;
    let stream = suite.backend.create_stream()?;
    let asked = Asked::open()?;
    let mut other = Other { suite, calls, heap, stream, imported: None, sent: Vec::new() };
    asked.answer(DONE)?;
    while let Some(ask) = asked.next()? {
        let answer = other.does(ask, &asked)?;
        asked.answer(answer)?;
    }
    // Before the stream that may use it.
    other.imported = None;
    other.suite.backend.quiesce()?;
    other.heap.shut_down();
    // SAFETY: created above; idle.
    Ok(unsafe { other.suite.backend.destroy_stream(stream) }?)
}

/// Whole microseconds.
fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// KiB of addresses that the process has, reserved ones included.
fn addresses() -> Result<u64, Error> {
    let status = std::fs::read_to_string("/proc/self/status").map_err(failed)?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmSize:"));
    let number = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    number.ok_or_else(|| failed("the system does not say how many addresses the process has"))
}

impl Other {
    fn place(&self) -> Result<(u64, u64), Error> {
        let imported = self.imported.as_ref().ok_or_else(|| failed("nothing was imported"))?;
        Ok((imported.address(), imported.len()))
    }

    /// Reservations that the heap holds.
    fn reservations(&self) -> u64 {
        let log = self.calls.log();
        let count = |call| log.iter().filter(|one| one.call == call && !one.failed).count() as u64;
        count(DriverCall::Reserve) - count(DriverCall::Unreserve)
    }

    fn does(&mut self, ask: Ask, asked: &Asked) -> Result<Answer, Error> {
        match ask {
            Ask::Receive => {
                let (imported, took) = timed(|| self.heap.receive(&asked.0))?;
                let bytes = imported.len();
                self.imported = Some(imported);
                Ok([bytes, micros(took), 0, 0, 0, 0])
            }
            Ask::Check(seed) => {
                check(&self.suite, self.stream, self.place()?, seed)?;
                Ok([wrong(&self.suite)?, 0, 0, 0, 0, 0])
            }
            Ask::Fill(seed) => {
                fill(&self.suite, self.stream, self.place()?, seed)?;
                self.suite.backend.quiesce()?;
                Ok(DONE)
            }
            Ask::Write => {
                // Work of 1.5 s, few enough launches for the driver's queue, of which the end is not waited for.
                for round in 0..300 {
                    fill(&self.suite, self.stream, self.place()?, round)?;
                    // SAFETY: a stream of this process; the kernel touches no memory.
                    unsafe { self.suite.kernels.spin(self.stream, 5_000_000) }?;
                }
                Ok(DONE)
            }
            Ask::Close => {
                let imported = self.imported.take().ok_or_else(|| failed("nothing was imported"))?;
                let ((), took) = timed(|| imported.close())?;
                Ok([micros(took), 0, 0, 0, 0, 0])
            }
            Ask::Drop(milliseconds, seed) => {
                let place = self.place()?;
                // SAFETY: as above.
                unsafe { self.suite.kernels.spin(self.stream, u64::from(milliseconds) * 1_000_000) }?;
                check(&self.suite, self.stream, place, seed)?;
                self.imported = None;
                Ok(DONE)
            }
            Ask::Settle => {
                let wrong = wrong(&self.suite)?;
                self.heap.tick();
                Ok([wrong, self.heap.stats().imported, 0, 0, 0, 0])
            }
            Ask::Many(count) => self.many(count, asked),
            Ask::Send(mib, seed) => {
                let block = self.heap.alloc(u64::from(mib) * MIB, self.stream)?;
                fill(&self.suite, self.stream, (block.address(), block.len()), seed)?;
                self.suite.backend.quiesce()?;
                self.heap.export(block.address())?.send(&asked.0)?;
                self.sent.push(block);
                Ok(DONE)
            }
        }
    }

    fn many(&mut self, count: u32, asked: &Asked) -> Result<Answer, Error> {
        let before = (descriptors()?, self.reservations(), addresses()?);
        for round in 0..count {
            let (imported, import) = timed(|| self.heap.receive(&asked.0))?;
            // The kernel of every 50th import sees what the other side wrote for that round.
            let mut wrong_words = 0;
            if round % 50 == 0 {
                check(&self.suite, self.stream, (imported.address(), imported.len()), round)?;
                wrong_words = wrong(&self.suite)?;
            }
            let ((), close) = timed(|| imported.close())?;
            asked.answer([micros(import), micros(close), wrong_words, 0, 0, 0])?;
        }
        Ok([before.0, descriptors()?, before.1, self.reservations(), before.2, addresses()?])
    }
}
