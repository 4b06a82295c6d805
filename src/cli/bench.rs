//! `xseg bench` and `cargo bench --bench defrag`.
#![forbid(unsafe_code)]

use super::args::{self, Limit};
use super::progress::Bar;
use super::{Failure, complain, files};
use crate::backend::cost::MODEL;
use crate::conf::duration;
use crate::peers::{self, Limits, Line, Program, Texts};
use crate::suite::report::{self, Report, Setup};
use crate::suite::workloads::{CATALOGUE, Workload};
use crate::suite::{self, Least, Options, classic, moving};
use crate::trace::{Trace, name_of};
use crate::units::{GIB, GRANULE, human};
use clap::Args;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

pub(super) const EXAMPLES: &str = "\
Examples:
  xseg bench traces                      the shipped traces through every allocator, with a page of HTML
  xseg bench my_snapshot.pickle          the same for a PyTorch snapshot of yours
  xseg bench --quick                     generated workloads and shipped traces, shortened, in under a minute
  xseg bench --workload moe-skew,zero3 --allocator xseg,torch-expandable --limit 1.01x
  xseg bench --list                      the generated workloads
  xseg bench traces --peers target/peers/peers    on a GPU: PyTorch's and CUDA's own allocators beside their models

Without TRACE and --workload all generated workloads run, and the shipped traces if the folder `traces` is here. With TRACE \
only the allocators are compared; without, moving against copying and the classic tables come too.";

/// Arguments of `bench`.
#[derive(Debug, Args)]
pub(super) struct BenchArgs {
    /// Trace files (.trace, PyTorch snapshot .pickle, each also .xz or .zst) or folders of them
    #[arg(value_name = "TRACE")]
    traces: Vec<PathBuf>,
    /// The device of PyTorch snapshots of several GPUs that is read, from 0; by default the one with the longest history
    #[arg(long, value_name = "N", requires = "traces")]
    device: Option<u32>,
    /// Generated workloads by name, or `all`; `none`: only the parts that need no workload
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    workload: Vec<String>,
    /// Allocators by name, or `all`; `xseg-host` is xseg on host memory, really remapped and verified
    #[arg(long, value_name = "NAMES", value_delimiter = ',', default_value = "all")]
    allocator: Vec<String>,
    /// The limit for the runs with little memory: a size such as 40G, or a factor of each peak such as 1.02x
    #[arg(long, value_name = "SIZE|FACTORx", value_parser = args::limit, default_value = "1.02x")]
    limit: Limit,
    /// Settings of xseg over those of `XSEG_CONF`, in the same form: key:value,key:value
    #[arg(long, value_name = "CONF")]
    conf: Option<String>,
    /// Work is done this long after it was queued, in trace time
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "5ms")]
    gpu_lag: Duration,
    /// Seed of the generated workloads
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    seed: u64,
    /// Short workloads, the two shortest shipped traces, least memory to 0.5 %: under a minute on two cores
    #[arg(long)]
    quick: bool,
    /// With TRACE, do these parts too: moving (moving against copying, on this machine), classic (tables)
    #[arg(long, value_name = "PARTS", value_delimiter = ',', value_parser = ["moving", "classic"])]
    also: Vec<String>,
    /// Leave parts out: least (the search for the least memory), moving, classic
    #[arg(long, value_name = "PARTS", value_delimiter = ',', value_parser = ["least", "moving", "classic"])]
    skip: Vec<String>,
    /// Real allocators beside their models: the program that benches/peers/run.sh builds, or a report with its figures
    #[arg(long, value_name = "PROGRAM|FILE")]
    peers: Option<PathBuf>,
    /// Folder for report.html, report.json, rows.csv and summary.csv; xseg-bench/NAME by default, with the name of the
    /// trace, of the workload, or `suite`
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Threads; as many as there are cores by default
    #[arg(long, value_name = "NUMBER", value_parser = args::jobs)]
    jobs: Option<usize>,
    /// Print all tables of the report, not only what each workload comes to
    #[arg(long)]
    full: bool,
    /// Print one JSON object a line for each workload and allocator instead of tables
    #[arg(long)]
    json: bool,
    /// List the generated workloads and stop
    #[arg(long)]
    list: bool,
}

/// Rounds of generated workloads, of a full run and of a quick one.
const ROUNDS: [u64; 2] = [3, 1];
/// Shipped traces of a quick run.
const QUICK_TRACES: [&str; 2] = ["gpt2", "llama_tiny_snapshot"];
/// Most bytes live at once in a workload.
const PEAK_MAX: u64 = 4096 * GIB;
/// The folder of shipped traces, as the README names it.
const SHIPPED: &str = "traces";

/// Runs the suite; the exit status.
pub(super) fn bench(args: &BenchArgs, out: &mut dyn Write) -> Result<u8, Failure> {
    if args.list {
        for entry in CATALOGUE {
            writeln!(out, "{:<18} {}", entry.name, entry.about)?;
        }
        return Ok(0);
    }
    let config = args::layered(args.conf.as_deref()).map_err(Failure::Usage)?;
    let allocators = allocators(&args.allocator)?;
    let bar = Bar::new();
    let (workloads, wrong) = workloads(args, &bar)?;
    bar.aside(|| wrong.iter().for_each(|why| complain(why)));
    if workloads.is_empty() && (!wrong.is_empty() || !["moving", "classic"].iter().any(|part| does(args, part))) {
        let why = match wrong.is_empty() {
            true => "there is nothing to run; name a trace or --workload all",
            // What is wrong with each was said.
            false => "no trace that was named can be used, so nothing was run",
        };
        return Err(Failure::Usage(why.into()));
    }
    if let Some(both) = args.also.iter().find(|part| args.skip.contains(part)) {
        return Err(Failure::Usage(format!("{both} is in --also and in --skip; keep one of the two")));
    }
    let limit = args.limit;
    // A peak below a granule gets one; a limit below one is a slip.
    let low = |workload: &&Workload| {
        let peak = workload.trace.peak_requested();
        workload.limit.is_none() && peak >= GRANULE && limit.bytes(peak) < GRANULE
    };
    if let Some(workload) = workloads.iter().find(low) {
        let (name, peak) = (workload.name(), human(workload.trace.peak_requested()));
        return Err(Failure::Usage(format!(
            "{name}: --limit of its peak of {peak} is less than one granule; give a larger factor, or a size of at least 2MiB"
        )));
    }
    // Before the work, which may take long.
    let folder = args.out.clone().unwrap_or_else(|| Path::new(FOLDER).join(name(args)));
    report::prepare(&folder).map_err(|error| unwritable(&folder, &error))?;
    if report::is_there(&folder) {
        bar.aside(|| {
            complain(&format!(
                "this run replaces the report in {} when it is done; --out names another folder",
                folder.display()
            ));
        });
    }
    let least = match () {
        () if skips(args, "least") => Least::No,
        () if args.quick => Least::Quick,
        () => Least::Full,
    };
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let real = match &args.peers {
        Some(path) => Some(real(path, &workloads, &config, least, &bar)?),
        None => None,
    };
    let about = workloads.iter().map(|workload| (workload.name().to_owned(), workload.about.clone())).collect();
    let options = Options {
        workloads,
        allocators,
        config: config.clone(),
        limit: Box::new(move |peak| limit.bytes(peak)),
        lag: args.gpu_lag,
        least,
        jobs: args.jobs.unwrap_or(cores),
    };
    let measured = suite::run(&options, &bar).map_err(Failure::Usage)?;
    let mut report = Report {
        setup: setup(args, &config, least),
        measured,
        about,
        moving: Vec::new(),
        tables: Vec::new(),
        skipped: Vec::new(),
    };
    if let Some((lines, source)) = real {
        let (table, others) = suite::real::table(&lines, &source, &report.rows());
        if table.is_none() {
            report.skipped.push("real allocators: they were measured on no workload of this run".to_owned());
        }
        report.tables.extend(table);
        report.skipped.extend(others);
    }
    add_tables(args, &config, &mut report, &bar).map_err(Failure::Usage)?;
    bar.spin("writing the report");
    let paths = report::write(&report, &folder).map_err(|error| unwritable(&folder, &error))?;
    drop(bar);
    if args.json {
        for row in report.rows() {
            writeln!(out, "{}", serde_json::to_string(row).map_err(std::io::Error::from)?)?;
        }
    } else {
        write!(out, "{}", report::text(&report, args.full, report::grid::terminal()))?;
        writeln!(out, "written:")?;
        for (path, what) in paths.iter().zip(report::CONTENTS) {
            writeln!(out, "  {} ({what})", path.display())?;
        }
        if !args.full {
            writeln!(out, "--full prints all tables here too")?;
        }
    }
    Ok(status(&report, !wrong.is_empty()))
}

fn unwritable(folder: &Path, error: &std::io::Error) -> Failure {
    Failure::Usage(format!("cannot write to {}: {error}; name another folder by --out", folder.display()))
}

/// The folder of reports, and the names of one.
const FOLDER: &str = "xseg-bench";

/// What a report is called where no folder is named: runs of different things do not replace each other.
fn name(args: &BenchArgs) -> String {
    let traces: Vec<String> = args.traces.iter().map(|path| name_of(path)).collect();
    let named = if traces.is_empty() { &args.workload } else { &traces };
    let mut name = match &named[..] {
        [] => "suite".to_owned(),
        [one] => one.clone(),
        [first, others @ ..] => format!("{first}-and-{}-more", others.len()),
    };
    // A path such as `..` has no name.
    name.retain(|c| c.is_alphanumeric() || "-_. ".contains(c));
    if name.trim_matches(['.', ' ']).is_empty() {
        "traces".clone_into(&mut name);
    }
    if args.quick { name + "-quick" } else { name }
}

/// Is this part to be done? With traces only if asked for.
fn does(args: &BenchArgs, part: &str) -> bool {
    let asked = args.traces.is_empty() || args.also.iter().any(|also| also == part);
    asked && !skips(args, part)
}

fn skips(args: &BenchArgs, part: &str) -> bool {
    args.skip.iter().any(|skipped| skipped == part)
}

fn setup(args: &BenchArgs, config: &crate::Config, least: Least) -> Setup {
    let limit = match args.limit {
        Limit::Bytes(bytes) => crate::units::human(bytes),
        Limit::Times(factor) => format!("{} × peak requested, or the scenario's own", factor.value()),
    };
    let least = match least {
        Least::Full => "to 0.05 % of the peak, with the 20 steps above it",
        Least::Quick => "to 0.5 % of the peak, by halving",
        Least::No => "not searched",
    };
    Setup {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        conf: config.to_string(),
        model: MODEL.to_owned(),
        seed: args.seed,
        gpu_lag: report::duration(args.gpu_lag),
        limit,
        least: least.to_owned(),
        quick: args.quick,
    }
}

/// Figures of real allocators, read from a file or measured now, and where they come from.
fn real(
    path: &Path,
    workloads: &[Workload],
    config: &crate::Config,
    least: Least,
    bar: &Bar,
) -> Result<(Vec<Line>, String), Failure> {
    let refused = |error: peers::PeersError| Failure::Usage(error.to_string());
    // Lines and reports both start with an object.
    let mut first = [0];
    let is_file = std::fs::File::open(path).and_then(|mut file| file.read(&mut first)).is_ok() && first == *b"{";
    if is_file {
        let lines = peers::read(path).map_err(refused)?;
        let source = suite::real::source(&lines, &format!("by {}", path.display()));
        return Ok((lines, source));
    }
    let traces: Vec<&Trace> = workloads.iter().map(|workload| &workload.trace).collect();
    let limits = Limits { least: least != Least::No, ..Limits::default() };
    let program = Program::new(path);
    let names = program.allocators().map_err(refused)?;
    bar.spin("real allocators: xseg");
    let own = own_on_gpu(&traces, config, &limits);
    let mut lines =
        own.map_err(|why| Failure::Usage(format!("--peers: {why}; or name a report with figures of real allocators")))?;
    let texts = Texts::write(&traces).map_err(refused)?;
    for name in names {
        bar.spin(&format!("real allocators: {name}"));
        let told = program.replays(&name, &limits.of(&name), &texts).map_err(refused)?;
        lines.extend(told.lines);
        bar.aside(|| told.failure.iter().for_each(|why| complain(&format!("the real {name} ended early: {why}"))));
    }
    let source = suite::real::source(&lines, "in this run");
    Ok((lines, source))
}

#[cfg(feature = "cuda")]
fn own_on_gpu(traces: &[&Trace], config: &crate::Config, limits: &Limits) -> Result<Vec<Line>, String> {
    use crate::backend::cuda::{CudaBackend, CudaOptions};
    let device = CudaBackend::open(0, &CudaOptions::default()).map_err(|error| error.to_string())?;
    peers::gpu::replays(&std::sync::Arc::new(device), traces, config, limits).map_err(|error| error.to_string())
}

#[cfg(not(feature = "cuda"))]
fn own_on_gpu(_: &[&Trace], _: &crate::Config, _: &Limits) -> Result<Vec<Line>, String> {
    Err("real allocators need a GPU, and xseg was built without the `cuda` feature".to_owned())
}

/// Tables that need no workload, and those about all of them.
fn add_tables(args: &BenchArgs, config: &crate::Config, report: &mut Report, bar: &Bar) -> Result<(), String> {
    let mut left_out = Vec::new();
    // Without a GPU both parts fail for one reason, which is said once.
    let mut gpu: Vec<(&str, String)> = Vec::new();
    if does(args, "moving") {
        match moving::host(args.quick, bar) {
            Ok(moving) => report.moving.push(moving),
            Err(why) => report.skipped.push(format!("moving against copying on host memory: {why}")),
        }
        match moving::cuda(args.quick, bar) {
            Ok(moving) => report.moving.push(moving),
            Err(why) => gpu.push(("moving against copying", why)),
        }
    } else {
        left_out.push("moving");
    }
    if does(args, "classic") {
        bar.spin("the classic tables");
        let measured = classic::measured();
        let tables = classic::tables(config, args.gpu_lag, &measured)?;
        report.tables.extend(tables);
        let rows = report.rows();
        let more = [classic::fragmentation(&rows), classic::usable(&rows)];
        report.tables.extend(more.into_iter().flatten());
        if let Err(why) = measured {
            gpu.push(("the measured columns of the classic tables", why));
        }
    } else {
        left_out.push("classic");
    }
    match &gpu[..] {
        [(first, why), (second, same)] if why == same => {
            report.skipped.push(format!("on the GPU, {first} and {second}: {why}"));
        }
        others => report.skipped.extend(others.iter().map(|(what, why)| format!("on the GPU, {what}: {why}"))),
    }
    let unasked: Vec<&str> = left_out.iter().copied().filter(|part| !skips(args, part)).collect();
    if !unasked.is_empty() {
        let parts = unasked.join(",");
        report.skipped.push(format!("with a trace only the allocators are compared; --also {parts} does the rest"));
    }
    let skipped: Vec<&str> = left_out.into_iter().filter(|part| skips(args, part)).collect();
    if !skipped.is_empty() {
        report.skipped.push(format!("{}, as asked", skipped.join(", ")));
    }
    Ok(())
}

/// 1 when xseg failed in any way that is not a lack of memory, 2 when an input could not be used.
/// That an allocator runs out of memory is what the suite is there to show.
fn status(report: &Report, wrong: bool) -> u8 {
    let failed = |row: &&suite::Row| {
        [&row.plenty, &row.limited].into_iter().any(|run| run.failure.is_some() || run.mismatches.unwrap_or(0) > 0)
    };
    match report.rows().iter().find(|row| failed(row)) {
        Some(row) => {
            let why = [&row.plenty, &row.limited].into_iter().find_map(|run| run.failure.clone());
            complain(&format!("{} with {}: {}", row.workload, row.allocator, why.unwrap_or("mismatches".to_owned())));
            1
        }
        None if wrong => 2,
        None => 0,
    }
}

fn allocators(asked: &[String]) -> Result<Vec<String>, Failure> {
    let known = suite::allocators();
    if asked.iter().any(|name| name == "all") {
        return Ok(known.into_iter().map(str::to_owned).collect());
    }
    if let Some(name) = asked.iter().find(|name| !known.contains(&name.as_str())) {
        let known = known.join(", ");
        return Err(Failure::Usage(format!("there is no allocator `{name}`; the allocators are {known}, all")));
    }
    // Each once: a second row would only repeat the first.
    Ok(known.into_iter().filter(|name| asked.iter().any(|asked| asked == name)).map(str::to_owned).collect())
}

/// The workloads asked for, and what is wrong with inputs.
fn workloads(args: &BenchArgs, bar: &Bar) -> Result<(Vec<Workload>, Vec<String>), Failure> {
    let nothing_named = args.traces.is_empty() && args.workload.is_empty();
    let mut paths = args.traces.clone();
    let shipped = Path::new(SHIPPED);
    if nothing_named && shipped.is_dir() {
        paths.push(shipped.to_owned());
    }
    let (files, mut wrong) = files::expand(&paths);
    let mut workloads = Vec::new();
    for file in files {
        let short = |name: &str| file.file_name().is_some_and(|file| file.to_string_lossy().starts_with(name));
        if nothing_named && args.quick && !QUICK_TRACES.into_iter().any(short) {
            continue;
        }
        bar.spin(&format!("reading {}", file.display()));
        match Trace::load_device(&file, args.device) {
            Ok(trace) if trace.peak_requested() > PEAK_MAX => wrong.push(format!(
                "{}: {} live at once are more than any device has, and the models of other designs keep a record of \
                 every 2 MiB; give a trace of at most {}",
                file.display(),
                human(trace.peak_requested()),
                human(PEAK_MAX)
            )),
            Ok(trace) => {
                if !trace.notes.is_empty() {
                    bar.aside(|| complain(&format!("{}: {}", trace.name, trace.notes.join("; "))));
                }
                add(&mut workloads, Workload::from_trace(trace), Some(&file));
            }
            Err(error) => wrong.push(files::unreadable(&file, &error)),
        }
    }
    let all = nothing_named || args.workload.iter().any(|name| name == "all");
    if !all && let Some(name) = args.workload.iter().find(|name| !is_known(name)) {
        let known: Vec<&str> = CATALOGUE.iter().map(|entry| entry.name).collect();
        return Err(Failure::Usage(format!(
            "there is no workload `{name}`; the workloads are {}, all, none",
            known.join(", ")
        )));
    }
    for entry in CATALOGUE.iter().filter(|entry| all || args.workload.iter().any(|name| name == entry.name)) {
        bar.spin(&format!("making {}", entry.name));
        let made = entry.make(args.seed, ROUNDS[usize::from(args.quick)]).map_err(Failure::Usage)?;
        add(&mut workloads, made, None);
    }
    Ok((workloads, wrong))
}

/// Adds a workload under a name that no other has: rows, headings and links go by it.
fn add(workloads: &mut Vec<Workload>, mut workload: Workload, file: Option<&Path>) {
    let taken = |name: &str| workloads.iter().any(|other| other.name() == name);
    if taken(workload.name()) {
        let name = workload.name().to_owned();
        let free = (2..).map(|number| format!("{name} ({number})")).find(|name| !taken(name));
        workload.trace.name = free.unwrap_or(name);
        if let Some(file) = file {
            workload.about = format!("{}: {}", file.display(), workload.about);
        }
    }
    workloads.push(workload);
}

fn is_known(name: &str) -> bool {
    name == "none" || CATALOGUE.iter().any(|entry| entry.name == name)
}
