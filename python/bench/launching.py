"""How the processes of the benchmarks are started: one that has its GPUs to itself, or several that take turns on them."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from lines import Line
from measure import Job


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
    """A failed process's error: the last that it names first, since reports have room for little."""
    lines = [line.strip() for line in err.splitlines() if any(map(str.isalnum, line))]
    # torchrun's own only says that a rank failed.
    named = [
        line for line in lines if re.search(r"\w(Error|Exception|Interrupt)\b", line) and "ChildFailed" not in line
    ]
    last = (named or lines or ["nothing was said"])[-1]
    return f"exit status {status}: {last}\n{err[-800:]}"


def marked(mark: str) -> list[int]:
    """Processes that run with this in their environment; what they start has it, too."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        # Others' are not to be read, and one that has ended has none.
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


# Processes that run, and whether any may still be begun.
ALIVE: set[Child] = set()
STOPPED = threading.Event()
LOCK = threading.Lock()


class Child:
    """A process of a job, or several that torchrun starts. It says when it is ready for its turn (`{"turn": …}`), and gives its lines."""

    def __init__(self, job: Job, command: Sequence[str], env: dict[str, str], timeout: float) -> None:
        self.job, self.timeout, self.began = job, timeout, time.monotonic()
        # By which all that it starts is found, in whatever session: torchrun gives each rank its own.
        self.mark = f"XSEG_BENCH_JOB={uuid.uuid4().hex}"
        env = {**env, **dict([self.mark.split("=")])}
        # In a file: a pipe that nobody reads would stop the process.
        self.err = tempfile.TemporaryFile("w+", errors="replace")
        pipe = subprocess.PIPE
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
        with self.running.stdout as output:
            for text in output:
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
        """Ends it and all that it started: ranks that hang outlive their launcher."""
        # At once all of its session: what is just becoming another program shows no environment.
        if self.running.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.running.pid, signal.SIGKILL)
        # Again, since some may have been started while others were found; one that is stuck in the system is left.
        for _ in range(300):
            if not (pids := marked(self.mark)):
                break
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def end(self) -> None:
        """Ends what has not ended, and takes what it left."""
        self.over = True
        with LOCK:
            self.kill()
            ALIVE.discard(self)
        status = self.running.wait()
        self.err.seek(0)
        if not self.lines and not self.error:
            self.error = why(status, self.err.read())
        self.err.close()
        # It may have ended before it had read all. Its output is closed by who reads it.
        with contextlib.suppress(OSError):
            if self.running.stdin is not None:
                self.running.stdin.close()
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
            # In changing order, but nobody twice in a row: who follows itself finds caches as it left them. Two just alternate.
            first = at % len(waiting) if len(waiting) > 2 else 0
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
