"""When a step need not be recorded any more: asked at the end of each that was."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memkit.activations.recomputing.budget import BudgetDecider, RematOptions
from memkit.activations.saved.settled import Settled, SizesSeen

if TYPE_CHECKING:
    from memkit.activations.saved.state import RematState

_NUM_RECORDED = 3
"""So many steps are recorded at least: by the third it is known what each op takes."""


def settle(state: RematState, options: RematOptions, decider: BudgetDecider, sizes: SizesSeen | None) -> None:
    """Note what the next steps are to do, now that one was recorded to its end.

    Args:
        state: what is known under the tag; its counts are those of the step.
        options: what was asked for.
        decider: what has said what to drop.
        sizes: what was saved, if that was added up.
    """
    state.num_recorded += 1
    state.settled = None
    if not options.may_settle or state.num_recorded < _NUM_RECORDED or _has_wishes(state):
        return
    if state.counts.num_dropped:
        return
    if sizes is None:
        state.settled = Settled(options=options, sizes=SizesSeen(options.min_bytes))
    elif decider.plan is not None and decider.num_seen >= _NUM_RECORDED:
        state.settled = Settled(options=options, sizes=sizes)


def _has_wishes(state: RematState) -> bool:
    """Tell whether the user has asked to drop or to move something, which may come again."""
    steps = [trace.ops.step for trace in state.traces if trace.ops is not None]
    return any(step.dropped or step.moved for step in steps)
