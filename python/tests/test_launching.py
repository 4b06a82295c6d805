"""How the benchmark's processes are started, and how several take turns on one GPU."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench"
sys.path.insert(0, str(BENCH))

import launching  # noqa: E402
from measure import Job, Process  # noqa: E402

# What a process of the benchmark does, without PyTorch: it notes what it does in a file, and what fails is in its workload's name.
CHILD = """
import json, os, sys, time
words = json.loads(sys.argv[sys.argv.index("--child") + 1])
name = words["job"]["allocator"] + ("*" if words["job"]["limit"] else "")
run = words["job"]["run"] if name == os.environ.get("FAILS") else ""
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
at, steps = 0, words["job"]["steps"]
while words["process"]["turn"] and at < steps:
    at += turn(at)
    if run == "hang" and at > 2:
        time.sleep(600)
    if run == "memory" and at > 2:
        print(json.dumps({"completed": False, "error": "out of memory"}), flush=True)
        sys.exit(0)
if words["process"]["turn"]:
    turn(at)
note("ends")
print(json.dumps({"completed": True, "steps": at, "conf": os.environ.get("PYTORCH_CUDA_ALLOC_CONF")}))
"""
JOBS = [
    Job("gpt2", "native", "round", 1, steps=10),
    Job("gpt2", "xseg", "round", 1, steps=10),
    Job("gpt2", "xseg", "round", 1, limit=5, factor=1.02, steps=10),
]


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Processes do what `CHILD` does; the file that they note it in."""
    program = tmp_path / "program"
    program.write_text(f"#!{sys.executable}\n{CHILD}")
    program.chmod(0o755)
    monkeypatch.setattr(launching.sys, "executable", str(program))
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    return tmp_path / "notes"


def turns(jobs: list[Job], **more: Any) -> list[dict[str, Any]]:
    # Four turns of three steps, the last of one.
    return launching.take_turns(jobs, replace(Process(seconds=10, turn=3, timeout=20), **more))


def test_processes_take_turns_and_end_together(notes: Path) -> None:
    lines = turns(JOBS)
    assert [(line["completed"], line["steps"], line["allocator"], line["limit"]) for line in lines] == [
        (True, 10, "native", 0),
        (True, 10, "xseg", 0),
        (True, 10, "xseg", 5),
    ]
    done = notes.read_text().split("\n")[:-1]
    order = ["native", "xseg", "xseg*"]
    expected = [f"{order[(turn + first) % 3]} {count}" for turn, count in enumerate((3, 3, 3, 1)) for first in range(3)]
    assert done[:12] == expected
    # Nobody follows itself, and nobody ends while another trains.
    assert all(a.split()[0] != b.split()[0] for a, b in zip(expected, expected[1:]))
    assert sorted(done[12:]) == sorted(f"{name} {what}" for name in order for what in ("0", "ends"))


@pytest.mark.parametrize(
    "how, error", [("crash", "exit status 3: ValueError: no such thing\n"), ("memory", "out of memory"), ("hang", "no end in 2 s")]
)  # fmt: skip
def test_one_that_fails_leaves_the_turns_to_the_others(
    notes: Path, monkeypatch: pytest.MonkeyPatch, how: str, error: str
) -> None:
    monkeypatch.setenv("FAILS", "xseg")
    lines = turns([replace(job, run=how) for job in JOBS], timeout=2 if how == "hang" else 20)
    assert [line["completed"] for line in lines] == [True, False, True]
    assert lines[1]["error"].startswith(error) and all(line["wall"] >= 0 for line in lines)
    done = notes.read_text().split("\n")
    assert all(sum(int(text.split()[1]) for text in done if text.startswith(name + " ") and "ends" not in text) == 10 for name in ("native", "xseg*"))  # fmt: skip


def test_one_that_has_the_gpu_to_itself(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = launching.launch(Job("gpt2", "expandable", "other"), Process())
    assert line["completed"] and line["conf"] == "expandable_segments:True" and line["kind"] == "other"
    monkeypatch.setenv("FAILS", "native")
    line = launching.launch(Job("crash", "native", "round"), Process())
    assert not line["completed"] and line["error"].startswith("exit status 3: ValueError: no such thing\n")
    assert line["run"] == "crash" and line["wall"] >= 0


def test_what_cannot_be_started_ends_those_that_were(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[launching.Child] = []
    begin = launching.Child.__init__

    def init(self: launching.Child, *args: Any) -> None:
        if len(made) == 2:
            raise OSError("no more processes")
        begin(self, *args)
        made.append(self)

    monkeypatch.setattr(launching.Child, "__init__", init)
    with pytest.raises(OSError, match="no more processes"):
        turns(JOBS)
    assert [child.running.returncode for child in made] == [-9, -9]


def test_turns_have_all_steps() -> None:
    assert launching.steps_of_turns(10, 10, 3) == [3, 3, 3, 1]
    assert launching.steps_of_turns(165, 20, 1) == [8] * 20 + [5]
    # A step that is longer than a turn is one.
    assert launching.steps_of_turns(3, 20, 1) == [1, 1, 1]
    assert launching.steps_of_turns(4, 0.001, 1) == [4]
    assert launching.steps_of_turns(0, 20, 1) == []


def test_lines_of_a_process_are_told_from_other_words() -> None:
    assert launching.told(json.dumps({"turn": 3})) == {"turn": 3}
    assert [launching.told(text) for text in ("{", "[]", "words", "", "3")] == [None] * 5
