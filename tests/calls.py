"""Counts calls of memkit's own functions: each is time of the host."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import memkit

PACKAGE = str(Path(memkit.__file__).parent)
DEVICE = str(Path(PACKAGE) / "device")


def is_counted(frame: FrameType) -> bool:
    """Tell whether a frame is one of memkit's, apart from its devices."""
    filename = frame.f_code.co_filename
    return filename.startswith(PACKAGE) and not filename.startswith(DEVICE)


def num_calls(run: Callable[[], object]) -> int:
    """Return how many of memkit's functions, apart from those of its devices, are called meanwhile."""
    found = 0

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal found
        found += event == "call" and is_counted(frame)

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found
