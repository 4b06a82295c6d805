"""Checks PyTorch on xseg on a machine with a GPU: one line of JSON a check, each in a process of its own with a time limit.

    python check.py                 # all checks
    python check.py oom graphs      # some
    python check.py --plain         # without the C++ part

The exit status is the number of checks that failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from typing import Any

import common
import graphs
import installing
import memory
import observing
import ranks
import sharing
import speed
from common import CHECKS, FULL_ONLY, LIMIT_S, Skip, mode, start

PARTS = (common, installing, memory, graphs, observing, ranks, sharing, speed)


def one(name: str) -> int:
    began = time.monotonic()
    line: dict[str, Any] = {"check": name, "mode": mode()}
    try:
        line.update(ok=True, found=CHECKS[name]())
    except Skip as reason:
        line.update(ok=True, skipped=str(reason))
    except BaseException as error:
        at = traceback.extract_tb(error.__traceback__)
        where = [f"{frame.name}:{frame.lineno}" for frame in at][-4:]
        line.update(ok=False, error=f"{type(error).__name__}: {str(error)[:800]}", where=where)
    line["seconds"] = round(time.monotonic() - began, 1)
    print(json.dumps(line), flush=True)
    return 0 if line["ok"] else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checks", nargs="*", metavar="CHECK", help="one of: " + " ".join(CHECKS))
    parser.add_argument("--plain", action="store_true", help="without the C++ part")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--call", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.call:
        called = next(getattr(part, args.call) for part in PARTS if hasattr(part, args.call))
        print(json.dumps(called()), flush=True)
        return 0
    if args.one:
        return one(args.one)
    import torch

    if not torch.cuda.is_available():
        print("skipped: PyTorch finds no GPU here, which all checks need", file=sys.stderr)
        return 0
    if args.plain:
        os.environ["CHECK_MODE"] = "plain"
    failed = 0
    names = args.checks or [name for name in CHECKS if mode() == "full" or name not in FULL_ONLY]
    for name in names:
        try:
            run = subprocess.run(
                # Where a crash was, in Python's terms, goes to the standard error.
                [sys.executable, "-X", "faulthandler", __file__, "--one", name],
                capture_output=True,
                text=True,
                timeout=3 * LIMIT_S,
            )
            lines = [line for line in run.stdout.splitlines() if line.startswith("{")]
            if lines and (run.returncode in (0, 1)):
                print(lines[-1], flush=True)
                failed += run.returncode
            else:
                failed += 1
                shown = {
                    "check": name,
                    "mode": mode(),
                    "ok": False,
                    "status": run.returncode,
                    # What it found before it ended so.
                    "line": lines[-1:],
                    "stderr": run.stderr[-1500:],
                }
                print(json.dumps(shown), flush=True)
        except subprocess.TimeoutExpired as error:
            failed += 1
            shown = {"check": name, "mode": mode(), "ok": False, "error": f"no end within {3 * LIMIT_S} s"}
            shown["stderr"] = str(error.stderr)[-800:]
            print(json.dumps(shown), flush=True)
    print(json.dumps({"failed": failed, "checks": len(names)}), flush=True)
    return failed


if __name__ == "__mp_main__" and os.environ.get("CHECK_CHILD_INSTALLS"):
    start("limit:8GiB")
if __name__ == "__main__":
    sys.exit(main())
