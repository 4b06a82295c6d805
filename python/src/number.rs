//! Integers of Python as those of the library: what does not fit is a ValueError that says which argument it was and what is
//! allowed, where a bare conversion would be an OverflowError about C.

use pyo3::exceptions::{PyOverflowError, PyValueError};
use pyo3::prelude::*;
use std::os::fd::RawFd;

/// `value` as an integer of the library's, or why it is none. `what` it is and which are `allowed`, for people.
fn fits<'a, 'py, T: FromPyObject<'a, 'py, Error = PyErr>>(
    value: &'a Bound<'py, PyAny>,
    what: &str,
    allowed: &str,
) -> PyResult<T> {
    value.extract().map_err(|error: PyErr| match error.is_instance_of::<PyOverflowError>(value.py()) {
        true => PyValueError::new_err(format!("{what} {value} is out of range; give a whole number {allowed}")),
        false => error,
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

/// None: all.
pub(crate) fn streams(value: &Bound<'_, PyAny>) -> PyResult<Option<Vec<u64>>> {
    let listed: Option<Vec<Bound<'_, PyAny>>> = value.extract()?;
    listed.map(|streams| streams.iter().map(stream).collect()).transpose()
}

pub(crate) fn pool(value: &Bound<'_, PyAny>) -> PyResult<(u64, u64)> {
    let (first, second): (Bound<'_, PyAny>, Bound<'_, PyAny>) = value.extract()?;
    Ok((whole(&first, "pool:")?, whole(&second, "pool:")?))
}

/// The number of a descriptor.
pub(crate) fn descriptor(value: &Bound<'_, PyAny>) -> PyResult<RawFd> {
    fits(value, "descriptor", "that is an open descriptor's")
}
