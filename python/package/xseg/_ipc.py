"""CUDA tensors that go to other processes by ``torch.multiprocessing``.

The C++ part gives PyTorch a text in place of CUDA's handle, which only a process that runs on xseg can read. So pickles of such
tensors name the function below, and a process that cannot read them says what to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_WITHOUT_PART = (
    "xseg runs without its C++ part here, without which CUDA tensors cannot go from process to process; install g++ and "
    "CUDA's headers, send them through host memory (`tensor.cpu()`), or run with XSEG_CONF=off"
)
# PyTorch's own function, in a process that runs on xseg.
_rebuild: Callable[..., Any] | None = None


def rebuild_cuda_tensor(*parts: Any) -> Any:
    """A tensor of another process, in place of PyTorch's function of this name."""
    if _rebuild is not None:
        return _rebuild(*parts)
    from . import _torch

    if _torch.installed() == "plain":
        raise RuntimeError(_WITHOUT_PART)
    if _torch.installed() == "off":
        raise RuntimeError(
            f"this tensor is in memory of xseg in another process, and PyTorch's own allocator, which {_torch._switch} leaves it here, "
            "cannot read it; run both processes with `off` or neither"
        )
    raise RuntimeError(
        "this tensor is in memory of xseg in another process, and PyTorch's own allocator cannot read it; call xseg.install() in this "
        'process too, before its first use of CUDA (a spawned process runs the top of the script, outside of `if __name__ == "__main__"`, '
        "before it takes its arguments), or run both with XSEG_CONF=off"
    )


def mind_tensors() -> None:
    """What this process sends names the function above from now on."""
    global _rebuild
    from torch.multiprocessing import reductions

    _rebuild = reductions.rebuild_cuda_tensor
    reductions.rebuild_cuda_tensor = rebuild_cuda_tensor


def refuse_tensors(torch: Any) -> None:
    """Without the C++ part: PyTorch would say that its pluggable allocator cannot do it, and not what to do."""

    def refuse(*_: Any) -> Any:
        raise RuntimeError(_WITHOUT_PART)

    torch.UntypedStorage._share_cuda_ = refuse
    torch.UntypedStorage._new_shared_cuda = staticmethod(refuse)
