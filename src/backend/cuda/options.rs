//! How a device is opened, and which devices there are.
#![forbid(unsafe_code)]

use super::initialised;
use super::sys::Attribute;
use crate::config::{Config, Peers, StreamHandles};
use crate::error::Error;

/// What stream 0 means, by how the client was compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NullStream {
    /// The legacy default stream, one for all threads.
    #[default]
    Legacy,
    /// Each thread's own default stream (`--default-stream per-thread`).
    PerThread,
}

/// How a device is opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CudaOptions {
    /// Ordinals of the devices that get access to this one's memory, besides itself. One that cannot
    /// reach it is dropped with a note.
    pub peers: Vec<u32>,
    /// Create memory that can be exported as a file descriptor (costs nothing until it is).
    pub exportable: bool,
    /// Create memory that network cards may access (GPUDirect RDMA).
    pub rdma: bool,
    /// What stream 0 means.
    pub null_stream: NullStream,
    /// A handle is one stream until `retired`: the driver is not asked who it is on each request.
    pub trust_handles: bool,
}

impl Default for CudaOptions {
    fn default() -> Self {
        Self { peers: Vec::new(), exportable: true, rdma: true, null_stream: NullStream::Legacy, trust_handles: false }
    }
}

impl CudaOptions {
    /// The default, with the peers and the way of knowing streams that a policy names.
    ///
    /// # Errors
    /// As [`driver_info`], where all of them are to be found out.
    pub fn of(config: &Config) -> Result<Self, Error> {
        let peers = match &config.peers {
            Peers::None => Vec::new(),
            Peers::All => driver_info()?.devices.iter().map(|info| info.index).collect(),
            Peers::Listed(devices) => devices.clone(),
        };
        Ok(Self { peers, trust_handles: config.streams == StreamHandles::Trusted, ..Self::default() })
    }
}

/// A device as `xseg info` shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// Index, as [`CudaBackend::open`](super::CudaBackend::open) takes it.
    pub index: u32,
    /// Name.
    pub name: String,
    /// Compute capability, major and minor.
    pub compute: (i32, i32),
    /// Has virtual memory management, without which this backend cannot use it.
    pub virtual_memory: bool,
}

/// The driver and its devices.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DriverInfo {
    /// CUDA version that the driver supports, major and minor.
    pub version: (i32, i32),
    /// The devices, in order of index.
    pub devices: Vec<DeviceInfo>,
}

/// Loads the driver and asks it for its devices. Creates no context. Any thread.
///
/// # Errors
/// [`Error::Unavailable`] without a driver or when it finds no device; [`Error::Driver`] when it
/// refuses to answer.
pub fn driver_info() -> Result<DriverInfo, Error> {
    let api = initialised()?;
    let version = api.version()?;
    let mut devices = Vec::new();
    for ordinal in 0..api.device_count()? {
        let device = api.device(ordinal)?;
        devices.push(DeviceInfo {
            index: ordinal.cast_unsigned(),
            name: api.device_name(device)?,
            compute: (api.attribute(Attribute::ComputeMajor, device)?, api.attribute(Attribute::ComputeMinor, device)?),
            virtual_memory: api.attribute(Attribute::VirtualMemory, device)? != 0,
        });
    }
    Ok(DriverInfo { version: (version / 1000, version % 1000 / 10), devices })
}
