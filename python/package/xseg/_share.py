"""Exports as arguments and over pipes and queues of multiprocessing."""

from __future__ import annotations

from multiprocessing import reduction
from typing import Any

from ._native import Export


def to_send(fd: int) -> Any:
    """What multiprocessing sends in place of a descriptor."""
    return reduction.DupFd(fd)


def rebuild(sent: Any) -> Export:
    """The export in the process that it was sent to."""
    return Export.from_fd(sent.detach())
