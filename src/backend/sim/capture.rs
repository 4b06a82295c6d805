//! Captured graphs on the simulated device: what their nodes use, and replays of them.

use super::SimBackend;
use crate::backend::{Event, PhysicalAllocation, StreamId};
use crate::error::{DriverCall, DriverError};
use crate::units::human;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// Work of a graph on a range of addresses, as it was captured.
#[derive(Debug, Clone)]
pub(super) struct Node {
    address: u64,
    bytes: u64,
    length: Duration,
    /// The memory behind the range then, as [`SimBackend::resolve`] says it.
    behind: Vec<(PhysicalAllocation, u64, u64)>,
}

/// A captured graph. Its addresses are baked in: a replay needs the same memory behind them.
#[derive(Debug, Clone)]
pub struct SimGraph(Vec<Node>);

impl SimGraph {
    /// Pieces of work in it.
    #[must_use]
    pub fn nodes(&self) -> usize {
        self.0.len()
    }
}

impl SimBackend {
    /// Begins the capture of a graph from `stream`. Until it ends, work queued there becomes part of the
    /// graph, and an event over the whole context or a wait for the device is refused, noted as a
    /// violation, and invalidates the capture.
    ///
    /// # Errors
    /// The stream captures already.
    pub fn begin_capture(&self, stream: StreamId) -> Result<(), DriverError> {
        self.captures.begin(stream).map_err(|why| DriverError::new(DriverCall::Other, why))
    }

    /// Ends the capture from `stream`.
    ///
    /// # Errors
    /// The stream does not capture, or the capture was invalidated.
    pub fn end_capture(&self, stream: StreamId) -> Result<SimGraph, DriverError> {
        self.captures.end(stream).map(SimGraph).map_err(|why| DriverError::new(DriverCall::Other, why))
    }

    /// Queues a graph's work on `stream` and says when it will be done.
    ///
    /// # Errors
    /// A [`DriverError`], also noted as a violation, when the memory behind one of its addresses is
    /// another than when it was captured, or gone.
    pub fn replay(&self, graph: &SimGraph, stream: StreamId) -> Result<Duration, DriverError> {
        let mut end = self.timeline().now();
        for node in &graph.0 {
            if self.resolve(node.address, node.bytes).as_ref() != Some(&node.behind) {
                let why = format!(
                    "a graph uses {} at {:#x}, which other memory lies behind by now",
                    human(node.bytes),
                    node.address
                );
                return Err(self.state.lock().broken(DriverCall::Other, why));
            }
            end = self.queue_work(stream, node.address, node.bytes, node.length)?;
        }
        Ok(end)
    }

    /// Makes work part of the graph that `stream` captures; says whether it captures one.
    pub(super) fn captured(&self, stream: StreamId, address: u64, bytes: u64, length: Duration) -> bool {
        if !self.captures.contains(stream) {
            return false;
        }
        let behind = self.resolve(address, bytes).unwrap_or_default();
        self.captures.add(stream, Node { address, bytes, length, behind }).is_ok()
    }

    /// Refuses a call that covers every stream while one captures, which also invalidates the capture.
    pub(super) fn outside_captures(&self, call: DriverCall, what: &'static str) -> Result<(), DriverError> {
        if !self.captures.spoil(what) {
            return Ok(());
        }
        Err(self.state.lock().broken(call, format!("{what} while a stream captures invalidates the capture")))
    }

    /// Refuses an operation on a stream that captures.
    pub(super) fn not_capturing(&self, stream: StreamId) -> Result<(), DriverError> {
        match self.captures.contains(stream) {
            true => Err(DriverError::new(DriverCall::Event, "the stream is capturing a graph")),
            false => Ok(()),
        }
    }

    /// An event that completes with the caller's.
    pub(super) fn adopted(&self, event: u64) -> Result<Event, DriverError> {
        let adopted = self.timeline().adopt(event);
        if adopted.is_some() {
            self.open_events.fetch_add(1, Relaxed);
        }
        adopted.ok_or_else(|| DriverError::new(DriverCall::Event, format!("event {event} was not recorded here")))
    }
}
