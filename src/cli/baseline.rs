//! A baseline as something to replay.
#![forbid(unsafe_code)]

use crate::backend::timeline::Timeline;
use crate::baselines;
use crate::replay::{Figures, Subject, SubjectError};

/// See the module's text.
pub(super) struct Baseline(Box<dyn baselines::Subject>);

impl Baseline {
    /// The baseline of this name, with a limit in bytes.
    pub(super) fn new(name: &str, limit: Option<u64>, clock: Timeline) -> Option<Self> {
        baselines::create(name, limit, clock).map(Self)
    }
}

impl From<baselines::SubjectError> for SubjectError {
    fn from(error: baselines::SubjectError) -> Self {
        match error {
            baselines::SubjectError::OutOfMemory(_) => Self::OutOfMemory(error.to_string()),
            other => Self::Other(other.to_string()),
        }
    }
}

impl Subject for Baseline {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn alloc(&mut self, bytes: u64, stream: u64) -> Result<u64, SubjectError> {
        Ok(self.0.alloc(bytes, stream)?)
    }

    fn free(&mut self, address: u64) -> Result<(), SubjectError> {
        Ok(self.0.free(address)?)
    }

    fn record_use(&mut self, address: u64, stream: u64) -> Result<(), SubjectError> {
        Ok(self.0.record_use(address, stream)?)
    }

    fn figures(&self) -> Figures {
        let own = self.0.figures();
        Figures {
            allocated: own.allocated,
            reserved: own.reserved,
            peak_allocated: own.peak_allocated,
            peak_reserved: own.peak_reserved,
            driver_calls: own.calls,
            driver_nanos: own.driver_nanos,
            host_waits: own.host_waits,
            gpu_waits: own.gpu_waits,
            handles_moved: own.handles_moved,
            handles_joined: own.handles_joined,
            bytes_moved: own.bytes_moved,
            bytes_copied: own.bytes_copied,
            detail: serde_json::json!({ "retries": own.retries }),
        }
    }

    fn finish(&mut self) -> Result<(), SubjectError> {
        self.0.finish()?;
        Ok(())
    }
}
