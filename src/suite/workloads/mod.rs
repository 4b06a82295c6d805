//! What the suite runs: generated workloads and reported scenarios, each a trace made from a seed.

mod distributed;
mod model;
mod patterns;
mod scenarios;
mod script;
mod serving;
#[cfg(test)]
mod tests;
mod training;

use crate::trace::Trace;
use crate::units::{GIB, GRANULE, MIB, counted, round_down};
use script::Script;
use serde::Serialize;

/// Where a workload comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Origin {
    /// A trace file of the command line.
    File,
    /// Made by a generator.
    Generated,
    /// A pattern from a public report.
    Scenario,
}

/// A workload, ready to run.
#[derive(Debug)]
pub(crate) struct Workload {
    pub(crate) origin: Origin,
    /// A line for people.
    pub(crate) about: String,
    pub(crate) trace: Trace,
    /// The limit that it is meant for, in bytes; `None`: a factor of its peak.
    pub(crate) limit: Option<u64>,
}

/// Which limit belongs to a generated workload.
#[derive(Debug, Clone, Copy)]
enum Limit {
    /// The suite's factor.
    Factor,
    /// So many bytes.
    Bytes(u64),
    /// So much that the peak is this share of it, in percent.
    Full(u64),
}

type Generate = fn(&mut Script, u64) -> Result<(), String>;

/// One generator.
pub(crate) struct Entry {
    pub(crate) name: &'static str,
    pub(crate) about: &'static str,
    pub(crate) origin: Origin,
    limit: Limit,
    generate: Generate,
}

const fn entry(name: &'static str, about: &'static str, generate: Generate) -> Entry {
    Entry { name, about, origin: Origin::Generated, limit: Limit::Factor, generate }
}

const fn scenario(name: &'static str, about: &'static str, limit: Limit, generate: Generate) -> Entry {
    Entry { name, about, origin: Origin::Scenario, limit, generate }
}

/// A generator that cannot fail as one that can.
macro_rules! sure {
    ($generate:path) => {
        |script, rounds| {
            $generate(script, rounds);
            Ok(())
        }
    };
}

/// Every generator, in the order of reports.
pub(crate) const CATALOGUE: &[Entry] = &[
    entry("train-fixed", "training steps of the same shape, 1.1 B parameters", sure!(training::fixed)),
    entry("train-small", "training of 0.4 B parameters in small batches", sure!(training::small)),
    entry("train-varlen", "batches padded to their longest text, lengths log-normal", training::varying),
    entry("n-plus-one", "activations of 50 layers for N and N+1 by turns, with other N", sure!(training::one_more)),
    entry("checkpointing", "gradient checkpointing, lengths vary", sure!(training::checkpointing)),
    entry("moe-skew", "16 experts with Zipf-distributed loads", training::experts),
    entry(
        "lora-offload",
        "frozen weights, adapters, optimiser and some activations on the host",
        sure!(training::lora),
    ),
    entry(
        "generate-train",
        "answers with growing caches, then training on them, by turns",
        sure!(serving::generate_then_train),
    ),
    entry("zero3", "unequal shards gathered one layer ahead and released, on two streams", sure!(distributed::zero3)),
    entry(
        "pipeline-1f1b",
        "first of 4 pipeline stages with 2 virtual ones, one forward one backward",
        sure!(distributed::pipeline),
    ),
    entry("serve-kv", "requests at random whose key-value caches grow, 8 B parameters", serving::growing_cache),
    entry("infer-large", "long prompts through 8 B parameters", sure!(serving::large_inference)),
    entry("mixed", "small training and a server on one card", serving::mixed),
    entry(
        "quiet-stream",
        "the same work on two streams by turns, then one goes quiet (rapidsai/rmm#2039)",
        sure!(distributed::quiet_stream),
    ),
    entry("holes", "every second block goes, then blocks of twice the size come", sure!(patterns::alternating_holes)),
    Entry {
        limit: Limit::Full(patterns::CHURN_FULL),
        ..entry("churn-98", "blocks of random size come and go with 98 % of the limit live", sure!(patterns::churn))
    },
    scenario(
        "s01-two-gaps",
        "4 × 16 MiB, two apart freed, 32 MiB wanted in 64 MiB",
        Limit::Bytes(64 * MIB),
        sure!(scenarios::two_gaps),
    ),
    scenario(
        "s02-survivors",
        "91 and 45.5 MiB come and go while 2 MiB stay, 100 times (pt#123548)",
        Limit::Factor,
        sure!(scenarios::survivors),
    ),
    scenario(
        "s03-one-then-many",
        "550 MiB freed, then 8 × 110 MiB (pt#123548)",
        Limit::Bytes(880 * MIB),
        sure!(scenarios::one_then_many),
    ),
    scenario("s04-just-above", "2 MiB, then 512 KiB", Limit::Bytes(4 * MIB), sure!(scenarios::just_above)),
    scenario(
        "s06-new-streams",
        "8 times 1 GiB on each of two new streams (vllm#52950)",
        Limit::Bytes(2 * GIB),
        sure!(scenarios::new_streams),
    ),
    scenario(
        "s07-larger-next",
        "60 GiB freed, then 70 GiB, on 80 GiB (pt#159674)",
        Limit::Bytes(80 * GIB),
        sure!(scenarios::larger_next),
    ),
    scenario(
        "s08-vpmm",
        "+10, +1, −10, +4, +11 GiB in 16 GiB (VPMM's document)",
        Limit::Bytes(16 * GIB),
        sure!(scenarios::vpmm_document),
    ),
    scenario(
        "s10-every-8th",
        "blocks of 16 KiB of which every 8th stays (kvcached#359)",
        Limit::Factor,
        sure!(scenarios::small_survivors),
    ),
    scenario(
        "s12-long-churn",
        "300 GB of churn at 63 % of the limit, then 127 MiB (rmm#1245)",
        Limit::Bytes(10 * GIB),
        sure!(scenarios::long_churn),
    ),
    scenario(
        "s13-side-streams",
        "648 MiB freed while side streams use it (pt#71616)",
        Limit::Bytes(3 * 648 * MIB),
        sure!(scenarios::side_streams),
    ),
    scenario(
        "s15-come-and-go",
        "200 × 56 MiB that come and go at once (vllm#43020)",
        Limit::Factor,
        sure!(scenarios::come_and_go),
    ),
    scenario(
        "s17-bulk-frees",
        "large blocks with bulk frees, 50 rounds (kvcached#437)",
        Limit::Factor,
        sure!(scenarios::bulk_frees),
    ),
];

impl Entry {
    /// Makes the workload: the same for the same seed. `rounds`: how long it is, 1 for a quick run.
    ///
    /// # Errors
    /// A generator that writes no valid trace, which is a defect.
    pub(crate) fn make(&self, seed: u64, rounds: u64) -> Result<Workload, String> {
        // Each its own numbers, whichever others run.
        let own = self.name.bytes().fold(seed, |state, byte| state.rotate_left(9) ^ u64::from(byte));
        let mut script = Script::new(own);
        (self.generate)(&mut script, rounds).map_err(|error| format!("the workload {}: {error}", self.name))?;
        let trace = script.build(self.name)?;
        let limit = match self.limit {
            Limit::Factor => None,
            Limit::Bytes(bytes) => Some(bytes),
            Limit::Full(percent) => Some(round_down(trace.peak_requested() * 100 / percent, GRANULE)),
        };
        Ok(Workload { origin: self.origin, about: self.about.to_owned(), trace, limit })
    }
}

impl Workload {
    /// A workload from a trace that was read.
    pub(crate) fn from_trace(trace: Trace) -> Self {
        let mut about = format!(
            "{} on {}",
            counted(trace.events.len() as u64, "event"),
            counted(trace.streams.len() as u64, "stream")
        );
        for note in &trace.notes {
            about = format!("{about}; {note}");
        }
        Self { origin: Origin::File, about, trace, limit: None }
    }

    /// Its name.
    pub(crate) fn name(&self) -> &str {
        &self.trace.name
    }
}
