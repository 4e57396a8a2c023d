"""What features predicted and did, as the plain numbers that loggers take."""

from __future__ import annotations

from collections.abc import Iterable

from memkit.activations import SavedTensorStats
from memkit.weights import LayerStats

_OF_CONTEXTS = {
    "budget_bytes": "budget_bytes",
    "predicted_peak_bytes": "predicted_peak_bytes",
    "step_peak_bytes": "step_peak_bytes",
    "peak_allocated_bytes": "peak_allocated_bytes",
    "predicted_s": "predicted_s",
    "step_s": "step_s",
    "offloaded_bytes": "moved_out_bytes",
    "recomputed_bytes": "dropped_bytes",
}
_OF_LAYERS = {
    "layers_predicted_peak_bytes": "predicted_peak_bytes",
    "layers_peak_bytes": "actual_peak_bytes",
    "layers_predicted_s": "predicted_s",
    "layers_s": "actual_s",
    "layers_slot_bytes": "slot_bytes",
    "layers_host_bytes": "host_bytes",
    "layers_h2d_bytes": "h2d_bytes",
    "layers_d2h_bytes": "d2h_bytes",
}
"""Names of figures, and the fields that they are read from."""

_PREFIX = "memkit_"


def figures_of(contexts: Iterable[SavedTensorStats], layers: Iterable[LayerStats]) -> dict[str, float]:
    """Return what is known by now, by names that say the unit; what is not known yet is left out.

    Args:
        contexts: of each tag. Where there are several, names have the tag in them.
        layers: of each `LayerOffload`; their sums.
    """
    found, many = dict[str, float](), list(contexts)
    for stats in many:
        prefix = _PREFIX if len(many) == 1 else f"{_PREFIX}{stats.tag}_"
        values = {name: getattr(stats, field) for name, field in _OF_CONTEXTS.items()}
        found |= {f"{prefix}{name}": value for name, value in values.items() if value is not None}
    for layer_stats in layers:
        values = {name: getattr(layer_stats, field) for name, field in _OF_LAYERS.items()}
        values["layers_stall_s"] = sum(layer_stats.stall_s.values())
        for name, value in values.items():
            if value is not None:
                found[f"{_PREFIX}{name}"] = found.get(f"{_PREFIX}{name}", 0) + value
    return found
