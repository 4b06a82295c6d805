//! Tickets: text by which other processes of the same user map a block of a device's heap, as often as they like, while it
//! lives. PyTorch sends such texts where others send CUDA's IPC handles.
//!
//! A ticket names the socket of the exporting process and holds a random key of the block, which is all the authority that
//! there is to it. `teller` is the exporter's side, `opened` the importer's.

use crate::heap::{block, place, put};
use crate::status::{Failure, guard, xseg_status};
use crate::{opened, teller};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;

/// Bytes of a ticket at most, with the zero at its end.
pub const XSEG_TICKET_BYTES: usize = 128;

/// What a block is asked for by: random, so that nobody guesses it.
pub(crate) type Key = [u8; 16];
/// How a request begins; the key follows.
pub(crate) const MAGIC: [u8; 8] = *b"xsegtkt\x01";
/// A request's bytes.
pub(crate) const REQUEST: usize = MAGIC.len() + size_of::<Key>();
/// First byte of an answer: the export follows, or the text of a refusal.
pub(crate) const GRANTED: u8 = 1;
pub(crate) const REFUSED: u8 = 2;

/// What a ticket says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ticket {
    /// The exporting process, for texts.
    pub(crate) process: u32,
    /// Its socket in the abstract namespace.
    pub(crate) socket: String,
    pub(crate) key: Key,
}

impl fmt::Display for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "xseg-ticket 1 {} {} {:032x}", self.process, self.socket, u128::from_be_bytes(self.key))
    }
}

impl Ticket {
    fn parse(text: &[u8]) -> Result<Self, Failure> {
        let none = || {
            let why = "this is no ticket of xseg; a tensor of PyTorch's own allocator? Call xseg.install() in the process that sends it, \
                       too, or in neither";
            failure(why.into())
        };
        let text = std::str::from_utf8(text).map_err(|_| none())?;
        let mut words = text.split(' ');
        if words.next() != Some("xseg-ticket") {
            return Err(none());
        }
        match words.next() {
            Some("1") => {}
            Some(_) => {
                let why = "the ticket is of another version of xseg; use one version in both processes";
                return Err(failure(why.into()));
            }
            None => return Err(none()),
        }
        let process = words.next().and_then(|word| word.parse().ok());
        let socket = words.next().filter(|word| word.starts_with("xseg-"));
        let key = words.next().filter(|word| word.len() == 32);
        let key = key.and_then(|word| u128::from_str_radix(word, 16).ok());
        match (process, socket, key, words.next()) {
            (Some(process), Some(socket), Some(key), None) => {
                Ok(Self { process, socket: socket.to_owned(), key: key.to_be_bytes() })
            }
            _ => Err(none()),
        }
    }
}

pub(crate) fn failure(why: String) -> Failure {
    Failure { status: xseg_status::XSEG_SHARE, why: format!("memory cannot be shared: {why}") }
}

/// A ticket for a live block of a device's heap: text of at most `XSEG_TICKET_BYTES`, with a zero at its end. Other processes of
/// this user (and this one) give it to `xseg_device_open`, any number of times until the block is freed; its memory goes to nobody
/// else before they have all closed it. It is a secret like the block's content. Asked again the answer is the same, and never
/// again that of another block. The first ticket starts a thread that answers the others.
///
/// # Safety
/// `ticket` is valid for writing `capacity` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_device_ticket(block: *const c_void, ticket: *mut c_char, capacity: usize) -> xseg_status {
    guard(|| {
        place(ticket, "ticket")?;
        let text = format!("{}\0", teller::ticket(self::block(block)?)?);
        if text.len() > capacity {
            return Err(Failure::argument("`capacity` is less than XSEG_TICKET_BYTES"));
        }
        // SAFETY: it fits in, and the place is the caller's.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), ticket.cast::<u8>(), text.len()) };
        Ok(())
    })
}

/// Maps the block that a ticket of another process is for, by the heap of a device, which must be the block's. `address` gets where it
/// starts and `bytes`, which may be null, its length. A block that is open already is found where it is; each call needs an
/// `xseg_device_close`. What is read must have been written before. Waits 10 s at most for the other process's answer, and then as
/// `xseg_import_receive` for what it hands over. While it is open it costs two descriptors there and one here.
///
/// # Safety
/// `ticket` is null or a text that ends with a zero; `address` and `bytes` are null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_device_open(
    device: c_int,
    ticket: *const c_char,
    address: *mut *mut c_void,
    bytes: *mut u64,
) -> xseg_status {
    guard(|| {
        place(ticket.cast_mut(), "ticket")?;
        place(address, "address")?;
        // SAFETY: a text (the caller's promise).
        let text = unsafe { CStr::from_ptr(ticket) };
        let found = opened::open(device, &Ticket::parse(text.to_bytes())?)?;
        // SAFETY: the caller's.
        unsafe { put(bytes, found.bytes) };
        // SAFETY: not null, and the caller's.
        unsafe { put(address, std::ptr::with_exposed_provenance_mut(found.address as usize)) };
        Ok(())
    })
}

/// Ends one `xseg_device_open`. After the last one of a block it is unmapped when the work queued so far has passed, and the exporter
/// told, by a thread of the library. Never waits. In a forked child it does nothing.
///
/// # Safety
/// No work that is queued after the last call uses the memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xseg_device_close(address: *mut c_void) -> xseg_status {
    guard(|| opened::close(block(address)?))
}
