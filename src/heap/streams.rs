//! Streams that the heap knows: identity → slot and small pool.
#![forbid(unsafe_code)]

use super::inner::FIRST_POOL;
use crate::backend::StreamId;
use crate::error::{Error, Result};
use parking_lot::RwLock;

/// A stream as the heap knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stream {
    /// The client's name for it.
    pub(crate) id: StreamId,
    /// Number that stamps carry; never 0. Given to another stream after this one is retired.
    pub(crate) slot: u16,
    /// Segment of its small blocks.
    pub(crate) small: u16,
    /// The stream waits on the device for all frees up to this epoch.
    pub(crate) waited: u32,
}

#[derive(Debug, Clone, Copy)]
enum Entry {
    Known(Stream),
    Retired,
}

/// Segments of one heap.
pub(crate) const SEGMENTS: u16 = 4096 + FIRST_POOL;
/// Streams that are known at a time.
const SLOTS: u16 = 4095;

#[derive(Debug, Default)]
struct State {
    /// Sorted by identity.
    entries: Vec<(u64, Entry)>,
    next_slot: u16,
    free_slots: Vec<u16>,
    next_small: u16,
    /// Small segments whose stream was retired.
    orphans: Vec<u16>,
}

impl State {
    fn fresh_segment(&mut self) -> Option<u16> {
        self.next_small = Some((self.next_small + 1).max(FIRST_POOL)).filter(|next| *next < SEGMENTS)?;
        Some(self.next_small)
    }
}

/// See the module's text. Any thread may call; look-ups share a read lock.
#[derive(Debug, Default)]
pub(crate) struct Streams(RwLock<State>);

impl Streams {
    /// The stream of this identity, entered if it is new.
    pub(crate) fn get(&self, key: u64, id: StreamId) -> Result<Stream> {
        {
            let state = self.0.read();
            if let Ok(at) = state.entries.binary_search_by_key(&key, |entry| entry.0) {
                return match state.entries[at].1 {
                    Entry::Known(stream) => Ok(stream),
                    Entry::Retired => Err(Error::DeadStream { stream: id.0, why: "it was retired".into() }),
                };
            }
        }
        let mut state = self.0.write();
        let Err(at) = state.entries.binary_search_by_key(&key, |entry| entry.0) else {
            drop(state);
            return self.get(key, id);
        };
        let slot = match state.free_slots.pop() {
            Some(slot) => slot,
            None if state.next_slot < SLOTS => {
                state.next_slot += 1;
                state.next_slot
            }
            None => {
                let why = format!("{SLOTS} streams are known already; retire those that were destroyed");
                return Err(Error::DeadStream { stream: id.0, why });
            }
        };
        let Some(small) = state.orphans.pop().or_else(|| state.fresh_segment()) else {
            state.free_slots.push(slot);
            let why = "the heap has no segment left for its small blocks; retire streams and release capture pools";
            return Err(Error::DeadStream { stream: id.0, why: why.into() });
        };
        let stream = Stream { id, slot, small, waited: 0 };
        state.entries.insert(at, (key, Entry::Known(stream)));
        Ok(stream)
    }

    /// Ends a stream: later use of it is an error. Returns what it was, once.
    pub(crate) fn retire(&self, key: u64) -> Option<Stream> {
        let mut state = self.0.write();
        let at = state.entries.binary_search_by_key(&key, |entry| entry.0).ok()?;
        match std::mem::replace(&mut state.entries[at].1, Entry::Retired) {
            Entry::Known(stream) => Some(stream),
            Entry::Retired => None,
        }
    }

    /// A segment that no stream has, for a capture pool.
    pub(crate) fn take_segment(&self) -> Option<u16> {
        self.0.write().fresh_segment()
    }

    /// Lets the slot and small segment of a retired stream be used by a new one. Nothing may carry the
    /// slot any more.
    pub(crate) fn reuse(&self, stream: Stream) {
        let mut state = self.0.write();
        state.free_slots.push(stream.slot);
        state.orphans.push(stream.small);
    }

    /// Notes that a stream waits on the device for all frees up to `epoch`.
    pub(crate) fn set_waited(&self, slot: u16, epoch: u32) {
        for (_, entry) in &mut self.0.write().entries {
            if let Entry::Known(stream) = entry
                && stream.slot == slot
            {
                stream.waited = stream.waited.max(epoch);
            }
        }
    }

    /// Is more than one stream in use?
    pub(crate) fn are_many(&self) -> bool {
        let known = |entry: &&(u64, Entry)| matches!(entry.1, Entry::Known(_));
        self.0.read().entries.iter().filter(known).nth(1).is_some()
    }

    /// Streams in use.
    pub(crate) fn all(&self) -> Vec<Stream> {
        let state = self.0.read();
        state
            .entries
            .iter()
            .filter_map(|(_, entry)| if let Entry::Known(s) = entry { Some(*s) } else { None })
            .collect()
    }
}
