"""Ops that memkit does not know are not run again, unless the user says that they only compute."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import memkit
from tests.activations.cases import assert_same_bits, inputs_on
from tests.activations.remat.conftest import NO_PLAN_FITS, Remat

pytestmark = [pytest.mark.filterwarnings(NO_PLAN_FITS), pytest.mark.usefixtures("quick_plans")]

Op = Callable[[Tensor], Tensor]
_calls: dict[str, int] = {}
_scale = [1.0]
_state = torch.zeros(8, 32)


def _op(name: str, compute: Op) -> Any:
    def run(x: Tensor) -> Tensor:
        _calls[name] = _calls.get(name, 0) + 1
        return compute(x)

    op = torch.library.custom_op(f"memkit_pure::{name}", run, mutates_args=(), schema="(Tensor x) -> Tensor")
    op.register_fake(torch.empty_like)
    op.register_autograd(lambda ctx, grad: grad * ctx.saved_tensors[0].cos(), setup_context=_save_output)
    return op


def _save_output(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _accumulate(x: Tensor) -> Tensor:
    _state.add_(x.detach().cpu())
    return _state.to(x.device, copy=True)


OPS = {
    "python_random": _op("python_random", lambda x: x * (1 + random.random())),
    "numpy_random": _op("numpy_random", lambda x: x * (1 + float(np.random.random()))),  # what users write
    "torch_random": _op("torch_random", lambda x: x * torch.rand_like(x)),
    "counter": _op("counter", lambda x: x + _calls["counter"]),
    "own_state": _op("own_state", _accumulate),
    "mutable_global": _op("mutable_global", lambda x: x * _scale[0]),
    "double": _op("double", lambda x: x * 2),
}


@pytest.fixture(autouse=True)
def _fresh_effects() -> Iterator[None]:
    yield
    _scale[0] = 1.0


def _train(op: Op, torch_device: torch.device, contexts: list[AbstractContextManager[object]]) -> tuple[list[Tensor], object]:
    """Return the gradients of a step in each context, and all of its ops' possible side effects."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    _calls.clear()
    _state.zero_()
    found = []
    for number, context in enumerate(contexts):
        x, w = inputs_on(torch_device)
        _scale[0] = 1.0 + number
        with context:
            y = op((x @ w).sin())
            loss = (y.sin() * op(y.cos() * 2).exp()).sum()
        _scale[0] = 7.0
        loss.backward()
        found += [loss.detach(), x.grad, w.grad]
    rest = random.random(), float(np.random.random()), dict(_calls), torch.get_rng_state().tolist()
    return [*found, _state.clone()], rest


@pytest.mark.parametrize("name", OPS)
def test_effects_of_unknown_ops_happen_once(name: str, torch_device: torch.device, remat_on: Remat) -> None:
    plain, effects = _train(OPS[name], torch_device, [nullcontext() for _ in range(4)])

    found, found_effects = _train(OPS[name], torch_device, [remat_on(0.1, "own") for _ in range(4)])

    assert_same_bits(found, plain)
    assert found_effects == effects
    assert memkit.stats("own").num_replays > 0


@pytest.mark.parametrize(
    "pure_ops",
    [
        [OPS["torch_random"]],
        [torch.ops.memkit_pure.torch_random],
        [torch.ops.memkit_pure.torch_random.default],
        ["memkit_pure::torch_random"],
        ["other::*", "memkit_pure::*"],
    ],
    ids=["what custom_op returns", "op", "overload", "name", "library"],
)
def test_ops_that_are_said_to_be_pure_run_again(pure_ops: list[Any]) -> None:
    plain, effects = _train(OPS["torch_random"], torch.device("cpu"), [nullcontext()] * 3)

    contexts = [memkit.Rematerialize(0.1, "pure", min_bytes=0, pure_ops=pure_ops) for _ in range(3)]
    found, found_effects = _train(OPS["torch_random"], torch.device("cpu"), contexts)

    assert_same_bits(found, plain)
    assert found_effects[2]["torch_random"] > effects[2]["torch_random"]  # type: ignore[index]
    assert found_effects[3] == effects[3]  # type: ignore[index]


def test_another_word_on_what_is_pure_begins_anew() -> None:
    device = torch.device("cpu")
    words: list[list[str]] = [[], [], ["memkit_pure::double"], ["memkit_pure::double"], ["memkit_pure::double"], [], []]
    plain, _ = _train(OPS["double"], device, [nullcontext()] * len(words))

    found, _ = _train(OPS["double"], device, [memkit.Rematerialize(0.2, "word", min_bytes=0, pure_ops=word) for word in words])

    assert_same_bits(found, plain)


def test_plan_says_why_an_unknown_op_is_kept() -> None:
    contexts = [memkit.Rematerialize(0.5, "why", min_bytes=0) for _ in range(2)]
    _train(OPS["double"], torch.device("cpu"), contexts)

    plan = memkit.Rematerialize(1.0, "why").plan
    kept = [index for index, planned in enumerate(plan.saves) if "memkit_pure::double" in planned.reason]

    assert len(kept) == 2
    assert "op memkit_pure::double is not known to be pure; if it is, name it in pure_ops" in plan.explain()
    with pytest.raises(ValueError, match="cannot be recomputed: op memkit_pure::double is not known to be pure"):
        plan.with_action(kept[0], memkit.plan.Action.RECOMPUTE)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("policy", ["plan", "dtr"])
def test_budget_that_unknown_ops_exceed_says_so(policy: str) -> None:
    contexts = [memkit.Rematerialize(1024, "exceeded", policy=policy, min_bytes=0) for _ in range(3)]

    with pytest.warns(UserWarning, match=r"2\.00 KiB stay, since op memkit_pure::double is not known to be pure") as caught:
        _train(OPS["double"], torch.device("cpu"), contexts)

    assert len(caught) == 1


def test_wish_to_recompute_what_an_unknown_op_made_is_answered() -> None:
    x, _ = inputs_on(torch.device("cpu"))

    def step() -> None:
        with memkit.Rematerialize(1.0, "wish", min_bytes=0):
            loss = memkit.recompute(OPS["double"](x)).sin().sum()
        loss.backward()

    with pytest.warns(UserWarning, match="recompute was given .* op memkit_pure::double is not known to be pure") as caught:
        step()
    step()

    assert len(caught) == 1
    assert caught[0].filename == __file__


# What else an op may do


@pytest.mark.parametrize("is_made_within", [False, True])
def test_op_that_returns_its_own_state_again_is_refused_where_that_was_needed(is_made_within: bool) -> None:
    """The same storage holds other bytes at each call, and no counter tells."""
    state = torch.zeros(8, 32)
    library = torch.library.Library("memkit_state", "DEF")
    library.define("count(Tensor x) -> Tensor")

    def count(x: Tensor) -> Tensor:
        state.data += 1
        return state

    library.impl("count", count, "CPU")

    def computation(x: Tensor, w: Tensor, *, num_times: int) -> Tensor:
        y = x @ w
        for _ in range(num_times):
            with torch.no_grad():
                counted = torch.ops.memkit_state.count(y) + 0
            y = (y * counted).sin()
        return y.sum()

    def run(num_times: int, context: AbstractContextManager[object]) -> list[Tensor]:
        nonlocal state
        state.zero_()
        x, w = inputs_on(torch.device("cpu"))
        with context:
            state = x.detach() * 0 if is_made_within else state
            loss = computation(x, w, num_times=num_times)
        loss.backward()
        return [loss.detach(), x.grad, w.grad]

    assert_same_bits(run(1, memkit.Rematerialize(0.1, "once", min_bytes=0)), run(1, nullcontext()))
    with pytest.raises(RuntimeError, match=r"belongs to an op that has returned it again .* let the op return a copy"):
        run(3, memkit.Rematerialize(0.1, "again", min_bytes=0))
    library._destroy()


def test_op_that_returns_its_argument_is_no_write(torch_device: torch.device, remat_on: Remat) -> None:
    """As ops that make a tensor contiguous, without saying so."""
    library = torch.library.Library("memkit_same", "DEF")
    library.define("contiguous(Tensor x) -> Tensor")
    library.impl("contiguous", lambda x: x.contiguous(), "CPU")
    library.impl("contiguous", lambda x: x.contiguous(), "CUDA")

    def run(context: AbstractContextManager[object]) -> list[Tensor]:
        x, w = inputs_on(torch_device)
        with context:
            y = (x.detach() * w[:8]).sin()
            with torch.no_grad():
                same = torch.ops.memkit_same.contiguous(x), torch.ops.memkit_same.contiguous(y)
            loss = (y * same[0].sin() * (same[1] * w[:8]).cos()).exp().sum()
        loss.backward()
        return [loss.detach(), w.grad]

    plain = run(nullcontext())

    for _ in range(3):
        assert_same_bits(run(remat_on(0.1, "same")), plain)
        assert memkit.stats("same").num_replays > 0
    library._destroy()


# Wrong words


@pytest.mark.parametrize(
    ("pure_ops", "error", "message"),
    [
        ("mylib::*", TypeError, "pure_ops is a list of ops, or of their names; found 'mylib::.*'. Put it into a list"),
        (OPS["double"], TypeError, "Put it into a list"),
        (3, TypeError, "Put it into a list"),
        ([torch.sin], TypeError, r"pure_ops needs ops, such as torch\.ops\.mylib\.myop"),
        (["myop"], ValueError, 'pure_ops needs names such as "mylib::myop".*; found "myop"'),
        (["*"], ValueError, 'found "\\*"'),
        (["aten::nonzero"], ValueError, "needs ops that memkit does not know; found aten::nonzero. Leave it out"),
        ([torch.ops.aten.sin], ValueError, "found aten::sin"),
        ([torch.ops.higher_order.cond], ValueError, "found higher_order::cond. Leave it out: higher-order ops"),
    ],
)
def test_what_is_no_list_of_ops_is_refused(pure_ops: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        memkit.Rematerialize(0.5, pure_ops=pure_ops)


def test_smallest_budget_knows_what_is_pure() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(4):
                x = OPS["double"](x.sin()).sin()
            return x

    x = torch.randn(64, 64, requires_grad=True)

    kept, replayed = (
        memkit.Rematerialize.min_budget(Model(), x, target="cpu", min_bytes=0, pure_ops=pure_ops)
        for pure_ops in ([], [OPS["double"]])
    )

    assert replayed < kept
