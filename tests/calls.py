"""Counts calls of memkit's own functions: each is time of the host."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import memkit

PACKAGE = str(Path(memkit.__file__).parent)
DEVICE = str(Path(PACKAGE) / "device")


def num_calls(run: Callable[[], object]) -> int:
    """Return how many of memkit's functions, apart from those of its devices, are called meanwhile."""
    found = 0

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal found
        filename = frame.f_code.co_filename
        found += event == "call" and filename.startswith(PACKAGE) and not filename.startswith(DEVICE)

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found
