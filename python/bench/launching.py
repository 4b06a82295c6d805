"""How the processes of `train.py` are started: one that has its GPU to itself, or several that take turns on it."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from measure import Job, Process

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
    """What a line of a process's output says; None for what other libraries wrote."""
    try:
        found = json.loads(text) if text.startswith("{") else None
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def why(status: int, err: str) -> str:
    """A failed process's error: its last line first, since reports have room for little."""
    lines = [line for line in err.splitlines() if line.strip()]
    return f"exit status {status}: {lines[-1].strip() if lines else 'nothing was said'}\n{err[-800:]}"


class Child:
    """A job's process. It says when it is ready for its turn (`{"turn": …}`), and at last gives its line."""

    def __init__(self, job: Job, process: Process, gpu: str | None = None, cores: str = "") -> None:
        self.job, self.process, self.began = job, process, time.monotonic()
        words = {"job": asdict(job), "process": asdict(process), "cores": cores}
        command = [sys.executable, str(Path(__file__).with_name("train.py")), "--child", json.dumps(words)]
        # In a file: a pipe that nobody reads would stop the process.
        self.err = tempfile.TemporaryFile("w+", errors="replace")
        self.running = subprocess.Popen(
            command, env=environment(job, gpu), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.err, text=True
        )  # fmt: skip
        self.said: queue.Queue[Line | None] = queue.Queue()
        threading.Thread(target=self.listen, daemon=True).start()
        self.line: Line = {**asdict(job), "completed": False}
        self.over = False

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
                found = self.said.get(timeout=self.process.timeout)
            except queue.Empty:
                self.line["error"] = f"no end in {self.process.timeout:.0f} s"
                self.running.kill()
                self.end()
                break
            if found is None:
                self.end()
            elif "turn" in found:
                return True
            else:
                self.line.update(found)
        return False

    def end(self) -> None:
        """Takes what an ending process left."""
        self.over = True
        status = self.running.wait()
        self.err.seek(0)
        if not self.line["completed"] and "error" not in self.line:
            self.line["error"] = why(status, self.err.read())
        self.err.close()
        for pipe in (self.running.stdin, self.running.stdout):
            try:
                if pipe is not None:
                    pipe.close()
            except OSError:
                # It ended before it had read all.
                pass
        self.line["wall"] = round(time.monotonic() - self.began, 1)

    def go(self, steps: int) -> None:
        """Lets it train that many steps; 0: it may end."""
        try:
            assert self.running.stdin is not None
            self.running.stdin.write(f"{steps}\n")
            self.running.stdin.flush()
        except OSError:
            # It ended, which `wait` finds.
            pass


def launch(job: Job, process: Process, gpu: str | None = None, cores: str = "") -> Line:
    """Runs a job in a new process, on one GPU and some cores; its line, also where it fails."""
    child = Child(job, process, gpu, cores)
    while child.wait():
        child.go(0)
    return child.line


def steps_of_turns(steps: int, seconds: float, turn: float) -> list[int]:
    """How many steps each turn has, so that a turn takes about `turn` seconds where all steps take `seconds`."""
    each = max(1, round(steps * turn / seconds)) if seconds > 0 else 1
    return [min(each, steps - done) for done in range(0, steps, each)]


def take_turns(jobs: Sequence[Job], process: Process, gpu: str | None = None, cores: str = "") -> list[Line]:
    """Runs jobs of one workload beside each other: all are made and warmed up, then each trains some steps while the others wait.

    What slows a machine for seconds or minutes slows all alike so, which it does not where one runs after the other.
    """
    children: list[Child] = []
    try:
        for job in jobs:
            children.append(Child(job, process, gpu, cores))
        # Nobody's clock starts while another warms up.
        waiting = [child for child in children if child.wait()]
        for at, count in enumerate(steps_of_turns(jobs[0].steps, process.seconds, process.turn)):
            # In changing order, but nobody twice in a row: who follows itself finds caches as it left them.
            first = at % max(len(waiting), 1)
            for child in waiting[first:] + waiting[:first]:
                child.go(count)
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
                child.running.kill()
                child.end()
    return [child.line for child in children]
