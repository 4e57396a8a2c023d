"""Ops with function arguments (`torch.cond`, `flex_attention`) work as without the context: their results are kept."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import memkit
from memkit.device import CpuDevice
from tests.activations.cases import assert_same_bits, inputs_on
from tests.activations.remat.conftest import NO_PLAN_FITS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(NO_PLAN_FITS),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning"),  # Dynamo imports such code
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # and looks at it
    pytest.mark.usefixtures("quick_plans"),
]

Computation = Callable[[Tensor, Tensor], Tensor]
linear = functional.linear


@pytest.fixture(autouse=True, scope="module")
def _no_compiled_code_is_left() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def condition(x: Tensor, w: Tensor) -> Tensor:
    y, scale = linear(x, w).sin(), w[0].sin()
    for limit in (-1e9, 1e9):
        y = torch.cond(y.sum() > limit, lambda t: t.sin() * scale, lambda t: t.cos() * t, (y * 1,)).sin().exp()
    return y


def loop(x: Tensor, w: Tensor) -> Tensor:
    y = linear(x, w).sin()
    _, z = torch.while_loop(lambda i, z: i < 3, lambda i, z: (i + 1, z.sin() * 2), (torch.tensor(0), y * 2))
    return (y * z).sin().exp()


def masked_attention_with_a_bias(x: Tensor, w: Tensor) -> Tensor:
    y, bias = linear(x, w).sin(), w[0, :2].detach()
    heads = y.detach().view(1, 2, 8, 16)
    with torch.no_grad():
        mask = create_block_mask(lambda b, h, i, j: i >= j, 1, 2, 8, 8, device=x.device)
        looked_up = flex_attention(heads, heads, heads, score_mod=lambda s, b, h, i, j: s + bias[h], block_mask=mask)
    return (y * looked_up.reshape(8, 32)).sin().exp()


def _run(computation: Computation, context: AbstractContextManager[object]) -> list[Tensor]:
    torch.manual_seed(0)
    x, w = inputs_on(torch.device("cpu"))
    with context:
        loss = functional.dropout(computation(x, w), 0.2).square().sum()
    loss.backward()
    return [loss.detach(), x.grad, w.grad, torch.get_rng_state()]


def _remat(tag: str, budget: float | str = 0.1, *, verify: bool = False) -> memkit.Rematerialize:
    return memkit.Rematerialize(budget, tag, min_bytes=0, verify=verify, device=CpuDevice())


def _num_compiled() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.fixture
def _attention_has_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU compute gradients of attention: the code is there."""
    monkeypatch.setattr(sys.modules[flex_attention.__module__], "_validate_device", lambda *_: None)


def attention_with_gradients(x: Tensor, w: Tensor) -> Tensor:
    """Tensors made for the tracer are no part of the forward."""
    heads, bias = linear(x, w).sin().view(1, 2, 8, 16), w[0, :2].exp()
    looked_up = flex_attention(heads, heads.cos(), heads.exp(), score_mod=lambda s, b, h, i, j: s + bias[h])
    return linear(looked_up.reshape(8, 32), w).sin().exp()


@pytest.mark.usefixtures("_attention_has_gradients")
@pytest.mark.parametrize("verify", [False, True])
def test_attention_whose_backward_is_traced_in_the_forward(verify: bool) -> None:
    plain = _run(attention_with_gradients, nullcontext())

    for _ in range(3):
        assert_same_bits(_run(attention_with_gradients, _remat("attention", verify=verify)), plain)
        assert memkit.stats("attention").num_replays > 0


@pytest.mark.parametrize("computation", [condition, loop, masked_attention_with_a_bias])
def test_higher_order_ops_run_as_without_the_context(computation: Computation) -> None:
    found = [_run(computation, _remat("higher"))]
    num_compiled = _num_compiled()
    plain = _run(computation, nullcontext())
    found += [_run(computation, _remat("higher")) for _ in range(2)]
    found += [_run(computation, _remat("verified", verify=True)) for _ in range(2)]

    for results in found:
        assert_same_bits(results, plain)
    assert _num_compiled() == num_compiled > 0  # what was compiled once is good in and out of the context
    assert memkit.stats("higher").num_replays > 0
    assert memkit.stats("higher").follows_plan


def test_plan_says_that_they_are_kept() -> None:
    for _ in range(2):
        _run(condition, _remat("why", 0.5))

    assert "higher_order::cond is a higher-order op, which is not run again" in memkit.Rematerialize(1.0, "why").plan.explain()


def test_writes_of_a_branch_are_seen() -> None:
    def computation(x: Tensor, w: Tensor) -> Tensor:
        y = linear(x, w).sin()
        first = (y + 1).sin()
        with torch.no_grad():
            total = torch.cond(x.sum() > -1e9, lambda t: t.mul_(0.5).sum(), lambda t: t.sum(), (y,))
        return first.exp() * (y + 2).sin().exp() * total

    try:
        plain = _run(computation, nullcontext())
    except RuntimeError:
        pytest.skip("this torch refuses branches that write")

    for _ in range(3):
        assert_same_bits(_run(computation, _remat("written")), plain)
        assert memkit.stats("written").num_replays > 0


# What the program compiles itself


def test_compiled_function_that_saves_nothing_runs_op_by_op() -> None:
    compiled = torch.compile(lambda y: y.mul_(2).sin(), backend="eager")

    def computation(x: Tensor, w: Tensor) -> Tensor:
        y = linear(x, w)
        first = (y + 1).sin()
        with torch.no_grad():
            other = compiled(y)
        return first.exp() * (y + 2).sin() * other

    plain = _run(computation, nullcontext())
    num_compiled = _num_compiled()

    for _ in range(2):
        assert_same_bits(_run(computation, _remat("op by op")), plain)
    assert _num_compiled() == num_compiled
