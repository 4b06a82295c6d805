//! `xseg._native`: heaps for Python, the command line, and the C functions of `xseg.h` in the same library, for PyTorch.

mod callback;
mod errors;
mod heap;
mod leaving;
mod memory;
mod number;
mod share;

// The C functions are exported from this library too: PyTorch's pluggable allocator takes a path to it.
pub use xseg_capi::*;

use pyo3::prelude::*;
use std::ffi::OsString;

/// Runs the command line with these words after the program's name; gives its exit status.
#[pyfunction]
fn cli(py: Python<'_>, words: Vec<OsString>) -> u8 {
    py.detach(|| xseg::cli::main_with(words))
}

/// Checks a policy in the form of XSEG_CONF, or that of the environment for None; gives it in its shortest form.
///
/// Names, values and contradictions are checked. Files (`plan`) and devices that it names are not looked at: only a heap does.
///
/// Raises ConfigError.
#[pyfunction]
#[pyo3(signature = (conf=None))]
fn check_conf(#[pyo3(from_py_with = number::conf)] conf: Option<String>) -> PyResult<String> {
    let config = match conf.as_deref() {
        Some(conf) => xseg::Config::parse(conf),
        None => xseg::Config::from_env(),
    };
    Ok(config.map_err(errors::raise)?.to_string())
}

/// The text of xseg.h.
#[pyfunction]
fn header() -> &'static str {
    include_str!("../../include/xseg.h")
}

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    let named = xseg_capi::named_statistics(&xseg::Stats::default());
    module.add("STATISTICS", pyo3::types::PyTuple::new(module.py(), named.map(|(name, _)| name))?)?;
    module.add_class::<heap::Heap>()?;
    module.add_class::<heap::Block>()?;
    module.add_class::<share::Export>()?;
    module.add_class::<share::Imported>()?;
    module.add_function(wrap_pyfunction!(cli, module)?)?;
    module.add_function(wrap_pyfunction!(check_conf, module)?)?;
    module.add_function(wrap_pyfunction!(header, module)?)?;
    leaving::prepare(module)?;
    errors::add(module)
}
