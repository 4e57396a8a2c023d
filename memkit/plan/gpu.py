"""What a GPU and its link can do: from the work of an op to seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from memkit.plan.step_trace import OpWork


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """One kind of GPU, with the link to its host. Speeds are per second, alone, unless said."""

    name: str
    memory_bytes: int
    bytes_per_s: float
    """Of its own memory, read or written."""
    flops_per_s: Mapping[str, float]
    """For each dtype, of matrix products: dense, and with TF32 for float32 where PyTorch is told so."""
    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    both_bytes_per_s: float
    """Each way, while both go on."""
    copy_latency_s: float = 15e-6
    launch_s: float = 4e-6
    """The least that an op takes."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """By kind of op ("convolution"), and for backward ops apart ("convolution_backward"): how much longer one takes than its
    bytes or FLOPs at full speed. 1 where none is given."""
    source: str
    """Where the figures are from."""
    is_measured: bool = False
    """Whether predictions for it were compared with steps on it."""

    def seconds(self, op: OpWork, *, is_backward: bool) -> float:
        """Return what an op takes."""
        raise NotImplementedError
