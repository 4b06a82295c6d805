//! What is noted of blocks beside the heap: tags, recordings and tickets. Nothing while nobody wants it, but one relaxed load.

use crate::record::{self, Recorded};
use crate::{tags, teller};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

/// A tag was set at some time.
pub(crate) const TAGS: u8 = 1;
/// A recording is under way, or was.
pub(crate) const RECORDINGS: u8 = 2;
/// Some block had a ticket for other processes, which ends with the block.
pub(crate) const SHARED: u8 = 4;

static WANTED: AtomicU8 = AtomicU8::new(0);

/// Allocations and uses are to be noted.
pub(crate) fn wanted() -> bool {
    WANTED.load(Relaxed) & (TAGS | RECORDINGS) != 0
}

/// There is a recording, or was one.
pub(crate) fn recorded() -> bool {
    WANTED.load(Relaxed) & RECORDINGS != 0
}

/// From now on this is noted, for good: blocks of before are then known not to be noted.
pub(crate) fn want(what: u8) {
    WANTED.fetch_or(what, Relaxed);
}

/// In a forked child, where the locks of what is noted may be those of threads that it does not have: nothing is wanted there
/// until it is asked for anew. Async-signal-safe.
pub(crate) fn in_child() {
    WANTED.store(0, Relaxed);
}

/// A block of the client's.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Block {
    /// The handle of its heap.
    pub(crate) heap: usize,
    /// The device whose heap it is; `None`: another heap.
    pub(crate) device: Option<usize>,
    /// As asked for.
    pub(crate) requested: u64,
    /// Handle of the stream.
    pub(crate) stream: u64,
}

/// What is noted of a live block.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Note {
    block: Block,
    tag: Option<tags::Tag>,
    recorded: Option<Recorded>,
}

const SHARDS: usize = 64;
type Shard = Mutex<HashMap<u64, Note>>;
static NOTES: LazyLock<[Shard; SHARDS]> = LazyLock::new(|| std::array::from_fn(|_| Mutex::default()));

fn shard(address: u64) -> &'static Shard {
    // Blocks begin at multiples of 512.
    &NOTES[(address >> 9) as usize % SHARDS]
}

/// A block was allocated.
#[cold]
pub(crate) fn allocated(address: u64, block: Block) {
    let tag = block.device.and_then(|device| tags::up(device, block.requested));
    let recorded = record::allocated(&block);
    put(address, Note { block, tag, recorded });
}

fn put(address: u64, note: Note) {
    if note.tag.is_some() || note.recorded.is_some() {
        shard(address).lock().insert(address, note);
    }
}

/// A block that was live when a recording of its heap began.
pub(crate) fn found(address: u64, block: Block) {
    let mut notes = shard(address).lock();
    let note = notes.entry(address).or_insert(Note { block, tag: None, recorded: None });
    // One that was allocated since the beginning is there already.
    if !note.recorded.is_some_and(record::is_current) {
        note.recorded = record::allocated(&block);
    }
    // The recording has ended meanwhile.
    if note.tag.is_none() && note.recorded.is_none() {
        notes.remove(&address);
    }
}

/// A block is going to be freed: before it is, since its address may be handed out again at once.
#[cold]
pub(crate) fn freeing(address: u64) -> Option<Note> {
    let note = shard(address).lock().remove(&address)?;
    if let (Some(tag), Some(device)) = (note.tag, note.block.device) {
        tags::down(tag, device, note.block.requested);
    }
    if let Some(recorded) = note.recorded {
        record::freed(recorded);
    }
    Some(note)
}

/// The free was refused: the block lives on, for a recording as another one.
#[cold]
pub(crate) fn lives_on(address: u64, note: Note) {
    if let (Some(tag), Some(device)) = (note.tag, note.block.device) {
        tags::up_again(tag, device, note.block.requested);
    }
    put(address, Note { recorded: record::allocated(&note.block), ..note });
}

/// Work on a stream uses a block.
#[cold]
pub(crate) fn used(address: u64, stream: u64) {
    let recorded = shard(address).lock().get(&address).and_then(|note| note.recorded);
    if let Some(recorded) = recorded {
        record::used(recorded, stream);
    }
}

/// Frees by `free`, noted.
pub(crate) fn free<E>(address: u64, free: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
    let wanted = WANTED.load(Relaxed);
    if wanted == 0 {
        return free();
    }
    let shared = if wanted & SHARED != 0 { teller::freeing(address) } else { None };
    let note = freeing(address);
    let done = free();
    if done.is_err() {
        note.into_iter().for_each(|note| lives_on(address, note));
        shared.into_iter().for_each(teller::lives_on);
    }
    done
}
