"""What a backward does to the tensors that it is given: it may write to them, and a leaf's gradient may become one of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import memkit
from memkit.device import Device
from tests.activations.cases import assert_same_bits

Context = Callable[[], AbstractContextManager[Any]]


class GradientMadeInTheForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward((x * 2).sin())
        return (weight * x).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None


class WritesToWhatItSaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x.cos_().mul_(grad)


def _contexts(device: Device) -> list[Context]:
    return [
        lambda: memkit.CPUOffload(1.0, "moved", min_bytes=0, window_bytes=0, device=device),
        lambda: memkit.Rematerialize("1B", "made again", min_bytes=0, device=device),
    ]


CONTEXTS = pytest.mark.parametrize("kind", [0, 1], ids=["offload", "remat"])


@CONTEXTS
@pytest.mark.filterwarnings("ignore:.*It is exceeded by as little as can be")
def test_saved_gradient_that_becomes_a_leafs_is_whole_in_the_next_backward(kind: int, device: Device) -> None:
    x = torch.arange(4.0, device=device.torch_device)

    def gradient(context: Context) -> Tensor:
        weight = torch.ones(4, device=device.torch_device, requires_grad=True)
        with context():
            loss = GradientMadeInTheForward.apply(weight, x)
        loss.backward(retain_graph=True)
        weight.grad.zero_()
        loss.backward()
        return weight.grad

    assert_same_bits([gradient(_contexts(device)[kind])], [gradient(nullcontext)])


@CONTEXTS
@pytest.mark.filterwarnings("ignore:.*It is exceeded by as little as can be")
def test_nothing_is_made_from_a_copy_that_a_backward_has_written_to(kind: int, device: Device) -> None:
    def gradient(context: Context) -> Tensor:
        x = torch.linspace(0, 1, 4, device=device.torch_device).requires_grad_()
        with context():
            y = x * 2
            loss = (y.exp() * 1.0).sin().sum() + WritesToWhatItSaved.apply(y).sum()
        del y
        loss.backward(retain_graph=True)
        return x.grad

    assert_same_bits([gradient(_contexts(device)[kind])], [gradient(nullcontext)])


@CONTEXTS
@pytest.mark.filterwarnings("ignore:.*It is exceeded by as little as can be")
def test_write_of_a_backward_to_a_saved_tensor_that_others_need_never_reaches_them(kind: int, device: Device) -> None:
    """It is noticed, as without a context, or it is a write to a copy."""
    x = torch.linspace(0, 1, 4, device=device.torch_device).requires_grad_()
    with _contexts(device)[kind]():
        y = x * 2
        loss = y.cos().sum() + WritesToWhatItSaved.apply(y).sum()
    del y
    try:
        loss.backward()
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return
    expected = torch.autograd.grad((x * 2).cos().sum() + (x * 2).sin().sum(), x)

    assert_same_bits([x.grad], list(expected))


@CONTEXTS
@pytest.mark.filterwarnings("ignore:.*It is exceeded by as little as can be")
def test_write_of_a_backward_to_a_tensor_that_is_still_there_is_noticed(kind: int, device: Device) -> None:
    x = torch.linspace(0, 1, 4, device=device.torch_device).requires_grad_()
    with _contexts(device)[kind]():
        y = x * 2
        loss = y.cos().sum() + WritesToWhatItSaved.apply(y).sum()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert y is not None
