//! Messages with descriptors over Unix sockets. No call here blocks for longer than it says.

use super::message::{BATCH, malformed};
use crate::error::ShareFault;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::{Errno, IoSlice, IoSliceMut, retry_on_intr};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recv, recvmsg, sendmsg, socketpair,
};
use std::fmt;
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// Longest wait for what the other side owes: all waits of one exchange together.
const PATIENCE: Duration = Duration::from_secs(10);
/// What a caller's own socket carries with the one descriptor of an export.
pub(super) const MARK: [u8; 8] = *b"xsegfd\n\x01";

/// What came.
#[derive(Debug)]
pub(super) struct Received {
    /// Bytes of it.
    pub(super) len: usize,
    /// Its descriptors, closed when dropped.
    pub(super) descriptors: Vec<OwnedFd>,
}

pub(super) fn system(what: &str, error: Errno) -> ShareFault {
    ShareFault::system(what, &error.into())
}

/// Why something that needed a descriptor was refused, where that is so because this process may have no more of them: drivers say
/// it in words of their own, or not at all.
pub(crate) fn no_descriptor(what: &str) -> Option<ShareFault> {
    match eventfd(0, EventfdFlags::CLOEXEC) {
        Err(error @ (Errno::MFILE | Errno::NFILE)) => Some(system(what, error)),
        _ => None,
    }
}

/// Asked now and then by who waits: is it waited for still?
pub(crate) type GoOn = Box<dyn FnMut() -> bool + Send>;
/// Time between two such questions.
const SLICE: Duration = Duration::from_millis(50);

/// What is left of the longest wait. Only waiting counts: what this side does meanwhile may take its time.
pub(crate) struct Patience {
    all: Duration,
    left: Duration,
    go_on: Option<GoOn>,
}

impl fmt::Debug for Patience {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Patience").field("left", &self.left).finish_non_exhaustive()
    }
}

impl Patience {
    /// For waits of `all` together.
    pub(crate) const fn new(all: Duration) -> Self {
        Self { all, left: all, go_on: None }
    }

    /// As the default, for as long as `go_on` says.
    pub(crate) fn asking(go_on: GoOn) -> Self {
        Self { go_on: Some(go_on), ..Self::default() }
    }

    fn goes_on(&mut self) -> bool {
        self.go_on.as_mut().is_none_or(|go_on| go_on())
    }

    /// Waits for one of `events` or a hang-up.
    pub(super) fn ready(&mut self, socket: BorrowedFd<'_>, events: PollFlags) -> Result<(), ShareFault> {
        loop {
            let start = Instant::now();
            let slice = if self.go_on.is_some() { self.left.min(SLICE) } else { self.left };
            let found = ready(socket, events, Some(slice));
            self.left = self.left.saturating_sub(start.elapsed());
            match found {
                Ok(found) if !found.is_empty() => return Ok(()),
                Ok(_) if self.left.is_zero() => return Err(ShareFault::Silent(self.all)),
                Ok(_) if self.goes_on() => {}
                Ok(_) => return Err(ShareFault::Interrupted),
                Err(error) => return Err(system("the socket cannot be waited for", error)),
            }
        }
    }

    /// Waits a moment for what cannot be polled for. False: there was enough waiting.
    fn pause(&mut self) -> bool {
        const MOMENT: Duration = Duration::from_millis(1);
        let more = !self.left.is_zero() && self.goes_on();
        if more {
            std::thread::sleep(MOMENT);
            self.left = self.left.saturating_sub(MOMENT);
        }
        more
    }
}

impl Default for Patience {
    fn default() -> Self {
        Self::new(PATIENCE)
    }
}

/// A connected pair that keeps messages apart.
pub(super) fn pair() -> Result<(OwnedFd, OwnedFd), ShareFault> {
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
        .map_err(|error| system("no pair of sockets", error))
}

/// Sends one message. Never waits: a peer that does not read is no reason to stand still.
pub(super) fn send(socket: BorrowedFd<'_>, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(BATCH))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(Errno::MSGSIZE);
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let sent = retry_on_intr(|| sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags))?;
    if sent == bytes.len() { Ok(()) } else { Err(Errno::MSGSIZE) }
}

/// As [`send`], tried again for a while where the user's processes have too many descriptors on their way to others, who
/// take them by and by.
pub(super) fn send_in_turn(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
    patience: &mut Patience,
) -> Result<(), Errno> {
    loop {
        match send(socket, bytes, descriptors) {
            Err(Errno::TOOMANYREFS) if patience.pause() => {}
            done => return done,
        }
    }
}

/// Takes what is there. Never waits: [`Errno::AGAIN`] where there is nothing; no bytes where the other side is gone.
/// [`Errno::MFILE`] where this process may open too few descriptors for all that came: then all of them are lost.
pub(super) fn receive(socket: BorrowedFd<'_>, bytes: &mut [u8]) -> Result<Received, Errno> {
    take(socket, bytes, RecvFlags::empty())
}

/// As [`receive`], but what has too many descriptors for this process stays where it is, and may be had later. For one thread
/// at a time.
pub(super) fn receive_all_or_leave(socket: BorrowedFd<'_>, bytes: &mut [u8]) -> Result<Received, Errno> {
    let seen = take(socket, bytes, RecvFlags::PEEK);
    if matches!(seen, Ok(_) | Err(Errno::MSGSIZE)) {
        // Without room for its descriptors, of which `seen` has copies. Nobody else reads: it is the same message.
        retry_on_intr(|| recv(socket, &mut [0_u8; 1], RecvFlags::DONTWAIT))?;
    }
    seen
}

fn take(socket: BorrowedFd<'_>, bytes: &mut [u8], how: RecvFlags) -> Result<Received, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(BATCH))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = how | RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let message = retry_on_intr(|| recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut control, flags))?;
    let mut descriptors = Vec::new();
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = part {
            descriptors.extend(rights);
        }
    }
    // What came so far is closed on these returns. Cut off is what there is no room for here, or no number in this process.
    if message.flags.contains(ReturnFlags::TRUNC)
        || descriptors.len() >= BATCH && message.flags.contains(ReturnFlags::CTRUNC)
    {
        return Err(Errno::MSGSIZE);
    }
    if message.flags.contains(ReturnFlags::CTRUNC) {
        return Err(Errno::MFILE);
    }
    Ok(Received { len: message.bytes, descriptors })
}

/// Waits until one of `events` or a hang-up is there, at most `limit` (`None`: for ever); what is there. Signals do not end it.
pub(super) fn ready(socket: BorrowedFd<'_>, events: PollFlags, limit: Option<Duration>) -> Result<PollFlags, Errno> {
    let until = limit.and_then(|limit| Instant::now().checked_add(limit));
    let mut asked = [PollFd::from_borrowed_fd(socket, events)];
    loop {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        match poll(&mut asked, left.as_ref()) {
            Ok(0) => return Ok(PollFlags::empty()),
            Ok(_) => return Ok(asked[0].revents()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
}

fn unconnected(what: &str) -> ShareFault {
    ShareFault::System(format!("{what}: it is not connected; connect it, or accept a connection where it listens"))
}

/// Sends the descriptor of an export over a socket of the caller's.
pub(crate) fn pass_on(
    socket: BorrowedFd<'_>,
    export: BorrowedFd<'_>,
    mut patience: Patience,
) -> Result<(), ShareFault> {
    loop {
        match send_in_turn(socket, &MARK, &[export], &mut patience) {
            Ok(()) => return Ok(()),
            Err(Errno::PIPE | Errno::CONNRESET) => return Err(ShareFault::Ended),
            Err(Errno::NOTCONN) => return Err(unconnected("the export cannot be sent over this socket")),
            Err(Errno::AGAIN) => patience.ready(socket, PollFlags::OUT)?,
            Err(error) => return Err(system("the export cannot be sent over this socket", error)),
        }
    }
}

/// Takes the descriptor of an export from a socket of the caller's.
pub(crate) fn take_over(socket: BorrowedFd<'_>, patience: &mut Patience) -> Result<OwnedFd, ShareFault> {
    let (mut mark, mut have, mut export) = ([0; MARK.len()], 0, None);
    while have < mark.len() {
        match receive(socket, &mut mark[have..]) {
            Ok(received) if received.len == 0 => return Err(ShareFault::Ended),
            Ok(received) => {
                have += received.len;
                for descriptor in received.descriptors {
                    if export.replace(descriptor).is_some() {
                        return Err(malformed("more than one descriptor came"));
                    }
                }
                if mark[..have] != MARK[..have] {
                    return Err(malformed("something else than an export came"));
                }
            }
            Err(Errno::CONNRESET) => return Err(ShareFault::Ended),
            // Streams say the latter.
            Err(Errno::NOTCONN | Errno::INVAL) => {
                return Err(unconnected("no export can be received from this socket"));
            }
            Err(Errno::AGAIN) => patience.ready(socket, PollFlags::IN)?,
            Err(error) => return Err(system("no export can be received from this socket", error)),
        }
    }
    export.ok_or_else(|| malformed("no descriptor came with it"))
}
