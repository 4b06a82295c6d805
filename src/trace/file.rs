//! From a path or bytes to text or pickle: mapping, decompression, limits.
#![allow(unsafe_code, reason = "mapping a file is unsafe in memmap2; it is done in one place")]

use super::{PICKLE_MAX, TEXT_MAX, Trace, TraceError, snapshot, text};
use liblzma::stream::{CONCATENATED, Stream};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

const XZ: &[u8] = b"\xfd7zXZ\0";
const ZSTD: &[u8] = b"\x28\xb5\x2f\xfd";
/// First byte of a pickle of protocol 2 and later; earlier ones are not written by PyTorch.
const PICKLE: u8 = 0x80;
/// Memory that a decompressor may take: the dictionaries of `xz -9` and `zstd --ultra -22` fit.
const XZ_MEMORY: u64 = 256 << 20;
const ZSTD_WINDOW_LOG: u32 = 27;

/// Of a snapshot the `device` with this number, or the one with the longest history.
pub(super) fn load(path: &Path, device: Option<u32>) -> Result<Trace, TraceError> {
    let failed = |error: io::Error| TraceError::Open { path: path.into(), why: error.to_string() };
    let file = File::open(path).map_err(failed)?;
    let meta = file.metadata().map_err(failed)?;
    if meta.is_file() && meta.len() > 0 {
        // SAFETY: the mapping is private to this function, read-only, and made of a file open for
        // reading. If another program writes to the file meanwhile, bytes change between reads; the
        // readers take each byte as it comes and trust none of them.
        let map = unsafe { memmap2::Mmap::map(&file) }.map_err(failed)?;
        return read_bytes(&map, device).map_err(|error| of_name(path, error));
    }
    if meta.is_dir() {
        return Err(failed(io::Error::other("it is a folder, and one file is needed")));
    }
    // A pipe cannot be mapped, so it is collected; longer ones than a snapshot may be are refused.
    let mut bytes = Vec::new();
    file.take(PICKLE_MAX + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > PICKLE_MAX {
        return Err(TraceError::SnapshotTooLarge { most: PICKLE_MAX });
    }
    read_bytes(&bytes, device).map_err(|error| of_name(path, error))
}

/// What is wrong with a file of this name: content decides what a file is read as, but the form of a trace's lines is no help to
/// whoever named a pickle.
fn of_name(path: &Path, error: TraceError) -> TraceError {
    let name = path.file_name().unwrap_or_default().as_encoded_bytes();
    let plain = [&b".xz"[..], b".zst"].iter().find_map(|ending| name.strip_suffix(*ending)).unwrap_or(name);
    match error {
        TraceError::Line { line: 1, text, .. } if plain.ends_with(b".pickle") || plain.ends_with(b".pkl") => {
            TraceError::NoPickle { start: text }
        }
        other => other,
    }
}

pub(super) fn read_bytes(bytes: &[u8], device: Option<u32>) -> Result<Trace, TraceError> {
    if bytes.starts_with(XZ) {
        let stream = Stream::new_stream_decoder(XZ_MEMORY, CONCATENATED).map_err(|error| damaged(0, error))?;
        unfold(liblzma::bufread::XzDecoder::new_stream(bytes, stream), device)
    } else if bytes.starts_with(ZSTD) {
        let mut decoder = zstd::Decoder::with_buffer(bytes).map_err(|error| damaged(0, error))?;
        decoder.window_log_max(ZSTD_WINDOW_LOG).map_err(|error| damaged(0, error))?;
        unfold(decoder, device)
    } else if bytes.first() == Some(&PICKLE) {
        if bytes.len() as u64 > PICKLE_MAX {
            return Err(TraceError::SnapshotTooLarge { most: PICKLE_MAX });
        }
        snapshot::read(bytes, device)
    } else {
        only_of_snapshots(text::read(bytes), device)
    }
}

/// A text trace names no devices. What is wrong with the text comes first: the file may be meant as a snapshot.
fn only_of_snapshots(read: Result<Trace, TraceError>, device: Option<u32>) -> Result<Trace, TraceError> {
    match (read, device) {
        (Ok(_), Some(_)) => Err(TraceError::NoDevices),
        (read, _) => read,
    }
}

fn unfold(decoder: impl Read, device: Option<u32>) -> Result<Trace, TraceError> {
    let mut reader = BufReader::with_capacity(1 << 18, Bounded { inner: decoder, left: TEXT_MAX });
    let first = reader.fill_buf().map_err(|error| damaged(0, error))?.first().copied();
    if first != Some(PICKLE) {
        return only_of_snapshots(text::read(reader), device);
    }
    let mut bytes = Vec::new();
    reader.take(PICKLE_MAX + 1).read_to_end(&mut bytes).map_err(|error| damaged(0, error))?;
    if bytes.len() as u64 > PICKLE_MAX {
        return Err(TraceError::SnapshotTooLarge { most: PICKLE_MAX });
    }
    snapshot::read(&bytes, device)
}

/// What failed while reading after `line` whole lines.
pub(super) fn damaged(line: u64, error: impl Into<io::Error>) -> TraceError {
    let error = error.into();
    match error.kind() {
        io::ErrorKind::FileTooLarge => too_large(TEXT_MAX),
        _ => TraceError::Read { line, why: error.to_string() },
    }
}

fn too_large(most: u64) -> TraceError {
    TraceError::TooLarge { what: "MiB once unfolded", most: most >> 20 }
}

/// A reader that fails once more than a number of bytes came out: a small file can unfold to anything.
struct Bounded<R> {
    inner: R,
    left: u64,
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.left = self.left.checked_sub(read as u64).ok_or_else(|| io::Error::from(io::ErrorKind::FileTooLarge))?;
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_ends_at_its_bound() {
        let mut reader = Bounded { inner: io::repeat(b'a'), left: 10_000 };
        let mut sink = Vec::new();
        assert_eq!(reader.read_to_end(&mut sink).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        assert!(sink.len() <= 10_000);
        assert_eq!(damaged(7, io::Error::from(io::ErrorKind::FileTooLarge)), too_large(TEXT_MAX));
    }
}
