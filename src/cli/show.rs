//! `xseg conf` and `xseg info`.
#![forbid(unsafe_code)]

use super::args::{self, ConfArgs, InfoArgs};
use super::{Failure, tables};
use crate::backend::{self, cost};
use crate::conf::{KEYS, VARIABLE};
use crate::config::{BackendChoice, Config, Defrag};
use crate::heap::PlanState;
use crate::plan::ahead::Plan;
use crate::policy;
use crate::units::{GRANULE, human};
use serde::Serialize;
use std::io::Write;

/// Runs `xseg conf`; the exit status.
pub(super) fn conf(args: &ConfArgs, out: &mut dyn Write) -> Result<u8, Failure> {
    let config = args::layered(args.conf.as_deref()).and_then(|config| args::with_limit(&config, None));
    let config = config.map_err(Failure::Usage)?;
    if args.json {
        for key in &KEYS {
            let (name, value) = (key.name, key.show(&config));
            let line = serde_json::json!({
                "key": name, "value": value, "default": key.default, "values": key.values, "meaning": key.meaning,
            });
            writeln!(out, "{line}")?;
        }
        return Ok(0);
    }
    let mut table = tables::wrapped(["key", "default", "present", "values", "meaning"]);
    for key in &KEYS {
        table.add_row([key.name, key.default, &key.show(&config), key.values, key.meaning]);
    }
    writeln!(out, "{table}")?;
    let text = config.to_string();
    let same = if text.is_empty() { "nothing differs from the defaults" } else { &text };
    writeln!(out, "XSEG_CONF for the present values: {same}")?;
    Ok(0)
}

/// One backend as `xseg info` shows it.
#[derive(Debug, Serialize)]
struct Info {
    backend: &'static str,
    available: bool,
    /// What `backend:auto` takes here.
    auto: bool,
    why_not: Option<String>,
    device: String,
    free: Option<u64>,
    total: Option<u64>,
    granularity: Option<u64>,
    /// Most physical memory of a heap with the present settings; null: no bound.
    limit: Option<u64>,
    /// Largest pieces of memory that it makes under that limit, for memory that stays and for memory that comes and goes.
    handles_staying: Option<u64>,
    handles_churning: Option<u64>,
    context_events: Option<bool>,
    concurrent_remap: Option<bool>,
    notes: Vec<String>,
    driver_time: String,
}

/// Runs `xseg info`; the exit status.
pub(super) fn info(args: &InfoArgs, out: &mut dyn Write) -> Result<u8, Failure> {
    // Wrong settings are found here too, before anything else is shown.
    let below = args::layered(None).map_err(Failure::Usage)?;
    let config = args::layered(args.conf.as_deref()).and_then(|config| args::with_limit(&config, None));
    let config = config.map_err(Failure::Usage)?;
    // Who set it, for a sentence that says so.
    let source = |same: bool| if same { VARIABLE } else { "--conf" };
    let plan = config.plan.as_deref().map(|path| Plan::load(path).map(|plan| plan.top())).transpose();
    let plan =
        plan.map_err(|error| Failure::Usage(format!("plan in {}: {error}", source(below.plan == config.plan))))?;
    let device = if let BackendChoice::Cuda(device) = config.backend { device } else { 0 };
    let choices = [("cuda", BackendChoice::Cuda(device)), ("host", BackendChoice::Host), ("sim", BackendChoice::Sim)];
    let setter = source(below.backend == config.backend);
    let named = KEYS.iter().find(|key| key.name == "backend").map(|key| key.show(&config)).unwrap_or_default();
    let (mut auto, mut usable) = (None, Ok(()));
    for (name, choice) in choices {
        let mut info = look(name, choice, &config);
        // Of several GPUs `auto` takes the first, whichever is set.
        let works = match choice {
            BackendChoice::Cuda(1..) => backend::open_with(BackendChoice::Cuda(0), &config).is_ok(),
            _ => info.available,
        };
        info.auto = works && auto.is_none();
        if info.auto {
            auto = Some(name);
        }
        let limit = info.limit.unwrap_or(u64::MAX);
        if let Some(bytes) = plan.filter(|bytes| info.available && *bytes > limit) {
            info.notes.push(PlanState::TooLarge { bytes, limit }.to_string());
        }
        if let Some(why) = info.why_not.as_ref().filter(|_| choice == config.backend) {
            usable = Err(Failure::Usage(format!("{setter} sets backend:{named}, and {why}")));
        }
        if args.json {
            let line = serde_json::to_string(&info).map_err(std::io::Error::from)?;
            writeln!(out, "{line}")?;
        } else {
            tell(&info, out)?;
        }
    }
    if !args.json {
        if let Some(auto) = auto {
            writeln!(out, "backend:auto is {auto} here")?;
        }
        if config.backend != BackendChoice::Auto {
            writeln!(out, "{setter} sets backend:{named}")?;
        }
        writeln!(out, "xseg {}", env!("CARGO_PKG_VERSION"))?;
    }
    usable.map(|()| 0)
}

fn look(name: &'static str, choice: BackendChoice, config: &Config) -> Info {
    let driver_time = if name == "cuda" { "measured".to_owned() } else { format!("modelled by {}", cost::MODEL) };
    let mut info = Info {
        backend: name,
        available: false,
        auto: false,
        why_not: None,
        device: String::new(),
        free: None,
        total: None,
        granularity: None,
        limit: None,
        handles_staying: None,
        handles_churning: None,
        context_events: None,
        concurrent_remap: None,
        notes: Vec::new(),
        driver_time,
    };
    match backend::open_with(choice, config) {
        Ok(backend) => {
            let capabilities = backend.capabilities();
            info.available = true;
            info.device.clone_from(&capabilities.device);
            info.granularity = Some(capabilities.granularity);
            info.context_events = Some(capabilities.context_events);
            info.concurrent_remap = Some(capabilities.concurrent_remap);
            info.notes.clone_from(&capabilities.notes);
            match backend.memory() {
                Ok(memory) => {
                    // No bound is null, as a limit that is not there.
                    info.free = (memory.free != u64::MAX).then_some(memory.free);
                    info.total = (memory.total != u64::MAX).then_some(memory.total);
                    let (limit, most) = (config.limit_on(memory.total), config.handle_max / GRANULE);
                    info.limit = (limit != u64::MAX).then_some(limit);
                    let most = u32::try_from(most).unwrap_or(u32::MAX);
                    let (staying, churning) =
                        policy::largest_handles(config.handles, limit / GRANULE, most, config.defrag == Defrag::Eager);
                    info.handles_staying = Some(u64::from(staying) * GRANULE);
                    info.handles_churning = Some(u64::from(churning) * GRANULE);
                }
                Err(error) => info.notes.push(error.to_string()),
            }
        }
        Err(error) => info.why_not = Some(error.to_string()),
    }
    info
}

fn tell(info: &Info, out: &mut dyn Write) -> Result<(), Failure> {
    if let Some(why) = &info.why_not {
        writeln!(out, "{}: not available\n  {why}", info.backend)?;
        return Ok(());
    }
    writeln!(out, "{}: {}", info.backend, info.device)?;
    let size = |bytes: Option<u64>| bytes.map_or_else(|| "unknown".to_owned(), human);
    match info.total {
        Some(_) => writeln!(out, "  memory: {} free of {}", size(info.free), size(info.total))?,
        None => writeln!(out, "  memory: no bound")?,
    }
    let limit = info.limit.map_or_else(|| "none".to_owned(), human);
    let (staying, churning) = (size(info.handles_staying), size(info.handles_churning));
    let pieces =
        if staying == churning { staying } else { format!("{staying}, {churning} once memory comes and goes") };
    writeln!(out, "  limit: {limit}; pieces of memory of up to {pieces}")?;
    writeln!(out, "  granule of the driver: {}", size(info.granularity))?;
    let yes = |flag: Option<bool>| if flag == Some(true) { "yes" } else { "no" };
    writeln!(out, "  one event for all streams of the context: {}", yes(info.context_events))?;
    writeln!(out, "  page tables change beside running kernels: {}", yes(info.concurrent_remap))?;
    writeln!(out, "  driver time: {}", info.driver_time)?;
    for note in &info.notes {
        writeln!(out, "  {note}")?;
    }
    Ok(())
}
