"""xseg: an allocator for GPU memory that defragments by remapping pages instead of copying.

``xseg.install()`` before the first use of CUDA makes PyTorch allocate from it. ``xseg.Heap`` is a heap for direct use,
on a GPU or, for tests, on host memory that is really remapped. The environment variable ``XSEG_CONF`` is the policy;
``python -m xseg conf`` lists its keys.
"""

from ._native import (
    Block,
    ConfigError,
    Error,
    Export,
    Heap,
    Imported,
    OutOfMemoryError,
    PointerError,
    ShareError,
    __version__,
    check_conf,
)
from ._notes import record, tag, tags
from ._torch import install, installed, stats

__all__ = [
    "Block",
    "ConfigError",
    "Error",
    "Export",
    "Heap",
    "Imported",
    "OutOfMemoryError",
    "PointerError",
    "ShareError",
    "__version__",
    "check_conf",
    "install",
    "installed",
    "record",
    "stats",
    "tag",
    "tags",
]
