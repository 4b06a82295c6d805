"""Lines of JSON that visits write, one for each process: what they must hold to be counted on."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from options import refuse

Line = dict[str, Any]
# What lines must have: those about a visit, and those of its runs.
ABOUT = {"visit", "commit", "gpus", "driver", "versions", "python", "cores", "command"}
RUN = {"visit", "run", "allocator", "kind", "round", "limit", "completed"}
# No count, size, time or speed is more; a sum of many still is a number.
MOST = 1e18


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_number(value: Any) -> bool:
    """A number from 0 up. JSON has none that are no numbers, but Python reads them."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= MOST


def is_count(value: Any) -> bool:
    return isinstance(value, int) and is_number(value)


def is_speed(value: Any) -> bool:
    """What something is divided by."""
    return is_number(value) and value > 1e-9


def is_loss(value: Any) -> bool:
    """The bits of a number; one that is no finite number is a loss, too."""
    try:
        return is_text(value) and abs(float.fromhex(value)) >= 0 or value in ("nan", "-nan")
    except (ValueError, OverflowError):
        return False


def each(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(check(one) for one in value)


def maybe(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


def is_versions(value: Any) -> bool:
    return isinstance(value, dict) and all(map(maybe(is_text), value.values()))


# What a report or a plan works with.
CHECKS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("visit", "commit", "python", "command", "run", "allocator", "kind"), is_text),
    **dict.fromkeys(("driver", "error", "conf"), maybe(is_text)),
    **dict.fromkeys(("cores", "retries", "host_waits", "driver_nanos"), maybe(is_count)),
    **dict.fromkeys(("peak_requested", "peak_allocated", "peak_reserved"), maybe(is_count)),
    **dict.fromkeys(("round", "limit", "steps", "world"), is_count),
    **dict.fromkeys(("wall", "factor"), is_number),
    **dict.fromkeys(("seconds", "per_second"), maybe(is_speed)),
    **dict.fromkeys(("completed", "card_full"), lambda value: isinstance(value, bool)),
    "gpus": each(is_text),
    "versions": is_versions,
    "step_ms": each(is_speed),
    "losses": each(is_loss),
}


def is_line(line: Any) -> bool:
    """Is this a visit's: about the visit itself, or of a run?"""
    if not isinstance(line, dict) or not line.keys() >= (ABOUT if line.get("kind") == "about" else RUN):
        return False
    if any(name in line and not check(line[name]) for name, check in CHECKS.items()):
        return False
    if line["kind"] == "about":
        return True
    if line["limit"] and "factor" not in line:
        return False
    if not line["completed"]:
        return True
    # What reports say of every run that completed.
    return line.get("steps", 0) > 0 and line.get("per_second") is not None and "wall" in line


def fresh(name: str, taken: Collection[str]) -> str:
    """A name that no other visit has."""
    numbered = (f"{name} ({number})" for number in itertools.count(2))
    return name if name not in taken else next(one for one in numbered if one not in taken)


def read(paths: Sequence[Path]) -> list[Line]:
    """The lines of several files; what is no line of a visit's, as a last one that was cut off, is left out.

    Visits that began in the same second have the same name; here each gets one of its own. A file has the line about a visit before the
    visit's others, also where the lines of several visits were put into one file.
    """
    lines: list[Line] = []
    names: set[str] = set()
    empty = False
    for path in paths:
        try:
            texts = [text for text in path.read_text(errors="replace").splitlines() if text.strip()]
        except OSError as error:
            refuse(f"cannot read {path}: {error.strerror}; give a file that an earlier visit wrote with --out")
        renamed: dict[str, str] = {}
        kept = 0
        for text in texts:
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                continue
            if not is_line(line):
                continue
            visit = line["visit"]
            if line.get("kind") == "about":
                renamed[visit] = fresh(visit, names)
                names.add(renamed[visit])
            lines.append({**line, "visit": renamed.get(visit, visit)})
            kept += 1
        if not kept:
            empty = True
            print(f"{path} holds no lines of runs; give a file that an earlier visit wrote with --out", file=sys.stderr)
        elif kept < len(texts):
            left = len(texts) - kept
            print(f"{path}: {left} of {len(texts)} lines are no lines of runs and are left out", file=sys.stderr)
    if empty:
        sys.exit(2)
    return lines


def any_run(lines: Sequence[Line]) -> bool:
    """Is there a run to report on?"""
    return any("run" in line for line in lines)


def to_report(paths: Sequence[Path]) -> list[Line]:
    """The lines of files to report on; visits that had no time for a run have none."""
    lines = read(paths)
    if not any_run(lines):
        refuse("these files hold no runs, only visits that began none; give one of a visit that did")
    return lines
