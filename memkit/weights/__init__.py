"""Act on weights: `LayerOffload` streams those of layers."""

from memkit.weights.layers import LayerOffload
from memkit.weights.scaler import GradScaler
from memkit.weights.stats import LayerStats

__all__ = ["GradScaler", "LayerOffload", "LayerStats"]
