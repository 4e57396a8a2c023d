"""Steps that leave their schedule, since what is saved is another, or what is asked for."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import memkit
from tests.activations.cases import assert_same_bits
from tests.activations.chains import UNIT_BYTES, chain, leaf_on
from tests.activations.scheduled_steps import (
    Offloads,
    assert_steps_are_plain,
    batch_bytes,
    gradient_of,
    offloads,
)

__all__ = ["batch_bytes", "offloads"]

pytestmark = pytest.mark.usefixtures("batch_bytes")


# Other saves than the schedule has


class Saves(torch.autograd.Function):
    """Saves a tensor that is not its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, saved: Tensor) -> Tensor:
        ctx.save_for_backward(saved)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (saved,) = ctx.saved_tensors
        return grad * (1 if saved.device.type == "meta" else saved.to_dense().sum()), None


class Wrapping(torch.Tensor):
    """A tensor of a class of its own."""


ODD = {
    "sparse": lambda tensor: tensor.to_sparse(),
    "in rows": lambda tensor: tensor.to_sparse_csr(),
    "meta": lambda tensor: tensor.to("meta"),
    "half": lambda tensor: tensor.half(),
    "another shape": lambda tensor: tensor[:3].clone(),
    "a view": lambda tensor: torch.cat([tensor, tensor])[16:],
    "strided": lambda tensor: tensor.t(),
    "expanded": lambda tensor: tensor[:1].expand(16, 16),
    "leaf": lambda tensor: tensor.requires_grad_(),
    "parameter": lambda tensor: torch.nn.Parameter(tensor),
    "subclass": lambda tensor: tensor.as_subclass(Wrapping),
    "conjugated": lambda tensor: torch.complex(tensor, tensor).conj().imag,
    "empty": lambda tensor: tensor[:0].clone(),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("place", [2, *[pytest.param(place, marks=pytest.mark.slow) for place in (0, 1, 3, 4)]])
@pytest.mark.parametrize("kind", ODD)
def test_save_of_another_kind_leaves_the_schedule(offloads: Offloads, kind: str, place: int) -> None:
    torch_device = offloads.device.torch_device
    x = leaf_on(torch_device)

    def forward(number: int) -> Tensor:
        y = x
        generator = torch.Generator().manual_seed(number)
        for index in range(5):
            y = y.sin()
            odd = ODD[kind] if index == place and number == 3 else torch.clone
            y = Saves.apply(y, odd(torch.rand(16, 16, generator=generator).to(torch_device)))
        return y.sin()

    assert_steps_are_plain(offloads, forward, x)
    assert_steps_are_plain(offloads, forward, x, ratio=0.5, window_units=1)


# What is asked for changes


def test_min_bytes_change_between_steps(offloads: Offloads) -> None:
    x = leaf_on(offloads.device.torch_device)
    wanted = gradient_of(chain(x, [1, 2, 1, 2]), x)
    for num_units in (0, 0, 0, 2, 2, 2, 0, 0, 3, 3, 3):
        with offloads(min_bytes=num_units * UNIT_BYTES):
            y = chain(x, [1, 2, 1, 2])
        assert offloads.moved_units == {0: 6, 2: 4, 3: 0}[num_units]
        assert_same_bits([gradient_of(y, x)], [wanted])
        del y


def test_ratio_and_window_change_between_steps(offloads: Offloads) -> None:
    x = leaf_on(offloads.device.torch_device)
    wanted, moved = gradient_of(chain(x, [1] * 8), x), {}
    for ratio, window_units in [(1.0, 0), (0.5, 0), (0.0, 0), (1.0, 3), (0.25, 0), (1.0, 0)] * 4:
        with offloads(ratio, window_units):
            y = chain(x, [1] * 8)
        assert moved.setdefault((ratio, window_units), offloads.moved_units) == offloads.moved_units
        assert_same_bits([gradient_of(y, x)], [wanted])
        del y
    assert moved == {(1.0, 0): 8, (0.5, 0): 4, (0.0, 0): 0, (1.0, 3): 5, (0.25, 0): 2}


@pytest.mark.parametrize("steps", ["....oo..", "oooo..oo", ".o.o.o.o"])
@pytest.mark.parametrize("where", ["inside", "around", "from outside to inside", "from inside to outside"])
def test_no_offload_comes_and_goes(offloads: Offloads, where: str, steps: str) -> None:
    x = leaf_on(offloads.device.torch_device)
    wanted = gradient_of(chain(x, [1] * 9), x)
    for kind in steps:
        pause: AbstractContextManager[object] = memkit.no_offload() if kind == "o" else nullcontext()
        if where == "around":
            with pause, offloads():
                y = chain(x, [1] * 9)
        elif where == "inside":
            with offloads():
                y = chain(x, [1] * 3)
                with pause:
                    y = chain(y, [1] * 4)
                y = chain(y, [1] * 2)
        elif where == "from outside to inside":
            pause.__enter__()
            with offloads():
                y = chain(x, [1] * 5)
                pause.__exit__(None, None, None)
                y = chain(y, [1] * 4)
        else:
            with offloads():
                y = chain(x, [1] * 5)
                pause.__enter__()
                y = chain(y, [1] * 4)
            pause.__exit__(None, None, None)
        staying = {"inside": 4, "around": 9, "from outside to inside": 5, "from inside to outside": 4}[where]
        assert offloads.moved_units == (9 if kind == "." else 9 - staying)
        assert_same_bits([gradient_of(y, x)], [wanted])
        del y


def test_steps_with_a_region_of_no_offload_follow_a_schedule(offloads: Offloads) -> None:
    x = leaf_on(offloads.device.torch_device)
    for number in range(4):
        with offloads():
            y = chain(x, [1] * 3)
            with memkit.no_offload():
                y = chain(y, [1] * 4)
            y = chain(y, [1] * 2)
        assert offloads.follows == (number >= 2)
        gradient_of(y, x)
        del y


# Other contexts


def test_attached_and_not(offloads: Offloads) -> None:
    """What the model holds leaves where it is not attached."""
    torch_device = offloads.device.torch_device

    class Table(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.rand(16))

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = (x * self.table).sin()
            return x

    model, x = Table().to(torch_device), torch.randn(16, 16, device=torch_device, requires_grad=True)
    wanted = gradient_of(model(x), x)
    for is_attached in (False, False, False, True, True, True, True, False, False, False):
        if is_attached:
            attachment = memkit.attach(model, offloads())
            y = model(x)
            attachment.remove()
        else:
            with offloads():
                y = model(x)
        assert_same_bits([gradient_of(y, x)], [wanted])
        if is_attached:
            assert offloads.moved_units == 3
        del y
