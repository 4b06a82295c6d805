"""The programs of `bench/` as far as they need no GPU: what is run next, the search for the least limit, the report."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench"
sys.path.insert(0, str(BENCH))

import launching  # noqa: E402
import lines as lines_of  # noqa: E402
import measure  # noqa: E402
import plan as planning  # noqa: E402
import summary  # noqa: E402
import train  # noqa: E402
import visit  # noqa: E402
import workloads  # noqa: E402
from measure import Job  # noqa: E402
from plan import Plan  # noqa: E402

PEAK = 10 << 30
# The least multiple of peak requested in which the pretended allocators complete.
NEEDS = {"native": 1.3, "expandable": 1.0121, "xseg": 1.0041, "async": 1.1}


def pretend(job: Job, slot: int = 0) -> dict[str, Any]:
    """A process that completes where its limit allows, at a speed that falls from run to run as a machine's does."""
    need = NEEDS[job.allocator]
    completed = not job.limit or job.limit >= PEAK * need
    pretend.clock += 10  # type: ignore[attr-defined]
    line: dict[str, Any] = {**asdict(job), "completed": completed, "wall": 10.0, "peak_reserved": int(PEAK * need)}
    line["peak_requested"] = None if job.allocator == "async" else PEAK
    line.update(retries=0, steps=job.steps or 200, seconds=20.0)
    if completed:
        line["per_second"] = 1000.0 * (0.98 if job.allocator == "xseg" else 1.0) - pretend.clock / 100  # type: ignore[attr-defined]
        line["losses"] = [(5.0 - at / 10).hex() for at in range(20)]
    else:
        line["error"] = "CUDA out of memory."
    return line


def work(
    lines: list[dict[str, Any]], name: str, runs: list[str], start: Callable[[Job, int], Any] = pretend, **more: Any
) -> list[tuple[str, str]]:
    pretend.clock = 0  # type: ignore[attr-defined]
    slots = more.pop("slots", 1)

    def all_of(jobs: Sequence[Job], slot: int) -> list[dict[str, Any]]:
        return [start(job, slot) for job in jobs]

    return visit.Visit(name, lines, lambda line: None, all_of, more.pop("plan", Plan()), runs, **more).go(slots)


def kinds(lines: list[dict[str, Any]], kind: str) -> list[tuple[str, bool]]:
    return [(line["allocator"], bool(line["limit"])) for line in lines if line["kind"] == kind]


def test_lengths_are_the_same_everywhere_and_the_greatest_comes_first() -> None:
    lengths = [workloads.length_of(at, 256, 4096) for at in range(100)]
    assert lengths == [workloads.length_of(at, 256, 4096) for at in range(100)]
    assert lengths[1] == 4096 == max(lengths) and min(lengths) >= 256 and len(set(lengths)) > 90


def test_what_is_never_enough_is_not_what_exact_runs_needed() -> None:
    line = {"run": "ddp", "allocator": "native", "completed": True, "limit": 0}
    lines = [
        {**line, "kind": "round", "peak_requested": 1000},
        {**line, "kind": "probe", "limit": 990, "peak_requested": 980},
    ]
    assert planning.never_enough(lines, "ddp") == 980
    # On smaller batches.
    assert planning.never_enough([*lines, {**line, "kind": "exact", "peak_requested": 300}], "ddp") == 980


def test_rounds_alternate_and_take_natives_steps_and_peak() -> None:
    lines: list[dict[str, Any]] = []
    assert work(lines, "first", ["gpt2"], plan=Plan(stages=["rounds"], repeat=2)) == []
    forth = [("native", False), ("xseg", False), ("xseg", True)]
    assert kinds(lines, "round") == forth + forth[::-1]
    assert [line["steps"] for line in lines] == [200] * 6
    assert {line["limit"] for line in lines} == {0, math.ceil(PEAK * 1.02)}


def test_a_turn_has_as_many_steps_as_native_trains_in_its_time() -> None:
    native = pretend(Job("gpt2", "native", "other"))
    for turn, steps in ((1, 10), (0.01, 1), (30, 300)):
        assert planning.steps_of_turn([native], "gpt2", turn) == steps
    assert (
        planning.steps_of_turn([{**native, "seconds": None}], "gpt2", 1) == planning.steps_of_turn([], "gpt2", 1) == 1
    )


def test_processes_that_take_turns_begin_a_round_together() -> None:
    plan = Plan(stages=["rounds"], repeat=2, turn=1.5)
    lines: list[dict[str, Any]] = []
    begun: list[list[Job]] = []

    def start(jobs: Sequence[Job], slot: int) -> list[dict[str, Any]]:
        begun.append(list(jobs))
        return [pretend(job) for job in jobs]

    def go(name: str, lines: list[dict[str, Any]], start: Any) -> None:
        assert visit.Visit(name, lines, lambda line: None, start, plan, ["gpt2"]).go(1) == []

    pretend.clock = 0  # type: ignore[attr-defined]
    go("one", lines, start)
    # Native by itself tells how many steps all take, and what the limit is.
    assert [len(jobs) for jobs in begun] == [1, 3, 3] and (begun[0][0].allocator, begun[0][0].kind) == (
        "native",
        "other",
    )
    forth = [("native", False), ("xseg", False), ("xseg", True)]
    assert kinds(lines, "round") == forth + forth[::-1]
    assert {(job.steps, job.turn) for jobs in begun[1:] for job in jobs} == {(200, 15)}
    assert {job.limit for jobs in begun for job in jobs} == {0, math.ceil(PEAK * 1.02)}
    assert len(summary.ratios(lines, "gpt2", "xseg", True, plan)) == 2
    # An earlier visit's native will do, and nothing is run that is there.
    begun.clear()
    go("two", [{**pretend(Job("gpt2", "native", "round")), "visit": "none"}], start)
    assert [len(jobs) for jobs in begun] == [3, 3]
    begun.clear()
    go("three", lines, start)
    assert begun == []

    # Where none can be started, each has a line that says so, and native is tried once a visit.
    def fails(jobs: Sequence[Job], slot: int) -> list[dict[str, Any]]:
        raise OSError("no process")

    for before, count in (([], 1), ([{**pretend(Job("gpt2", "native", "round")), "visit": "none"}], 7)):
        lines = list(before)
        go("four", lines, fails)
        assert len(lines) == count and all(line["error"] == "OSError: no process" for line in lines[len(before) :])


@pytest.mark.parametrize("need", [1.0001, 1.0025, 1.0026, 1.0074, 1.0076, 1.02, 1.0333, 1.2, 1.72])
@pytest.mark.parametrize("allocator", ["xseg", "expandable"])
def test_the_search_finds_the_least_limit_in_few_probes(
    need: float, allocator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(NEEDS, allocator, need)
    plan = Plan(stages=["rounds", "others", "least"], repeat=1, least=[allocator], most_probes=20)
    lines: list[dict[str, Any]] = []
    work(lines, "one", ["gpt2"], plan=plan)
    low, high = planning.bounds(lines, "gpt2", allocator, plan.resolution)
    assert high is not None and high - low == 1
    assert 1 + low * plan.resolution < need or low == 0
    assert need <= 1 + high * plan.resolution + 1e-6
    probes = len(kinds(lines, "probe"))
    assert probes <= 2 + 2 * math.log2(max(need - 1, 0.01) / plan.resolution), probes


def test_limits_that_are_named_are_tried_instead_of_a_search() -> None:
    plan = Plan(stages=["rounds", "least"], repeat=1, probes=[1.004, 1.0045])
    lines: list[dict[str, Any]] = []
    work(lines, "one", ["gpt2"], plan=plan)
    tried = [(line["allocator"], line["factor"], line["completed"]) for line in lines if line["kind"] == "probe"]
    assert tried == [
        ("xseg", 1.004, False),
        ("expandable", 1.004, False),
        ("xseg", 1.0045, True),
        ("expandable", 1.0045, False),
    ]
    assert summary.least(lines, "gpt2", "xseg") == "1.0040 to 1.0045"
    # None of them again, but others.
    work(lines, "two", ["gpt2"], plan=replace(plan, probes=[1.0045, 1.013]))
    assert [line["factor"] for line in lines if line["kind"] == "probe"][4:] == [1.013, 1.013]


def test_a_limit_that_did_below_one_that_failed_does_not_count() -> None:
    lines = [pretend(Job("gpt2", "native", "round"))]
    for factor, error in ((1.01, None), (1.015, "CUDA out of memory."), (1.02, None), (1.025, "no end in 180 s")):
        probe = pretend(Job("gpt2", "xseg", "probe", limit=math.ceil(PEAK * factor), factor=factor))
        lines.append({**probe, "completed": error is None, "error": error})
    assert planning.bounds(lines, "gpt2", "xseg", 0.005) == (3, 4)


@pytest.mark.parametrize("named", [[], [1.01]])
def test_a_probe_without_a_result_is_tried_once_a_visit(named: list[float]) -> None:
    lines: list[dict[str, Any]] = [{**pretend(Job("gpt2", "native", "round")), "visit": "none"}]
    plan = Plan(stages=["least"], least=["xseg"], probes=named)

    def crash(job: Job, slot: int) -> dict[str, Any]:
        raise OSError("no process can be started")

    for visits in (1, 2):
        work(lines, f"visit {visits}", ["gpt2"], crash, plan=plan)
        probes = [line for line in lines if line["kind"] == "probe"]
        assert len(probes) == visits and probes[-1]["error"] == "OSError: no process can be started"
    work(lines, "at last", ["gpt2"], plan=plan)
    assert planning.bounds(lines, "gpt2", "xseg", 0.0025)[1] == (4 if named else 2)


def test_the_search_goes_below_natives_peak_where_another_needs_less() -> None:
    lines = whole()
    # Of a run whose memory native takes back late, xseg's clients have less at once.
    lean = {**pretend(Job("gpt2", "xseg", "other")), "peak_requested": int(PEAK * 0.9001), "visit": "v"}
    assert planning.floor_of([*lines, lean], "gpt2", 0.0025) == -40
    probes = [line for line in lines if line["kind"] != "probe"] + [lean]
    assert planning.bounds([line for line in probes if not line.get("limit")], "gpt2", "xseg", 0.0025) == (-40, None)
    job = planning.next_least([line for line in probes if not line.get("limit")], "gpt2", Plan(least=("xseg",)), "v")
    assert job is not None and job.factor == 0.9075


@pytest.mark.parametrize("base", [PEAK, 26_621_596_668, 3_000_000_000])
def test_limits_are_shown_as_the_probes_had_them(base: int) -> None:
    lines = [{**pretend(Job("gpt2", "native", "round")), "peak_requested": base, "peak_reserved": 2 * base}]

    def shown(*probes: tuple[float, bool]) -> str:
        jobs = [(Job("gpt2", "xseg", "probe", limit=math.ceil(base * factor)), done) for factor, done in probes]
        probed = [
            {**pretend(job), "completed": done, "error": None if done else "CUDA out of memory."} for job, done in jobs
        ]
        return summary.least([*lines, *probed], "gpt2", "xseg")

    for at in range(1, 300):
        above, below = 1 + at * 0.0001, 1 + (at - 1) * 0.0001
        assert shown((above, True), (below, False)) == f"{above:.4f}"
    assert shown((1.005, True), (1.0025, False)) == "1.0025 to 1.0050"
    # Rounded to the safe side.
    assert shown((1.00503, True), (1.00257, False)) == "1.0025 to 1.0051"
    assert shown((1.00507, True), (1.00503, False)) == "1.0051"
    assert shown((1.00503, True), (1.00507, False)) == "above 1.0050"


def test_what_takes_turns_is_expected_to_take_as_long_as_one_after_the_other() -> None:
    begun: list[int] = []

    def start(jobs: Sequence[Job], slot: int) -> list[dict[str, Any]]:
        begun.append(len(jobs))
        took = 27.0 if len(jobs) > 1 else 10.0
        lines = [{**pretend(job), "wall": took} for job in jobs]
        pretend.clock += took - 10 * len(jobs)  # type: ignore[attr-defined]
        return lines

    def rounds(deadline: float) -> list[int]:
        pretend.clock, lines = 0, list[dict[str, Any]]()  # type: ignore[attr-defined]
        begun.clear()
        plan = Plan(stages=["rounds"], repeat=2, turn=1)
        clock = lambda: pretend.clock  # type: ignore[attr-defined]  # noqa: E731
        visit.Visit("one", lines, lambda line: None, start, plan, ["gpt2"], deadline, clock).go(1)
        return list(begun)

    # Native is expected to take 60 and takes 10, a round then 30; it takes 27, and so the next is expected to.
    assert rounds(59) == [] and rounds(60) == [1, 3] and rounds(63) == [1, 3] and rounds(64) == [1, 3, 3]


def test_a_visit_that_ends_early_is_gone_on_with() -> None:
    lines: list[dict[str, Any]] = []
    plan = Plan(repeat=3)
    left = work(lines, "first", ["gpt2", "llama"], plan=plan, deadline=75, clock=lambda: pretend.clock)  # type: ignore[attr-defined]
    assert ("gpt2", "rounds") in left and ("llama", "rounds") in left
    # Nothing was started that would have ended later.
    assert 0 < len(lines) <= 9
    assert work(lines, "second", ["gpt2", "llama"], plan=plan) == []
    for run in ("gpt2", "llama"):
        assert len(planning.complete_rounds(lines, run, plan)) == 3
        assert len(planning.of(lines, run, "other")) == 2 and len(planning.of(lines, run, "exact")) == 4
    # A round is of one visit: what was cut off is measured again.
    for visit_name, number in planning.complete_rounds(lines, "gpt2", plan):
        here = [line for line in lines if (line["run"], line["kind"]) == ("gpt2", "round")]
        assert sum((line["visit"], line["round"]) == (visit_name, number) for line in here) == 3
    before = len(lines)
    work(lines, "third", ["gpt2", "llama"], plan=plan)
    assert len(lines) == before


def test_two_gpus_never_share_a_workload() -> None:
    import threading

    at_work: list[str] = []
    both = threading.Barrier(2)
    seen: list[int] = []

    def start(job: Job, slot: int) -> dict[str, Any]:
        assert job.run not in at_work
        at_work.append(job.run)
        if job.kind == "round" and job.round == 1 and job.allocator == "native":
            both.wait(20)
        seen.append(slot)
        line = pretend(job)
        at_work.remove(job.run)
        return line

    lines: list[dict[str, Any]] = []
    assert work(lines, "one", ["gpt2", "llama"], start, slots=2, plan=Plan(repeat=1)) == []
    assert set(seen) == {0, 1} and {line["run"] for line in lines} == {"gpt2", "llama"}


def test_a_workload_whose_native_run_fails_is_left() -> None:
    def start(job: Job, slot: int) -> dict[str, Any]:
        return {**asdict(job), "completed": False, "wall": 1.0, "error": "exit status 1: no such model"}

    lines: list[dict[str, Any]] = []
    assert work(lines, "one", ["gpt2"], start) == [] and len(lines) == 1
    assert "gpt2, native, round, no limit: exit status 1: no such model" in summary.report(lines, Plan())


def whole() -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = [{**visit.about("one", "abc1234", ["python", "train.py"]), "gpus": ["A GPU"] * 2}]
    work(lines, "one", ["gpt2"])
    return lines


def test_the_report_has_every_figure() -> None:
    lines = whole()
    text = summary.report(lines, Plan())
    assert "2 x A GPU" in text and "Commit abc1234" in text and "`python train.py`" in text
    rows = {tuple(row[1:4:1]): row for row in ([cell.strip() for cell in line.split("|")] for line in text.split("\n"))}
    native, ours, held = rows["gpt2", "native", "-"], rows["gpt2", "xseg", "-"], rows["gpt2", "xseg", "1.02x"]
    assert native[4] == "3 of 3" and native[15] == "equal" and native[9] == "10.000"
    assert (
        ours[6].startswith("0.98") and ours[11] == "1.0041" and ours[15] == "equal" and ours[16] == "1.0025 to 1.0050"
    )
    assert held[4] == "3 of 3" and held[6].startswith("0.98")
    assert rows["gpt2", "expandable", "-"][16] == "1.0100 to 1.0121", "without a limit it reserved so much"
    assert "at which 24 steps completed, rounded up" in text
    # How finely was searched, and for how long, is in the lines, not in the command that reports on them.
    assert summary.report(lines, Plan(resolution=0.05, probe_steps=7)) == text
    # What runs once, maybe beside other processes, says nothing of speed.
    assert rows["gpt2", "expandable", "-"][5] == "-" and float(native[5].split()[0]) > 900
    assert "gpt2: 20 steps equal to the last bit" in text
    assert "did not complete" not in text
    # Rounds under a limit are no search for the least, however much they say of it by the way.
    for factor in (1.02, 1.001):
        given = [{**line, "factor": factor, "limit": math.ceil(PEAK * factor)} if line.get("limit") else line for line in lines]  # fmt: skip
        shown = summary.report([line for line in given if line["kind"] != "probe"], Plan())
        cells = [row.split("|")[16].strip() for row in shown.split("\n") if row.startswith("| gpt2")]
        assert len(cells) == 5 and set(cells) == {"-"}
    # An allocator of which only the least memory was searched has its line, too.
    bare = [line for line in lines if line.get("allocator") != "expandable" or line["kind"] == "probe"]
    text = summary.report(bare, Plan())
    found = [row.split("|")[16].strip() for row in text.split("\n") if row.startswith("| gpt2 | expandable")]
    assert found == ["above 1.0100"]


def test_driver_time_is_the_most_of_any_run() -> None:
    lines = [
        {"driver_nanos": 250_000_000, "seconds": 20.0},
        {"driver_nanos": 100_000_000, "seconds": 4.0},
        {"seconds": 9.0},
    ]
    assert summary.in_driver(lines) == "250 ms (2.5 %)" and summary.in_driver(lines[2:]) == "-"


def test_losses_are_held_to_natives_own_spread() -> None:
    def line(*losses: float) -> dict[str, Any]:
        return {"losses": [value.hex() for value in losses]}

    native = [line(5.0, 4.0), line(5.0, 4.004)]
    assert summary.own_spread(native) == pytest.approx(0.001, rel=0.01)
    assert summary.beside(native[:1], native[:1]) == "equal"
    assert summary.beside(native, [line(5.0, 4.002), line(5.0, 4.006)]) == "5.0e-04 apart, native's 1.0e-03"
    assert summary.beside([], native) == "-"


def test_deterministic_losses_are_compared_to_the_bit_and_native_with_itself() -> None:
    def lines(*found: tuple[str, float]) -> list[dict[str, Any]]:
        values = ((name, [(5.0).hex(), loss.hex()]) for name, loss in found)
        return [{"run": "r", "kind": "exact", "allocator": name, "losses": losses} for name, losses in values]

    equal = lines(("native", 4.0), ("native", 4.0), ("xseg", 4.0), ("xseg", 4.0))
    assert summary.exact(equal, "r") == "r: 2 steps equal to the last bit, 2 runs of xseg and 2 of native"
    ours = lines(("native", 4.0), ("native", 4.0), ("xseg", 4.0), ("xseg", 4.004))
    apart = "r: equal up to step 1, then 1.0e-03 apart; native's own 2 are equal, 0.0e+00 apart"
    assert summary.exact(ours, "r") == apart
    all_apart = lines(("native", 4.0), ("native", 4.008), ("xseg", 4.004))
    apart = "r: equal up to step 1, then 1.0e-03 apart; native's own from step 1 on, 2.0e-03 apart"
    assert summary.exact(all_apart, "r") == apart
    assert summary.exact(lines(("native", 4.0)), "r") is None


def test_exact_runs_that_failed_are_tried_again_but_not_for_ever() -> None:
    lines = whole()
    exact = {"run": "gpt2", "kind": "exact", "visit": "v", "wall": 1.0}
    lines = [line for line in lines if line["kind"] != "exact"]
    for allocator, completed, count in (("native", True, 2), ("xseg", False, 4)):
        lines += [{**exact, "allocator": allocator, "completed": completed}] * count
    job = planning.next_job(lines, "gpt2", "losses", Plan(), "v")
    assert job is not None and (job.allocator, job.kind) == ("xseg", "exact")
    lines.append({**exact, "allocator": "xseg", "completed": False})
    assert planning.next_job(lines, "gpt2", "losses", Plan(), "v") is None


def test_each_size_of_images_comes_once_before_the_clock_starts() -> None:
    run = workloads.ConvNext.__new__(workloads.ConvNext)
    run.pixels, run.first_steps = (5, 12), 8
    first = [run.size(at) for at in range(8)]
    assert sorted(first) == [160, 192, 224, 256, 288, 320, 352, 384] and first[1] == 384 and first != sorted(first)
    assert first == [run.size(at) for at in range(8)]
    assert all(160 <= run.size(at) <= 384 for at in range(8, 60))


def timed(number: int, allocator: str, limit: int, *steps: float) -> dict[str, Any]:
    """A line of a round with what each step took."""
    where = {"run": "r", "kind": "round", "visit": "v", "round": number}
    return {**where, "allocator": allocator, "limit": limit, "step_ms": list(steps), "completed": True}


def test_best_steps_leave_out_what_slows_a_run_from_outside() -> None:
    lines = [
        *(timed(1, "native", 0, 10.0, 40.0), timed(1, "xseg", 0, 11.0, 20.0), timed(1, "xseg", 7, 30.0, 20.0)),
        *(timed(2, "native", 0, 30.0, 20.0), timed(2, "xseg", 0, 99.0, 19.0), timed(2, "xseg", 7, 12.0, 28.0)),
        # Of a round that was cut off nothing counts.
        timed(3, "xseg", 0, 1.0, 1.0),
    ]
    assert summary.best_steps(lines, "r", "native", False, Plan()) == 1.0
    assert summary.best_steps(lines, "r", "xseg", False, Plan()) == pytest.approx(30 / 30)
    assert summary.best_steps(lines, "r", "xseg", True, Plan()) == pytest.approx(30 / 32)
    assert summary.best_steps([{**one, "step_ms": []} for one in lines], "r", "xseg", True, Plan()) is None
    # Another visit may have trained on other steps: its best are its own.
    later = [{**one, "visit": "w", "step_ms": [10 * at for at in one["step_ms"]]} for one in lines[:3]]
    assert summary.best_steps(lines + later, "r", "xseg", False, Plan()) == pytest.approx((30 / 30 + 50 / 31) / 2)


def test_steady_steps_leave_out_those_that_try_kernels() -> None:
    lines = [
        timed(1, "native", 0, 10.0, 900.0, 20.0, 50.0),
        timed(1, "xseg", 0, 10.0, 2000.0, 20.0, 70.0),
        timed(1, "xseg", 7, 10.0, 100.0, 10.0, 20.0),
    ]
    assert summary.steady(lines, "r", "xseg", False, Plan()) == pytest.approx([80 / 100])
    assert summary.steady(lines, "r", "xseg", True, Plan()) == pytest.approx([80 / 40])
    assert summary.steady(lines[:2], "r", "xseg", False, Plan()) == [], "no whole round"


def test_lines_are_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = whole()
    whole_file, cut = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    whole_file.write_text("".join(json.dumps(line) + "\n" for line in lines[:5]))
    cut.write_text("".join(json.dumps(line) + "\n" for line in lines[5:]) + '{"run": "gp')
    assert lines_of.read([whole_file, cut]) == lines
    with pytest.raises(SystemExit) as ended:
        lines_of.read([tmp_path / "nothing.jsonl"])
    assert ended.value.code == 2
    assert f"cannot read {tmp_path / 'nothing.jsonl'}: No such file" in capsys.readouterr().err
    assert visit.earlier([whole_file], cut) == lines and visit.earlier([whole_file, cut], cut) == lines
    made = tmp_path / "made.jsonl"
    made.touch()
    assert visit.earlier([], made) == visit.earlier([], tmp_path / "none.jsonl") == []
    # What was cut off does not take the next visit's first line with it.
    with visit.opened(cut) as file:
        file.write(json.dumps(lines[0]) + "\n")
    assert lines_of.read([cut])[-1] == lines[0]
    cut.write_text("".join(json.dumps(line) + "\n" for line in lines[5:]) + '{"run": "gp')
    command = [sys.executable, str(BENCH / "train.py"), "--summary", str(whole_file), str(cut), "--commit", "def5678"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "Commit abc1234" in done.stdout and "b.jsonl" in done.stderr
    # Of a visit that did not say its own.
    unsaid = [{**lines[0], "commit": ""}, *lines[1:]]
    assert "Commit def5678" in summary.report(unsaid, Plan(), "def5678")


@pytest.mark.parametrize(
    "content", [b"", b"5\n", b"[1, 2]\nnull\n", b'{\n "run": "gpt2"\n}\n', b"# A report\n\n| a |\n", b"\xff\x00\n\xfe", b"[" * 99999]
)  # fmt: skip
def test_a_file_without_lines_of_runs_is_refused(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, wrong, other = (tmp_path / name for name in ("good.jsonl", "wrong", "other"))
    good.write_text("".join(json.dumps(line) + "\n" for line in whole()))
    wrong.write_bytes(content)
    other.write_bytes(content)
    with pytest.raises(SystemExit) as ended:
        lines_of.read([wrong, good, other])
    said = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and [text.split(";")[0] for text in said] == [
        f"{wrong} holds no lines of runs",
        f"{other} holds no lines of runs",
    ]
    for program in ("train.py", "distributed.py"):
        command = [sys.executable, str(BENCH / program), "--summary", str(wrong)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (2, "") and done.stderr.splitlines() == said[:1]
    # A file that is partly good says so once.
    good.write_bytes(good.read_bytes() + content)
    assert len(lines_of.read([good])) == len(whole())
    left = sum(bool(text.strip()) for text in content.decode(errors="replace").splitlines())
    count = len(whole()) + left
    expected = [f"{good}: {left} of {count} lines are no lines of runs and are left out"] if left else []
    assert capsys.readouterr().err.splitlines() == expected


def test_files_that_cannot_be_written_are_named_before_anything_runs(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps(line) + "\n" for line in whole()))
    out = tmp_path / "out.jsonl"
    nowhere = "/nonexistent/x"
    for words in (
        ["train.py", "--summary", str(lines), "--report", nowhere],
        ["train.py", "--out", str(out), "--report", nowhere],
        ["train.py", "--out", nowhere],
        ["distributed.py", "--compare", "--out", nowhere],
    ):
        command = [sys.executable, str(BENCH / words[0]), *words[1:]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (2, "") and not out.exists()
        assert done.stderr == f"cannot write {nowhere}: No such file or directory; name a file that can be written\n"
    report = tmp_path / "report.md"
    command = [sys.executable, str(BENCH / "train.py"), "--summary", str(lines), "--report", str(report)]
    assert subprocess.run(command, timeout=60).returncode == 0 and report.read_text().startswith("# Training runs")


@pytest.mark.parametrize("program", ["train", "distributed"])
def test_numbers_that_make_no_sense_are_refused(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(program)
    wrong = ["--repeat -1", "--exact-runs -1", "--warmup -1", "--probe-steps 0", "--resolution 0", "--minutes -1", "--timeout nan", "--repeat few"]  # fmt: skip
    if program == "distributed":
        wrong += ["--ranks 0", "--steps 0", "--bytes -1", "--hang 0", "--width 0", "--batch 0", "--layers -2", "--length 1"]  # fmt: skip
    else:
        wrong += ["--seconds 0", "--losses -1"]
    for words in wrong:
        with pytest.raises(SystemExit) as ended:
            module.arguments().parse_args(words.split())
        assert ended.value.code == 2 and f"argument {words.split()[0]}: " in capsys.readouterr().err
    assert module.arguments().parse_args(["--repeat", "0", "--minutes", "7.9"]).minutes == 7.9


@pytest.mark.parametrize(
    "field, value",
    [
        ("run", [1]), ("allocator", None), ("visit", 3), ("round", -1), ("limit", 1e999), ("limit", True), ("factor", None), ("completed", 1),
        ("wall", "x"), ("steps", 0), ("per_second", None), ("per_second", 0), ("seconds", float("nan")), ("peak_requested", 1.5),
        ("peak_reserved", 10**400), ("peak_reserved", "x"), ("step_ms", [0.0]), ("step_ms", 3), ("losses", ["zz"]), ("losses", [1.0]),
        ("losses", "nan"), ("retries", [1]), ("host_waits", -1), ("driver_nanos", "1"), ("error", {}), ("conf", 1),
    ],
)  # fmt: skip
def test_lines_with_wrong_values_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str, value: Any
) -> None:
    lines = whole()
    path = tmp_path / "lines.jsonl"
    good = next(line for line in lines if line.get("kind") == "round" and line["limit"])
    wrong = {**good, field: value}
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, wrong]))
    assert lines_of.read([path]) == lines
    assert f"1 of {len(lines) + 1} lines are no lines of runs" in capsys.readouterr().err
    # Losses that are no numbers any more are the run's own.
    assert lines_of.is_line({**good, "losses": ["nan", "-inf", "0x1p0"]})


@pytest.mark.parametrize("field, value", [("gpus", 3), ("gpus", [1]), ("versions", 1), ("versions", {"torch": 2}), ("cores", "x")])  # fmt: skip
def test_lines_about_a_visit_are_checked(field: str, value: Any) -> None:
    line = visit.about("one", "abc", [])
    assert lines_of.is_line(line) and not lines_of.is_line({**line, field: value})


def test_a_report_without_a_gpu_says_what_its_figures_are() -> None:
    about = visit.about("one", "abc", [])
    lines = [{**line, "visit": "one"} for line in whole() if line.get("kind") != "about"]
    assert "no figures of allocators" in summary.report([{**about, "gpus": []}, *lines], Plan())
    assert "no figures of allocators" not in summary.report([{**about, "gpus": ["H200"]}, *lines], Plan())


def test_a_card_that_others_have_filled_is_no_limit_that_is_too_little() -> None:
    lines = [pretend(Job("gpt2", "native", "round"))]
    held = {**pretend(Job("gpt2", "xseg", "round", limit=PEAK, factor=1.0)), "completed": False, "visit": "one"}
    assert planning.bounds([*lines, held], "gpt2", "xseg", 0.01)[0] == 0 and planning.short(held)
    full = {**held, "limit": 2 * PEAK, "card_full": True}
    assert planning.bounds([*lines, full], "gpt2", "xseg", 0.01) == (0, None) and not planning.short(full)
    assert "the card was full" in summary.failures([full])[0] and summary.failures([held]) == []


def test_options_that_need_a_gpu_or_the_whole_card_do_not_keep_a_report_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in whole()))

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        return train.main(), capsys.readouterr().err

    for words, why in ((["--limited", "async"], "--turn 0"), (["--device", "cpu", "--record", "x"], "for GPUs")):
        status, said = run("--out", str(tmp_path / "new.jsonl"), *words)
        assert status == 2 and why in said
    assert run("--summary", str(path), "--limited", "async") == (0, "")


def test_visits_of_the_same_second_stay_apart(tmp_path: Path) -> None:
    def a_visit(speed: float) -> list[dict[str, Any]]:
        lines: list[dict[str, Any]] = [{**visit.about("one", "", []), "gpus": ["A GPU"]}]
        work(lines, "one", ["gpt2"], plan=Plan(stages=["rounds"], repeat=1))
        return [{**line, "per_second": speed} if line.get("allocator") == "xseg" else line for line in lines]

    first, second = a_visit(500.0), a_visit(800.0)
    other = [{**line, "visit": "two"} for line in second]
    files = [tmp_path / name for name in ("a.jsonl", "b.jsonl", "both.jsonl", "other.jsonl")]
    for path, lines in zip(files, (first, second, [*first, *second], other)):
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    expected = [*first, *({**line, "visit": "one (2)"} for line in second)]
    assert lines_of.read(files[:2]) == lines_of.read(files[2:3]) == expected
    # Each is measured by its own native, as where their names differ.
    apart = summary.ratios([*first, *other], "gpt2", "xseg", False, Plan())
    assert summary.ratios(expected, "gpt2", "xseg", False, Plan()) == apart and len(apart) == 2
    names = [line["visit"] for line in lines_of.read([*files, files[3]]) if line["kind"] == "about"]
    assert names == ["one", "one (2)", "one (3)", "one (4)", "two", "two (2)"]
    # A visit that goes on takes no name that was there.
    now = visit.begin([])
    later = visit.begin([{"visit": now}, {"visit": f"{now} (2)"}])
    assert later.startswith(now[:10]) and later not in (now, f"{now} (2)")


def test_processes_get_their_allocator_and_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    job = Job("gpt2", "expandable", "other")
    env = launching.environment(job, "1")
    assert env["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True" and env["CUDA_VISIBLE_DEVICES"] == "1"
    assert "PYTORCH_ALLOC_CONF" not in env
    assert "PYTORCH_CUDA_ALLOC_CONF" not in launching.environment(replace(job, allocator="xseg"), None)


def test_lines_say_which_policy_xseg_had(monkeypatch: pytest.MonkeyPatch) -> None:
    import xseg
    from xseg import _torch

    def install() -> str:
        monkeypatch.setenv("XSEG_CONF", _torch._with_small_handles(" joins:off , slack:2%"))
        return "full"

    monkeypatch.setattr(xseg, "install", install)
    found = measure.installed()
    assert found["mode"] == "full" and set(found["conf"].split(",")) == {"joins:off", "slack:2%", "handles:small"}
    monkeypatch.setattr(xseg, "install", lambda: "off")
    monkeypatch.setenv("XSEG_CONF", "off")
    assert measure.installed() == {"mode": "off", "conf": "off"}


@pytest.mark.skipif(
    importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None,
    reason="PyTorch and transformers are not installed",
)
@pytest.mark.parametrize("run", list(workloads.RUNS))
def test_workloads_train_and_repeat(run: str) -> None:
    import torch

    def losses() -> list[float]:
        made = workloads.RUNS[run](torch, "cpu", True)
        return [made.step(at)[0].item() for at in range(4)]

    first = losses()
    assert first == losses() and all(math.isfinite(loss) for loss in first) and len(set(first)) > 1
