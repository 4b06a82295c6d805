"""`bench/distributed.py` on two ranks of this machine, by gloo, and how the lines of ranks become one."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench"
sys.path.insert(0, str(BENCH))

import comparison  # noqa: E402
import distributed  # noqa: E402
import train  # noqa: E402
from measure import Job  # noqa: E402
from plan import Plan  # noqa: E402

SCRIPT = str(BENCH / "distributed.py")
JOB = Job("ddp", "xseg", "round")
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")


def rank(number: int, **more: Any) -> dict[str, Any]:
    line = {"rank": number, "completed": True, "per_second": 100.0 - number, "losses": ["0x1p+0"], "retries": 1}
    return {
        **line,
        "peak_requested": 1000 + number,
        "peak_reserved": 1100 - number,
        "host_waits": number,
        "seconds": 9.0 + number,
        **more,
    }


def test_one_line_for_all_ranks() -> None:
    line = comparison.together(JOB, [rank(0), rank(1)], 2)
    assert line["completed"] and not line["hang"] and "error" not in line
    assert (line["peak_requested"], line["peak_reserved"], line["retries"], line["host_waits"]) == (1001, 1100, 2, 1)
    assert line["seconds"] == 10.0 and line["driver_nanos"] is None
    assert line["per_second"] == 99.0 and line["losses"] == ["0x1p+0"] and "conf" not in line
    ours = comparison.together(JOB, [rank(0, conf="handles:small"), rank(1, conf="handles:small")], 2)
    assert ours["conf"] == "handles:small"


def test_a_step_is_done_when_its_slowest_rank_is() -> None:
    line = comparison.together(JOB, [rank(0, step_ms=[5.0, 9.0]), rank(1, step_ms=[7.0, 8.0])], 2)
    assert line["step_ms"] == [7.0, 9.0]
    assert comparison.together(JOB, [rank(0, step_ms=[5.0, 9.0]), rank(1)], 2)["step_ms"] == []


def test_exact_runs_have_deterministic_kernels() -> None:
    args = distributed.arguments().parse_args(["--compare", "--exact-runs", "1"])
    exact = Job("fsdp2+registered", "xseg", "exact", steps=20, deterministic=True)
    command = comparison.words(exact, args)
    assert "--deterministic" in command and "--register" in command
    assert command[command.index("--kind") + 1] == "fsdp2" and command[command.index("--steps") + 1] == "20"
    assert "--deterministic" not in comparison.words(JOB, args)
    ranks = distributed.arguments().parse_args(command[command.index("--kind") :])
    assert ranks.deterministic and ranks.register and ranks.kind == "fsdp2"


def test_ranks_that_share_gpus_say_so() -> None:
    args = distributed.arguments().parse_args(["--compare", "--share"])
    command = comparison.words(Job("fsdp2+shared", "xseg", "round"), args)
    ranks = distributed.arguments().parse_args(command[command.index("--kind") :])
    assert ranks.share and not ranks.register and ranks.kind == "fsdp2"
    assert "--share" not in comparison.words(JOB, args)


def test_more_ranks_than_gpus_are_told_of_sharing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(distributed, "gpus_here", lambda: 1)
    monkeypatch.setattr(distributed, "lacks", lambda *_: False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert distributed.rank_main(distributed.arguments().parse_args([])) == 2
    assert "2 ranks on this host, but 1 GPU," in capsys.readouterr().err


def test_nothing_is_registered_where_ranks_share_gpus() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--share", "--register"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "--register is for NCCL" in done.stderr


def test_probes_are_multiples_of_what_native_requested(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = distributed.arguments().parse_args(["--probes", "1.005x,1.01", "--probe-steps", "3"])
    known = {
        "run": "ddp",
        "allocator": "native",
        "kind": "round",
        "limit": 0,
        "completed": True,
        "peak_requested": 1000,
    }
    plan = Plan(least=("xseg", "expandable"), probes=args.probes, probe_steps=args.probe_steps)
    jobs = comparison.all_probes([known], ["ddp"], plan)
    assert [(job.allocator, job.limit, job.steps) for job in jobs] == [
        ("xseg", 1005, 3),
        ("expandable", 1005, 3),
        ("xseg", 1010, 3),
        ("expandable", 1010, 3),
    ]
    tried = {**known, "allocator": "xseg", "kind": "probe", "limit": 1005}
    assert [job.limit for job in comparison.all_probes([known, tried], ["ddp"], plan)] == [1005, 1010, 1010]
    with pytest.raises(SystemExit) as ended:
        comparison.all_probes([known], ["fsdp2"], plan)
    assert ended.value.code == 2 and "no run of fsdp2 on native memory" in capsys.readouterr().err
    for words in (["--probes", "much"], ["--probes", "1.01x", "--least", "none"], ["--kinds", "ddp,tp"]):
        with pytest.raises(SystemExit):
            distributed.arguments().parse_args(words)
    monkeypatch.setattr(comparison, "launch", lambda jobs, args: [{"limit": job.limit} for job in jobs])
    assert sorted(line["limit"] for line in comparison.at_once(jobs, args)) == [1005, 1005, 1010, 1010]


def test_a_rank_that_failed_is_named_before_those_that_waited_for_it() -> None:
    hung = rank(0, completed=False, hang=True, error="no step within 60 s after step 10")
    failed = rank(1, completed=False, error="CUDA out of memory.")
    line = comparison.together(JOB, [hung, failed], 2)
    assert not line["completed"] and line["hang"] and line["error"] == "rank 1: CUDA out of memory."
    missing = comparison.together(JOB, [rank(0)], 2)
    assert not missing["completed"] and missing["error"] == "1 of 2 ranks gave a line"


def compare(monkeypatch: pytest.MonkeyPatch, out: Path, ending: dict[str, Any], *words: str) -> int:
    """The status of a comparison whose runs all end alike; nothing is run."""
    monkeypatch.setattr(comparison, "lacks", lambda *_: False)
    line = {"wall": 1.0, "peak_requested": 1000, "peak_reserved": 1100, "steps": 6}
    monkeypatch.setattr(comparison, "launch", lambda jobs, args: [{**line, **asdict(job), **ending} for job in jobs])
    return comparison.main(distributed.arguments().parse_args(["--compare", "--small", "--out", str(out), *words]))


def test_long_lines_of_ranks_stay_whole() -> None:
    code = f"import sys; sys.path.insert(0, {str(Path(SCRIPT).parent)!r}); import pace; [pace.say({{'rank': int(sys.argv[1]), 'losses': ['x' * 20] * 9000}}) for _ in range(5)]"
    reading, writing = os.pipe()
    ranks = [subprocess.Popen([sys.executable, "-c", code, str(rank)], stdout=writing) for rank in range(6)]
    os.close(writing)
    with open(reading) as output:
        lines = [json.loads(text) for text in output]
    assert [rank.wait() for rank in ranks] == [0] * 6
    assert sorted(line["rank"] for line in lines) == sorted([*range(6)] * 5)
    assert all(len(line["losses"]) == 9000 for line in lines)


def test_the_status_says_whether_anything_completed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = {"completed": False, "error": "exit status 1: no such file"}
    out = tmp_path / "lines.jsonl"
    assert compare(monkeypatch, out, failed) == 1
    said = capsys.readouterr()
    assert "no run completed" in said.err and "no such file" in said.out.split("What did not complete")[1]
    # What an earlier visit did not do says nothing of this one.
    assert compare(monkeypatch, out, {"completed": True, "per_second": 5.0, "steps": 40, "wall": 1.0}) == 0
    # Nothing is left to do.
    assert compare(monkeypatch, out, failed) == 0
    assert compare(monkeypatch, out, failed, "--minutes", "0.001") == 0
    # Not in this time, whether or not there were runs before.
    capsys.readouterr()
    assert compare(monkeypatch, tmp_path / "late.jsonl", failed, "--minutes", "0.001") == 2
    said = capsys.readouterr()
    assert "rounds not finished" in said.err and "no run was begun: --minutes is too short" in said.err
    assert "# Training runs" not in said.out, "there is nothing to report on"
    with pytest.raises(SystemExit) as ended:
        comparison.main(distributed.arguments().parse_args(["--summary", str(tmp_path / "late.jsonl")]))
    assert ended.value.code == 2 and "these files hold no runs" in capsys.readouterr().err
    assert compare(monkeypatch, out, failed, "--repeat", "9", "--minutes", "0.001") == 2
    assert "# Training runs" in capsys.readouterr().out
    # Time for some, not for all.
    slow = {"completed": True, "per_second": 5.0, "steps": 40, "wall": 90.0}
    assert compare(monkeypatch, tmp_path / "some.jsonl", slow, "--turn", "0", "--repeat", "9", "--minutes", "1.2") == 0
    assert "rounds not finished" in capsys.readouterr().err
    assert compare(monkeypatch, tmp_path / "none.jsonl", failed, "--repeat", "0") == 2
    assert "need a run on native memory first" in capsys.readouterr().err
    # That a limit is too little is what probes are there to find.
    words = ("--least", "xseg", "--probes")
    assert compare(monkeypatch, out, {"completed": False, "error": "CUDA out of memory."}, *words, "0.9x") == 0
    assert compare(monkeypatch, out, {"completed": False, "error": "no CUDA device"}, *words, "0.8x") == 1


def test_what_is_missing_is_named_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    gone = {"torch", "transformers", "xseg"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in gone else find_spec(name))
    out = tmp_path / "lines.jsonl"
    for program, words, missing in (
        (distributed, ["--compare", "--out", str(out)], "torch and xseg"),
        (distributed, ["--compare", "--repeat", "0", "--least", "expandable", "--out", str(out)], "torch"),
        (distributed, ["--allocator", "xseg"], "torch and xseg"),
        (distributed, [], "torch"),
        (train, ["--out", str(out)], "torch, transformers and xseg"),
        (train, ["--stages", "others", "--out", str(out)], "torch and transformers"),
        (train, ["--device", "cpu", "--out", str(out)], "torch and transformers"),
    ):
        name = f"{program.__name__}.py"
        monkeypatch.setattr(sys, "argv", [name, *words])
        assert program.main() == 2 and not out.exists()
        said = capsys.readouterr()
        assert (said.out, said.err) == ("", f"{name} needs {missing}, which this Python does not have\n")


@needs_torch
def test_two_ranks_train_alike_in_both_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--small", "--steps", "6", "--warmup", "2", "--commit", "abc1234"]
    args = distributed.arguments().parse_args(words)
    args.width, args.layers, args.vocabulary, args.batch, args.length = distributed.SMALL
    lines = [line for kind in distributed.KINDS for line in comparison.launch([Job(kind, "native", "round")], args)]
    assert all(line["completed"] and line["world"] == 2 and line["steps"] == 6 for line in lines), lines
    ddp, fsdp = ([float.fromhex(loss) for loss in line["losses"]] for line in lines)
    assert len(ddp) == 8 and ddp == pytest.approx(fsdp, rel=1e-3)
    out = tmp_path / "lines.jsonl"
    out.write_text("".join(json.dumps({**line, "visit": "one"}) + "\n" for line in lines))
    comparison.main(distributed.arguments().parse_args([*words, "--summary", str(out)]))
    shown = capsys.readouterr().out
    assert "| ddp | native |" in shown and "| fsdp2 | native |" in shown


@needs_torch
def test_ranks_take_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--compare",
        "--small",
        "--steps",
        "7",
        "--warmup",
        "2",
        "--kinds",
        "fsdp2",
        "--others",
        "",
        "--limited",
        "",
        "--turn",
        "0.05",
    ]
    out = tmp_path / "lines.jsonl"
    assert comparison.main(distributed.arguments().parse_args([*words, "--out", str(out)])) == 0, capsys.readouterr()
    about, alone, native, ours = map(json.loads, out.read_text().splitlines())
    assert about["kind"] == "about" and (alone["kind"], alone["turn"]) == ("other", 0)
    for line in (native, ours):
        assert line["completed"] and line["kind"] == "round" and line["turn"] > 0 and line["world"] == 2, line
        # The same training, in however many turns.
        assert line["losses"] == alone["losses"] and len(line["losses"]) == 9
    assert native["allocator"] == "native" and ours["allocator"] == "xseg"


@needs_torch
def test_a_rank_that_waits_for_another_says_that_it_hangs() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = {**os.environ, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, SCRIPT, "--small", "--hang", "8"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    line = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 3 and line["hang"] and not line["completed"] and "after step 0" in line["error"]
    assert "init_process_group" in done.stderr
