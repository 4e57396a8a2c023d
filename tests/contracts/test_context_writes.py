"""Writes to tensors that were saved or are read again: after the save, by another forward, by the backward itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import linear

import memkit
from memkit.activations.budgeting.state import budget_states
from memkit.device import ReferenceDevice
from memkit.plan import Action, MemoryPlan
from tests.activations.budgeting.plans import plan_of_one, planner_of
from tests.activations.cases import assert_same_bits, inputs_on
from tests.activations.remat.conftest import NO_PLAN_FITS
from tests.contracts.conftest import Context

pytestmark = [pytest.mark.filterwarnings(NO_PLAN_FITS), pytest.mark.usefixtures("quick_plans")]

Make = Callable[[], AbstractContextManager[object]]

# After the save


WRITTEN = r"modified by an inplace operation: .*\[8, 32\]\](, which is output 0 of \w+,)? is at version 1; expected version 0"


@pytest.mark.parametrize("is_inside", [False, True])
def test_writing_to_a_saved_tensor_raises_autograds_error(is_inside: bool, any_context: Context) -> None:
    def write(y: Tensor) -> None:
        with torch.no_grad():
            y[0].mul_(2)

    for is_written in (True, True, False, False, False, True):  # in the first steps, and in one that is known
        x, w = inputs_on(any_context.torch_device)
        with any_context():
            y = functional.linear(x, w).exp()
            loss = y.sin().sum()
            if is_written and is_inside:
                write(y)
        if is_written and not is_inside:
            write(y)

        with pytest.raises(RuntimeError, match=WRITTEN) if is_written else nullcontext():
            loss.backward()


def test_writing_to_a_parameter_before_the_backward_raises(any_context: Context) -> None:
    for is_written in (True, True, False, False, False, True):
        x, w = inputs_on(any_context.torch_device)
        with any_context():
            loss = functional.linear(functional.linear(x, w).sin(), w).exp().sum()
        if is_written:
            with torch.no_grad():
                w.add_(1)

        with pytest.raises(RuntimeError, match="modified by an inplace operation") if is_written else nullcontext():
            loss.backward()


# By another forward


class Written:
    """Tensors that forwards write to, and read by copies, so that plain autograd doesn't mind."""

    def __init__(self, torch_device: torch.device) -> None:
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 8, device=torch_device))
        self.vector, self.matrix = torch.ones(8, device=torch_device), torch.ones(1, 8, device=torch_device)
        self.statistics = nn.BatchNorm1d(8).to(torch_device)
        self.device = torch_device

    def vector_in_forward(self, number: int) -> Tensor:
        self.vector.mul_(1.5)
        return self.vector.clone()

    def matrix_in_forward(self, number: int) -> Tensor:
        self.matrix.sum()
        self.matrix.mul_(1.5)
        return self.matrix.clone()

    def matrix_in_other_forward(self, number: int) -> Tensor:
        if number:
            self.matrix.mul_(1.5)
        return self.matrix.tanh()

    def statistics_in_other_forward(self, number: int) -> Tensor:
        if number:
            self.statistics.train()(self.matrix * torch.ones(4, 1, device=self.device))
        return self.statistics.running_mean + self.statistics.running_var.sqrt()

    def vector_in_backward(self, number: int) -> Tensor:
        read = self.vector.clone()
        other = torch.ones(8, device=self.device, requires_grad=True)
        other.register_hook(lambda _: self.vector.mul_(1.5))
        with torch.enable_grad():
            other.sum().backward()
        return read + self.vector.clone()


def _steps(written: Written, name: str, make: Make, num_steps: int = 5) -> list[Tensor]:
    """Return the gradients of several steps, each of two forwards and then their backwards."""
    found = []
    for _ in range(num_steps):
        written.weight.grad = None
        losses = []
        for number in range(2):
            with make():
                x = torch.ones(12, 8, device=written.device) * (2 - number)
                with torch.no_grad():
                    read = getattr(written, name)(number)
                losses.append((linear(x if number else x.tanh(), written.weight) * read.clone()).square().sum())
        for loss in losses:
            loss.backward()
        found.append(written.weight.grad.clone())
    return found


@pytest.mark.core(1)
@pytest.mark.covering(2)
@pytest.mark.parametrize(
    "name",
    ["vector_in_forward", "matrix_in_forward", "matrix_in_other_forward", "statistics_in_other_forward", "vector_in_backward"],
)
def test_what_a_later_forward_writes_to_is_read_as_it_was(name: str, any_context: Context) -> None:
    wanted = _steps(Written(any_context.torch_device), name, nullcontext)

    assert_same_bits(_steps(Written(any_context.torch_device), name, any_context), wanted)


def test_what_is_written_to_before_each_backward_may_be_recomputed_from_under_a_plan() -> None:
    device = ReferenceDevice()
    plans = list[MemoryPlan]()

    def gradients(make: Make) -> list[Tensor]:
        written, found = Written(torch.device("cpu")), []
        for _ in range(6):
            written.weight.grad = None
            with make():
                h = linear(torch.ones(12, 8), written.weight)
                for _ in range(6):
                    h = (h * written.matrix.tanh()).sin() + h
                loss = h.square().sum()
            written.matrix.mul_(1.1)
            loss.backward()
            found.append(written.weight.grad.clone())
        return found

    def make() -> memkit.MemoryBudget:
        trace = budget_states["forwards"].traces.latest if "forwards" in budget_states else None
        if not plans and trace is not None and trace.learned is not None and trace.learned.planner is not None:
            plans.append(plan_of_one(planner_of("forwards"), Action.RECOMPUTE))
        return memkit.MemoryBudget(1.0, "forwards", min_bytes=0, device=device, plan=plans[0] if plans else None)

    assert_same_bits(gradients(make), gradients(nullcontext))
    assert memkit.stats("forwards").follows_plan
    assert memkit.stats("forwards").num_dropped > 10


# By the backward


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


def _of_a_saved_gradient(make: Make, device: torch.device) -> Tensor:
    """It becomes a leaf's, and is written to."""
    weight = torch.ones(4, device=device, requires_grad=True)
    with make():
        loss = GradientMadeInTheForward.apply(weight, torch.arange(4.0, device=device))
    loss.backward(retain_graph=True)
    weight.grad.zero_()
    loss.backward()
    return weight.grad


def _of_a_copy_that_the_backward_writes_to(make: Make, device: torch.device) -> Tensor:
    x = torch.linspace(0, 1, 4, device=device).requires_grad_()
    with make():
        y = x * 2
        loss = (y.exp() * 1.0).sin().sum() + WritesToWhatItSaved.apply(y).sum()
    del y
    loss.backward(retain_graph=True)
    return x.grad


@pytest.mark.parametrize("gradient", [_of_a_saved_gradient, _of_a_copy_that_the_backward_writes_to])
def test_later_requests_see_no_write_of_a_backward(gradient: Callable[..., Tensor], any_context: Context) -> None:
    device = any_context.torch_device

    assert_same_bits([gradient(any_context, device)], [gradient(nullcontext, device)])


def test_write_of_a_backward_to_a_saved_tensor_that_others_need_never_reaches_them(any_context: Context) -> None:
    """The write is noticed, as without a context, or goes to a copy."""
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
