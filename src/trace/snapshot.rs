//! PyTorch memory snapshots (`torch.cuda.memory._dump_snapshot`) as traces.
//!
//! The history is a ring: its start may be lost. A block that is freed in it, or live at its end, without an
//! allocation in it was allocated before; it is added at the start. The client's free is
//! `free_requested`; `free_completed` follows when other streams have passed and is part of the same free.
#![forbid(unsafe_code)]

use super::error::listed;
use super::pickle::{Id, Pickle};
use super::{BLOCK_MAX, Builder, EVENTS_MAX, TIME_MAX_US, Trace, TraceError};
use crate::units::counted;
use std::collections::{BTreeMap, HashMap};

/// The history of one device: the `device` with this number, or that of the longest.
pub(super) fn read(bytes: &[u8], device: Option<u32>) -> Result<Trace, TraceError> {
    let pickle = Pickle::read(bytes)?;
    let wrong = |why: &str| TraceError::NotASnapshot(why.to_owned());
    let root = pickle.root();
    let list = |key: &str| pickle.get(root, key).and_then(|list| pickle.list(list));
    let traces = list("device_traces").ok_or_else(|| wrong("it has no list `device_traces`"))?;
    let segments = list("segments").unwrap_or_default();
    let histories: Vec<&[Id]> = traces.iter().map(|trace| pickle.list(*trace).unwrap_or_default()).collect();
    let there = || (0..).zip(&histories).filter(|(_, history)| !history.is_empty());
    let longest = there().max_by_key(|(at, history)| (history.len(), u32::MAX - at));
    let Some(longest) = longest else {
        return Err(wrong("its history is empty"));
    };
    let found = device.map_or(Some(longest), |device| there().find(|(at, _)| *at == device));
    let Some((number, history)) = found else {
        let there = there().map(|(at, _)| at).collect();
        return Err(TraceError::NoDevice { device: device.unwrap_or_default(), there });
    };
    let mut reader = Reader::new(&pickle);
    let others: Vec<u32> = there().map(|(at, _)| at).filter(|at| *at != number).collect();
    // Who named the device knows that there are others.
    if device.is_none() && !others.is_empty() {
        let left_out: usize = there().filter(|(at, _)| *at != number).map(|(_, history)| history.len()).sum();
        reader.notes.push(format!(
            "read device {number}, which has the longest history; left out: {} of {}, which `--device` reads",
            counted(left_out as u64, "event"),
            listed(&others)
        ));
    }
    if history.len() > EVENTS_MAX {
        return Err(TraceError::TooLarge { what: "events", most: EVENTS_MAX as u64 });
    }
    let entries: Vec<Entry> = history.iter().filter_map(|entry| reader.entry(*entry)).collect();
    reader.find_initial(&entries, segments, u64::from(number))?;
    reader.replay(&entries)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Alloc,
    FreeRequested,
    FreeCompleted,
}

#[derive(Clone, Copy)]
struct Entry {
    kind: Kind,
    address: u64,
    bytes: u64,
    stream: u64,
    /// Microseconds, absolute; `None` in old snapshots.
    time_us: Option<u64>,
}

/// What the history says of an address so far.
#[derive(Clone, Copy)]
enum State {
    Live(u32),
    /// Freed by the client, not completed; the number of the entry that freed it.
    Freeing(usize),
    Free,
}

#[derive(Default)]
struct Counts {
    freed_initial: u64,
    live_initial: u64,
    unreadable: u64,
    completed_only: u64,
    unknown_frees: u64,
    implied_frees: u64,
    delayed: u64,
}

struct Reader<'a> {
    pickle: &'a Pickle<'a>,
    notes: Vec<String>,
    counts: Counts,
    /// Entries that are no allocation or free, by action.
    other: BTreeMap<String, u64>,
    initial: Vec<Entry>,
}

impl<'a> Reader<'a> {
    fn new(pickle: &'a Pickle<'a>) -> Self {
        Self { pickle, notes: Vec::new(), counts: Counts::default(), other: BTreeMap::new(), initial: Vec::new() }
    }

    fn number(&self, dict: Id, key: &str) -> Option<u64> {
        self.pickle.get(dict, key).and_then(|number| self.pickle.number(number))
    }

    fn entry(&mut self, id: Id) -> Option<Entry> {
        let action = self.pickle.get(id, "action").and_then(|action| self.pickle.text(action)).unwrap_or(b"nameless");
        let kind = match action {
            b"alloc" => Kind::Alloc,
            b"free_requested" | b"free" => Kind::FreeRequested,
            b"free_completed" => Kind::FreeCompleted,
            other => {
                // A file may name a million actions; a dozen kinds are enough to explain.
                let name = crate::shown::text(other, 24);
                let name = if self.other.len() < 12 || self.other.contains_key(&name) { name } else { "others".into() };
                *self.other.entry(name).or_default() += 1;
                return None;
            }
        };
        let (address, bytes) = (self.number(id, "addr"), self.number(id, "size"));
        let (Some(address), Some(bytes @ 0..=BLOCK_MAX)) = (address, bytes) else {
            self.counts.unreadable += 1;
            return None;
        };
        let stream = self.number(id, "stream").unwrap_or(0);
        Some(Entry { kind, address, bytes, stream, time_us: self.number(id, "time_us") })
    }

    /// Blocks that were allocated before the history begins.
    fn find_initial(&mut self, entries: &[Entry], segments: &[Id], device: u64) -> Result<(), TraceError> {
        let mut first: HashMap<u64, Entry> = HashMap::new();
        for entry in entries {
            first.entry(entry.address).or_insert(*entry);
        }
        // Whose first entry is the client's free, and its size stands there.
        let freed = first.values().filter(|entry| entry.kind == Kind::FreeRequested && entry.bytes > 0);
        self.initial.extend(freed.copied());
        self.counts.freed_initial = self.initial.len() as u64;
        let mut blocks_left = EVENTS_MAX;
        for &segment in segments {
            if self.number(segment, "device").is_some_and(|other| other != device) {
                continue;
            }
            let stream = self.number(segment, "stream").unwrap_or(0);
            let mut address = self.number(segment, "address").unwrap_or(0);
            let blocks = self.pickle.get(segment, "blocks").and_then(|blocks| self.pickle.list(blocks));
            let blocks = blocks.unwrap_or_default();
            // A file may name one segment a million times.
            blocks_left = blocks_left
                .checked_sub(blocks.len() + 1)
                .ok_or(TraceError::TooLarge { what: "blocks", most: EVENTS_MAX as u64 })?;
            for &block in blocks {
                let size = self.number(block, "size").unwrap_or(0);
                // Old snapshots give no address: blocks follow each other.
                let at = self.number(block, "address").unwrap_or(address);
                address = at.saturating_add(size);
                let state = self.pickle.get(block, "state").and_then(|state| self.pickle.text(state));
                let bytes = self.number(block, "requested_size").unwrap_or(size);
                if state != Some(b"active_allocated") || first.contains_key(&at) || bytes > BLOCK_MAX {
                    continue;
                }
                let entry = Entry { kind: Kind::Alloc, address: at, bytes, stream, time_us: None };
                first.insert(at, entry);
                self.initial.push(entry);
                self.counts.live_initial += 1;
            }
        }
        self.initial.sort_by_key(|entry| entry.address);
        Ok(())
    }

    fn replay(mut self, entries: &[Entry]) -> Result<Trace, TraceError> {
        let mut builder = Builder::default();
        let mut state: HashMap<u64, State> = HashMap::new();
        for entry in &self.initial {
            state.insert(entry.address, State::Live(builder.alloc(entry.bytes, entry.stream, 0)?));
        }
        let start = entries.iter().find_map(|entry| entry.time_us).unwrap_or(0);
        let mut time = 0;
        for (number, entry) in entries.iter().enumerate() {
            // A time before the first is as good as the first; none at all follows the last.
            time = entry.time_us.map_or(time, |at| at.saturating_sub(start).min(TIME_MAX_US));
            let before = state.get(&entry.address).copied();
            let after = match (entry.kind, before) {
                (Kind::Alloc, before) => {
                    if let Some(State::Live(block)) = before {
                        self.counts.implied_frees += 1;
                        builder.free(block, time)?;
                    }
                    State::Live(builder.alloc(entry.bytes, entry.stream, time)?)
                }
                (Kind::FreeRequested, Some(State::Live(block))) => {
                    builder.free(block, time)?;
                    State::Freeing(number)
                }
                (Kind::FreeCompleted, Some(State::Live(block))) => {
                    builder.free(block, time)?;
                    State::Free
                }
                (Kind::FreeCompleted, Some(State::Freeing(since))) => {
                    self.counts.delayed += u64::from(number - since > 1);
                    State::Free
                }
                (Kind::FreeCompleted, None) => {
                    self.counts.completed_only += 1;
                    State::Free
                }
                (Kind::FreeRequested, _) | (Kind::FreeCompleted, Some(State::Free)) => {
                    self.counts.unknown_frees += 1;
                    State::Free
                }
            };
            state.insert(entry.address, after);
        }
        self.explain(entries.len());
        builder.trace.notes = self.notes;
        builder.trace.meta_json = r#"{"source": "PyTorch memory snapshot"}"#.into();
        builder.finish()
    }

    fn explain(&mut self, entries: usize) {
        let c = &self.counts;
        let notes = [
            (
                c.live_initial,
                "block",
                "live at the end without an allocation in the history: allocated before it, added at the start",
            ),
            (
                c.freed_initial,
                "block",
                "freed without an allocation in the history: allocated before it, added at the start",
            ),
            (c.completed_only, "free", "completed whose request lies before the history: left out"),
            (c.unknown_frees, "free", "of what is not live: left out"),
            (c.implied_frees, "block", "allocated at the address of a live one: the live one is freed there"),
            (
                c.delayed,
                "free",
                "completed only after other events (used on other streams, which the snapshot does not name)",
            ),
            (c.unreadable, "event", "without an address or a size from 0 to 256 TiB: left out"),
        ];
        let there = notes.iter().filter(|(count, ..)| *count > 0);
        let counted = there.map(|(count, noun, text)| format!("{} {text}", counted(*count, noun)));
        self.notes.extend(counted);
        if !self.other.is_empty() {
            let kinds: Vec<String> = self.other.iter().map(|(name, count)| format!("{count} {name}")).collect();
            self.notes.push(format!("besides {entries} allocations and frees the history holds {}", kinds.join(", ")));
        }
    }
}
