"""A visit of a machine: workloads side by side, one for each GPU, their lines added to one file."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TextIO

from launching import stop
from lines import Line, fresh, read
from measure import Job
from plan import Plan, next_jobs


def unwritable(path: Path) -> str | None:
    """Why a file cannot be written; None where it can. It is left as it was."""
    there = path.exists()
    try:
        path.open("a").close()
        if not there:
            path.unlink()
    except OSError as error:
        return f"cannot write {path}: {error.strerror}; name a file that can be written"
    return None


def earlier(have: Sequence[Path], out: Path) -> list[Line]:
    """The lines of earlier visits, those in this one's own file among them."""
    # One that was only made holds none yet, and one that is named twice is read once.
    own = out.exists() and out.stat().st_size and not any(path.exists() and out.samefile(path) for path in have)
    return read([*have, *([out] if own else [])])


def opened(out: Path) -> TextIO:
    """A visit's file, to add lines to."""
    # Where the last visit was killed within a line, that line ends here.
    cut = out.is_file() and out.stat().st_size and not out.read_bytes().endswith(b"\n")
    file = out.open("a")
    if cut:
        file.write("\n")
    return file


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


def lacks(program: str, modules: Sequence[str], allocators: Collection[str]) -> bool:
    """Says what this Python does not have of what a program needs for runs on these allocators."""
    wanted = [*modules, *(["xseg"] if "xseg" in allocators else [])]
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    if missing:
        named = " and ".join(filter(None, (", ".join(missing[:-1]), missing[-1])))
        print(f"{program} needs {named}, which this Python does not have", file=sys.stderr)
    return bool(missing)


def gpus_here() -> int:
    """How many GPUs the driver shows to this process; 0 where there is none, or no driver."""
    count = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    return 0 if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) else count.value


def interruptible(main: Callable[[], int]) -> int:
    """Runs a program's main function; where it is interrupted or terminated, its processes end with it and no traceback is shown."""
    # From `kill`, `timeout` and a terminal that closes: as if interrupted, so that what was begun is ended.
    signals = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, lambda got, _: sys.exit(128 + got)) for number in signals]
    try:
        return main()
    except KeyboardInterrupt:
        print("interrupted; lines of what had ended are in the file of --out", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        for number, handler in zip(signals, before):
            signal.signal(number, handler)


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
        start: Callable[[Sequence[Job], int], list[Line]],
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
        self.stopped = False
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

    def expected(self, jobs: Sequence[Job]) -> float:
        """Seconds that a workload's next processes may take: as the longest of their kind in this visit so far."""
        run, kind = jobs[0].run, jobs[0].kind
        here = [line for line in self.lines if line.get("run") == run and line.get("visit") == self.name]
        same = [line["wall"] for line in here if line["kind"] == kind]
        # Those that take turns take as long as one after the other would.
        return max(same) if same else len(jobs) * max((line["wall"] for line in here), default=60.0)

    def results(self, jobs: Sequence[Job], slot: int) -> list[Line]:
        """What the processes of some jobs say, also where they cannot be started or understood: the visit goes on."""
        try:
            return self.start(jobs, slot)
        except (OSError, ValueError) as error:
            text = f"{type(error).__name__}: {error}"
            return [{**asdict(job), "completed": False, "wall": 0.0, "error": text} for job in jobs]

    def work(self, slot: int) -> None:
        """Runs tasks on the GPU of number `slot` in the list of GPUs."""
        while (task := self.take()) is not None:
            run, stage = task
            try:
                while True:
                    with self.changed:
                        jobs = next_jobs(self.lines, run, stage, self.plan, self.name)
                        late = bool(jobs) and self.clock() + self.expected(jobs) > self.deadline
                    if late:
                        self.left.append(task)
                    if not jobs or late:
                        break
                    found = [{**line, "visit": self.name, "slot": slot} for line in self.results(jobs, slot)]
                    if self.stopped:
                        # What it says is that it was ended.
                        break
                    with self.changed:
                        for line in found:
                            self.lines.append(line)
                            self.keep(line)
            finally:
                with self.changed:
                    self.busy.discard(run)
                    self.changed.notify_all()

    def go(self, slots: int) -> list[tuple[str, str]]:
        """Works on that many GPUs at a time; returns the tasks that time did not allow."""
        threads = [threading.Thread(target=self.work, args=(slot,)) for slot in range(slots)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException:
            # Interrupted: what runs ends now, and nothing more is begun.
            with self.changed:
                self.stopped = True
                self.tasks.clear()
            stop()
            for thread in threads:
                if thread.is_alive():
                    thread.join()
            raise
        return self.left
