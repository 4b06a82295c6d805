//! The exporter's side of tickets: which blocks have one, and the thread that exports them to who shows it.

use crate::devices::{devices, forked};
use crate::leaving::{self, unless_leaving};
use crate::noted;
use crate::status::Failure;
use crate::tickets::{GRANTED, Key, MAGIC, REFUSED, REQUEST, Ticket, failure};
use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send, sockopt};
use rustix::process::{geteuid, getpid};
use rustix::rand::{GetRandomFlags, getrandom};
use std::collections::HashMap;
use std::fs::File;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};
use xseg::Heap;
use xseg::error::ShareFault;

/// How long an importer that has connected may take to say what it wants; others wait meanwhile.
const IMPATIENCE: Duration = Duration::from_secs(1);

/// A block with a ticket.
#[derive(Debug)]
pub(crate) struct Shared {
    heap: &'static Heap,
    address: u64,
    key: Key,
    /// Locked while it is exported, so that no free comes between, after which the address may be another block's.
    live: Mutex<bool>,
}

#[derive(Debug, Default)]
struct Book {
    by_key: HashMap<Key, Arc<Shared>>,
    by_address: HashMap<u64, Arc<Shared>>,
}

impl Book {
    fn enter(&mut self, shared: &Arc<Shared>) {
        self.by_key.insert(shared.key, Arc::clone(shared));
        self.by_address.insert(shared.address, Arc::clone(shared));
        SHARED.store(self.by_address.len(), Relaxed);
    }
}

static BOOK: Mutex<Option<Book>> = Mutex::new(None);
/// Blocks in it, so that frees need no lock while there are none. Who frees a block knows of its ticket, or nobody does yet.
static SHARED: AtomicUsize = AtomicUsize::new(0);
/// Name of this process's socket, once it is there.
static SOCKET: Mutex<Option<String>> = Mutex::new(None);
/// Its descriptor, for a forked child.
static LISTENER: AtomicI32 = AtomicI32::new(-1);

/// In a forked child, where nobody listens: who connects must not think so. Async-signal-safe.
pub(crate) fn in_child() {
    let listener = LISTENER.swap(-1, Relaxed);
    if listener >= 0 {
        // SAFETY: the copy of a descriptor whose owner is a thread that the child does not have.
        unsafe { libc::close(listener) };
    }
}

fn random<const N: usize>() -> Result<[u8; N], Failure> {
    let mut bytes = [0; N];
    let mut have = 0;
    while have < N {
        match getrandom(&mut bytes[have..], GetRandomFlags::empty()) {
            Ok(more) => have += more,
            Err(Errno::INTR) => {}
            Err(error) => return Err(failure(format!("the system has no random numbers: {error}"))),
        }
    }
    Ok(bytes)
}

/// The ticket of a block.
pub(crate) fn ticket(address: u64) -> Result<Ticket, Failure> {
    forked()?;
    let owner = devices().map(|(_, device)| &device.heap).find(|heap| heap.block_size(address).is_ok());
    let heap = owner.ok_or_else(|| {
        failure(format!(
            "{address:#x} is no live block of a device's heap; memory of a pool with an allocator of its own, and parts of a block, \
             cannot be shared: copy it to a tensor of its own"
        ))
    })?;
    let socket = socket()?;
    // Before the block is in the book, so that its free looks there.
    noted::want(noted::SHARED);
    let mut book = BOOK.lock();
    let book = book.get_or_insert_default();
    let key = match book.by_address.get(&address) {
        Some(shared) => shared.key,
        None => {
            let shared = Arc::new(Shared { heap, address, key: random()?, live: Mutex::new(true) });
            book.enter(&shared);
            shared.key
        }
    };
    Ok(Ticket { process: getpid().as_raw_pid().cast_unsigned(), socket, key })
}

/// A block is going to be freed. Waits for an export of it that is under way.
pub(crate) fn freeing(address: u64) -> Option<Arc<Shared>> {
    if SHARED.load(Relaxed) == 0 {
        return None;
    }
    let shared = {
        let mut book = BOOK.lock();
        let book = book.as_mut()?;
        let shared = book.by_address.remove(&address)?;
        book.by_key.remove(&shared.key);
        SHARED.store(book.by_address.len(), Relaxed);
        shared
    };
    *shared.live.lock() = false;
    Some(shared)
}

/// The free was refused: its ticket holds.
pub(crate) fn lives_on(shared: Arc<Shared>) {
    *shared.live.lock() = true;
    BOOK.lock().get_or_insert_default().enter(&shared);
}

/// The name of this process's socket, which is made by the first call.
fn socket() -> Result<String, Failure> {
    let mut socket = SOCKET.lock();
    if let Some(name) = &*socket {
        return Ok(name.clone());
    }
    let name = format!("xseg-{}-{:016x}", getpid().as_raw_pid(), u64::from_ne_bytes(random()?));
    let no_socket =
        |error: std::io::Error| failure(ShareFault::system("there is no socket for tickets", &error).to_string());
    let address = SocketAddr::from_abstract_name(&name).map_err(no_socket)?;
    let listener = UnixListener::bind_addr(&address).map_err(no_socket)?;
    LISTENER.store(listener.as_raw_fd(), Relaxed);
    leaving::prepare();
    let spare = spare();
    let thread = std::thread::Builder::new().name("xseg tickets".into()).spawn(move || serve(&listener, spare));
    if let Err(error) = thread {
        LISTENER.store(-1, Relaxed);
        return Err(failure(format!("there is no thread for tickets: {error}")));
    }
    *socket = Some(name.clone());
    Ok(name)
}

fn spare() -> Option<File> {
    File::open("/dev/null").ok()
}

/// Answers one after the other, for as long as the process lives. No lock is held while it waits.
///
/// `spare` is a descriptor that is given up at the limit of open files, so that who connects hears of that.
fn serve(listener: &UnixListener, mut spare: Option<File>) {
    loop {
        spare = spare.or_else(self::spare);
        match listener.accept() {
            Ok((stream, _)) => answer(&stream),
            Err(_) if spare.is_some() => {
                spare = None;
                if let Ok((stream, _)) = listener.accept() {
                    answer(&stream);
                    // Also where a forked child has a copy.
                    let _ = stream.shutdown(Shutdown::Both);
                }
            }
            // Others had it first.
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}

fn answer(stream: &UnixStream) {
    // Anyone on the machine can connect.
    if !is_ours(stream) || stream.set_write_timeout(Some(IMPATIENCE)).is_err() {
        return;
    }
    let mut request = [0; REQUEST];
    let until = Instant::now() + IMPATIENCE;
    if read(stream, &mut request, until).ok() != Some(REQUEST) {
        return;
    }
    let (magic, key) = request.split_at(MAGIC.len());
    let shared = BOOK.lock().as_ref().and_then(|book| book.by_key.get(key).cloned());
    let done = match shared {
        _ if magic != MAGIC => Err("the request is none that this version of xseg makes".to_owned()),
        None => Err("the block was freed".to_owned()),
        Some(shared) => {
            let live = shared.live.lock();
            match *live {
                true => match unless_leaving(|| shared.heap.export(shared.address)) {
                    Some(export) => export.map_err(|error| error.to_string()),
                    None => Err("the process is ending".to_owned()),
                },
                false => Err("the block was freed".to_owned()),
            }
        }
    };
    // An importer that is gone needs no answer; what was exported ends with it.
    let _ = match done {
        Ok(export) => match say(stream, &[GRANTED]) {
            true => export.send(stream).is_ok(),
            false => false,
        },
        Err(why) => say(stream, &[&[REFUSED], why.as_bytes()].concat()),
    };
}

/// Is the other side a process of this user, or of root?
pub(crate) fn is_ours(stream: impl AsFd) -> bool {
    sockopt::socket_peercred(stream).is_ok_and(|peer| peer.uid == geteuid() || peer.uid.is_root())
}

/// Sends all of it. Unlike a write it raises no signal where the other side is gone.
pub(crate) fn say(stream: impl AsFd, mut bytes: &[u8]) -> bool {
    while !bytes.is_empty() {
        match send(&stream, bytes, SendFlags::NOSIGNAL) {
            Ok(sent) => bytes = &bytes[sent..],
            Err(Errno::INTR) => {}
            Err(_) => return false,
        }
    }
    true
}

/// Reads until `bytes` is full, the other side has ended, or it is late; how many there are.
pub(crate) fn read(stream: &UnixStream, bytes: &mut [u8], until: Instant) -> std::io::Result<usize> {
    let mut have = 0;
    while have < bytes.len() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(std::io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match recv(stream, &mut bytes[have..], RecvFlags::empty()) {
            Ok((_, 0)) => break,
            Ok((_, more)) => have += more,
            Err(Errno::INTR | Errno::AGAIN) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(have)
}
