//! The file of a plan: `xseg plan 1`, a line of sums, and a line for each block.
//!
//! Files are other people's: whatever is in them, reading ends with a plan whose blocks do not overlap or with an
//! error, in memory bounded by the file's length.
#![forbid(unsafe_code)]

use super::{BLOCKS_MAX, Entry, HEADER, PLANNED_ABOVE, Plan, PlanError, TOP_MAX, VERSION};
use crate::units::UNIT;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::io::{Read, Write};
use std::path::Path;

/// Most bytes of a file.
const FILE_MAX: u64 = 256 << 20;

impl Plan {
    /// Reads a plan's file.
    ///
    /// # Errors
    /// [`PlanError`] says what is wrong with the file and what to do.
    pub fn load(path: &Path) -> Result<Self, PlanError> {
        let failed = |error: std::io::Error| PlanError::Open { path: path.into(), why: error.to_string() };
        let mut bytes = Vec::new();
        let file = std::fs::File::open(path).map_err(failed)?;
        file.take(FILE_MAX + 1).read_to_end(&mut bytes).map_err(failed)?;
        Self::from_bytes(&bytes)
    }

    /// As [`Plan::load`], from memory.
    ///
    /// # Errors
    /// As [`Plan::load`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, PlanError> {
        let mut lines = bytes.split(|byte| *byte == b'\n');
        let first = lines.next().and_then(|line| std::str::from_utf8(line).ok());
        let version = first.and_then(|line| line.trim_end().strip_prefix(HEADER)).ok_or(PlanError::Foreign)?.trim();
        if version.parse() != Ok(VERSION) {
            return Err(PlanError::Version { found: crate::shown::text(version.as_bytes(), 20) });
        }
        if bytes.len() as u64 > FILE_MAX {
            return Err(PlanError::Line { line: 2, why: "the file has more than 256 MiB" });
        }
        let sums = lines.next().unwrap_or_default();
        let (blocks, step, top) = sums_of(sums)
            .ok_or(PlanError::Line { line: 2, why: "it is not `blocks NUMBER step NUMBER top NUMBER`" })?;
        if blocks == 0 || blocks > BLOCKS_MAX as u64 || step > blocks || top > TOP_MAX {
            return Err(PlanError::Line { line: 2, why: "a number is out of range" });
        }
        let mut entries = Vec::new();
        for (number, line) in (3..).zip(lines).filter(|(_, line)| !line.trim_ascii().is_empty()) {
            if entries.len() as u64 == blocks {
                let found = blocks + 1;
                return Err(PlanError::Count { stated: blocks, found });
            }
            let wrong = |why| PlanError::Line { line: number, why };
            let entry = entry_of(line).ok_or(wrong("it is not `LENGTH STREAM UNTIL OFFSET`"))?;
            let born = entries.len() as u64;
            let ends = if born < step { blocks } else { born + blocks - step };
            let inside = |offset| u64::from(offset) + u64::from(entry.len) <= top;
            if u64::from(entry.len) * UNIT <= PLANNED_ABOVE || !entry.offset.is_none_or(inside) {
                return Err(wrong("a length or an offset is out of range"));
            }
            let lives = u64::from(entry.until) > born && (entry.offset.is_none() || u64::from(entry.until) <= ends);
            if !lives {
                return Err(wrong("the block is freed before it is born, or too late"));
            }
            entries.push(entry);
        }
        if entries.len() as u64 != blocks {
            return Err(PlanError::Count { stated: blocks, found: entries.len() as u64 });
        }
        let plan = Self { entries, step: step as u32..blocks as u32, top: top as u32 };
        plan.check()?;
        Ok(plan)
    }

    /// Writes the file, from which the same plan is read.
    ///
    /// # Errors
    /// `out`'s.
    pub fn write(&self, out: &mut impl Write) -> std::io::Result<()> {
        writeln!(out, "{HEADER} {VERSION}")?;
        writeln!(out, "blocks {} step {} top {}", self.entries.len(), self.step.start, self.top)?;
        for Entry { len, role, until, offset } in &self.entries {
            match offset {
                Some(offset) => writeln!(out, "{len} {role} {until} {offset}")?,
                None => writeln!(out, "{len} {role} {until} -")?,
            }
        }
        Ok(())
    }

    /// Looks for blocks that share addresses while both live: the opening and two rounds of the step are gone through.
    pub(super) fn check(&self) -> Result<(), PlanError> {
        let (end, period) = (self.step.end, self.step.end - self.step.start);
        let mut live: BTreeMap<u32, (u32, u32)> = BTreeMap::new();
        let mut deaths: BinaryHeap<Reverse<(u64, u32)>> = BinaryHeap::new();
        for time in 0..u64::from(end) + u64::from(period) {
            let round = time >= u64::from(end);
            let at = if round { time - u64::from(period) } else { time } as u32;
            while let Some(&Reverse((until, offset))) = deaths.peek()
                && until <= time
            {
                deaths.pop();
                live.remove(&offset);
            }
            let entry = self.entries[at as usize];
            let Some(start) = entry.offset else { continue };
            // `top` is in 32 bits, and no block lies beyond it.
            let stop = start + entry.len;
            let before = live.range(..stop).next_back().filter(|(_, (end, _))| *end > start);
            if let Some((_, (_, other))) = before {
                return Err(PlanError::Overlap { first: (*other).min(at), second: (*other).max(at) });
            }
            live.insert(start, (stop, at));
            if at >= self.step.start {
                deaths.push(Reverse((u64::from(entry.until) + if round { u64::from(period) } else { 0 }, start)));
            } else if entry.until < end {
                deaths.push(Reverse((u64::from(entry.until), start)));
            }
        }
        Ok(())
    }
}

/// The numbers of the second line.
fn sums_of(line: &[u8]) -> Option<(u64, u64, u64)> {
    let mut words = std::str::from_utf8(line).ok()?.split_ascii_whitespace();
    let mut number = |name| (words.next()? == name).then(|| words.next()?.parse().ok())?;
    let sums = (number("blocks")?, number("step")?, number("top")?);
    words.next().is_none().then_some(sums)
}

/// The block of a line.
fn entry_of(line: &[u8]) -> Option<Entry> {
    let mut words = std::str::from_utf8(line).ok()?.split_ascii_whitespace();
    let (len, role, until) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?, words.next()?.parse().ok()?);
    let offset = match words.next()? {
        "-" => None,
        number => Some(number.parse().ok()?),
    };
    words.next().is_none().then_some(Entry { len, role, until, offset })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::ahead::RecordedBlock;
    use proptest::prelude::*;

    fn read(text: &str) -> Result<Plan, PlanError> {
        Plan::from_bytes(text.as_bytes())
    }

    fn written(plan: &Plan) -> String {
        let mut out = Vec::new();
        plan.write(&mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    const GOOD: &str = "xseg plan 1\nblocks 3 step 1 top 10000\n4000 0 3 0\n3000 0 3 4000\n3000 1 4 7000\n";

    #[test]
    fn a_plan_is_read_as_it_was_written() {
        let plan = read(GOOD).unwrap();
        assert_eq!((plan.len(), plan.top(), plan.is_empty()), (3, 10000 * 512, false));
        assert_eq!(written(&plan), GOOD);
        assert_eq!(read(&GOOD.replace('\n', "\r\n")).unwrap(), plan);
        assert_eq!(read(GOOD.trim_end()).unwrap(), plan);
    }

    #[test]
    fn other_files_are_refused_with_what_is_wrong() {
        let line = |line, why| Err(PlanError::Line { line, why });
        for text in ["", "a,0,100,0,0\n", "xseg plans", "\u{0}", "XSEG PLAN 1"] {
            assert!(matches!(read(text), Err(PlanError::Foreign | PlanError::Version { .. })), "{text}");
        }
        assert_eq!(read("xseg plan \u{1b}[2J\n"), Err(PlanError::Version { found: r"\u{1b}[2J".into() }));
        assert_eq!(read("xseg plan 2\n"), Err(PlanError::Version { found: "2".into() }));
        assert_eq!(
            read("xseg plan 18446744073709551616\n").unwrap_err(),
            PlanError::Version { found: "18446744073709551616".into() }
        );
        let sums = "it is not `blocks NUMBER step NUMBER top NUMBER`";
        for second in ["", "blocks 3", "blocks -3 step 1 top 5", "blocks 3 step 1 top 5 6", "blocks 3 top 1 step 5"] {
            assert_eq!(read(&format!("xseg plan 1\n{second}\n")), line(2, sums), "{second}");
        }
        let range = "a number is out of range";
        for second in [
            "blocks 0 step 0 top 5",
            "blocks 5000001 step 0 top 5",
            "blocks 18446744073709551615 step 0 top 5",
            "blocks 3 step 4 top 5",
            "blocks 3 step 1 top 4294967297",
        ] {
            assert_eq!(read(&format!("xseg plan 1\n{second}\n")), line(2, range), "{second}");
        }
    }

    #[test]
    fn damaged_blocks_are_refused() {
        let with = |from: &str, to: &str| read(&GOOD.replacen(from, to, 1)).unwrap_err();
        let line = |line, why| PlanError::Line { line, why };
        let form = "it is not `LENGTH STREAM UNTIL OFFSET`";
        for bad in
            ["4000 0 3", "4000 0 3 0 0", "4000 70000 3 0", "4000 0 x 0", "4294967296 0 3 0", "\u{fffd}", "4000 0 3 -1"]
        {
            assert_eq!(with("4000 0 3 0", bad), line(3, form), "{bad}");
        }
        let range = "a length or an offset is out of range";
        assert_eq!(with("4000 0 3 0", "0 0 3 0"), line(3, range));
        assert_eq!(with("4000 0 3 0", "2048 0 3 0"), line(3, range), "no large block");
        assert_eq!(with("4000 0 3 0", "4000 0 3 4294967295"), line(3, range));
        assert_eq!(with("4000 0 3 0", "4294967295 0 3 4294967295"), line(3, range));
        let lives = "the block is freed before it is born, or too late";
        assert_eq!(with("4000 0 3 0", "4000 0 0 0"), line(3, lives));
        assert_eq!(with("4000 0 3 0", "4000 0 4 0"), line(3, lives));
        assert_eq!(with("3000 1 4 7000", "3000 1 5 7000"), line(5, lives), "it would meet itself");
        assert_eq!(with("3000 1 4 7000\n", ""), PlanError::Count { stated: 3, found: 2 });
        assert_eq!(with("3000 1 4 7000\n", "3000 1 4 7000\n2 2 2 2\n"), PlanError::Count { stated: 3, found: 4 });
        assert_eq!(with("3000 0 3 4000", "3000 0 3 3999"), PlanError::Overlap { first: 0, second: 1 });
        assert_eq!(with("3000 1 4 7000", "3000 1 4 6999"), PlanError::Overlap { first: 1, second: 2 });
    }

    #[test]
    fn what_overlaps_only_from_one_round_to_the_next_is_found_too() {
        // The last block of the step lives on into the next round, in which the first one is born beside it.
        let text = "xseg plan 1\nblocks 2 step 0 top 9000\n3000 0 1 0\n3000 0 UNTIL 0\n";
        assert!(read(&text.replace("UNTIL", "2")).is_ok());
        assert_eq!(read(&text.replace("UNTIL", "3")), Err(PlanError::Overlap { first: 0, second: 1 }));
    }

    proptest! {
        #[test]
        fn any_run_makes_a_plan_that_is_read_back(
            blocks in prop::collection::vec((2u64..60, 0u64..3, 1u32..20, 0u32..9), 1..80), rounds in 1usize..5,
        ) {
            let blocks = blocks.repeat(rounds);
            let all = blocks.len() as u32;
            let recorded: Vec<RecordedBlock> = (0..).zip(&blocks).map(|(at, &(mib, stream, life, later))| {
                let until = (at + life).min(all);
                RecordedBlock { bytes: (mib << 20) + 7, stream, until, until_elsewhere: (until + later).min(all) }
            }).collect();
            let (plan, found) = Plan::of(&recorded).unwrap();
            prop_assert!(found.top >= found.peak);
            prop_assert_eq!(read(&written(&plan)), Ok(plan));
        }

        #[test]
        fn any_text_is_read_or_refused(text in "(xseg plan 1\nblocks [0-9]{1,3} step [0-9]{1,2} top [0-9]{4,6}\n)?([0-9]{1,5} [0-2] [0-9]{1,2} [0-9]{1,6}\n){0,9}\\PC{0,9}") {
            if let Ok(plan) = read(&text) {
                prop_assert_eq!(read(&written(&plan)), Ok(plan));
            }
        }

        #[test]
        fn any_change_of_a_byte_is_read_or_refused(at in 0usize..GOOD.len(), byte in any::<u8>()) {
            let mut bytes = GOOD.as_bytes().to_vec();
            bytes[at] = byte;
            if let Ok(plan) = Plan::from_bytes(&bytes) {
                prop_assert!(plan.check().is_ok());
            }
        }
    }
}
