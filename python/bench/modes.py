"""Options that a program would not look at, as it was started: they are refused, since one that is ignored seems to have held."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Mapping

from options import given

# Of `distributed.py`: what is for one run, which torchrun starts, and what says the same of a comparison's.
ONE_RUN = {
    "kind": "--kinds names those of a comparison",
    "allocator": "a comparison has native and xseg, and those of --others and --limited",
    "bytes": "--limit says how much memory a comparison's limited runs get",
    "deterministic": "--exact-runs has a comparison make runs with deterministic kernels",
    "record": "a comparison records nothing",
    "turns": "--turn says how long the turns of a comparison are",
}
# What is for a comparison, and what says the same of one run.
COMPARISON = {
    "ranks": "torchrun's --nproc-per-node says how many ranks one run has on a host",
    "kinds": "--kind names that of one run",
    "others": "--allocator names that of one run",
    "limited": "--bytes limits one run",
    "limit": "--bytes limits one run",
    "turn": "one run takes no turns",
    "repeat": "torchrun starts one run each time",
    "least": "--bytes limits one run",
    "resolution": "--bytes limits one run",
    "probes": "--bytes limits one run",
    "probe_steps": "--steps says how long one run trains",
    "exact_runs": "--deterministic has one run take deterministic kernels",
    "minutes": "--steps says how long one run trains",
    "timeout": "--hang ends a rank that does not get on",
    "commit": "one run makes no report",
    "have": "one run makes no report",
    "out": "the lines of one run go to standard output",
}
# What a report depends on. Which rounds are complete, and which allocators have a line, is said by the last two.
REPORT = {"summary", "report", "commit", "limited", "others"}
# Of `train.py`: what is for one stage alone.
STAGES = {
    "rounds": ("seconds", "turn", "repeat", "limit"),
    "losses": ("exact_runs",),
    "least": ("least", "resolution", "probes", "probe_steps"),
}
# Of `distributed.py --compare`: what `--probes` has no use for, since it tries its limits and does nothing else.
NOT_PROBES = ("resolution", "turn", "limit", "exact_runs", "minutes")


def option(name: str) -> str:
    return "--" + name.replace("_", "-")


def why_not(named: Collection[str], wrong: Mapping[str, str]) -> list[str]:
    """A sentence for each option that was given and has no use."""
    return [f"{option(name)} {why}" for name, why in wrong.items() if name in named]


def not_in_a_report(named: Collection[str]) -> list[str]:
    return [f"{option(name)} is not for --summary, which runs nothing" for name in sorted(named) if name not in REPORT]


def without_probes(named: Collection[str], args: argparse.Namespace) -> list[str]:
    """What is wrong with the search for the least memory, or with the limits that are tried instead."""
    if args.probes and not args.least:
        return ["--probes is for the allocators of --least; name them there"]
    if args.probes:
        return why_not(named, {"resolution": "is for the search, which --probes replaces"})
    return []


def of_torchrun() -> str | None:
    """What torchrun has set here, if it started this process: each of its ranks would do the same whole work."""
    return next((name for name in ("RANK", "WORLD_SIZE") if name in os.environ), None)


def of_distributed(named: Collection[str], args: argparse.Namespace) -> list[str]:
    """What is wrong with the options of `distributed.py` of which these were given."""
    if args.summary:
        return not_in_a_report(named)
    if not args.compare:
        found = why_not(named, {name: f"is for --compare; {instead}" for name, instead in COMPARISON.items()})
        if args.record and args.allocator != "xseg":
            found.append("--record is for what xseg allocates; give --allocator xseg with it")
        return found
    if (name := of_torchrun()) is not None:
        return [f"--compare starts torchrun itself; start it by python alone, without {name} in the environment"]
    found = why_not(
        named, {name: f"is for one run, which torchrun starts; {instead}" for name, instead in ONE_RUN.items()}
    )
    if not args.least:
        found += why_not(named, dict.fromkeys(("resolution", "probe_steps"), "is for --least, which is not given"))
    found += without_probes(named, args)
    if args.probes and not found:
        found += why_not(named, dict.fromkeys(NOT_PROBES, "has no use with --probes, which only tries its limits"))
        if args.repeat and "repeat" in named:
            found.append("--repeat has no use with --probes, which only tries its limits")
    return found


def of_train(named: Collection[str], args: argparse.Namespace) -> list[str]:
    """What is wrong with the options of `train.py` of which these were given."""
    if args.summary:
        return not_in_a_report(named)
    if (name := of_torchrun()) is not None:
        return [f"train.py is no rank of torchrun's; start it by python alone, without {name} in the environment"]
    found = []
    for stage, names in STAGES.items():
        if stage not in args.stages:
            found += why_not(named, dict.fromkeys(names, f"is for the stage {stage}, which --stages leaves out"))
    return found or without_probes(named, args)


def misplaced(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends the program where an option was given that it has no use for."""
    check = of_distributed if hasattr(args, "compare") else of_train
    if found := check(given(parser), args):
        parser.error("\n".join(found))
