"""A clock that only goes on when it is told to: seconds are exact, however busy the machine is."""

from __future__ import annotations

import pytest

from memkit.device import cpu, reference


class Clock:
    """Stands in for the `time` module where devices read it. A reading takes `tick_s`."""

    def __init__(self, tick_s: float = 0.0) -> None:
        self.now_s, self._tick_s = 0.0, tick_s

    def perf_counter(self) -> float:
        self.now_s += self._tick_s
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def set_clock(monkeypatch: pytest.MonkeyPatch, tick_s: float = 0.0) -> Clock:
    """Let the devices of this machine that have no GPU read a clock of their own, and return it."""
    clock = Clock(tick_s)
    for module in (cpu, reference):
        monkeypatch.setattr(module, "time", clock)
    return clock
