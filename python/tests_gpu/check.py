"""Checks PyTorch on xseg on a machine with a GPU: one line of JSON a check, each in a process of its own with a time limit.

    python check.py                 # all checks
    python check.py oom graphs      # some
    python check.py --plain         # without the C++ part

The exit status is the number of checks that failed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import queue
import subprocess
import sys
import tempfile
import time
import traceback
from typing import Any, Callable

LIMIT_S = 100
GIB = 1 << 30
MIB = 1 << 20
CHECKS: dict[str, Callable[[], Any]] = {}
FULL_ONLY: set[str] = set()


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    CHECKS[function.__name__] = function
    return function


def full_only(function: Callable[[], Any]) -> Callable[[], Any]:
    FULL_ONLY.add(function.__name__)
    return check(function)


def mode() -> str:
    return os.environ.get("CHECK_MODE", "full")


def start(conf: str | None = None) -> Any:
    """PyTorch with the allocator that this process is for."""
    import torch

    if mode() in ("full", "plain"):
        import xseg

        found = xseg.install(conf, compile=mode() == "full")
        assert found == mode(), found
    return torch


def model_and_data(torch: Any) -> Any:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.1, batch_first=True)
    model = torch.nn.Sequential(
        torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.nn.Linear(512, 512)
    ).cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def step(torch: Any, model: Any, optimizer: Any, at: int, batch: int = 8) -> Any:
    generator = torch.Generator().manual_seed(at)
    length = 64 + (at * 97) % 448
    data = torch.randn(batch, length, 512, generator=generator).cuda(non_blocking=True)
    with torch.autocast("cuda", torch.bfloat16):
        loss = (model(data).float() - data).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def training(steps: int = 30) -> list[str]:
    torch = start()
    # Deterministic kernels, so that two runs of the same allocator agree too.
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    model, optimizer = model_and_data(torch)
    return [step(torch, model, optimizer, at).item().hex() for at in range(steps)]


def other_process(name: str, **env: str) -> Any:
    """The result of a function of this file in a new process."""
    run = subprocess.run(
        [sys.executable, __file__, "--call", name],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert run.returncode == 0, f"{name}: exit status {run.returncode}: {run.stderr[-600:]}"
    return json.loads(run.stdout.splitlines()[-1])


@check
def losses() -> Any:
    env = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    native = other_process("training", CHECK_MODE="native", **env)
    ours = other_process("training", **env)
    if ours != native:
        again = other_process("training", CHECK_MODE="native", **env)
        assert native == again, "native does not agree with itself, so this says nothing"
        first = next(at for at, (a, b) in enumerate(zip(native, ours)) if a != b)
        raise AssertionError(f"first difference at step {first}: {native[first]} and {ours[first]}")
    return {"steps": len(ours), "last": float.fromhex(ours[-1])}


@check
def install_errors() -> Any:
    torch = start()
    import xseg

    texts = []
    try:
        xseg.install()
    except RuntimeError as error:
        texts.append(str(error))
    texts.append(other_process("install_too_late"))
    texts.append(other_process("install_wrong_conf"))
    assert len(texts) == 3 and "already" in texts[0] and "before" in texts[1] and "limitt" in texts[2], texts
    assert torch.ones(3, device="cuda").sum().item() == 3
    return texts


def install_too_late() -> Any:
    import torch
    import xseg

    torch.ones(1, device="cuda")
    try:
        return xseg.install(compile=False)
    except RuntimeError as error:
        return str(error)


def install_wrong_conf() -> Any:
    import xseg

    try:
        return xseg.install("limitt:4G", compile=False)
    except xseg.ConfigError as error:
        return str(error)


@check
def kill_switch() -> Any:
    return other_process("without", XSEG_CONF="off")


def without() -> Any:
    import torch
    import xseg

    found = xseg.install()
    torch.ones(1, device="cuda")
    backend = torch.cuda.get_allocator_backend()
    assert (found, backend) == ("off", "native"), (found, backend)
    return [found, backend]


@check
def oom() -> Any:
    torch = start("limit:3GiB")
    kind = torch.OutOfMemoryError if mode() == "full" else RuntimeError
    model, optimizer = model_and_data(torch)
    tried, batch, texts = [], 512, []
    for at in range(12):
        while True:
            try:
                tried.append(batch)
                step(torch, model, optimizer, at, batch)
                break
            except kind as error:
                assert "CUDA out of memory." in str(error), error
                texts.append(str(error))
                optimizer.zero_grad(set_to_none=True)
                batch //= 2
        # What the exception held is gone by here.
        gc.collect()
    assert batch < 512 and texts, "nothing ran out of memory"
    return {"batches": tried, "text": texts[0], "ooms": torch.cuda.memory_stats()["num_ooms"]}


@check
def empty_cache() -> Any:
    torch = start()
    blocks = [torch.empty(64 * MIB, dtype=torch.uint8, device="cuda") for _ in range(16)]
    kept = torch.full((MIB,), 7, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    before, free_before = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]
    del blocks
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    after, free_after = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]
    assert before >= GIB and after <= 64 * MIB, (before, after)
    assert free_after - free_before >= 960 * MIB, (free_before, free_after)
    assert kept.eq(7).all().item()
    return {"before": before, "after": after}


@check
def memory_stats() -> Any:
    torch = start()
    native = set(other_process("stat_keys", CHECK_MODE="native"))
    blocks = [torch.empty(10 * MIB + 1, dtype=torch.uint8, device="cuda") for _ in range(4)]
    stats = torch.cuda.memory_stats()
    missing = sorted(native - set(stats))
    assert not missing, missing
    assert stats["requested_bytes.all.current"] == 4 * (10 * MIB + 1), stats["requested_bytes.all.current"]
    assert torch.cuda.memory_allocated() == 4 * (10 * MIB + 512)
    assert torch.cuda.max_memory_allocated() == 4 * (10 * MIB + 512)
    assert stats["allocation.all.current"] == 4 and stats["allocated_bytes.all.allocated"] == 4 * (10 * MIB + 512)
    del blocks[1:]
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated() == 10 * MIB + 512
    assert torch.cuda.memory_stats()["allocated_bytes.all.freed"] == 3 * (10 * MIB + 512)
    torch.cuda.reset_accumulated_memory_stats()
    assert torch.cuda.memory_stats()["allocated_bytes.all.allocated"] == 0
    torch.cuda.set_per_process_memory_fraction(0.5)
    total = torch.cuda.get_device_properties(0).total_memory
    assert abs(torch.cuda.memory.get_per_process_memory_fraction() - 0.5) < 1e-4
    assert torch.cuda.memory_reserved() <= total and "Allocated memory" in torch.cuda.memory_summary()
    free, whole = torch.cuda.mem_get_info()
    assert 0 < free < whole
    import xseg

    assert set(xseg.stats()) > {"bytes_moved", "host_waits"}
    return {"backend": torch.cuda.get_allocator_backend(), "keys": len(stats)}


def stat_keys() -> Any:
    torch = start()
    torch.ones(1, device="cuda")
    return sorted(torch.cuda.memory_stats())


@check
def graphs() -> Any:
    torch = start("limit:4GiB")
    weight = torch.randn(1024, 1024, device="cuda")
    data = torch.randn(1024, 1024, device="cuda")

    def work(x: Any) -> Any:
        for _ in range(4):
            x = torch.relu(x @ weight) + x.mean()
        return x

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        expected = work(data).clone()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work(data)
    with torch.cuda.graph(second, pool=graph.pool()):
        other = work(data * 2)
    for round_ in range(20):
        noise = [torch.full(((round_ + 1) * MIB,), float(round_), device="cuda") for _ in range(8)]
        # Larger than what is free in one place: memory moves, but not that of the graphs.
        big = torch.zeros(300 * MIB // 4, device="cuda")
        del noise, big
        if round_ % 5 == 0:
            torch.cuda.empty_cache()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(result, expected), f"round {round_}"
    second.replay()
    torch.cuda.synchronize()
    assert torch.isfinite(other).all().item()
    kept = result.clone()
    del graph, second, result, other
    gc.collect()
    # The workspace of cuBLAS for the captured stream was allocated during the capture, and lives on.
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    import xseg

    captured = xseg.stats()["captured"]
    assert captured == 0 and torch.equal(kept, expected), captured
    return xseg.stats()["bytes_moved"]


@check
def record_stream() -> Any:
    torch = start("limit:1GiB")
    side = torch.cuda.Stream()
    wrong = 0
    for round_ in range(100):
        block = torch.full((32 * MIB // 4,), float(round_), device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000)
            seen = block.clone()
        if round_ % 2 == 0:
            block.record_stream(side)
            del block
            torch.full((32 * MIB // 4,), -1.0, device="cuda")
        else:
            # Ordered, but not declared: the main stream waits before it goes on.
            torch.cuda.current_stream().wait_stream(side)
            del block
            torch.full((32 * MIB // 4,), -1.0, device="cuda")
        torch.cuda.synchronize()
        wrong += int((seen != round_).any().item())
    assert wrong == 0, wrong
    return "100 rounds"


@check
def no_leak() -> Any:
    torch = start()
    model, optimizer = model_and_data(torch)
    figures = []
    for at in range(200):
        step(torch, model, optimizer, at % 20)
        if at in (39, 199):
            torch.cuda.synchronize()
            figures.append(
                (
                    torch.cuda.memory_allocated(),
                    torch.cuda.memory_reserved(),
                    torch.cuda.memory_stats()["allocation.all.current"],
                )
            )
    (allocated, reserved, blocks), (end_allocated, end_reserved, end_blocks) = figures
    assert (allocated, blocks) == (end_allocated, end_blocks), figures
    # Where blocks come to lie can differ by a few granules with what the device has passed when it is asked.
    assert end_reserved <= reserved + 8 * MIB, figures
    return figures[1]


@check
def clean_exit() -> Any:
    return other_process("live_at_exit")


def live_at_exit() -> Any:
    torch = start()
    module = sys.modules[__name__]
    model, optimizer = model_and_data(torch)
    step(torch, model, optimizer, 0)
    module.kept = [model, optimizer, torch.ones(1000, device="cuda"), torch.cuda.Stream()]  # type: ignore[attr-defined]
    torch.ones(10_000_000, device="cuda").sum()
    return "left alive"


class Rows:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        import torch

        return torch.full((16,), float(index))


@check
def workers() -> Any:
    torch = start()
    alive = torch.ones(1000, device="cuda")
    sums = []
    for kind in ("fork", "spawn"):
        loader = torch.utils.data.DataLoader(
            Rows(), batch_size=8, num_workers=2, pin_memory=True, multiprocessing_context=kind
        )
        sums.append(sum(batch.cuda(non_blocking=True).sum().item() for batch in loader))
    assert sums == [16 * sum(range(64))] * 2, sums
    assert alive.sum().item() == 1000
    return sums


@full_only
def cudnn_benchmark() -> Any:
    torch = start()
    torch.backends.cudnn.benchmark = True
    net = torch.nn.Conv2d(16, 32, 3, padding=1).cuda()
    total = 0.0
    for size in (32, 64, 128):
        total += net(torch.ones(4, 16, size, size, device="cuda")).sum().item()
    return total


@full_only
def mempool() -> Any:
    torch = start()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        inside = torch.full((4 * MIB,), 3.0, device="cuda")
    outside = torch.full((4 * MIB,), 4.0, device="cuda")
    import xseg

    captured = xseg.stats()["captured"]
    assert captured >= 16 * MIB, captured
    assert inside.mean().item() == 3 and outside.mean().item() == 4
    segments = pool.snapshot()
    assert sum(segment["total_size"] for segment in segments) >= 16 * MIB, segments
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.use_mem_pool(pool):
        with torch.cuda.graph(graph, pool=pool.id):
            made = inside * 2
    graph.replay()
    assert made.mean().item() == 6
    del inside, made, graph, pool
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert xseg.stats()["captured"] == 0, xseg.stats()["captured"]
    return captured


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


@full_only
def reduce_overhead() -> Any:
    """Graph trees: training steps of several lengths, whose graphs share a pool, under pressure from outside."""
    torch = start("limit:6GiB")
    import torch._inductor.config as config
    import xseg

    assert config.triton.cudagraph_trees and config.triton.slow_path_cudagraph_asserts
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256)).cuda()
    compiled = torch.compile(plain, mode="reduce-overhead", dynamic=False)

    def one(model: Any, rows: int) -> tuple[float, Any]:
        data = torch.full((rows, 256), 0.01 * rows, device="cuda")
        torch.compiler.cudagraph_mark_step_begin()
        out = model(data)
        # A second call within the step hangs a second graph below the first, with its outputs alive.
        loss = (model(data * 2) - out).square().mean()
        loss.backward()
        grad = plain[0].weight.grad.clone()
        plain.zero_grad(set_to_none=True)
        return loss.item(), grad

    worst = 0.0
    for round_ in range(12):
        for rows in (64, 96, 160):
            noise = [torch.full(((round_ + 1) * MIB,), float(rows), device="cuda") for _ in range(6)]
            expected, found = one(plain, rows), one(compiled, rows)
            del noise
            assert abs(found[0] - expected[0]) <= 1e-3 * abs(expected[0]), (round_, rows, found[0], expected[0])
            worst = max(worst, (found[1] - expected[1]).abs().max().item())
        if round_ % 4 == 3:
            torch.cuda.empty_cache()
    assert worst < 1e-3, worst
    captured = xseg.stats()["captured"]
    assert captured > 0, "nothing was captured"
    torch._dynamo.reset()
    # Without trees: each graph has a pool of its own.
    config.triton.cudagraph_trees = False
    function = torch.compile(lambda x: torch.relu(x * 2) + 1, mode="reduce-overhead")
    data = torch.randn(1 << 16, device="cuda")
    for _ in range(4):
        assert torch.allclose(function(data), torch.relu(data * 2) + 1)
    return {"captured": captured, "worst gradient": worst}


@check
def distributed() -> Any:
    torch = start("limit:4GiB")
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29577", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    found = {}
    for kind in ("ddp", "fsdp2"):
        model, _ = model_and_data(torch)
        model = DistributedDataParallel(model) if kind == "ddp" else fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        found[kind] = [step(torch, model, optimizer, at).item() for at in range(10)]
    dist.destroy_process_group()
    assert abs(found["ddp"][-1] - found["fsdp2"][-1]) < 0.05, found
    return {kind: losses[-1] for kind, losses in found.items()}


@full_only
def registered() -> Any:
    """A pool of NCCL's memory, registered, in use for collectives while the heap's memory moves."""
    torch = start("limit:2GiB")
    import torch.distributed as dist
    import xseg

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29578", RANK="0", WORLD_SIZE="1")
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", device_id=device)
    backend = dist.group.WORLD._get_backend(device)
    plain = torch.cuda.MemPool()
    try:
        backend.register_mem_pool(plain)
        raise AssertionError("a pool of the heap's memory was registered")
    except RuntimeError as error:
        text = str(error)
        assert "mem_allocator" in text, text
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        first = torch.full((5 * MIB,), 1.0, device="cuda")
    # Ranges that are there, and ranges that come later.
    backend.register_mem_pool(pool)
    with torch.cuda.use_mem_pool(pool):
        second = torch.full((3 * MIB,), 2.0, device="cuda")
    sizes = [segment["total_size"] for segment in pool.snapshot()]
    assert sizes == [20 * MIB, 12 * MIB], sizes
    assert torch.cuda.memory_allocated() >= 32 * MIB > xseg.stats()["allocated"]
    addresses = first.data_ptr(), second.data_ptr()
    for round_ in range(20):
        noise = [torch.full(((round_ + 1) * MIB,), float(round_), device="cuda") for _ in range(8)]
        big = torch.zeros(300 * MIB // 4, device="cuda")
        del noise, big
        dist.all_reduce(first)
        dist.all_reduce(second)
        with torch.cuda.use_mem_pool(pool):
            again = torch.full((MIB,), float(round_), device="cuda")
        dist.all_reduce(again)
        assert again.mean().item() == round_
    assert (first.mean().item(), second.mean().item()) == (1, 2) and addresses == (first.data_ptr(), second.data_ptr())
    # Beside the heap, and against its limit.
    try:
        with torch.cuda.use_mem_pool(pool):
            torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
        raise AssertionError("the pool grew beyond the limit")
    except torch.OutOfMemoryError:
        pass
    backend.deregister_mem_pool(pool)
    del first, second, again, pool
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == xseg.stats()["reserved"]
    dist.destroy_process_group()
    return {"moved": xseg.stats()["bytes_moved"], "text": text}


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
            ours.send("check")
            assert ours.poll(LIMIT_S) and ours.recv() is True, "freed here first, the values are gone there"
            for one in others:
                assert torch.as_tensor(one, device="cuda").eq(7).all().item(), "another block was written to from there"
            assert heap.stats()["pending"] >= size
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


@check
def speed() -> Any:
    found = {"xseg " + mode(): other_process("pair")}
    found["native"] = other_process("pair", CHECK_MODE="native")
    found["expandable"] = other_process("pair", CHECK_MODE="native", PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    return found


def pair() -> Any:
    """Nanoseconds of torch.empty and its end: the least of five runs."""
    torch = start()
    empty, device = torch.empty, torch.device("cuda")
    best = {}
    for size in (1024, 4 * MIB):
        times = []
        for _ in range(5):
            began = time.perf_counter_ns()
            for _ in range(20_000):
                empty(size, dtype=torch.uint8, device=device)
            times.append((time.perf_counter_ns() - began) / 20_000)
        best[str(size)] = round(min(times))
    return best


def one(name: str) -> int:
    began = time.monotonic()
    line: dict[str, Any] = {"check": name, "mode": mode()}
    try:
        line.update(ok=True, found=CHECKS[name]())
    except BaseException as error:
        at = traceback.extract_tb(error.__traceback__)
        where = [f"{frame.name}:{frame.lineno}" for frame in at][-4:]
        line.update(ok=False, error=f"{type(error).__name__}: {str(error)[:800]}", where=where)
    line["seconds"] = round(time.monotonic() - began, 1)
    print(json.dumps(line), flush=True)
    return 0 if line["ok"] else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checks", nargs="*", metavar="CHECK", help="one of: " + " ".join(CHECKS))
    parser.add_argument("--plain", action="store_true", help="without the C++ part")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--call", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.call:
        print(json.dumps(globals()[args.call]()), flush=True)
        return 0
    if args.one:
        return one(args.one)
    if args.plain:
        os.environ["CHECK_MODE"] = "plain"
    failed = 0
    names = args.checks or [name for name in CHECKS if mode() == "full" or name not in FULL_ONLY]
    for name in names:
        try:
            run = subprocess.run(
                # Where a crash was, in Python's terms, goes to the standard error.
                [sys.executable, "-X", "faulthandler", __file__, "--one", name],
                capture_output=True,
                text=True,
                timeout=3 * LIMIT_S,
            )
            lines = [line for line in run.stdout.splitlines() if line.startswith("{")]
            if lines and (run.returncode in (0, 1)):
                print(lines[-1], flush=True)
                failed += run.returncode
            else:
                failed += 1
                shown = {
                    "check": name,
                    "mode": mode(),
                    "ok": False,
                    "status": run.returncode,
                    # What it found before it ended so.
                    "line": lines[-1:],
                    "stderr": run.stderr[-1500:],
                }
                print(json.dumps(shown), flush=True)
        except subprocess.TimeoutExpired as error:
            failed += 1
            shown = {"check": name, "mode": mode(), "ok": False, "error": f"no end within {3 * LIMIT_S} s"}
            shown["stderr"] = str(error.stderr)[-800:]
            print(json.dumps(shown), flush=True)
    print(json.dumps({"failed": failed, "checks": len(names)}), flush=True)
    return failed


if __name__ == "__mp_main__" and os.environ.get("CHECK_CHILD_INSTALLS"):
    start("limit:8GiB")
if __name__ == "__main__":
    sys.exit(main())
