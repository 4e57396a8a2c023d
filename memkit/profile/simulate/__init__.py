"""Running a model without data, on the meta device, as a target ("cuda" or "cpu") would run it.

The files are imported where a model is run, and not here: some derive from private classes of torch.

- `run`: a run, with tensors without data in the place of real ones
- `target`: what the target does differently: autocast's casts, dtypes that it refuses, formats, operations that it replaces
- `attention`: which kernel `scaled_dot_product_attention` takes
"""

import torch

from memkit.core.sizes import ALIGNMENT_BYTES

META = torch.device("meta")
TARGETS = ("cuda", "cpu")


def rounding_bytes(kind: str) -> int:
    """Return what the allocator of a target, or of a type of device, rounds sizes up to a multiple of."""
    return ALIGNMENT_BYTES if kind == "cuda" else 1
