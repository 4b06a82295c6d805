//! Arguments of Python as those of the library: what does not fit is a ValueError, and what is of another kind a TypeError, that says
//! which argument it was and what is allowed, where a bare conversion would name neither.

use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use std::os::fd::RawFd;

/// The TypeError for an argument `what` that is `value`, where one of `wanted` was to be given.
pub(crate) fn unlike(value: &Bound<'_, PyAny>, what: &str, wanted: &str) -> PyErr {
    let given = value.get_type().name().map_or_else(|_| "this".into(), |name| name.to_string());
    PyTypeError::new_err(format!("{what}: give {wanted}, not {given}"))
}

/// Names the argument in a TypeError; other errors say enough.
fn named(error: PyErr, value: &Bound<'_, PyAny>, what: &str, wanted: &str) -> PyErr {
    if error.is_instance_of::<PyTypeError>(value.py()) { unlike(value, what, wanted) } else { error }
}

/// `value` as an integer of the library's, or why it is none. `what` it is and which are `allowed`, for people.
fn fits<'a, 'py, T: FromPyObject<'a, 'py, Error = PyErr>>(
    value: &'a Bound<'py, PyAny>,
    what: &str,
    allowed: &str,
) -> PyResult<T> {
    value.extract().map_err(|error: PyErr| {
        if error.is_instance_of::<PyOverflowError>(value.py()) {
            PyValueError::new_err(format!("{what} {value} is out of range; give a whole number {allowed}"))
        } else {
            named(error, value, what.trim_end_matches(':'), &format!("a whole number {allowed}"))
        }
    })
}

fn whole(value: &Bound<'_, PyAny>, what: &str) -> PyResult<u64> {
    fits(value, what, "from 0 to 2^64 - 1")
}

pub(crate) fn bytes(value: &Bound<'_, PyAny>) -> PyResult<u64> {
    whole(value, "bytes:")
}

/// None: no bound.
pub(crate) fn limit(value: &Bound<'_, PyAny>) -> PyResult<Option<u64>> {
    if value.is_none() { Ok(None) } else { bytes(value).map(Some) }
}

pub(crate) fn address(value: &Bound<'_, PyAny>) -> PyResult<u64> {
    whole(value, "address:")
}

pub(crate) fn stream(value: &Bound<'_, PyAny>) -> PyResult<u64> {
    whole(value, "stream:")
}

/// None: it is not said.
pub(crate) fn device_or_none(value: &Bound<'_, PyAny>) -> PyResult<Option<u32>> {
    if value.is_none() { Ok(None) } else { device(value).map(Some) }
}

/// None: all.
pub(crate) fn streams(value: &Bound<'_, PyAny>) -> PyResult<Option<Vec<u64>>> {
    let listed: Option<Vec<Bound<'_, PyAny>>> =
        value.extract().map_err(|error| named(error, value, "streams", "a list of whole numbers, or None"))?;
    listed.map(|streams| streams.iter().map(stream).collect()).transpose()
}

pub(crate) fn pool(value: &Bound<'_, PyAny>) -> PyResult<(u64, u64)> {
    let (first, second): (Bound<'_, PyAny>, Bound<'_, PyAny>) =
        value.extract().map_err(|error| named(error, value, "pool", "a pair of whole numbers"))?;
    Ok((whole(&first, "pool:")?, whole(&second, "pool:")?))
}

/// The number of a device.
pub(crate) fn device(value: &Bound<'_, PyAny>) -> PyResult<u32> {
    fits(value, "device:", "from 0, as CUDA counts devices")
}

/// The number of a descriptor.
pub(crate) fn descriptor(value: &Bound<'_, PyAny>) -> PyResult<RawFd> {
    fits(value, "descriptor", "that is an open descriptor's")
}

/// A policy; None: that of the environment.
pub(crate) fn conf(value: &Bound<'_, PyAny>) -> PyResult<Option<String>> {
    let wanted = "a policy such as \"limit:4GiB\", or None for that of XSEG_CONF";
    value.extract().map_err(|error| named(error, value, "conf", wanted))
}
