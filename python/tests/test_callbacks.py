"""Functions that a heap calls when memory runs out, on host memory."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import xseg

MIB = 1 << 20


class NoTruth:
    def __bool__(self) -> bool:
        raise ValueError("neither")


def raising(kind: type[BaseException]) -> Any:
    def raises(_: int) -> bool:
        raise kind

    return raises


@pytest.mark.parametrize("kind", [ZeroDivisionError, SystemExit, KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("on_a_thread", [False, True])
def test_what_a_callback_raises_goes_to_the_hook_and_ends_nothing(
    kind: type[BaseException], on_a_thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    heap = xseg.Heap("backend:host,limit:64MiB")
    said: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    callback = (lambda _: NoTruth()) if kind is ValueError else raising(kind)
    heap.on_out_of_memory(callback)
    asked_after_it: list[int] = []
    heap.on_out_of_memory(asked_after_it.append)
    refused: list[str] = []

    def fail() -> None:
        with pytest.raises(xseg.OutOfMemoryError, match="65.000 MiB asked for"):
            heap.alloc(65 * MIB)
        refused.append("once")

    if on_a_thread:
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
    else:
        fail()
    assert refused == ["once"] and asked_after_it == [65 * MIB]
    assert [(one.exc_type, one.object) for one in said] == [(kind, callback)]
