"""What is known of steps that do the same: measurements and plans."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memkit.activations.budgeting.foresight import Foresight
    from memkit.activations.budgeting.meter import Meter
    from memkit.activations.budgeting.schedule import Schedule
    from memkit.activations.budgeting.steady import SteadyStep
    from memkit.activations.context import Shapes
    from memkit.plan import JointPlanner, MemoryPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan that steps follow, and what it was made for."""

    plan: MemoryPlan
    schedule: Schedule
    allowed_bytes: int
    """The most bytes that the step may take: the budget without the headroom."""
    headroom_bytes: int = 0
    """The part of the free bytes that is for what steps take beyond the prediction. It is used if there is no plan
    otherwise."""

    @property
    def exceeds_budget(self) -> bool:
        """Whether there was no plan within the budget."""
        return self.plan.predicted_peak_bytes > self.allowed_bytes + self.headroom_bytes


@dataclass(eq=False, slots=True)
class LearnedStep:
    """What is known of steps like one trace."""

    shown: Foresight | None = None
    """What the first step under the tag has shown, if it was like this one."""
    meter: Meter | None = None
    """The meter of the last measured step."""
    planner: JointPlanner | None = None
    measured_s: list[float] = field(default_factory=list)
    """Seconds of each op."""
    plans: dict[int, Planned] = field(default_factory=dict)
    """The plans, by the bytes that they are allowed to take."""
    given: Planned | None = None
    """The plan that the user passed."""
    over_bytes: int = 0
    """By how many bytes steps exceeded the prediction."""
    num_replans: int = 0
    num_links: int = 0
    """How often the bandwidth turned out to differ from that in the plan."""
    num_judged: int = 0
    rates: list[tuple[float, float]] = field(default_factory=list)
    """Bandwidths in the first steps of a plan, from and to the device, in bytes per second."""
    has_scaled: bool = False
    """Whether the seconds of ops were scaled to the measured seconds of steps."""
    steady: SteadyStep | None = None
    """What is known of the saves of a step that follows a plan."""
    shapes: Shapes | None = None
    """The shapes of the module's inputs in that step, if they are known."""
    noted: Planned | None = None
    """The plan that the last noted step followed, whether or not its notes were of use."""
    num_left: int = 0
    """How many steps began as steady ones and deviated."""
    may_be_quiet: bool = True
    """Whether functions may be followed rather than ops: not after a step that did so has deviated."""
    has_chosen: bool = False
    """Whether it was already decided which ways are to be timed."""
