"""Act on saved tensors: move them to the host and back, or drop them and recompute them.

- `cpu_offload`: `CPUOffload`
- `rematerialize`: `Rematerialize`
- `memory_budget`: `MemoryBudget`
- `attach`: `attach`: a context around each forward of a module; warns where that is never called
- `context`: what all contexts share, so that `attach` can enter them
- `marks`: `keep`, `offload`, `recompute`: the user's choice for single tensors
- `stats`: `stats`: what contexts did under a tag
- `saved/`: what every context does: hooks, records, the ledger of bytes
- `offloading/`: moving: what `CPUOffload` does with each tensor
- `recomputing/`: dropping and recomputing: what `Rematerialize` does with each tensor
- `budgeting/`: both under one budget: what `MemoryBudget` does with each tensor
"""

from memkit.activations.attach import Attachment, attach
from memkit.activations.budgeting.state import budget_states
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
    """Forget what is kept under a tag: plans, counts, and the host memory once no graph needs it. Unknown tags are fine."""
    offload_states.forget(tag)
    remat_states.forget(tag)
    budget_states.forget(tag)
