//! What clients are told about mappings: for traces of memory, and for what registers it elsewhere.
#![forbid(unsafe_code)]

use super::PhysicalAllocation;
use std::sync::Arc;

/// What happens to a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MappingChange {
    /// It was made and is accessible.
    Mapped,
    /// It is about to be unmapped: nothing uses it any more, and what was registered on it must go now.
    Unmapping,
    /// The driver refused the unmapping that was announced: it stays.
    Kept,
}

/// A change of one mapping, which is always one whole handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct MappingEvent {
    /// What happens.
    pub change: MappingChange,
    /// First address.
    pub address: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// The handle behind it.
    pub handle: PhysicalAllocation,
    /// Number of the device.
    pub device: u32,
}

/// A function that is told of every mapping that a heap makes and unmaps, also at shutdown, in the order in
/// which the driver is called, by the thread that calls it; not of those of imports ([`crate::Heap::import`]).
///
/// It runs under the heap's driver lock and no other: threads that need no driver call go on meanwhile. It
/// may take locks of its own and call the driver, but not the heap, which would wait for itself; of the two
/// mappings of a handle in motion, the new one is announced first where the old one stays for a while. A panic in
/// it is caught and reported, and the heap goes on.
pub type MappingCallback = Arc<dyn Fn(&MappingEvent) + Send + Sync>;
