//! Entering the driver: the device's context is current and the thread's capture mode relaxed while
//! an [`Entered`] lives; both are as found afterwards.

use super::sys::{Api, CaptureMode, undo};
use crate::error::DriverError;
use std::marker::PhantomData;

/// The primary context of one device, retained while this lives.
#[derive(Debug)]
pub(super) struct Primary {
    api: &'static Api,
    device: i32,
    context: u64,
}

impl Primary {
    pub(super) fn retain(api: &'static Api, device: i32) -> Result<Self, DriverError> {
        Ok(Self { api, device, context: api.retain_primary(device)? })
    }

    pub(super) fn api(&self) -> &'static Api {
        self.api
    }

    pub(super) fn device(&self) -> i32 {
        self.device
    }

    pub(super) fn context(&self) -> u64 {
        self.context
    }

    /// Makes the context current (if it is not) and, if asked, the capture mode relaxed.
    pub(super) fn enter(&self, relaxed: bool) -> Result<Entered, DriverError> {
        enter(self.api, self.context, relaxed)
    }
}

/// The same for a context that is retained by others: one that is gone is an error.
pub(super) fn enter(api: &'static Api, context: u64, relaxed: bool) -> Result<Entered, DriverError> {
    let pushed = api.current()? != context;
    if pushed {
        // SAFETY: the context is retained while the backend lives, or is that of a stream that exists.
        unsafe { api.push(context) }?;
    }
    // From here on dropping the guard undoes what was done.
    let mut entered = Entered { api, pushed, mode: None, not_send: PhantomData };
    if relaxed {
        entered.mode = Some(api.exchange_capture_mode(CaptureMode::RELAXED)?);
    }
    Ok(entered)
}

impl Drop for Primary {
    fn drop(&mut self) {
        // SAFETY: retained by `retain`; every event made in it is destroyed (the pool goes first).
        // At process end the driver may be gone already: nothing is left to release then.
        undo("a context stays retained", || unsafe { self.api.release_primary(self.device) });
    }
}

/// See the module's text. Tied to its thread.
#[derive(Debug)]
#[must_use = "the context is current only while this lives"]
pub(super) struct Entered {
    api: &'static Api,
    pushed: bool,
    mode: Option<CaptureMode>,
    not_send: PhantomData<*const ()>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(mode) = self.mode {
            undo("the thread's capture mode stays relaxed", || self.api.exchange_capture_mode(mode).map(drop));
        }
        if self.pushed {
            undo("the heap's context stays current", || self.api.pop());
        }
    }
}
