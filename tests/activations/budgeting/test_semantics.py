"""Steps that are no plain forward and backward, under a budget: each is exact, and later ones are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memkit
from memkit.activations.budgeting.state import budget_states
from memkit.device import Device
from tests.activations.budgeting.plans import Make, planner_of, random_plan, steady
from tests.activations.cases import assert_same_bits, gradients
from tests.activations.remat.cases import COMPUTATIONS, NAMES
from tests.activations.remat.conftest import NO_PLAN_FITS
from tests.contracts.conftest import Case
from tests.contracts.test_context_orders import ORDERS

pytestmark = pytest.mark.filterwarnings(NO_PLAN_FITS)

Step = Callable[["Net", Device, Make], None]


class Net(nn.Module):
    """Writes in place, draws random numbers, keeps statistics, has views and saves values twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor, depth: int = 4) -> Tensor:
        for layer in self.layers[:depth]:
            y = functional.dropout(functional.gelu(layer(x)), 0.2)
            left, right = y.chunk(2, 1)
            x = x + torch.cat([left.sin() * right, torch.relu_(right * left)], 1)
        return self.norm(x).exp().tanh()


def _net(device: Device) -> Net:
    torch.manual_seed(0)
    return Net().to(device.torch_device)


def _x(device: Device, rows: int = 8, seed: int = 1) -> Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(seed)).to(device.torch_device)


def plain_step(net: Net, device: Device, make: Make, rows: int = 8) -> None:
    with make():
        loss = net(_x(device, rows)).square().sum()
    loss.backward()


def of_a_part_alone(net: Net, device: Device, make: Make) -> None:
    with make():
        y = net(_x(device))
        part, rest = y[:, :4].sin().sum(), y[:, 4:].exp().cos().sum()
    part.backward()
    del rest


def without_grad_between(net: Net, device: Device, make: Make) -> None:
    with make():
        with torch.no_grad():
            teacher = net(_x(device)).exp()
        with torch.inference_mode():
            net(_x(device))
        loss = (net(_x(device)) * teacher).sum()
    with torch.no_grad(), make():
        net(_x(device))
    loss.backward()


def words_inside(net: Net, device: Device, make: Make) -> None:
    with make():
        y = memkit.offload(net.layers[0](_x(device)).sin())
        y = memkit.keep(y.exp()).cos()
        y = memkit.recompute(y * 2).tanh()
        with memkit.no_offload():
            loss = net(y).sum()
    loss.backward()


class NetCase(Case):
    """A net in place of each computation."""

    def __init__(self, net: Net, device: Device, context: Make) -> None:
        self.net, self.device, self.context = net, device, context
        self.x = _x(device).requires_grad_()
        self.leaves = [self.x, *net.parameters()]

    def compute(self, name: str, x: Tensor) -> Tensor:
        return self.net(x)


def _in_order(name: str) -> Step:
    def train(net: Net, device: Device, make: Make) -> None:
        ORDERS[name](NetCase(net, device, make))

    train.__name__ = name
    return train


_LIKE_OTHERS = ("in_a_thread", "under_other_modes", "several (0, 1, 2)", "several (2, 1, 0)")
STEPS = (
    *(plain_step, of_a_part_alone, without_grad_between, words_inside),
    *(_in_order(name) for name in ORDERS if name not in _LIKE_OTHERS),
)


def outcome(net: Net, train: Step, device: Device, make: Make) -> list[Tensor]:
    """Return the bits of a step."""
    net.zero_grad()
    net.norm.reset_running_stats()
    torch.manual_seed(3)
    train(net, device, make)
    grads = [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
    return [*grads, *[buffer.clone() for buffer in net.buffers()], torch.get_rng_state()]


@pytest.mark.covering(2)
@pytest.mark.parametrize(
    ("seed", "is_steady"),
    [(0, True), *(pytest.param(seed, seed % 2 == 1, marks=pytest.mark.slow) for seed in range(4))],
)
@pytest.mark.parametrize(
    "train",
    [pytest.param(train, marks=pytest.mark.slow) if number % 2 else train for number, train in enumerate(STEPS)],
    ids=lambda train: train.__name__,
)
def test_plan_of_the_plain_step_leaves_other_steps_exact(train: Step, seed: int, is_steady: bool, device: Device) -> None:
    """A step departs from the plan: the plan's actions up to then do no harm."""
    net = _net(device)
    plain = outcome(net, train, device, nullcontext)
    make = functools.partial(memkit.MemoryBudget, 1.0, "other", min_bytes=0, device=device)
    for _ in range(3):
        outcome(net, plain_step, device, make)
    planner = planner_of("other")
    trace = budget_states["other"].traces.latest
    plan = random_plan(planner, seed)
    follow = functools.partial(make, plan=plan)
    for _ in range(2 if is_steady else 1):
        outcome(net, plain_step, device, follow)
    assert memkit.stats("other").follows_plan
    assert not is_steady or plan.is_plain or memkit.stats("other").is_recorded == bool(plan.replays)

    for _ in range(2):
        assert_same_bits(outcome(net, train, device, functools.partial(_following, follow, trace, make)), plain)
    device.synchronize()
    assert memkit.stats("other").live_records == 0


def _following(follow: Make, trace: object, make: Make) -> AbstractContextManager[object]:
    """Return a context that follows the plan only if the step before was the planned one."""
    return follow() if budget_states["other"].traces.latest is trace else make()


@pytest.mark.covering(1)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 3))])
@pytest.mark.parametrize("name", NAMES)
def test_any_legal_plan_is_exact(name: str, seed: int, device: Device) -> None:
    computation = COMPUTATIONS[name]
    plain = gradients(computation, device.torch_device, nullcontext)
    context = functools.partial(memkit.MemoryBudget, 1.0, "any", min_bytes=0, device=device)
    for _ in range(2):
        gradients(computation, device.torch_device, context)
    trace = budget_states["any"].traces.latest
    if trace is None or trace.learned is None or trace.learned.planner is None:
        pytest.skip("nothing is planned where no backward asks, or where each step is another")
    plan = random_plan(planner_of("any"), seed)

    for _ in range(3):  # in the second and third one only that is noted of which something is to be done
        found = gradients(computation, device.torch_device, functools.partial(context, plan=plan))
        assert_same_bits(found, plain)
        stats = memkit.stats("any")
        assert stats.live_records == 0
        assert stats.moved_in_bytes <= stats.moved_out_bytes <= plan.moved_bytes


def test_another_length_is_exact_and_later_planned_as_well(device: Device) -> None:
    net = _net(device)
    make = functools.partial(memkit.MemoryBudget, 0.6, "lengths", min_bytes=0, device=device)
    rows = [8, 8, 8, 8, 12, 12, 8, 12, 12, 12, 12, 8, 8, 8]
    follows = []
    for number in rows:
        found = [outcome(net, functools.partial(plain_step, rows=number), device, used) for used in (make, nullcontext)]
        follows.append(memkit.stats("lengths").follows_plan)
        assert_same_bits(*found)

    assert follows[3]
    assert not follows[4]
    assert follows[10]
    assert follows[13]


@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize("kind", ["keep", "offload", "recompute"])
def test_write_to_what_was_saved_is_noticed_wherever_it_is_by_then(kind: str, is_inside: bool, device: Device) -> None:
    x = _x(device).requires_grad_()

    def run(make: Make, *, writes: bool = False) -> list[Tensor]:
        x.grad = None
        with make():
            y = (x * 2).exp()
            z = y.sin()
            w = z.cos().exp()
            if writes and is_inside:
                y.detach().mul_(2)
        if writes and not is_inside:
            y.detach().mul_(2)
        del z
        w.sum().backward()
        return [x.grad]

    follow = steady(run, "written", device, memkit.plan.Action(kind), num_steps=1)
    assert memkit.stats("written").follows_plan
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(follow, writes=True)
    assert_same_bits(run(follow), run(nullcontext))
