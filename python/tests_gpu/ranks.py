"""Distributed training with one rank, and memory that NCCL registers."""

from __future__ import annotations

import gc
import os
from typing import Any

from common import MIB, Skip, check, full_only, grows_no_further, model_and_data, start, step


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
    try:
        pool = torch.cuda.MemPool(backend.mem_allocator)
    except RuntimeError as error:
        # PyTorch's own, which it has not where the GPU cannot multicast.
        if "not supported" not in str(error):
            raise
        raise Skip(f"PyTorch has no allocator of NCCL's here: {error}") from error
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
    grows_no_further(torch, pool)
    backend.deregister_mem_pool(pool)
    del first, second, again, pool
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == xseg.stats()["reserved"]
    dist.destroy_process_group()
    return {"moved": xseg.stats()["bytes_moved"], "text": text}
