"""What `MemoryBudget` remembers under a tag from one iteration to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memkit.activations.budgeting.foresight import Foresight
from memkit.activations.budgeting.inside import InsideBudgets
from memkit.activations.budgeting.learned import Planned
from memkit.activations.budgeting.learning import Learning
from memkit.activations.budgeting.states import ComingStates
from memkit.activations.saved.state import RematState, States

if TYPE_CHECKING:
    from memkit.activations.budgeting.limits import Limits
    from memkit.activations.budgeting.ways import Ways
    from memkit.activations.context import Shapes
    from memkit.activations.saved.traces import Trace
    from memkit.device import Event, MemoryCounter
    from memkit.plan import StepTrace
    from memkit.profile import MemoryReport


def regions_tag(tag: str) -> str:
    """Return the tag under which calls of modules are planned for the steps of another."""
    return f"{tag} (regions of MemoryBudget)"


def copies_tag(tag: str) -> str:
    """Return the tag under which it is known what leaves beside calls of modules that are recomputed."""
    return f"{tag} (copies of MemoryBudget)"


class BudgetState(RematState):
    """What `MemoryBudget` remembers."""

    name = "MemoryBudget"

    def __init__(self, tag: str) -> None:
        super().__init__(tag)
        self.learning = Learning(self.warn_once)
        self.budget_bytes: int | None = None
        """As it was asked for last."""
        self.is_within_capacity = False
        """Whether it was seen that the device has as much as the budget."""
        self.coming = ComingStates(None)
        """What an optimizer is still to make."""
        self.foreseen: StepTrace | None = None
        """What the module that a context is attached to does, as seen without data ahead of its first call."""
        self._foresight: tuple[StepTrace | None, Foresight | None] = (None, None)
        self.inside = InsideBudgets()
        self.limits: Limits | None = None
        """What was asked for last."""
        self.shapes: Shapes | None = None
        """What the module was called with last, if that is known."""
        self.most_numel = 0
        """So many elements at most it was given in steps in which all has fit."""
        self.ways: Ways | None = None
        """What chooses how steps keep to the budget; None where there is nothing to choose, or not yet."""
        self.ways_for: tuple[Trace, Shapes | None] | None = None
        """Which steps that is for, and what the module is called with in them. Others follow plans of their own."""
        self.regions_tag: str | None = None
        """Under which the calls of modules are planned, if the last forward was one in which they are recomputed."""
        self.copies_tag: str | None = None
        """The same of what leaves beside, if anything does."""
        self.before = 0, 0
        """As the last forward began: how many backwards had ended, and how many steps had departed from their plan."""
        self.region_times: list[tuple[Event, Event]] = []
        """When the last steps began and ended in which calls of modules were recomputed."""
        self.judged: tuple[Trace, Planned] | None = None
        """What the last forward has followed, if what it takes is to be looked at."""

    def foresight(self, report: MemoryReport | None) -> Foresight | None:
        """Return what steps will take that are not planned yet: as the first one has shown, or as a report foretells or a run
        without data; None if there is neither."""
        latest = self.traces.latest
        shown = None if latest is None else self.learning.shown(latest)
        if shown is not None:
            self.foreseen, self._foresight = None, (None, None)  # of no use any more
            return shown
        trace = (None if report is None else report.trace) or self.foreseen
        if trace is not self._foresight[0]:
            is_whole = trace is not self.foreseen
            self._foresight = trace, None if trace is None else Foresight(trace, is_whole=is_whole)
        return self._foresight[1]

    @property
    def counter(self) -> MemoryCounter | None:
        """That of the device."""
        device = self.costs.device
        return None if device is None else device.memory_counter()


budget_states = States(BudgetState)
