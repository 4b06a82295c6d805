//! The exporter's side: is the import over?

use super::message::{BATCH, Offer, Piece, Said, encode_pieces, encode_refusal};
use super::socket::{Patience, ready, receive_all_or_leave, send, send_in_turn, system};
use crate::error::ShareFault;
use crate::process::Process;
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{Shutdown, shutdown};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

/// The exporter's end of the pair.
#[derive(Debug)]
struct End {
    socket: OwnedFd,
    /// The process that exported: in a forked child the end is a copy, and what the importer says is for the parent.
    owner: Process,
    /// Locked while a message is read, so that nobody sees one that is neither there nor noted.
    heard: Mutex<Heard>,
}

/// What the importer has said so far.
#[derive(Debug, Default)]
struct Heard {
    /// Its pidfd: it may have mapped something from then on.
    process: Option<OwnedFd>,
    done: bool,
}

impl End {
    /// Reads one message; `None` where there is none. [`Errno::MFILE`]: there is one whose descriptors this process may not open;
    /// it stays there.
    fn hear(&self) -> Result<Option<Said>, Errno> {
        let mut heard = self.heard.lock();
        let mut bytes = [0; 8];
        let received = match receive_all_or_leave(self.socket.as_fd(), &mut bytes) {
            Ok(received) => received,
            Err(Errno::AGAIN) => return Ok(None),
            Err(error) => return Err(error),
        };
        let said = Said::decode(&bytes[..received.len]);
        match said {
            Some(Said::Hello) if heard.process.is_none() => heard.process = received.descriptors.into_iter().next(),
            Some(Said::Done) => heard.done = true,
            _ => {}
        }
        // No bytes: the end of what was said. Others are of no concern, but for their having been there.
        Ok(if received.len == 0 { None } else { said.or(Some(Said::Hello)) })
    }

    fn has_hung_up(&self, limit: Duration) -> bool {
        // A system that says nothing (a limit of no descriptors, say) has not said that it is over (I13).
        ready(self.socket.as_fd(), PollFlags::empty(), Some(limit)).is_ok_and(|found| !found.is_empty())
    }
}

/// Which of these imports may be over, since their importers have hung up. One system call for all.
pub(crate) fn hung_up<'a>(leases: impl Iterator<Item = &'a Lease>) -> Vec<bool> {
    let ask = |lease: &'a Lease| PollFd::from_borrowed_fd(lease.0.socket.as_fd(), PollFlags::empty());
    let mut asked: Vec<_> = leases.map(ask).collect();
    match poll(&mut asked, Some(&Timespec::default())) {
        Ok(_) => asked.iter().map(|one| !one.revents().is_empty()).collect(),
        // A signal, or more than this process may open by now: each is to be asked by itself.
        Err(_) => vec![true; asked.len()],
    }
}

/// An import that is open, as the exporter sees it.
#[derive(Debug, Clone)]
pub(crate) struct Lease(Arc<End>);

impl Lease {
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self(Arc::new(End { socket, owner: Process::this(), heard: Mutex::default() }))
    }

    /// Queues what is offered, with handles, if any are given. False: those could not be queued, since the user's processes
    /// have too many descriptors on their way, and are to be asked for.
    pub(crate) fn offer(&self, offer: &Offer, first: &[(Piece, OwnedFd)]) -> Result<bool, ShareFault> {
        let (pieces, descriptors) = parts(first);
        let socket = self.0.socket.as_fd();
        let done = match send(socket, &offer.encode(&pieces), &descriptors) {
            Err(Errno::TOOMANYREFS) => send(socket, &offer.encode(&[]), &[]).map(|()| false),
            done => done.map(|()| true),
        };
        done.map_err(|error| system("the offer cannot be queued", error))
    }

    /// For handing over handles on a thread.
    pub(crate) fn server(&self) -> Server {
        Server(Arc::clone(&self.0))
    }

    /// Is the import over: done, never begun, or its process gone? Waits at most `limit` for that.
    pub(crate) fn is_over(&self, limit: Duration) -> bool {
        let end = &*self.0;
        if !end.owner.is_this() || !end.has_hung_up(limit) {
            return false;
        }
        // All that was said. It ends: nobody can say more.
        loop {
            match end.hear() {
                Ok(Some(_)) | Err(Errno::CONNRESET | Errno::MSGSIZE) => {}
                Err(Errno::MFILE) => {
                    // Which process it is cannot be known yet, which may have its memory mapped.
                    tracing::warn!(
                        "an import is kept open: no descriptor is left to look for its process (`ulimit -n`)"
                    );
                    return false;
                }
                Ok(None) | Err(_) => break,
            }
        }
        let heard = end.heard.lock();
        match &heard.process {
            Some(process) if !heard.done => {
                // Readable once the process has ended, with all that the kernel does for it.
                let gone = ready(process.as_fd(), PollFlags::IN, Some(limit));
                gone.is_ok_and(|found| found.contains(PollFlags::IN))
            }
            _ => true,
        }
    }

    /// Ends all talk; the importer keeps what it has mapped.
    pub(crate) fn hang_up(&self) {
        if self.0.owner.is_this() {
            // Refused where the importer did so before.
            let _ = shutdown(self.0.socket.as_fd(), Shutdown::Both);
        }
    }
}

fn parts(handles: &[(Piece, OwnedFd)]) -> (Vec<Piece>, Vec<BorrowedFd<'_>>) {
    debug_assert!(handles.len() <= BATCH, "one message takes no more");
    handles.iter().map(|(piece, descriptor)| (*piece, descriptor.as_fd())).unzip()
}

/// Hands over what the importer asks for.
#[derive(Debug)]
pub(crate) struct Server(Arc<End>);

impl Server {
    /// Waits until the importer asks for more. False: it will not.
    pub(crate) fn is_asked(&self) -> bool {
        loop {
            match self.0.hear() {
                Ok(Some(Said::Next)) => return true,
                Ok(Some(Said::Done)) => return false,
                Ok(Some(Said::Hello)) => continue,
                Ok(None) => {}
                Err(error @ Errno::MFILE) => {
                    self.refuse(&system("which process imports cannot be seen", error).to_string());
                    return false;
                }
                Err(_) => return false,
            }
            // An importer that closed its half will not ask, and what it closed is readable for ever.
            match ready(self.0.socket.as_fd(), PollFlags::IN | PollFlags::RDHUP, None) {
                Ok(found) if found.intersects(PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR | PollFlags::NVAL) => {
                    return false;
                }
                Ok(_) => {}
                Err(_) => return false,
            }
        }
    }

    /// Queues the next handles.
    pub(crate) fn queue(&self, pieces: &[(Piece, OwnedFd)]) -> Result<(), ShareFault> {
        let (pieces, descriptors) = parts(pieces);
        let mut patience = Patience::default();
        let sent = send_in_turn(self.0.socket.as_fd(), &encode_pieces(&pieces), &descriptors, &mut patience);
        sent.map_err(|error| system("descriptors cannot be queued", error))
    }

    /// Tells the importer why there is no more.
    pub(crate) fn refuse(&self, why: &str) {
        // An importer that is gone needs no reason.
        let _ = send(self.0.socket.as_fd(), &encode_refusal(why), &[]);
    }
}
