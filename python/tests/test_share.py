"""Blocks that two processes use, on host memory."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from multiprocessing.queues import Queue
from pathlib import Path

import pytest
import xseg

MIB = 1 << 20
SMALL_HANDLES = "backend:host,limit:64MiB,handle_max:2MiB,growth:exact"
spawn = multiprocessing.get_context("spawn")


@pytest.fixture
def heap() -> xseg.Heap:
    return xseg.Heap(SMALL_HANDLES)


def no_longer_exported(heap: xseg.Heap) -> None:
    deadline = time.monotonic() + 30
    while heap.stats()["exported"]:
        assert time.monotonic() < deadline
        heap.tick()
        time.sleep(0.001)


def read_and_write(export: xseg.Export, said: Connection) -> None:
    """In the other process."""
    with xseg.Heap("backend:host").import_(export) as imported:
        view = imported.view()
        said.send((bytes(view[:4]), view[-1], len(imported)))
        view[:5] = b"there"
        said.recv()
    assert imported.closed and bytes(view[:5]) == b"there"
    del view
    said.send("done")


def test_an_argument_of_another_process(heap: xseg.Heap) -> None:
    block = heap.alloc(21 * MIB + 5)
    block.view()[:4], block.view()[-1] = b"here", 7
    ours, theirs = spawn.Pipe()
    export = block.export()
    other = spawn.Process(target=read_and_write, args=(export, theirs))
    other.start()
    export.close()
    assert ours.recv() == (b"here", 7, 21 * MIB + 5)
    ours.send("seen")
    assert ours.recv() == "done"
    other.join(30)
    assert other.exitcode == 0 and bytes(block.view()[:5]) == b"there"
    heap.tick()
    assert heap.stats()["exported"] == 0


def end_without_closing(export: xseg.Export) -> None:
    """In the other process: what it imported is open to its end."""
    imported = xseg.Heap("backend:host").import_(export)
    imported.view()[0] = 9
    os._exit(0)


def test_an_export_that_stays_open_keeps_the_memory(heap: xseg.Heap) -> None:
    block = heap.alloc(40 * MIB)
    with block.export() as export:
        other = spawn.Process(target=end_without_closing, args=(export,))
        other.start()
        other.join(30)
        assert other.exitcode == 0 and block.view()[0] == 9
        block.close()
        heap.tick()
        # The importer is gone, which nobody can tell while the export is open.
        assert heap.stats()["exported"] == heap.stats()["pending"] == 40 * MIB
    no_longer_exported(heap)
    with heap.alloc(60 * MIB):
        pass


def test_the_readme_hands_an_export_over_and_closes_it(tmp_path: Path) -> None:
    text = (Path(__file__).parent.parent / "README.md").read_text()
    (shown,) = [
        code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "with block.export() as" in code
    ]
    program = tmp_path / "shared.py"
    program.write_text(shown + "    print(block.view()[0])\n")
    env = {**os.environ, "XSEG_CONF": SMALL_HANDLES}
    done = subprocess.run([sys.executable, str(program)], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout == "9\n", done.stderr


def from_a_queue(queue: Queue[xseg.Export], said: Connection) -> None:
    """In the other process."""
    heap = xseg.Heap("backend:host")
    while True:
        imported = heap.import_(queue.get())
        said.send(imported.view()[0])
        if said.recv() == "keep":
            break
        imported.close()
    # It is killed here.
    time.sleep(60)


def test_queues_and_a_killed_process(heap: xseg.Heap) -> None:
    queue: Queue[xseg.Export] = spawn.Queue()
    ours, theirs = spawn.Pipe()
    other = spawn.Process(target=from_a_queue, args=(queue, theirs), daemon=True)
    other.start()
    for number in range(3):
        block = heap.alloc(6 * MIB)
        block.view()[0] = number
        queue.put(block.export())
        assert ours.recv() == number
        block.close()
        heap.tick()
        assert heap.stats()["pending"] == 6 * MIB
        ours.send("keep" if number == 2 else "go on")
        if number < 2:
            no_longer_exported(heap)
            assert heap.stats()["pending"] == 0
    assert other.pid is not None
    os.kill(other.pid, signal.SIGKILL)
    other.join(30)
    gc.collect()
    no_longer_exported(heap)
    with heap.alloc(64 * MIB):
        pass


def test_sockets_and_a_process_that_knows_only_the_descriptor(heap: xseg.Heap) -> None:
    block = heap.alloc(5 * MIB)
    block.view()[4 * MIB] = 9
    ours, theirs = socket.socketpair()
    code = """
import socket, sys, xseg
here = socket.socket(fileno=int(sys.argv[1]))
imported = xseg.Heap("backend:host").receive(here)
assert imported.view()[4 << 20] == 9
imported.view()[0] = 8
imported.close()
imported.close()
"""
    with ours, theirs:
        with subprocess.Popen([sys.executable, "-c", code, str(theirs.fileno())], pass_fds=[theirs.fileno()]) as other:
            block.export().send(ours)
            assert other.wait(30) == 0
    assert block.view()[0] == 8
    no_longer_exported(heap)


def test_within_one_process(heap: xseg.Heap) -> None:
    there = xseg.Heap("backend:host")
    block = heap.alloc(3 * MIB)
    imported = there.import_(heap.export(block.address))
    imported.view()[7] = 1
    assert block.view()[7] == 1 and imported.address != block.address
    assert (imported.nbytes, len(imported), imported.closed) == (3 * MIB, 3 * MIB, False)
    assert not hasattr(imported, "__cuda_array_interface__")
    assert there.stats()["imported"] == 3 * MIB and heap.stats()["exported"] == 3 * MIB
    del imported
    gc.collect()
    heap.tick()
    assert there.stats()["imported"] == 0 and heap.stats()["exported"] == 0
    # By the bare descriptor.
    fd = block.export().detach()
    export = xseg.Export.from_fd(fd)
    assert not export.closed and export.fileno() >= 0
    imported = there.import_(export)
    assert export.closed
    imported.close()
    with pytest.raises(xseg.ShareError, match="closed"):
        imported.view()


def test_what_is_wrong_is_said(heap: xseg.Heap) -> None:
    block = heap.alloc(MIB)
    export = block.export()
    export.close()
    export.close()
    for use in (export.fileno, export.detach, lambda: heap.import_(export), lambda: pickle.dumps(export)):
        with pytest.raises(xseg.ShareError, match="the export is closed"):
            use()
    with pytest.raises(xseg.PointerError):
        heap.export(512)
    with pytest.raises(xseg.ShareError, match="sim backend has no memory"):
        xseg.Heap("backend:sim,limit:64MiB").alloc(1).export()
    with open("/dev/null") as file, pytest.raises(xseg.ShareError, match="no socket"):
        heap.import_(xseg.Export.from_fd(os.dup(file.fileno())))
    for number in (-1, 100_000):
        with pytest.raises(OSError):
            xseg.Export.from_fd(number)
    with pytest.raises(TypeError, match="^socket: give a socket, or the number of a descriptor, not str\\b"):
        heap.receive("no socket")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.send(b"something")
        with pytest.raises(xseg.ShareError, match="something else than an export"):
            heap.receive(theirs)
    block.close()
    with pytest.raises(xseg.PointerError, match="closed"):
        block.export()
    heap.tick()
    assert heap.stats()["exported"] == 0


def test_a_thousand_imports_leave_no_descriptor(heap: xseg.Heap) -> None:
    there = xseg.Heap("backend:host")
    block = heap.alloc(5 * MIB)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(1000):
        with there.import_(block.export()):
            pass
    heap.tick()
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("listens", [False, True])
def test_a_socket_that_is_not_connected_is_named_so(heap: xseg.Heap, listens: bool, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as lone, heap.alloc(MIB) as block:
        if listens:
            lone.bind(str(tmp_path / "socket"))
            lone.listen()
        with pytest.raises(xseg.ShareError, match="it is not connected"):
            block.export().send(lone)
        with pytest.raises(xseg.ShareError, match="it is not connected"):
            heap.receive(lone)


class Stopped(Exception):
    pass


def stop(*_: object) -> None:
    raise Stopped


def test_waits_for_another_process_end_with_a_signal(heap: xseg.Heap) -> None:
    """By one that comes again and again, so that it comes while it is waited for. Each wait would last 10 s."""
    ours, theirs = socket.socketpair()
    block = heap.alloc(MIB)
    before = signal.signal(signal.SIGALRM, stop)
    try:
        with ours, theirs:
            for wait in (lambda: heap.receive(theirs), lambda: [block.export().send(ours) for _ in range(100_000)]):
                signal.setitimer(signal.ITIMER_REAL, 1, 0.2)
                with pytest.raises(Stopped) as stopped:
                    wait()
                signal.setitimer(signal.ITIMER_REAL, 0)
                # Not after the error of a wait in vain.
                assert stopped.value.__context__ is None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    heap.tick()
    assert heap.stats()["exported"] == 0
    heap.check()


def test_a_descriptor_that_is_missing_is_named() -> None:
    code = """
import resource, xseg
heap = xseg.Heap("backend:host,limit:64MiB")
block = heap.alloc(1 << 20)
there = xseg.Heap("backend:host,limit:64MiB")
said = set()
def attempt(what):
    try:
        return what()
    except xseg.ShareError as error:
        assert "ulimit -n" in str(error), error
        said.add(str(error))
import os, socket
ours, theirs = socket.socketpair()
used = len(os.listdir("/proc/self/fd"))
for most in range(used, used + 12):
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, 4096))
    export = attempt(block.export)
    if export is not None:
        attempt(lambda: there.import_(export))
    export = attempt(block.export)
    if export is not None:
        attempt(lambda: export.send(ours))
assert len(said) >= 3, said
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
