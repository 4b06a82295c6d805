//! Errors as Python exceptions.

use pyo3::create_exception;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

create_exception!(xseg, Error, PyRuntimeError, "A failure of xseg; its text says what happened and what to do.");
create_exception!(
    xseg,
    OutOfMemoryError,
    Error,
    "No memory for a request, after everything was tried. The heap is unharmed."
);
create_exception!(xseg, ConfigError, Error, "A key or value of XSEG_CONF is wrong.");
create_exception!(xseg, PointerError, Error, "An address that is no live block of the heap.");
create_exception!(xseg, ShareError, Error, "Memory could not be given to or taken from another process.");

/// The exception for an error of the library.
pub(crate) fn raise(error: xseg::Error) -> PyErr {
    let text = error.to_string();
    match error {
        xseg::Error::OutOfMemory(_) => OutOfMemoryError::new_err(text),
        xseg::Error::Config(_) | xseg::Error::Plan { .. } => ConfigError::new_err(text),
        xseg::Error::InvalidPointer { .. } => PointerError::new_err(text),
        xseg::Error::Share(_) => ShareError::new_err(text),
        _ => Error::new_err(text),
    }
}

pub(crate) fn add(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add("Error", py.get_type::<Error>())?;
    module.add("OutOfMemoryError", py.get_type::<OutOfMemoryError>())?;
    module.add("ConfigError", py.get_type::<ConfigError>())?;
    module.add("PointerError", py.get_type::<PointerError>())?;
    module.add("ShareError", py.get_type::<ShareError>())
}
