//! Handing the memory behind a block to other processes.
#![forbid(unsafe_code)]

use super::inner::Inner;
use crate::backend::ExportedHandle;
use crate::error::{DriverCall, DriverError, Result};
use crate::units::{GRANULE, UNIT, UNITS_PER_GRANULE};

impl Inner {
    /// A descriptor for each handle behind a live block, in address order. When one is refused, those
    /// before it are closed again.
    pub(crate) fn export_handles(&self, address: u64) -> Result<Vec<ExportedHandle>> {
        // Handles stay where they are while this is held.
        let slow = self.slow.lock();
        let block = {
            let (_, segment, id) = self.live_block(address)?;
            segment.nodes[id].start..segment.nodes[id].end()
        };
        let mut exported = Vec::new();
        let mut at = block.start;
        while at < block.end {
            let page = slow.physical.page(at / UNITS_PER_GRANULE);
            let Some(handle) = slow.physical.handle(page.handle) else {
                let why = "a granule of the block has no handle; this is a defect of xseg";
                return Err(DriverError::new(DriverCall::Other, why).into());
            };
            let first = (at / UNITS_PER_GRANULE - page.offset) * UNITS_PER_GRANULE;
            let stop = (first + handle.granules * UNITS_PER_GRANULE).min(block.end);
            let (fd, start) = self.driver.export(handle.token)?;
            exported.push(ExportedHandle {
                fd,
                offset: start + u64::from(at - first) * UNIT,
                bytes: u64::from(stop - at) * UNIT,
                handle_bytes: u64::from(handle.granules) * GRANULE,
            });
            at = stop;
        }
        Ok(exported)
    }
}
