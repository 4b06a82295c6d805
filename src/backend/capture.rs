//! Captures of graphs on the backends without a GPU.
//!
//! As in the driver's model: what is queued on a capturing stream does not run but becomes a node of the
//! graph, and a call that covers a capturing stream without belonging to its capture is refused and
//! spoils every capture under way (an event over the whole context, a wait for the device).
#![forbid(unsafe_code)]

use super::StreamId;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

#[derive(Debug)]
struct Capture<N> {
    nodes: Vec<N>,
    /// The call that spoilt it.
    broken: Option<&'static str>,
}

/// The captures under way, with their nodes. Any thread may call.
#[derive(Debug)]
pub(super) struct Captures<N> {
    /// Whether there are any, so that the usual question takes no lock.
    any: AtomicBool,
    open: Mutex<BTreeMap<u64, Capture<N>>>,
}

impl<N> Default for Captures<N> {
    fn default() -> Self {
        Self { any: AtomicBool::new(false), open: Mutex::default() }
    }
}

impl<N> Captures<N> {
    pub(super) fn begin(&self, stream: StreamId) -> Result<(), String> {
        let mut open = self.open.lock();
        if open.contains_key(&stream.0) {
            return Err(format!("stream {} captures already", stream.0));
        }
        open.insert(stream.0, Capture { nodes: Vec::new(), broken: None });
        self.any.store(true, Relaxed);
        Ok(())
    }

    /// Ends a capture: its nodes, or what spoilt it.
    pub(super) fn end(&self, stream: StreamId) -> Result<Vec<N>, String> {
        let mut open = self.open.lock();
        let ended = open.remove(&stream.0);
        self.any.store(!open.is_empty(), Relaxed);
        match ended {
            None => Err(format!("stream {} does not capture", stream.0)),
            Some(Capture { broken: Some(why), .. }) => Err(format!("the capture was invalidated by {why}")),
            Some(Capture { nodes, .. }) => Ok(nodes),
        }
    }

    /// Makes `node` part of the stream's graph; gives it back where the stream does not capture.
    pub(super) fn add(&self, stream: StreamId, node: N) -> Result<(), N> {
        if !self.any() {
            return Err(node);
        }
        match self.open.lock().get_mut(&stream.0) {
            Some(capture) => {
                capture.nodes.push(node);
                Ok(())
            }
            None => Err(node),
        }
    }

    pub(super) fn any(&self) -> bool {
        self.any.load(Relaxed)
    }

    pub(super) fn contains(&self, stream: StreamId) -> bool {
        self.any() && self.open.lock().contains_key(&stream.0)
    }

    /// Spoils every capture under way; says whether there were any.
    pub(super) fn spoil(&self, call: &'static str) -> bool {
        if !self.any() {
            return false;
        }
        let mut open = self.open.lock();
        open.values_mut().for_each(|capture| capture.broken = capture.broken.or(Some(call)));
        !open.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_belong_to_their_stream_and_a_wrong_call_spoils_all() {
        let captures = Captures::default();
        let (one, two) = (StreamId(1), StreamId(2));
        assert_eq!(captures.add(one, 'a'), Err('a'));
        assert!(!captures.spoil("nothing"));
        captures.begin(one).unwrap();
        assert!(captures.begin(one).is_err() && captures.contains(one) && !captures.contains(two));
        captures.add(one, 'a').unwrap();
        assert_eq!(captures.add(two, 'b'), Err('b'));
        assert_eq!(captures.end(one), Ok(vec!['a']));
        assert!(!captures.any() && captures.end(one).is_err());
        captures.begin(one).unwrap();
        captures.begin(two).unwrap();
        assert!(captures.spoil("the first call") && captures.spoil("the second call"));
        for stream in [one, two] {
            assert_eq!(captures.end(stream), Err("the capture was invalidated by the first call".into()));
        }
        assert!(!captures.any());
    }
}
