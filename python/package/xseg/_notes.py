"""Tags and recordings of what PyTorch allocates."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
from types import TracebackType
from typing import TYPE_CHECKING

from . import _native, _torch

if TYPE_CHECKING:
    import torch


class _Figures(ctypes.Structure):
    """`xseg_tag_figures` of the C interface."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("allocated", ctypes.c_uint64),
        ("peak_allocated", ctypes.c_uint64),
        ("live_blocks", ctypes.c_uint64),
        ("allocs", ctypes.c_uint64),
    ]


class tag(contextlib.ContextDecorator):
    """A tag for what this thread allocates on GPUs within the ``with``, or within the function that this decorates.

    ``xseg.tags()`` has the figures. Tags nest, and the innermost counts. PyTorch's backward pass runs on threads of its own, whose
    allocations have no tag but one that a hook sets there. A process has up to 1024 different names; without any, tags cost
    nothing. Without ``install()`` and under ``XSEG_CONF=off`` a tag does nothing.
    """

    def __init__(self, name: str) -> None:
        if not isinstance(name, str):
            raise TypeError(f"name: give the tag's name as text, not {type(name).__name__}")
        if "\0" in name:
            raise ValueError("a tag has no zero characters")
        self.name = name

    def __enter__(self) -> tag:
        _torch._check(_torch._c().xseg_tag_push(self.name.encode()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _torch._check(_torch._c().xseg_tag_pop())


def tags(device: int | str | torch.device | None = None) -> dict[str, dict[str, int]]:
    """What blocks with each tag take up on a device under PyTorch (None: the current one), by name.

    ``allocated``, ``peak_allocated`` (bytes, rounded to 512), ``live_blocks`` and ``allocs`` (so far).
    ``torch.cuda.reset_peak_memory_stats`` resets the peaks. Raises RuntimeError without ``install()``, under ``XSEG_CONF=off`` and,
    for the current GPU, where there is none.
    """
    number, library = _torch._device(device), _torch._c()
    count = ctypes.c_size_t()
    room = 16
    while True:
        found = (_Figures * room)()
        _torch._check(library.xseg_tags(number, found, room, ctypes.byref(count)))
        if count.value <= room:
            break
        # Others may add tags between two calls.
        room = count.value + 16
    names = [field[0] for field in _Figures._fields_[1:]]
    return {one.name.decode(): {name: getattr(one, name) for name in names} for one in found[: count.value]}


class record:
    """Record what PyTorch allocates on a device (None: the current one) as a trace that ``xseg replay`` reads.

    Recording begins here, with the blocks that are live, and ends with ``stop()``, the ``with``, or the program. A device has one
    recording at a time, and so has a file, of whichever process: of several ranks each needs its own. Raises RuntimeError without
    ``install()``, under ``XSEG_CONF=off`` and without a GPU, and Error where the file cannot be written or is being recorded to.
    """

    def __init__(self, path: str | os.PathLike[str], device: int | str | torch.device | None = None) -> None:
        self.path = os.fspath(path)
        self._heap: ctypes.c_void_p | None = None
        heap = _torch._heap(_torch._device(device))
        _torch._check(_torch._c().xseg_record_start(heap, os.fsencode(self.path)))
        self._heap = heap
        atexit.register(self._at_exit)

    def stop(self) -> None:
        """End the recording; the file is whole then. A second call does nothing."""
        heap, self._heap = self._heap, None
        if heap is not None:
            atexit.unregister(self._at_exit)
            _torch._check(_torch._c().xseg_record_stop(heap))

    def _at_exit(self) -> None:
        # Too late for anybody to catch an error.
        with contextlib.suppress(_native.Error):
            self.stop()

    def __enter__(self) -> record:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
