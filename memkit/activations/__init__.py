"""Act on saved tensors: move them to the host and back, or drop them and make them again."""

from memkit.activations import offload, remat_state
from memkit.activations.attach import AttachedOffload, attach
from memkit.activations.offload import CPUOffload, no_offload, offload_stats
from memkit.activations.remat import Rematerialize, keep, min_budget, recompute, remat_plan, remat_stats
from memkit.activations.remat_stats import RematStats
from memkit.activations.stats import OffloadStats

__all__ = [
    "AttachedOffload",
    "CPUOffload",
    "OffloadStats",
    "RematStats",
    "Rematerialize",
    "attach",
    "keep",
    "min_budget",
    "no_offload",
    "offload_stats",
    "recompute",
    "remat_plan",
    "remat_stats",
    "reset",
]


def reset(tag: str) -> None:
    """Forget what is kept under a tag: plans, counts, and the host memory once no graph needs it. Unknown tags are fine."""
    offload.forget(tag)
    remat_state.forget(tag)
