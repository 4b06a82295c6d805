"""What is to be run next, worked out from the lines that are there: so a visit goes on where the last one ended."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lines import Line
from measure import Job

STAGES = ("rounds", "others", "losses", "least")


@dataclass(frozen=True)
class Plan:
    """What each workload gets."""

    stages: Sequence[str] = STAGES
    # Rounds of native, xseg, and xseg under the limit.
    repeat: int = 3
    # The limit, as a multiple of peak requested.
    limit: float = 1.02
    # Seconds of a turn of a round's processes; 0: they have the GPU one after the other.
    turn: float = 0
    # Under the limit in every round.
    limited: Sequence[str] = ("xseg",)
    # Run for their peaks alone, this often.
    others: Sequence[str] = ("expandable", "async")
    other_rounds: int = 1
    # Whose least memory is searched, to this share of peak requested, with this many steps after the warm-up.
    least: Sequence[str] = ("xseg", "expandable")
    resolution: float = 0.0025
    # Tried instead of searching, as multiples of peak requested.
    probes: Sequence[float] = ()
    probe_steps: int = 24
    most_probes: int = 8
    # Steps with deterministic kernels, and runs of each allocator: only of two does one see whether they are.
    exact_steps: int = 20
    exact_runs: int = 2

    def allocators(self) -> set[str]:
        """Those of which any stage runs one."""
        found = {
            "rounds": ("native", "xseg", *self.limited) if self.repeat else (),
            "others": self.others if self.other_rounds else (),
            "losses": ("native", "xseg") if self.exact_runs else (),
            "least": self.least,
        }
        return {name for stage in self.stages for name in found[stage]}


def of(lines: Iterable[Line], run: str, kind: str, allocator: str | None = None) -> list[Line]:
    """The lines of a workload of one kind."""
    return [
        line
        for line in lines
        if line.get("run") == run and line.get("kind") == kind and allocator in (None, line.get("allocator"))
    ]


def short(line: Line) -> bool:
    """Did the run end because its limit was too little?"""
    error = (line.get("error") or "").lower()
    # As PyTorch says it, and as cuBLAS and cuDNN do. Where others had the card's memory, the limit may have been enough.
    return (
        bool(line.get("limit")) and not line.get("card_full") and ("out of memory" in error or "alloc_failed" in error)
    )


def has_result(line: Line) -> bool:
    """Did the run end as runs do, and not in another error or none at all? That a limit is too little is a result, too."""
    return bool(line["completed"]) or short(line)


def plenty(lines: Iterable[Line], run: str, allocator: str) -> list[Line]:
    """Completed runs with all of the card's memory and the kernels that programs get."""
    found = of(lines, run, "round", allocator) + of(lines, run, "other", allocator)
    return [line for line in found if line["completed"] and not line["limit"]]


def peak(lines: Iterable[Line], run: str) -> int:
    """Most bytes that native's clients had at once; 0 before its first run."""
    return max((line.get("peak_requested") or 0 for line in plenty(lines, run, "native")), default=0)


def never_enough(lines: Iterable[Line], run: str) -> int:
    """The least peak requested of any run that completed, in bytes: blocks take up more than is requested, so that this is never
    enough as a limit. It can be less than native's, which takes memory back from other streams later."""
    lines = list(lines)
    # Those with deterministic kernels may train on less in a step.
    mine = [line for line in lines if line.get("run") == run and line.get("completed") and line.get("kind") != "exact"]
    found = [line.get("peak_requested") for line in mine]
    return min((peak for peak in found if peak), default=peak(lines, run))


def failed_at(limit: int, base: int, resolution: float) -> int:
    """A limit that was too little, in units of `resolution` above `base`, rounded down."""
    return math.floor(round((limit / base - 1) / resolution, 6))


def did_at(limit: int, base: int, resolution: float) -> int:
    """A limit that was enough, in units of `resolution` above `base`, rounded up."""
    # Limits are whole bytes, themselves rounded up: less than a byte is no step.
    return math.ceil(round(((limit - 1) / base - 1) / resolution, 6))


def floor_of(lines: Iterable[Line], run: str, resolution: float) -> int:
    """What is never enough, in units of `resolution` above native's peak requested."""
    lines = list(lines)
    return failed_at(never_enough(lines, run), peak(lines, run), resolution)


def steps(lines: Iterable[Line], run: str) -> int:
    """Steps of native's first run, which the others take too; 0 before it."""
    return next((line["steps"] for line in plenty(lines, run, "native")), 0)


def steps_of_turn(lines: Iterable[Line], run: str, turn: float) -> int:
    """How many steps a turn of so many seconds has, by native's first run; at least one."""
    speeds = (line["steps"] / line["seconds"] for line in plenty(lines, run, "native") if line.get("seconds"))
    return max(1, round(turn * next(speeds, 0)))


def bounds(lines: list[Line], run: str, allocator: str, resolution: float) -> tuple[int, int | None]:
    """Greatest limit known to fail and least known to do, in units of `resolution` above peak requested."""
    base = peak(lines, run)
    if not base:
        return 0, None

    held = [line for line in of(lines, run, "round", allocator) if line["limit"]] + of(lines, run, "probe", allocator)
    failed = max([never_enough(lines, run), *(line["limit"] for line in held if short(line))])
    good = [line["limit"] for line in held if line["completed"]]
    if allocator in ("native", "expandable"):
        # With a limit of what they reserved at most, these run as without one.
        good += [line["peak_reserved"] for line in plenty(lines, run, allocator) if line.get("peak_reserved")]
    # A run that did at a limit below one that failed was luck.
    least = min((limit for limit in good if limit > failed), default=None)
    return failed_at(failed, base, resolution), None if least is None else did_at(least, base, resolution)


def probe(low: int, high: int | None, guess: int) -> int | None:
    """The next limit to try; None when the least is found. From the guess on upwards in growing steps, then halving."""
    if high is not None and high - low <= 1:
        return None
    if high is None or low < guess < high:
        return guess if low < guess else low + 2 * max(low - guess + 1, 1)
    if low >= guess:
        # Most often little is missing.
        return min((low + high) // 2, low + 2 * (low - guess + 1))
    return (low + high) // 2


def probe_at(lines: list[Line], run: str, allocator: str, factor: float, plan: Plan) -> Job:
    """A run under a limit, to see whether it completes."""
    limit = math.ceil(peak(lines, run) * factor)
    return Job(run, allocator, "probe", limit=limit, factor=factor, steps=plan.probe_steps)


def is_tried(lines: list[Line], job: Job, visit: str) -> bool:
    """Is there a result of such a probe, or did one end without any in this visit?"""
    same = [line for line in of(lines, job.run, job.kind, job.allocator) if line["limit"] == job.limit]
    return any(has_result(line) or line.get("visit") == visit for line in same)


def probes(lines: list[Line], run: str, plan: Plan, visit: str = "") -> list[Job]:
    """Runs under each of the plan's limits, but for those that were tried."""
    found = [probe_at(lines, run, allocator, factor, plan) for factor in plan.probes for allocator in plan.least]
    return [job for job in found if not is_tried(lines, job, visit)]


def next_least(lines: list[Line], run: str, plan: Plan, visit: str) -> Job | None:
    if not peak(lines, run):
        return None
    if plan.probes:
        return next(iter(probes(lines, run, plan, visit)), None)
    for allocator in plan.least:
        if len(of(lines, run, "probe", allocator)) >= plan.most_probes:
            continue
        low, high = bounds(lines, run, allocator, plan.resolution)
        at = probe(low, high, floor_of(lines, run, plan.resolution) + round(0.0075 / plan.resolution))
        if at is None:
            continue
        job = probe_at(lines, run, allocator, round(1 + at * plan.resolution, 6), plan)
        if not is_tried(lines, job, visit):
            return job
    return None


def round_jobs(plan: Plan, number: int) -> list[tuple[str, bool]]:
    """Allocators of a round with whether they are limited; every other round goes the other way, so that drift evens out."""
    order = [("native", False), ("xseg", False), *((allocator, True) for allocator in plan.limited)]
    return order if number % 2 else order[::-1]


def complete_rounds(lines: list[Line], run: str, plan: Plan) -> list[tuple[str, int]]:
    """Rounds, by visit and number, of which nothing is missing."""
    seen: dict[tuple[str, int], set[tuple[str, bool]]] = {}
    for line in of(lines, run, "round"):
        seen.setdefault((line["visit"], line["round"]), set()).add((line["allocator"], bool(line["limit"])))
    return [key for key, found in seen.items() if found >= set(round_jobs(plan, 1))]


def round_job(lines: list[Line], run: str, plan: Plan, number: int, allocator: str, limited: bool) -> Job:
    """One process of a round."""
    limit = math.ceil(peak(lines, run) * plan.limit) if limited else 0
    return Job(run, allocator, "round", number, limit, plan.limit if limited else 0.0, steps(lines, run))


def next_round(lines: list[Line], run: str, plan: Plan, visit: str) -> Job | None:
    done = complete_rounds(lines, run, plan)
    if len(done) >= plan.repeat:
        return None
    here = [line for line in of(lines, run, "round") if line["visit"] == visit]
    number = sum(key[0] == visit for key in done) + 1
    there = {(line["allocator"], bool(line["limit"])) for line in here if line["round"] == number}
    if not peak(lines, run) and ("native", False) in there:
        # Nothing to compare with: native did not complete.
        return None
    for allocator, limited in round_jobs(plan, number):
        if (allocator, limited) not in there:
            return round_job(lines, run, plan, number, allocator, limited)
    return None


def next_turns(lines: list[Line], run: str, plan: Plan, visit: str) -> list[Job]:
    """The processes that take turns in the next round; native by itself first, for its steps and its peak."""
    done = complete_rounds(lines, run, plan)
    if len(done) >= plan.repeat:
        return []
    if not peak(lines, run):
        tried = any(line["visit"] == visit for line in of(lines, run, "other", "native"))
        return [] if tried else [Job(run, "native", "other")]
    number = sum(key[0] == visit for key in done) + 1
    turn = steps_of_turn(lines, run, plan.turn)
    return [replace(round_job(lines, run, plan, number, *which), turn=turn) for which in round_jobs(plan, number)]


def next_job(lines: list[Line], run: str, stage: str, plan: Plan, visit: str) -> Job | None:
    """The next process of a stage of a workload; None when the stage is done, or cannot be."""
    if stage == "rounds":
        return next_round(lines, run, plan, visit)
    if not peak(lines, run):
        return None
    if stage == "others":
        for allocator in plan.others:
            if len(of(lines, run, "other", allocator)) < plan.other_rounds:
                return Job(run, allocator, "other", steps=steps(lines, run))
    if stage == "losses":
        for allocator in ("native", "xseg"):
            tried = of(lines, run, "exact", allocator)
            # One that failed, since others had the card's memory, is tried again, but not for ever.
            if sum(line["completed"] for line in tried) < plan.exact_runs and len(tried) < 2 * plan.exact_runs + 1:
                return Job(run, allocator, "exact", steps=plan.exact_steps, deterministic=True)
    if stage == "least":
        return next_least(lines, run, plan, visit)
    return None


def next_jobs(lines: list[Line], run: str, stage: str, plan: Plan, visit: str) -> list[Job]:
    """What is started next, beside each other; nothing when the stage is done, or cannot be."""
    if stage == "rounds" and plan.turn:
        return next_turns(lines, run, plan, visit)
    job = next_job(lines, run, stage, plan, visit)
    return [job] if job else []
