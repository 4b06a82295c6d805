"""What PyTorch and others are told: snapshots, tags, recordings, profiler, observers."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
from typing import Any

from common import GIB, MIB, check, full_only, mode, model_and_data, start, step


@full_only
def snapshot() -> Any:
    torch = start("limit:2GiB")
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    model, optimizer = model_and_data(torch)
    for at in range(5):
        step(torch, model, optimizer, at)
    torch.cuda.synchronize()
    found = torch.cuda.memory._snapshot()
    segments, trace = found["segments"], found["device_traces"][0]
    live = sum(
        block["size"] for segment in segments for block in segment["blocks"] if block["state"] == "active_allocated"
    )
    assert live == torch.cuda.memory_allocated(), (live, torch.cuda.memory_allocated())
    for segment in segments:
        assert segment["total_size"] == sum(block["size"] for block in segment["blocks"])
    actions = {entry["action"] for entry in trace}
    assert {"alloc", "free_requested", "free_completed", "segment_map"} <= actions, actions
    assert any(entry.get("frames") for entry in trace), "no stacks"
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "run.pickle")
        torch.cuda.memory._dump_snapshot(path)
        torch.cuda.memory._record_memory_history(enabled=None)
        replay = subprocess.run(
            [sys.executable, "-m", "xseg", "replay", path, "--backend", "sim", "--json"], capture_output=True, text=True
        )
    assert replay.returncode == 0, replay.stderr[-300:]
    from torch.cuda import _memory_viz

    assert "MiB" in _memory_viz.segsum(found) and "free completed" in _memory_viz.trace(found)
    replay_backwards(segments, trace)
    again = json.loads(replay.stdout.splitlines()[-1])
    return {"entries": len(trace), "segments": len(segments), "replayed events": again["events"]}


def replay_backwards(segments: list[Any], trace: list[Any]) -> None:
    """As the viewers do: from the end, each block lies in what is mapped, and each mapping is there to be taken away."""
    mapped = {}
    for segment in segments:
        for at in range(segment["address"] // (2 * MIB), -(-(segment["address"] + segment["total_size"]) // (2 * MIB))):
            mapped[at] = True
    for number, entry in reversed(list(enumerate(trace))):
        if entry["action"] not in ("segment_map", "segment_unmap", "alloc", "free_completed"):
            continue
        first, end = entry["addr"] // (2 * MIB), -(-(entry["addr"] + entry["size"]) // (2 * MIB))
        there = [mapped.get(at, False) for at in range(first, end)]
        if entry["action"] == "segment_unmap":
            assert not any(there), f"entry {number} unmaps what is mapped later without being mapped again"
            mapped.update(dict.fromkeys(range(first, end), True))
        else:
            assert all(there), f"entry {number}: {entry['action']} outside of what is mapped"
            if entry["action"] == "segment_map":
                mapped.update(dict.fromkeys(range(first, end), False))


@check
def notes() -> Any:
    torch = start("limit:2GiB")
    import xseg

    model, optimizer = model_and_data(torch)
    if mode() == "full":
        torch.cuda.memory._record_memory_history(max_entries=100_000)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "run.trace")
        with xseg.record(path):
            with xseg.tag("forward"):
                kept = model(torch.ones(8, 128, 512, device="cuda"))
            before = xseg.tags()["forward"]
            for at in range(3):
                step(torch, model, optimizer, at)
        replay = subprocess.run(
            [sys.executable, "-m", "xseg", "replay", path, "--backend", "sim", "--json"], capture_output=True, text=True
        )
    assert replay.returncode == 0, replay.stderr[-300:]
    assert before["live_blocks"] > 10 and before["allocated"] >= kept.nbytes, before
    if mode() == "full":
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
        named = [entry for entry in trace if entry["action"] == "alloc" and entry.get("user_metadata") == "forward"]
        assert len(named) == before["allocs"], (len(named), before)
    del kept
    gc.collect()
    after = xseg.tags()["forward"]
    assert after["allocated"] < before["allocated"] and after["peak_allocated"] >= before["allocated"], after
    return {"forward": before, "replayed events": json.loads(replay.stdout.splitlines()[-1])["events"]}


@full_only
def profiler() -> Any:
    torch = start()
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], profile_memory=True) as found:
        torch.ones(10 * MIB, device="cuda").sum().item()
    used = max(getattr(event, "device_memory_usage", 0) for event in found.key_averages())
    assert used >= 40 * MIB, used
    return used


@full_only
def observers() -> Any:
    torch = start("limit:1GiB")
    told = []
    torch._C._cuda_attach_out_of_memory_observer(lambda *what: told.append(what))
    try:
        torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        pass
    assert len(told) == 1 and told[0][1] == 2 * GIB, told
    assert torch.accelerator.memory_reserved() == torch.cuda.memory_reserved()
    return told[0]
