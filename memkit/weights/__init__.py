"""Act on weights: `LayerOffload` streams those of layers."""

from memkit.weights.layers import LayerOffload
from memkit.weights.stats import LayerStats

__all__ = ["LayerOffload", "LayerStats"]
