"""Tensors and blocks that go to other processes."""

from __future__ import annotations

import gc
import os
import queue
import sys
import time
from typing import Any

from common import GIB, LIMIT_S, MIB, check, full_only, mode, other_process, start


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def settled(torch: Any) -> dict[str, int]:
    """What is held here once nothing is on its way to another process or from it."""
    import xseg

    deadline = time.monotonic() + 20
    while True:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
        stats = xseg.stats()
        if stats["imported"] == stats["exported"] == stats["pending"] == 0:
            break
        assert time.monotonic() < deadline, {name: stats[name] for name in ("imported", "exported", "pending")}
        time.sleep(0.005)
    return {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "descriptors": descriptors(),
        "handles": stats["calls_create"] - stats["calls_release"],
    }


def all_are(tensor: Any, value: float) -> bool:
    return bool(tensor.eq(value).all().item())


def peer(inbox: Any, outbox: Any) -> None:
    """The other process: does what it is told, and says what it found; an error is an answer too."""
    torch = start("limit:8GiB")
    import xseg

    held: dict[str, Any] = {}
    while True:
        try:
            word, value = inbox.get(timeout=LIMIT_S)
            if word == "end":
                outbox.put(None)
                return
            answer: Any = None
            if word == "hold":
                # The same block twice: mapped once.
                held["tensor"], held["view"] = value
                answer = xseg.stats()["imported"]
            elif word == "check":
                answer = all_are(held["tensor"], value) and held["view"].eq(value).all().item()
                held["tensor"].add_(1)
                torch.cuda.synchronize()
            elif word == "drop":
                answer = "other" not in held or all_are(held["other"], -3.0)
                held.clear()
                value = None
                deadline = time.monotonic() + 20
                while xseg.stats()["imported"]:
                    assert time.monotonic() < deadline, "an import does not end by itself"
                    time.sleep(0.001)
            elif word == "settle":
                answer = settled(torch)
            elif word == "send":
                held["own"] = torch.full((8 * MIB,), value, device="cuda")
                answer = held["own"]
            elif word == "again":
                held["own"].fill_(-2.0)
                held.clear()
                held["other"] = torch.full((8 * MIB,), -3.0, device="cuda")
                torch.cuda.synchronize()
            elif word == "device":
                answer = (str(value.device), value.double().sum().item(), value.is_leaf, type(value).__name__)
                value = None
            outbox.put(answer)
            del answer
        except queue.Empty:
            # Whoever asks is gone.
            return
        except Exception as error:
            outbox.put(f"{type(error).__name__}: {str(error)[:600]}")


def asked(inbox: Any, outbox: Any, word: str, value: Any = None) -> Any:
    inbox.put((word, value))
    answer = outbox.get(timeout=LIMIT_S)
    assert not (isinstance(answer, str) and "Error" in answer), f"{word}: {answer}"
    return answer


def argument(tensor: Any, outbox: Any) -> None:
    outbox.put((all_are(tensor, 5.0), sys.modules["xseg"].installed()))


def without_install(inbox: Any, outbox: Any) -> None:
    try:
        inbox.get(timeout=LIMIT_S)
        outbox.put("no error")
    except RuntimeError as error:
        outbox.put(str(error))


@full_only
def tensors_between_processes() -> Any:
    """Both ways through queues, freed on either side first; 200 rounds leave nothing behind."""
    torch = start("limit:8GiB")
    import torch.multiprocessing as multiprocessing

    spawn = multiprocessing.get_context("spawn")
    inbox, outbox = spawn.Queue(), spawn.Queue()
    other = spawn.Process(target=peer, args=(inbox, outbox), daemon=True)
    other.start()
    small = 1000
    rounds, warm, began = 200, [], time.monotonic()
    for at in range(rounds):
        # Blocks of many handles, of one, and in the middle of one.
        count = (8 * MIB, small, 3 * MIB + 77)[at % 3]
        tensor = torch.full((count,), float(at), device="cuda")
        imported = asked(inbox, outbox, "hold", (tensor, tensor[count // 2 :]))
        assert 4 * count <= imported < 4 * count + 4 * MIB, f"round {at}: {imported} bytes are mapped for {4 * count}"
        if at % 2 == 0:
            # Freed here first: the next tensors are other memory.
            del tensor
            noise = [torch.full((count,), -1.0, device="cuda") for _ in range(3)]
            torch.cuda.synchronize()
            assert asked(inbox, outbox, "check", float(at)), f"round {at}: freed here first, the values are gone"
            assert all(all_are(one, -1.0) for one in noise), (
                f"round {at}: what was written there came into another tensor"
            )
            asked(inbox, outbox, "drop")
            del noise
        else:
            assert asked(inbox, outbox, "check", float(at)), f"round {at}: other values arrived"
            assert all_are(tensor, at + 1.0), f"round {at}: what was written there is not here"
            asked(inbox, outbox, "drop")
            assert all_are(tensor, at + 1.0), f"round {at}: dropped there first, the values are gone"
            del tensor
        # The other way.
        theirs = asked(inbox, outbox, "send", at + 0.5)
        assert all_are(theirs, at + 0.5), f"round {at}: other values came back"
        if at % 4 < 2:
            torch.cuda.synchronize()
            asked(inbox, outbox, "again")
            # It was written to before it was dropped there; now it is nobody else's.
            assert all_are(theirs, -2.0), f"round {at}: dropped by its owner, the memory went to another"
            theirs.fill_(9.0)
            torch.cuda.synchronize()
        del theirs
        assert asked(inbox, outbox, "drop"), f"round {at}: what its owner allocated next was written to from here"
        if at == 19:
            warm = [settled(torch), asked(inbox, outbox, "settle")]
    took = time.monotonic() - began
    end = [settled(torch), asked(inbox, outbox, "settle")]
    for was, now in zip(warm, end):
        assert now["allocated"] == was["allocated"] and now["descriptors"] <= was["descriptors"] + 4, (warm, end)
        assert now["reserved"] <= was["reserved"] + 8 * MIB, (warm, end)
    devices = [asked(inbox, outbox, "device", torch.nn.Parameter(torch.ones(10, device="cuda")))]
    if torch.cuda.device_count() > 1:
        devices.append(asked(inbox, outbox, "device", torch.full((5 * MIB,), 2.0, device="cuda:1")))
        assert devices[1][:2] == ("cuda:1", 10.0 * MIB), devices
    assert devices[0] == ("cuda:0", 10.0, True, "Parameter"), devices
    asked(inbox, outbox, "end")
    other.join(LIMIT_S)
    assert other.exitcode == 0, other.exitcode
    # As an argument of a process, which installs before it takes it.
    os.environ["CHECK_CHILD_INSTALLS"] = "1"
    tensor = torch.full((small,), 5.0, device="cuda")
    child = spawn.Process(target=argument, args=(tensor, outbox))
    child.start()
    got = outbox.get(timeout=LIMIT_S)
    assert got == (True, "full"), got
    child.join(LIMIT_S)
    del os.environ["CHECK_CHILD_INSTALLS"]
    # A process on PyTorch's own allocator says what to do.
    child = spawn.Process(target=without_install, args=(inbox, outbox))
    child.start()
    inbox.put(tensor)
    text = outbox.get(timeout=LIMIT_S)
    child.join(LIMIT_S)
    assert "call xseg.install() in this process too" in text, text
    return {"ms a round": round(1000 * took / rounds, 1), "here": end[0], "there": end[1], "text": text}


def block_peer(export: Any, said: Any) -> None:
    torch = start("limit:8GiB")
    import xseg

    imported = xseg.Heap("limit:4GiB").import_(export)
    tensor = torch.as_tensor(imported, device="cuda").view(torch.int64)
    count = tensor.numel()
    right = bool(torch.equal(tensor, torch.arange(count, device="cuda")))
    tensor.neg_()
    torch.cuda.synchronize()
    said.send((right, count))
    if said.recv() == "check":
        # The exporter has freed it, and allocated others.
        said.send(bool(torch.equal(tensor, -torch.arange(count, device="cuda"))))
    del tensor
    torch.cuda.synchronize()
    imported.close()
    said.send("closed")
    said.recv()


@check
def blocks_between_processes() -> Any:
    """A block of 1.25 GiB over many handles by xseg's own export and import, ended on either side first."""
    torch = start("limit:8GiB")
    import multiprocessing

    import xseg

    spawn = multiprocessing.get_context("spawn")
    heap = xseg.Heap("limit:6GiB,handle_max:16MiB")
    size, found = 5 * GIB // 4, []
    for freed_first in (True, False):
        began = time.monotonic()
        block = heap.alloc(size)
        tensor = torch.as_tensor(block, device="cuda").view(torch.int64)
        tensor.copy_(torch.arange(tensor.numel(), device="cuda"))
        torch.cuda.synchronize()
        ours, theirs = spawn.Pipe()
        open_before = descriptors()
        export = block.export()
        other = spawn.Process(target=block_peer, args=(export, theirs))
        other.start()
        export.close()
        theirs.close()
        assert ours.poll(LIMIT_S), "the other process says nothing"
        right, count = ours.recv()
        assert right and count == size // 8, (right, count)
        assert heap.stats()["exported"] >= size, heap.stats()["exported"]
        expected = -torch.arange(count, device="cuda")
        assert torch.equal(tensor, expected), "what was written there is not here"
        if freed_first:
            del tensor
            block.close()
            others = [heap.alloc(size) for _ in range(2)]
            for one in others:
                torch.as_tensor(one, device="cuda").fill_(7)
            torch.cuda.synchronize()
            # Before the other process is let go on, since it ends its import then.
            assert heap.stats()["pending"] >= size, heap.stats()["pending"]
            ours.send("check")
            assert ours.poll(LIMIT_S) and ours.recv() is True, "freed here first, the values are gone there"
            for one in others:
                assert torch.as_tensor(one, device="cuda").eq(7).all().item(), "another block was written to from there"
        else:
            ours.send("close")
        assert ours.poll(LIMIT_S) and ours.recv() == "closed"
        if freed_first:
            for one in others:
                one.close()
        else:
            assert torch.equal(tensor, expected), "ended there first, the values are gone"
            del tensor
            block.close()
        torch.cuda.synchronize()
        deadline = time.monotonic() + 20
        while heap.stats()["exported"] or heap.stats()["pending"]:
            assert time.monotonic() < deadline, heap.stats()
            heap.tick()
            time.sleep(0.001)
        ours.send("end")
        other.join(LIMIT_S)
        assert other.exitcode == 0, other.exitcode
        assert descriptors() <= open_before + 3, (open_before, descriptors())
        while heap.stats()["reserved"]:
            assert time.monotonic() < deadline, heap.stats()
            heap.trim()
        found.append(round(time.monotonic() - began, 1))
    return {"seconds": found}


@check
def tensors_without_the_part() -> Any:
    """Without the C++ part a tensor that is sent says what to do."""
    if mode() == "full":
        return other_process("tensors_without_the_part_here", CHECK_MODE="plain")
    return tensors_without_the_part_here()


def tensors_without_the_part_here() -> Any:
    torch = start()
    from torch.multiprocessing.reductions import reduce_tensor

    try:
        reduce_tensor(torch.ones(4, device="cuda"))
    except RuntimeError as error:
        assert "install g++" in str(error), error
        return str(error)
    raise AssertionError("no error")
