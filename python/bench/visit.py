"""A visit of a machine: workloads side by side, one for each GPU, their lines added to one file."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from measure import Job
from plan import Plan, next_job

Line = dict[str, Any]


def fresh(name: str, taken: Collection[str]) -> str:
    """A name that no other visit has."""
    numbered = (f"{name} ({number})" for number in itertools.count(2))
    return name if name not in taken else next(one for one in numbered if one not in taken)


def read(paths: Sequence[Path]) -> list[Line]:
    """The lines of several files; a last one that was cut off is left out.

    Visits that began in the same second have the same name; here each gets one of its own. A file has the line about a visit before the
    visit's others, also where the lines of several visits were put into one file.
    """
    lines = []
    names: set[str] = set()
    for path in paths:
        try:
            whole = path.read_text()
        except OSError as error:
            sys.exit(f"cannot read {path}: {error.strerror}; give a file that an earlier visit wrote with --out")
        renamed: dict[str, str] = {}
        for number, text in enumerate(whole.splitlines(), 1):
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                print(f"{path}:{number} is no line of JSON and is left out", file=sys.stderr)
                continue
            visit = line.get("visit")
            if line.get("kind") == "about":
                renamed[visit] = fresh(visit, names)
                names.add(renamed[visit])
            if visit in renamed:
                line["visit"] = renamed[visit]
            lines.append(line)
    return lines


def begin(lines: Sequence[Line]) -> str:
    """The name of a visit that begins now, none of those before it."""
    now = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    return fresh(now, {line["visit"] for line in lines if "visit" in line})


def about(visit: str, commit: str, words: Sequence[str]) -> Line:
    """The machine and what runs on it."""
    versions = {}
    for name in ("torch", "xseg", "transformers"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    gpus, driver = [], None
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        for text in subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.splitlines():
            name, driver = (part.strip() for part in text.split(",", 1))
            gpus.append(name)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        # No GPU here: only the summary would miss it.
        pass
    return {
        "kind": "about", "visit": visit, "commit": commit, "gpus": gpus, "driver": driver, "versions": versions,
        "python": sys.version.split()[0], "cores": os.cpu_count(), "command": shlex.join(words),
    }  # fmt: skip


def prepare() -> None:
    """Compiles xseg's part for PyTorch before anything is timed; where it cannot be, each process says so itself."""
    code = "from xseg import _build; _build.torch_part()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    if done.returncode:
        print(done.stderr.strip().splitlines()[-1], file=sys.stderr)


class Visit:
    """Works through the stages of all workloads; each workload is on one GPU at a time."""

    def __init__(
        self,
        name: str,
        lines: list[Line],
        keep: Callable[[Line], None],
        start: Callable[[Job, int], Line],
        plan: Plan,
        runs: Sequence[str],
        deadline: float = float("inf"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.lines, self.plan, self.deadline, self.clock = name, lines, plan, deadline, clock
        self.keep, self.start = keep, start
        # The first stage of all before the second of any: a visit that ends early has the most of what matters most.
        self.tasks = [(run, stage) for stage in plan.stages for run in runs]
        self.busy: set[str] = set()
        self.left: list[tuple[str, str]] = []
        self.changed = threading.Condition()

    def take(self) -> tuple[str, str] | None:
        """A task whose workload nobody is at; None when nothing is left."""
        with self.changed:
            while self.tasks:
                for task in self.tasks:
                    if task[0] not in self.busy:
                        self.tasks.remove(task)
                        self.busy.add(task[0])
                        return task
                self.changed.wait()
        return None

    def expected(self, run: str) -> float:
        """Seconds that the workload's next process may take: as the longest of this visit so far."""
        walls = [line["wall"] for line in self.lines if line.get("run") == run and line.get("visit") == self.name]
        return max(walls, default=60.0)

    def work(self, slot: int) -> None:
        """Runs tasks on the GPU of number `slot` in the list of GPUs."""
        while (task := self.take()) is not None:
            run, stage = task
            try:
                while True:
                    with self.changed:
                        job = next_job(self.lines, run, stage, self.plan, self.name)
                        late = job is not None and self.clock() + self.expected(run) > self.deadline
                    if late:
                        self.left.append(task)
                    if job is None or late:
                        break
                    line = {**self.start(job, slot), "visit": self.name, "slot": slot}
                    with self.changed:
                        self.lines.append(line)
                        self.keep(line)
            finally:
                with self.changed:
                    self.busy.discard(run)
                    self.changed.notify_all()

    def go(self, slots: int) -> list[tuple[str, str]]:
        """Works on that many GPUs at a time; returns the tasks that time did not allow."""
        threads = [threading.Thread(target=self.work, args=(slot,)) for slot in range(slots)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self.left
