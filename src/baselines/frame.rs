//! What all baselines share: counting, blocks that wait for other streams, and one retry.

use super::device::Device;
use super::pending::Pending;
use super::{Figures, Subject, SubjectError};
use crate::backend::gauge::{Gauge, MappedRange};

/// How one design places blocks. Sizes in bytes.
pub(super) trait Policy: std::fmt::Debug + Send {
    /// Name on the command line.
    fn name(&self) -> &'static str;

    /// Address and rounded size of a new block; `None` when memory is short.
    fn alloc(&mut self, device: &mut Device, bytes: u64, stream: u64) -> Result<Option<(u64, u64)>, SubjectError>;

    /// Rounded size and stream of a live block.
    fn live(&self, address: u64) -> Result<(u64, u64), SubjectError>;

    /// Takes back a block that nothing uses any more.
    fn give(&mut self, device: &mut Device, address: u64) -> Result<(), SubjectError>;

    /// A free needs no event of the streams that used the block: it waits for the device itself.
    fn free_waits(&self) -> bool {
        false
    }

    /// Nanoseconds of driver calls that are put off until work has passed.
    fn owed(&self) -> u64 {
        0
    }

    /// The second try after a flush.
    fn again(&mut self, device: &mut Device, bytes: u64, stream: u64) -> Result<Option<(u64, u64)>, SubjectError> {
        self.alloc(device, bytes, stream)
    }

    /// Gives cached memory back to the device, before a second try.
    fn flush(&mut self, device: &mut Device) -> Result<(), SubjectError>;
}

#[derive(Debug)]
struct Frame<P> {
    device: Device,
    pending: Pending,
    policy: P,
}

/// A baseline made of a policy.
pub(super) fn subject(device: Device, policy: impl Policy + 'static) -> Box<dyn Subject> {
    Box::new(Frame { device, pending: Pending::default(), policy })
}

/// The error for an address that is no live block.
pub(super) fn not_live(address: u64) -> SubjectError {
    SubjectError::Other(format!("{address:#x} is not a live block"))
}

impl<P: Policy> Frame<P> {
    fn live(&self, address: u64) -> Result<(u64, u64), SubjectError> {
        if self.pending.is_held(address) { Err(not_live(address)) } else { self.policy.live(address) }
    }
}

impl<P: Policy> Subject for Frame<P> {
    fn name(&self) -> &str {
        self.policy.name()
    }

    fn alloc(&mut self, bytes: u64, stream: u64) -> Result<u64, SubjectError> {
        self.device.called();
        for address in self.pending.passed(&self.device) {
            self.policy.give(&mut self.device, address)?;
        }
        let mut made = self.policy.alloc(&mut self.device, bytes, stream)?;
        if made.is_none() {
            self.device.figures.retries += 1;
            for address in self.pending.wait_all(&mut self.device) {
                self.policy.give(&mut self.device, address)?;
            }
            self.policy.flush(&mut self.device)?;
            made = self.policy.again(&mut self.device, bytes, stream)?;
        }
        let (address, size) = made.ok_or(SubjectError::OutOfMemory(bytes))?;
        self.device.allocated(size);
        Ok(address)
    }

    fn free(&mut self, address: u64) -> Result<(), SubjectError> {
        self.device.called();
        let (size, _) = self.live(address)?;
        self.device.freed(size);
        if self.pending.holds(&self.device, address) {
            return Ok(());
        }
        self.policy.give(&mut self.device, address)
    }

    fn record_use(&mut self, address: u64, stream: u64) -> Result<(), SubjectError> {
        if self.live(address)?.1 != stream && !self.policy.free_waits() {
            self.pending.record(address, stream);
        }
        Ok(())
    }

    fn figures(&self) -> Figures {
        let figures = self.device.figures;
        Figures { driver_nanos: figures.driver_nanos + self.policy.owed(), ..figures }
    }

    fn gauge(&self) -> Gauge {
        let Figures { allocated, reserved, driver_nanos, .. } = self.device.figures;
        Gauge { allocated, reserved, driver_nanos }
    }

    fn ranges(&self) -> Vec<MappedRange> {
        self.device.ranges()
    }

    fn finish(&mut self) -> Result<u64, SubjectError> {
        self.device.teardown()
    }
}
