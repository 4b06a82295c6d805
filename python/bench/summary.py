"""Figures of many lines of training runs, as a report in Markdown."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from typing import Any

from lines import Line, any_run
from plan import Plan, bounds, complete_rounds, has_result, of, peak, plenty, short

GIB = 1 << 30
# A step of so many times the middle one's time on native is none of steady training.
STEADY = 5
# Limits are shown to this multiple of peak requested, however finely they were searched.
SHOWN = 0.0001


def decoded(line: Line) -> list[float]:
    return [float.fromhex(text) for text in line.get("losses", [])]


def apart(some: Sequence[float], other: Sequence[float]) -> float:
    """Greatest difference of two runs at one step, as a share of the loss."""
    return max((abs(a - b) / max(abs(a), 1e-12) for a, b in zip(some, other)), default=0.0)


def own_spread(native: Sequence[Line]) -> float:
    """How far native's runs are from each other."""
    runs = [decoded(line) for line in native]
    return max((apart(a, b) for at, a in enumerate(runs) for b in runs[:at]), default=0.0)


def beside(native: Sequence[Line], lines: Sequence[Line]) -> str:
    """Losses of some runs beside native's: the distance of each to the nearest of native's, the greatest of these."""
    lines, native = ([line for line in some if line.get("losses")] for some in (lines, native))
    if not lines or not native:
        return "-"
    if all(line["losses"] == native[0]["losses"] for line in [*native, *lines]):
        return "equal"
    far = max(min(apart(decoded(one), decoded(line)) for one in native) for line in lines)
    return f"{far:.1e} apart, native's {own_spread(native):.1e}"


def ratios(lines: list[Line], run: str, allocator: str, limited: bool, plan: Plan) -> list[float]:
    """Speed as a share of native's in the same round, for each complete round."""
    found = []
    for visit, number in complete_rounds(lines, run, plan):
        here = [line for line in of(lines, run, "round") if (line["visit"], line["round"]) == (visit, number)]
        speeds = {(line["allocator"], bool(line["limit"])): line.get("per_second") for line in here}
        native, ours = speeds.get(("native", False)), speeds.get((allocator, limited))
        if native and ours:
            found.append(ours / native)
    return found


def timed_rounds(lines: list[Line], run: str, plan: Plan) -> dict[tuple[str, int], dict[tuple[str, bool], list[float]]]:
    """What each step took on the device, in ms, by round, and there by allocator and whether it was limited."""
    rounds = set(complete_rounds(lines, run, plan))
    found: dict[tuple[str, int], dict[tuple[str, bool], list[float]]] = {}
    for line in of(lines, run, "round"):
        key = (line["visit"], line["round"])
        if key in rounds and line.get("step_ms"):
            found.setdefault(key, {})[(line["allocator"], bool(line["limit"]))] = line["step_ms"]
    return found


def best_steps(lines: list[Line], run: str, allocator: str, limited: bool, plan: Plan) -> float | None:
    """Speed as a share of native's where each step counts with the least time of it in any of a visit's rounds; the median of visits.

    What slows a run from outside comes and goes, and only ever adds; the least of several runs of one step has the least of it.
    """
    visits: dict[str, dict[tuple[str, bool], list[list[float]]]] = {}
    for (visit, _), times in timed_rounds(lines, run, plan).items():
        for key, steps in times.items():
            visits.setdefault(visit, {}).setdefault(key, []).append(steps)
    found = []
    for times in visits.values():
        native, ours = (
            [min(step) for step in zip(*times.get(key, []))] for key in (("native", False), (allocator, limited))
        )
        count = min(len(native), len(ours))
        if count:
            found.append(sum(native[:count]) / sum(ours[:count]))
    return statistics.median(found) if found else None


def steady(lines: list[Line], run: str, allocator: str, limited: bool, plan: Plan) -> list[float]:
    """Speed as a share of native's in the same round, without the steps that took native five times as long as its middle step.

    In those PyTorch loads kernels and tries which is fastest, for each new shape once: seconds that differ from run to run by more than
    all other steps together.
    """
    found = []
    for times in timed_rounds(lines, run, plan).values():
        native, ours = times.get(("native", False), []), times.get((allocator, limited), [])
        if native and ours:
            most = STEADY * statistics.median(native)
            kept = [(mine, other) for mine, other in zip(native, ours) if mine <= most]
            found.append(sum(mine for mine, _ in kept) / sum(other for _, other in kept))
    return found


def span(values: Sequence[float], form: str) -> str:
    """Median, and the least and greatest."""
    if not values:
        return "-"
    middle = format(statistics.median(values), form)
    return middle if len(values) == 1 else f"{middle} ({format(min(values), form)} to {format(max(values), form)})"


def most(lines: Sequence[Line], name: str) -> int | None:
    return max((line[name] for line in lines if line.get(name) is not None), default=None)


def least(lines: list[Line], run: str, allocator: str) -> str:
    """The least limit at which the run was seen to complete, and what it was last seen to fail at where that is not just below."""
    # What rounds say of it by the way was not looked for.
    if not of(lines, run, "probe", allocator):
        return "-"
    low, high = bounds(lines, run, allocator, SHOWN)
    if high is None:
        return f"above {1 + low * SHOWN:.4f}"
    found = f"{1 + high * SHOWN:.4f}"
    return found if high - low <= 1 else f"{1 + low * SHOWN:.4f} to {found}"


def probed_steps(lines: Sequence[Line]) -> str:
    """How many steps the runs under a limit trained whose least is searched."""
    counts = sorted({line["steps"] for line in lines if line.get("kind") == "probe" and line.get("steps")})
    return "all" if not counts else str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def in_driver(lines: Sequence[Line]) -> str:
    """Driver time of the whole process, and what share of the timed steps it would be at most."""
    taken = [
        (line["driver_nanos"] / 1e9, line["seconds"])
        for line in lines
        if line.get("driver_nanos") and line.get("seconds")
    ]
    if not taken:
        return "-"
    share = max(driver / seconds for driver, seconds in taken)
    return f"{max(driver for driver, _ in taken) * 1e3:.0f} ms ({share * 100:.1f} %)"


def row(lines: list[Line], run: str, allocator: str, limited: bool, plan: Plan) -> list[str] | None:
    """One line of the table; None where there is nothing to show."""
    mine = of(lines, run, "round", allocator)
    mine += of(lines, run, "other", allocator)
    mine = [line for line in mine if bool(line["limit"]) == limited]
    if not mine and (limited or not of(lines, run, "probe", allocator)):
        return None
    done = [line for line in mine if line["completed"]]
    requested, reserved = most(done, "peak_requested"), most(done, "peak_reserved")
    base = peak(lines, run)

    def gib(value: int | None) -> str:
        return "-" if value is None else f"{value / GIB:.3f}"

    def counted(name: str) -> str:
        values = [line[name] for line in done if line.get(name) is not None]
        return "-" if not values else str(min(values)) if min(values) == max(values) else f"{min(values)}-{max(values)}"

    shown = f"{most(mine, 'factor'):.4g}x" if limited else "-"
    # Further allocators may run beside other processes on their GPU: only rounds tell of speed.
    timed = [line["per_second"] for line in done if line["kind"] == "round"]
    native = plenty(lines, run, "native")
    shares = ratios(lines, run, allocator, limited, plan)
    best = best_steps(lines, run, allocator, limited, plan)
    losses = beside(native, done)
    if (allocator, limited) == ("native", False):
        losses = "-" if len(native) < 2 else "equal" if own_spread(native) == 0 else f"{own_spread(native):.1e} apart"
    return [
        run, allocator, shown, f"{len(done)} of {len(mine)}" if mine else "-", span(timed, ".0f"), span(shares, ".3f"),
        span(steady(lines, run, allocator, limited, plan), ".3f"), "-" if best is None else f"{best:.3f}", gib(requested), gib(reserved), "-" if not (reserved and base) else f"{reserved / base:.4f}", counted("retries"),
        counted("host_waits"), in_driver(done), losses, "-" if limited else least(lines, run, allocator),
    ]  # fmt: skip


DRY = (
    "**Without a GPU these are no figures of allocators**: all runs have PyTorch's memory on the host, no limit holds, and `requested` and "
    "`reserved` are the processes' own memory. It shows that the programs work."
)
HEADS = [
    "run", "allocator", "limit", "done", "tokens/s", "/ native", "steady steps", "best steps", "requested GiB", "reserved GiB", "reserved / requested",
    "retries", "host waits", "driver time", "losses", "least",
]  # fmt: skip


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(heads) + " |",
        "|" + "---|" * len(heads),
        *("| " + " | ".join(cells) + " |" for cells in rows),
    ]


def first_apart(some: Line, other: Line) -> int | None:
    """The first step whose losses differ in any bit."""
    pairs = zip(some["losses"], other["losses"])
    return next((at for at, (a, b) in enumerate(pairs) if a != b), None)


def exact(lines: list[Line], run: str) -> str | None:
    """What the runs with deterministic kernels say."""
    native, ours = (
        [line for line in of(lines, run, "exact", name) if line.get("losses")] for name in ("native", "xseg")
    )
    if not (native and ours):
        return None
    own = [at for line in native[1:] if (at := first_apart(native[0], line)) is not None]
    found = [at for line in ours if (at := first_apart(native[0], line)) is not None]
    if not found:
        return f"{run}: {len(native[0]['losses'])} steps equal to the last bit, {len(ours)} runs of xseg and {len(native)} of native"
    self_apart = f"native's own from step {min(own)} on" if own else f"native's own {len(native)} are equal"
    far = max(min(apart(decoded(one), decoded(line)) for one in native) for line in ours)
    return f"{run}: equal up to step {min(found)}, then {far:.1e} apart; {self_apart}, {own_spread(native):.1e} apart"


def status(lines: Sequence[Line], visit: str, late: bool) -> int:
    """A program's exit status after a visit: 1 where runs were started and none of them has a result, 2 where none could be started.

    `late`: the time was too short for something that was left to do. Where all was done before, there was nothing to start.
    """
    runs = [line for line in lines if line.get("visit") == visit and "run" in line]
    if not runs and late:
        print("no run was begun: --minutes is too short for the next, which may take a minute or more", file=sys.stderr)
        return 2
    if not any_run(lines):
        print("no run was begun: none was wanted, or all need a run on native memory first", file=sys.stderr)
        return 2
    failed = bool(runs) and not any(has_result(line) for line in runs)
    if failed:
        print("no run completed; the end of the report says why", file=sys.stderr)
    return int(failed)


def failures(lines: Sequence[Line]) -> list[str]:
    """Runs that ended in anything but a limit's out of memory, each by its first words."""
    found = []
    for line in lines:
        error = line.get("error")
        if error and not short(line):
            full = "the card was full (`--turn 0` has one process on it at a time): " if line.get("card_full") else ""
            words = full + " ".join(error.split())[:200]
            limit = f"limit {line['limit']}" if line["limit"] else "no limit"
            found.append(f"{line['run']}, {line['allocator']}, {line['kind']}, {limit}: {words}")
    return found


def report(lines: list[Line], plan: Plan, commit: str = "") -> str:
    """The whole report."""
    visits: list[dict[str, Any]] = [line for line in lines if line.get("kind") == "about"]
    heads = []
    for one in visits:
        names = one["gpus"]
        gpus = "no GPU" if not names else f"{len(names)} x {names[0]}"
        versions = ", ".join(f"{name} {number}" for name, number in one["versions"].items() if number)
        heads.append(
            f"{one['visit']}: {gpus}, driver {one['driver']}, {versions}, Python {one['python']}, {one['cores']} cores. "
            f"Commit {one['commit'] or commit or 'not given'}. `{one['command']}`"
        )
    runs = list(dict.fromkeys(line["run"] for line in lines if "run" in line))
    names = list(dict.fromkeys(["native", "xseg", *plan.others]))
    found = (row(lines, run, name, limited, plan) for run in runs for name in names for limited in (False, True))
    rows = [cells for cells in found if cells]
    title = visits[0]["gpus"][0] if visits and visits[0]["gpus"] else "no GPU"
    text = [f"# Training runs: {title}", "", *(part for head in heads for part in (head, ""))]
    if visits and not all(one["gpus"] for one in visits):
        text += [DRY, ""]
    text += [*table(HEADS, rows), ""]
    text += [
        "Each line is the median of its runs, with the least and greatest. Speed is of the rounds only: further allocators run once, for their "
        "peaks, and other processes may be on their GPU. `/ native` compares with native in the same round, in which "
        "the allocators alternate: by turns of some steps, or run by run. Steady steps: the same by the steps' times on the device, without those that took native five times as long as "
        "its middle step, in which kernels are loaded and tried for a new shape. Best steps: the same where each step counts with the least time that it took in any round of a visit, "
        "since other work on the machine only ever adds. Peaks are the most of any run; reserved / requested is by native's peak requested. Retries: PyTorch's "
        "`num_alloc_retries`. Driver time: the most of any run's whole process, and as a share of its timed steps, which is the most that "
        "the driver's calls can have slowed it. Losses: the greatest distance of a run at any step to the nearest of native's runs. Least: the least "
        f"limit, as a multiple of native's peak requested, at which {probed_steps(lines)} steps completed, rounded up to four decimals; `1.0025 to 1.0050`: they "
        "failed at the first, rounded down, or requested that much, completed at the second, and between the two nothing was tried; `-`: it was not looked for.",
        "",
    ]
    bits = [words for run in runs if (words := exact(lines, run))]
    if bits:
        text += ["With deterministic kernels, native and xseg:", "", *(f"- {words}" for words in bits), ""]
    wrong = failures(lines)
    if wrong:
        text += ["What did not complete for another reason than a limit:", "", *(f"- {words}" for words in wrong), ""]
    return "\n".join(text)
