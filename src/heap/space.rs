//! The heap's addresses: reservations, their block tables, and which segment owns which part.
//!
//! Inside the heap an address is a unit number of 32 bits; each reservation covers a run of them.
//! Parts are handed to segments in slots of 1 GiB: the large segment gets a long span from the bottom
//! of each reservation, small segments single slots from its top. Reads take no lock.
#![forbid(unsafe_code)]

use crate::backend::driver::Driver;
use crate::error::{DriverCall, DriverError, Error, Result};
use crate::lookup::BlockTable;
use crate::units::{GIB, MIB, UNIT, human};
use parking_lot::Mutex;
use rustix::process::{Resource, getrlimit};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU16, AtomicU32, Ordering::Relaxed};

/// Bytes of addresses that are handed to a segment at a time.
pub(crate) const SLOT: u64 = GIB;
const UNITS_PER_SLOT: u32 = (SLOT / UNIT) as u32;
/// Units of a small pool's slot whose part of the block table has ordinary pages: pools with little memory touch no more.
const FEW_UNITS: u32 = (256 * MIB / UNIT) as u32;
/// Reservations of one heap.
const RESERVATIONS: usize = 8;
/// Slot that no segment owns.
const NOBODY: u16 = u16::MAX;

/// One reservation.
#[derive(Debug)]
pub(crate) struct Reservation {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    /// Unit number of its first address.
    first: u32,
    pub(crate) table: BlockTable,
    owners: Box<[AtomicU16]>,
}

impl Reservation {
    /// Enters the node of the block that starts at a unit; the unit's address, if it lies here.
    #[inline]
    fn enter(&self, unit: u32, node: u32) -> Option<u64> {
        let index = unit.wrapping_sub(self.first);
        self.table.entry(index)?.store(node, Relaxed);
        Some(self.address + u64::from(index) * UNIT)
    }

    #[inline]
    fn locate(&self, address: u64) -> Option<Located<'_>> {
        let offset = address.wrapping_sub(self.address);
        // There is an owner for each slot, so that there is none outside.
        let segment = self.owners.get((offset / SLOT) as usize)?.load(Relaxed);
        (segment != NOBODY).then_some(Located { reservation: self, offset, segment })
    }
}

/// Where an address lies.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Located<'a> {
    reservation: &'a Reservation,
    /// From the reservation's first address.
    offset: u64,
    pub(crate) segment: u16,
}

impl Located<'_> {
    /// Unit number in the heap.
    #[inline]
    pub(crate) fn unit(&self) -> u32 {
        self.reservation.first + self.index()
    }

    #[inline]
    fn index(&self) -> u32 {
        (self.offset / UNIT) as u32
    }

    /// The block that starts here: its entry, and its node.
    #[inline]
    pub(crate) fn block(&self) -> Option<(&AtomicU32, u32)> {
        let entry = self.entry()?;
        Some((entry, entry.load(Relaxed))).filter(|(_, id)| *id != 0)
    }

    /// Clears the entry of the block that starts here.
    pub(crate) fn clear(&self) {
        if let Some(entry) = self.entry() {
            entry.store(0, Relaxed);
        }
    }

    /// The entry of the block that starts here: its node, 0 for none. `None` where no block can start.
    #[inline]
    pub(crate) fn entry(&self) -> Option<&AtomicU32> {
        if self.offset.is_multiple_of(UNIT) { self.reservation.table.entry(self.index()) } else { None }
    }
}

/// The refusal of a reservation that cannot be smaller: what was asked for, and what may be in the way.
pub(super) fn no_addresses(error: DriverError, bytes: u64) -> DriverError {
    // Entering a context, say, asks for none.
    if error.call != DriverCall::Reserve {
        return error;
    }
    let limit = getrlimit(Resource::As).current;
    let limit = limit.map(|limit| format!(", of which this process may have {} (`ulimit -v`)", human(limit)));
    let (reason, limit) = (&error.reason, limit.unwrap_or_default());
    let reason = format!("{reason}; {} of addresses were asked for, the least that will do{limit}", human(bytes));
    DriverError { reason, ..error }
}

fn reserve_with_table(driver: &Driver, bytes: u64) -> Result<(u64, BlockTable), DriverError> {
    let address = driver.reserve(bytes)?;
    match BlockTable::new(bytes) {
        Ok(table) => Ok((address, table)),
        Err(error) => driver.unreserve(address, bytes).and(Err(error)),
    }
}

/// Slots of the newest reservation that are not handed out: `low..high`.
#[derive(Debug, Default)]
struct Spare {
    index: usize,
    low: u32,
    high: u32,
}

/// See the module's text.
#[derive(Debug, Default)]
pub(crate) struct Space {
    reservations: [OnceLock<Reservation>; RESERVATIONS],
    spare: Mutex<Spare>,
    /// Reservations that were refused and the like, for `xseg info`.
    notes: Mutex<Vec<String>>,
}

impl Space {
    pub(crate) fn reservations(&self) -> impl Iterator<Item = &Reservation> {
        self.reservations.iter().map_while(OnceLock::get)
    }

    /// Bytes of addresses reserved.
    pub(crate) fn bytes(&self) -> u64 {
        self.reservations().map(|reservation| reservation.bytes).sum()
    }

    pub(crate) fn note(&self, note: String) {
        self.notes.lock().push(note);
    }

    pub(crate) fn notes(&self) -> Vec<String> {
        self.notes.lock().clone()
    }

    /// Adds a reservation of `bytes` (rounded up to slots), halved until one succeeds, but not below
    /// `least`. Called with the driver lock held.
    pub(crate) fn reserve(&self, driver: &Driver, bytes: u64, least: u64) -> Result<()> {
        let index = self.reservations().count();
        let first: u64 = self.reservations().map(|r| r.bytes / UNIT).sum();
        let room = (u64::from(u32::MAX) - first) * UNIT / SLOT * SLOT;
        let least = least.next_multiple_of(SLOT).max(2 * SLOT);
        let full = Error::AddressSpace { requested: least, reserved: self.bytes() };
        if index == RESERVATIONS || room < least {
            return Err(full);
        }
        let mut bytes = bytes.checked_next_multiple_of(SLOT).unwrap_or(room).clamp(least, room);
        let (address, table) = loop {
            match reserve_with_table(driver, bytes) {
                Ok(both) => break both,
                Err(error) => {
                    self.notes.lock().push(format!(
                        "a reservation of {} GiB was refused: {}",
                        bytes / GIB,
                        error.reason
                    ));
                    if bytes == least {
                        return Err(no_addresses(error, bytes).into());
                    }
                    bytes = (bytes / 2).next_multiple_of(SLOT).max(least);
                }
            }
        };
        let slots = bytes / SLOT;
        let owners = (0..slots).map(|_| AtomicU16::new(NOBODY)).collect();
        let reservation = Reservation { address, bytes, first: first as u32, table, owners };
        if self.reservations[index].set(reservation).is_err() {
            return Err(full);
        }
        *self.spare.lock() = Spare { index, low: 0, high: slots as u32 };
        Ok(())
    }

    /// Hands a span of at least `bytes` from the bottom of the newest reservation to a large segment: half
    /// of what is left, so that the other one and small segments find room above. Unit range, or `None`.
    pub(crate) fn take_low(&self, segment: u16, bytes: u64) -> Option<(u32, u32)> {
        let mut spare = self.spare.lock();
        let free = spare.high - spare.low;
        let want = u32::try_from(bytes.div_ceil(SLOT)).ok()?;
        let slots = want.max(free / 2);
        if want > free || slots == 0 {
            return None;
        }
        let low = spare.low;
        spare.low += slots;
        self.own(spare.index, low..low + slots, segment)
    }

    /// Hands the highest free slots, as many as `bytes` need, to a segment of `small` blocks or a capture pool's.
    pub(crate) fn take_high(&self, segment: u16, bytes: u64, small: bool) -> Option<(u32, u32)> {
        let slots = u32::try_from(bytes.div_ceil(SLOT)).ok()?;
        let mut spare = self.spare.lock();
        if spare.high - spare.low < slots {
            return None;
        }
        spare.high -= slots;
        let reservation = self.reservations[spare.index].get()?;
        if small {
            let first = spare.high * UNITS_PER_SLOT;
            reservation.table.expect_many(first + FEW_UNITS..first + slots * UNITS_PER_SLOT);
        }
        self.own(spare.index, spare.high..spare.high + slots, segment)
    }

    fn own(&self, index: usize, slots: std::ops::Range<u32>, segment: u16) -> Option<(u32, u32)> {
        let reservation = self.reservations[index].get()?;
        for slot in slots.clone() {
            reservation.owners[slot as usize].store(segment, Relaxed);
        }
        Some((reservation.first + slots.start * UNITS_PER_SLOT, (slots.end - slots.start) * UNITS_PER_SLOT))
    }

    /// Where an address lies; `None` outside the heap.
    pub(crate) fn locate(&self, address: u64) -> Option<Located<'_>> {
        self.reservations().find_map(|reservation| reservation.locate(address))
    }

    /// As [`Self::locate`], if the address lies in the first reservation.
    #[inline]
    pub(crate) fn locate_first(&self, address: u64) -> Option<Located<'_>> {
        self.reservations[0].get()?.locate(address)
    }

    /// Enters the node of the block that starts at a unit that some segment owns; the unit's address.
    #[inline(always)]
    pub(crate) fn enter(&self, unit: u32, node: u32) -> u64 {
        // Nearly always in the first.
        match self.reservations[0].get().and_then(|first| first.enter(unit, node)) {
            Some(address) => address,
            None => self.enter_elsewhere(unit, node),
        }
    }

    #[cold]
    fn enter_elsewhere(&self, unit: u32, node: u32) -> u64 {
        self.reservations().find_map(|reservation| reservation.enter(unit, node)).unwrap_or(0)
    }

    /// Address of a unit that some segment owns.
    pub(crate) fn address(&self, unit: u32) -> u64 {
        let reservation = self.reservations().find(|r| u64::from(unit.wrapping_sub(r.first)) < r.bytes / UNIT);
        reservation.map_or(0, |r| r.address + u64::from(unit - r.first) * UNIT)
    }
}
