"""The `grad` of a parameter that `when="backward"` has stepped."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NoReturn

from memkit.errors import StateOffloadError
from memkit.stand_ins import GradientStandIn

if TYPE_CHECKING:
    from memkit.states.records import StateRecord


class ConsumedGradient(GradientStandIn):
    """The stand-in of `StateOffload`: see `GradientStandIn`."""

    error = StateOffloadError
    advice = 'With when="backward" gradients cannot be clipped, scaled or read. Use when="step"'


def let_go_of_consumed(records: Iterable[StateRecord]) -> None:
    """Have parameters that were stepped have no gradient, rather than its stand-in."""
    for record in records:
        if type(record.parameter.grad) is ConsumedGradient:
            record.parameter.grad = None


def refuse_another(record: StateRecord) -> NoReturn:
    """Raise since a parameter was stepped within the backward, and gets another gradient of the same step.

    Raises:
        StateOffloadError: always.
    """
    raise StateOffloadError(
        f"{record.name} was stepped within an earlier backward of this step, and another brings it a gradient. To "
        "accumulate, put `with states.accumulate():` around all backwards but the last one; after one whose gradients you have "
        "zeroed to leave a step out, call optimizer.step() first. A backward inside of another one can't be stepped"
    )
