//! Making a heap: what a policy leaves open is settled here.
#![forbid(unsafe_code)]

use super::Heap;
use super::inner::Inner;
use super::planned::Planned;
use crate::backend::driver::Driver;
use crate::backend::nvtx::Nvtx;
use crate::backend::{Backend, MappingCallback};
use crate::config::{Config, RemapMode};
use crate::error::{Error, Result};
use crate::units::{GIB, GRANULE, round_down};
use std::fmt;
use std::sync::Arc;

/// Makes a [`Heap`].
#[derive(Default)]
pub struct HeapBuilder {
    config: Config,
    backend: Option<Arc<dyn Backend>>,
    watchers: Vec<MappingCallback>,
}

impl fmt::Debug for HeapBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { config, backend, watchers } = self;
        let watchers = watchers.len();
        f.debug_struct("HeapBuilder")
            .field("config", config)
            .field("backend", backend)
            .field("watchers", &watchers)
            .finish()
    }
}

impl HeapBuilder {
    /// A policy in the form of `XSEG_CONF`.
    ///
    /// # Errors
    /// [`crate::Error::Config`] names the key and lists what is allowed.
    pub fn conf(mut self, conf: &str) -> Result<Self> {
        self.config = Config::parse(conf)?;
        Ok(self)
    }

    /// The whole policy at once.
    #[must_use]
    pub fn config(mut self, config: Config) -> Self {
        self.config = config;
        self
    }

    /// A backend of the caller's, instead of the one that the policy names.
    #[must_use]
    pub fn backend(mut self, backend: Arc<dyn Backend>) -> Self {
        self.backend = Some(backend);
        self
    }

    /// Adds a function that is told of every mapping from the warm-up on; [`MappingCallback`] says when it is
    /// called and what it may do.
    #[must_use]
    pub fn on_mapping(mut self, callback: MappingCallback) -> Self {
        self.watchers.push(callback);
        self
    }

    /// Reserves addresses, maps the warm-up, and gives the heap.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for a contradiction or a value out of range, [`crate::Error::Plan`] for a plan that cannot be read,
    /// [`crate::Error::Unavailable`] for a backend that
    /// cannot be used here, and what the driver refuses.
    pub fn build(self) -> Result<Heap> {
        self.config.check()?;
        let backend = match self.backend {
            Some(backend) => backend,
            None => crate::backend::open_with(self.config.backend, &self.config)?,
        };
        let total = backend.memory()?.total;
        let limit = self.config.limit_on(total);
        let quiesce = match self.config.remap {
            RemapMode::Quiesce => true,
            RemapMode::Concurrent => false,
            RemapMode::Auto => !backend.capabilities().concurrent_remap,
        };
        let warmup = self.config.warmup;
        if warmup > limit {
            let (warmup, limit) = (crate::units::human(warmup), crate::units::human(limit));
            return Err(Error::Config(format!(
                "the settings contradict each other: warmup {warmup} is more than the limit of {limit} on this device"
            )));
        }
        let limit = if limit == u64::MAX { limit } else { round_down(limit, GRANULE) };
        crate::lock::prepare();
        let planned = self.config.plan.as_deref().map(Planned::load).transpose()?;
        let nvtx = self.config.nvtx;
        let mut inner = Inner::new(Driver::new(backend, self.watchers), self.config, limit, quiesce);
        if nvtx {
            match Nvtx::load() {
                Ok(nvtx) => inner.nvtx = nvtx,
                Err(why) => inner.space.note(format!("no NVTX ranges: {why}")),
            }
        }
        inner.planned = planned.map(Box::new);
        inner.space.reserve(&inner.driver, inner.reserve_bytes(), GIB)?;
        let heap = Heap { inner: Arc::new(inner) };
        if warmup > 0 {
            heap.inner.warm_up(warmup)?;
        }
        Ok(heap)
    }
}
