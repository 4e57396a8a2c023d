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
    """How many blocks are checkpointed."""
    peak_bytes: int
    """Peak of the step on the device."""
    step_s: float
    """Seconds of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontRow:
    """One budget. What does not fit in it is None; of a row without `step_s`, nothing does."""

    budget_bytes: int
    """The budget for the whole device."""
    peak_bytes: int | None = None
    """Predicted peak of the step with the plan."""
    step_s: float | None = None
    """Predicted seconds of the step with the plan."""
    bound_s: float | None = None
    """No plan of the budget takes less; None without scipy as well."""
    replayed_s: float = 0.0
    """Of these, seconds of ops that run again."""
    moved_bytes: int = 0
    """To the host, and as many back."""
    num_kept: int = 0
    """Saved values that stay on the device."""
    num_moved: int = 0
    """Saved values that move to the host."""
    num_again: int = 0
    """Saved values that are recomputed."""
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
    """The budget for the whole device."""
    num_plain: int
    """Samples of the plain step."""
    num_planned: int
    """Samples with a plan."""
    is_plain_found: bool = True
    """False where the search stopped: more may fit."""
    is_planned_found: bool = True
    """False where the search stopped: more may fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """Time against peak memory of one step on one GPU, as planned."""

    model: str
    """The class of the model."""
    inputs: str
    """The shapes of its inputs, as text."""
    gpu: str
    """The GPU that the step is planned for."""
    is_measured: bool
    """Whether predictions for the GPU were compared with steps on it."""
    optimizer: str | None
    """The class of the optimizer whose states are counted; None for none."""
    plain_s: float
    """Predicted seconds of the plain step."""
    plain_peak_bytes: int
    """Predicted peak of the plain step."""
    least_bytes: int
    """The smallest budget that a plan was found for."""
    least_module: str
    """The module that sets it; "" is none or the whole model."""
    least_op: str
    """The op there at which most is needed; "" if that is not known."""
    rows: tuple[FrontRow, ...]
    """One row for each budget."""
    batch: LargestBatch | None = None
    """The largest batch, if that was asked for."""
    ranks: ShardPlan | None = None
    """Where the model is split: what each rank takes, which is in all peaks."""
    notes: tuple[str, ...] = ()
    """What makes the figures unsure."""

    def to_json(self, plans: Mapping[int, Any]) -> str:
        """Return all figures, and plans by their budgets in bytes, as JSON."""
        content = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, "memkit": __version__, **asdict(self)}
        return json.dumps({**content, "plans": {str(budget): plan for budget, plan in plans.items()}}, indent=1)
