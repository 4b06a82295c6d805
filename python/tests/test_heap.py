"""Heaps on host memory: no GPU and no PyTorch are needed."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xseg

MIB = 1 << 20


@pytest.fixture
def heap() -> xseg.Heap:
    return xseg.Heap("backend:host,limit:64MiB")


def test_a_block_holds_what_is_written(heap: xseg.Heap) -> None:
    with heap.alloc(3 * MIB + 5) as block:
        assert (block.nbytes, len(block), block.stream, block.closed) == (3 * MIB + 5, 3 * MIB + 5, 0, False)
        assert block.address % 512 == 0
        view = block.view()
        view[:4] = b"xseg"
        view[-1] = 7
        assert bytes(view[:4]) == b"xseg" and view[-1] == 7 and len(view) == 3 * MIB + 5
        assert heap.block_size(block.address) == (3 * MIB + 5, 3 * MIB + 512)
        stats = heap.stats()
        assert (stats["live_blocks"], stats["requested"], stats["allocated"]) == (1, 3 * MIB + 5, 3 * MIB + 512)
    # A view that is left still looks at the block, and never at memory of others.
    heap.trim()
    assert block.closed and heap.stats()["live_blocks"] == 1 and view[-1] == 7
    part = view[:4]
    view.release()
    assert heap.stats()["live_blocks"] == 1 and bytes(part) == b"xseg"
    part.release()
    assert heap.stats()["live_blocks"] == 0
    heap.check()


def test_a_block_is_freed_with_its_last_reference(heap: xseg.Heap) -> None:
    block = heap.alloc(MIB)
    del block
    gc.collect()
    assert heap.stats()["allocated"] == 0


def test_a_view_keeps_its_block(heap: xseg.Heap) -> None:
    view = heap.alloc(MIB).view()
    gc.collect()
    view[0] = 1
    assert heap.stats()["live_blocks"] == 1
    del view
    gc.collect()
    assert heap.stats()["live_blocks"] == 0


def test_a_block_outlives_the_heap_object() -> None:
    block = xseg.Heap("backend:host,limit:64MiB").alloc(MIB)
    gc.collect()
    block.view()[:3] = b"abc"
    assert bytes(block.view()[:3]) == b"abc"


def test_memory_moves_where_holes_are_too_small(heap: xseg.Heap) -> None:
    blocks = [heap.alloc(4 * MIB) for _ in range(16)]
    for index, block in enumerate(blocks):
        block.view()[0] = index
    for block in blocks[::2]:
        block.close()
    with heap.alloc(24 * MIB):
        stats = heap.stats()
        assert stats["bytes_moved"] >= 20 * MIB and stats["bytes_copied"] == 0
        assert [block.view()[0] for block in blocks[1::2]] == list(range(1, 16, 2))
    heap.check()


def test_out_of_memory_is_caught_and_the_heap_goes_on(heap: xseg.Heap) -> None:
    with pytest.raises(xseg.OutOfMemoryError, match="limit 64.000 MiB"):
        heap.alloc(65 * MIB)
    with heap.alloc(60 * MIB):
        pass
    assert heap.stats()["ooms"] == 1


def test_a_callback_frees_memory(heap: xseg.Heap) -> None:
    kept = [heap.alloc(60 * MIB)]
    asked = []

    def rescue(bytes: int) -> bool:
        asked.append(bytes)
        return bool(kept) and kept.pop().close() is None

    heap.on_out_of_memory(rescue)
    with heap.alloc(40 * MIB):
        assert asked == [40 * MIB] and not kept


@pytest.mark.parametrize("wrong", [5, None, "rescue"])
def test_only_a_function_is_called_when_memory_runs_out(heap: xseg.Heap, wrong: Any) -> None:
    kind = type(wrong).__name__
    with pytest.raises(TypeError, match=f"^callback: give a function of the number of bytes, not {kind}\\b"):
        heap.on_out_of_memory(wrong)


def test_arguments_of_another_kind_are_named(heap: xseg.Heap) -> None:
    calls: list[tuple[Callable[[Any], object], str]] = [
        (xseg.Heap, "conf: give a policy such as"),
        (xseg.check_conf, "conf: give a policy such as"),
        (lambda wrong: heap.begin_capture(wrong), "pool: give a pair of whole numbers"),
        (lambda wrong: heap.begin_capture((1, 2), wrong), "streams: give a list of whole numbers"),
    ]
    for call, said in calls:
        with pytest.raises(TypeError, match=f"^{said}.*, not int\\b"):
            call(5)
    with pytest.raises(TypeError, match="^socket: give a socket, or the number of a descriptor, not float\\b"):
        heap.receive(1.5)  # type: ignore[arg-type]


def test_wrong_addresses(heap: xseg.Heap) -> None:
    address = heap.alloc_raw(MIB)
    heap.free(address)
    with pytest.raises(xseg.PointerError, match="freed already"):
        heap.free(address)
    with pytest.raises(xseg.PointerError, match="outside"):
        heap.free(512)
    block = heap.alloc(1)
    block.close()
    block.close()
    for use in (lambda: block.address, block.view, lambda: block.record_use(0)):
        with pytest.raises(xseg.PointerError, match="closed"):
            use()


def test_wrong_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    # What came from the variable says so, what was given does not.
    with pytest.raises(xseg.ConfigError, match="^there is no key `limitt`; did you mean `limit`"):
        xseg.Heap("limitt:4G")
    monkeypatch.setenv("XSEG_CONF", "limit:12parsec")
    with pytest.raises(xseg.ConfigError, match="^XSEG_CONF: .*limit"):
        xseg.Heap()
    with pytest.raises(xseg.ConfigError, match="^XSEG_CONF: "):
        xseg.check_conf()
    monkeypatch.setenv("XSEG_CONF", "backend:host,limit:32MiB")
    heap = xseg.Heap()
    assert (heap.limit, heap.backend, heap.conf) == (32 * MIB, "host", "limit:32MiB,backend:host")
    assert xseg.check_conf("defrag:on_pressure") == ""


def test_limit_and_trim(heap: xseg.Heap) -> None:
    heap.alloc(32 * MIB).close()
    assert heap.stats()["reserved"] >= 32 * MIB
    assert heap.trim() >= 32 * MIB and heap.stats()["reserved"] == 0
    assert heap.set_limit(16 * MIB) == 0 and heap.limit == 16 * MIB
    with pytest.raises(xseg.OutOfMemoryError):
        heap.alloc(17 * MIB)
    heap.set_limit(None)
    assert heap.limit is None
    heap.tick()
    heap.reset_peaks()
    assert heap.stats()["peak_allocated"] == 0


def test_only_a_block_frees_what_it_has(heap: xseg.Heap) -> None:
    block = heap.alloc(5000)
    address = block.address
    with pytest.raises(xseg.PointerError, match="belongs to a Block, which frees it; close that"):
        heap.free(address)
    view = block.view()
    block.close()
    with pytest.raises(xseg.PointerError, match="belongs to a Block"):
        heap.free(address)
    del view
    raw = heap.alloc_raw(5000)
    assert raw == address and heap.stats()["live_blocks"] == 1
    heap.free(raw)
    with pytest.raises(xseg.PointerError):
        heap.free(raw)
    assert heap.stats()["live_blocks"] == 0


def test_the_default_stream_stays(heap: xseg.Heap) -> None:
    heap.alloc(5).close()
    with pytest.raises(xseg.Error, match="the default stream is never destroyed"):
        heap.retire_stream(0)
    heap.alloc(5, stream=7).close()
    heap.retire_stream(7)
    heap.alloc(5).close()


def test_capture_pools(heap: xseg.Heap) -> None:
    with pytest.raises(xseg.Error, match="capture pool 0,0 stands for no pool"):
        heap.begin_capture((0, 0))
    heap.begin_capture((0, 1), streams=[0])
    with pytest.raises(xseg.Error):
        heap.begin_capture((0, 1))
    heap.alloc(4 * MIB).close()
    heap.end_capture((0, 1))
    assert heap.stats()["captured"] >= 4 * MIB
    heap.release_capture((0, 1))
    assert heap.stats()["captured"] == 0
    with pytest.raises(xseg.Error):
        heap.release_capture((0, 1))


def test_pins(heap: xseg.Heap) -> None:
    with heap.alloc(4 * MIB) as block:
        heap.pin(block.address, block.nbytes)
        assert heap.stats()["pinned"] >= 4 * MIB
        heap.unpin(block.address, block.nbytes)
        assert heap.stats()["pinned"] == 0
    with pytest.raises(xseg.Error):
        heap.retire_stream(12345)


def test_only_a_gpu_has_the_cuda_interface(heap: xseg.Heap) -> None:
    block = heap.alloc(MIB)
    assert not hasattr(block, "__cuda_array_interface__")
    with pytest.raises(TypeError, match="sim"):
        xseg.Heap("backend:sim,limit:64MiB").alloc(1).view()


def test_threads() -> None:
    heap = xseg.Heap("backend:host,limit:256MiB")
    wrong = []

    def work(number: int) -> None:
        for round_ in range(100):
            size = 1 + (number * 7919 + round_ * 104729) % (2 * MIB)
            with heap.alloc(size) as block:
                view = block.view()
                view[0] = view[-1] = number
                if (view[0], view[-1]) != (number, number):
                    wrong.append((number, round_))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and heap.stats()["allocated"] == 0
    heap.check()


def test_memory_of_no_gpu_has_no_peers(heap: xseg.Heap) -> None:
    with pytest.raises(xseg.Error, match="the host backend has no GPU's memory .* use `backend:cuda`"):
        heap.enable_peer(1)
    for number in (-1, 2**32):
        with pytest.raises(ValueError, match=f"^device: {number} is out of range; give a whole number from 0"):
            heap.enable_peer(number)
    with pytest.raises(TypeError, match="^device: give a whole number from 0, as CUDA counts devices, not str\\b"):
        heap.enable_peer("one")  # type: ignore[arg-type]


def test_numbers_that_do_not_fit_are_value_errors_in_a_sentence() -> None:
    heap = xseg.Heap("backend:host,limit:64MiB")
    calls: list[tuple[str, Callable[[Any], object]]] = [
        ("bytes", lambda n: heap.alloc(n)),
        ("bytes", lambda n: heap.alloc_raw(n)),
        ("bytes", lambda n: heap.pin(4096, n)),
        ("bytes", lambda n: heap.unpin(4096, n)),
        ("bytes", lambda n: heap.set_limit(n)),
        ("stream", lambda n: heap.alloc(100, n)),
        ("stream", lambda n: heap.alloc_raw(100, stream=n)),
        ("stream", lambda n: heap.record_use(4096, n)),
        ("stream", lambda n: heap.retire_stream(n)),
        ("stream", lambda n: heap.begin_capture((1, 2), [0, n])),
        ("address", lambda n: heap.free(n)),
        ("address", lambda n: heap.export(n)),
        ("address", lambda n: heap.record_use(n, 0)),
        ("address", lambda n: heap.block_size(n)),
        ("address", lambda n: heap.pin(n, 1)),
        ("address", lambda n: heap.unpin(n, 1)),
        ("pool", lambda n: heap.begin_capture((n, 2))),
        ("pool", lambda n: heap.end_capture((1, n))),
        ("pool", lambda n: heap.release_capture((n, 2))),
    ]
    with heap.alloc(100) as block:
        calls.append(("stream", block.record_use))
        for what, call in calls:
            for number in (-1, 2**64, -(2**200)):
                with pytest.raises(ValueError, match=f"^{what}: {number} is out of range; give a whole number from 0"):
                    call(number)
            with pytest.raises(TypeError, match=f"^{what}: give a whole number from 0 to 2\\^64 - 1, not str\\b"):
                call("one")
    for number in (2**31, -(2**40)):
        with pytest.raises(ValueError, match=f"descriptor {number} is out of range"):
            heap.receive(number)
        with pytest.raises(ValueError, match=f"descriptor {number} is out of range"):
            xseg.Export.from_fd(number)
    heap.set_limit(None)
    assert heap.limit is None
    heap.check()


def test_blocks_of_a_plan_are_counted(tmp_path: Path) -> None:
    sizes = [9_000_000, 3_000_000, 5_000_000, 7_000_000]
    trace, plan = tmp_path / "run.trace", tmp_path / "run.plan"
    lines = [f"a,{at},{size},0,{at}" for at, size in enumerate(sizes)]
    trace.write_text("\n".join(lines + [f"f,{at},9" for at in range(4)]) + "\n")
    command = [sys.executable, "-m", "xseg", "plan", str(trace), "-o", str(plan)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    heap = xseg.Heap(f"backend:host,plan:{plan}")
    assert (heap.stats()["planned"], heap.stats()["planned_elsewhere"]) == (0, 0)
    assert heap.stats()["plan_state"] == 1
    blocks = [heap.alloc(size) for size in sizes]
    assert (heap.stats()["planned"], heap.stats()["planned_elsewhere"]) == (4, 0)
    assert heap.stats()["plan_state"] == 3
    del blocks


def test_a_refused_capture_leaves_the_heap_as_it_was(heap: xseg.Heap) -> None:
    with pytest.raises(xseg.Error, match="these are 5000 streams more than the 0 that are known"):
        heap.begin_capture((9, 9), list(range(1, 5001)))
    with pytest.raises(xseg.Error, match="the filter names no stream"):
        heap.begin_capture((9, 9), [])
    assert heap.stats()["capture_pools"] == 0
    with heap.alloc(5), heap.alloc(5, stream=4095):
        heap.begin_capture((9, 9), [0, 7])
        heap.end_capture((9, 9))
        heap.release_capture((9, 9))
    heap.check()
