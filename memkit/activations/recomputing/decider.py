"""The base class of deciders for the saves of a recorded forward."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from memkit.activations.saved.traces import Follower, OpTrace, SaveKey
from memkit.plan import Action, Plan


class Decider(ABC):
    limit_bytes: float = math.inf
    plan: Plan | None = None
    """The followed plan of single ops."""

    def __init__(self, follower: Follower) -> None:
        self.follower = follower

    @property
    def follows_plan(self) -> bool:
        """Whether a plan is followed; otherwise the score decides."""
        return self.plan is not None

    @property
    def retained(self) -> Collection[int]:
        """Values that autograd does not save, and that the plan holds."""
        return () if self.plan is None else self.plan.retained

    @property
    def ops(self) -> OpTrace | None:
        trace = self.follower.trace
        return None if trace is None else trace.ops

    @property
    def known_s(self) -> Sequence[float]:
        return () if self.ops is None else self.ops.step.lineage.seconds

    def note(self, key: SaveKey, funcs: list[object]) -> bool:
        """Note a save; return whether that has changed the plan."""
        trace = self.follower.trace
        self.follower.note(key, funcs)
        if self.follower.trace is trace:
            return False
        self._change_plan()
        return True

    @abstractmethod
    def _change_plan(self) -> None:
        """Called when another forward is followed than before."""

    @abstractmethod
    def action(self, value: int, held_bytes: int) -> Action | None:
        """None to keep a value until `held_bytes`, with those of a context outside, exceed the limit."""

    @abstractmethod
    def grow(self) -> None:
        """Called when the saved bytes have grown, and perhaps the limit."""
