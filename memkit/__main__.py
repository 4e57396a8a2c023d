"""The entry point of the `memkit` command. It runs before slow imports, so that Ctrl-C is one line from here on."""

from __future__ import annotations

import os
import signal
import sys


def _stop(*_: object) -> None:
    """End the process at once: code that is being imported or measured might turn an exception into another one."""
    os.write(2, b"\nmemkit: error: interrupted\n")
    os._exit(130)


def main() -> int:
    signal.signal(signal.SIGINT, _stop)
    from memkit.cli.main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
