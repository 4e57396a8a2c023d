"""Running a model without data, on the meta device, as a target ("cuda" or "cpu") would run it.

`twins.py` stands tensors without data in for those of a model. `target.py` makes composite operations take the path that the
target takes: the meta device by itself always takes the most general one. `autocast.py`, `attention.py` and `kernels.py` hold
the differences; `dtypes.py` knows what the target refuses. They are imported where a model is run, and not here: some derive
from private classes of torch.

- `target`: ops that a backend replaces
- `attention`: which kernel `scaled_dot_product_attention` takes
- `autocast`: autocast's casts
- `dtypes`: dtypes that a kernel refuses, though the meta kernel takes them
- `kernels`: ops whose meta kernel gives other dtypes or strides
- `twins`: tensors without data that stand in for real ones
"""

import torch

META = torch.device("meta")
TARGETS = ("cuda", "cpu")
