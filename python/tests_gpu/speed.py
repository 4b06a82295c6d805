"""What a pair costs beside PyTorch's own allocators."""

from __future__ import annotations

import time
from typing import Any

from common import MIB, check, mode, other_process, start


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
