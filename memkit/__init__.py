"""See where GPU memory goes in PyTorch training, and make it fit.

The public names are in `__all__`. Records of a profile are in `memkit.profile`, plans in `memkit.plan`, exceptions in
`memkit.errors`. Each is imported on first use: torch takes seconds, and `memkit --help` does not need it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from memkit._version import __version__ as __version__

if TYPE_CHECKING:
    from memkit import activations as activations
    from memkit import device
    from memkit import distributed as distributed
    from memkit import errors as errors
    from memkit import integrations as integrations
    from memkit import plan as plan
    from memkit import states as states
    from memkit import weights as weights
    from memkit.activations import CPUOffload, MemoryBudget, Rematerialize, keep, no_offload, offload, recompute, reset
    from memkit.activations.attach import attach  # there, since `memkit.activations.attach` is a module as well
    from memkit.activations.stats import stats
    from memkit.cli.commands import profile as profile
    from memkit.core.features import detach
    from memkit.distributed import shard
    from memkit.live import live_values
    from memkit.plan import plan_memory, schedules
    from memkit.profile import profile_memory
    from memkit.states import StateOffload
    from memkit.transfer import Disk
    from memkit.weights import GradScaler, LayerOffload

__all__ = [
    "CPUOffload",
    "Disk",
    "GradScaler",
    "LayerOffload",
    "MemoryBudget",
    "Rematerialize",
    "StateOffload",
    "attach",
    "detach",
    "device",
    "keep",
    "live_values",
    "no_offload",
    "offload",
    "plan_memory",
    "profile_memory",
    "recompute",
    "reset",
    "schedules",
    "shard",
    "stats",
]

_ROOMS = ("activations", "device", "distributed", "errors", "integrations", "plan", "profile", "states", "weights")
_HOMES = {
    name: f"memkit.{home}"
    for home, names in {
        "activations": "CPUOffload MemoryBudget Rematerialize attach keep no_offload offload recompute reset stats",
        "core.features": "detach",
        "distributed": "shard",
        "live": "live_values",
        "plan": "plan_memory schedules",
        "profile": "profile_memory",
        "states": "StateOffload",
        "transfer": "Disk",
        "weights": "GradScaler LayerOffload",
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used. Source: PEP 562."""
    if name not in _HOMES and name not in _ROOMS:
        raise AttributeError(f"module 'memkit' has no attribute {name!r}")
    from memkit._torch_floor import require_torch

    require_torch()
    found = (
        importlib.import_module(f"memkit.{name}") if name in _ROOMS else getattr(importlib.import_module(_HOMES[name]), name)
    )
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
