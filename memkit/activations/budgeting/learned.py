"""What is known of steps that do the same: what was measured of them, and the plans for them."""

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
    """A plan that steps follow."""

    plan: MemoryPlan
    schedule: Schedule
    allowed_bytes: int
    """What the step may take: the budget, less what is left free."""
    headroom_bytes: int = 0
    """Of what is left free, so much is for what a step takes beyond what was predicted; it is taken where nothing else fits."""


@dataclass(eq=False, slots=True)
class LearnedStep:
    """What is known of steps like one trace."""

    shown: Foresight | None = None
    """What the first step under the tag has shown, if this was its kind."""
    meter: Meter | None = None
    """What has measured the last one that was measured."""
    planner: JointPlanner | None = None
    measured_s: list[float] = field(default_factory=list)
    """What each op takes."""
    plans: dict[int, Planned] = field(default_factory=dict)
    """By what they are allowed to take."""
    given: Planned | None = None
    """What the user has asked to be followed."""
    over_bytes: int = 0
    """By how much steps took more than was predicted."""
    num_replans: int = 0
    num_links: int = 0
    """How often the link was found to be another than was planned with."""
    num_judged: int = 0
    rates: list[tuple[float, float]] = field(default_factory=list)
    """How fast the first steps of a plan have copied, out and back, in bytes per second."""
    has_scaled: bool = False
    """Whether what its ops take was set by what steps took."""
    steady: SteadyStep | None = None
    """What a whole step has shown that has followed a plan."""
    shapes: Shapes | None = None
    """What the module was called with in it, if that is known."""
    noted: Planned | None = None
    """The plan that it had followed, of use or not."""
    num_left: int = 0
    """How many steps have begun as steady ones, and were others."""
    may_be_quiet: bool = True
    """Whether they may be followed function by function: not once a step that was has gone another way."""
    has_chosen: bool = False
    """Whether it was looked at which way its steps go."""
