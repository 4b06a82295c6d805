//! Captured graphs on host memory: closures that run at each replay, and what captures forbid.

use super::*;
use std::fmt;
use std::sync::Arc;

/// One piece of work of a graph.
pub(super) type Node = Arc<dyn Fn() + Send + Sync>;

/// A captured graph: closures in the order in which they were captured.
#[derive(Clone)]
pub struct HostGraph(Vec<Node>);

impl fmt::Debug for HostGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostGraph({} nodes)", self.0.len())
    }
}

impl HostGraph {
    /// Pieces of work in it.
    #[must_use]
    pub fn nodes(&self) -> usize {
        self.0.len()
    }
}

impl HostBackend {
    /// Begins the capture of a graph from `stream`. Until it ends, [`HostBackend::launch`] refuses the stream
    /// ([`HostBackend::capture`] takes its work), and an event over the whole context or a wait for the
    /// device is refused and invalidates the capture.
    ///
    /// # Errors
    /// The stream captures already.
    pub fn begin_capture(&self, stream: StreamId) -> Result<(), DriverError> {
        self.captures.begin(stream).map_err(refused)
    }

    /// Adds work to the graph that `stream` captures; it runs at each replay.
    ///
    /// # Errors
    /// The stream does not capture.
    pub fn capture(&self, stream: StreamId, work: impl Fn() + Send + Sync + 'static) -> Result<(), DriverError> {
        let node: Node = Arc::new(work);
        self.captures.add(stream, node).map_err(|_| refused(format!("stream {} does not capture", stream.0)))
    }

    /// Ends the capture from `stream`.
    ///
    /// # Errors
    /// The stream does not capture, or the capture was invalidated.
    pub fn end_capture(&self, stream: StreamId) -> Result<HostGraph, DriverError> {
        self.captures.end(stream).map(HostGraph).map_err(refused)
    }

    /// Queues a graph's work on `stream`; where streams are virtual it runs at once.
    ///
    /// # Errors
    /// As [`HostBackend::launch`].
    pub fn replay(&self, graph: &HostGraph, stream: StreamId) -> Result<(), Error> {
        for node in &graph.0 {
            match self.clock {
                Some(_) => node(),
                None => {
                    let node = Arc::clone(node);
                    self.launch(stream, move || node())?;
                }
            }
        }
        Ok(())
    }

    /// Refuses a call that covers every stream while one captures, which also invalidates the capture.
    pub(super) fn outside_captures(&self, call: DriverCall, what: &'static str) -> Result<(), DriverError> {
        match self.captures.spoil(what) {
            true => Err(DriverError::new(call, format!("{what} while a stream captures invalidates the capture"))),
            false => Ok(()),
        }
    }

    /// Refuses an operation on a stream that captures.
    pub(super) fn not_capturing(&self, stream: StreamId) -> Result<(), DriverError> {
        match self.captures.contains(stream) {
            true => Err(DriverError::new(DriverCall::Event, "the stream is capturing a graph")),
            false => Ok(()),
        }
    }
}

fn refused(why: String) -> DriverError {
    DriverError::new(DriverCall::Other, why)
}
