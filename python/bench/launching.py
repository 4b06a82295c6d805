"""How the processes of the benchmarks are started: one that has its GPUs to itself, or several that take turns on them."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from measure import Job

Line = dict[str, Any]


def environment(job: Job, gpu: str | None) -> dict[str, str]:
    """The environment of a job's process."""
    env = {name: value for name, value in os.environ.items() if not name.endswith("_ALLOC_CONF")}
    if job.allocator == "expandable":
        env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    elif job.allocator == "async":
        env["PYTORCH_CUDA_ALLOC_CONF"] = "backend:cudaMallocAsync"
    if gpu is not None:
        env["CUDA_VISIBLE_DEVICES"] = gpu
    if job.deterministic:
        env["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return env


def told(text: str) -> Line | None:
    """What a line of a process's output says; None for what libraries wrote, and where another rank wrote into it."""
    try:
        found = json.loads(text) if text.startswith("{") else None
    except ValueError:
        return None
    return found if isinstance(found, dict) and ("turn" in found or "completed" in found) else None


def why(status: int, err: str) -> str:
    """A failed process's error: its last line first, since reports have room for little."""
    lines = [line for line in err.splitlines() if line.strip()]
    return f"exit status {status}: {lines[-1].strip() if lines else 'nothing was said'}\n{err[-800:]}"


# Processes that run, and whether any may still be begun.
ALIVE: set[Child] = set()
STOPPED = threading.Event()
LOCK = threading.Lock()


class Child:
    """A process of a job, or several that torchrun starts. It says when it is ready for its turn (`{"turn": …}`), and gives its lines."""

    def __init__(self, job: Job, command: Sequence[str], env: dict[str, str], timeout: float) -> None:
        self.job, self.timeout, self.began = job, timeout, time.monotonic()
        # In a file: a pipe that nobody reads would stop the process.
        self.err = tempfile.TemporaryFile("w+", errors="replace")
        pipe = subprocess.PIPE
        # A session of its own, so that what it started can be ended with it.
        with LOCK:
            if STOPPED.is_set():
                raise OSError("the program is ending")
            self.running = subprocess.Popen(
                command, env=env, stdin=pipe, stdout=pipe, stderr=self.err, text=True, errors="replace", start_new_session=True
            )  # fmt: skip
            ALIVE.add(self)
        self.said: queue.Queue[Line | None] = queue.Queue()
        threading.Thread(target=self.listen, daemon=True).start()
        # Its lines, and why it has none.
        self.lines: list[Line] = []
        self.error = ""
        self.over = self.late = False
        self.wall = 0.0

    def listen(self) -> None:
        assert self.running.stdout is not None
        for text in self.running.stdout:
            if (found := told(text)) is not None:
                self.said.put(found)
        self.said.put(None)

    def wait(self) -> bool:
        """Waits until the process is ready for a turn; false once it has ended, or was ended since it said nothing for too long."""
        while not self.over:
            try:
                found = self.said.get(timeout=self.timeout)
            except queue.Empty:
                self.late = True
                self.error = f"no end in {self.timeout:.0f} s"
                self.end()
                break
            if found is None:
                self.end()
            elif "turn" in found and "completed" not in found:
                return True
            else:
                self.lines.append(found)
        return False

    def kill(self) -> None:
        """Ends all of its session: ranks that hang outlive their launcher."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.running.pid, signal.SIGKILL)

    def end(self) -> None:
        """Ends what has not ended, and takes what it left."""
        self.over = True
        with LOCK:
            # While nobody has waited for it, the number is its own.
            self.kill()
            status = self.running.wait()
            ALIVE.discard(self)
        self.err.seek(0)
        if not self.lines and not self.error:
            self.error = why(status, self.err.read())
        self.err.close()
        for pipe in (self.running.stdin, self.running.stdout):
            # It may have ended before it had read all.
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        self.wall = round(time.monotonic() - self.began, 1)

    def go(self, steps: int) -> None:
        """Lets it train that many steps; 0: it may end."""
        assert self.running.stdin is not None
        # If it ended, `wait` finds that.
        with contextlib.suppress(OSError):
            self.running.stdin.write(f"{steps}\n")
            self.running.stdin.flush()


def stop() -> None:
    """Ends all processes, of any thread, and lets none begin any more."""
    with LOCK:
        STOPPED.set()
        for child in ALIVE:
            child.kill()


Begin = Callable[[Job], Child]


def to_itself(job: Job, begin: Begin) -> Child:
    """Runs a job while nothing of ours is beside it; its process, which has ended."""
    child = begin(job)
    try:
        while child.wait():
            child.go(0)
    finally:
        if not child.over:
            child.end()
    return child


def take_turns(jobs: Sequence[Job], begin: Begin) -> list[Child]:
    """Runs jobs of one workload beside each other: all are made and warmed up, then each trains some steps while the others wait.

    What slows a machine for seconds or minutes slows all alike so, which it does not where one runs after the other. Returns their
    processes, which have ended.
    """
    children: list[Child] = []
    try:
        for job in jobs:
            children.append(begin(job))
        # Nobody's clock starts while another warms up.
        waiting = [child for child in children if child.wait()]
        steps, each = jobs[0].steps, jobs[0].turn
        for at, done in enumerate(range(0, steps, each)):
            # In changing order, but nobody twice in a row: who follows itself finds caches as it left them.
            first = at % max(len(waiting), 1)
            for child in waiting[first:] + waiting[:first]:
                child.go(min(each, steps - done))
                if not child.wait():
                    waiting.remove(child)
        # What ends frees its memory, which takes the driver's time: none does before all are through.
        for child in waiting:
            child.go(0)
        for child in waiting:
            while child.wait():
                child.go(0)
    finally:
        for child in children:
            if not child.over:
                child.end()
    return children


def run_jobs(jobs: Sequence[Job], begin: Begin) -> list[Child]:
    """Runs jobs: one that has the GPUs to itself, or several that take turns."""
    return take_turns(jobs, begin) if jobs[0].turn else [to_itself(job, begin) for job in jobs]
