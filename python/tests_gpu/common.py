"""What the checks share: their list, PyTorch with the allocator that a process is for, a small training run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable

LIMIT_S = 100
GIB = 1 << 30
MIB = 1 << 20
CHECKS: dict[str, Callable[[], Any]] = {}
FULL_ONLY: set[str] = set()


class Skip(Exception):
    """This machine lacks what a check is about."""


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


def grows_no_further(torch: Any, pool: Any) -> None:
    """A pool with an allocator of its own is refused what is above the limit of 2 GiB."""
    try:
        with torch.cuda.use_mem_pool(pool):
            torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        return
    raise AssertionError("the pool grew beyond the limit")


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
    """The result of a function of a check's file in a new process."""
    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("check.py")), "--call", name],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert run.returncode == 0, f"{name}: exit status {run.returncode}: {run.stderr[-600:]}"
    return json.loads(run.stdout.splitlines()[-1])
