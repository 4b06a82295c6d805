//! What two processes say to each other about shared memory.
//!
//! An export is a private pair of `SOCK_SEQPACKET` sockets. The exporter keeps one end, a [`Lease`]; the other end, a
//! descriptor that stands for one import, goes to the importer, where it becomes a [`Tie`]. Every message is checked before
//! it is used, whoever sent it. Nothing here knows of heaps or drivers.
//!
//! ```text
//! exporter → importer   Offer, with all handles where they are few; else a batch for each Next; or Refused with a text
//! importer → exporter   Hello with a pidfd, before anything is mapped; Next; Done, when all is unmapped
//! ```
#![forbid(unsafe_code)]

mod lease;
mod message;
mod socket;
mod tie;

pub(crate) use lease::{Lease, Server, hung_up};
pub(crate) use message::{BATCH, FIRST, Offer, Piece};
pub(crate) use socket::{Patience, no_descriptor, pass_on, take_over};
pub(crate) use tie::Tie;

use crate::error::ShareFault;
use std::os::fd::OwnedFd;

/// Both ends of a new export: what the exporter keeps, and what stands for one import.
pub(crate) fn pair() -> Result<(Lease, OwnedFd), ShareFault> {
    let (ours, theirs) = socket::pair()?;
    Ok((Lease::new(ours), theirs))
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod wait_tests;
