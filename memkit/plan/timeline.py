"""Seconds and bytes of one step, as every simulation walks it."""

from __future__ import annotations

from enum import IntEnum
from itertools import accumulate

HIDDEN = 1.01  # copies hide if a step takes at most this many times its computation


class Lane(IntEnum):
    OUT = 0
    BACK = 1


class Timeline:
    """A step in progress: its moments are in seconds as if it waited for nothing; each wait of compute delays later ones."""

    __slots__ = ("free_s", "late_s")

    def __init__(self) -> None:
        self.late_s = 0.0
        self.free_s = [0.0] * len(Lane)

    def now_s(self, moment_s: float) -> float:
        return moment_s + self.late_s

    def issue(self, lane: Lane, seconds: float, *, after_s: float = 0.0, latency_s: float = 0.0) -> float:
        """Put work on a lane, not to begin before `after_s`; return when it ends."""
        end_s = self.free_s[lane] = max(self.free_s[lane], after_s) + latency_s + seconds
        return end_s

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
        if start < end:
            self._changes[start] += num_bytes
            self._changes[end] -= num_bytes

    def each(self) -> list[int]:
        return list(accumulate(self._changes))

    @property
    def peak_bytes(self) -> int:
        return max(accumulate(self._changes))
