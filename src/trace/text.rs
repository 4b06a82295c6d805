//! The text form of a trace.
#![forbid(unsafe_code)]

use super::file::damaged;
use super::{Action, BLOCK_MAX, Builder, TIME_MAX_US, Trace, TraceError};
use std::collections::HashMap;
use std::io::{BufRead, Read, Write};

/// Longest line in bytes: comments carry JSON, events are short.
const LINE_MAX: u64 = 1 << 20;

pub(super) fn read(mut reader: impl BufRead) -> Result<Trace, TraceError> {
    let mut builder = Builder::default();
    let mut live = Live::default();
    let mut line = Vec::with_capacity(256);
    let mut comments = 0;
    for number in 1.. {
        line.clear();
        let read = reader.by_ref().take(LINE_MAX).read_until(b'\n', &mut line);
        if read.map_err(|error| damaged(number - 1, error))? == 0 {
            break;
        }
        if read_is_cut(&line) {
            return Err(wrong(number, &line, "the line is longer than 1 MiB"));
        }
        let text = line.trim_ascii_end();
        match text.first() {
            None => {}
            Some(b'#') => {
                comments += 1;
                if comments == 2 {
                    builder.trace.meta_json = meta(&text[1..]);
                }
            }
            Some(_) => event(&mut builder, &mut live, number, text)?,
        }
    }
    builder.finish()
}

/// Writes a trace, blocks numbered by birth.
pub(super) fn write(trace: &Trace, out: &mut impl Write) -> std::io::Result<()> {
    writeln!(out, "# trace {}", trace.name.replace(char::is_control, " "))?;
    writeln!(out, "# {}", trace.meta_json.replace(char::is_control, " "))?;
    for event in &trace.events {
        let (block, time) = (event.block, event.time_us);
        match event.action {
            Action::Alloc => {
                let bytes = trace.blocks[block as usize].bytes;
                writeln!(out, "a,{block},{bytes},{},{time}", trace.stream_of(block))?;
            }
            Action::Free => writeln!(out, "f,{block},{time}")?,
            Action::Use(stream) => writeln!(out, "u,{block},{},{time}", trace.streams[stream as usize])?,
        }
    }
    Ok(())
}

fn read_is_cut(line: &[u8]) -> bool {
    line.len() as u64 == LINE_MAX && line.last() != Some(&b'\n')
}

/// The JSON of the second comment; a comment that is something else says nothing about the run.
fn meta(text: &[u8]) -> String {
    let json = std::str::from_utf8(text.trim_ascii()).unwrap_or("");
    if serde_json::from_str::<serde::de::IgnoredAny>(json).is_ok() { json.to_owned() } else { String::new() }
}

fn event(builder: &mut Builder, live: &mut Live, number: u64, line: &[u8]) -> Result<(), TraceError> {
    let bad = |why| wrong(number, line, why);
    let (kind, rest) = line.split_first_chunk::<2>().ok_or_else(|| bad("it is no event"))?;
    let mut fields = Fields(Some(rest));
    let mut next = |field: Field| fields.next(field).map_err(bad);
    match kind {
        b"a," => {
            let (id, bytes, stream, time) = (next(ID)?, next(BYTES)?, next(STREAM)?, next(TIME)?);
            fields.end().ok_or_else(|| bad("something follows TIME_US"))?;
            if bytes > BLOCK_MAX {
                return Err(bad("BYTES is more than 256 TiB"));
            }
            if live.get(id).is_some() {
                return Err(TraceError::Duplicate { line: number, id });
            }
            let block =
                builder.alloc(bytes, stream, time_checked(time).ok_or_else(|| bad("TIME_US is out of range"))?)?;
            live.insert(id, block);
        }
        b"f," => {
            let (id, time) = (next(ID)?, next(TIME)?);
            fields.end().ok_or_else(|| bad("something follows TIME_US"))?;
            let time = time_checked(time).ok_or_else(|| bad("TIME_US is out of range"))?;
            let block = live.remove(id).ok_or(TraceError::Unknown { line: number, id })?;
            builder.free(block, time)?;
        }
        b"u," => {
            let (id, stream, time) = (next(ID)?, next(STREAM)?, next(TIME)?);
            fields.end().ok_or_else(|| bad("something follows TIME_US"))?;
            let time = time_checked(time).ok_or_else(|| bad("TIME_US is out of range"))?;
            let block = live.get(id).ok_or(TraceError::Unknown { line: number, id })?;
            builder.used(block, stream, time)?;
        }
        _ => return Err(bad("it is no event")),
    }
    Ok(())
}

fn time_checked(time: u64) -> Option<u64> {
    (time <= TIME_MAX_US).then_some(time)
}

fn wrong(line: u64, text: &[u8], why: &'static str) -> TraceError {
    TraceError::Line { line, text: crate::shown::text(text.trim_ascii(), 60), why }
}

/// What is said of a field that is not there, and of one that is no number.
#[derive(Clone, Copy)]
struct Field {
    missing: &'static str,
    wrong: &'static str,
}

const ID: Field = Field { missing: "ID is missing", wrong: "ID is no number" };
const BYTES: Field = Field { missing: "BYTES is missing", wrong: "BYTES is no number up to 2^64" };
const STREAM: Field = Field { missing: "STREAM is missing", wrong: "STREAM is no number" };
const TIME: Field = Field { missing: "TIME_US is missing", wrong: "TIME_US is no number" };

/// Decimal fields between commas; `None` after the last.
struct Fields<'a>(Option<&'a [u8]>);

impl Fields<'_> {
    fn next(&mut self, field: Field) -> Result<u64, &'static str> {
        let Some(text) = self.0 else { return Err(field.missing) };
        let mut value = 0u64;
        let mut digits = 0;
        while let Some(&byte) = text.get(digits) {
            let digit = byte.wrapping_sub(b'0');
            if digit > 9 {
                break;
            }
            let next = value.checked_mul(10).and_then(|value| value.checked_add(u64::from(digit)));
            value = next.ok_or(field.wrong)?;
            digits += 1;
        }
        self.0 = match text.get(digits) {
            None => None,
            Some(b',') => Some(&text[digits + 1..]),
            Some(_) => return Err(field.wrong),
        };
        if digits > 0 { Ok(value) } else { Err(field.missing) }
    }

    fn end(&self) -> Option<()> {
        self.0.is_none().then_some(())
    }
}

/// Live blocks by the file's number: an array where numbers count up, as recorders write them, and a
/// map for any others, so that memory follows the number of blocks and not what the numbers are.
#[derive(Default)]
struct Live {
    /// Block index + 1 by number; 0 where none is live.
    dense: Vec<u32>,
    sparse: HashMap<u64, u32>,
    births: u64,
}

impl Live {
    fn get(&self, id: u64) -> Option<u32> {
        match usize::try_from(id).ok().and_then(|at| self.dense.get(at)) {
            Some(&block) if block > 0 => Some(block - 1),
            _ => self.sparse.get(&id).copied(),
        }
    }

    /// `id` is not live.
    fn insert(&mut self, id: u64, block: u32) {
        self.births += 1;
        if id > 2 * self.births + 1024 {
            self.sparse.insert(id, block);
            return;
        }
        let at = id as usize;
        if at >= self.dense.len() {
            self.dense.resize(at + 1, 0);
        }
        self.dense[at] = block + 1;
    }

    fn remove(&mut self, id: u64) -> Option<u32> {
        match usize::try_from(id).ok().and_then(|at| self.dense.get_mut(at)) {
            Some(block) if *block > 0 => Some(std::mem::take(block) - 1),
            _ => self.sparse.remove(&id),
        }
    }
}
