//! What a simulated device keeps, and the driver's rules about it.

use super::ranges::{Runs, Uses};
use crate::error::{DriverCall, DriverError};
use crate::units::{GRANULE, human};
use std::collections::BTreeMap;

#[derive(Debug)]
pub(super) struct Handle {
    pub(super) bytes: u64,
    pub(super) mappings: u32,
    pub(super) released: bool,
}

#[derive(Debug)]
pub(super) struct Mapping {
    pub(super) bytes: u64,
    pub(super) handle: u64,
}

#[derive(Debug)]
pub(super) struct State {
    /// Address → bytes.
    pub(super) reservations: BTreeMap<u64, u64>,
    pub(super) handles: BTreeMap<u64, Handle>,
    pub(super) mappings: BTreeMap<u64, Mapping>,
    pub(super) accessible: Runs,
    pub(super) uses: Uses,
    pub(super) in_use: u64,
    pub(super) next_address: u64,
    pub(super) next_handle: u64,
    pub(super) violations: Vec<String>,
}

impl State {
    /// A broken rule: noted, and an error for the caller.
    pub(super) fn broken(&mut self, call: DriverCall, why: String) -> DriverError {
        self.violations.push(format!("{call}: {why}"));
        DriverError::new(call, why)
    }

    /// The mapping that is exactly this range, or why there is none.
    pub(super) fn exact(&self, address: u64, bytes: u64) -> Result<&Mapping, String> {
        match self.mappings.get(&address) {
            Some(mapping) if mapping.bytes == bytes => Ok(mapping),
            Some(mapping) => {
                Err(format!("{} at {address:#x} is not the whole mapping of {}", human(bytes), human(mapping.bytes)))
            }
            None => Err(format!("no mapping starts at {address:#x}")),
        }
    }

    pub(super) fn may_map(&self, address: u64, handle: u64, bytes: u64) -> Result<(), String> {
        let known = self.handles.get(&handle).filter(|h| !h.released);
        let size = known.ok_or_else(|| format!("handle {handle} does not exist"))?.bytes;
        if size != bytes {
            return Err(format!("handle {handle} has {}, not {}", human(size), human(bytes)));
        }
        if !address.is_multiple_of(GRANULE) {
            return Err(format!("{address:#x} is not on a granule"));
        }
        let end = address.checked_add(bytes).ok_or("the range overflows")?;
        let inside = self.reservations.range(..=address).next_back().is_some_and(|(at, len)| end <= at + len);
        if !inside {
            return Err(format!("{} at {address:#x} are not in one reservation", human(bytes)));
        }
        match self.mappings.range(..end).next_back() {
            Some((at, mapping)) if at + mapping.bytes > address => Err(format!("{at:#x} is mapped already")),
            _ => Ok(()),
        }
    }

    pub(super) fn may_use(&mut self, address: u64, bytes: u64) -> Result<(), DriverError> {
        if self.accessible.covers(address, address.saturating_add(bytes)) {
            return Ok(());
        }
        let why = format!("work on {} at {address:#x}, which is not mapped with access throughout", human(bytes));
        Err(self.broken(DriverCall::Other, why))
    }

    /// Frees a released handle's memory once nothing maps it.
    pub(super) fn settle(&mut self, handle: u64) {
        if let Some(h) = self.handles.get(&handle)
            && h.released
            && h.mappings == 0
        {
            self.in_use -= h.bytes;
            self.handles.remove(&handle);
        }
    }
}
