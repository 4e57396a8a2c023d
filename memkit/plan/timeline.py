"""One step in seconds and bytes, as every simulation walks it.

A *timeline* has the clocks of a step: compute, and the two copy lanes.
*Levels* are bytes at each place of a known order, such as saves and requests.
"""

from __future__ import annotations

from enum import IntEnum
from itertools import accumulate

HIDDEN = 1.01
"""Copies hide if a step takes at most this many times its computation."""


class Lane(IntEnum):
    OUT = 0
    """Copies from the device to the host."""
    BACK = 1
    """Copies from the host to the device."""


class Timeline:
    """A step in progress. Its moments are in seconds as if it waited for nothing; each wait of compute delays later ones."""

    __slots__ = ("_free_s", "late_s")

    def __init__(self) -> None:
        self.late_s = 0.0
        self._free_s = [0.0] * len(Lane)

    def now_s(self, moment_s: float) -> float:
        return moment_s + self.late_s

    def issue(self, lane: Lane, seconds: float, *, after_s: float = 0.0, latency_s: float = 0.0) -> float:
        """Put work on a lane; return when it ends. It begins after the earlier work of the lane, and not before `after_s`."""
        end_s = self._free_s[lane] = max(self._free_s[lane], after_s) + latency_s + seconds
        return end_s

    def free_s(self, lane: Lane) -> float:
        return self._free_s[lane]

    def wait(self, moment_s: float, until_s: float) -> float:
        """Let compute wait at a moment until a time; return the seconds waited."""
        before_s = self.late_s
        self.late_s = max(before_s, until_s - moment_s)
        return self.late_s - before_s


class Levels:
    """Bytes at each place of an order, stored as differences: a span of any length costs the same."""

    __slots__ = ("_changes",)

    def __init__(self, num_places: int) -> None:
        self._changes = [0] * (num_places + 1)

    def add(self, start: int, end: int, num_bytes: int) -> None:
        """Add bytes from `start` up to, but not including, `end`."""
        if start < end:
            self._changes[start] += num_bytes
            self._changes[end] -= num_bytes

    def each(self) -> list[int]:
        return list(accumulate(self._changes))

    @property
    def peak_bytes(self) -> int:
        return max(accumulate(self._changes))
