//! A reader of pickles that runs nothing and trusts nothing.
//!
//! Values live in one arena and refer to each other by number, so that sharing stays sharing (a snapshot
//! names the same stack frames a hundred thousand times), nesting needs no recursion, and memory follows
//! the length of the file: each opcode adds at most one value, and there are at most [`VALUES_MAX`]. Only what plain data needs is read;
//! a pickle that names classes or calls functions is refused.
#![forbid(unsafe_code)]

use super::TraceError;
use std::collections::HashMap;

/// Number of a value in its arena.
pub(super) type Id = u32;

/// Most values, stored or stacked: 32 million, ten times those of a snapshot with a million entries.
const VALUES_MAX: usize = 32 << 20;
/// Deepest nesting of open lists and dicts.
const MARKS_MAX: usize = 1 << 16;
/// Pairs of a dict that are searched for a key: a snapshot's dicts have a dozen, and a file may name one
/// dict a million times.
const PAIRS_SEARCHED: usize = 64;

/// A value; texts are ranges of the pickle's bytes.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value {
    /// None, numbers below 0 or beyond 64 bits, raw bytes: nothing that a snapshot is read for.
    Other,
    Int(u64),
    Float(f64),
    Text {
        start: u32,
        end: u32,
    },
    /// A list or tuple.
    List(Vec<Id>),
    /// Keys and values by turns.
    Dict(Vec<Id>),
}

/// A pickle that was read.
#[derive(Debug)]
pub(super) struct Pickle<'a> {
    bytes: &'a [u8],
    values: Vec<Value>,
    root: Id,
}

impl<'a> Pickle<'a> {
    pub(super) fn read(bytes: &'a [u8]) -> Result<Self, TraceError> {
        let mut machine =
            Machine { bytes, at: 0, values: Vec::new(), stack: Vec::new(), marks: Vec::new(), memo: HashMap::new() };
        let root = machine.run().map_err(|why| TraceError::Pickle { offset: machine.at, why })?;
        Ok(Self { bytes, values: machine.values, root })
    }

    pub(super) fn root(&self) -> Id {
        self.root
    }

    /// The value of a text key of a dict.
    pub(super) fn get(&self, dict: Id, key: &str) -> Option<Id> {
        let Value::Dict(pairs) = self.value(dict) else { return None };
        // The last of equal keys counts, as in Python.
        let mut last = pairs.chunks_exact(2).rev().take(PAIRS_SEARCHED);
        last.find(|pair| self.text(pair[0]) == Some(key.as_bytes())).map(|pair| pair[1])
    }

    pub(super) fn list(&self, list: Id) -> Option<&[Id]> {
        if let Value::List(items) = self.value(list) { Some(items) } else { None }
    }

    /// A text as its bytes (UTF-8 unless the file lies).
    pub(super) fn text(&self, text: Id) -> Option<&'a [u8]> {
        if let Value::Text { start, end } = self.value(text) {
            self.bytes.get(*start as usize..*end as usize)
        } else {
            None
        }
    }

    /// A number that is not negative and fits.
    pub(super) fn number(&self, number: Id) -> Option<u64> {
        match self.value(number) {
            Value::Int(int) => Some(*int),
            Value::Float(float) if *float >= 0.0 && *float < 9e15 => Some(*float as u64),
            _ => None,
        }
    }

    fn value(&self, id: Id) -> &Value {
        &self.values[id as usize]
    }
}

struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    values: Vec<Value>,
    stack: Vec<Id>,
    /// Heights of the stack at the marks.
    marks: Vec<usize>,
    memo: HashMap<u32, Id>,
}

type Step<T> = Result<T, &'static str>;

const SHORT: &str = "it ends too early";
const MANY: &str = "it holds more than 32 million values";
const EMPTY: &str = "an opcode finds too little on the stack";

impl Machine<'_> {
    fn run(&mut self) -> Step<Id> {
        loop {
            let [opcode] = self.take::<1>()?;
            match opcode {
                0x80 => drop(self.take::<1>()?),              // PROTO
                0x95 => drop(self.take::<8>()?),              // FRAME
                b'.' => return self.stack.pop().ok_or(EMPTY), // STOP
                b'(' => self.mark()?,                         // MARK
                b'0' => drop(self.pop()?),                    // POP
                b'1' => drop(self.pop_mark()?),               // POP_MARK
                b'2' => {
                    let top = self.pop()?; // DUP
                    self.stack_up(top)?;
                    self.stack_up(top)?;
                }
                b'q' => {
                    let [slot] = self.take::<1>()?; // BINPUT
                    self.memoize(slot.into())?;
                }
                b'r' => {
                    let slot = u32::from_le_bytes(self.take()?); // LONG_BINPUT
                    self.memoize(slot)?;
                }
                0x94 => self.memoize(self.memo.len() as u32)?, // MEMOIZE
                b'h' => {
                    let [slot] = self.take::<1>()?; // BINGET
                    self.recall(slot.into())?;
                }
                b'j' => {
                    let slot = u32::from_le_bytes(self.take()?); // LONG_BINGET
                    self.recall(slot)?;
                }
                b'N' => self.push(Value::Other)?,  // NONE
                0x88 => self.push(Value::Int(1))?, // NEWTRUE
                0x89 => self.push(Value::Int(0))?, // NEWFALSE
                b'J' => {
                    let int = i32::from_le_bytes(self.take()?); // BININT
                    self.push(u64::try_from(int).map_or(Value::Other, Value::Int))?;
                }
                b'K' => {
                    let [int] = self.take::<1>()?; // BININT1
                    self.push(Value::Int(int.into()))?;
                }
                b'M' => {
                    let int = u16::from_le_bytes(self.take()?); // BININT2
                    self.push(Value::Int(int.into()))?;
                }
                b'G' => {
                    let float = f64::from_be_bytes(self.take()?); // BINFLOAT
                    self.push(Value::Float(float))?;
                }
                0x8a => self.long(1)?,                              // LONG1
                0x8b => self.long(4)?,                              // LONG4
                0x8c => self.text(1)?,                              // SHORT_BINUNICODE
                b'X' => self.text(4)?,                              // BINUNICODE
                0x8d => self.text(8)?,                              // BINUNICODE8
                b'C' => self.raw(1)?,                               // SHORT_BINBYTES
                b'B' => self.raw(4)?,                               // BINBYTES
                0x8e | 0x96 => self.raw(8)?,                        // BINBYTES8, BYTEARRAY8
                b']' | b')' => self.push(Value::List(Vec::new()))?, // EMPTY_LIST, EMPTY_TUPLE
                b'}' => self.push(Value::Dict(Vec::new()))?,        // EMPTY_DICT
                0x85 => self.tuple(1)?,                             // TUPLE1
                0x86 => self.tuple(2)?,                             // TUPLE2
                0x87 => self.tuple(3)?,                             // TUPLE3
                b't' | b'l' => {
                    let items = self.pop_mark()?; // TUPLE, LIST
                    self.push(Value::List(items))?;
                }
                b'd' => {
                    let pairs = self.pop_mark()?; // DICT
                    self.push(Value::Dict(even(pairs)?))?;
                }
                b'a' => {
                    let item = self.pop()?; // APPEND
                    self.list()?.push(item);
                }
                b'e' => {
                    let items = self.pop_mark()?; // APPENDS
                    self.list()?.extend(items);
                }
                b's' => {
                    let value = self.pop()?; // SETITEM
                    let key = self.pop()?;
                    self.dict()?.extend([key, value]);
                }
                b'u' => {
                    let pairs = even(self.pop_mark()?)?; // SETITEMS
                    self.dict()?.extend(pairs);
                }
                b'c' | 0x93 | b'R' | b'i' | b'o' | 0x81 | 0x92 | b'b' => {
                    return Err("it names Python classes or functions, which are never run");
                }
                _ => return Err("an opcode that plain data does not need"),
            }
        }
    }

    fn take<const N: usize>(&mut self) -> Step<[u8; N]> {
        let chunk = self.bytes[self.at..].first_chunk::<N>().ok_or(SHORT)?;
        self.at += N;
        Ok(*chunk)
    }

    /// Start and end of `length` bytes, whose number is itself written in `width` bytes.
    fn counted(&mut self, width: usize) -> Step<(usize, usize)> {
        let digits = self.bytes.get(self.at..self.at + width).ok_or(SHORT)?;
        let length = digits.iter().rev().fold(0u64, |sum, &byte| sum << 8 | u64::from(byte));
        let start = self.at + width;
        let left = self.bytes.len() - start;
        let length = usize::try_from(length).ok().filter(|length| *length <= left).ok_or(SHORT)?;
        self.at = start + length;
        Ok((start, self.at))
    }

    fn text(&mut self, width: usize) -> Step<()> {
        let (start, end) = self.counted(width)?;
        let offset = |at| u32::try_from(at).map_err(|_| "it is longer than 4 GiB");
        self.push(Value::Text { start: offset(start)?, end: offset(end)? })
    }

    fn raw(&mut self, width: usize) -> Step<()> {
        self.counted(width)?;
        self.push(Value::Other)
    }

    /// A little-endian two's complement number.
    fn long(&mut self, width: usize) -> Step<()> {
        let (start, end) = self.counted(width)?;
        let digits = &self.bytes[start..end];
        let negative = digits.last().is_some_and(|top| top & 0x80 != 0);
        let int = digits.iter().rev().try_fold(0u64, |sum, &byte| Some(sum.checked_mul(256)? + u64::from(byte)));
        self.push(if negative { Value::Other } else { int.map_or(Value::Other, Value::Int) })
    }

    fn push(&mut self, value: Value) -> Step<()> {
        if self.values.len() >= VALUES_MAX {
            return Err(MANY);
        }
        let id = self.values.len() as Id;
        self.values.push(value);
        self.stack_up(id)
    }

    fn stack_up(&mut self, id: Id) -> Step<()> {
        if self.stack.len() >= VALUES_MAX {
            return Err(MANY);
        }
        self.stack.push(id);
        Ok(())
    }

    fn mark(&mut self) -> Step<()> {
        if self.marks.len() >= MARKS_MAX {
            return Err("it is nested too deeply");
        }
        self.marks.push(self.stack.len());
        Ok(())
    }

    /// Height below which the values belong to an outer mark.
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn pop(&mut self) -> Step<Id> {
        if self.stack.len() <= self.floor() {
            return Err(EMPTY);
        }
        self.stack.pop().ok_or(EMPTY)
    }

    fn pop_mark(&mut self) -> Step<Vec<Id>> {
        let height = self.marks.pop().ok_or("a mark is missing")?;
        Ok(self.stack.split_off(height))
    }

    fn tuple(&mut self, length: usize) -> Step<()> {
        let start = self.stack.len().checked_sub(length).filter(|start| *start >= self.floor()).ok_or(EMPTY)?;
        let items = self.stack.split_off(start);
        self.push(Value::List(items))
    }

    fn memoize(&mut self, slot: u32) -> Step<()> {
        let top = *self.stack.last().ok_or(EMPTY)?;
        self.memo.insert(slot, top);
        if self.memo.len() > VALUES_MAX { Err(MANY) } else { Ok(()) }
    }

    fn recall(&mut self, slot: u32) -> Step<()> {
        let id = *self.memo.get(&slot).ok_or("it refers to a value that was never stored")?;
        self.stack_up(id)
    }

    fn list(&mut self) -> Step<&mut Vec<Id>> {
        let top = *self.stack.last().ok_or(EMPTY)?;
        match &mut self.values[top as usize] {
            Value::List(items) => Ok(items),
            _ => Err("items are added to what is no list"),
        }
    }

    fn dict(&mut self) -> Step<&mut Vec<Id>> {
        let top = *self.stack.last().ok_or(EMPTY)?;
        match &mut self.values[top as usize] {
            Value::Dict(pairs) => Ok(pairs),
            _ => Err("pairs are added to what is no dict"),
        }
    }
}

fn even(pairs: Vec<Id>) -> Step<Vec<Id>> {
    if pairs.len().is_multiple_of(2) { Ok(pairs) } else { Err("a key has no value") }
}
