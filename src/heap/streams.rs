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

/// Segments of one heap.
pub(crate) const SEGMENTS: u16 = 4096 + FIRST_POOL;
/// Streams that are known at a time.
const SLOTS: u16 = 4095;

#[derive(Debug, Default)]
struct State {
    /// Those in use, sorted by identity. Of retired ones `known` alone says that they were: there is no end of them.
    entries: Vec<(u64, Stream)>,
    /// Identities and handles that stand for them for good.
    lasting: Vec<(u64, u64)>,
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

    /// Segments that nobody had yet.
    fn fresh_segments(&self) -> usize {
        usize::from(SEGMENTS - (self.next_small + 1).max(FIRST_POOL))
    }

    /// Streams that can be entered.
    fn room(&self) -> usize {
        let slots = self.free_slots.len() + usize::from(SLOTS - self.next_slot);
        slots.min(self.orphans.len() + self.fresh_segments())
    }
}

/// See the module's text. Any thread may call.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    /// Identity → [`word`].
    known: Keys,
    /// Handle → [`word`], of handles that stand for one stream for good.
    lasting: Keys,
    /// What is so; `known` follows it under this lock.
    state: Mutex<State>,
}

/// A retired stream: it has no slot.
const RETIRED: u64 = 1 << 16;

/// A stream as one number: slot, segment, epoch waited for. Never 0.
fn word(stream: &Stream) -> u64 {
    u64::from(stream.slot) | u64::from(stream.small) << 16 | u64::from(stream.waited) << 32
}

/// A stream in use, but for its name, as one number: a [`word`] with a slot.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Known(u64);

impl Known {
    #[inline]
    pub(crate) fn slot(self) -> u16 {
        self.0 as u16
    }

    #[inline]
    pub(crate) fn small(self) -> u16 {
        (self.0 >> 16) as u16
    }

    pub(crate) fn named(self, id: StreamId) -> Stream {
        Stream { id, slot: self.slot(), small: self.small(), waited: (self.0 >> 32) as u32 }
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
            word => Ok(Known(word).named(id)),
        }
    }

    /// Is there a stream of this identity, or was one retired?
    pub(crate) fn is_known(&self, key: u64) -> bool {
        self.known.get(key) != 0
    }

    /// The stream of a handle that stands for one for good, if that is known without a search.
    #[inline]
    pub(crate) fn lasting(&self, id: StreamId) -> Option<Known> {
        let word = Known(self.lasting.get_in_front(id.0));
        // Neither a retired one nor 0.
        (word.slot() != 0).then_some(word)
    }

    /// The handle stands for the stream of this identity for good.
    #[inline]
    pub(crate) fn note_lasting(&self, key: u64, id: StreamId) {
        if self.lasting.get(id.0) == 0 {
            self.enter_lasting(key, id);
        }
    }

    #[cold]
    fn enter_lasting(&self, key: u64, id: StreamId) {
        let mut state = self.state.lock();
        if let Ok(at) = state.entries.binary_search_by_key(&key, |entry| entry.0) {
            state.lasting.push((key, id.0));
            self.lasting.set(id.0, word(&state.entries[at].1));
        }
    }

    /// What is known of a stream is this from now on. Called with `state` locked.
    fn publish(&self, state: &State, key: u64, word: u64) {
        self.known.set(key, word);
        for (_, id) in state.lasting.iter().filter(|lasting| lasting.0 == key) {
            self.lasting.set(*id, word);
        }
    }

    /// The streams of these identities: those that are new are all entered, or, after an error, none is.
    pub(crate) fn get_all(&self, wanted: &[(u64, StreamId)]) -> Result<Vec<Stream>> {
        let mut state = self.state.lock();
        let mut new = Vec::new();
        for (key, id) in wanted {
            match self.known.get(*key) {
                0 => new.push(*key),
                RETIRED => return Err(dead(*id, "it was retired")),
                _ => {}
            }
        }
        new.sort_unstable();
        new.dedup();
        if new.len() > state.room() {
            let (more, known, room) = (new.len(), state.entries.len(), state.room());
            return Err(Error::InvalidArgument(format!(
                "these are {more} streams more than the {known} that are known, and there is room for {room}; name fewer, or retire \
                 those that were destroyed"
            )));
        }
        wanted.iter().map(|(key, id)| self.enter_in(&mut state, *key, *id)).collect()
    }

    #[cold]
    fn enter(&self, key: u64, id: StreamId) -> Result<Stream> {
        self.enter_in(&mut self.state.lock(), key, id)
    }

    fn enter_in(&self, state: &mut State, key: u64, id: StreamId) -> Result<Stream> {
        let at = match state.entries.binary_search_by_key(&key, |entry| entry.0) {
            // Another thread was faster.
            Ok(at) => return Ok(state.entries[at].1),
            Err(_) if self.known.get(key) == RETIRED => return Err(dead(id, "it was retired")),
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
        state.entries.insert(at, (key, stream));
        self.publish(state, key, word(&stream));
        Ok(stream)
    }

    /// Ends a stream: later use of it is an error. Returns what it was, once.
    pub(crate) fn retire(&self, key: u64) -> Option<Stream> {
        let mut state = self.state.lock();
        let at = state.entries.binary_search_by_key(&key, |entry| entry.0).ok()?;
        let (_, stream) = state.entries.remove(at);
        self.publish(&state, key, RETIRED);
        Some(stream)
    }

    /// Two segments that no stream has, for a capture pool.
    pub(crate) fn take_segments(&self) -> Option<[u16; 2]> {
        let mut state = self.state.lock();
        // Not one of them in vain.
        if state.fresh_segments() < 2 {
            return None;
        }
        Some([state.fresh_segment()?, state.fresh_segment()?])
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
        let mut state = self.state.lock();
        for at in 0..state.entries.len() {
            let (key, stream) = &mut state.entries[at];
            if stream.slot == slot {
                stream.waited = stream.waited.max(epoch);
                let (key, word) = (*key, word(stream));
                self.publish(&state, key, word);
            }
        }
    }

    /// Is more than one stream in use?
    pub(crate) fn are_many(&self) -> bool {
        self.state.lock().entries.len() > 1
    }

    /// Streams in use.
    pub(crate) fn all(&self) -> Vec<Stream> {
        self.state.lock().entries.iter().map(|(_, stream)| *stream).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lasting_handle_is_known_without_a_search_until_it_is_retired() {
        let streams = Streams::default();
        let (zero, one) = (StreamId(0), StreamId(1));
        assert!(streams.lasting(zero).is_none());
        streams.note_lasting(77, zero);
        assert!(streams.lasting(zero).is_none(), "nobody knows that stream yet");
        let stream = streams.get(77, zero).unwrap();
        assert!(streams.lasting(zero).is_none(), "nobody said that its handle lasts");
        streams.note_lasting(77, zero);
        streams.note_lasting(77, one);
        for id in [zero, one] {
            assert_eq!(streams.lasting(id).map(|known| known.named(id)), Some(Stream { id, ..stream }));
        }
        streams.set_waited(stream.slot, 9);
        assert_eq!(streams.lasting(one).map(|known| known.named(one)), Some(Stream { id: one, waited: 9, ..stream }));
        assert_eq!(streams.retire(77), Some(Stream { waited: 9, ..stream }));
        assert!(streams.lasting(zero).is_none() && streams.lasting(one).is_none());
        assert!(matches!(streams.get(77, zero), Err(Error::DeadStream { stream: 0, .. })));
    }

    #[test]
    fn of_streams_that_were_retired_nothing_is_kept_but_that_they_were() {
        let streams = Streams::default();
        for key in 1..=10_000 {
            let stream = streams.get(key, StreamId(key)).unwrap();
            assert_eq!((streams.retire(key), streams.retire(key)), (Some(stream), None));
            streams.reuse(stream);
            assert!(matches!(streams.get(key, StreamId(key)), Err(Error::DeadStream { .. })));
        }
        let state = streams.state.lock();
        assert_eq!((state.entries.capacity() < 10, state.next_slot), (true, 1), "whoever looks at all looks at few");
    }
}
