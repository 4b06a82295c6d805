//! The device's side of a verified replay on a GPU: kernels write and check the stamps, in stream order.
//!
//! Blocks are allocated and freed while their stamps are still queued, so that memory which is given away,
//! moved or unmapped too early is overwritten or gone when the device comes to the check. An access to an
//! address without memory ends the context: the replay then stops with the driver's error.
#![allow(unsafe_code, reason = "kernels write where the replay says, which is in live blocks")]

use super::device::{Findings, Verifier};
use super::stamp::{Piece, Stamped};
use crate::backend::cuda::memory::{Kernels, Stamp};
use crate::backend::cuda::{CudaBackend, StreamSet};
use crate::backend::{Backend, EventScope, StreamId};
use crate::error::{DriverError, Error};
use parking_lot::Mutex;
use std::sync::Arc;

/// See the module's text. It takes the blocks that it is told of to be live on the device.
#[derive(Debug)]
pub(crate) struct GpuDevice {
    kernels: Kernels,
    backend: Arc<CudaBackend>,
    streams: Arc<Mutex<StreamSet>>,
    /// The device is waited for between events, so that faults made on purpose hit no running kernel.
    settled: bool,
    findings: Mutex<Findings>,
}

impl Piece {
    /// As the kernels take it.
    fn stamp(&self) -> Stamp {
        let (words, _) = self.bytes.as_chunks::<8>();
        Stamp {
            address: self.address,
            value: [u64::from_le_bytes(words[0]), u64::from_le_bytes(words[1])],
            bytes: u64::from(self.length),
        }
    }
}

impl GpuDevice {
    /// Loads the kernels. `streams` are those of the replay.
    pub(crate) fn new(backend: Arc<CudaBackend>, streams: Arc<Mutex<StreamSet>>, settled: bool) -> Result<Self, Error> {
        let kernels = Kernels::load(backend.clone())?;
        Ok(Self { kernels, backend, streams, settled, findings: Mutex::default() })
    }

    fn stream(&self, number: u64) -> Result<StreamId, DriverError> {
        self.streams.lock().get(number)
    }

    fn order(&self, stream: u64, other: u64) -> Result<(), DriverError> {
        let (stream, other) = (self.stream(stream)?, self.stream(other)?);
        if stream == other {
            return Ok(());
        }
        let event = self.backend.record(EventScope::Stream(other))?;
        let waits = self.backend.stream_wait(stream, &event);
        // The wait stands for what the event covers now.
        self.backend.recycle(event);
        waits
    }

    /// Notes what the driver refused, so that a verification which did not happen is none that passed.
    fn note(&self, done: Result<(), DriverError>, block: Stamped, what: &str) {
        if let Err(error) = done {
            self.findings.lock().mismatch(block, block.address, || format!("{what}: {error}"));
        }
    }
}

impl Verifier for GpuDevice {
    fn stamp(&self, id: u32, address: u64, bytes: u64, stream: u64) {
        let block = Stamped { id, address, bytes };
        let stamps: Vec<Stamp> = block.pieces().map(|piece| piece.stamp()).collect();
        // SAFETY: a live block of this stream, which exists as long as the set.
        let done = self.stream(stream).and_then(|stream| unsafe { self.kernels.stamp(stream, &stamps) });
        self.note(done, block, "cannot be stamped");
    }

    fn check(&self, id: u32, address: u64, bytes: u64, stream: u64) {
        let block = Stamped { id, address, bytes };
        let stamps: Vec<Stamp> = block.pieces().map(|piece| piece.stamp()).collect();
        self.findings.lock().stamps_checked += stamps.len() as u64;
        // SAFETY: the block is still live, and its memory kept until this stream has passed.
        let done = self.stream(stream).and_then(|stream| unsafe { self.kernels.check_stamps(stream, &stamps) });
        self.note(done, block, "cannot be checked");
    }

    fn order_after(&self, stream: u64, other: u64) {
        let nothing = Stamped { id: u32::MAX, address: 0, bytes: 0 };
        self.note(self.order(stream, other), nothing, "cannot be ordered");
    }

    fn run_due(&self) {
        if self.settled {
            // A refusal is the next call's too, which is noted.
            let _ = self.backend.quiesce();
        }
    }

    fn run_all(&self) {
        let mut findings = self.findings.lock();
        match self.kernels.mismatches() {
            Ok(found) if found.count == 0 => {}
            Ok(found) => findings.found(found.count, format!("the stamp at {:#x} holds something else", found.address)),
            Err(error) => findings.found(1, format!("the device's checks cannot be read: {error}")),
        }
    }

    fn findings(&self) -> Findings {
        self.findings.lock().clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_is_the_same_stamp_to_the_kernels() {
        let piece = Piece { address: 77, length: 16, bytes: std::array::from_fn(|at| at as u8) };
        let stamp = piece.stamp();
        assert_eq!((stamp.address, stamp.bytes), (77, 16));
        assert_eq!(stamp.value, [0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908]);
    }
}
