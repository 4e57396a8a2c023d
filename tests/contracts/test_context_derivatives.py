"""Torch's formulas of derivatives ask whether a dispatch mode is on, and compute other bits then: they see none of memkit's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional

import memkit
from memkit.activations.budgeting import budget_stage
from memkit.core import torch_private
from memkit.device import ReferenceDevice
from memkit.plan import Action
from tests.activations.budgeting.plans import steady
from tests.activations.cases import Seeing, assert_same_bits
from tests.contracts.conftest import Context
from tests.gpus import ON_GPU

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(as little as can be|MemoryBudget|a dual level was opened)", "ignore:.*torch.jit.script. is deprecated"
)

Around = Callable[[], AbstractContextManager[object]]


# Those whose bits differ under a mode, found among all of torch's ops with derivatives, in one of the three ways below.
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "prod": lambda x: x.prod(1),
    "cumprod": lambda x: x.cumprod(1),
    "masked_fill": lambda x: x.cos().masked_fill(x > 0.1, x.sum()),
    "det": lambda x: torch.linalg.det(x[:, :6] + torch.eye(6, device=x.device)),
    "layer_norm": lambda x: functional.layer_norm(x, (7,)),
    "group_norm": lambda x: functional.group_norm(x.view(2, 3, 7), 3),
    "batch_norm": lambda x: functional.batch_norm(x, None, None, training=True),
}


def _dual_outside(function: Callable[[Tensor], Tensor], x: Tensor, around: Around) -> Sequence[Tensor]:
    with forward_ad.dual_level(), around():
        tangent = forward_ad.unpack_dual(function(forward_ad.make_dual(x.sin(), x.detach().cos()))).tangent
        tangent.square().sum().backward()
    return [tangent, x.grad]


def _dual_inside(function: Callable[[Tensor], Tensor], x: Tensor, around: Around) -> Sequence[Tensor]:
    with around():
        y = x.sin()
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(function(forward_ad.make_dual(y, x.detach().cos()))).tangent
            loss = tangent.square().sum()
        loss = loss + y.exp().square().sum()
    loss.backward()
    return [tangent, x.grad]


def _backward(function: Callable[[Tensor], Tensor], x: Tensor, around: Around) -> Sequence[Tensor]:
    with around():
        function(x.sin()).square().sum().backward()
        made = function(x.cos())
    made.sum().backward()
    return [x.grad]


def _double_backward(function: Callable[[Tensor], Tensor], x: Tensor, around: Around) -> Sequence[Tensor]:
    with around():
        (grad,) = torch.autograd.grad(function(x.sin()).square().sum(), x, create_graph=True)
        grad.square().sum().backward()
    return [grad, x.grad]


def _in_other_mode(function: Callable[[Tensor], Tensor], x: Tensor, around: Around) -> Sequence[Tensor]:
    """The user's mode is on, and stays."""
    with around(), Seeing():
        function(x.sin()).sum().backward()
    return [x.grad]


class SeesModes(torch.autograd.Function):
    """Notes how many dispatch modes its formula sees."""

    num_seen: ClassVar[list[int]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        SeesModes.num_seen.append(torch_private.num_dispatch_modes())
        return tangent.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@pytest.mark.parametrize("way", ["dual inside", "dual outside"])
def test_formulas_see_no_mode_in_any_step(way: str, any_context: Context) -> None:
    """Also in steps that go by those before."""
    SeesModes.num_seen.clear()
    for _ in range(8):
        x = torch.randn(6, 7).to(any_context.torch_device).requires_grad_()
        WAYS[way](lambda x: SeesModes.apply(x.exp()), x, any_context)

    assert SeesModes.num_seen == [0] * 8


@pytest.mark.parametrize("action", [Action.OFFLOAD, Action.RECOMPUTE])
@pytest.mark.parametrize("name", ["layer_norm", "prod"])
def test_dual_level_in_a_known_step_of_a_budget(name: str, action: Action, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that only moves records nothing, and begins to where it departs, unless something may be compiled."""
    monkeypatch.setattr(budget_stage, "dynamo_is_loaded", bool)
    device, is_dual = ReferenceDevice(), False

    def train(around: Callable[[], AbstractContextManager[Any]]) -> list[Tensor]:
        x, found = torch.linspace(-1, 1, 42).view(6, 7).requires_grad_(), list[Tensor]()
        with around():
            y = x.sin().exp().cos()
            if is_dual:
                with forward_ad.dual_level():
                    dual = forward_ad.make_dual(y, x.detach().cos())
                    found.append(forward_ad.unpack_dual(FUNCTIONS[name](SeesModes.apply(dual[:3].tanh()))).tangent)
            loss = y.exp().sin().square().sum() + sum(tangent.square().sum() for tangent in found)
        loss.backward()
        return [loss.detach(), *(tangent.detach() for tangent in found), x.grad]

    make = steady(train, "dual", device, action, num_steps=4)
    assert memkit.stats("dual").follows_plan
    is_dual = True
    wanted = train(nullcontext)
    for _ in range(3):
        SeesModes.num_seen.clear()
        assert_same_bits(train(make), wanted)
        assert SeesModes.num_seen == [0]


WAYS = {
    "dual outside": _dual_outside,
    "dual inside": _dual_inside,
    "backward": _backward,
    "double backward": _double_backward,
    "in another mode": _in_other_mode,
}


def _run(way: str, function: Callable[[Tensor], Tensor], context: Context, around: Around) -> list[list[Tensor]]:
    torch.manual_seed(0)
    found = []
    for _ in range(3):
        x = torch.randn(6, 7).to(context.torch_device).requires_grad_()
        found.append([tensor.detach().clone() for tensor in WAYS[way](function, x, around)])
    return found


@pytest.mark.core(1)
@pytest.mark.covering(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_have_the_plain_bits(name: str, way: str, any_context: Context) -> None:
    if name == "cumprod" and any_context.torch_device.type == "cuda":
        pytest.skip("its backward is not deterministic there")
    plain = _run(way, FUNCTIONS[name], any_context, nullcontext)

    found = _run(way, FUNCTIONS[name], any_context, any_context)

    for mine, expected in zip(found, plain, strict=True):
        assert_same_bits(mine, expected)
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.parametrize("device", ["cpu", *ON_GPU])
def test_dual_level_within_a_context_is_warned_of_where_nothing_is_saved(device: str) -> None:
    x = torch.randn(6, 7, device=device)
    context = memkit.Rematerialize(0.5, "formulas", min_bytes=0, device=device)
    with (
        pytest.warns(UserWarning, match=r"a dual level was opened within .* Enter the context inside of torch\.autograd"),
        context,
        forward_ad.dual_level(),
    ):
        tangent = forward_ad.unpack_dual(functional.layer_norm(forward_ad.make_dual(x, x.cos()), (7,))).tangent

    assert tangent.isfinite().all()
    assert torch._C._len_torch_dispatch_stack() == 0


def test_transform_under_a_dual_level_leaves_torch_as_it_was(any_context: Context) -> None:
    """Behind each op a transform restores torch's dispatch: it would miss a recorder that was left within."""
    x = torch.randn(6, 7, device=any_context.torch_device, requires_grad=True)

    with any_context(), forward_ad.dual_level():
        found = torch.func.vmap(lambda y: y.sin().exp())(forward_ad.make_dual(x, x.detach().cos()))
        torch.ones(2)

    assert forward_ad.unpack_dual(found).primal.isfinite().all()
    assert torch.ones(2).sum() == 2
