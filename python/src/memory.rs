//! How Python code looks at memory: buffers on the host, the CUDA array interface on a GPU.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use std::any::Any;
use xseg::backend::BackendKind;

/// What a view looks at: freed with the last view, so that none ever looks at memory of others.
#[pyclass(module = "xseg", frozen)]
struct Kept {
    _memory: Box<dyn Any + Send + Sync>,
}

/// A range of memory, as bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Range {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) kind: BackendKind,
}

impl Range {
    /// A writable memoryview that keeps `memory`; on host memory only.
    pub(crate) fn view(self, py: Python<'_>, memory: impl Any + Send + Sync) -> PyResult<Bound<'_, PyAny>> {
        if self.kind != BackendKind::Host {
            return Err(pyo3::exceptions::PyTypeError::new_err(format!("the host cannot read {} memory", self.kind)));
        }
        let ctypes = py.import("ctypes")?;
        let array = ctypes.getattr("c_ubyte")?.mul(self.bytes)?;
        let array = array.call_method1("from_address", (self.address,))?;
        array.setattr("_kept", Kept { _memory: Box::new(memory) })?;
        let view = py.import("builtins")?.getattr("memoryview")?.call1((array,))?;
        view.call_method1("cast", ("B",))
    }

    /// `__cuda_array_interface__`, for work on `stream`; on a GPU only.
    pub(crate) fn interface(self, py: Python<'_>, stream: u64) -> PyResult<Bound<'_, PyDict>> {
        if self.kind != BackendKind::Cuda {
            return Err(pyo3::exceptions::PyAttributeError::new_err("the block is not on a GPU"));
        }
        let interface = PyDict::new(py);
        interface.set_item("shape", PyTuple::new(py, [self.bytes])?)?;
        interface.set_item("typestr", "|u1")?;
        interface.set_item("data", (self.address, false))?;
        interface.set_item("strides", py.None())?;
        interface.set_item("version", 3)?;
        // 1 is the legacy default stream; 0 is not allowed there.
        interface.set_item("stream", stream.max(1))?;
        Ok(interface)
    }
}
