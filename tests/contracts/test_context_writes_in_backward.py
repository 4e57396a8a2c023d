"""What a backward does to the tensors that it is given: it may write to them, and a leaf's gradient may become one of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.activations.cases import assert_same_bits
from tests.activations.remat.conftest import NO_PLAN_FITS
from tests.contracts.conftest import Context

pytestmark = pytest.mark.filterwarnings(NO_PLAN_FITS)


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


def test_saved_gradient_that_becomes_a_leafs_is_whole_in_the_next_backward(any_context: Context) -> None:
    x = torch.arange(4.0, device=any_context.torch_device)

    def gradient(make: Callable[[], AbstractContextManager[object]]) -> Tensor:
        weight = torch.ones(4, device=any_context.torch_device, requires_grad=True)
        with make():
            loss = GradientMadeInTheForward.apply(weight, x)
        loss.backward(retain_graph=True)
        weight.grad.zero_()
        loss.backward()
        return weight.grad

    assert_same_bits([gradient(any_context)], [gradient(nullcontext)])


def test_nothing_is_made_from_a_copy_that_a_backward_has_written_to(any_context: Context) -> None:
    def gradient(make: Callable[[], AbstractContextManager[object]]) -> Tensor:
        x = torch.linspace(0, 1, 4, device=any_context.torch_device).requires_grad_()
        with make():
            y = x * 2
            loss = (y.exp() * 1.0).sin().sum() + WritesToWhatItSaved.apply(y).sum()
        del y
        loss.backward(retain_graph=True)
        return x.grad

    assert_same_bits([gradient(any_context)], [gradient(nullcontext)])


def test_write_of_a_backward_to_a_saved_tensor_that_others_need_never_reaches_them(any_context: Context) -> None:
    """It is noticed, as without a context, or it is a write to a copy."""
    x = torch.linspace(0, 1, 4, device=any_context.torch_device).requires_grad_()
    with any_context():
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


def test_write_of_a_backward_to_a_tensor_that_is_still_there_is_noticed(any_context: Context) -> None:
    x = torch.linspace(0, 1, 4, device=any_context.torch_device).requires_grad_()
    with any_context():
        y = x * 2
        loss = y.cos().sum() + WritesToWhatItSaved.apply(y).sum()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert y is not None
