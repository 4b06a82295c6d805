"""How the benchmark's processes are started, and how several take turns on one GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench"
sys.path.insert(0, str(BENCH))

import launching  # noqa: E402
import train  # noqa: E402
from measure import Job  # noqa: E402

# What a process of the benchmark does, without PyTorch: it notes what it does in a file, and what fails is in its workload's name.
CHILD = """
import json, os, sys, time
words = json.loads(sys.argv[1])
name = words["allocator"] + ("*" if words["limit"] else "")
run = words["run"] if name == os.environ.get("FAILS") else ""
def note(what):
    with open(os.environ["NOTES"], "a") as notes:
        notes.write(f"{name} {what}\\n")
def turn(at):
    print(json.dumps({"turn": at}), flush=True)
    count = int(sys.stdin.readline())
    note(count)
    return count
print("a library's words")
print("{ more of them", flush=True)
if run == "crash":
    sys.stderr.write("Traceback\\n  at a place\\nValueError: no such thing\\n\\n")
    sys.exit(3)
at, steps = 0, words["steps"]
while words["turn"] and at < steps:
    at += turn(at)
    if run == "hang" and at > 2:
        time.sleep(600)
    if run == "memory" and at > 2:
        print(json.dumps({"completed": False, "error": "out of memory"}), flush=True)
        sys.exit(0)
if words["turn"]:
    turn(at)
note("ends")
print(json.dumps({"completed": True, "steps": at, "conf": os.environ.get("PYTORCH_CUDA_ALLOC_CONF")}))
"""
JOBS = [
    # Four turns, the last of one step.
    Job("gpt2", "native", "round", 1, steps=10, turn=3),
    Job("gpt2", "xseg", "round", 1, steps=10, turn=3),
    Job("gpt2", "xseg", "round", 1, limit=5, factor=1.02, steps=10, turn=3),
]


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file in which processes note what they do."""
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    return tmp_path / "notes"


def begin(job: Job, timeout: float = 20) -> launching.Child:
    command = [sys.executable, "-c", CHILD, json.dumps(asdict(job))]
    return launching.Child(job, command, launching.environment(job, None), timeout)


def lines_of(children: list[launching.Child]) -> list[dict[str, Any]]:
    assert all(child.running.returncode is not None for child in children)
    return [train.line_of(child) for child in children]


def test_processes_take_turns_and_end_together(notes: Path) -> None:
    lines = lines_of(launching.run_jobs(JOBS, begin))
    assert [(line["completed"], line["steps"], line["allocator"], line["limit"]) for line in lines] == [
        (True, 10, "native", 0),
        (True, 10, "xseg", 0),
        (True, 10, "xseg", 5),
    ]
    done = notes.read_text().split("\n")[:-1]
    order = ["native", "xseg", "xseg*"]
    expected = [f"{order[(turn + first) % 3]} {count}" for turn, count in enumerate((3, 3, 3, 1)) for first in range(3)]
    assert done[:12] == expected
    # Nobody follows itself, nor does one of two; and nobody ends while another trains.
    assert all(a.split()[0] != b.split()[0] for a, b in zip(expected, expected[1:]))
    assert sorted(done[12:]) == sorted(f"{name} {what}" for name in order for what in ("0", "ends"))
    notes.unlink()
    lines_of(launching.run_jobs(JOBS[:2], begin))
    two = [text.split()[0] for text in notes.read_text().split("\n")[:8]]
    assert two == ["native", "xseg"] * 4


@pytest.mark.parametrize(
    "how, error", [("crash", "exit status 3: ValueError: no such thing\n"), ("memory", "out of memory"), ("hang", "no end in 2 s")]
)  # fmt: skip
def test_one_that_fails_leaves_the_turns_to_the_others(
    notes: Path, monkeypatch: pytest.MonkeyPatch, how: str, error: str
) -> None:
    monkeypatch.setenv("FAILS", "xseg")
    jobs = [replace(job, run=how) for job in JOBS]
    lines = lines_of(launching.run_jobs(jobs, lambda job: begin(job, 2 if how == "hang" else 20)))
    assert [line["completed"] for line in lines] == [True, False, True]
    assert lines[1]["error"].startswith(error) and all(line["wall"] >= 0 for line in lines)
    done = notes.read_text().split("\n")
    assert all(sum(int(text.split()[1]) for text in done if text.startswith(name + " ") and "ends" not in text) == 10 for name in ("native", "xseg*"))  # fmt: skip


def test_one_that_has_the_gpu_to_itself(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = lines_of(launching.run_jobs([Job("gpt2", "expandable", "other")], begin))
    assert line["completed"] and line["conf"] == "expandable_segments:True" and line["kind"] == "other"
    monkeypatch.setenv("FAILS", "native")
    (line,) = lines_of(launching.run_jobs([Job("crash", "native", "round")], begin))
    assert not line["completed"] and line["error"].startswith("exit status 3: ValueError: no such thing\n")
    assert line["run"] == "crash" and line["wall"] >= 0


def test_what_cannot_be_started_ends_those_that_were(notes: Path) -> None:
    made: list[launching.Child] = []

    def two(job: Job) -> launching.Child:
        if len(made) == 2:
            raise OSError("no more processes")
        made.append(begin(job))
        return made[-1]

    with pytest.raises(OSError, match="no more processes"):
        launching.run_jobs(JOBS, two)
    assert [child.running.returncode for child in made] == [-9, -9]


# Ends at once and leaves one that has a session of its own, as torchrun's ranks have, and the output; its number is in a file.
LEAVES = """
import subprocess, sys
left = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(left.pid, file=open(sys.argv[1], "a"), flush=True)
"""


def ended(pid: int) -> bool:
    """Has it ended? Nobody may have asked how."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rsplit(") ", 1)[1][0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until_ended(pids: list[int]) -> None:
    while not all(map(ended, pids)):
        time.sleep(0.02)


def test_what_a_process_started_ends_with_it(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    command = [sys.executable, "-c", LEAVES, str(file)]
    child = launching.to_itself(JOBS[0], lambda job: launching.Child(job, command, dict(os.environ), 2))
    # The one that is left has the output, so that nobody knows of the end.
    assert child.late and child.error == "no end in 2 s" and 2 <= child.wall < 300
    wait_until_ended([int(file.read_text())])
    # A line of a process that does not end then is none of a run that completed.
    child.lines.append({"completed": True, "steps": 3})
    assert not train.line_of(child)["completed"] and train.line_of(child)["steps"] == 3


def test_errors_are_named_by_what_says_most() -> None:
    def first(err: str) -> str:
        return launching.why(1, err).split("\n")[0]

    assert first("Traceback\n  at\nValueError: no such thing\n\n") == "exit status 1: ValueError: no such thing"
    ranks = "[rank0]: torch.AcceleratorError: CUDA error\nE1 failed\n torch.distributed.elastic.ChildFailedError: \n=====\nFAILED\n=====\n"
    assert first(ranks) == "exit status 1: [rank0]: torch.AcceleratorError: CUDA error"
    assert first("killed\n=====\n") == "exit status 1: killed" and first("") == "exit status 1: nothing was said"


def test_lines_of_a_process_are_told_from_other_words() -> None:
    assert launching.told('{"turn": 3}') == {"turn": 3}
    assert launching.told('{"rank": 0, "completed": true}\n') == {"rank": 0, "completed": True}
    others = ('{"rank": 1, "step_ms": [1.0,{"rank": 0}', "{", "[]", "words", "", "3", '{"level": "warning"}')
    assert [launching.told(text) for text in others] == [None] * len(others)


@pytest.mark.parametrize("sent, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_an_interrupted_program_ends_its_processes(tmp_path: Path, sent: int, status: int) -> None:
    # A visit whose processes wait for ever, on two GPUs at once.
    code = f"""if True:
        import sys
        sys.path.insert(0, {str(BENCH)!r})
        import launching, visit
        from plan import Plan
        def begin(job):
            return launching.Child(job, ["sh", "-c", "echo $$ >> pids; sleep 600 & wait"], {{}}, 600)
        def main():
            kept = []
            plan = Plan(stages=["rounds"])
            start = lambda jobs, slot: [{{"error": child.error}} for child in launching.run_jobs(jobs, begin)]
            try:
                visit.Visit("one", [], kept.append, start, plan, ["gpt2", "llama"]).go(2)
            finally:
                print("kept", kept, flush=True)
            return 0
        sys.exit(visit.interruptible(main))
    """
    program = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    pids = tmp_path / "pids"
    while not (pids.exists() and len(pids.read_text().split()) == 2):
        assert program.poll() is None
        time.sleep(0.02)
    program.send_signal(sent)
    out, err = program.communicate(timeout=60)
    assert program.returncode == status and out == "kept []\n" and "Traceback" not in err
    wait_until_ended([int(pid) for pid in pids.read_text().split()])


def test_none_begins_once_all_were_stopped(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "STOPPED", threading.Event())
    child = begin(replace(JOBS[0], run="gpt2"))
    assert launching.ALIVE == {child}
    launching.stop()
    while child.wait():
        pass
    assert child.running.returncode == -9 and launching.ALIVE == set()
    with pytest.raises(OSError, match="the program is ending"):
        begin(JOBS[0])
