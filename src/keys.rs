//! A map from numbers to numbers that is read without a lock: streams by identity.
//!
//! Readers look at one cell in front, and where another key has it, probe a table of atomics. Writers take turns (the caller
//! holds a lock), write a key before they publish its cell by a value, and when a table is half full enter all of it into
//! one twice as large, which new readers find through one number. Old tables stay, since readers may be in them:
//! together they are as large as the newest. A key stays in the front cell that it came to first.
#![forbid(unsafe_code)]

#[cfg(all(test, loom))]
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::OnceLock;
#[cfg(not(all(test, loom)))]
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Tables, each twice as large as the one before.
const TABLES: usize = 24;
/// Cells in front, as a power of two.
const FRONT_BITS: u32 = if cfg!(all(test, loom)) { 1 } else { 6 };
/// Cells of the first table, as a power of two.
const FIRST_BITS: u32 = if cfg!(all(test, loom)) { 1 } else { 6 };

/// A value of 0 is an empty cell.
#[derive(Debug)]
struct Cell {
    key: AtomicU64,
    value: AtomicU64,
}

impl Cell {
    fn empty() -> Self {
        Self { key: AtomicU64::new(0), value: AtomicU64::new(0) }
    }

    /// Its value, if the key is this; 0: none.
    #[inline]
    fn of(&self, key: u64) -> u64 {
        let value = self.value.load(Ordering::Acquire);
        if self.key.load(Ordering::Relaxed) == key { value } else { 0 }
    }

    fn set(&self, key: u64, value: u64) {
        self.key.store(key, Ordering::Relaxed);
        // After the key, so that whoever sees the value sees the key.
        self.value.store(value, Ordering::Release);
    }
}

/// The highest bits of a key's hash.
#[inline]
const fn hash(key: u64, bits: u32) -> usize {
    (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - bits)) as usize
}

#[derive(Debug)]
struct Table {
    cells: Box<[Cell]>,
    bits: u32,
    /// Cells that are not empty; writers' alone.
    used: AtomicU32,
}

impl Table {
    fn new(bits: u32) -> Self {
        Self { cells: (0..1_usize << bits).map(|_| Cell::empty()).collect(), bits, used: AtomicU32::new(0) }
    }

    /// The cell of a key, or the empty one where it would be. A table is never full.
    fn find(&self, key: u64) -> (&Cell, u64) {
        let mut at = hash(key, self.bits);
        loop {
            let cell = &self.cells[at];
            let value = cell.value.load(Ordering::Acquire);
            if value == 0 || cell.key.load(Ordering::Relaxed) == key {
                return (cell, value);
            }
            at = (at + 1) & (self.cells.len() - 1);
        }
    }

    fn set(&self, key: u64, value: u64) {
        let (cell, before) = self.find(key);
        if before == 0 {
            self.used.store(self.used.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        }
        cell.set(key, value);
    }
}

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Keys {
    front: [Cell; 1 << FRONT_BITS],
    tables: [OnceLock<Table>; TABLES],
    newest: AtomicU32,
}

impl Default for Keys {
    fn default() -> Self {
        let front = std::array::from_fn(|_| Cell::empty());
        let keys = Self { front, tables: [const { OnceLock::new() }; TABLES], newest: AtomicU32::new(0) };
        keys.tables[0].get_or_init(|| Table::new(FIRST_BITS));
        keys
    }
}

impl Keys {
    fn table(&self) -> Option<&Table> {
        self.tables[self.newest.load(Ordering::Acquire) as usize].get()
    }

    /// The value of a key; 0: none. Any thread, without a lock.
    #[inline]
    pub(crate) fn get(&self, key: u64) -> u64 {
        match self.get_in_front(key) {
            0 => self.get_behind(key),
            value => value,
        }
    }

    /// The value of a key, if it is the one in front; else 0.
    #[inline]
    pub(crate) fn get_in_front(&self, key: u64) -> u64 {
        self.front[hash(key, FRONT_BITS)].of(key)
    }

    #[inline(never)]
    fn get_behind(&self, key: u64) -> u64 {
        self.table().map_or(0, |table| table.find(key).1)
    }

    /// Sets a value other than 0. The caller sees to it that writers take turns. Keys beyond what the last table holds
    /// are not entered: whoever reads must be able to do without.
    pub(crate) fn set(&self, key: u64, value: u64) {
        let front = &self.front[hash(key, FRONT_BITS)];
        if front.value.load(Ordering::Relaxed) == 0 || front.key.load(Ordering::Relaxed) == key {
            return front.set(key, value);
        }
        let Some(table) = self.table() else { return };
        if table.find(key).1 == 0 {
            let used = table.used.load(Ordering::Relaxed) as usize;
            if 2 * (used + 1) > table.cells.len() {
                let newest = self.newest.load(Ordering::Relaxed) + 1;
                let Some(place) = self.tables.get(newest as usize) else { return };
                let larger = place.get_or_init(|| Table::new(table.bits + 1));
                for cell in &table.cells {
                    match cell.value.load(Ordering::Relaxed) {
                        0 => {}
                        value => larger.set(cell.key.load(Ordering::Relaxed), value),
                    }
                }
                larger.set(key, value);
                self.newest.store(newest, Ordering::Release);
                return;
            }
        }
        table.set(key, value);
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;

    #[test]
    fn a_reader_sees_what_was_entered_before_or_nothing() {
        loom::model(|| {
            let keys = Arc::new(Keys::default());
            // The first is in front, the other behind it, since they have the same place there.
            keys.set(8, 80);
            keys.set(9, 90);
            let reader = keys.clone();
            let thread = loom::thread::spawn(move || {
                // Entered before the thread began: found in front, or in whichever table.
                assert!([80, 81].contains(&reader.get(8)));
                assert!([90, 91].contains(&reader.get(9)));
                assert!([0, 110].contains(&reader.get(11)));
                // It has the place in front that 7 comes to.
                assert_eq!(reader.get(0), 0);
            });
            // Needs a larger table; is the first in its place in front.
            keys.set(11, 110);
            keys.set(7, 70);
            keys.set(9, 91);
            keys.set(8, 81);
            thread.join().unwrap();
            assert_eq!([7, 8, 9, 11].map(|key| keys.get(key)), [70, 81, 91, 110]);
            assert_eq!([7, 8, 9, 11].map(|key| keys.get_in_front(key)), [70, 81, 0, 0]);
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn it_agrees_with_a_plain_map_while_it_grows() {
        let keys = Keys::default();
        let mut plain = std::collections::BTreeMap::new();
        let mut seed = 3u64;
        for round in 1..3000u64 {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            // Zero, pointers with equal low bits, and small numbers.
            let key = if round % 3 == 0 { (seed >> 40) << 12 } else { seed >> 53 };
            keys.set(key, round);
            plain.insert(key, round);
            assert_eq!(keys.get(key + 1), plain.get(&(key + 1)).copied().unwrap_or(0));
        }
        assert!(plain.iter().all(|(key, value)| keys.get(*key) == *value));
        assert!(keys.newest.load(Ordering::Relaxed) > 4);
        let table = keys.table().unwrap();
        let cells = table.cells.iter().filter(|cell| cell.value.load(Ordering::Relaxed) != 0).count();
        assert_eq!(table.used.load(Ordering::Relaxed) as usize, cells, "counted as they come, not anew for each");
    }

    #[test]
    fn readers_find_what_they_know_of_while_it_grows() {
        let keys = Keys::default();
        keys.set(5, 50);
        std::thread::scope(|scope| {
            scope.spawn(|| (1..4000).for_each(|key| keys.set(key << 8, key)));
            scope.spawn(|| (0..100_000).for_each(|_| assert_eq!(keys.get(5), 50)));
        });
        assert_eq!(keys.get(3999 << 8), 3999);
    }
}
