"""PyTorch on xseg.

Two ways lead there. The full one compiles a small C++ class against the PyTorch that is installed, once, and gives PyTorch
an allocator whose every figure and error is its own kind. The plain one needs no compiler: PyTorch's pluggable allocator,
with what that throws away put back in Python as far as Python sees it.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import operator
import os
import re
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import _build, _ipc, _native

if TYPE_CHECKING:
    import torch

_mode: str | None = None
# Which switch turned xseg off, while the mode is "off".
_switch: str | None = None
_library: ctypes.CDLL | None = None
_DEVICES = 'give the number of a device, from 0, "cuda:1", a torch.device, or None for the current one'


def installed() -> str | None:
    """How PyTorch runs on xseg: "full", "plain", "off", or None before ``install()``."""
    return _mode


def install(conf: str | None = None, *, compile: bool | None = None) -> str:
    """Make PyTorch allocate GPU memory from xseg, in this process, from now on.

    Call it once, before the first use of CUDA. ``conf`` sets the policy, which the environment variable XSEG_CONF gives
    otherwise; ``XSEG_CONF=off`` leaves PyTorch as it is, whatever ``conf`` says. Memory is made of small pieces
    (``handles:small``) unless the policy names ``handles`` or ``handle_max``; the policy is put into XSEG_CONF for child processes.

    ``compile`` says whether the C++ part is compiled against the installed PyTorch (a minute, once, then cached): True
    insists on it, False does without, None tries and falls back with a warning. Without it running out of memory is
    RuntimeError("CUDA out of memory. ...") in place of torch.OutOfMemoryError, there are no ``torch.cuda.MemPool``,
    memory history and ``torch.backends.cudnn.benchmark``, and GPUs reach each other's memory from the start (``peers:all``)
    unless the policy names ``peers``.

    Returns "full", "plain" or "off", also without a GPU, which PyTorch asks for at its first use of CUDA. Raises RuntimeError for a second call and after CUDA was used, ConfigError for a wrong
    policy.
    """
    global _mode, _switch
    if _mode is not None and _mode != "off":
        raise RuntimeError("xseg.install() was called already in this process; call it once")
    if conf is not None and not isinstance(conf, str):
        # Before the switch is looked at, which a wrong argument must not hide behind.
        _native.check_conf(conf)
    environment = os.environ.get("XSEG_CONF", "")
    wanted = environment if conf is None else conf
    # The switch of the environment is stronger than what a program says.
    if "off" in (environment.strip(), wanted.strip()):
        _mode = "off"
        _switch = "XSEG_CONF=off" if environment.strip() == "off" else 'install("off")'
        return _mode
    shortest = _native.check_conf(conf)
    _refuse_backend(wanted, "XSEG_CONF: " if conf is None else "")
    torch = _import_torch()
    if torch.version.cuda is None:
        raise RuntimeError(
            "this PyTorch was built without CUDA, so there is nothing for xseg to manage; "
            "install a CUDA build, or set XSEG_CONF=off to run without xseg"
        )
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "CUDA was used before xseg.install(); call it right after the imports, before any tensor is on a GPU"
        )
    os.environ["XSEG_CONF"] = _with_small_handles(wanted)
    part = None
    if compile is not False:
        try:
            part = _build.torch_part()
        except _build.BuildError as error:
            if compile:
                raise
            warnings.warn(f"xseg runs without its C++ part: {error}", RuntimeWarning, stacklevel=2)
    if part is None:
        os.environ["XSEG_CONF"] = _with_peers(os.environ["XSEG_CONF"], torch)
    _mind_registration()
    _mode = _install_full(part) if part is not None else _install_plain(torch)
    if "stats:on" in shortest.split(","):
        atexit.register(_print_stats)
    return _mode


def _refuse_backend(conf: str, source: str) -> None:
    """Every GPU that PyTorch uses has a heap, so that a policy that names other memory, or one GPU, would not be followed."""
    for entry in conf.split(","):
        key, _, value = (part.strip() for part in entry.partition(":"))
        if key != "backend" or value in ("auto", "cuda"):
            continue
        why = (
            "names one GPU, and PyTorch has a heap on each that it uses"
            if value.startswith("cuda=")
            else "is no GPU's memory, which PyTorch needs"
        )
        raise _native.ConfigError(f"{source}`backend:{value}` {why}; leave `backend` out")


def _with_small_handles(conf: str) -> str:
    """The policy with small pieces of memory, unless it says how large they are to be.

    A training run grows once, which takes some tenths of a second more, and then lives with what it has for hours.
    """
    return _with_default(conf, "handles:small", {"handles", "handle_max"})


def _with_peers(conf: str, torch: Any) -> str:
    """The policy with access of all GPUs to each other's memory, where there are several, unless it says who gets it.

    PyTorch tells a pluggable allocator of no copy between two GPUs, before which the C++ part gives access.
    """
    return _with_default(conf, "peers:all", {"peers"}) if torch.cuda.device_count() > 1 else conf


def _with_default(conf: str, entry: str, unless: set[str]) -> str:
    """The policy with one more entry, unless it has one of these keys."""
    keys = {one.partition(":")[0].strip() for one in conf.split(",")}
    return conf if keys & unless else ",".join(filter(None, (conf.strip().rstrip(","), entry)))


def _import_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise RuntimeError(f"PyTorch cannot be imported, so there is nothing to install xseg into: {error}") from error
    return torch


def _c() -> ctypes.CDLL:
    """The C functions, which are in the same library as the Python module."""
    global _library
    if _library is None:
        library = ctypes.CDLL(_native.__file__)
        library.xseg_last_error.restype = ctypes.c_char_p
        library.xseg_device_heap.argtypes = [ctypes.c_int, ctypes.c_void_p]
        library.xseg_stats.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        library.xseg_reset_peaks.argtypes = [ctypes.c_void_p]
        library.xseg_limit.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        library.xseg_device_totals.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
        library.xseg_tag_push.argtypes = [ctypes.c_char_p]
        library.xseg_tags.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        library.xseg_tags_reset_peaks.argtypes = [ctypes.c_int]
        library.xseg_record_start.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
        library.xseg_record_stop.argtypes = [ctypes.c_void_p]
        _library = library
    return _library


def _check(status: int) -> None:
    if status:
        raise _native.Error(_c().xseg_last_error().decode())


def _heap(device: int) -> ctypes.c_void_p:
    heap = ctypes.c_void_p()
    _check(_c().xseg_device_heap(device, ctypes.byref(heap)))
    return heap


def _why_not_here() -> str:
    """Why PyTorch does not run on xseg in this process, and what to do."""
    if _mode == "off":
        return (
            f"{_switch} has PyTorch run without xseg here, which knows nothing of its memory then; leave `off` out, or skip this "
            'where xseg.installed() is "off"'
        )
    return "PyTorch does not run on xseg here; call xseg.install() first"


def _device(device: int | str | torch.device | None) -> int:
    """The number of a device, or of the current one."""
    if _mode not in ("full", "plain"):
        raise RuntimeError(_why_not_here())
    # Nobody has a device of PyTorch's who has not loaded it.
    if isinstance(device, getattr(sys.modules.get("torch"), "device", ())):
        device = str(device)
    if isinstance(device, str):
        named = re.fullmatch(r"cuda(?::(0|[1-9][0-9]*))?", device)
        if named is None:
            raise ValueError(f"device {device!r} is no GPU; {_DEVICES}")
        device = None if named[1] is None else int(named[1])
    if device is None:
        import torch

        try:
            device = int(torch.cuda.current_device())
        except RuntimeError as error:
            # PyTorch's own steps on the way there help nobody.
            raise RuntimeError(f"PyTorch has no current GPU here for xseg to look at: {error}") from None
    try:
        device = operator.index(device)
    except TypeError:
        given = type(device).__name__
        raise TypeError(f"device: {_DEVICES}, not {given}") from None
    # A larger number would be cut off on its way into C.
    if not 0 <= device < 2**31:
        raise ValueError(f"device {device} is out of range; {_DEVICES}")
    return device


def stats(device: int | str | torch.device | None = None) -> dict[str, int]:
    """What xseg did and holds on a device under PyTorch (None: the current one): bytes and counts by name.

    A device is its number, ``"cuda:1"`` or a ``torch.device``. More than ``torch.cuda.memory_stats`` has room for: moves, waits, driver calls. Raises RuntimeError without ``install()``, under
    ``XSEG_CONF=off`` and without a GPU.
    """
    number = _device(device)
    count = len(_native.STATISTICS)
    filled = (ctypes.c_uint64 * (count + 1))()
    filled[0] = ctypes.sizeof(filled)
    _check(_c().xseg_stats(_heap(number), filled))
    return dict(zip(_native.STATISTICS, filled[1:]))


def _used(device: int) -> tuple[int, int]:
    """Rounded and requested bytes of all allocations so far."""
    allocated, requested = ctypes.c_uint64(), ctypes.c_uint64()
    _check(_c().xseg_device_totals(device, ctypes.byref(allocated), ctypes.byref(requested)))
    return allocated.value, requested.value


def _print_stats() -> None:
    for device in range(64):
        if _used(device)[0]:
            print(f"xseg: device {device}: {stats(device)}", file=sys.stderr)


def _install_full(part: str) -> str:
    library = ctypes.CDLL(part)
    library.xseg_torch_install.restype = ctypes.c_char_p
    refused = library.xseg_torch_install()
    if refused:
        raise RuntimeError(f"PyTorch did not take xseg as its allocator: {refused.decode()}")
    library.xseg_torch_own_pool.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
    _mind_pools(library.xseg_torch_own_pool)
    _ipc.mind_tensors()
    return "full"


# Tell NCCL's process groups to register all of the allocator's memory.
_REGISTER_ALL = ("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK")


def _mind_registration() -> None:
    """Turns off what would register memory that moves, as PyTorch does by itself for its expandable segments."""
    for name in _REGISTER_ALL:
        if os.environ.get(name, "").lower() in ("1", "y", "yes", "t", "true"):
            os.environ[name] = "0"
            warnings.warn(
                f"xseg sets {name}=0: its memory moves and cannot be registered with NCCL; register a "
                "torch.cuda.MemPool(backend.mem_allocator) by backend.register_mem_pool instead",
                RuntimeWarning,
                stacklevel=3,
            )


def _mind_pools(has_own: Callable[[int, int], int]) -> None:
    """Lets NCCL register only pools whose memory comes from an allocator of their own, whole range by whole range.

    The heap's blocks lie in other pieces of memory on each rank, and NCCL must find a buffer registered on all or on none.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_nccl_available()):
        return
    group: Any = dist.ProcessGroupNCCL
    register = group.register_mem_pool

    @functools.wraps(register)
    def checked(self: Any, pool: Any, *more: Any, **named: Any) -> Any:
        if not has_own(*pool.id):
            raise RuntimeError(
                "xseg: NCCL can register only pools with an allocator of their own; make this one by "
                "torch.cuda.MemPool(backend.mem_allocator)"
            )
        return register(self, pool, *more, **named)

    group.register_mem_pool = checked


def _address(name: str) -> int:
    address = ctypes.cast(getattr(_c(), name), ctypes.c_void_p).value
    assert address is not None
    return address


def _install_plain(torch: Any) -> str:
    made = torch.cuda.memory.CUDAPluggableAllocator(_native.__file__, "xseg_torch_alloc", "xseg_torch_free")
    inner = made.allocator()
    hooks = {
        "set_reset_fn": "xseg_torch_reset",
        "set_memory_fraction_fn": "xseg_torch_memory_fraction",
        "set_base_alloc_fn": "xseg_torch_base_alloc",
        "set_record_stream_fn": "xseg_torch_record_stream",
        "set_begin_allocate_to_pool": "xseg_torch_begin_pool",
        "set_end_allocate_to_pool_fn": "xseg_torch_end_pool",
        "set_release_pool": "xseg_torch_release_pool",
    }
    for setter, function in hooks.items():
        getattr(inner, setter)(_address(function))
    torch.cuda.memory.change_current_allocator(made)
    # PyTorch keeps the C++ object; this keeps the Python one, which it does not.
    torch._C._xseg_allocator = made
    baselines: dict[int, dict[str, int]] = {}

    def figures(device: int) -> dict[str, int]:
        now = stats(device) if _used(device)[0] else dict.fromkeys(_native.STATISTICS, 0)
        now["bytes_allocated"], now["bytes_requested"] = _used(device)
        return now

    def memory_stats(device: int) -> dict[str, Any]:
        return _shapes(figures(device), baselines.get(device, {}))

    def reset_peak(device: int) -> None:
        _check(_c().xseg_tags_reset_peaks(device))
        if _used(device)[0]:
            _check(_c().xseg_reset_peaks(_heap(device)))

    def reset_accumulated(device: int) -> None:
        baselines[device] = figures(device)

    def fraction(device: int) -> float:
        limit = ctypes.c_uint64()
        _check(_c().xseg_limit(_heap(device), ctypes.byref(limit)))
        total: int = torch.cuda.get_device_properties(device).total_memory
        return limit.value / total

    def no_trees(*_: Any) -> Any:
        raise RuntimeError(
            "xseg without its C++ part has no checkpoints of pools, which the graph trees of "
            'torch.compile(mode="reduce-overhead") need; install g++ and CUDA\'s headers, or set '
            "torch._inductor.config.triton.cudagraph_trees = False"
        )

    _ipc.refuse_tensors(torch)
    torch._C._cuda_checkPoolLiveAllocations = no_trees
    torch._C._cuda_getCheckpointState = no_trees
    torch._C._cuda_memoryStats = memory_stats
    torch._C._cuda_resetPeakMemoryStats = reset_peak
    torch._C._cuda_resetAccumulatedMemoryStats = reset_accumulated
    torch._C._cuda_getMemoryFraction = fraction
    return "plain"


def _shapes(now: dict[str, int], since: dict[str, int]) -> dict[str, Any]:
    """Figures of the heap in the nested form of torch._C._cuda_memoryStats, counted from `since`."""

    def stat(current: int, peak: int, allocated: int, freed: int) -> dict[str, dict[str, int]]:
        one = {"current": current, "peak": max(peak, current), "allocated": allocated, "freed": freed}
        # xseg counts small and large blocks together; they are shown as large ones.
        return {"all": one, "small_pool": dict.fromkeys(one, 0), "large_pool": dict(one)}

    def counted(name: str) -> int:
        return now[name] - since.get(name, 0)

    def summed(name: str, held: str) -> tuple[int, int]:
        total = counted(name)
        return total, total - now[held] + since.get(held, 0)

    blocks = counted("allocs"), counted("frees")
    handles = now["calls_create"] - now["calls_release"]
    made = counted("calls_create"), counted("calls_release")
    live = summed("bytes_allocated", "allocated")
    asked = summed("bytes_requested", "requested")
    active, split = now["allocated"] + now["pending"], now["partly_live_granules"]
    created = counted("bytes_created")
    return {
        "allocation": stat(now["live_blocks"], 0, *blocks),
        "segment": stat(handles, 0, *made),
        "active": stat(now["live_blocks"], 0, *blocks),
        "inactive_split": stat(0, 0, 0, 0),
        "allocated_bytes": stat(now["allocated"], now["peak_allocated"], *live),
        "reserved_bytes": stat(
            now["reserved"], now["peak_reserved"], created, created - now["reserved"] + since.get("reserved", 0)
        ),
        "active_bytes": stat(active, now["peak_allocated"], *live),
        "inactive_split_bytes": stat(split, 0, 0, 0),
        "requested_bytes": stat(now["requested"], now["peak_requested"], *asked),
        "oversize_allocations": dict.fromkeys(("current", "peak", "allocated", "freed"), 0),
        "oversize_segments": dict.fromkeys(("current", "peak", "allocated", "freed"), 0),
        "num_alloc_retries": counted("host_waits"),
        "num_ooms": counted("ooms"),
        "num_sync_all_streams": 0,
        "num_device_alloc": made[0],
        "num_device_free": made[1],
        "max_split_size": -1,
    }
