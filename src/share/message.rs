//! The messages, as bytes. All numbers are little-endian; both sides are on one machine.

use crate::error::ShareFault;
use crate::units::GRANULE;

/// Handles that one message carries: a message takes at most 253 descriptors, and a process has 1024 by default.
pub(crate) const BATCH: usize = 64;
/// Handles that wait with an export. The system counts what waits in sockets, a user's together, against the limit of open
/// files: few enough for 60 exports that nobody has taken yet, and for blocks of 512 MiB in handles of 32 MiB.
pub(crate) const FIRST: usize = 16;
/// Bytes of an [`Offer`], and of the longest message: one with a whole batch behind it.
const HEADER: usize = 72;
pub(super) const LONGEST: usize = HEADER + 16 * BATCH;
/// Handles of one block, and bytes of them, that are believed.
const MOST_HANDLES: u32 = 1 << 20;
const MOST_BYTES: u64 = 1 << 46;
/// How an [`Offer`] begins.
const MAGIC: [u8; 8] = *b"xsegmem\n";
/// Version of all messages.
const VERSION: u32 = 1;
/// First bytes of the messages that are no [`Offer`].
const PIECES: u8 = 1;
const REFUSED: u8 = 2;
const HELLO: u8 = 3;
const NEXT: u8 = 4;
const DONE: u8 = 5;

/// What is offered for an import. Sizes in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Offer {
    /// Number of the backend.
    pub(crate) backend: u32,
    /// Identity of the device; zeros: not known.
    pub(crate) device: [u8; 16],
    /// Handles behind the block.
    pub(crate) handles: u32,
    /// All of their bytes.
    pub(crate) mapped: u64,
    /// Where in them the block starts.
    pub(crate) offset: u64,
    /// Bytes that the block takes up.
    pub(crate) size: u64,
    /// Bytes that were asked for.
    pub(crate) len: u64,
}

/// One handle, whose descriptor comes with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Where in the descriptor the handle starts, in bytes.
    pub(crate) start: u64,
    /// Bytes of the handle.
    pub(crate) bytes: u64,
}

/// Reads numbers from the front of a message.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (front, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*front)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }
}

pub(super) fn malformed(why: impl Into<String>) -> ShareFault {
    ShareFault::Malformed(why.into())
}

impl Offer {
    /// With the first handles, whose descriptors come along.
    pub(super) fn encode(&self, first: &[Piece]) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        for number in [VERSION, self.backend, self.handles, first.len() as u32] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend(self.device);
        for number in [self.mapped, self.offset, self.size, self.len] {
            bytes.extend(number.to_le_bytes());
        }
        debug_assert_eq!(bytes.len(), HEADER);
        first.iter().for_each(|piece| piece.encode(&mut bytes));
        bytes
    }

    /// What is offered, and the first handles, of a message that carries `descriptors`.
    pub(super) fn decode(bytes: &[u8], descriptors: usize) -> Result<(Self, Vec<Piece>), ShareFault> {
        let (header, first) = bytes.split_at_checked(HEADER).unwrap_or((bytes, &[]));
        let mut reader = Reader(header);
        if reader.take() != Some(MAGIC) {
            return Err(malformed("it does not begin as an export does"));
        }
        match reader.u32() {
            Some(VERSION) => {}
            Some(theirs) => return Err(ShareFault::OtherVersion { theirs, ours: VERSION }),
            None => return Err(malformed("its header is cut off")),
        }
        let offer = (|| {
            let (backend, handles, queued) = (reader.u32()?, reader.u32()?, reader.u32()?);
            let device = reader.take()?;
            let (mapped, offset, size, len) = (reader.u64()?, reader.u64()?, reader.u64()?, reader.u64()?);
            Some((Self { backend, device, handles, mapped, offset, size, len }, queued))
        })();
        let (offer, queued) = offer.ok_or_else(|| malformed("its header is cut off"))?;
        offer.check()?;
        let first = pieces(first, descriptors)?;
        if first.len() != queued as usize || queued > offer.handles {
            return Err(malformed(format!("{} of {queued} handles came with it", first.len())));
        }
        Ok((offer, first))
    }

    /// Can there be such a block?
    fn check(&self) -> Result<(), ShareFault> {
        let end = self.offset.checked_add(self.size);
        let possible = (1..=MOST_HANDLES).contains(&self.handles)
            && (1..=MOST_BYTES).contains(&self.mapped)
            && self.mapped.is_multiple_of(GRANULE)
            && self.mapped / GRANULE >= u64::from(self.handles)
            && end.is_some_and(|end| end <= self.mapped)
            && (1..=self.size).contains(&self.len.max(1));
        if possible { Ok(()) } else { Err(malformed("its header describes no block")) }
    }
}

impl Piece {
    fn encode(&self, bytes: &mut Vec<u8>) {
        bytes.extend(self.start.to_le_bytes());
        bytes.extend(self.bytes.to_le_bytes());
    }
}

pub(super) fn encode_pieces(pieces: &[Piece]) -> Vec<u8> {
    let mut bytes = vec![PIECES];
    pieces.iter().for_each(|piece| piece.encode(&mut bytes));
    bytes
}

/// The handles of a message that carries `descriptors`.
pub(super) fn decode_pieces(bytes: &[u8], descriptors: usize) -> Result<Vec<Piece>, ShareFault> {
    match bytes.split_first() {
        Some((&REFUSED, text)) => Err(ShareFault::Refused(crate::shown::text(text, LONGEST))),
        Some((&PIECES, rest)) => match pieces(rest, descriptors)? {
            none if none.is_empty() => Err(malformed("a message has no handles")),
            some => Ok(some),
        },
        _ => Err(malformed("a message is none that an exporter sends")),
    }
}

fn pieces(bytes: &[u8], descriptors: usize) -> Result<Vec<Piece>, ShareFault> {
    let mut reader = Reader(bytes);
    let mut pieces = Vec::new();
    while let (Some(start), Some(bytes)) = (reader.u64(), reader.u64()) {
        if !start.is_multiple_of(GRANULE) || bytes == 0 || !bytes.is_multiple_of(GRANULE) {
            return Err(malformed("a handle is no whole granules"));
        }
        pieces.push(Piece { start, bytes });
    }
    match bytes.len() == 16 * pieces.len() && pieces.len() == descriptors {
        true => Ok(pieces),
        false => Err(malformed(format!("{} handles came with {descriptors} descriptors", pieces.len()))),
    }
}

pub(super) fn encode_refusal(why: &str) -> Vec<u8> {
    let why = why.as_bytes();
    [&[REFUSED], &why[..why.len().min(LONGEST - 1)]].concat()
}

/// What an importer says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Said {
    /// It begins; its pidfd comes along, if it has one.
    Hello,
    /// It wants the next batch.
    Next,
    /// It has unmapped everything.
    Done,
}

impl Said {
    pub(super) const fn encode(self) -> [u8; 1] {
        match self {
            Self::Hello => [HELLO],
            Self::Next => [NEXT],
            Self::Done => [DONE],
        }
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        match bytes {
            [HELLO] => Some(Self::Hello),
            [NEXT] => Some(Self::Next),
            [DONE] => Some(Self::Done),
            _ => None,
        }
    }
}
