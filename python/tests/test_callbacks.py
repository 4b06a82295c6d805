"""Functions that a heap calls when memory runs out, on host memory."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path
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


def shared_memory() -> int:
    """Bytes of host memory that heaps hold and that were touched."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssShmem"))
    return int(line.split()[1]) << 10


class Owner:
    """Its callback names it, and it the heap."""

    def __init__(self) -> None:
        self.heap = xseg.Heap("backend:host,limit:64MiB")
        self.block = self.heap.alloc(32 * MIB)
        self.block.view()[:] = bytes(32 * MIB)
        self.heap.on_out_of_memory(self.rescue)

    def rescue(self, bytes: int) -> bool:
        self.block.close()
        return True


@pytest.mark.parametrize("names", ["the heap", "a method", "the block", "an owner", "another heap", "nothing"])
def test_a_heap_that_its_callback_names_is_collected(names: str) -> None:
    def make() -> None:
        heap = xseg.Heap("backend:host,limit:64MiB")
        block = heap.alloc(32 * MIB)
        block.view()[:] = bytes(32 * MIB)
        other = xseg.Heap("backend:host,limit:64MiB")
        callbacks: dict[str, Any] = {
            "the heap": lambda _: bool(heap.trim()),
            "a method": heap.free,
            "the block": lambda _: block.close(),
            "an owner": Owner().rescue,
            "another heap": lambda _: bool(other.trim()),
            "nothing": lambda _: False,
        }
        heap.on_out_of_memory(callbacks[names])
        if names == "another heap":
            other.on_out_of_memory(lambda _: bool(heap.trim()))

    gc.collect()
    before = (len(os.listdir("/proc/self/fd")), shared_memory())
    for _ in range(10):
        make()
    gc.collect()
    descriptors, memory = len(os.listdir("/proc/self/fd")), shared_memory()
    assert descriptors <= before[0] and memory < before[1] + 32 * MIB


def test_callbacks_are_called_in_spite_of_collections_while_their_heap_is_used() -> None:
    heap = xseg.Heap("backend:host,limit:64MiB")
    asked: list[int] = []

    def rescue(bytes: int) -> bool:
        gc.collect()
        asked.append(bytes)
        return bool(heap.trim())

    heap.on_out_of_memory(rescue)
    stop = threading.Event()

    def collect() -> None:
        while not stop.is_set():
            gc.collect()

    collector = threading.Thread(target=collect)
    collector.start()
    for number in range(1, 21):
        with pytest.raises(xseg.OutOfMemoryError):
            heap.alloc((64 + number) * MIB)
    stop.set()
    collector.join()
    assert asked == [(64 + number) * MIB for number in range(1, 21)]


def test_a_finalizer_may_use_a_heap_that_is_collected_with_it() -> None:
    seen: list[int] = []

    class Last:
        def __init__(self) -> None:
            self.heap = xseg.Heap("backend:host,limit:64MiB")
            self.heap.on_out_of_memory(lambda _: self.heap is None)

        def __del__(self) -> None:
            with pytest.raises(xseg.OutOfMemoryError):
                self.heap.alloc(65 * MIB)
            seen.append(self.heap.alloc(MIB).nbytes)

    last = Last()
    del last
    gc.collect()
    assert seen == [MIB]


def ends(program: str) -> str:
    """What a program prints, which must end by itself and as it says: with status 7."""
    # The C library takes a while to end after Python has, as where large libraries end: threads that meet that are then seen.
    lingers = "import ctypes; libc = ctypes.CDLL(None); libc.on_exit(libc.usleep, ctypes.c_void_p(300_000))\n"
    words = [sys.executable, "-c", lingers + program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 7, (done.returncode, done.stderr)
    return done.stdout


FAILING_THREADS = """
import sys, threading, time, xseg
heap = xseg.Heap("backend:host,limit:64MiB,wait_limit:1ms")
class Slow:
    def __bool__(self):
        return slow(0)
    def __del__(self):
        slow(0)
def slow(_):
    until = time.monotonic() + 0.05
    while time.monotonic() < until:
        sum(range(1000))
    return False
def raises(_):
    raise KeyError
sys.unraisablehook = slow
heap.on_out_of_memory({callback})
def fail():
    while True:
        try:
            heap.alloc(65 << 20)
        except xseg.OutOfMemoryError:
            pass
for _ in range(6):
    threading.Thread(target=fail, daemon=True).start()
time.sleep(0.1)
sys.exit(7)
"""


@pytest.mark.parametrize(
    "callback", ["lambda _: False", "slow", "lambda _: Slow()", "raises", "lambda _: time.sleep(0.2)", "heap.trim"]
)
def test_threads_that_are_in_callbacks_or_come_to_them_do_not_disturb_the_end(callback: str) -> None:
    for _ in range(3):
        ends(FAILING_THREADS.format(callback=callback))


def test_callbacks_are_asked_until_the_interpreter_ends() -> None:
    program = """
import atexit, sys
def fail(when):
    try:
        heap.alloc(65 << 20)
    except xseg.OutOfMemoryError:
        print(when, asked)
atexit.register(fail, "registered before")
import xseg
atexit.register(fail, "registered after")
heap = xseg.Heap("backend:host,limit:64MiB")
asked = []
heap.on_out_of_memory(asked.append)
fail("first")
sys.exit(7)
"""
    once, twice = f"[{65 * MIB}]", f"[{65 * MIB}, {65 * MIB}]"
    assert ends(program).splitlines() == [f"first {once}", f"registered after {twice}", f"registered before {twice}"]


def test_a_forked_child_ends_while_its_parents_threads_come_to_callbacks() -> None:
    program = FAILING_THREADS.format(callback="lambda _: False").replace(
        "sys.exit(7)",
        """
import os
for _ in range(15):
    child = os.fork()
    if child == 0:
        sys.exit(9)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 9, status
sys.exit(7)
""",
    )
    ends(program.replace("usleep", "getpid"))
