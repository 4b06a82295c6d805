//! Memory of the host backend as the device's work reaches it.
#![forbid(unsafe_code)]

use super::{AccessFault, MemoryAccess, Piece};
use crate::backend::host::{AccessError, HostBackend};

impl From<AccessError> for AccessFault {
    fn from(error: AccessError) -> Self {
        Self { address: error.address, reason: error.reason }
    }
}

impl MemoryAccess for HostBackend {
    fn write(&self, pieces: &[Piece]) -> Result<(), AccessFault> {
        let pieces: Vec<(u64, &[u8])> = pieces.iter().map(|piece| (piece.address, piece.bytes())).collect();
        Ok(self.write_pieces(&pieces)?)
    }

    fn read(&self, pieces: &mut [Piece]) -> Result<(), AccessFault> {
        let mut views: Vec<(u64, &mut [u8])> =
            pieces.iter_mut().map(|piece| (piece.address, piece.bytes_mut())).collect();
        Ok(self.read_pieces(&mut views)?)
    }
}
