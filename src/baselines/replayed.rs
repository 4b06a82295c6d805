//! Baselines as what a replay runs.

use super::{Subject, SubjectError};
use crate::backend::gauge::{Gauge, MappedRange};
use crate::backend::timeline::Timeline;
use crate::replay;

/// A baseline under replay.
#[derive(Debug)]
struct Replayed(Box<dyn Subject>);

/// The baseline called `name`, as [`super::create`] makes it, for [`crate::replay`].
#[must_use]
pub fn replayable(name: &str, limit: Option<u64>, timeline: Timeline) -> Option<Box<dyn replay::Subject>> {
    Some(Box::new(Replayed(super::create(name, limit, timeline)?)))
}

impl From<SubjectError> for replay::SubjectError {
    fn from(error: SubjectError) -> Self {
        match error {
            SubjectError::OutOfMemory(_) => Self::OutOfMemory(error.to_string()),
            SubjectError::Other(why) => Self::Other(why),
        }
    }
}

impl replay::Subject for Replayed {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn alloc(&mut self, bytes: u64, stream: u64) -> Result<u64, replay::SubjectError> {
        Ok(self.0.alloc(bytes, stream)?)
    }

    fn free(&mut self, address: u64) -> Result<(), replay::SubjectError> {
        Ok(self.0.free(address)?)
    }

    fn record_use(&mut self, address: u64, stream: u64) -> Result<(), replay::SubjectError> {
        Ok(self.0.record_use(address, stream)?)
    }

    fn figures(&self) -> replay::Figures {
        let figures = self.0.figures();
        replay::Figures {
            allocated: figures.allocated,
            reserved: figures.reserved,
            peak_allocated: figures.peak_allocated,
            peak_reserved: figures.peak_reserved,
            driver_calls: figures.calls,
            driver_nanos: figures.driver_nanos,
            host_waits: figures.host_waits,
            gpu_waits: figures.gpu_waits,
            handles_moved: figures.handles_moved,
            handles_joined: figures.handles_joined,
            // Theirs are in `bytes_moved`, and are not counted apart.
            bytes_joined: 0,
            joins_ended: 0,
            bytes_moved: figures.bytes_moved,
            bytes_copied: figures.bytes_copied,
            detail: serde_json::json!({ "retries": figures.retries }),
        }
    }

    fn gauge(&self) -> Gauge {
        self.0.gauge()
    }

    fn ranges(&self) -> Vec<MappedRange> {
        self.0.ranges()
    }

    fn finish(&mut self) -> Result<(), replay::SubjectError> {
        self.0.finish()?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::MIB;

    #[test]
    fn figures_and_errors_come_through() {
        let mut subject = replayable("torch-native", Some(20 * MIB), Timeline::default()).unwrap();
        let at = subject.alloc(3 * MIB, 0).unwrap();
        let full = subject.alloc(18 * MIB, 0).unwrap_err();
        assert_eq!(full, replay::SubjectError::OutOfMemory("out of memory: 18874368 bytes asked for".into()));
        let figures = subject.figures();
        assert_eq!((figures.allocated, figures.reserved, figures.driver_calls.create), (3 * MIB, 20 * MIB, 1));
        assert_eq!(figures.detail["retries"], 1);
        subject.free(at).unwrap();
        subject.finish().unwrap();
        assert_eq!(subject.figures().reserved, 0);
    }
}
