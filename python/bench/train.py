"""Real training runs under PyTorch's allocators and xseg, each in a process of its own with the same seeds.

    python train.py --gpus 0,1 --commit $(git rev-parse --short HEAD) --out lines.jsonl
    python train.py --gpus 0,1 --minutes 9 --have lines.jsonl --out more.jsonl    # goes on where that ended
    python train.py --gpus 0 --runs gpt2 --stages least --probes 1.005x,1.0075x --have lines.jsonl --out more.jsonl
    python train.py --summary lines.jsonl more.jsonl --report benches/results/training.md

Each workload is on one GPU at a time, and each process adds a line of JSON to the file. The stages, in their order:

rounds  native, xseg, and xseg under the limit. All three are made and warmed up, then take turns of `--turn` seconds on the GPU: a
        machine's speed drifts by more, within minutes, than allocators differ. Native is run by itself first, for `--seconds`; all
        others train as many steps as it did, on the same data. `--turn 0` runs one after the other, where the GPU cannot hold three
others  further allocators, for their peaks
losses  native and xseg with deterministic kernels, twice each
least   the least limit in which a run completes, by halving

A line has the losses, tokens (images for convnext) a second without the warm-up, what each step took on the device, peaks, retries,
host waits; one of xseg has its policy, too (`conf`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launching import Child, environment, run_jobs
from lines import any_run, to_report
from measure import ALLOCATORS, Job, Process, child
from modes import misplaced
from options import amount, factor, factors, names, some, whole
from plan import STAGES, Plan
from summary import report, status
from visit import Visit, about, begin, earlier, gpus_here, interruptible, lacks, opened, prepare, unwritable
from workloads import RUNS


def arguments() -> argparse.ArgumentParser:
    plan, process = Plan(), Process()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--runs", type=names(RUNS), default=list(RUNS), help=f"of {', '.join(RUNS)} (default: all)")
    add("--stages", type=names(STAGES), default=list(STAGES), help=f"of {', '.join(STAGES)} (default: all)")
    add("--gpus", default="", help="numbers of the GPUs to use, such as 0,1; a workload for each (default: the first)")
    add("--minutes", type=amount, default=0, help="start nothing that would not end within this time (default: no end)")
    add(
        "--seconds",
        type=some,
        default=process.seconds,
        help="seconds that native trains after the warm-up (default %(default)s)",
    )
    add(
        "--turn",
        type=amount,
        default=1.0,
        help="seconds of each turn of a round's processes; 0: one process after the other (default %(default)s)",
    )
    add("--warmup", type=whole(0), default=process.warmup, help="steps before the clock starts (default %(default)s)")
    add(
        "--repeat",
        type=whole(0),
        default=plan.repeat,
        help="rounds of native, xseg and xseg under the limit (default %(default)s)",
    )
    add(
        "--limit",
        type=factor,
        default=plan.limit,
        help="memory of the limited runs, in times native's peak requested (default 1.02x)",
    )
    add(
        "--limited",
        type=names(ALLOCATORS),
        default=list(plan.limited),
        help="allocators that run under the limit, too, in each round (default xseg)",
    )
    add(
        "--others",
        type=names(ALLOCATORS),
        default=list(plan.others),
        help="allocators that run once, for their peaks (default expandable,async)",
    )
    add(
        "--least",
        type=names(ALLOCATORS),
        default=list(plan.least),
        help="allocators whose least memory is searched (default xseg,expandable)",
    )
    add(
        "--resolution",
        type=some,
        default=plan.resolution,
        help="how exact that search is, as a share of peak requested (default %(default)s)",
    )
    add(
        "--probes",
        type=factors,
        default=list(plan.probes),
        help="in the stage least, try these limits instead of searching, such as 1.005x,1.0075x",
    )
    add(
        "--probe-steps",
        type=whole(1),
        default=plan.probe_steps,
        help="steps of a probe after the warm-up (default %(default)s)",
    )
    add(
        "--exact-runs",
        type=whole(0),
        default=plan.exact_runs,
        help="runs of native and of xseg with deterministic kernels (default %(default)s)",
    )
    add(
        "--losses",
        type=whole(0),
        default=process.losses,
        help="losses of each run that its line has (default %(default)s)",
    )
    add("--timeout", type=some, default=process.timeout, help="seconds for one process (default %(default)s)")
    add(
        "--record",
        default="",
        metavar="DIR",
        help="record there what each of xseg's processes allocates (for `xseg replay`)",
    )
    add("--commit", default="", help="commit of xseg, named in the report")
    add("--have", type=Path, nargs="*", default=[], help="files of earlier visits, whose lines need no second run")
    add(
        "--out",
        type=Path,
        default=Path("train.jsonl"),
        help="lines are added to this file, and those there count (default %(default)s)",
    )
    add("--summary", type=Path, nargs="+", help="run nothing: report on these files")
    add("--report", type=Path, help="where the report goes (default: standard output)")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny models, to try the program itself")
    add("--child", help=argparse.SUPPRESS)
    return parser


def line_of(child: Child) -> dict[str, Any]:
    """The line of a process that has ended, also of one that failed."""
    line = {**asdict(child.job), "completed": False, **(child.lines[-1] if child.lines else {}), "wall": child.wall}
    # One that gave its line and did not end is no run that completed.
    return {**line, "completed": False, "error": child.error} if child.error else line


def main() -> int:
    parser = arguments()
    args = parser.parse_args()
    if args.child:
        child(args.child)
        return 0
    misplaced(parser, args)
    plan = Plan(
        stages=args.stages, repeat=args.repeat, turn=args.turn, limit=args.limit, limited=args.limited, others=args.others, least=args.least,
        resolution=args.resolution, probes=args.probes, probe_steps=args.probe_steps, exact_runs=args.exact_runs,
    )  # fmt: skip
    for path in [args.report] if args.summary else [args.out, args.report]:
        if path and (why := unwritable(path)):
            print(why, file=sys.stderr)
            return 2

    def show(lines: list[dict[str, Any]]) -> None:
        text = report(lines, plan, args.commit)
        if args.report:
            args.report.write_text(text)
        else:
            print(text)

    if args.summary:
        show(to_report(args.summary))
        return 0
    if args.record and args.device == "cpu":
        print("--record is for GPUs: on the host nothing is allocated on xseg", file=sys.stderr)
        return 2
    if "rounds" in args.stages and args.turn and "async" in args.limited:
        print(
            "--limited async needs --turn 0: its limit is that the rest of the card is filled, for all processes",
            file=sys.stderr,
        )
        return 2
    process = Process(
        args.seconds,
        args.warmup,
        args.losses,
        args.timeout,
        device=args.device,
        small=args.device == "cpu",
        record=args.record,
    )
    # On the host nothing is allocated from xseg.
    if lacks("train.py", ("torch", "transformers"), plan.allocators() if args.device == "cuda" else ()):
        return 2
    if args.device == "cuda" and not gpus_here():
        print("train.py found no GPU; --device cpu tries the program itself, with tiny models", file=sys.stderr)
        return 2
    began = time.monotonic()
    gpus = args.gpus.split(",") if args.gpus else [None]
    cores = os.cpu_count() or 1
    share = cores // len(gpus)

    def start(jobs: Sequence[Job], slot: int) -> list[dict[str, Any]]:
        # Each workload has cores of its own, so that they do not slow each other.
        own = f"{slot * share}-{(slot + 1) * share - 1}" if len(gpus) > 1 and share else ""

        def begin(job: Job) -> Child:
            words = json.dumps({"job": asdict(job), "process": asdict(process), "cores": own})
            command = [sys.executable, __file__, "--child", words]
            return Child(job, command, environment(job, gpus[slot]), process.timeout)

        return [line_of(ended) for ended in run_jobs(jobs, begin)]

    lines = earlier(args.have, args.out)
    if args.device == "cuda" and "xseg" in plan.allocators():
        prepare()
    name = begin(lines)
    # Which takes a while: a file without a line is none of a visit's.
    lines.append(about(name, args.commit, ["python", *sys.argv]))
    with opened(args.out) as out:

        def keep(line: dict[str, Any]) -> None:
            out.write(json.dumps(line) + "\n")
            out.flush()
            shown = {
                key: value for key, value in line.items() if key not in ("losses", "step_ms") and value not in (None, 0)
            }
            print(json.dumps(shown), flush=True)

        keep(lines[-1])
        deadline = began + 60 * args.minutes if args.minutes else float("inf")
        left = Visit(name, lines, keep, start, plan, args.runs, deadline).go(len(gpus))
    for run, stage in left:
        print(f"{run}: {stage} not finished; run the same with more time, the lines so far in --have", file=sys.stderr)
    if any_run(lines):
        show(lines)
    return status(lines, name, bool(left))


if __name__ == "__main__":
    sys.exit(interruptible(main))
