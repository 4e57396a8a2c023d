"""Float32 copies of parameters: they follow what others write to the parameters."""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16}


def follow(master: Tensor, parameter: Tensor) -> None:
    """Have a copy be the parameter wherever it is not the parameter any more, once rounded.

    It is compared bit by bit, in each step: a write through `.data` moves no version. The host waits for nothing.
    """
    bits = _BITS[parameter.dtype.itemsize]
    kept = master.to(parameter.dtype).view(bits) == parameter.detach().view(bits)
    written = parameter.detach()
    torch.where(kept, master, written if bits is torch.int16 else written.to(torch.float32), out=master)
