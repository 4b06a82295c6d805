//! Arguments and their forms.
#![forbid(unsafe_code)]

use crate::backend::inject::Fault;
use crate::conf::{Ratio, duration, size};
use crate::config::{BackendChoice, Config, SizeOrShare};
use crate::units::{GRANULE, human, round_down};
use clap::Args;
use std::path::PathBuf;
use std::time::Duration;

pub(super) const REPLAY_EXAMPLES: &str = "\
Examples:
  xseg replay traces --backend sim                      all shipped traces, in a table
  xseg replay run.pickle --limit 40G --backend sim      would a recorded run have fitted into 40 GiB?
  xseg replay traces/moe.trace.xz --backend host --verify --limit 1.05x --gpu-lag 20ms
  xseg replay traces --backend cuda --verify --limit 1.02x
  xseg replay traces --allocator all --json             every allocator, one JSON object a line

A replay makes the requests of the trace one after the other, with no kernels between, and stops at the first that is refused. \
Exit status: 0 when all completed, 1 when one was refused memory, failed or found a mismatch, 2 for input that cannot be used.";

/// What is read, and how much of it.
pub(super) const INPUTS: &str = "\
A trace is the list of a run's allocations and frees. Of a run under PyTorch: \
torch.cuda.memory._record_memory_history(context=None) before it, torch.cuda.memory._dump_snapshot(\"run.pickle\") after it. \
Traces are text (.trace, up to 4 GiB unfolded) and PyTorch snapshots (.pickle, up to 256 MiB unfolded; \
without stacks, as above, they are small), each also as .xz or .zst. Of a snapshot of several GPUs one is read: \
the one with the longest history, or that of --device.";

pub(super) const LEAST_EXAMPLES: &str = "\
Examples:
  xseg least traces --backend sim                       in seconds; other backends do every replay for real
  xseg least traces/fsdp.trace.xz --conf handle_max:20MiB --json

How little memory is enough? The trace is replayed under one limit after the other, in steps of 0.05 % of the most bytes that \
it has live at once, rounded down to 2 MiB. The answer is the lowest step that completes together with the 20 steps above it, \
so that no lucky one counts; as a factor it can be given to `xseg replay --limit`. The other figures are of the replay at that \
limit, but for what was locked just below it: free memory in pieces that live blocks hold, which a smaller `handle_max` makes \
less, for more driver calls. Exit status: as of `xseg replay`.";

pub(super) const PLAN_EXAMPLES: &str = "\
Examples:
  xseg plan run.pickle -o run.plan                      then train with XSEG_CONF=plan:run.plan
  xseg replay run.pickle --backend sim --conf plan:run.plan --limit 1.01x

Requests of more than 1 MiB are planned: the step that repeats with all before its first round, or, where none repeats, \
the whole run. A program that asks for something else goes on by the ordinary rules until it asks for the same again.";

/// Arguments of `replay` and `least`.
#[derive(Debug, Args)]
pub(super) struct RunArgs {
    /// Trace files (.trace, PyTorch snapshot .pickle, each also .xz or .zst) or folders of them
    #[arg(required = true, value_name = "TRACE")]
    pub(super) traces: Vec<PathBuf>,
    /// The device of PyTorch snapshots of several GPUs that is read, from 0; by default the one with the longest history
    #[arg(long, value_name = "N")]
    pub(super) device: Option<u32>,
    /// Where memory comes from: cuda, cuda=N, host (really remapped) or sim (no memory; calls are counted and priced); auto,
    /// the default, is cuda where there is a GPU, else host
    #[arg(long, value_name = "BACKEND")]
    pub(super) backend: Option<String>,
    /// Most physical memory: a size such as 40G, or 1.02x for that many times the most bytes that the trace has live at once;
    /// by default that of `limit` in the settings
    #[arg(long, value_name = "SIZE|FACTORx", value_parser = limit)]
    pub(super) limit: Option<Limit>,
    /// Settings over those of `XSEG_CONF`, in the same form: key:value,key:value
    #[arg(long, value_name = "CONF")]
    pub(super) conf: Option<String>,
    // Its help names them all.
    #[arg(long, value_name = "NAME", default_value = "xseg", help = format!(
        "Allocator to replay against: {}, or all; all but xseg are models of other designs, which run on sim",
        crate::subjects::names().join(", ")
    ))]
    pub(super) allocator: String,
    /// How far the device lags behind: work is done this long after it was queued, in trace time, such as 20ms (sim, host)
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "0")]
    pub(super) gpu_lag: Duration,
    /// Write a pattern into each block when it is allocated and check it when it is freed (host; cuda, by kernels)
    #[arg(long)]
    pub(super) verify: bool,
    /// Break the heap on purpose, which the verification must find: swap, lost or early-unmap
    #[arg(long, value_name = "FAULT", requires = "verify")]
    pub(super) inject: Option<Fault>,
    /// Print one JSON object a line instead of a table
    #[arg(long)]
    pub(super) json: bool,
}

/// Arguments of `plan`.
#[derive(Debug, Args)]
pub(super) struct PlanArgs {
    /// The trace of the run (.trace, PyTorch snapshot .pickle, each also .xz or .zst)
    #[arg(value_name = "TRACE")]
    pub(super) trace: PathBuf,
    /// The device of a PyTorch snapshot of several GPUs that is read, from 0; by default the one with the longest history
    #[arg(long, value_name = "N")]
    pub(super) device: Option<u32>,
    /// Where the plan goes; without it only what was found is shown
    #[arg(short, long, value_name = "FILE")]
    pub(super) out: Option<PathBuf>,
    /// How long after a free other streams may not have a block's place, in trace time: more than the device lags behind
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "100ms")]
    pub(super) apart: Duration,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub(super) json: bool,
}

/// Arguments of `conf`.
#[derive(Debug, Args)]
pub(super) struct ConfArgs {
    /// Settings over those of `XSEG_CONF`
    #[arg(long, value_name = "CONF")]
    pub(super) conf: Option<String>,
    /// Print one JSON object a line instead of a table
    #[arg(long)]
    pub(super) json: bool,
}

/// Arguments of `info`.
#[derive(Debug, Args)]
pub(super) struct InfoArgs {
    /// Settings over those of `XSEG_CONF`
    #[arg(long, value_name = "CONF")]
    pub(super) conf: Option<String>,
    /// Print one JSON object a line instead of text
    #[arg(long)]
    pub(super) json: bool,
}

/// A limit as given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Limit {
    /// Bytes.
    Bytes(u64),
    /// Times peak requested.
    Times(Ratio),
}

/// The least factor of a peak that is taken for meant.
const LEAST_FACTOR: f64 = 0.01;

pub(super) fn limit(text: &str) -> Result<Limit, String> {
    if let Some(factor) = text.strip_suffix('x') {
        let factor = Ratio::parse(factor).ok_or("write a factor such as 1.02x")?;
        return match factor.value() >= LEAST_FACTOR {
            true => Ok(Limit::Times(factor)),
            false => Err("nothing runs in so little; write a factor such as 1.02x".to_owned()),
        };
    }
    let bytes = size(text).map_err(|why| format!("{why}; or write a factor of the peak such as 1.02x"))?;
    match bytes >= GRANULE {
        true => Ok(Limit::Bytes(bytes)),
        // A bare number this small is a factor whose x was forgotten.
        false if Ratio::parse(text).is_some_and(|number| number.value() > 0.0) => Err(format!(
            "{text}x was probably meant, that many times the trace's peak; as a size it would be {text} bytes, and the least \
                 is 2MiB"
        )),
        false => Err(below_a_granule(bytes)),
    }
}

fn below_a_granule(bytes: u64) -> String {
    format!("a limit of {} is less than one granule; give at least 2MiB", human(bytes))
}

/// Threads.
pub(super) fn jobs(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|jobs| *jobs > 0).ok_or_else(|| "give a number of threads from 1".to_owned())
}

impl Limit {
    /// In bytes; a factor, of a granule at least, is rounded down to a granule.
    pub(super) fn bytes(self, peak_requested: u64) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Times(factor) => round_down(factor.of(peak_requested.max(GRANULE)), GRANULE),
        }
    }
}

/// Settings of `XSEG_CONF` with `conf` over them.
pub(super) fn layered(conf: Option<&str>) -> Result<Config, String> {
    let mut config = Config::default();
    config.apply_env().map_err(|error| error.to_string())?;
    if let Some(text) = conf {
        config.apply(text).map_err(|error| named("--conf", &error))?;
    }
    Ok(config)
}

/// `config` with `limit` over it, checked.
pub(super) fn with_limit(config: &Config, limit: Option<u64>) -> Result<Config, String> {
    let mut config = config.clone();
    if let Some(bytes) = limit {
        if bytes < GRANULE {
            return Err(below_a_granule(bytes));
        }
        config.limit = Some(SizeOrShare::Bytes(bytes));
    }
    config.check().map_err(|error| named("the settings contradict each other", &error))?;
    Ok(config)
}

/// The backend of the command line.
pub(super) fn backend(text: &str) -> Result<BackendChoice, String> {
    let mut config = Config::default();
    config.apply(&format!("backend:{text}")).map_err(|error| named("--backend", &error))?;
    Ok(config.backend)
}

fn named(source: &str, error: &crate::Error) -> String {
    match error {
        crate::Error::Config(why) => format!("{source}: {why}"),
        other => format!("{source}: {other}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits() {
        let bytes = |text| limit(text).unwrap().bytes(1000 * GRANULE + 5);
        assert_eq!(bytes("40G"), 40 << 30);
        assert_eq!(bytes("1.02x"), 1020 * GRANULE);
        assert_eq!(bytes("1x"), 1000 * GRANULE);
        assert_eq!(bytes("99999999x"), round_down(99_999_999 * (1000 * GRANULE + 5), GRANULE));
        assert!(limit("x").is_err() && limit("-1x").is_err() && limit("10GB").is_err());
        let advice = limit("1.02").unwrap_err();
        assert!(advice.starts_with("1.02x was probably meant") && advice.contains("the least is 2MiB"), "{advice}");
        for low in ["0", "0x", "0.000x", "0.005x", "1", "2097151", "1K"] {
            assert!(limit(low).is_err(), "{low}");
        }
        assert_eq!((bytes("2MiB"), bytes("2097152"), bytes("0.01x")), (GRANULE, GRANULE, 10 * GRANULE));
        assert!(jobs("0").is_err() && jobs("-1").is_err());
        assert_eq!(jobs("3"), Ok(3));
        assert!(with_limit(&Config::default(), Some(5)).is_err());
    }
}
