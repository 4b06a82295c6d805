//! The large blocks of a trace, from which plans are made.
#![forbid(unsafe_code)]

use super::{Action, Trace};
use crate::plan::ahead::{PLANNED_ABOVE, RecordedBlock};
use std::collections::HashSet;
use std::time::Duration;

impl Trace {
    /// The blocks of more than 1 MiB in order of birth, for [`crate::Plan::of`]. Blocks of other streams may have a block's
    /// place only `apart` after its free, and so may those of its own stream where it was declared used on another.
    #[must_use]
    pub fn large_blocks(&self, apart: Duration) -> Vec<RecordedBlock> {
        let apart = u64::try_from(apart.as_micros()).unwrap_or(u64::MAX);
        let is_large = |block: u32| self.blocks[block as usize].bytes > PLANNED_ABOVE;
        let births = self.events.iter().filter(|event| event.action == Action::Alloc && is_large(event.block));
        // Times never fall, so that a time tells how many were born by then.
        let times: Vec<u64> = births.clone().map(|event| event.time_us).collect();
        let all = u32::try_from(times.len()).unwrap_or(u32::MAX);
        let mut number = vec![u32::MAX; self.blocks.len()];
        let mut found: Vec<RecordedBlock> = Vec::with_capacity(times.len());
        let mut used_elsewhere: HashSet<u32> = HashSet::new();
        for event in self.events.iter().filter(|event| is_large(event.block)) {
            let block = self.blocks[event.block as usize];
            match event.action {
                Action::Alloc => {
                    number[event.block as usize] = found.len() as u32;
                    let stream = self.streams[block.stream as usize];
                    found.push(RecordedBlock { bytes: block.bytes, stream, until: all, until_elsewhere: all });
                }
                Action::Use(stream) if stream != block.stream => drop(used_elsewhere.insert(event.block)),
                Action::Use(_) => {}
                Action::Free => {
                    let born = found.len() as u32;
                    let later = event.time_us.saturating_add(apart);
                    let passed = times.partition_point(|time| *time <= later) as u32;
                    let passed = passed.max(born);
                    let until = if used_elsewhere.contains(&event.block) { passed } else { born };
                    if let Some(one) = found.get_mut(number[event.block as usize] as usize) {
                        (one.until, one.until_elsewhere) = (until, passed);
                    }
                }
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lives_are_counted_in_births_of_large_blocks() {
        let text = "a,0,2000000,7,0\na,1,100,7,5\na,2,3000000,7,10\nf,1,11\nu,2,9,12\nf,0,20\nf,2,20\n\
                    a,3,2000001,9,30\na,4,2000002,9,50\n";
        let trace = Trace::from_bytes("t", text.as_bytes()).unwrap();
        let found = trace.large_blocks(Duration::from_micros(10));
        let lives: Vec<_> = found.iter().map(|one| (one.bytes, one.stream, one.until, one.until_elsewhere)).collect();
        assert_eq!(lives, [(2000000, 7, 2, 3), (3000000, 7, 3, 3), (2000001, 9, 4, 4), (2000002, 9, 4, 4)]);
    }
}
