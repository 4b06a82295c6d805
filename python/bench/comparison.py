"""Comparisons of `distributed.py` on one host: each run is a torchrun of its own, and its ranks' lines become one."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from launching import Child, environment, run_jobs, stop
from lines import Line, any_run, to_report
from measure import Job
from options import refuse
from plan import Plan, peak, probes
from summary import report, status
from visit import Visit, about, begin, earlier, lacks, opened, prepare, unwritable

# A workload is a kind of parallel training, alone or with a way in which its ranks communicate: from registered memory, or sharing GPUs.
REGISTERED = "+registered"
SHARED = "+shared"
OPTIONS = {"": [], REGISTERED: ["--register"], SHARED: ["--share"]}


def together(job: Job, ranks: Sequence[Line], world: int) -> Line:
    """One line for all ranks: the most memory and time of any, the waits of all, and complete only if each is."""
    line: Line = {"completed": len(ranks) == world and all(one["completed"] for one in ranks)}
    for name in ("peak_requested", "peak_reserved", "driver_nanos", "seconds"):
        line[name] = max((one[name] for one in ranks if one.get(name) is not None), default=None)
    for name in ("retries", "host_waits", "gpu_waits", "handles_moved", "bytes_moved", "handles_joined"):
        counted = [one[name] for one in ranks if one.get(name) is not None]
        if counted:
            line[name] = sum(counted)
    # Each rank has the sum of all tokens, over its own clock.
    line["per_second"] = min((one["per_second"] for one in ranks if one.get("per_second")), default=None)
    # A step is done when its slowest rank is.
    line["step_ms"] = [max(step) for step in zip(*(one.get("step_ms", []) for one in ranks))]
    line["losses"] = next((one["losses"] for one in ranks if one.get("losses")), [])
    # One environment is that of all ranks.
    line.update(next(({"conf": one["conf"]} for one in ranks if "conf" in one), {}))
    line["hang"] = any(one.get("hang") for one in ranks)
    # A rank that hangs waits for another, whose error says more.
    errors = sorted((one for one in ranks if one.get("error")), key=lambda one: bool(one.get("hang")))
    if errors:
        line["error"] = f"rank {errors[0]['rank']}: {errors[0]['error']}"
    elif not line["completed"]:
        line["error"] = f"{len(ranks)} of {world} ranks gave a line"
    if job.kind == "probe":
        line.pop("losses")
        line.pop("step_ms")
    return line


def words(job: Job, args: argparse.Namespace) -> list[str]:
    """The command line that starts the ranks of a job."""
    kind = job.run.removesuffix(REGISTERED).removesuffix(SHARED)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks),
        str(Path(__file__).with_name("distributed.py")), "--kind", kind, "--allocator", job.allocator, "--bytes", str(job.limit),
        "--steps", str(job.steps or args.steps), "--warmup", str(args.warmup), "--hang", str(args.hang),
        *OPTIONS[job.run.removeprefix(kind)], *(["--small"] if args.small else []),
        *(["--deterministic"] if job.deterministic else []), *(["--turns"] if job.turn else []),
    ]  # fmt: skip
    for name in ("width", "layers", "vocabulary", "batch", "length"):
        command += [f"--{name}", str(getattr(args, name))]
    return command


def launch(jobs: Sequence[Job], args: argparse.Namespace) -> list[Line]:
    """Starts the ranks of jobs, and gives the line of each job."""

    def begin(job: Job) -> Child:
        return Child(job, words(job, args), environment(job, None), args.timeout)

    return [line_of(child, args) for child in run_jobs(jobs, begin)]


def line_of(child: Child, args: argparse.Namespace) -> Line:
    """One line for a job whose ranks have ended."""
    job = child.job
    ranks = [line for line in child.lines if "rank" in line]
    line = {"run": job.run, "allocator": job.allocator, "kind": job.kind, "round": job.round, "limit": job.limit}
    line.update(factor=job.factor, steps=job.steps or args.steps, turn=job.turn, world=args.ranks)
    line.update(together(job, ranks, args.ranks))
    if child.late:
        line.update(completed=False, hang=True)
    if child.error:
        line["error"] = child.error
    line["wall"] = child.wall
    return line


def all_probes(lines: list[Line], runs: Sequence[str], plan: Plan) -> list[Job]:
    """Runs under each of the limits of `--probes`."""
    for run in runs:
        if not peak(lines, run):
            refuse(f"no run of {run} on native memory is known; name a file that has one in --have")
    return [job for run in runs for job in probes(lines, run, plan)]


def at_once(jobs: Sequence[Job], args: argparse.Namespace) -> Iterator[Line]:
    """Lines of jobs that run beside each other, as they end: all must fit on the GPUs, and their times say nothing."""
    with ThreadPoolExecutor(max_workers=max(len(jobs), 1)) as pool:
        try:
            for done in as_completed([pool.submit(launch, [job], args) for job in jobs]):
                yield from done.result()
        except BaseException:
            # Interrupted: else all would be waited for.
            pool.shutdown(wait=False, cancel_futures=True)
            stop()
            raise


def main(args: argparse.Namespace) -> int:
    stages = ["rounds", "others"] + (["losses"] if args.exact_runs else []) + (["least"] if args.least else [])
    plan = Plan(
        stages=stages, repeat=args.repeat, turn=args.turn, limit=args.limit, limited=args.limited, others=args.others, least=args.least, resolution=args.resolution,
        probes=args.probes, probe_steps=args.probe_steps, exact_runs=args.exact_runs,
    )  # fmt: skip
    if args.summary:
        print(report(to_report(args.summary), plan, args.commit))
        return 0
    runs = [kind + SHARED if args.share else kind for kind in args.kinds]
    if args.register:
        runs += [kind + REGISTERED for kind in runs]
    began = time.monotonic()
    if why := unwritable(args.out):
        print(why, file=sys.stderr)
        return 2
    allocators = plan.least if args.probes else plan.allocators()
    if lacks("distributed.py", ("torch",), allocators):
        return 2
    lines = earlier(args.have, args.out)
    jobs = all_probes(lines, runs, plan) if args.probes else []
    if not args.small and "xseg" in allocators:
        prepare()
    name = begin(lines)
    # Which takes a while: a file without a line is none of a visit's.
    lines.append(about(name, args.commit, ["python", *sys.argv]))
    with opened(args.out) as out:

        def keep(line: Line) -> None:
            out.write(json.dumps(line) + "\n")
            out.flush()
            print(
                json.dumps({key: value for key, value in line.items() if key not in ("losses", "step_ms")}), flush=True
            )

        keep(lines[-1])
        deadline = began + 60 * args.minutes if args.minutes else float("inf")
        if args.probes:
            for line in at_once(jobs, args):
                lines.append({**line, "visit": name})
                keep(lines[-1])
            left = []
        else:
            left = Visit(name, lines, keep, lambda some, slot: launch(some, args), plan, runs, deadline).go(1)
    for run, stage in left:
        print(f"{run}: {stage} not finished; run the same with the lines so far in --have", file=sys.stderr)
    if any_run(lines):
        print(report(lines, plan, args.commit))
    return status(lines, name, bool(left))
