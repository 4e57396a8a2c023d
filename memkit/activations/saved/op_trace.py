"""What is known of the ops of a forward: what each takes, which modules were called, and the plans for them."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, TypeVar

from torch import nn

from memkit.plan import DTRScore, ModuleCall, Plan, RematPlanner, Step
from memkit.recording.module_calls import Aftermath, NotedCall, SpanCall, span_calls
from memkit.recording.recording import Recording

_Planned = TypeVar("_Planned")
_DIGITS = re.compile(r"\d+")


@dataclass(eq=False, slots=True)
class OpTrace:
    """What is known of the ops of a trace."""

    step: Step
    names: dict[int, tuple[str, str]]
    """For each saved value that ops make, the op and the module."""
    calls: tuple[ModuleCall, ...] = ()
    """The calls of modules, as the last forward had them in which they were noted."""
    modules: tuple[weakref.ref[nn.Module], ...] = ()
    """For each of them, which module is called."""
    spans: tuple[SpanCall, ...] = ()
    """Neighbors among them that may be recomputed as one."""
    num_noted: int = 0
    """In how many forwards they were noted."""
    num_seen: int = 1
    is_measured: bool = False
    """Whether it is known what each op takes, and not only guessed."""
    has_order: bool = False
    """Whether a whole backward was seen."""
    rewritten: frozenset[int] = frozenset()
    """Roots that were written to before that backward had ended."""
    _planner: RematPlanner | None = None
    _regions: dict[tuple[int | None, int], Any] = field(default_factory=dict)
    """By budget, and by the bytes that its plan by ops takes."""
    _plans: dict[tuple[int, DTRScore], Plan] = field(default_factory=dict)

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

    def regions(self, of_ops: Plan, plan: Callable[[], _Planned]) -> _Planned:
        """Return what `plan` has returned, which is called once for a plan by ops."""
        key = of_ops.budget_bytes, of_ops.predicted_peak_bytes
        if key not in self._regions:
            self._regions[key] = plan()
        found: _Planned = self._regions[key]
        return found

    def forget_regions(self) -> None:
        """What modules may be is another than it was: they are asked again."""
        self._regions.clear()

    def note_calls(self, noted: Sequence[NotedCall], recording: Recording) -> None:
        """Take up which modules were called, in a forward that is over."""
        known_s = {(call.name, call.number): call.device_s for call in self.calls}
        aftermath = Aftermath(recording, [call.given for call in noted])
        alike = dict[int, list[NotedCall]]()
        for call in noted:
            alike.setdefault(id(call.module), []).append(call)
        calls = (call.as_planned(recording, aftermath, alike) for call in noted)
        self.calls = tuple(replace(call, device_s=known_s.get((call.name, call.number), 0.0)) for call in calls)
        self.modules = tuple(call.module for call in noted)
        self.spans = span_calls(noted, recording, aftermath, alike)
        self.num_noted += 1
        self._regions.clear()

    def learn_calls(self, taken_s: Mapping[int, float]) -> None:
        """It is known what compiled calls took, by their places: those that are alike take the median, whether timed or not."""
        alike = dict[Any, list[float]]()
        kinds = [_kind_of(call, module()) for call, module in zip(self.calls, self.modules, strict=True)]
        for place, seconds in taken_s.items():
            alike.setdefault(kinds[place], []).append(seconds)
        medians_s = {kind: median(found) for kind, found in alike.items()}
        self.calls = tuple(
            replace(call, device_s=medians_s.get(kind, call.device_s)) for call, kind in zip(self.calls, kinds, strict=True)
        )
        self._regions.clear()

    def learn_order(self, uses: tuple[int, ...], use_ends: tuple[int, ...], rewritten_bytes: Mapping[int, int]) -> None:
        """Take up what a whole backward has asked for, and which roots were written to by its end."""
        retained_bytes = {**self.step.retained_bytes, **rewritten_bytes}
        self.learn(replace(self.step, uses=uses, use_ends=use_ends, retained_bytes=retained_bytes))
        self.has_order, self.rewritten = True, frozenset(rewritten_bytes)

    def learn(self, step: Step) -> None:
        """More is known of the step: plans are made anew."""
        self._plans.clear()
        self._regions.clear()
        self.step, self._planner = step, None


def _kind_of(call: ModuleCall, module: nn.Module | None) -> tuple[object, ...]:
    """Return what calls have in common that take as long: those of the blocks of a model."""
    return type(module), _DIGITS.sub("*", call.name), call.shapes, call.saves[1] - call.saves[0]
