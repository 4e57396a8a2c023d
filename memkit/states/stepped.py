"""The `grad` of a parameter that `when="backward"` has stepped."""

from __future__ import annotations

from memkit.errors import StateOffloadError
from memkit.stand_ins import GradientStandIn


class ConsumedGradient(GradientStandIn):
    """The stand-in of `StateOffload`: see `GradientStandIn`."""

    error = StateOffloadError
    advice = 'With when="backward" gradients cannot be clipped, scaled or read. Use when="step"'
