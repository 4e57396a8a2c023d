"""What ops take: measured in an earlier forward, or guessed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memkit.device import Device
from memkit.device.ceilings import GUESSED, Ceilings, measure_ceilings
from memkit.recording.recorded import CostKey, cost_key

_MAX_COSTS = 8192
"""For so many kinds and sizes of ops it is remembered what they take."""


class OpCosts:
    """What the ops of one tag take."""

    def __init__(self) -> None:
        self.device: Device | None = None
        """Where they run."""
        self.measured_s: dict[CostKey, float] = {}
        self.guessed_s: dict[CostKey, float] = {}
        self._ceilings: Ceilings | None = None

    def estimate_s(self, func: Any, args: Sequence[Any], results: Any) -> float:
        """Return the seconds of an op, from its arguments and what it has returned."""
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
        """Take up what was measured."""
        _remember(self.measured_s, found)


def _remember(costs_s: dict[CostKey, float], found: dict[CostKey, float]) -> None:
    """Add to what is known, and forget the oldest if that is too much."""
    costs_s.update(found)
    while len(costs_s) > _MAX_COSTS:
        del costs_s[next(iter(costs_s))]
