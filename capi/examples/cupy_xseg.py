"""CuPy on a heap of xseg. On a machine with an NVIDIA GPU and CuPy:

    XSEG_CONF=limit:90% LIBXSEG=/usr/local/lib/libxseg.so python cupy_xseg.py

CuPy's `CFunctionAllocator` passes no stream and takes null for an address, so that a C function could neither order a
block by its stream nor say that memory has run out; `PythonFunctionAllocator` can do both.
"""

import ctypes
import os

import cupy

library = ctypes.CDLL(os.environ.get("LIBXSEG", "libxseg.so"))
library.xseg_last_error.restype = ctypes.c_char_p
library.xseg_device_alloc.argtypes = [ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p]
library.xseg_device_free.argtypes = [ctypes.c_void_p]
OUT_OF_MEMORY = 1


def allocate(_, size, device):
    block = ctypes.c_void_p()
    stream = cupy.cuda.get_current_stream().ptr
    status = library.xseg_device_alloc(device, size, stream, ctypes.byref(block))
    if status == OUT_OF_MEMORY:
        raise MemoryError(library.xseg_last_error().decode())
    if status:
        raise RuntimeError(library.xseg_last_error().decode())
    return block.value


def free(_, address, device):
    library.xseg_device_free(address)


cupy.cuda.set_allocator(cupy.cuda.PythonFunctionAllocator(allocate, free).malloc)

numbers = cupy.arange(1 << 24, dtype=cupy.float32)
print("sum", float(numbers.sum()))
