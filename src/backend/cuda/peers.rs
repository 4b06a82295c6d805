//! Other devices with access to this one's memory: those that it was opened with, and those that got it later.
#![forbid(unsafe_code)]

use super::CudaOptions;
use super::enter::Primary;
use super::probe::unavailable;
use super::sys::Access;
use crate::error::{DriverError, Error};
use parking_lot::{MappedRwLockReadGuard, RwLock, RwLockReadGuard};

/// The device itself and the others, as new mappings get them.
#[derive(Debug)]
pub(super) struct Peers {
    own: i32,
    now: RwLock<(Vec<u32>, Access)>,
}

impl Peers {
    pub(super) fn new(own: i32, peers: Vec<u32>) -> Self {
        let access = all(own, &peers);
        Self { own, now: RwLock::new((peers, access)) }
    }

    pub(super) fn list(&self) -> Vec<u32> {
        self.now.read().0.clone()
    }

    /// What a new mapping gets, for one call of the driver.
    pub(super) fn access(&self) -> MappedRwLockReadGuard<'_, Access> {
        RwLockReadGuard::map(self.now.read(), |now| &now.1)
    }

    pub(super) fn add(&self, peer: u32) {
        let (peers, access) = &mut *self.now.write();
        if !peers.contains(&peer) {
            peers.push(peer);
            *access = all(self.own, peers);
        }
    }
}

fn all(own: i32, peers: &[u32]) -> Access {
    Access::new(std::iter::once(own).chain(peers.iter().map(|peer| peer.cast_signed())))
}

/// How a device stands to the memory of another one.
enum Reach {
    Own,
    Yes,
    No,
    /// There is no such device among so many.
    Missing(i32),
}

fn reach_of(primary: &Primary, peer: u32) -> Result<Reach, DriverError> {
    let api = primary.api();
    let count = api.device_count()?;
    let Some(ordinal) = i32::try_from(peer).ok().filter(|ordinal| *ordinal < count) else {
        return Ok(Reach::Missing(count));
    };
    let device = api.device(ordinal)?;
    if device == primary.device() {
        return Ok(Reach::Own);
    }
    Ok(if api.can_access_peer(device, primary.device())? { Reach::Yes } else { Reach::No })
}

/// As [`Backend::reach`](crate::backend::Backend::reach), of the device with this index.
pub(super) fn reach(primary: &Primary, own: u32, peer: u32) -> Result<(), Error> {
    match reach_of(primary, peer)? {
        Reach::Own | Reach::Yes => Ok(()),
        Reach::No => Err(Error::Unreachable { device: peer, of: own }),
        Reach::Missing(count) => Err(Error::InvalidArgument(format!(
            "device {peer} does not exist, the driver shows {count}; check CUDA_VISIBLE_DEVICES"
        ))),
    }
}

/// Those of the options that reach the device whose context is current. Others are dropped, with a note.
pub(super) fn reachable(primary: &Primary, options: &CudaOptions, notes: &mut Vec<String>) -> Result<Vec<u32>, Error> {
    let mut peers = Vec::new();
    for &peer in &options.peers {
        match reach_of(primary, peer)? {
            Reach::Missing(count) => {
                return Err(unavailable(format!("peer {peer} does not exist, there are {count} devices")));
            }
            Reach::Yes if !peers.contains(&peer) => peers.push(peer),
            Reach::No => notes.push(format!("peer {peer} dropped: it cannot reach this device's memory")),
            Reach::Own | Reach::Yes => {}
        }
    }
    Ok(peers)
}
