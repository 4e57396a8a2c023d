"""Says for each save of one recorded forward what is done with it: what deciders of all kinds have in common."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memkit.activations.saved.traces import Follower, SaveKey
    from memkit.plan import Action


class Decider(ABC):
    """Says for each save of one forward what is done with it at once.

    Args:
        follower: how the forward goes along those that are known.
    """

    limit_bytes: float = math.inf
    """What saved values and replays may take on the device."""

    def __init__(self, follower: Follower) -> None:
        self.follower = follower

    @property
    @abstractmethod
    def follows_plan(self) -> bool:
        """Whether a plan is followed, or else the score decides."""

    @property
    @abstractmethod
    def retained(self) -> Collection[int]:
        """Values that autograd does not save, and that the plan needs."""

    @property
    def known_s(self) -> Sequence[float]:
        """What each op takes, as far as the forward that is followed has told."""
        trace = self.follower.trace
        return () if trace is None or trace.ops is None else trace.ops.step.lineage.seconds

    @property
    def num_seen(self) -> int:
        """How many forwards were like the one that is followed."""
        trace = self.follower.trace
        return 0 if trace is None or trace.ops is None else trace.ops.num_seen

    def note(self, key: SaveKey, funcs: list[object]) -> bool:
        """Take note of a save; tell whether that has changed the plan."""
        trace = self.follower.trace
        self.follower.note(key, funcs)
        if self.follower.trace is trace:
            return False
        self._change_plan()
        return True

    @abstractmethod
    def _change_plan(self) -> None:
        """Another forward is followed than before."""

    @abstractmethod
    def action(self, value: int, held_bytes: int) -> Action | None:
        """Return what is done with a value as soon as it is saved; None where this decider has no reason to do anything: it
        stays as far as this context goes, until room is short.

        Args:
            held_bytes: what would be held with it, if there is a context outside that takes what is not dropped.
        """

    @abstractmethod
    def grow(self) -> None:
        """What is saved has grown, and with it perhaps the limit."""
