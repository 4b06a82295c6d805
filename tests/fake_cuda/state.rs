//! The bookkeeping of the stand-in driver: what exists, what was called, what is to fail.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

pub(crate) type Code = u32;
pub(crate) const INVALID_VALUE: Code = 1;
pub(crate) const OUT_OF_MEMORY: Code = 2;
pub(crate) const NOT_INITIALIZED: Code = 3;
pub(crate) const NO_DEVICE: Code = 100;
pub(crate) const INVALID_DEVICE: Code = 101;
pub(crate) const INVALID_CONTEXT: Code = 201;
pub(crate) const INVALID_HANDLE: Code = 400;
pub(crate) const NOT_READY: Code = 600;
pub(crate) const NOT_SUPPORTED: Code = 801;
pub(crate) const OPERATING_SYSTEM: Code = 304;
pub(crate) const ILLEGAL_STATE: Code = 401;
pub(crate) const CAPTURE_UNSUPPORTED: Code = 900;
pub(crate) const CAPTURE_INVALIDATED: Code = 901;
pub(crate) const CAPTURE_IMPLICIT: Code = 906;
pub(crate) const CAPTURE_ISOLATION: Code = 905;

pub(crate) const RELAXED: u32 = 2;

#[derive(Debug)]
pub(crate) struct Handle {
    pub(crate) bytes: u64,
    pub(crate) device: i32,
    pub(crate) posix_fd: bool,
    pub(crate) rdma: bool,
    /// It is another's memory: none was taken from the device for it.
    pub(crate) imported: bool,
    pub(crate) released: bool,
    pub(crate) mappings: u32,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Mapping {
    pub(crate) bytes: u64,
    pub(crate) handle: u64,
    /// Devices with access, by bit.
    pub(crate) access: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EventState {
    Fresh,
    Pending,
    Done,
    Captured,
}

#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) initialised: bool,
    pub(crate) calls: u64,
    pub(crate) log: Vec<String>,
    /// Calls until one fails (1: the next), and with what.
    pub(crate) fail: Option<(u64, Code)>,
    /// What every call fails with from now on, as after a kernel's fault; 0: nothing.
    pub(crate) broken: Code,
    /// Retain counts of the primary contexts, by device.
    pub(crate) retained: Vec<u32>,
    pub(crate) memory: Vec<u64>,
    pub(crate) used: Vec<u64>,
    pub(crate) reservations: BTreeMap<u64, u64>,
    pub(crate) handles: HashMap<u64, Handle>,
    pub(crate) mappings: BTreeMap<u64, Mapping>,
    /// Identities by handle.
    pub(crate) streams: HashMap<u64, u64>,
    /// Streams that wait for the legacy one, and it for them.
    pub(crate) blocking: HashSet<u64>,
    /// Streams that wait for a pending event.
    pub(crate) waiting: HashSet<u64>,
    /// Handles of destroyed streams; the next stream gets the last one again.
    pub(crate) old_streams: Vec<u64>,
    pub(crate) events: HashMap<u64, EventState>,
    /// By `cuMemAlloc`.
    pub(crate) plain: HashMap<u64, u64>,
    /// By `cuMemHostAlloc`: memory that is really there.
    pub(crate) pinned: HashMap<u64, Vec<u128>>,
    pub(crate) modules: u32,
    /// Graphs, also ready to launch.
    pub(crate) graphs: HashSet<u64>,
    /// New events stay pending until [`State::complete`].
    pub(crate) hold: bool,
    /// The stream that captures a graph.
    pub(crate) capture: Option<u64>,
    pub(crate) capture_broken: bool,
    next: u64,
    /// Devices of streams and events.
    pub(crate) of: HashMap<u64, i32>,
    /// A device whose work stays pending.
    pub(crate) busy: Option<usize>,
}

static STATE: LazyLock<Mutex<State>> = LazyLock::new(|| {
    let devices = setting("FAKE_CUDA_DEVICES", 2) as usize;
    Mutex::new(State {
        retained: vec![0; devices],
        memory: vec![setting("FAKE_CUDA_MEMORY", 1 << 30); devices],
        used: vec![0; devices],
        ..State::default()
    })
});

thread_local! {
    static CONTEXTS: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
    static MODE: Cell<u32> = const { Cell::new(0) };
}

/// A number from the environment.
pub(crate) fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

/// Is `word` in the comma-separated list of an environment variable?
pub(crate) fn listed(name: &str, word: &str) -> bool {
    std::env::var(name).is_ok_and(|list| list.split(',').any(|entry| entry == word))
}

pub(crate) fn lock() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The calling thread's stack of contexts.
pub(crate) fn contexts<R>(with: impl FnOnce(&mut Vec<u64>) -> R) -> R {
    CONTEXTS.with_borrow_mut(with)
}

pub(crate) fn current() -> u64 {
    contexts(|stack| stack.last().copied().unwrap_or(0))
}

/// Sets the calling thread's capture mode and says what it was.
pub(crate) fn exchange_mode(mode: u32) -> u32 {
    MODE.replace(mode)
}

pub(crate) fn mode() -> u32 {
    MODE.get()
}

pub(crate) fn context_of(device: i32) -> u64 {
    0xC000 + u64::from(device.cast_unsigned()) * 0x100
}

pub(crate) fn device_of(context: u64) -> Option<i32> {
    (context >= 0xC000).then(|| ((context - 0xC000) / 0x100) as i32)
}

/// What a call needs beside its arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Needs {
    Nothing,
    /// `cuInit` was called.
    Init,
    /// A context is current.
    Context,
    /// A context is current and, while a graph is captured, the capture mode is relaxed: else the
    /// capture breaks. Stricter than the driver for some calls, so that a test sees what was forgotten.
    Relaxed,
}

/// Runs one driver call: logs it, lets it fail if its turn has come, checks what it needs.
pub(crate) fn call(
    name: &str,
    arguments: &[u64],
    needs: Needs,
    body: impl FnOnce(&mut State) -> Result<(), Code>,
) -> Code {
    let state = &mut *lock();
    state.calls += 1;
    let result = state.turn().and_then(|()| state.allowed(needs)).and_then(|()| body(state));
    let code = result.err().unwrap_or(0);
    let arguments: String = arguments.iter().map(|value| format!(" {value:x}")).collect();
    state.log.push(format!("{name}{arguments} = {code}"));
    code
}

impl State {
    fn turn(&mut self) -> Result<(), Code> {
        if self.broken != 0 {
            return Err(self.broken);
        }
        let Some((left, code)) = self.fail else { return Ok(()) };
        self.fail = (left > 1).then_some((left - 1, code));
        if left == 1 { Err(code) } else { Ok(()) }
    }

    fn allowed(&mut self, needs: Needs) -> Result<(), Code> {
        if needs == Needs::Nothing {
            return Ok(());
        }
        if !self.initialised {
            return Err(NOT_INITIALIZED);
        }
        if needs != Needs::Init && current() == 0 {
            return Err(INVALID_CONTEXT);
        }
        if needs == Needs::Relaxed && self.capture.is_some() && mode() != RELAXED {
            self.capture_broken = true;
            return Err(CAPTURE_UNSUPPORTED);
        }
        Ok(())
    }

    pub(crate) fn graph(&mut self) -> u64 {
        let graph = self.fresh(0x6000_0000, 0x10);
        self.graphs.insert(graph);
        graph
    }

    /// A new number for something: never 0, never one twice.
    pub(crate) fn fresh(&mut self, base: u64, step: u64) -> u64 {
        self.next += 1;
        base + self.next * step
    }

    pub(crate) fn device(&self, device: i32) -> Result<usize, Code> {
        usize::try_from(device).ok().filter(|index| *index < self.memory.len()).ok_or(INVALID_DEVICE)
    }

    pub(crate) fn stream(&self, stream: u64) -> Result<u64, Code> {
        if stream <= 2 { Ok(stream) } else { self.streams.get(&stream).copied().ok_or(INVALID_HANDLE) }
    }

    /// What was made belongs to the device of the current context.
    pub(crate) fn note_device(&mut self, made: u64) {
        if let Some(device) = device_of(current()) {
            self.of.insert(made, device);
        }
    }

    pub(crate) fn create(&mut self, handle: Handle) -> Result<u64, Code> {
        let device = self.device(handle.device)?;
        if handle.bytes == 0 || !handle.bytes.is_multiple_of(2 << 20) {
            return Err(INVALID_VALUE);
        }
        if self.used[device] + handle.bytes > self.memory[device] {
            return Err(OUT_OF_MEMORY);
        }
        self.used[device] += handle.bytes;
        Ok(self.enter(handle))
    }

    /// A name for a handle.
    pub(crate) fn enter(&mut self, handle: Handle) -> u64 {
        let id = self.fresh(0xA000_0000, 0x10);
        self.handles.insert(id, handle);
        id
    }

    pub(crate) fn map(&mut self, address: u64, bytes: u64, handle: u64) -> Result<(), Code> {
        let found = self.handles.get_mut(&handle).filter(|found| !found.released).ok_or(INVALID_VALUE)?;
        if found.bytes != bytes {
            return Err(NOT_SUPPORTED);
        }
        let inside = self.reservations.range(..=address).next_back();
        let inside = inside.is_some_and(|(start, length)| address + bytes <= start + length);
        let before = self.mappings.range(..address + bytes).next_back();
        if !inside || before.is_some_and(|(start, mapping)| start + mapping.bytes > address) {
            return Err(INVALID_VALUE);
        }
        found.mappings += 1;
        self.mappings.insert(address, Mapping { bytes, handle, access: 0 });
        Ok(())
    }

    /// The mappings that the range consists of, with or without holes between them.
    pub(crate) fn whole_mappings(&self, address: u64, bytes: u64) -> Result<Vec<u64>, Code> {
        let end = address + bytes;
        let cut = self.mappings.range(..address).next_back();
        let cut = cut.is_some_and(|(start, mapping)| start + mapping.bytes > address);
        let found: Vec<u64> = self.mappings.range(address..end).map(|(start, _)| *start).collect();
        let over = found.last().is_some_and(|last| last + self.mappings[last].bytes > end);
        if cut || over || found.is_empty() { Err(INVALID_VALUE) } else { Ok(found) }
    }

    pub(crate) fn unmap(&mut self, address: u64, bytes: u64) -> Result<(), Code> {
        for start in self.whole_mappings(address, bytes)? {
            if let Some(mapping) = self.mappings.remove(&start)
                && let Some(handle) = self.handles.get_mut(&mapping.handle)
            {
                handle.mappings -= 1;
                self.reap(mapping.handle);
            }
        }
        Ok(())
    }

    pub(crate) fn release(&mut self, handle: u64) -> Result<(), Code> {
        let found = self.handles.get_mut(&handle).filter(|found| !found.released).ok_or(INVALID_VALUE)?;
        found.released = true;
        self.reap(handle);
        Ok(())
    }

    /// Frees a handle that is released and mapped nowhere.
    fn reap(&mut self, handle: u64) {
        let gone = self.handles.get(&handle).filter(|found| found.released && found.mappings == 0);
        if let Some((device, bytes)) = gone.map(|found| (found.device, if found.imported { 0 } else { found.bytes })) {
            self.used[device as usize] -= bytes;
            self.handles.remove(&handle);
        }
    }

    /// What a new record on a stream makes of an event.
    pub(crate) fn recorded(&self, stream: u64) -> EventState {
        let here = device_of(current()).and_then(|device| usize::try_from(device).ok());
        let busy = self.hold || (self.busy.is_some() && self.busy == here) || self.waiting.contains(&stream);
        if busy { EventState::Pending } else { EventState::Done }
    }

    pub(crate) fn complete(&mut self) {
        self.waiting.clear();
        for event in self.events.values_mut() {
            if *event == EventState::Pending {
                *event = EventState::Done;
            }
        }
    }
}
