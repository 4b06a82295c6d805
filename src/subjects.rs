//! From the name of an allocator to one on a backend, ready to replay.
#![forbid(unsafe_code)]

use crate::backend::gauge::GaugeBackend;
use crate::backend::host::{HostBackend, HostOptions};
use crate::backend::inject::{Fault, InjectBackend};
use crate::backend::sim::{SimBackend, SimOptions};
use crate::backend::timeline::Timeline;
use crate::backend::{Backend, BackendKind, StreamId};
use crate::baselines;
use crate::config::{BackendChoice, Config, SizeOrShare};
use crate::error::Error;
use crate::heap::{Heap, PlanState};
use crate::replay::{Device, Figures, Gauge, MappedRange, MemoryAccess, Subject, SubjectError, Verifier};
use crate::units::UNIT;
use std::sync::Arc;
use std::time::Duration;

/// What is wanted.
#[derive(Debug, Clone)]
pub(crate) struct Request<'a> {
    /// Its name.
    pub(crate) allocator: &'a str,
    /// Policy, with the backend and the limit.
    pub(crate) config: Config,
    /// Lag of the device.
    pub(crate) lag: Duration,
    /// Stamps are to be written and checked.
    pub(crate) verify: bool,
    /// What is to be broken.
    pub(crate) fault: Option<Fault>,
    /// [`Subject::gauge`] and [`Subject::ranges`] will be asked for often.
    pub(crate) watch: bool,
    /// The trace has one stream.
    pub(crate) one_stream: bool,
}

/// An allocator on a backend.
pub(crate) struct Opened {
    pub(crate) subject: Box<dyn Subject>,
    /// The backend's clock, where it is virtual.
    pub(crate) clock: Option<Timeline>,
    /// In a verified replay.
    pub(crate) device: Option<Arc<dyn Verifier>>,
    pub(crate) backend: BackendKind,
    /// The limit in bytes, where one is set and comes to a bound here.
    pub(crate) limit: Option<u64>,
}

/// Every allocator by name.
pub(crate) fn names() -> Vec<&'static str> {
    std::iter::once("xseg").chain(baselines::NAMES.iter().copied()).collect()
}

/// Opens a backend and an allocator on it.
pub(crate) fn subject_for(request: &Request<'_>) -> Result<Opened, String> {
    if request.allocator != "xseg" {
        return baseline_for(request);
    }
    let ground = Ground::open(request)?;
    let Ground { mut backend, clock, device, left, stream } = ground;
    let kind = backend.kind();
    let watch = request.watch.then(|| Arc::new(GaugeBackend::new(backend.clone())));
    if let Some(watch) = &watch {
        backend = watch.clone();
    }
    let heap = Heap::builder().config(request.config.clone()).backend(backend).build();
    let heap = heap.map_err(|error| error.to_string())?;
    // A share is of the backend's memory, which the heap has asked for.
    let limit = request.config.limit.and(Some(heap.limit())).filter(|limit| *limit != u64::MAX);
    let subject = Box::new(Xseg { heap, left, stream, watch, locked: None, allocated: 0 });
    Ok(Opened { subject, clock, device, backend: kind, limit })
}

/// Opens a baseline, which runs on a simulated device.
fn baseline_for(request: &Request<'_>) -> Result<Opened, String> {
    let name = request.allocator;
    if request.verify || request.fault.is_some() {
        return Err(format!("--verify and --inject are for xseg; the baseline `{name}` has no memory"));
    }
    if !matches!(request.config.backend, BackendChoice::Sim | BackendChoice::Auto) {
        return Err(format!("the baseline `{name}` runs on a simulated device; give --backend sim"));
    }
    let clock = Timeline::new(request.lag);
    // A share of memory without a bound is no limit.
    let limit = match request.config.limit {
        Some(SizeOrShare::Bytes(bytes)) => Some(bytes),
        Some(SizeOrShare::Share(_)) | None => None,
    };
    let Some(subject) = baselines::replayable(name, limit, clock.clone()) else {
        return Err(format!("there is no allocator `{name}`; the allocators are {}, all", names().join(", ")));
    };
    Ok(Opened { subject, clock: Some(clock), device: None, backend: BackendKind::Sim, limit })
}

/// Said when a fault was asked for and none was made: such a run shows nothing.
const NOT_INJECTED: &str =
    "the fault to inject was never made, since too little was mapped; give a larger trace or a smaller handle_max";

/// Says what the backend found wrong, or what was left behind, at the end.
type Left = Box<dyn Fn() -> Option<String>>;

/// A backend and what watches it.
struct Ground {
    backend: Arc<dyn Backend>,
    clock: Option<Timeline>,
    device: Option<Arc<dyn Verifier>>,
    left: Left,
    stream: StreamOf,
}

impl Ground {
    fn open(request: &Request<'_>) -> Result<Self, String> {
        let lag = request.lag;
        let clock = Timeline::new(lag);
        match request.config.backend {
            BackendChoice::Sim => {
                if request.verify {
                    return Err("--verify needs memory, and sim has none; give --backend host or cuda".into());
                }
                let sim = Arc::new(SimBackend::new(SimOptions { timeline: clock.clone(), ..SimOptions::default() }));
                let watched = sim.clone();
                let left: Left = Box::new(move || watched.violations().first().cloned());
                Ok(Self { backend: sim, clock: Some(clock), device: None, left, stream: as_it_is() })
            }
            BackendChoice::Host => Self::host(request, clock),
            BackendChoice::Cuda(index) => Self::cuda(request, index),
            // `auto` with a GPU, or without.
            BackendChoice::Auto => match crate::backend::open(BackendChoice::Auto) {
                Ok(backend) if backend.kind() == BackendKind::Cuda => {
                    drop(backend);
                    Self::cuda(request, 0)
                }
                _ => Self::host(request, clock),
            },
        }
    }

    #[cfg(feature = "cuda")]
    fn cuda(request: &Request<'_>, index: u32) -> Result<Self, String> {
        use crate::backend::cuda::{CudaBackend, CudaOptions, StreamSet};
        use crate::replay::gpu::GpuDevice;
        use parking_lot::Mutex;
        if !request.lag.is_zero() {
            return Err("--gpu-lag sets a virtual clock, and a GPU has its own; give --backend host or sim".into());
        }
        let options = CudaOptions::of(&request.config).map_err(|error| error.to_string())?;
        let device = CudaBackend::open(index, &options).map_err(|error| error.to_string())?;
        let device = Arc::new(device);
        let streams = Arc::new(Mutex::new(StreamSet::new(device.clone())));
        let named = streams.clone();
        let stream: StreamOf =
            Box::new(move |number| named.lock().get(number).map_err(|error| SubjectError::Other(error.to_string())));
        if !request.verify {
            return Ok(Self { backend: device, clock: None, device: None, left: Box::new(|| None), stream });
        }
        let settled = request.fault.is_some_and(|fault| fault != Fault::EarlyUnmap);
        let gpu = GpuDevice::new(device.clone(), streams, settled).map_err(|error| error.to_string())?;
        let (backend, left) = injected(InjectBackend::new(device, request.fault), request, Box::new(|| None));
        Ok(Self { backend, clock: None, device: Some(Arc::new(gpu)), left, stream })
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda(_: &Request<'_>, index: u32) -> Result<Self, String> {
        crate::backend::open(BackendChoice::Cuda(index)).map_err(|error| error.to_string())?;
        Err("xseg was built without the `cuda` feature".into())
    }

    fn host(request: &Request<'_>, clock: Timeline) -> Result<Self, String> {
        let options = HostOptions { timeline: Some(clock.clone()), ..HostOptions::default() };
        let host = Arc::new(HostBackend::new(options).map_err(|error| error.to_string())?);
        let watched = host.clone();
        let left: Left = Box::new(move || {
            let leaks = watched.leaks();
            (!leaks.is_empty()).then(|| leaks.to_string())
        });
        if !request.verify {
            return Ok(Self { backend: host, clock: Some(clock), device: None, left, stream: as_it_is() });
        }
        let memory: Arc<dyn MemoryAccess> = host.clone();
        let device = Device::new(&clock, memory, request.one_stream);
        let (due, held) = (device.clone(), device.clone());
        let backend = InjectBackend::new(host, request.fault)
            .on_clock(move || due.run_due())
            .on_stream_wait(move |stream| held.hold(stream.0));
        let (backend, left) = injected(backend, request, left);
        Ok(Self { backend, clock: Some(clock), device: Some(Arc::new(device)), left, stream: as_it_is() })
    }
}

/// A backend that breaks what was asked for, and says at the end when it broke nothing.
fn injected(backend: InjectBackend, request: &Request<'_>, left: Left) -> (Arc<dyn Backend>, Left) {
    let backend = Arc::new(backend);
    let (injecting, asked) = (backend.clone(), request.fault.is_some());
    let left: Left = Box::new(move || {
        let idle = asked && injecting.injected() == 0;
        left().or_else(|| idle.then(|| NOT_INJECTED.to_owned()))
    });
    (backend, left)
}

/// The stream of the backend for a stream of a trace: on a GPU, a number of a file is no handle.
type StreamOf = Box<dyn FnMut(u64) -> Result<StreamId, SubjectError>>;

fn as_it_is() -> StreamOf {
    Box::new(|number| Ok(StreamId(number)))
}

/// The heap under replay.
struct Xseg {
    heap: Heap,
    left: Left,
    stream: StreamOf,
    watch: Option<Arc<GaugeBackend>>,
    /// What the last refusal said of partly live handles.
    locked: Option<u64>,
    /// Bytes in live blocks, where there is a watch.
    allocated: u64,
}

impl From<Error> for SubjectError {
    fn from(error: Error) -> Self {
        match error {
            Error::OutOfMemory(_) | Error::AddressSpace { .. } => Self::OutOfMemory(error.to_string()),
            _ => Self::Other(error.to_string()),
        }
    }
}

impl Subject for Xseg {
    fn name(&self) -> &str {
        "xseg"
    }

    fn alloc(&mut self, bytes: u64, stream: u64) -> Result<u64, SubjectError> {
        let stream = (self.stream)(stream)?;
        let address = self.heap.alloc_raw(bytes, stream).inspect_err(|error| {
            if let Error::OutOfMemory(state) = error {
                self.locked = Some(state.partly_live);
            }
        })?;
        self.allocated += bytes.max(1).next_multiple_of(UNIT);
        Ok(address)
    }

    fn free(&mut self, address: u64) -> Result<(), SubjectError> {
        if self.watch.is_some() {
            self.allocated -= self.heap.block_size(address)?.1;
        }
        Ok(self.heap.free_raw(address)?)
    }

    fn record_use(&mut self, address: u64, stream: u64) -> Result<(), SubjectError> {
        let stream = (self.stream)(stream)?;
        Ok(self.heap.record_use(address, stream)?)
    }

    fn figures(&self) -> Figures {
        let stats = self.heap.stats();
        Figures {
            allocated: stats.allocated,
            reserved: stats.reserved,
            peak_allocated: stats.peak_allocated,
            peak_reserved: stats.peak_reserved,
            driver_calls: stats.driver_calls,
            driver_nanos: stats.driver_nanos,
            host_waits: stats.host_waits,
            gpu_waits: stats.gpu_waits,
            handles_moved: stats.handles_moved,
            handles_joined: stats.handles_joined,
            bytes_joined: stats.bytes_joined,
            joins_ended: stats.joins_ended,
            bytes_moved: stats.bytes_moved,
            bytes_copied: stats.bytes_copied,
            detail: match stats.plan {
                PlanState::None => serde_json::Value::Null,
                state => serde_json::json!({ "plan": {
                    "state": state, "in_vain": state.is_in_vain(),
                    "planned": stats.planned, "planned_elsewhere": stats.planned_elsewhere,
                } }),
            },
        }
    }

    fn locked(&self) -> Option<u64> {
        self.locked
    }

    fn gauge(&self) -> Gauge {
        match &self.watch {
            Some(watch) => Gauge { allocated: self.allocated, reserved: watch.reserved(), driver_nanos: watch.nanos() },
            None => {
                let Figures { allocated, reserved, driver_nanos, .. } = self.figures();
                Gauge { allocated, reserved, driver_nanos }
            }
        }
    }

    fn ranges(&self) -> Vec<MappedRange> {
        self.watch.as_ref().map_or_else(Vec::new, |watch| watch.ranges())
    }

    fn finish(&mut self) -> Result<(), SubjectError> {
        let sound = self.heap.check();
        self.heap.shut_down();
        sound.map_err(|why| SubjectError::Other(format!("an invariant of the heap is broken: {why}")))?;
        match (self.left)() {
            Some(what) => Err(SubjectError::Other(format!("at the end of the replay: {what}"))),
            None => Ok(()),
        }
    }
}
