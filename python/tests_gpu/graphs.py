"""Captured graphs, pools, compiled models."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

from common import GIB, MIB, check, full_only, grows_no_further, start


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
    with torch.cuda.graph(graph, pool=pool.id):
        made = inside * 2
        try:
            # As PyTorch's own allocator, which does not open a pool twice at once.
            torch._C._cuda_beginAllocateCurrentThreadToPool(0, pool.id)
            raise AssertionError("an open pool was opened again")
        except RuntimeError as error:
            assert "already" in str(error), error
    graph.replay()
    assert made.mean().item() == 6
    del inside, made, graph, pool
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert xseg.stats()["captured"] == 0, xseg.stats()["captured"]
    return captured


@full_only
def own_mempool() -> Any:
    """A pool with an allocator of its own: what a graph was captured with stays, whoever wants memory meanwhile."""
    torch = start("limit:2GiB")
    import xseg

    driver = ctypes.CDLL("libcuda.so.1")
    held: dict[int, int] = {}

    @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    def take(size: int, device: int, stream: int) -> Any:
        address = ctypes.c_uint64()
        if driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)):
            return None
        held[address.value] = size
        return address.value

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    def give(address: int, size: int, device: int, stream: int) -> None:
        del held[address]
        driver.cuMemFree_v2(ctypes.c_uint64(address))

    functions = (ctypes.cast(function, ctypes.c_void_p).value for function in (take, give))
    pool = torch.cuda.MemPool(torch._C._cuda_customAllocator(*functions))
    with torch.cuda.use_mem_pool(pool):
        inside = torch.full((4 * MIB,), 3.0, device="cuda")
        try:
            with torch.cuda.use_mem_pool(pool):
                raise AssertionError("the pool was opened twice")
        except RuntimeError as error:
            assert "already" in str(error), error
    # What the heap has is waited for, and given up.
    behind = torch.empty(GIB + GIB // 2, dtype=torch.uint8, device="cuda")
    torch.cuda._sleep(1 << 30)
    del behind
    with torch.cuda.use_mem_pool(pool):
        large = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    del large
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert len(held) == 1, held
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool.id):
        between = inside * 2
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            late = between + 5
            for _ in range(20):
                late = late + between
        between.record_stream(side)
        # Freed within the capture, while the side stream reads it.
        del between
        other = torch.full((4 * MIB,), 9.0, device="cuda")
        torch.cuda.current_stream().wait_stream(side)
    count = len(held)
    torch.cuda.empty_cache()
    for round_ in range(5):
        noise = [torch.full(((round_ + 1) * MIB,), float(round_), device="cuda") for _ in range(8)]
        grows_no_further(torch, pool)
        del noise
        inside.fill_(float(round_))
        graph.replay()
        torch.cuda.synchronize()
        assert (late == 42 * round_ + 5).all().item() and (other == 9).all().item(), round_
    assert len(held) >= count >= 4 and torch.cuda.memory_reserved() > sum(held.values()), (count, held)
    replays = len(held)
    graph.replay()
    del graph, late, other, inside, pool
    gc.collect()
    torch.cuda.empty_cache()
    assert not held and torch.cuda.memory_reserved() == xseg.stats()["reserved"], held
    return {"ranges": replays}


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
