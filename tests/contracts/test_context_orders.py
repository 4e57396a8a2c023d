"""Forwards and backwards in any order, on any stream and from any thread: the gradients of the plain run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memkit
from tests.activations.cases import assert_same_bits, inputs_on, mlp, skips
from tests.activations.remat.conftest import NO_PLAN_FITS
from tests.contracts.conftest import Case, Context, Training
from tests.threads import run_in_threads

pytestmark = [pytest.mark.filterwarnings(NO_PLAN_FITS), pytest.mark.usefixtures("quick_plans")]

Make = Callable[[], AbstractContextManager[object]]
Order = Callable[[Case], list[Tensor]]


def retained(case: Case) -> list[Tensor]:
    with case.context():
        loss = case.compute("skips", case.x).sum() + case.compute("random_numbers", case.x).sum()
    for _ in range(3):
        loss.backward(retain_graph=True)
    loss.backward()
    return case.gradients()


def double_backward(case: Case) -> list[Tensor]:
    with case.context():
        loss = case.compute("mlp", case.x).square().sum()
        (grad,) = torch.autograd.grad(loss, case.x, create_graph=True)
        penalty = grad.square().sum()
    (loss + penalty).backward()
    return case.gradients()


def double_backward_outside(case: Case) -> list[Tensor]:
    loss = case("mlp", case.x).square().sum()
    (grad,) = torch.autograd.grad(loss, case.x, create_graph=True)
    (grad.exp().sum() + loss).backward()
    return case.gradients()


def partial(case: Case) -> list[Tensor]:
    with case.context():
        hidden = case.compute("mlp", case.x)
        left, right = case.compute("relu_and_residuals", hidden).sum(), case.compute("skips", hidden).sum()
    (first,) = torch.autograd.grad(left, hidden, retain_graph=True)
    right.backward(retain_graph=True, inputs=case.leaves[1:])
    right.backward(retain_graph=True)
    (left + right).backward()
    return [first, *case.gradients()]


def shared_between_two_backwards(case: Case) -> list[Tensor]:
    with case.context():
        trunk = case.compute("mlp", case.x).exp()
        first, second = trunk.sin().exp(), trunk.cos().exp()
    first.sum().backward(retain_graph=True)
    second.sum().backward()
    return case.gradients()


def interleaved(case: Case) -> list[Tensor]:
    """One forward, one backward in turn, as in a pipeline."""
    alive: list[Tensor] = []
    for factor in range(6):
        alive.append(case("skips", case.x + factor).sum())
        if len(alive) == 3:
            alive.pop(0).backward()
    for loss in alive:
        loss.backward()
    return case.gradients()


def _several(order: tuple[int, ...]) -> Order:
    def several(case: Case) -> list[Tensor]:
        losses = [case("random_numbers", case.x * (factor + 1)).square().sum() for factor in range(3)]
        for index in order:
            losses[index].backward()
        return case.gradients()

    return several


def dropped_unused(case: Case) -> list[Tensor]:
    case("skips", case.x)
    loss = case("mlp", case.x).sum()
    case("mlp", case.x).sum().backward(retain_graph=True)
    loss.backward()
    return case.gradients()


def backward_inside(case: Case) -> list[Tensor]:
    with case.context():
        for _ in range(3):
            case.compute("mlp", case.x).sum().backward()
    return case.gradients()


def one_context_around_many_steps(case: Case) -> list[Tensor]:
    with case.context():
        for _ in range(4):
            scale = (case.x.detach() * 2).requires_grad_()
            case.compute("mlp", case.x * scale).sum().backward()
            case.compute("skips", case.x * scale).sum().backward()
            with torch.no_grad():
                scale.sub_(scale.grad, alpha=1e-3)
    return [*case.gradients(), scale.detach()]


def in_a_thread(case: Case) -> list[Tensor]:
    with case.context(), torch.autocast(case.device.torch_device.type, torch.bfloat16):
        loss = functional.dropout(case.compute("mlp", case.x), 0.3).float().exp().sum()
    run_in_threads(loss.backward)
    return case.gradients()


def _fail(_: Tensor) -> Tensor:
    raise AssertionError("what a backward does was given to hooks")


def under_other_modes(case: Case) -> list[Tensor]:
    """The backward runs under modes that the forward did not have, and must not depend on them."""
    loss = case("mlp", case.x).exp().sum()
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with (
            torch.autocast(case.device.torch_device.type, torch.bfloat16),
            torch.autograd.graph.saved_tensors_hooks(_fail, _fail),
        ):
            loss.backward()
    finally:
        torch.set_default_dtype(default)
    return case.gradients()


ORDERS: dict[str, Order] = {
    made.__name__: made
    for made in (
        *(retained, double_backward, double_backward_outside, partial, shared_between_two_backwards, interleaved),
        *(dropped_unused, backward_inside, one_context_around_many_steps, in_a_thread, under_other_modes),
    )
} | {f"several {order}": _several(order) for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0))}


LIKE_OTHERS = ("several (1, 2, 0)", "several (2, 1, 0)", "interleaved", "partial", "double_backward_outside", "dropped_unused")


@pytest.mark.core(1)
@pytest.mark.covering(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LIKE_OTHERS else name for name in ORDERS]
)
def test_orders(name: str, training: Training) -> None:
    torch.manual_seed(7)
    plain, num_acts = ORDERS[name](training.plain()), 0

    for _ in range(3):
        torch.manual_seed(7)
        assert_same_bits(ORDERS[name](training.tested()), plain)
        num_acts += training.num_acts()
    assert num_acts > 0  # the last forward alone may have nothing to gain


TRAININGS: dict[str, dict[str, Any]] = {
    "accumulated": {"num_micro": 3},
    "scaled": {"num_micro": 2, "autocast": "around", "init_scale": 128.0},  # its cache of weights outlives the first context
    "autocast inside": {"autocast": "inside", "init_scale": 128.0},
}


def _trained(
    context: Context, make: Make, *, num_micro: int = 1, autocast: str = "", init_scale: float | None = None
) -> list[Tensor]:
    torch.manual_seed(0)
    kind = context.torch_device.type
    layers = (nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Dropout(0.3), nn.Linear(64, 4))
    model = nn.Sequential(*layers).to(context.torch_device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(kind, init_scale=init_scale or 1.0, enabled=init_scale is not None)
    x = inputs_on(context.torch_device)[0].detach()
    cast = {
        name: functools.partial(torch.autocast, kind, torch.bfloat16) if name == autocast else nullcontext
        for name in ("around", "inside")
    }
    for _ in range(4):
        optimizer.zero_grad()
        with cast["around"]():
            for micro in range(num_micro):
                with make(), cast["inside"]():
                    loss = model(x + micro).float().square().mean()
                scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return [param.detach() for param in model.parameters()]


@pytest.mark.core(1)
@pytest.mark.parametrize("name", TRAININGS)
def test_optimizer_steps(name: str, context: Context) -> None:
    plain = _trained(context, nullcontext, **TRAININGS[name])

    for _ in range(2):
        assert_same_bits(_trained(context, context, **TRAININGS[name]), plain)
    assert context.num_acts > 0 or _has_nothing_to_gain(context)


def _has_nothing_to_gain(context: Context) -> bool:
    """Tell whether the least budget with a plan is the plain step: on a GPU, products of so few numbers have workspaces of MiB,
    and the saved bytes beside them make no difference."""
    made = context()
    if not isinstance(made, memkit.MemoryBudget) or context.torch_device.type != "cuda":
        return False
    return made.plan is not None and made.plan.is_plain and made.plan.min_budget_bytes > made.plan.budget_bytes


# Streams and threads


@pytest.mark.parametrize("forward_aside", [False, True])
def test_streams(forward_aside: bool, context: Context) -> None:
    """Pack on one stream, unpack on another: copies and replays wait for their inputs, and later users for them."""
    device = context.device
    side = device.new_stream("side")
    x2, w2 = inputs_on(device.torch_device)
    plain = mlp(x2, w2).sum()
    plain.backward(retain_graph=True)
    plain.backward()
    for _ in range(4):
        x, w = inputs_on(device.torch_device)
        device.wait_event(side, device.record_event())
        with device.on_stream(side) if forward_aside else nullcontext(), context():
            loss = mlp(x, w).sum()
            done = device.record_event()
        other = device.current_stream() if forward_aside else side
        device.wait_event(other, done)
        with device.on_stream(other):
            loss.backward(retain_graph=True)
            done = device.record_event()
        device.wait_event(device.current_stream(), done)
        loss.backward()

        assert_same_bits([x.grad, w.grad], [x2.grad, w2.grad])
        assert context.num_acts > 0


def test_threads_with_their_own_forwards(context: Context) -> None:
    found: dict[int, list[Tensor]] = {}

    def work(number: int) -> None:
        x, w = inputs_on(context.torch_device)
        for _ in range(5):
            x.grad = w.grad = None
            with context():
                loss = mlp(x * (number + 1), w).sum()
            loss.backward()
        found[number] = [x.grad, w.grad]

    run_in_threads(*(functools.partial(work, number) for number in range(3)))

    for number in range(3):
        x, w = inputs_on(context.torch_device)
        mlp(x * (number + 1), w).sum().backward()
        assert_same_bits(found[number], [x.grad, w.grad])


def test_contexts_of_two_tags_one_after_the_other(context: Context) -> None:
    """Two models take turns."""
    other = Context(context.name, context.kind, context.device, "other")
    x, w = inputs_on(context.torch_device)
    plain = torch.autograd.grad(skips(x, w).sum(), (x, w)), torch.autograd.grad(mlp(x, w).sum(), (x, w))
    for _ in range(3):
        for made, computation, wanted in ((context, skips, plain[0]), (other, mlp, plain[1])):
            with made():
                loss = computation(x, w).sum()
            assert_same_bits(torch.autograd.grad(loss, (x, w)), wanted)
    assert context.num_live == other.num_live == 0
