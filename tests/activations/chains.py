"""Chains of sines, whose saved storages are known in size and order, so that an offload's effect can be counted by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from memkit.plan.plans import limit_of

UNIT_NUMEL = 256
UNIT_BYTES = 4 * UNIT_NUMEL

Context = Callable[[], AbstractContextManager[object]]


def leaf_on(torch_device: torch.device) -> Tensor:
    return torch.randn(UNIT_NUMEL, generator=torch.Generator().manual_seed(0)).to(torch_device).requires_grad_()


def chain(x: Tensor, units: Sequence[int]) -> Tensor:
    """Let autograd save one storage of so many units for each number, in that order, with no other owner."""
    for num_units in units:
        x = x.repeat(num_units)[: num_units * UNIT_NUMEL].clone().sin()
    return x


def step(x: Tensor, units: Sequence[int], context: Context = nullcontext) -> list[Tensor]:
    """Return the output and the gradient of a chain whose forward runs in a context."""
    x.grad = None
    with context():
        y = chain(x, units)
    y.sum().backward()
    return [y.detach(), x.grad]


def units_that_stay(units: Sequence[int], window_units: int) -> int:
    """Return the units still on the device after a forward from which all should leave: the latest saves, as many as fit."""
    room_bytes, num_units = limit_of(sum(units) * UNIT_BYTES, 1.0, window_units * UNIT_BYTES), 0
    for size in reversed(units):
        if (num_units + size) * UNIT_BYTES > room_bytes:
            break
        num_units += size
    return num_units


def three_backwards(
    x: Tensor, length: int, context: Context = nullcontext, before_sine: Callable[[], None] = int
) -> list[Tensor]:
    """Two branches; backward through the top of the second, then through the first, then through the rest of the second.

    The first branch's requests are unforeseen: the second branch's remaining tensors were saved later. There, `before_sine` is
    called ahead of each request.
    """
    with context():
        trunk = chain(x, [1] * 2)
        first, middle = chain(trunk, [1] * length), chain(trunk, [1] * length)
        second = chain(middle, [1] * length)
    (of_middle,) = torch.autograd.grad(second.sum(), middle)

    def pre_hook(_: tuple[Tensor, ...]) -> None:
        before_sine()

    node = first.grad_fn
    while node is not trunk.grad_fn:
        if type(node).__name__ == "SinBackward0":
            node.register_prehook(pre_hook)
        node = node.next_functions[0][0]
    (of_first,) = torch.autograd.grad(first.sum(), trunk)
    (of_trunk,) = torch.autograd.grad(middle, trunk, of_middle)
    trunk.backward(of_first + of_trunk)
    return [of_middle, of_first, of_trunk, x.grad]
