//! The program of other allocators, started and listened to.

use super::PeersError;
use super::lines::{self, Line};
use crate::trace::Trace;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// What replays are given.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    /// Left free for runs with little memory: this times peak requested, …
    pub factor: f64,
    /// … and so much more, in bytes.
    pub extra: u64,
    /// Search the least memory.
    pub least: bool,
    /// No replay of an allocator is started later than so many seconds after its first.
    pub seconds: f64,
    /// A replay is ended after so many seconds.
    pub seconds_a_run: f64,
}

impl Default for Limits {
    /// 1.02 times the peak and 64 MiB for page tables; a minute for each allocator.
    fn default() -> Self {
        Self { factor: 1.02, extra: 64 << 20, least: true, seconds: 60.0, seconds_a_run: 10.0 }
    }
}

impl Limits {
    /// Those of one allocator: each call of `cuda-malloc` is a driver call, so that its searches would take minutes.
    #[must_use]
    pub fn of(&self, allocator: &str) -> Self {
        match allocator {
            "cuda-malloc" => Self { least: false, seconds: self.seconds / 4.0, ..*self },
            _ => *self,
        }
    }

    /// What is left free for a run with little memory, in bytes.
    #[must_use]
    pub fn left(&self, peak_requested: u64) -> u64 {
        (self.factor * peak_requested as f64) as u64 + self.extra
    }
}

/// What the program told of one allocator.
#[derive(Debug, Clone, PartialEq)]
pub struct Told {
    /// Its lines.
    pub lines: Vec<Line>,
    /// Why it ended early, in its words.
    pub failure: Option<String>,
}

/// The built program of `benches/peers`.
#[derive(Debug, Clone)]
pub struct Program {
    path: PathBuf,
}

impl Program {
    /// The program at `path`.
    #[must_use]
    pub fn new(path: &Path) -> Self {
        // A bare name would be looked for elsewhere.
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        Self { path }
    }

    /// The allocators that it was built with.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn allocators(&self) -> Result<Vec<String>, PeersError> {
        let output = self.output(Command::new(&self.path).arg("list"))?;
        Ok(String::from_utf8_lossy(&output.stdout).split_whitespace().map(str::to_owned).collect())
    }

    /// Measures the patterns. Blocks until done.
    ///
    /// # Errors
    /// When it cannot be started or prints something else.
    pub fn pairs(&self, allocator: &str, quick: bool) -> Result<Told, PeersError> {
        let mut command = Command::new(&self.path);
        command.args(["pairs", "--allocator", allocator]);
        if quick {
            command.arg("--quick");
        }
        self.told(&mut command)
    }

    /// Replays traces. Blocks until done.
    ///
    /// # Errors
    /// When it cannot be started or prints something else.
    pub fn replays(&self, allocator: &str, limits: &Limits, traces: &Texts) -> Result<Told, PeersError> {
        let mut command = Command::new(&self.path);
        command.args(["replay", "--allocator", allocator]);
        command.arg("--factor").arg(limits.factor.to_string()).arg("--extra").arg(limits.extra.to_string());
        command.arg("--seconds").arg(limits.seconds.to_string());
        command.arg("--seconds-a-run").arg(limits.seconds_a_run.to_string());
        if limits.least {
            command.arg("--least");
        }
        self.told(command.args(&traces.files))
    }

    fn output(&self, command: &mut Command) -> Result<std::process::Output, PeersError> {
        let output = command.stdin(Stdio::null()).output();
        output.map_err(|source| PeersError::Start { program: self.path.clone(), source })
    }

    fn told(&self, command: &mut Command) -> Result<Told, PeersError> {
        let output = self.output(command)?;
        let lines = lines::parse(&self.path.display().to_string(), &String::from_utf8_lossy(&output.stdout))?;
        let said = String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ");
        let failure = (!output.status.success()).then(|| format!("{} ({said})", output.status));
        Ok(Told { lines, failure })
    }
}

/// Traces as files of text, which go with this value.
#[derive(Debug)]
pub struct Texts {
    folder: PathBuf,
    files: Vec<PathBuf>,
}

impl Texts {
    /// Writes `traces` into a new folder of the system's for such files, the shortest first.
    ///
    /// # Errors
    /// What the system refuses.
    pub fn write(traces: &[&Trace]) -> Result<Self, PeersError> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let own = format!("xseg-peers-{}-{}", std::process::id(), NUMBER.fetch_add(1, Relaxed));
        let folder = std::env::temp_dir().join(own);
        let refused = |path: &Path| {
            let path = path.to_owned();
            move |source| PeersError::File { path, source }
        };
        // One that is there already is somebody else's.
        std::fs::create_dir(&folder).map_err(refused(&folder))?;
        let mut texts = Self { folder, files: Vec::new() };
        let mut traces = traces.to_vec();
        traces.sort_by_key(|trace| trace.events.len());
        for trace in traces {
            let path = texts.folder.join(format!("{}.trace", trace.name.replace('/', "_")));
            let file = std::fs::File::create(&path).map_err(refused(&path))?;
            let mut out = BufWriter::new(file);
            trace.write_text(&mut out).and_then(|()| out.flush()).map_err(refused(&path))?;
            texts.files.push(path);
        }
        Ok(texts)
    }
}

impl Drop for Texts {
    fn drop(&mut self) {
        // What stays behind is in the system's folder for such files.
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}
