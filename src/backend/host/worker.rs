//! One stream's queue and thread, and the signal that an event is made of.
#![forbid(unsafe_code)]

use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Raised when everyone who holds it has let go.
#[derive(Debug)]
pub(super) struct Signal {
    holders: Mutex<u32>,
    raised: Condvar,
}

impl Signal {
    /// A signal that the caller holds.
    pub(super) fn held() -> Self {
        Self { holders: Mutex::new(1), raised: Condvar::new() }
    }

    fn hold(&self) {
        *self.holders.lock() += 1;
    }

    pub(super) fn let_go(&self) {
        let mut holders = self.holders.lock();
        *holders -= 1;
        if *holders == 0 {
            self.raised.notify_all();
        }
    }

    pub(super) fn is_raised(&self) -> bool {
        *self.holders.lock() == 0
    }

    /// Blocks until it is raised, at most `limit`; says whether it is.
    pub(super) fn wait(&self, limit: Option<Duration>) -> bool {
        let mut holders = self.holders.lock();
        // A limit beyond the clock's range is no limit.
        match limit.and_then(|limit| Instant::now().checked_add(limit)) {
            Some(end) => {
                self.raised.wait_while_until(&mut holders, |holders| *holders > 0, end);
            }
            None => self.raised.wait_while(&mut holders, |holders| *holders > 0),
        }
        *holders == 0
    }
}

enum Task {
    Run(Box<dyn FnOnce() + Send>),
    Mark(Arc<Signal>),
    Wait(Arc<Signal>),
}

#[derive(Default)]
struct Queue {
    tasks: VecDeque<Task>,
    /// The thread is in a task that it took.
    busy: bool,
    /// No more work; the thread ends when it has done what is there.
    closed: bool,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    queue: Mutex<Queue>,
    changed: Condvar,
    fault: Arc<OnceLock<String>>,
}

/// One stream. Its thread starts with its first work.
pub(super) struct Worker {
    key: u64,
    shared: Arc<Shared>,
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let queue = self.shared.queue.lock();
        f.debug_struct("Worker").field("key", &self.key).field("queued", &queue.tasks.len()).finish_non_exhaustive()
    }
}

impl Worker {
    pub(super) fn new(key: u64, fault: Arc<OnceLock<String>>) -> Self {
        let shared = Shared { queue: Mutex::default(), changed: Condvar::new(), fault };
        Self { key, shared: Arc::new(shared) }
    }

    fn push(&self, task: Task) -> Result<(), String> {
        let mut queue = self.shared.queue.lock();
        if queue.closed {
            return Err("the stream was destroyed".to_owned());
        }
        if queue.thread.is_none() {
            let shared = Arc::clone(&self.shared);
            let name = format!("xseg-stream-{}", self.key);
            let thread = thread::Builder::new().name(name).spawn(move || shared.work());
            queue.thread = Some(thread.map_err(|error| format!("no thread for the stream: {error}"))?);
        }
        queue.tasks.push_back(task);
        self.shared.changed.notify_one();
        Ok(())
    }

    /// Queues `work`.
    pub(super) fn run(&self, work: Box<dyn FnOnce() + Send>) -> Result<(), String> {
        self.push(Task::Run(work))
    }

    /// Makes later work wait until `signal` is raised.
    pub(super) fn hold_for(&self, signal: Arc<Signal>) -> Result<(), String> {
        self.push(Task::Wait(signal))
    }

    /// Holds `signal` until everything queued so far has run; not at all if nothing is left.
    pub(super) fn mark(&self, signal: &Arc<Signal>) {
        let mut queue = self.shared.queue.lock();
        // Also on a closed queue: the thread leaves only when it finds it empty.
        if queue.busy || !queue.tasks.is_empty() {
            signal.hold();
            queue.tasks.push_back(Task::Mark(Arc::clone(signal)));
        }
    }

    /// Takes no more work; what is queued still runs.
    pub(super) fn close(&self) {
        self.shared.queue.lock().closed = true;
        self.shared.changed.notify_one();
    }

    /// Closed, and everything has run.
    pub(super) fn is_finished(&self) -> bool {
        let queue = self.shared.queue.lock();
        queue.closed && !queue.busy && queue.tasks.is_empty()
    }

    /// Waits for the thread's end; not from the thread itself (its last work may own the backend).
    pub(super) fn join(&self) {
        let handle = self.shared.queue.lock().thread.take();
        if let Some(handle) = handle.filter(|handle| handle.thread().id() != thread::current().id()) {
            // The thread catches the panics of its work.
            let _ = handle.join();
        }
    }
}

impl Shared {
    fn work(&self) {
        while let Some(task) = self.next() {
            match task {
                Task::Run(work) => {
                    if let Err(panic) = catch_unwind(AssertUnwindSafe(work)) {
                        self.report(&*panic);
                    }
                }
                Task::Mark(signal) => signal.let_go(),
                Task::Wait(signal) => {
                    signal.wait(None);
                }
            }
        }
    }

    fn next(&self) -> Option<Task> {
        let mut queue = self.queue.lock();
        loop {
            queue.busy = false;
            if let Some(task) = queue.tasks.pop_front() {
                // A marker is no work: a record made while it is handled need not wait for it.
                queue.busy = !matches!(task, Task::Mark(_));
                return Some(task);
            }
            if queue.closed {
                return None;
            }
            self.changed.wait(&mut queue);
        }
    }

    fn report(&self, panic: &(dyn std::any::Any + Send)) {
        let text = panic.downcast_ref::<&str>().map(ToString::to_string);
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "panic".to_owned());
        tracing::error!(%text, "work on a stream panicked");
        let _ = self.fault.set(format!("work on a stream panicked: {text}"));
    }
}
