//! The importer's side.

use super::message::{LONGEST, Offer, Piece, Said, decode_pieces, malformed};
use super::socket::{Patience, Received, receive, send, send_in_turn, system};
use crate::error::ShareFault;
use crate::process::Process;
use parking_lot::Mutex;
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{Shutdown, shutdown};
use rustix::process::{PidfdFlags, getpid, pidfd_open};
use std::os::fd::{AsFd, OwnedFd};

/// What ties an import to its exporter. The exporter keeps the memory until this is done with or the process ends.
#[derive(Debug)]
pub(crate) struct Tie {
    socket: OwnedFd,
    /// The process that imports: a forked child has a copy, whose end means nothing.
    owner: Process,
    /// Handles that came with the offer.
    first: Vec<(Piece, OwnedFd)>,
    /// For all that the exporter is asked for.
    patience: Mutex<Patience>,
}

impl Tie {
    /// Takes the descriptor of an export, and what it offers. The exporter has `patience` for the rest.
    pub(crate) fn open(export: OwnedFd, patience: Patience) -> Result<(Self, Offer), ShareFault> {
        let mut tie =
            Self { socket: export, owner: Process::this(), first: Vec::new(), patience: Mutex::new(patience) };
        let mut bytes = [0; LONGEST];
        // Queued before the descriptor was given away, so that nothing is waited for.
        let Received { len, descriptors } = match receive(tie.socket.as_fd(), &mut bytes) {
            Ok(received) => received,
            Err(Errno::AGAIN) => return Err(ShareFault::Used),
            Err(Errno::NOTSOCK) => return Err(malformed("it is no socket")),
            Err(Errno::NOTCONN | Errno::INVAL) => return Err(malformed("it is a socket that is not connected")),
            Err(error) => return Err(broken(error)),
        };
        if len == 0 {
            return Err(ShareFault::Ended);
        }
        let (offer, first) = Offer::decode(&bytes[..len], descriptors.len())?;
        tie.first = first.into_iter().zip(descriptors).collect();
        Ok((tie, offer))
    }

    /// Tells the exporter who this is, before anything is mapped: from now on the import is over only when it is
    /// [`Tie::done`], or with this process.
    pub(crate) fn hello(&self) -> Result<(), ShareFault> {
        let (socket, hello) = (self.socket.as_fd(), Said::Hello.encode());
        let process = pidfd_open(getpid(), PidfdFlags::empty());
        let sent = match &process {
            Ok(process) => send_in_turn(socket, &hello, &[process.as_fd()], &mut self.patience.lock()),
            Err(error) => Err(*error),
        };
        match sent {
            // The exporter may be gone; what it queued is here all the same.
            Ok(()) | Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => Ok(()),
            Err(error @ (Errno::MFILE | Errno::NFILE | Errno::TOOMANYREFS)) => {
                Err(system("the exporter cannot be told which process this is", error))
            }
            // Where there are no pidfds the end of this process shows as the socket's end alone, which may come a little early.
            Err(error) => {
                tracing::debug!(%error, "an import goes on without a pidfd");
                send(socket, &hello, &[]).or(Ok(()))
            }
        }
    }

    /// The next handles, in address order.
    pub(crate) fn next(&mut self) -> Result<Vec<(Piece, OwnedFd)>, ShareFault> {
        if !self.first.is_empty() {
            return Ok(std::mem::take(&mut self.first));
        }
        send(self.socket.as_fd(), &Said::Next.encode(), &[]).map_err(broken)?;
        let mut bytes = [0; LONGEST];
        let Received { len, descriptors } = match receive(self.socket.as_fd(), &mut bytes) {
            Err(Errno::AGAIN) => {
                self.patience.get_mut().ready(self.socket.as_fd(), PollFlags::IN)?;
                receive(self.socket.as_fd(), &mut bytes).map_err(broken)?
            }
            other => other.map_err(broken)?,
        };
        if len == 0 {
            return Err(ShareFault::Ended);
        }
        let pieces = decode_pieces(&bytes[..len], descriptors.len())?;
        Ok(pieces.into_iter().zip(descriptors).collect())
    }

    /// Everything is unmapped: the exporter may have its memory back. Never waits.
    pub(crate) fn done(self) {
        if self.owner.is_this() {
            // Refused by an exporter that is gone, which then wants nothing back.
            let _ = send(self.socket.as_fd(), &Said::Done.encode(), &[]);
            // Also where a forked child holds a copy of the descriptor.
            let _ = shutdown(self.socket.as_fd(), Shutdown::Both);
        }
    }
}

fn broken(error: Errno) -> ShareFault {
    match error {
        Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN => ShareFault::Ended,
        Errno::MSGSIZE => malformed("a message is longer than any that an exporter sends"),
        Errno::MFILE => system("the descriptors of a message did not all arrive", error),
        error => system("the exporter cannot be heard", error),
    }
}

#[cfg(test)]
impl Tie {
    /// A copy of the descriptor, as a forked child has it.
    pub(super) fn try_clone(&self) -> OwnedFd {
        self.socket.try_clone().expect("a descriptor is left")
    }
}
