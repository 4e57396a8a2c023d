"""Which forward is like which: the sequences of ops and saves that a tag has seen, and their plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from memkit.plan import Action, DTRScore, Plan, RematPlanner, Step

_MAX_TRACES = 16


class SaveKey(NamedTuple):
    """What tells one save from another."""

    num_ops: int
    """How many ops were seen before."""
    value: int
    num_bytes: int
    mark: Action | None = None
    """What the user has asked to do with it, if that was said by then."""


@dataclass(eq=False, slots=True)
class OpTrace:
    """One sequence of ops and saves, and what is known about it."""

    funcs: list[Any]
    saves: list[SaveKey]
    step: Step
    names: dict[int, tuple[str, str]]
    """For each saved value, the op and the module that make it."""
    is_first: bool
    num_seen: int = 1
    is_measured: bool = False
    """Whether it is known what each op takes, and not only guessed."""
    has_order: bool = False
    """Whether a whole backward was seen."""
    _planner: RematPlanner | None = None
    _plans: dict[tuple[int, DTRScore], Plan] = field(default_factory=dict)

    @property
    def is_worth_a_plan(self) -> bool:
        """Whether it may come again: a model that takes another path each time is not planned each time."""
        return self.is_first or self.num_seen > 1

    def planner(self, score: DTRScore) -> RematPlanner:
        """Return who plans it."""
        if self._planner is None or self._planner.score != score:
            self._planner = RematPlanner(self.step, score, lambda value: self.names.get(value, ("", "")))
        return self._planner

    def plan(self, budget_bytes: int, score: DTRScore) -> Plan:
        """Return the plan for a budget.

        Raises:
            BudgetInfeasible: there is none.
        """
        key = (budget_bytes, score)
        if key not in self._plans:
            self._plans[key] = self.planner(score).plan(budget_bytes)
        return self._plans[key]

    def learn(self, step: Step) -> None:
        """More is known of the step: plans are made anew."""
        self._plans.clear()
        self.step, self._planner = step, None


class OpTraces:
    """The traces of one tag, the last one seen first."""

    def __init__(self) -> None:
        self._known: list[OpTrace] = []

    def __iter__(self) -> Iterator[OpTrace]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    @property
    def latest(self) -> OpTrace | None:
        """The last one seen."""
        return self._known[0] if self._known else None

    def are_measured(self) -> bool:
        """Tell whether it is known what each op takes in all that may come again. Which one a forward is shows too late."""
        return all(trace.is_measured for trace in self._known if trace.is_worth_a_plan)

    def add(self, trace: OpTrace) -> None:
        """Put a trace first; forget the one that was not seen for the longest time if there are many."""
        if trace in self._known:
            self._known.remove(trace)
        self._known.insert(0, trace)
        del self._known[_MAX_TRACES:]

    def find(self, funcs: list[Any], saves: list[SaveKey]) -> OpTrace | None:
        """Return the trace of exactly these ops and saves."""
        return next((trace for trace in self._known if trace.saves == saves and trace.funcs == funcs), None)

    def expected(self, funcs: list[Any], saves: list[SaveKey]) -> OpTrace | None:
        """Return the trace that a forward which has begun like this may follow."""
        for trace in self._known:
            if trace.is_worth_a_plan and trace.saves[: len(saves)] == saves and trace.funcs[: len(funcs)] == funcs:
                return trace
        return None


class Follower:
    """How one forward goes along the traces that are known."""

    def __init__(self, traces: OpTraces) -> None:
        self._traces = traces
        self.saves: list[SaveKey] = []
        self.trace = traces.expected([], [])
        """The one that it has followed so far, None if it is new."""
        self._num_matched = 0

    def note(self, funcs: list[Any], key: SaveKey) -> bool:
        """Note a save; tell whether the forward has left its trace with it, for another one or for none."""
        index = len(self.saves)
        self.saves.append(key)
        trace = self.trace
        if trace is None:
            return False
        start, self._num_matched = self._num_matched, len(funcs)
        if index < len(trace.saves) and trace.saves[index] == key and trace.funcs[start : len(funcs)] == funcs[start:]:
            return False
        self.trace = self._traces.expected(funcs, self.saves)
        return True

    def ended_as(self, funcs: list[Any]) -> OpTrace | None:
        """Return the known trace that the whole forward was like."""
        trace = self.trace
        if trace is not None and len(trace.saves) == len(self.saves) and trace.funcs == funcs:
            return trace
        return self._traces.find(funcs, self.saves)
