"""One step in seconds and bytes: what every simulation walks.

A *timeline* has the clocks of a step and the bytes on its device, as they are by now: the clocks of compute, of the host that
launches it, and of the two lanes that copy. *Levels* are bytes at each place of an order that is known, as that of saves and
requests.
"""

from __future__ import annotations

from enum import IntEnum
from itertools import accumulate

HIDDEN = 1.01
"""Copies hide if a step takes at most so many times its computation."""


class Lane(IntEnum):
    """What goes on beside the computation, one thing after the other."""

    OUT = 0
    """Copies from the device to the host."""
    BACK = 1
    """Copies from the host to the device."""
    HOST = 2
    """What the host does for the computation before that can begin."""


class Timeline:
    """A step as it goes on.

    Its moments are those of a step that waits for nothing, in seconds from its begin. Whatever compute waits for makes all
    later moments late.
    """

    __slots__ = ("_free_s", "late_s", "live_bytes")

    def __init__(self) -> None:
        self.late_s = 0.0
        """How late compute is by now."""
        self.live_bytes = 0
        """Bytes on the device that the step counts."""
        self._free_s = [0.0] * len(Lane)

    def now_s(self, moment_s: float) -> float:
        return moment_s + self.late_s

    def issue(self, lane: Lane, seconds: float, *, after_s: float = 0.0, latency_s: float = 0.0) -> float:
        """Put something on a lane; return when it is over. It begins when what was before it is, and not before a time."""
        end_s = self._free_s[lane] = max(self._free_s[lane], after_s) + latency_s + seconds
        return end_s

    def free_s(self, lane: Lane) -> float:
        return self._free_s[lane]

    def wait(self, moment_s: float, until_s: float) -> float:
        """Let compute wait at a moment until a time; return for how long."""
        before_s = self.late_s
        self.late_s = max(before_s, until_s - moment_s)
        return self.late_s - before_s


class Levels:
    """Bytes at each place of an order, told as differences: a span of places costs the same at any length."""

    __slots__ = ("_changes",)

    def __init__(self, num_places: int) -> None:
        self._changes = [0] * (num_places + 1)

    def add(self, start: int, end: int, num_bytes: int) -> None:
        """Add bytes from a place on, up to another. An empty span is nothing."""
        if start < end:
            self._changes[start] += num_bytes
            self._changes[end] -= num_bytes

    def each(self) -> list[int]:
        return list(accumulate(self._changes))

    @property
    def peak_bytes(self) -> int:
        return max(accumulate(self._changes))
