"""Act on saved tensors: move them to the host and back, or drop them and recompute them.

- `cpu_offload`, `rematerialize`, `memory_budget`: `CPUOffload`, `Rematerialize`, `MemoryBudget`
- `attach`: a context around each forward of a module
- `context`: the common base of contexts
- `marks`: `keep`, `offload`, `recompute`: the user's choice for single tensors
- `stats`: figures of the contexts under a tag
- `saved/`: hooks, records and the ledger of bytes, for every context
- `offloading/`: moves tensors, for `CPUOffload`
- `recomputing/`: drops and recomputes tensors, for `Rematerialize`
- `budgeting/`: both under one budget, for `MemoryBudget`
"""

from memkit.activations.attach import Attachment, attach
from memkit.activations.budgeting.state import budget_states, copies_tag, regions_tag
from memkit.activations.cpu_offload import CPUOffload, no_offload
from memkit.activations.marks import keep, offload, recompute
from memkit.activations.memory_budget import MemoryBudget
from memkit.activations.rematerialize import Rematerialize
from memkit.activations.saved.state import offload_states, remat_states
from memkit.activations.stats import SavedTensorStats, stats

__all__ = [
    "Attachment",
    "CPUOffload",
    "MemoryBudget",
    "Rematerialize",
    "SavedTensorStats",
    "attach",
    "keep",
    "no_offload",
    "offload",
    "recompute",
    "reset",
    "stats",
]


def reset(tag: str) -> None:
    """Forget everything under a tag: plans, counts, and the host memory once no graph needs it. Unknown tags are fine."""
    offload_states.forget(tag)
    remat_states.forget(tag)
    budget_states.forget(tag)
    remat_states.forget(regions_tag(tag))
    offload_states.forget(copies_tag(tag))
