"""The base class of deciders, which say what is done with each save of a recorded forward."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memkit.activations.saved.traces import Follower, SaveKey
    from memkit.plan import Action


class Decider(ABC):
    """Decides for each save of one forward what is done with it at once.

    Args:
        follower: tells which known forwards this one is like so far.
    """

    limit_bytes: float = math.inf

    def __init__(self, follower: Follower) -> None:
        self.follower = follower

    @property
    @abstractmethod
    def follows_plan(self) -> bool:
        """Whether a plan is followed; otherwise the score decides."""

    @property
    @abstractmethod
    def retained(self) -> Collection[int]:
        """Values that autograd does not save, and that the plan holds."""

    @property
    def known_s(self) -> Sequence[float]:
        trace = self.follower.trace
        return () if trace is None or trace.ops is None else trace.ops.step.lineage.seconds

    @property
    def rewritten(self) -> Collection[int]:
        """Roots that were written to before the backward of that forward had ended."""
        trace = self.follower.trace
        return () if trace is None or trace.ops is None else trace.ops.rewritten

    @property
    def num_seen(self) -> int:
        trace = self.follower.trace
        return 0 if trace is None or trace.ops is None else trace.ops.num_seen

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
        """Return what is done with a value as soon as it is saved; None to keep it until the limit is exceeded.

        Args:
            held_bytes: bytes that would be held with it, if a context outside takes what is not dropped.
        """

    @abstractmethod
    def grow(self) -> None:
        """Called when the saved bytes have grown, and perhaps the limit."""
