//! Messages with descriptors over Unix sockets. No call here blocks for longer than it says.

use super::message::{BATCH, malformed};
use crate::error::ShareFault;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, IoSlice, IoSliceMut, retry_on_intr};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// Longest wait for a message that the other side owes.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);
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
    let advice = match error {
        Errno::MFILE | Errno::NFILE | Errno::TOOMANYREFS => {
            "; raise the limit of open files (`ulimit -n`) or end imports"
        }
        _ => "",
    };
    ShareFault::System(format!("{what}: {error}{advice}"))
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
pub(super) fn send_in_turn(socket: BorrowedFd<'_>, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let start = Instant::now();
    loop {
        match send(socket, bytes, descriptors) {
            Err(Errno::TOOMANYREFS) if start.elapsed() < PATIENCE => std::thread::sleep(Duration::from_millis(1)),
            done => return done,
        }
    }
}

/// Takes what is there. Never waits: [`Errno::AGAIN`] where there is nothing; no bytes where the other side is gone.
pub(super) fn receive(socket: BorrowedFd<'_>, bytes: &mut [u8]) -> Result<Received, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(BATCH))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let message = retry_on_intr(|| recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut control, flags))?;
    let mut descriptors = Vec::new();
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = part {
            descriptors.extend(rights);
        }
    }
    // What came so far is closed on these returns.
    if message.flags.contains(ReturnFlags::CTRUNC) {
        return Err(Errno::MFILE);
    }
    if message.flags.contains(ReturnFlags::TRUNC) {
        return Err(Errno::MSGSIZE);
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

/// Sends the descriptor of an export over a socket of the caller's.
pub(crate) fn pass_on(socket: BorrowedFd<'_>, export: BorrowedFd<'_>) -> Result<(), ShareFault> {
    loop {
        match send_in_turn(socket, &MARK, &[export]) {
            Ok(()) => return Ok(()),
            Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => return Err(ShareFault::Ended),
            Err(Errno::AGAIN) => wait(socket, PollFlags::OUT)?,
            Err(error) => return Err(system("the export cannot be sent over this socket", error)),
        }
    }
}

/// Takes the descriptor of an export from a socket of the caller's.
pub(crate) fn take_over(socket: BorrowedFd<'_>) -> Result<OwnedFd, ShareFault> {
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
            Err(Errno::CONNRESET | Errno::NOTCONN) => return Err(ShareFault::Ended),
            Err(Errno::AGAIN) => wait(socket, PollFlags::IN)?,
            Err(error) => return Err(system("no export can be received from this socket", error)),
        }
    }
    export.ok_or_else(|| malformed("no descriptor came with it"))
}

fn wait(socket: BorrowedFd<'_>, event: PollFlags) -> Result<(), ShareFault> {
    match ready(socket.as_fd(), event, Some(PATIENCE)) {
        Ok(found) if found.is_empty() => Err(ShareFault::Silent(PATIENCE)),
        Ok(_) => Ok(()),
        Err(error) => Err(system("the socket cannot be waited for", error)),
    }
}
