"""Every saved-tensor context keeps gradients bit for bit as in the plain run, and the layout of saved tensors."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memkit
from memkit.core.hooks import innermost_pack
from tests.activations.cases import assert_same_bits, gradients, inputs_on
from tests.activations.chains import chain, leaf_on
from tests.activations.remat.cases import COMPUTATIONS, NAMES
from tests.activations.remat.conftest import NO_PLAN_FITS
from tests.contracts.conftest import Context
from tests.contracts.contexts import MORE_KINDS
from tests.models import CASES, LARGE

pytestmark = [pytest.mark.filterwarnings(NO_PLAN_FITS), pytest.mark.usefixtures("quick_plans")]

NOTHING_TO_GAIN = {
    ("remat plan of nothing", "custom_function_in_place"),  # its writes are counted twice: it is kept
    ("remat dtr of nothing", "custom_function_in_place"),
    ("remat plan of nothing", "attention"),  # one node has saved all, and needs all of it at once
}
ALL_GOES = ("offload all", "remat plan of nothing", "remat dtr of nothing")


@pytest.mark.core(2)
@pytest.mark.covering(2)
@pytest.mark.parametrize("name", NAMES)
def test_computations(name: str, any_context: Context) -> None:
    computation, device = COMPUTATIONS[name], any_context.torch_device
    plain = gradients(computation, device, nullcontext)

    for _ in range(2):  # of two steps each: without a plan, and with one
        assert_same_bits(gradients(computation, device, any_context), plain)
    assert any_context.num_live == 0
    if any_context.name in ALL_GOES:
        assert any_context.num_acts > 0 or (any_context.name, name) in NOTHING_TO_GAIN


def _model_step(model: nn.Module, inputs: list[Tensor], context: AbstractContextManager[object]) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(3)
    with context:
        output = model(*inputs)
    output = output if isinstance(output, Tensor) else next(iter(output.values() if isinstance(output, dict) else output))
    output.float().square().mean().backward()
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    return [output.detach(), *grads, *[buffer.clone() for buffer in model.buffers()], torch.get_rng_state()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.covering(1)
@pytest.mark.parametrize("name", CASES)
def test_models(name: str, context: Context) -> None:
    torch.use_deterministic_algorithms(torch.cuda.is_available(), warn_only=True)  # some have operators that are not
    case, device = CASES[name], context.torch_device
    is_planned = context.name == "budget"
    if is_planned and name in LARGE:  # within 4 KiB nearly each of hundreds of values is made from the input again: minutes
        context = replace(context, kind=MORE_KINDS["budget half"])
    model, inputs = case.model().to(device), [x.to(device) for x in case.inputs()]
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def run(made: AbstractContextManager[object]) -> list[Tensor]:
        model.load_state_dict(buffers, strict=False)
        return _model_step(model, inputs, made)

    num_plain = 5 if device.type == "cuda" else 1
    plain = [run(nullcontext()) for _ in range(num_plain)]
    noise = [
        max(float((run[index].float() - plain[0][index].float()).abs().max()) for run in plain)
        for index in range(len(plain[0]))
    ]
    for _ in range((5 if is_planned else 3) - (name in LARGE)):
        found = run(context())

        if any(noise):  # the plain runs differ among themselves, as is known of some operators on CUDA
            assert device.type == "cuda"
            for one, other, bound in zip(found, plain[0], noise, strict=True):
                assert float((one.float() - other.float()).abs().max()) <= 2 * bound
        else:
            assert_same_bits(found, plain[0])
        assert context.num_live == 0


# What is saved


class SavesViews(torch.autograd.Function):
    """Saves a tensor, two views of it and, between them, another; looks in the backward whether they still share a storage."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward(x, x.t(), other, x[2:5])
        return x.sin() + other

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        whole, transposed, other, part = saved = ctx.saved_tensors
        assert len({tensor.untyped_storage().data_ptr() for tensor in saved}) == 2
        assert transposed.data_ptr() == whole.data_ptr() != other.data_ptr()
        assert part.data_ptr() == whole[2].data_ptr()
        return grad * whole.cos(), grad


def test_views_share_a_storage_in_the_backward_too(any_context: Context) -> None:
    """Else each view would take up as much as the whole, and most where memory is short."""
    for _ in range(5):
        x, w = inputs_on(any_context.torch_device)
        with any_context():
            for _ in range(3):
                x = SavesViews.apply(functional.linear(x, w).exp().clamp(max=4), functional.linear(x, w).sin())
            loss = x.sum()
        loss.backward()

    assert (any_context.num_acts > 0) == (any_context.name != "offload nothing")


def test_saved_tensors_read_outside_a_backward(context: Context) -> None:
    for _ in range(3):
        x, w = inputs_on(context.torch_device)
        with context():
            y = functional.linear(x, w).exp()
            z = y.sin()
        expected, node = y.detach().clone(), z.grad_fn
        del y

        assert torch.equal(node._saved_self, expected)
        assert torch.equal(node._saved_self, expected)


def test_what_the_user_holds_stays_where_it_is(context: Context) -> None:
    x, w = inputs_on(context.torch_device)
    with context():
        hidden = functional.linear(x, w).sin()
        loss = hidden.exp().sum()
    before = hidden.detach().clone(), hidden.data_ptr(), hidden._version
    loss.backward()

    assert torch.equal(hidden, before[0])
    assert (hidden.data_ptr(), hidden._version) == before[1:]


# Without gradients


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_happens(mode: type, context: Context) -> None:
    x = leaf_on(context.torch_device)
    with mode(), context():
        assert innermost_pack() is None
        assert torch._C._len_torch_dispatch_stack() == 0
        y = chain(x, [1] * 10)

    assert not y.requires_grad
    with pytest.raises(ValueError, match='found none under "contract"'):
        memkit.stats(context.tag)


def test_grad_mode_that_changes_inside(context: Context) -> None:
    def run(make: Any) -> list[Tensor]:
        x, w = inputs_on(context.torch_device)
        with make():
            with torch.no_grad():
                teacher = functional.linear(x, w).exp().softmax(1)
            loss = (functional.linear(x, w).sin().log_softmax(1) * teacher).sum().exp()
        loss.backward()
        return [x.grad, w.grad]

    plain = run(nullcontext)
    for _ in range(3):
        assert_same_bits(run(context), plain)


def test_nothing_is_left_on_modules_and_tensors(context: Context) -> None:
    device = context.torch_device
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.BatchNorm1d(16), nn.Linear(16, 4)).to(device)
    x = torch.randn(8, 16, device=device, requires_grad=True)
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    with context():
        y = model[:2](x)
        loss = model[2:](y).sum()
    loss.backward()

    assert innermost_pack() is None
    for name, module in model.named_modules():
        assert set(module.__dict__) == set(before[name])
        assert not any(value for key, value in module.__dict__.items() if key.endswith("_hooks"))
    for tensor in (x, y, loss, *model.parameters(), *model.buffers()):
        assert tensor.__dict__ == {}
        assert not tensor._backward_hooks
        assert type(tensor) in (Tensor, nn.Parameter)
