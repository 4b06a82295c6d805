//! The one table of keys.
#![forbid(unsafe_code)]

use super::values::{SIZE_FORM, duration, duration_text, factor, factor_text, share, share_text, size, size_text};
use crate::config::{
    BackendChoice, Config, CrossStream, Defrag, Growth, Handles, Peers, RemapMode, SMALL_LIMIT_MAX, Shrink,
    SizeOrShare, StreamHandles,
};
use crate::error::{Error, Result};
use crate::units::{GIB, GRANULE, RESERVE_MAX};
use std::fmt::Write as _;
use std::time::Duration;

/// What an address range, limit or step can be at most: 2^46 bytes, the driver's largest reservation.
const SIZE_MAX: u64 = 1 << 46;
/// Largest share of `slack` and `watermark`: ten times what is live.
const EXCESS_MAX: f64 = 10.0;
const DAY: Duration = Duration::from_secs(24 * 3600);

type Parsed<T> = std::result::Result<T, String>;

/// One key of `XSEG_CONF`.
#[derive(Debug, Clone, Copy)]
pub struct Key {
    /// Its name.
    pub name: &'static str,
    /// What it sets.
    pub meaning: &'static str,
    /// What is allowed.
    pub values: &'static str,
    /// The default as text.
    pub default: &'static str,
    show: fn(&Config) -> String,
    set: fn(&mut Config, &str) -> Parsed<()>,
}

impl Key {
    /// The present value as text that the parser takes.
    #[must_use]
    pub fn show(&self, config: &Config) -> String {
        (self.show)(config)
    }

    /// Sets the value.
    ///
    /// # Errors
    /// [`Error::Config`] that names the key and what is allowed; `config` is then unchanged.
    pub fn set(&self, config: &mut Config, value: &str) -> Result<()> {
        (self.set)(config, value).map_err(|why| {
            let (name, small) = (self.name, value.to_ascii_lowercase());
            let slip = small != value && (self.set)(&mut config.clone(), &small).is_ok();
            let hint = if slip { format!("; did you mean `{name}:{}`?", super::clipped(&small)) } else { ";".into() };
            Error::Config(format!("`{name}:{}`: {why}{hint} allowed: {}", super::clipped(value), self.values))
        })
    }
}

/// Every key, in the order of the documentation.
pub const KEYS: [Key; 21] = [
    Key {
        name: "limit",
        meaning: "most physical memory that may exist; auto leaves 512 MiB or 1 %, whichever is more, to others. `sim` has any amount, so that a share of it is no limit",
        values: "auto, a size from 2MiB, or a share of the device's memory up to 100%",
        default: "auto",
        show: |c| match c.limit {
            None => "auto".into(),
            Some(SizeOrShare::Bytes(bytes)) => size_text(bytes),
            Some(SizeOrShare::Share(share)) => share_text(share),
        },
        set: |c, v| {
            c.limit = match v {
                "auto" => None,
                v if v.strip_suffix('x').is_some_and(|number| factor(number).is_ok()) => {
                    return Err("a factor of a trace's peak is for `--limit` of `xseg replay`".into());
                }
                v if v.ends_with('%') => Some(SizeOrShare::Share(positive(between(share(v)?, 0.0, 1.0)?)?)),
                v => Some(SizeOrShare::Bytes(within(size(v)?, GRANULE, SIZE_MAX)?)),
            };
            Ok(())
        },
    },
    Key {
        name: "reserve",
        meaning: "addresses reserved at start, and again each time they are used up; auto is four times the device's memory, 1 TiB where that is unbounded",
        values: "auto, or a size from 2MiB to 2TiB",
        default: "auto",
        show: |c| c.reserve.map_or_else(|| "auto".into(), size_text),
        set: |c, v| {
            c.reserve = if v == "auto" { None } else { Some(within(size(v)?, GRANULE, RESERVE_MAX)?) };
            Ok(())
        },
    },
    Key {
        name: "growth",
        meaning: "how much one growth step creates: what the request misses, at least a step, or what makes this factor \
                  of what is reserved; at most a 64th of what may still be created",
        values: "exact, step=SIZE (2MiB to 64TiB), or geometric=FACTOR (above 1, up to 16)",
        default: "step=64MiB",
        show: |c| match c.growth {
            Growth::Exact => "exact".into(),
            Growth::Step(bytes) => format!("step={}", size_text(bytes)),
            Growth::Geometric(by) => format!("geometric={}", factor_text(by)),
        },
        set: |c, v| {
            c.growth = match v.split_once('=') {
                None if v == "exact" => Growth::Exact,
                Some(("step", v)) => Growth::Step(within(size(v)?, GRANULE, SIZE_MAX)?),
                Some(("geometric", v)) => Growth::Geometric(above_one(between(factor(v)?, 1.0, 16.0)?)?),
                _ => return Err(choice()),
            };
            Ok(())
        },
    },
    Key {
        name: "handle_max",
        meaning: "largest piece of physical memory; large ones cost fewer driver calls, small ones fit tighter; under a limit \
                  pieces are at most a 384th of it, a 700th once memory comes and goes, or an 80th of the request if that is \
                  more, and smaller as memory fills (`xseg info` shows the sizes)",
        values: "a multiple of 2MiB, up to 1GiB",
        default: "32MiB",
        show: |c| size_text(c.handle_max),
        set: |c, v| {
            let bytes = within(size(v)?, GRANULE, GIB)?;
            if !bytes.is_multiple_of(GRANULE) {
                return Err("it is no multiple of 2MiB".into());
            }
            c.handle_max = bytes;
            Ok(())
        },
    },
    Key {
        name: "handles",
        meaning: "large pieces of physical memory, for the least driver time; or small ones, powers of two of at most a 2800th of \
                  the limit (of the device, where none is set), with which most runs complete in up to 1 % less memory, for \
                  up to six times the driver time while memory grows (40 us a piece); from limits of 96GiB on both are as \
                  large as `handle_max` allows by default; xseg.install() has PyTorch take small ones unless told otherwise",
        values: "large or small",
        default: "large",
        show: |c| named(&HANDLES, c.handles),
        set: |c, v| {
            c.handles = chosen(&HANDLES, v)?;
            Ok(())
        },
    },
    Key {
        name: "warmup",
        meaning: "memory created and mapped at start; at most `limit` and `reserve`",
        values: SIZE_FORM,
        default: "0",
        show: |c| size_text(c.warmup),
        set: |c, v| {
            c.warmup = within(size(v)?, 0, SIZE_MAX)?;
            Ok(())
        },
    },
    Key {
        name: "shrink",
        meaning: "when idle memory goes back to the driver by itself; `idle` and `watermark` (reserved above live by \
                  this share) are looked at on calls and on `tick`, and `idle` counts from the first look that finds memory idle",
        values: "never, oom, idle=DURATION (up to 24h), or watermark=SHARE (up to 1000%)",
        default: "oom",
        show: |c| match c.shrink {
            Shrink::Never => "never".into(),
            Shrink::Oom => "oom".into(),
            Shrink::Idle(time) => format!("idle={}", duration_text(time)),
            Shrink::Watermark(above) => format!("watermark={}", share_text(above)),
        },
        set: |c, v| {
            c.shrink = match v.split_once('=') {
                None if v == "never" => Shrink::Never,
                None if v == "oom" => Shrink::Oom,
                Some(("idle", v)) => Shrink::Idle(at_most(duration(v)?, DAY)?),
                Some(("watermark", v)) => Shrink::Watermark(between(share(v)?, 0.0, EXCESS_MAX)?),
                _ => return Err(choice()),
            };
            Ok(())
        },
    },
    Key {
        name: "keep",
        meaning: "physical memory that shrinking leaves; at most `limit`",
        values: SIZE_FORM,
        default: "0",
        show: |c| size_text(c.keep),
        set: |c, v| {
            c.keep = within(size(v)?, 0, SIZE_MAX)?;
            Ok(())
        },
    },
    Key {
        name: "defrag",
        meaning: "when pages move instead of memory being created: on_pressure where none can be (the limit, or `slack`) \
                  and where they have been idle for long; eager as soon as more than a little lies idle (`slack`), in \
                  small pieces, for several times the driver time; off never",
        values: "on_pressure, eager, or off",
        default: "on_pressure",
        show: |c| named(&DEFRAG, c.defrag),
        set: |c, v| {
            c.defrag = chosen(&DEFRAG, v)?;
            Ok(())
        },
    },
    Key {
        name: "slack",
        meaning: "pages move before memory is created when reserved exceeds the most that was live by this share of \
                  it (a target: free memory that is locked in pieces beside live blocks comes on top); a share that is given \
                  also makes pieces smaller the nearer reserved comes to it, for several times the driver time; auto: 0.35% \
                  with `defrag:eager`; else, while no limit is set, 2% for requests of 512 MiB and more and 0.8% for others \
                  with which no more is live than once was; else none, since memory up to a limit is there to be used",
        values: "auto, unlimited, or a share such as 5%, up to 1000%",
        default: "auto",
        show: |c| match c.slack {
            None => "auto".into(),
            Some(slack) if slack.is_infinite() => "unlimited".into(),
            Some(slack) => share_text(slack),
        },
        set: |c, v| {
            c.slack = match v {
                "auto" => None,
                "unlimited" => Some(f64::INFINITY),
                share_of_live => Some(between(share(share_of_live)?, 0.0, EXCESS_MAX)?),
            };
            Ok(())
        },
    },
    Key {
        name: "joins",
        meaning: "where memory runs out, a piece of it of which one end lies idle beside a live block is mapped a second time, so that the \
                  end can be part of another block",
        values: "on or off",
        default: "on",
        show: |c| named(&SWITCH, c.joins),
        set: |c, v| {
            c.joins = chosen(&SWITCH, v)?;
            Ok(())
        },
    },
    Key {
        name: "small_limit",
        meaning: "largest request of the small pools, which keep small blocks away from large handles",
        values: "a size from 0 to 1MiB",
        default: "1MiB",
        show: |c| size_text(c.small_limit),
        set: |c, v| {
            c.small_limit = within(size(v)?, 0, SMALL_LIMIT_MAX)?;
            Ok(())
        },
    },
    Key {
        name: "cross_stream",
        meaning: "what another stream needs before it takes a free block: proof that every stream has passed the \
                  free, never, or the proof and under pressure a wait on the GPU",
        values: "passed, off, or wait",
        default: "passed",
        show: |c| named(&CROSS_STREAM, c.cross_stream),
        set: |c, v| {
            c.cross_stream = chosen(&CROSS_STREAM, v)?;
            Ok(())
        },
    },
    Key {
        name: "streams",
        meaning: "whether the driver is asked on each request which stream a CUDA handle stands for (two calls, 52 ns on an \
                  H200; none for the default streams), since handles of destroyed streams come again while their work still \
                  runs; or a handle is one stream until the program retires it",
        values: "checked or trusted",
        default: "checked",
        show: |c| named(&STREAMS, c.streams),
        set: |c, v| {
            c.streams = chosen(&STREAMS, v)?;
            Ok(())
        },
    },
    Key {
        name: "remap",
        meaning: "how page tables are edited: beside running kernels, after waiting for the device, or as the device \
                  allows",
        values: "auto, concurrent, or quiesce",
        default: "auto",
        show: |c| named(&REMAP, c.remap),
        set: |c, v| {
            c.remap = chosen(&REMAP, v)?;
            Ok(())
        },
    },
    Key {
        name: "backend",
        meaning: "where memory comes from: a GPU, really remapped host memory, or counted calls without memory; auto \
                  is cuda where there is a device, else host",
        values: "auto, cuda, cuda=N (device number), host, or sim",
        default: "auto",
        show: |c| match c.backend {
            BackendChoice::Auto => "auto".into(),
            BackendChoice::Cuda(0) => "cuda".into(),
            BackendChoice::Cuda(device) => format!("cuda={device}"),
            BackendChoice::Host => "host".into(),
            BackendChoice::Sim => "sim".into(),
        },
        set: |c, v| {
            c.backend = match v {
                "auto" => BackendChoice::Auto,
                "cuda" => BackendChoice::Cuda(0),
                "host" => BackendChoice::Host,
                "sim" => BackendChoice::Sim,
                v => BackendChoice::Cuda(device(v.strip_prefix("cuda=").ok_or_else(choice)?)?),
            };
            Ok(())
        },
    },
    Key {
        name: "peers",
        meaning: "devices that get access to a GPU's memory when it is mapped, as far as they can reach it; others may get it later \
                  (`Heap::enable_peer`)",
        values: "none, all, or device numbers such as 1 or 1+2+3",
        default: "none",
        show: |c| match &c.peers {
            Peers::None => "none".into(),
            Peers::All => "all".into(),
            Peers::Listed(devices) => devices.iter().map(u32::to_string).collect::<Vec<_>>().join("+"),
        },
        set: |c, v| {
            c.peers = match v {
                "none" => Peers::None,
                "all" => Peers::All,
                v => Peers::Listed(v.split('+').map(device).collect::<Parsed<_>>()?),
            };
            Ok(())
        },
    },
    Key {
        name: "plan",
        meaning: "a plan made by `xseg plan` from a recorded run: as long as a program asks for the same again, each large block \
                  gets the place that was chosen ahead, on pieces of memory of up to four times `handle_max`",
        values: "none, or a file (no comma in its path; `./none` for one of that name)",
        default: "none",
        show: |c| c.plan.as_ref().map_or_else(|| "none".into(), |path| path.display().to_string()),
        set: |c, v| {
            c.plan = match v {
                "none" => None,
                "" => return Err("it names no file".into()),
                path => Some(path.into()),
            };
            Ok(())
        },
    },
    Key {
        name: "stats",
        meaning: "print statistics to stderr when the heap ends, of the moment before its memory goes back",
        values: "on or off",
        default: "off",
        show: |c| named(&SWITCH, c.stats),
        set: |c, v| {
            c.stats = chosen(&SWITCH, v)?;
            Ok(())
        },
    },
    Key {
        name: "nvtx",
        meaning: "ranges for NVIDIA's profilers around growth and moves, where the NVTX library is installed",
        values: "on or off",
        default: "off",
        show: |c| named(&SWITCH, c.nvtx),
        set: |c, v| {
            c.nvtx = chosen(&SWITCH, v)?;
            Ok(())
        },
    },
    Key {
        name: "wait_limit",
        meaning: "longest wait of the host for the device and for exports that are open, the last step before an out-of-memory error; 0s never waits",
        values: "a duration from 0s to 24h, such as 5s or 200ms",
        default: "10s",
        show: |c| duration_text(c.wait_limit),
        set: |c, v| {
            c.wait_limit = at_most(duration(v)?, DAY)?;
            Ok(())
        },
    },
];

const DEFRAG: [(&str, Defrag); 3] =
    [("on_pressure", Defrag::OnPressure), ("eager", Defrag::Eager), ("off", Defrag::Off)];
const CROSS_STREAM: [(&str, CrossStream); 3] =
    [("passed", CrossStream::Passed), ("off", CrossStream::Off), ("wait", CrossStream::Wait)];
const HANDLES: [(&str, Handles); 2] = [("large", Handles::Large), ("small", Handles::Small)];
const STREAMS: [(&str, StreamHandles); 2] = [("checked", StreamHandles::Checked), ("trusted", StreamHandles::Trusted)];
const REMAP: [(&str, RemapMode); 3] =
    [("auto", RemapMode::Auto), ("concurrent", RemapMode::Concurrent), ("quiesce", RemapMode::Quiesce)];
const SWITCH: [(&str, bool); 2] = [("on", true), ("off", false)];

/// The table of keys for the README.
#[must_use]
pub fn markdown_table() -> String {
    let mut text = String::from("| key | default | values | meaning |\n|---|---|---|---|\n");
    for key in &KEYS {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "| `{}` | `{}` | {} | {} |", key.name, key.default, key.values, key.meaning);
    }
    text
}

fn named<T: Copy + PartialEq>(names: &[(&'static str, T)], value: T) -> String {
    names.iter().find(|(_, named)| *named == value).map_or("", |(name, _)| name).to_owned()
}

fn chosen<T: Copy>(names: &[(&'static str, T)], text: &str) -> Parsed<T> {
    names.iter().find(|(name, _)| *name == text).map(|(_, value)| *value).ok_or_else(choice)
}

fn device(text: &str) -> Parsed<u32> {
    let number = text.parse().ok().filter(|number| *number <= 4095);
    number.ok_or_else(|| "it is no device number from 0 to 4095".into())
}

fn choice() -> String {
    "it is none of the choices".into()
}

fn within(bytes: u64, least: u64, most: u64) -> Parsed<u64> {
    match bytes {
        b if b < least => Err(format!("it is less than {}", size_text(least))),
        b if b > most => Err(format!("it is more than {}", size_text(most))),
        b => Ok(b),
    }
}

fn between(value: f64, least: f64, most: f64) -> Parsed<f64> {
    if (least..=most).contains(&value) { Ok(value) } else { Err("it is out of range".into()) }
}

fn positive(value: f64) -> Parsed<f64> {
    if value > 0.0 { Ok(value) } else { Err("it is not above 0".into()) }
}

fn above_one(value: f64) -> Parsed<f64> {
    if value > 1.0 { Ok(value) } else { Err("it is not above 1".into()) }
}

fn at_most(time: Duration, most: Duration) -> Parsed<Duration> {
    if time <= most { Ok(time) } else { Err(format!("it is longer than {}", duration_text(most))) }
}
