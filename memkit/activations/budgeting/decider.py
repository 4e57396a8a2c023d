"""The decider of `MemoryBudget`: by the plan of the step, or else by the score."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from memkit.activations.recomputing.decider import Decider
from memkit.activations.saved.traces import Follower, Trace, Traces
from memkit.plan import Action

if TYPE_CHECKING:
    from memkit.activations.budgeting.learned import Planned


class PlannedDecider(Decider):
    """Decides for each save of one forward, by a plan, or without one by the score and what the device has room for.

    Args:
        traces: the traces of the tag.
        plan_of: returns the plan for a step like an earlier one, None if there is none.
        limit_bytes: returns the most bytes that saved values and replays may take on the device now, for steps without a plan.
    """

    def __init__(self, traces: Traces, plan_of: Callable[[Trace], Planned | None], limit_bytes: Callable[[], float]) -> None:
        super().__init__(Follower(traces))
        self.planned: Planned | None = None
        """The plan that is followed; None if the score decides."""
        self._plan_of, self._limit_bytes = plan_of, limit_bytes
        self._change_plan()

    @property
    def follows_plan(self) -> bool:
        return self.planned is not None

    @property
    def retained(self) -> Collection[int]:
        return () if self.planned is None else self.planned.schedule.retained

    def _change_plan(self) -> None:
        trace = self.follower.trace
        self.planned = None if trace is None else self._plan_of(trace)
        self.grow()

    def leave(self) -> None:
        """Follow no plan from here on, since the step deviates from it."""
        self.follower.give_up()
        self._change_plan()

    def action(self, value: int, held_bytes: int) -> Action | None:
        return None if self.planned is None else self.planned.schedule.actions.get(value)

    def grow(self) -> None:
        self.limit_bytes = self._limit_bytes() if self.planned is None else math.inf
