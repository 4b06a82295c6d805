"""The command line: ``python -m xseg replay run.pickle --limit 1.02x``."""

import signal
import sys

from . import _native


def main() -> int:
    """Run the command that the program's arguments name; returns its exit status."""
    # The command runs outside of Python, which would notice Ctrl-C only when it has ended.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _native.cli(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
