//! Streams that the heap knows: identity → slot and small pool. Look-ups take no lock.
#![forbid(unsafe_code)]

use super::inner::FIRST_POOL;
use crate::backend::StreamId;
use crate::error::{Error, Result};
use crate::keys::Keys;
use parking_lot::Mutex;

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

/// A stream's slot and the segment of its small blocks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pool {
    pub(crate) slot: u16,
    pub(crate) small: u16,
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

/// See the module's text. Any thread may call.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    /// Identity → [`word`].
    known: Keys,
    /// What is so; `known` follows it under this lock.
    state: Mutex<State>,
}

/// A retired stream; slots are smaller.
const RETIRED: u64 = u16::MAX as u64;

/// A stream as one number: slot, segment, epoch waited for. Never 0, since a slot never is.
fn word(entry: &Entry) -> u64 {
    match entry {
        Entry::Known(stream) => u64::from(stream.slot) | u64::from(stream.small) << 16 | u64::from(stream.waited) << 32,
        Entry::Retired => RETIRED,
    }
}

fn dead(id: StreamId, why: &str) -> Error {
    Error::DeadStream { stream: id.0, why: why.into() }
}

impl Streams {
    /// The stream of this identity, entered if it is new.
    pub(crate) fn get(&self, key: u64, id: StreamId) -> Result<Stream> {
        match self.known.get(key) {
            0 => self.enter(key, id),
            RETIRED => Err(dead(id, "it was retired")),
            word => Ok(Stream { id, slot: word as u16, small: (word >> 16) as u16, waited: (word >> 32) as u32 }),
        }
    }

    /// Slot and small segment of the stream of this identity, if it is known and in use.
    #[inline]
    pub(crate) fn known(&self, key: u64) -> Option<Pool> {
        let word = self.known.get(key);
        let pool = Pool { slot: word as u16, small: (word >> 16) as u16 };
        (word != 0 && word != RETIRED).then_some(pool)
    }

    #[cold]
    fn enter(&self, key: u64, id: StreamId) -> Result<Stream> {
        let mut state = self.state.lock();
        let at = match state.entries.binary_search_by_key(&key, |entry| entry.0) {
            // Another thread was faster.
            Ok(at) => {
                return match state.entries[at].1 {
                    Entry::Known(stream) => Ok(stream),
                    Entry::Retired => Err(dead(id, "it was retired")),
                };
            }
            Err(at) => at,
        };
        let slot = match state.free_slots.pop() {
            Some(slot) => slot,
            None if state.next_slot < SLOTS => {
                state.next_slot += 1;
                state.next_slot
            }
            None => {
                let why = format!("{SLOTS} streams are known already; retire those that were destroyed");
                return Err(dead(id, &why));
            }
        };
        let Some(small) = state.orphans.pop().or_else(|| state.fresh_segment()) else {
            state.free_slots.push(slot);
            let why = "the heap has no segment left for its small blocks; retire streams and release capture pools";
            return Err(dead(id, why));
        };
        let stream = Stream { id, slot, small, waited: 0 };
        let entry = Entry::Known(stream);
        state.entries.insert(at, (key, entry));
        self.known.set(key, word(&entry));
        Ok(stream)
    }

    /// Ends a stream: later use of it is an error. Returns what it was, once.
    pub(crate) fn retire(&self, key: u64) -> Option<Stream> {
        let mut state = self.state.lock();
        let at = state.entries.binary_search_by_key(&key, |entry| entry.0).ok()?;
        self.known.set(key, RETIRED);
        match std::mem::replace(&mut state.entries[at].1, Entry::Retired) {
            Entry::Known(stream) => Some(stream),
            Entry::Retired => None,
        }
    }

    /// A segment that no stream has, for a capture pool.
    pub(crate) fn take_segment(&self) -> Option<u16> {
        self.state.lock().fresh_segment()
    }

    /// Lets the slot and small segment of a retired stream be used by a new one. Nothing may carry the
    /// slot any more.
    pub(crate) fn reuse(&self, stream: Stream) {
        let mut state = self.state.lock();
        state.free_slots.push(stream.slot);
        state.orphans.push(stream.small);
    }

    /// Notes that a stream waits on the device for all frees up to `epoch`.
    pub(crate) fn set_waited(&self, slot: u16, epoch: u32) {
        for (key, entry) in &mut self.state.lock().entries {
            if let Entry::Known(stream) = entry
                && stream.slot == slot
            {
                stream.waited = stream.waited.max(epoch);
                self.known.set(*key, word(entry));
            }
        }
    }

    /// Is more than one stream in use?
    pub(crate) fn are_many(&self) -> bool {
        let known = |entry: &&(u64, Entry)| matches!(entry.1, Entry::Known(_));
        self.state.lock().entries.iter().filter(known).nth(1).is_some()
    }

    /// Streams in use.
    pub(crate) fn all(&self) -> Vec<Stream> {
        let state = self.state.lock();
        state
            .entries
            .iter()
            .filter_map(|(_, entry)| if let Entry::Known(s) = entry { Some(*s) } else { None })
            .collect()
    }
}
