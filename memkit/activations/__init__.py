"""Act on saved tensors: move them to the host and back."""

from memkit.activations.attach import AttachedOffload, attach
from memkit.activations.offload import CPUOffload, no_offload, offload_stats, reset
from memkit.activations.stats import OffloadStats

__all__ = ["AttachedOffload", "CPUOffload", "OffloadStats", "attach", "no_offload", "offload_stats", "reset"]
