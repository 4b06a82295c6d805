"""One training run in a process of its own: how it is started, and what it does and prints."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import resource
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ALLOCATORS = ("native", "expandable", "async", "xseg")
# What xseg counted, beside PyTorch's own figures.
COUNTS = (
    "host_waits", "gpu_waits", "handles_moved", "bytes_moved", "handles_joined", "bytes_joined", "handles_rechunked", "driver_nanos", "slow_allocs", "allocs",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """One process: a workload under an allocator."""

    run: str
    allocator: str
    # What it is for: round, other, losses, probe.
    kind: str
    # Number of the round within the visit.
    round: int = 0
    # Most memory, in bytes; 0: what the card has.
    limit: int = 0
    # The same as a multiple of peak requested; 0: none.
    factor: float = 0.0
    # Steps to train after the warm-up; 0: as many as `seconds` gives.
    steps: int = 0
    # Steps of a turn, where several processes take turns on their GPU; 0: each has it to itself.
    turn: int = 0
    deterministic: bool = False


@dataclass(frozen=True)
class Process:
    """How processes are run."""

    seconds: float = 20
    warmup: int = 5
    losses: int = 20
    timeout: float = 180
    device: str = "cuda"
    small: bool = False
    # Folder for recordings of what xseg's processes allocate; none if empty.
    record: str = ""


def fill(torch: Any, left: int) -> int:
    """Takes memory from the driver until `left` bytes are free; it lives as long as the process."""
    torch.cuda.init()
    free = torch.cuda.mem_get_info()[0]
    address = ctypes.c_uint64()
    taken = max(free - left, 0)
    if taken and ctypes.CDLL("libcuda.so.1").cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(taken)):
        raise RuntimeError(f"the driver refused a ballast of {taken} bytes")
    return taken


def free_of_card() -> int:
    """Bytes that the driver has left, whoever has the rest; an allocator's own figures are of its limit."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    refused = ctypes.CDLL("libcuda.so.1").cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
    return 0 if refused else free.value


def end_with_parent() -> None:
    """Has the system end this process when the thread that started it ends, in whatever way."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def set_limit(torch: Any, job: Job) -> dict[str, Any]:
    """Holds the process to the job's limit; what was done, for the line."""
    if not job.limit:
        return {}
    if job.allocator == "async":
        # The fraction does not bind this one: the rest of the card is filled.
        return {"ballast": fill(torch, job.limit)}
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, job.limit / total))
    return {}


def be_deterministic(torch: Any) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic = True
    # Of the kernels for attention only the plain one is deterministic backwards.
    for enable in (
        torch.backends.cuda.enable_flash_sdp,
        torch.backends.cuda.enable_mem_efficient_sdp,
        torch.backends.cuda.enable_cudnn_sdp,
    ):
        enable(False)


def installed() -> dict[str, str]:
    """PyTorch on xseg, from now on; in which way and with which policy, for the line."""
    import xseg

    mode = xseg.install()
    # What it put into the environment, with the settings that it adds itself.
    return {"mode": mode, "conf": mode if mode == "off" else xseg.check_conf()}


def recorded(job: Job, process: Process) -> contextlib.AbstractContextManager[Any]:
    """Records what this process allocates on xseg, if that is wanted."""
    if not process.record or job.allocator != "xseg" or process.device != "cuda":
        return contextlib.nullcontext()
    import xseg

    limit = f"-{job.factor:g}x" if job.limit else ""
    return xseg.record(str(Path(process.record) / f"{job.run}-{job.kind}{limit}.trace"))


def child(text: str) -> None:
    """The job that these words describe, in this process; prints its line."""
    end_with_parent()
    words = json.loads(text)
    job, process = Job(**words["job"]), Process(**words["process"])
    if words["cores"]:
        first, last = map(int, words["cores"].split("-"))
        os.sched_setaffinity(0, range(first, last + 1))
    import torch

    line: dict[str, Any] = {"completed": False}
    cuda = process.device == "cuda"
    if job.allocator == "xseg" and cuda:
        line.update(installed())
    if job.deterministic:
        be_deterministic(torch)
    if cuda:
        line.update(set_limit(torch, job))
    try:
        with recorded(job, process):
            train(torch, job, process, line)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if "out of memory" not in str(error).lower():
            raise
        line["error"] = str(error)[:400]
        if cuda and job.limit:
            line["card_full"] = torch.cuda.memory_reserved() + free_of_card() < job.limit
    line.update(figures(torch, job.allocator) if cuda else dry_figures())
    print(json.dumps(line), flush=True)


class Marks:
    """Notes when the device has come so far, without waiting for it; nothing where there is no device."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        # Those of each turn by themselves: between turns others have the device.
        self.turns: list[list[Any]] = [[]]

    def turn(self) -> None:
        """What comes is apart from what was."""
        self.turns.append([])

    def mark(self) -> None:
        if self.torch is not None:
            self.turns[-1].append(self.torch.cuda.Event(enable_timing=True))
            self.turns[-1][-1].record()

    def between(self) -> list[float]:
        """Milliseconds from each mark to the next of the same turn, once the device is through."""
        pairs = (pair for events in self.turns for pair in zip(events, events[1:]))
        return [round(first.elapsed_time(second), 3) for first, second in pairs]


def my_turn(at: int) -> int:
    """Says that this process has trained so many steps, and waits for its turn; how many steps that has."""
    print(json.dumps({"turn": at}), flush=True)
    text = sys.stdin.readline()
    if not text:
        sys.exit("the program that gave turns has ended")
    return int(text)


def train(torch: Any, job: Job, process: Process, line: dict[str, Any]) -> None:
    from workloads import RUNS

    wait = torch.cuda.synchronize if process.device == "cuda" else lambda: None
    run = RUNS[job.run](torch, process.device, process.small)
    # One buffer from the start: a tensor kept from each step would be memory that no training keeps.
    losses = torch.zeros(process.losses, device=process.device)
    warmup = max(process.warmup, run.first_steps)
    marks = Marks(torch if process.device == "cuda" else None)

    def step(at: int) -> int:
        loss, count = run.step(at)
        if at < process.losses:
            losses[at].copy_(loss)
        return count

    for at in range(warmup):
        step(at)
    wait()
    most, seconds = (job.steps, math.inf) if job.steps else (sys.maxsize, process.seconds)
    at, tokens, turns, late = 0, 0, [], False
    while at < most and not late:
        end = at + my_turn(at) if job.turn else most
        began, first = time.perf_counter(), at
        marks.turn()
        marks.mark()
        while at < end and not late:
            tokens += step(at + warmup)
            marks.mark()
            at += 1
            late = time.perf_counter() - began >= seconds
        wait()
        turns.append((at - first, round(time.perf_counter() - began, 6)))
    if job.turn:
        # The others may not be through: what this process frees as it ends would take the driver's time.
        my_turn(at)
        line["turns"] = turns
    spent = sum(taken for _, taken in turns)
    line.update(completed=True, steps=at, seconds=round(spent, 3), per_second=round(tokens / spent, 1))
    line["step_ms"] = marks.between()
    line["losses"] = [value.hex() for value in losses[: at + warmup].tolist()]


def dry_figures() -> dict[str, Any]:
    """On a machine without a GPU: the process's own memory, so that the program can be tried."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"peak_requested": used, "peak_allocated": used, "peak_reserved": used, "retries": 0, "ooms": 0}


def figures(torch: Any, allocator: str) -> dict[str, Any]:
    """Peaks in bytes, and how often anything had to be waited for or tried again."""
    stats = torch.cuda.memory_stats()
    found = {
        # The asynchronous allocator does not count what is requested.
        "peak_requested": stats.get("requested_bytes.all.peak") or None,
        "peak_allocated": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
        "retries": stats.get("num_alloc_retries"),
        "ooms": stats.get("num_ooms"),
    }
    if allocator == "xseg":
        import xseg

        ours = xseg.stats()
        found.update({name: ours[name] for name in COUNTS})
    return found
