//! Objects of fixed sizes in chunks of one size each: what `slab` and `size-class` are made of.

use super::SubjectError;
use super::device::Device;
use super::frame::{Policy, not_live};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// What a request becomes. Sizes in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Class {
    /// Size of the object.
    pub(super) size: u64,
    /// Size of the chunk that it is cut from, as many as fit.
    pub(super) chunk: u64,
    /// An empty chunk is kept for the next request.
    pub(super) kept: bool,
}

#[derive(Debug)]
struct Chunk {
    class: Class,
    stream: u64,
    live: u64,
}

/// A set of classes, given by the rule that rounds a request.
#[derive(Debug)]
pub(super) struct Classes {
    name: &'static str,
    rule: fn(u64) -> Option<Class>,
    /// Free objects by stream and size.
    free: HashMap<(u64, u64), BTreeSet<u64>>,
    chunks: BTreeMap<u64, Chunk>,
    /// Live objects.
    live: BTreeSet<u64>,
}

impl Classes {
    pub(super) fn new(name: &'static str, rule: fn(u64) -> Option<Class>) -> Self {
        Self { name, rule, free: HashMap::new(), chunks: BTreeMap::new(), live: BTreeSet::new() }
    }

    fn chunk_of(&self, address: u64) -> Result<(u64, &Chunk), SubjectError> {
        let known = self.live.contains(&address).then(|| self.chunks.range(..=address).next_back()).flatten();
        known.map(|(at, chunk)| (*at, chunk)).ok_or_else(|| not_live(address))
    }

    /// Gives one chunk without live objects back.
    fn release(&mut self, device: &mut Device, at: u64) {
        if let Some(chunk) = self.chunks.remove(&at) {
            if let Some(free) = self.free.get_mut(&(chunk.stream, chunk.class.size)) {
                objects(at, chunk.class).for_each(|object| _ = free.remove(&object));
            }
            device.malloc_free(at);
        }
    }
}

/// Addresses of the objects of a chunk.
fn objects(at: u64, class: Class) -> impl Iterator<Item = u64> {
    (0..class.chunk / class.size).map(move |index| at + index * class.size)
}

impl Policy for Classes {
    fn name(&self) -> &'static str {
        self.name
    }

    fn alloc(&mut self, device: &mut Device, bytes: u64, stream: u64) -> Result<Option<(u64, u64)>, SubjectError> {
        let Some(class) = (self.rule)(bytes.max(1)) else { return Ok(None) };
        let free = self.free.entry((stream, class.size)).or_default();
        if free.is_empty() {
            let Some(at) = device.malloc(class.chunk) else { return Ok(None) };
            self.chunks.insert(at, Chunk { class, stream, live: 0 });
            free.extend(objects(at, class));
        }
        let Some(object) = free.pop_first() else { return Ok(None) };
        self.live.insert(object);
        if let Some((_, chunk)) = self.chunks.range_mut(..=object).next_back() {
            chunk.live += 1;
        }
        Ok(Some((object, class.size)))
    }

    fn live(&self, address: u64) -> Result<(u64, u64), SubjectError> {
        self.chunk_of(address).map(|(_, chunk)| (chunk.class.size, chunk.stream))
    }

    fn give(&mut self, device: &mut Device, address: u64) -> Result<(), SubjectError> {
        let (at, chunk) = self.chunk_of(address)?;
        let (class, key) = (chunk.class, (chunk.stream, chunk.class.size));
        self.live.remove(&address);
        self.free.entry(key).or_default().insert(address);
        let left = self.chunks.get_mut(&at).map(|chunk| {
            chunk.live -= 1;
            chunk.live
        });
        if left == Some(0) && !class.kept {
            self.release(device, at);
        }
        Ok(())
    }

    fn flush(&mut self, device: &mut Device) -> Result<(), SubjectError> {
        let empty: Vec<u64> = self.chunks.iter().filter(|(_, chunk)| chunk.live == 0).map(|(at, _)| *at).collect();
        empty.into_iter().for_each(|at| self.release(device, at));
        Ok(())
    }
}
