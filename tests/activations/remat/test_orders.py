"""In whatever order forwards and backwards come, from whatever thread: gradients are those of the plain run, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memkit
from memkit.device import Device
from tests.activations.cases import assert_same_bits, inputs_on, mlp, skips
from tests.activations.remat.cases import random_numbers, relu_and_residuals
from tests.activations.remat.conftest import NO_PLAN_FITS, Remat

pytestmark = [pytest.mark.filterwarnings(NO_PLAN_FITS), pytest.mark.usefixtures("quick_plans")]

Make = Callable[[], AbstractContextManager[object]]
Order = Callable[[torch.device, Make], list[Tensor]]


def retained(device: torch.device, make: Make) -> list[Tensor]:
    x, w = inputs_on(device)
    with make():
        loss = skips(x, w).sum() + random_numbers(x, w).sum()
    for _ in range(3):
        loss.backward(retain_graph=True)
    loss.backward()
    return [x.grad, w.grad]


def double_backward(device: torch.device, make: Make) -> list[Tensor]:
    x, w = inputs_on(device)
    with make():
        loss = mlp(x, w).square().sum()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        penalty = grad.square().sum()
    (loss + penalty).backward()
    return [x.grad, w.grad]


def double_backward_outside(device: torch.device, make: Make) -> list[Tensor]:
    x, w = inputs_on(device)
    with make():
        loss = mlp(x, w).square().sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    grad.exp().sum().backward()
    return [x.grad, w.grad]


def partial(device: torch.device, make: Make) -> list[Tensor]:
    x, w = inputs_on(device)
    with make():
        hidden = mlp(x, w)
        left, right = relu_and_residuals(hidden, w).sum(), skips(hidden, w).sum()
    (first,) = torch.autograd.grad(left, hidden, retain_graph=True)
    right.backward(retain_graph=True, inputs=[w])
    (left + right).backward()
    return [first, x.grad, w.grad]


def shared_between_two_backwards(device: torch.device, make: Make) -> list[Tensor]:
    x, w = inputs_on(device)
    with make():
        trunk = mlp(x, w).exp()
        first, second = trunk.sin().exp(), trunk.cos().exp()
    first.sum().backward(retain_graph=True)
    second.sum().backward()
    return [x.grad, w.grad]


def interleaved(device: torch.device, make: Make) -> list[Tensor]:
    """One forward, one backward in turn, as in a pipeline."""
    x, w = inputs_on(device)
    alive: list[Tensor] = []
    for factor in range(6):
        with make():
            alive.append(skips(x + factor, w).sum())
        if len(alive) == 3:
            alive.pop(0).backward()
    for loss in alive:
        loss.backward()
    return [x.grad, w.grad]


def any_order(device: torch.device, make: Make) -> list[Tensor]:
    x, w = inputs_on(device)
    losses = []
    for factor in range(3):
        with make():
            losses.append(random_numbers(x * (factor + 1), w).square().sum())
    for index in (1, 2, 0):
        losses[index].backward()
    return [x.grad, w.grad]


def one_context_around_many_steps(device: torch.device, make: Make) -> list[Tensor]:
    x, w = inputs_on(device)
    v = (w * 2).detach().requires_grad_()
    with make():
        for _ in range(4):
            mlp(x, v).sum().backward()
            skips(x, v).sum().backward()
            with torch.no_grad():
                v.sub_(v.grad, alpha=1e-3)
            v.grad = None
    return [x.grad, v.detach()]


def accumulated(device: torch.device, make: Make) -> list[Tensor]:
    torch.manual_seed(0)
    layers = (nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Dropout(0.3), nn.Linear(64, 4))
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = inputs_on(device)[0].detach()
    for _ in range(3):
        for micro in range(3):
            with make():
                loss = model(x + micro).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in model.parameters()]


def scaled(device: torch.device, make: Make) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(device.type, init_scale=128.0)
    x = inputs_on(device)[0].detach()
    for _ in range(4):
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):  # its cache of weights outlives the first context
            for _ in range(2):
                with make():
                    loss = model(x).float().square().mean()
                scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return [param.detach() for param in model.parameters()]


def in_a_thread(device: torch.device, make: Make) -> list[Tensor]:
    x, w = inputs_on(device)
    with make(), torch.autocast(device.type, torch.bfloat16):
        loss = functional.dropout(mlp(x, w), 0.3).float().exp().sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    return [x.grad, w.grad]


def under_other_modes(device: torch.device, make: Make) -> list[Tensor]:
    """The backward runs under what the forward did not, and must not be told by it."""
    x, w = inputs_on(device)
    with make():
        loss = mlp(x, w).exp().sum()
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast(device.type, torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(_fail, _fail):
            loss.backward()
    finally:
        torch.set_default_dtype(default)
    return [x.grad, w.grad]


def _fail(_: Tensor) -> Tensor:
    raise AssertionError("a replay was given to hooks")


ORDERS: dict[str, Order] = {
    made.__name__: made
    for made in (
        retained,
        double_backward,
        double_backward_outside,
        partial,
        shared_between_two_backwards,
        interleaved,
        any_order,
        one_context_around_many_steps,
        accumulated,
        scaled,
        in_a_thread,
        under_other_modes,
    )
}


@pytest.mark.parametrize("policy", ["plan", "dtr"])
@pytest.mark.parametrize("name", ORDERS)
def test_orders(name: str, policy: str, device: Device, remat_on: Remat) -> None:
    torch.manual_seed(7)
    plain = ORDERS[name](device.torch_device, nullcontext)

    for budget in (0.6, 0.2):
        for _ in range(3):
            torch.manual_seed(7)
            found = ORDERS[name](device.torch_device, lambda: remat_on(budget, "order", policy=policy))  # noqa: B023

            assert_same_bits(found, plain)
        assert memkit.stats("order").num_replays > 0
        memkit.reset("order")


def test_threads_with_their_own_forwards(device: Device, remat_on: Remat) -> None:
    found: dict[int, list[Tensor]] = {}

    def work(number: int) -> None:
        x, w = inputs_on(device.torch_device)
        for _ in range(5):
            x.grad = w.grad = None
            with remat_on(0.3, "threads"):
                loss = mlp(x * (number + 1), w).sum()
            loss.backward()
        found[number] = [x.grad, w.grad]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    for number in range(3):
        x, w = inputs_on(device.torch_device)
        mlp(x * (number + 1), w).sum().backward()
        assert_same_bits(found[number], [x.grad, w.grad])


@pytest.mark.parametrize("forward_aside", [False, True])
def test_streams(forward_aside: bool, device: Device, remat_on: Remat) -> None:
    """Pack on one stream, unpack on another: the replay waits for what it reads, and those who come later for the replay."""
    side = device.new_stream("side")
    x, w = inputs_on(device.torch_device)
    device.wait_event(side, device.record_event())
    with device.on_stream(side) if forward_aside else nullcontext(), remat_on(0.3, "streams"):
        loss = mlp(x, w).sum()
        done = device.record_event()
    other = device.current_stream() if forward_aside else side
    device.wait_event(other, done)
    with device.on_stream(other):
        loss.backward(retain_graph=True)
        done = device.record_event()
    device.wait_event(device.current_stream(), done)
    loss.backward()

    x2, w2 = inputs_on(device.torch_device)
    plain = mlp(x2, w2).sum()
    plain.backward(retain_graph=True)
    plain.backward()
    assert_same_bits([x.grad, w.grad], [x2.grad, w2.grad])
    assert memkit.stats("streams").num_replays > 0


def test_saved_tensors_read_outside_a_backward(device: Device, remat_on: Remat) -> None:
    x, w = inputs_on(device.torch_device)
    with remat_on("1B", "read"):
        y = functional.linear(x, w).exp()
        z = y.sin()
    expected, node = y.detach().clone(), z.grad_fn
    del y

    assert torch.equal(node._saved_self, expected)
    assert torch.equal(node._saved_self, expected)
