"""Float32 copies of parameters: they follow what others write to the parameters."""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16}


def follow(master: Tensor, parameter: Tensor) -> None:
    """Copy those elements of a parameter to its float32 copy that the copy, rounded, is not equal to: somebody wrote to them.

    All elements are compared bit by bit, since a write through `.data` changes no version counter. Nothing here makes the host
    wait for a device.

    Args:
        master: the float32 copy, which is written to; of the parameter's size.
        parameter: of a 16-bit or 8-bit floating-point dtype.
    """
    bits = _BITS[parameter.dtype.itemsize]
    kept = master.to(parameter.dtype).view(bits) == parameter.detach().view(bits)
    written = parameter.detach()
    torch.where(kept, master, written if bits is torch.int16 else written.to(torch.float32), out=master)
