"""The `memkit` command, ahead of all that is slow to import: from here on Ctrl-C is one line, whatever runs."""

from __future__ import annotations

import os
import signal
import sys


def _stop(*_: object) -> None:
    """End the process at once: what is being imported or measured could turn an exception into one of its own."""
    os.write(2, b"\nmemkit: error: interrupted\n")
    os._exit(130)


def main() -> int:
    """Run the `memkit` command; return its exit status."""
    signal.signal(signal.SIGINT, _stop)
    from memkit.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
