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


def follow_on_host(master: Tensor, parameter: Tensor, scratch: Tensor) -> None:
    """Do the same in host memory, where new memory costs more than what is done in it.

    Args:
        master: the copy.
        parameter: what it follows.
        scratch: like the parameter; it is written to.
    """
    scratch.copy_(master)
    bits = _BITS[parameter.dtype.itemsize]
    if parameter.is_contiguous() and scratch.is_contiguous() and parameter.nbytes % 8 == 0:
        bits = torch.int64  # fewer to compare
    one, other = (tensor.view(-1).view(bits) if bits is torch.int64 else tensor.view(bits) for tensor in (scratch, parameter))
    if not torch.equal(one, other):
        follow(master, parameter)
