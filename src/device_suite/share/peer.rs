//! The other process: this program again, with a socket as its input, over which it is asked for one thing at a time.

use super::failed;
use crate::device_suite::Suite;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use xseg::Error;
use xseg::backend::Backend;

/// What `--child` is for it.
pub(crate) const KIND: &str = "share";
/// Longest wait for an answer.
const PATIENCE: Duration = Duration::from_secs(60);

/// What the other process is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ask {
    /// Receive an import (after what it has). Answer: bytes, microseconds.
    Receive,
    /// Check the import by a kernel, for a seed. Answer: wrong words.
    Check(u32),
    /// Write the import by a kernel, and wait for that.
    Fill(u32),
    /// Queue writes that take more than a second, and answer at once.
    Write,
    /// Close the import. Answer: microseconds.
    Close,
    /// Queue work of this many milliseconds and a check for a seed, drop the import, and answer at once.
    Drop(u32, u32),
    /// Wait for all work, and look after the heap. Answer: wrong words, bytes imported still.
    Settle,
    /// Receive and close so many imports, answering each. Then descriptors, reservations and KiB of addresses, before and
    /// after.
    Many(u32),
    /// Allocate so many MiB, write them for a seed, and send them.
    Send(u32, u32),
}

impl Ask {
    fn encode(self) -> [u8; 9] {
        let (name, a, b) = match self {
            Self::Receive => (b'r', 0, 0),
            Self::Check(seed) => (b'c', seed, 0),
            Self::Fill(seed) => (b'f', seed, 0),
            Self::Write => (b'w', 0, 0),
            Self::Close => (b'x', 0, 0),
            Self::Drop(milliseconds, seed) => (b'd', milliseconds, seed),
            Self::Settle => (b't', 0, 0),
            Self::Many(count) => (b'm', count, 0),
            Self::Send(mib, seed) => (b's', mib, seed),
        };
        let mut bytes = [name, 0, 0, 0, 0, 0, 0, 0, 0];
        bytes[1..5].copy_from_slice(&a.to_le_bytes());
        bytes[5..].copy_from_slice(&b.to_le_bytes());
        bytes
    }

    fn decode(bytes: [u8; 9]) -> Result<Self, Error> {
        let [name, a0, a1, a2, a3, b0, b1, b2, b3] = bytes;
        let (a, b) = (u32::from_le_bytes([a0, a1, a2, a3]), u32::from_le_bytes([b0, b1, b2, b3]));
        Ok(match name {
            b'r' => Self::Receive,
            b'c' => Self::Check(a),
            b'f' => Self::Fill(a),
            b'w' => Self::Write,
            b'x' => Self::Close,
            b'd' => Self::Drop(a, b),
            b't' => Self::Settle,
            b'm' => Self::Many(a),
            b's' => Self::Send(a, b),
            other => return Err(failed(format!("nothing is asked for by {other}"))),
        })
    }
}

/// Numbers of an answer.
const NUMBERS: usize = 6;
/// An answer.
pub(super) type Answer = [u64; NUMBERS];
/// There is nothing to say.
pub(super) const DONE: Answer = [0; NUMBERS];

/// The suite's side.
pub(super) struct Peer {
    process: Child,
    /// Exports go over it too.
    pub(super) socket: UnixStream,
}

impl Peer {
    /// Starts it, and waits until it is ready.
    pub(super) fn start(suite: &Suite) -> Result<Self, Error> {
        let (socket, theirs) = UnixStream::pair().map_err(failed)?;
        socket.set_read_timeout(Some(PATIENCE)).map_err(failed)?;
        let mut command = Command::new(std::env::current_exe().map_err(failed)?);
        command.args(["--device", &suite.backend.device().to_string(), "--child", KIND]);
        let input = Stdio::from(OwnedFd::from(theirs));
        let process = command.stdin(input).stdout(Stdio::null()).spawn().map_err(failed)?;
        let peer = Self { process, socket };
        peer.answer()?;
        Ok(peer)
    }

    /// Asks, and waits for the answer.
    pub(super) fn ask(&self, ask: Ask) -> Result<Answer, Error> {
        self.tell(ask)?;
        self.answer()
    }

    pub(super) fn tell(&self, ask: Ask) -> Result<(), Error> {
        (&self.socket).write_all(&ask.encode()).map_err(failed)
    }

    pub(super) fn answer(&self) -> Result<Answer, Error> {
        let mut bytes = [0; 8 * NUMBERS];
        let read = (&self.socket).read_exact(&mut bytes);
        read.map_err(|error| failed(format!("the other process gives no answer: {error}")))?;
        let mut answer = DONE;
        for (number, bytes) in answer.iter_mut().zip(bytes.chunks_exact(8)) {
            *number = u64::from_le_bytes(bytes.try_into().map_err(failed)?);
        }
        Ok(answer)
    }

    /// Kills it; was it still there?
    pub(super) fn kill(mut self) -> bool {
        let works = matches!(self.process.try_wait(), Ok(None));
        works && self.process.kill().is_ok() && self.process.wait().is_ok_and(|status| status.code().is_none())
    }

    /// Lets it end by itself; did it end well?
    pub(super) fn end(mut self) -> bool {
        if self.socket.shutdown(std::net::Shutdown::Write).is_err() {
            return false;
        }
        let start = Instant::now();
        while start.elapsed() < PATIENCE {
            match self.process.try_wait() {
                Ok(None) => std::thread::sleep(Duration::from_millis(2)),
                Ok(Some(status)) => return status.success(),
                Err(_) => break,
            }
        }
        false
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // One that was waited for is not there any more.
        if self.process.kill().is_ok() {
            let _ = self.process.wait();
        }
    }
}

/// The other process's side of the socket.
pub(super) struct Asked(pub(super) UnixStream);

impl Asked {
    pub(super) fn open() -> Result<Self, Error> {
        let input = std::io::stdin().as_fd().try_clone_to_owned().map_err(failed)?;
        Ok(Self(UnixStream::from(input)))
    }

    /// The next thing; `None` when there is none any more.
    pub(super) fn next(&self) -> Result<Option<Ask>, Error> {
        let mut bytes = [0; 9];
        match (&self.0).read_exact(&mut bytes) {
            Ok(()) => Ask::decode(bytes).map(Some),
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => Ok(None),
            Err(error) => Err(failed(error)),
        }
    }

    pub(super) fn answer(&self, answer: Answer) -> Result<(), Error> {
        let bytes: Vec<u8> = answer.iter().flat_map(|number| number.to_le_bytes()).collect();
        (&self.0).write_all(&bytes).map_err(failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_arrives() {
        let all = [
            Ask::Receive,
            Ask::Check(7),
            Ask::Fill(u32::MAX),
            Ask::Write,
            Ask::Close,
            Ask::Drop(100, 3),
            Ask::Settle,
            Ask::Many(1000),
            Ask::Send(64, 5),
        ];
        for ask in all {
            assert_eq!(Ask::decode(ask.encode()).unwrap(), ask);
        }
        assert!(Ask::decode([0; 9]).is_err());
    }
}
