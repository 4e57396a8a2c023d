"""The `grad` of a parameter that `train="fused"` has stepped."""

from __future__ import annotations

from memkit.errors import LayerOffloadError
from memkit.stand_ins import GradientStandIn


class SteppedGradient(GradientStandIn):
    """The stand-in of `LayerOffload`: see `GradientStandIn`."""

    error = LayerOffloadError
    advice = 'With train="fused" gradients cannot be clipped by their global norm, scaled or read. Use train="host"'
