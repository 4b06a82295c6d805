"""A heap in a process that was forked off: the memory stays the parent's."""

from __future__ import annotations

import os
import signal
import sys
import threading

import pytest
import xseg

MIB = 1 << 20


def child(does: object) -> int:
    """Exit status of a forked child that does this, and then ends as a program does."""
    pid = os.fork()
    if pid == 0:
        try:
            does()  # type: ignore[operator]
        except BaseException as error:  # noqa: BLE001
            print(error, file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_what_a_child_drops_stays_with_the_parent() -> None:
    heap = xseg.Heap("backend:host,limit:128MiB")
    blocks = [heap.alloc(size) for size in (4096, 3 * MIB, 40 * MIB)]
    for number, block in enumerate(blocks):
        block.view()[-1] = 7 + number
    before = heap.stats()
    held = [heap]

    def drop_all() -> None:
        for block in blocks:
            block.close()
        held.clear()
        nonlocal heap
        del heap

    assert child(drop_all) == 0
    assert [block.view()[-1] for block in blocks] == [7, 8, 9]
    assert heap.stats() == before
    heap.check()


def test_a_child_gets_nothing_of_the_parents_heap() -> None:
    heap = xseg.Heap("backend:host,limit:128MiB")
    heap.alloc(8 * MIB).close()
    address = heap.alloc_raw(4096)

    def try_all() -> None:
        for refused in (
            lambda: heap.free(address),
            lambda: heap.block_size(address),
            lambda: heap.pin(address, 1),
            lambda: heap.enable_peer(1),
            lambda: heap.set_limit(None),
            lambda: heap.begin_capture((1, 1)),
            heap.trim,
            heap.tick,
            heap.stats,
            heap.check,
        ):
            with pytest.raises(xseg.Error, match="make a heap of this process's own"):
                refused()
        for bytes_wanted in (4096, 8 * MIB, 64 * MIB):
            for call in (heap.alloc, heap.alloc_raw):
                with pytest.raises(xseg.Error, match="make a heap of this process's own"):
                    call(bytes_wanted)
        own = xseg.Heap("backend:host,limit:64MiB")
        with own.alloc(8 * MIB) as block:
            block.view()[0] = 1
        own.check()

    assert child(try_all) == 0
    with heap.alloc(8 * MIB) as block:
        assert block.view()[0] == 0
    heap.check()


def test_a_child_gets_no_view() -> None:
    heap = xseg.Heap("backend:host,limit:128MiB")
    block = heap.alloc(3 * MIB)
    other = xseg.Heap("backend:host,limit:128MiB")
    imported = other.import_(block.export())

    def look() -> None:
        for one in (block, imported):
            with pytest.raises(xseg.Error, match="make a heap of this process's own"):
                one.view()

    assert child(look) == 0
    block.view()[0] = 9
    assert imported.view()[0] == 9


def test_a_child_drops_blocks_while_the_parents_threads_allocate() -> None:
    heap = xseg.Heap("backend:host,limit:512MiB")
    blocks = [heap.alloc(size) for size in (600, 4096, 3 * MIB, 40 * MIB)]
    views = [heap.alloc(size).view() for size in (600, 3 * MIB)]
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            for size in (600, MIB, 3 * MIB):
                heap.alloc(size).close()
            heap.trim()

    def drop_all() -> None:
        # Ends the child where it waits for a lock that one of those threads had.
        signal.alarm(10)
        views.clear()
        for block in blocks:
            block.close()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        assert all(child(drop_all) == 0 for _ in range(60))
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    heap.check()
