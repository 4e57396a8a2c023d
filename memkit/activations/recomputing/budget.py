"""Deciders for the saves of a recorded forward. That of `Rematerialize` drops values by a plan, or by the score meanwhile."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memkit.activations.saved.counts import Counts
from memkit.activations.saved.traces import Follower, OpTrace, SaveKey, Trace, Traces
from memkit.core.sizes import format_bytes
from memkit.device import Device
from memkit.errors import BudgetInfeasible
from memkit.plan import Action, DTRScore, Plan, infeasible, tell_kept
from memkit.recording.ops import OpKinds

if TYPE_CHECKING:
    from memkit.activations.saved.state import RematState

_FEW = 3
"""A `MemoryBudget` that can't be kept to is exceeded rather than run values again more often."""
NO_BUDGET = sys.maxsize
"""Only values that the user marks are dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RematOptions:
    budget: int | float = NO_BUDGET
    policy: str = "plan"
    plan: Plan | None = None
    score: DTRScore = field(default_factory=DTRScore)
    min_bytes: int
    strict: bool = False
    verify: bool = False
    device: Device | None = field(compare=False)
    kinds: OpKinds

    def is_like(self, other: RematOptions) -> bool:
        here, there = self.device, other.device
        is_there = here is there or (here is not None and there is not None and here.torch_device == there.torch_device)
        return is_there and self == other and self.keeps_all == other.keeps_all

    @property
    def keeps_all(self) -> bool:
        return isinstance(self.budget, float) and self.budget == 1

    @property
    def may_settle(self) -> bool:
        return self.policy == "plan" and self.plan is None and not self.verify and self.budget != NO_BUDGET

    @property
    def may_drop(self) -> bool:
        return not self.keeps_all and self.budget != NO_BUDGET


def recorded_alone(min_bytes: int, device: Device | None, kinds: OpKinds, *, policy: str = "plan") -> RematOptions:
    score = DTRScore(max_replays=_FEW)
    return RematOptions(policy=policy, score=score, min_bytes=min_bytes, device=device, kinds=kinds)


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


class BudgetDecider(Decider):
    """Decides for each save of one forward whether it is dropped at once, notes the budget in the iteration's counts, and
    judges the last iteration. If the budget can't be kept, it raises `BudgetInfeasible`, or warns, unless `with_regions`
    returns, for a trace and the plan of single ops with the fewest bytes, that later steps fit with regions."""

    def __init__(
        self,
        state: RematState,
        options: RematOptions,
        counts: Counts,
        with_regions: Callable[[Trace, Plan], int | None] | None,
    ) -> None:
        traces, last = state.traces, state.counts
        super().__init__(Follower(traces if options.policy != "dtr" else Traces()))
        self._options, self._counts, self._warn, self._with_regions = options, counts, state.warn_once, with_regions
        trace = self.follower.trace
        plan = self._plan_of(trace, is_entry=True)
        if trace is None or trace is not traces.latest:
            self._judge(last)  # before the counts change: they may be the same
        self._follow(plan)

    def _change_plan(self) -> None:
        self._follow(self._plan_of(self.follower.trace))

    def action(self, value: int, held_bytes: int) -> Action | None:
        if self.plan is not None:
            return self._actions.get(value)
        return Action.RECOMPUTE if held_bytes > self.limit_bytes else None

    def grow(self) -> None:  # a budget as a share of the saved bytes
        if self.plan is None:
            self._set_limit()

    def _budget_of(self, trace: Trace | None) -> float:
        budget = self._options.budget
        if isinstance(budget, int):
            return budget
        if trace is not None and trace.ops is not None:
            return budget * trace.ops.step.saved_bytes
        return math.inf if budget == 1 else budget * self._counts.saved_bytes

    def _set_limit(self) -> None:
        counts = self._counts
        counts.budget = self._options.budget
        counts.budget_bytes = self._budget_of(self.follower.trace)
        counts.follows_plan = self.plan is not None
        self.limit_bytes = counts.budget_bytes if self.plan is None else self.plan.limit_bytes

    def _follow(self, plan: Plan | None) -> None:
        self.plan = plan
        self._actions = {} if plan is None else {save.value: save.action for save in plan.saves}
        self._set_limit()

    def _plan_of(self, trace: Trace | None, *, is_entry: bool = False) -> Plan | None:
        options = self._options
        if trace is None or trace.ops is None:
            return None
        given, saves = options.plan, trace.ops.step.saves
        if given is not None:
            if [planned.value for planned in given.saves] == list(dict.fromkeys(saves)):
                return given
            self._warn(
                "plan",
                f"the plan that was given is of another step: it has {len(given.saves)} values, and {len(set(saves))} were "
                "saved. It is not used.",
            )
        budget_bytes = math.ceil(self._budget_of(trace))
        try:
            return trace.ops.plan(budget_bytes, options.score)
        except BudgetInfeasible as error:
            least = trace.ops.planner(options.score).least(budget_bytes)
            if self._with_regions is not None:
                # without an entry, the next one follows the same trace, and tells
                smallest = self._with_regions(trace, least) if is_entry else 0
                if smallest is not None and smallest <= budget_bytes:
                    return least
                if smallest is not None and smallest < error.smallest_bytes:
                    error = infeasible(budget_bytes, smallest)
            if options.strict and is_entry:
                raise error from None
            self._warn_of_budget(str(error))
            return least

    def _judge(self, last: Counts) -> None:
        is_to_be_judged, last.is_to_be_judged = last.is_to_be_judged, False
        if not (is_to_be_judged and last.exceeds_budget and last.budget == self._options.budget):
            return
        message = (
            f"a budget of {format_bytes(math.ceil(last.budget_bytes))} was exceeded: the last step took "
            f"{format_bytes(last.peak_bytes)}, and no op of it makes more than {format_bytes(last.largest_bytes)}"
            f"{tell_kept(last.opless_bytes)}"
        )
        if self._options.strict:
            raise BudgetInfeasible(message, last.peak_bytes)
        self._warn_of_budget(message)

    def _warn_of_budget(self, message: str) -> None:
        self._warn(f"budget {self._options.budget}", f"{message}. It is exceeded by as little as can be.")
