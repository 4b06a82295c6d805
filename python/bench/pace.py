"""How a rank of `distributed.py` gets on: that it does not hang, and when it may train."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import faulthandler
import fcntl
import json
import math
import os
import sys
import threading
import time
from typing import Any

from measure import my_turn


def say(line: dict[str, Any]) -> None:
    """A line that is whole, whatever the other ranks of this host write: a pipe takes long ones by pieces."""
    sys.stdout.flush()
    with open(__file__) as file:
        # A file system without locks has it without.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        left = (json.dumps(line) + "\n").encode()
        while left:
            left = left[os.write(1, left) :]


class Watch(threading.Thread):
    """Ends the process when the main thread does not get on."""

    def __init__(self, seconds: float, line: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.seconds, self.line = seconds, line
        self.last = (0, time.monotonic())
        self.done = threading.Event()

    def at(self, step: int) -> None:
        self.last = (step, time.monotonic())
        # Should Python itself be stuck in a call, this still ends the process.
        faulthandler.dump_traceback_later(2 * self.seconds, exit=True)

    def pause(self) -> None:
        """Others have the GPUs: from now on nothing is expected."""
        self.last = (self.last[0], math.inf)
        faulthandler.cancel_dump_traceback_later()

    def run(self) -> None:
        while not self.done.wait(min(1.0, self.seconds / 4)):
            step, since = self.last
            if time.monotonic() - since > self.seconds:
                say(
                    {
                        **self.line,
                        "completed": False,
                        "hang": True,
                        "error": f"no step within {self.seconds:.0f} s after step {step}",
                    }
                )
                faulthandler.dump_traceback()
                os._exit(3)

    def stop(self) -> None:
        self.done.set()
        faulthandler.cancel_dump_traceback_later()


class Turns:
    """When the ranks may train, where the processes of several allocators take turns on the GPUs; otherwise always."""

    def __init__(self, dist: Any, args: argparse.Namespace, watch: Watch) -> None:
        self.dist, self.steps, self.watch = dist, args.steps, watch
        # On the host: a collective that waits on the GPUs would be on them in the others' turns. A turn may be long in coming.
        self.group = dist.new_group(backend="gloo", timeout=datetime.timedelta(hours=1)) if args.turns else None

    def next(self, at: int) -> int:
        """Waits for this one's turn after `at` steps; the step at which it ends."""
        if self.group is None:
            return self.steps
        self.watch.pause()
        count = [my_turn(at) if self.dist.get_rank() == 0 else 0]
        self.dist.broadcast_object_list(count, src=0, group=self.group)
        self.watch.at(at)
        return at + count[0]

    def over(self) -> None:
        """Waits until all are through: what ends frees its memory, which takes the driver's time."""
        if self.group is not None:
            self.next(self.steps)
