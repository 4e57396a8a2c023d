"""Counts calls of memkit's own functions: each is time of the host."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch

import memkit
from memkit.device import Event, ReferenceDevice, Stream
from memkit.device.reference import ReferenceEvent

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


class CallsOfDevice(ReferenceDevice):
    """Counts what costs a real device's host microseconds each."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def record_event(self, stream: Stream | None = None, *, timed: bool = True) -> ReferenceEvent:
        self.counts["timed" if timed else "untimed"] += 1
        return super().record_event(stream, timed=timed)

    def wait_event(self, stream: Stream, event: Event) -> None:
        self.counts["waits"] += 1
        super().wait_event(stream, event)

    def allocate(self, num_bytes: int) -> torch.UntypedStorage:
        self.counts["storages"] += 1
        return super().allocate(num_bytes)

    def synchronize(self, event: Event | None = None) -> None:
        self.counts["stops"] += 1
        super().synchronize(event)
