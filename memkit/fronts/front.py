"""What a training step takes under each of several budgets, as one frozen value: rows, plans, batches; to JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from memkit._version import __version__
from memkit.plan.shards import ShardPlan

SCHEMA = "memkit.Front"
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointedBlocks:
    """The step with some of a model's blocks checkpointed."""

    num_blocks: int
    peak_bytes: int
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontRow:
    """One budget. What does not fit in it is None; of a row without `step_s`, nothing does."""

    budget_bytes: int
    peak_bytes: int | None = None
    step_s: float | None = None
    bound_s: float | None = None
    """No plan of the budget takes less; None without scipy as well."""
    replayed_s: float = 0.0
    moved_bytes: int = 0
    """To the host, and as many back."""
    num_kept: int = 0
    num_moved: int = 0
    num_again: int = 0
    offload_s: float | None = None
    """The step with the best plan that recomputes nothing."""
    recompute_s: float | None = None
    """With the best that moves nothing."""
    checkpoint: CheckpointedBlocks | None = None
    """With the fewest blocks checkpointed, of blocks at even distances; None where the model has no repeated blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestBatch:
    """The most samples in a step that fit in a budget. One more does not, unless the search stopped before."""

    budget_bytes: int
    num_plain: int
    num_planned: int
    is_plain_found: bool = True
    is_planned_found: bool = True
    """False where the search stopped: more may fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """Time against peak memory of one step on one GPU, as planned."""

    model: str
    inputs: str
    gpu: str
    is_measured: bool
    """Whether predictions for the GPU were compared with steps on it."""
    optimizer: str | None
    plain_s: float
    plain_peak_bytes: int
    least_bytes: int
    """The smallest budget that a plan was found for."""
    least_module: str
    """The module that sets it; "" is none or the whole model."""
    least_op: str
    rows: tuple[FrontRow, ...]
    batch: LargestBatch | None = None
    ranks: ShardPlan | None = None
    """Where the model is split: what each rank takes, which is in all peaks."""
    notes: tuple[str, ...] = ()
    """What makes the figures unsure."""

    def to_json(self, plans: Mapping[int, Any]) -> str:
        """Return all figures, and plans by their budgets in bytes, as JSON."""
        content = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, "memkit": __version__, **asdict(self)}
        return json.dumps({**content, "plans": {str(budget): plan for budget, plan in plans.items()}}, indent=1)
