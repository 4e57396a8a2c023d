"""`live_values`: the predicted and measured figures of features, as plain numbers for TensorBoard, W&B or a progress bar."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from memkit.activations.stats import SavedTensorStats, stats
from memkit.states.state_offload import StateStats
from memkit.weights.layer_offload import LayerStats

_GIB = 2**30
_UNITS = {"_bytes_per_s": ("_gb_per_s", 1e-9), "_bytes": ("_gib", 1 / _GIB), "_s": ("_ms", 1e3)}
"""For the unit at the end of a field: the unit that is shown, and the factor."""

_OF_ANY = {"peak_allocated": "peak_allocated_bytes"}
_OF_BUDGET = {
    "peak": "step_peak_bytes",
    "predicted_peak": "predicted_peak_bytes",
    "budget": "budget_bytes",
    "step": "step_s",
    "predicted_step": "predicted_s",
    "plain_step": "plain_s",
    "num_plans": "num_plans",
}
_OF_OFFLOAD = {
    "moved": "moved_out_bytes",
    "host": "host_in_use_bytes",
    "waited_out": "stall_out_s",
    "waited_in": "stall_in_s",
    "link_out": "d2h_bytes_per_s",
    "link_in": "h2d_bytes_per_s",
}
_OF_REMAT = {
    "recomputed": "dropped_bytes",
    "saved": "saved_bytes",
    "recomputing": "measured_replay_s",
    "predicted_recomputing": "estimated_replay_s",
    "budget": "budget_bytes",
    "saved_peak": "ledger_peak_bytes",
}
_OF_CONTEXTS = {
    "MemoryBudget": {**_OF_ANY, **_OF_OFFLOAD, **_OF_REMAT, **_OF_BUDGET},
    "CPUOffload": {**_OF_ANY, **_OF_OFFLOAD},
    "Rematerialize": {**_OF_ANY, **_OF_REMAT},
}
_OF_LAYERS = {
    "peak": "actual_peak_bytes",
    "predicted_peak": "predicted_peak_bytes",
    "step": "actual_s",
    "predicted_step": "predicted_s",
    "slots": "slot_bytes",
    "host": "host_bytes",
    "moved_in": "h2d_bytes",
    "moved_out": "d2h_bytes",
    "num_demand_fetches": "num_demand_fetches",
}
_OF_STATES = {
    "host": "host_bytes",
    "room": "room_bytes",
    "resident": "resident_bytes",
    "moved_in": "h2d_bytes",
    "moved_out": "d2h_bytes",
}
_OF_DISK = {"disk": "disk_bytes", "read": "disk_read_bytes", "written": "disk_written_bytes"}

_OF_KINDS = {LayerStats: ("memkit/layers", {**_OF_LAYERS, "waited": "stall_s"}), StateStats: ("memkit/states", _OF_STATES)}
_OF_DEVICE = ("peak", "predicted_peak")
"""Values that count everything on the device: of several `LayerOffload` objects the highest is shown, of others the sum."""


class Feature(Protocol):
    """A feature with figures: a `MemoryBudget`, `CPUOffload`, `Rematerialize`, `LayerOffload` or `StateOffload`."""

    def stats(self) -> Any:  # Any: of each its own
        """Return the feature's figures."""


def live_values(*sources: str | Feature) -> dict[str, float]:
    """Return the predicted and measured figures of features, as a flat dict of numbers for a logger or a progress bar.

    Names are "memkit/TAG/NAME_UNIT", for a `LayerOffload` "memkit/layers/NAME_UNIT", for a `StateOffload`
    "memkit/states/NAME_UNIT": "memkit/default/peak_gib" beside "memkit/default/predicted_peak_gib", "step_ms" beside
    "predicted_step_ms", "memkit/states/host_gib" of host memory beside the "room_gib" on the device. Values that are not known
    yet, or that a feature does not have, are left out. A call waits for nothing: seconds cover the work finished by now.

    Several `LayerOffload` objects share names: a peak, which counts everything on the device, is the highest of them, and any
    other value is the sum over those that know it. So is the time of a step: their models run one after the other.

    Args:
        sources: tags, or features themselves; without any, the tag "default". Give a context another tag than "layers" beside a
            `LayerOffload`, and another one than "states" beside a `StateOffload`.

    Raises:
        TypeError: a source is neither.
        ValueError: no context with such a tag was entered yet, or a feature has no tag.

    Example:
        >>> import torch, memkit
        >>> device = memkit.device.ReferenceDevice()
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
        >>> with memkit.CPUOffload(1.0, "live", device=device, min_bytes=1024):
        ...     loss = model(torch.randn(64, 64)).sum()
        >>> loss.backward()
        >>> values = memkit.live_values("live")
        >>> values["memkit/live/moved_gib"] * 2**30  # the input of each Linear, and of the GELU
        49152.0
    """
    given = {id(source): source for source in sources or ("default",)}
    return values_of([_figures_of(source) for source in given.values()])


def values_of(figures: Iterable[SavedTensorStats | LayerStats | StateStats]) -> dict[str, float]:
    values, given = dict[str, float](), list(figures)
    for found in given:
        if isinstance(found, SavedTensorStats):
            names = {name: field for context in found.contexts for name, field in _OF_CONTEXTS[context].items()}
            values |= _named(f"memkit/{found.tag}", names, [found])
    for kind, (prefix, names) in _OF_KINDS.items():
        same = [found for found in given if isinstance(found, kind)]
        more = _OF_DISK if any(isinstance(found, StateStats) and found.disk_bytes for found in same) else {}
        values |= _named(prefix, {**names, **more}, same)
    return values


def _figures_of(source: str | Feature) -> Any:
    if isinstance(source, str):
        return stats(source)
    figures = source.stats() if hasattr(source, "stats") else None
    if not isinstance(figures, (SavedTensorStats, LayerStats, StateStats)):
        raise TypeError(f"live_values needs tags, or features that have stats(); found {type(source).__name__}")
    return figures


def _named(prefix: str, names: dict[str, str], figures: Sequence[Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, field in names.items():
        each = [getattr(of_one, field) for of_one in figures]
        known = [sum(value.values()) if isinstance(value, dict) else value for value in each if value is not None]
        if known:
            unit, factor = next((told for end, told in _UNITS.items() if field.endswith(end)), ("", 1.0))
            found[f"{prefix}/{name}{unit}"] = factor * (max(known) if name in _OF_DEVICE else sum(known))
    return found
