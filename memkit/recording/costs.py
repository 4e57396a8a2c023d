"""Seconds of ops, measured in an earlier forward, or guessed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memkit.device import Device
from memkit.device.ceilings import GUESSED, Ceilings, measure_ceilings
from memkit.recording.recorded import CostKey, cost_key

_MAX_COSTS = 8192
"""The seconds of at most this many kinds and sizes of ops are remembered."""


class OpCosts:
    """The seconds of the ops under one tag."""

    def __init__(self) -> None:
        self.device: Device | None = None
        """The device that they run on."""
        self.measured_s: dict[CostKey, float] = {}
        self.guessed_s: dict[CostKey, float] = {}
        self._ceilings: Ceilings | None = None

    def estimate_s(self, func: Any, args: Sequence[Any], results: Any) -> float:
        """Return the seconds of an op, from its arguments and its results."""
        key = cost_key(func, args, results)
        seconds = self.measured_s.get(key) or self.guessed_s.get(key)
        if seconds is None:
            seconds = self._guess_s(func, args, results)
            _remember(self.guessed_s, {key: seconds})
        return seconds

    def _guess_s(self, func: Any, args: Sequence[Any], results: Any) -> float:
        if self._ceilings is None:
            if self.device is None or self.device.torch_device.type == "meta":
                return GUESSED.estimate_s(func, args, results)
            self._ceilings = measure_ceilings(self.device)
        return self._ceilings.estimate_s(func, args, results)

    def learn(self, found: dict[CostKey, float]) -> None:
        """Add measured seconds."""
        _remember(self.measured_s, found)


def _remember(costs_s: dict[CostKey, float], found: dict[CostKey, float]) -> None:
    """Add to the known seconds, and forget the oldest if there are too many."""
    costs_s.update(found)
    while len(costs_s) > _MAX_COSTS:
        del costs_s[next(iter(costs_s))]
