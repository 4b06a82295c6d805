//! The importer's side of tickets: blocks that are open, each mapped once, and the thread that sees them off.

use crate::devices::{device, forked};
use crate::leaving::{self, unless_leaving};
use crate::status::Failure;
use crate::teller::{is_ours, read, say};
use crate::tickets::{GRANTED, Key, MAGIC, REFUSED, Ticket, failure};
use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use std::collections::HashMap;
use std::ffi::c_int;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};
use xseg::error::ShareFault;
use xseg::units::UNIT;
use xseg::{Error, Heap};

/// Longest wait for the exporter's answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Pauses between two looks at an import that is still in use.
const SHORT: Duration = Duration::from_millis(20);
const LONG: Duration = Duration::from_secs(1);
/// Longest text of a refusal that is read.
const LONGEST: usize = 2000;

/// Where a block is mapped.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Found {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
}

/// A block that is open or being opened.
#[derive(Debug, Default)]
struct Slot {
    /// Locked while it is imported, so that others who want it wait for that.
    found: Mutex<Option<Found>>,
}

/// By device and key: a slot, and how many opened it.
#[derive(Debug, Default)]
struct Opened {
    slots: HashMap<(c_int, Key), (Arc<Slot>, usize)>,
    by_address: HashMap<u64, (c_int, Key)>,
}

impl Opened {
    /// One user fewer; true for the last one.
    fn leave(&mut self, which: (c_int, Key)) -> bool {
        let Some((_, users)) = self.slots.get_mut(&which) else { return false };
        *users -= 1;
        *users == 0 && self.slots.remove(&which).is_some()
    }
}

/// Never locked while anything is waited for.
static OPENED: Mutex<Option<Opened>> = Mutex::new(None);

/// The block of a ticket, imported unless it is open.
pub(crate) fn open(number: c_int, ticket: &Ticket) -> Result<Found, Failure> {
    forked()?;
    let heap = &device(number)?.heap;
    let which = (number, ticket.key);
    let slot = {
        let mut opened = OPENED.lock();
        let (slot, users) = opened.get_or_insert_default().slots.entry(which).or_default();
        *users += 1;
        Arc::clone(slot)
    };
    let mut found = slot.found.lock();
    if let Some(found) = *found {
        return Ok(found);
    }
    let done = import(heap, ticket);
    let mut opened = OPENED.lock();
    let opened = opened.get_or_insert_default();
    match done {
        Ok(new) => {
            *found = Some(new);
            opened.by_address.insert(new.address, which);
            Ok(new)
        }
        Err(error) => {
            // Others who wait for it try for themselves.
            opened.leave(which);
            Err(error)
        }
    }
}

/// One user of a block fewer.
pub(crate) fn close(address: u64) -> Result<(), Failure> {
    if forked().is_err() {
        // The parent has it open; here is only a copy of the books.
        return Ok(());
    }
    let which = {
        let mut opened = OPENED.lock();
        let opened = opened.get_or_insert_default();
        let which = *opened
            .by_address
            .get(&address)
            .ok_or_else(|| failure(format!("{address:#x} is not open; was it closed more often than opened?")))?;
        if !opened.leave(which) {
            return Ok(());
        }
        opened.by_address.remove(&address);
        which
    };
    see_off(&device(which.0)?.heap, address)
}

fn import(heap: &Heap, ticket: &Ticket) -> Result<Found, Failure> {
    let process = ticket.process;
    let gone = || {
        failure(format!(
            "process {process}, which has the memory, has ended or is in another container; keep it until all have opened what it shares"
        ))
    };
    let until = Instant::now() + PATIENCE;
    let stream = connected(&ticket.socket).map_err(|error| match error {
        Errno::CONNREFUSED | Errno::NOENT => gone(),
        Errno::AGAIN => failure(ShareFault::Silent(PATIENCE).to_string()),
        error => {
            let what = format!("process {process}, which has the memory, cannot be reached");
            failure(ShareFault::system(what, &error.into()).to_string())
        }
    })?;
    if !is_ours(&stream) {
        return Err(failure(format!("process {process}, which has the memory, is of another user")));
    }
    if !say(&stream, &[&MAGIC[..], &ticket.key].concat()) {
        return Err(gone());
    }
    let mut answer = [0];
    match (read(&stream, &mut answer, until), answer) {
        (Ok(1), [GRANTED]) => {}
        (Ok(1), [REFUSED]) => {
            let mut text = [0; LONGEST];
            let length = read(&stream, &mut text, until).unwrap_or(0);
            let text = String::from_utf8_lossy(&text[..length]);
            return Err(failure(format!("process {process}, which has the memory, refused it: {text}")));
        }
        (Ok(1), _) => return Err(failure(format!("process {process} gave an answer that xseg does not give"))),
        (Ok(_), _) => return Err(gone()),
        (Err(error), _) if error.kind() == std::io::ErrorKind::TimedOut => {
            return Err(failure(ShareFault::Silent(PATIENCE).to_string()));
        }
        (Err(_), _) => return Err(gone()),
    }
    // What is left of it: one patience for all that the exporter owes.
    let imported = heap.receive_within(&stream, until.saturating_duration_since(Instant::now()))?;
    let bytes = imported.len();
    Ok(Found { address: imported.into_raw(), bytes })
}

/// A connection, tried for as long as an answer is waited for.
fn connected(name: &str) -> Result<UnixStream, Errno> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    set_socket_timeout(&socket, Timeout::Send, Some(PATIENCE))?;
    connect(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    Ok(socket.into())
}

/// An import that is over for this process, but perhaps not for its device.
type Ended = (&'static Heap, u64);

/// Ends an import on a thread of its own, which waits for the device: the exporter has its memory back even if this process does
/// nothing more.
fn see_off(heap: &'static Heap, address: u64) -> Result<(), Failure> {
    static THREAD: Mutex<Option<Sender<Ended>>> = Mutex::new(None);
    let mut thread = THREAD.lock();
    if thread.is_none() {
        leaving::prepare();
        let (sender, ended) = channel();
        let builder = std::thread::Builder::new().name("xseg imports".into());
        if builder.spawn(move || end_all(&ended)).is_ok() {
            *thread = Some(sender);
        }
    }
    match thread.as_ref().map(|thread| thread.send((heap, address))) {
        Some(Ok(())) => Ok(()),
        // Without it the import is given back by the heap's next slow request.
        _ => Ok(heap.end_import(address)?),
    }
}

fn end_all(ended: &Receiver<Ended>) {
    // Those that work, or a capture, uses for longer than the policy waits.
    let mut late: Vec<&Heap> = Vec::new();
    let mut pause = SHORT;
    loop {
        let next = match late.is_empty() {
            true => ended.recv().map_err(|_| RecvTimeoutError::Disconnected),
            false => ended.recv_timeout(pause),
        };
        match next {
            Ok((heap, address)) => {
                let done = unless_leaving(|| match late.is_empty() {
                    true => heap.close_import(address),
                    // Others need not wait for what will not be ready.
                    false => heap.end_import(address).and(Err(ShareFault::InUse.into())),
                });
                let Some(done) = done else { return };
                // The driver's refusal is tried again by the heap itself.
                if let Err(Error::Share(ShareFault::InUse)) = done {
                    late.push(heap);
                    pause = SHORT;
                }
            }
            Err(RecvTimeoutError::Timeout) => {
                let open = still_open();
                late.retain(|heap| {
                    let imported = unless_leaving(|| {
                        heap.tick();
                        heap.stats().imported
                    });
                    imported.is_some_and(|imported| imported > open)
                });
                pause = (pause * 2).min(LONG);
            }
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// Bytes of blocks that are open. (Those of all devices: at worst one is looked at by its heap's next slow request.)
fn still_open() -> u64 {
    let slots: Vec<Arc<Slot>> =
        OPENED.lock().iter().flat_map(|opened| opened.slots.values()).map(|(slot, _)| Arc::clone(slot)).collect();
    let found = slots.iter().filter_map(|slot| slot.found.try_lock().and_then(|found| *found));
    found.map(|found| found.bytes.next_multiple_of(UNIT)).sum()
}
