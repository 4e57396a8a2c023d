"""Known steps whose ops are not recorded where nothing is recomputed from them: a step with other ops is exact."""

from __future__ import annotations

import contextlib
import functools
import gc
import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memkit
from memkit.activations.budgeting.state import budget_states
from memkit.core import torch_private
from memkit.device import Device, ReferenceDevice
from memkit.plan import Action
from tests.activations.budgeting.plans import Make, steady
from tests.activations.cases import Seeing, assert_same_bits
from tests.activations.remat.conftest import NO_PLAN_FITS

pytestmark = [
    pytest.mark.filterwarnings(NO_PLAN_FITS),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is:FutureWarning", "ignore:.torch.jit.script. is:DeprecationWarning"),
]


Act = Callable[["Kept", Tensor], Tensor]
TAG = "known"
NUM_BLOCKS = 4
_SLOW = pytest.mark.slow


class Kept(nn.Module):
    """None of its values is recomputed. Each step may replace its function `act`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(16), nn.Linear(16, 16)
        self.register_buffer("table", torch.linspace(0, 1, 2**17))  # too large to be watched for writes without a trace
        self.register_buffer("average", torch.linspace(0, 1, 16))
        self.act: Act = lambda _, y: y.exp()
        self.beside: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(self.norm(x)).tanh().view(2, -1, 16).flatten(0, 1)
        y = self.act(self, y)
        return y.neg().tanh()


class Dropped(nn.Module):
    """All its values that can be are recomputed: from its input, from buffers, and from a sum that nobody saves."""

    def forward(self, x: Tensor, total: Tensor, quiet: Kept) -> Tensor:
        return (x + quiet.table[:16]).sin() + (x * 2 + quiet.average).sin() + (total + 1).cos()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.quiet, self.second = Dropped(), Kept(), Dropped()

    def forward(self, x: Tensor) -> Tensor:
        total = x + 2.0
        y = self.first(x, total, self.quiet)
        self.quiet.beside = [total, y]
        z = self.quiet(y)
        return self.second(z, total, self.quiet)


def _model(device: Device) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Block() for _ in range(NUM_BLOCKS)).to(device.torch_device)


def _train(model: nn.ModuleList, make: Make) -> list[Tensor]:
    device = next(model.parameters()).device
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1), device="cpu").to(device).requires_grad_()
    for block in model:  # as they are drawn, whatever a step writes to them
        block.quiet.table = torch.linspace(0, 1, 2**17, device=device)
        block.quiet.average = torch.linspace(0, 1, 16, device=device)
    with make():
        y = x
        for block in model:
            y = block(y)
        loss = y.square().sum()
    loss.backward()
    found = [loss.detach(), x.grad, *(own.grad for own in model.parameters() if own.grad is not None)]
    found += [own.clone() for own in model.buffers()]
    model.zero_grad(set_to_none=True)
    for block in model:
        block.quiet.beside = []
    return found


_DROPPED = ("first", "second", "Dropped", "Varied", "loud", "_Choosing")


def _steady(model: nn.ModuleList, device: Device, train: Callable[..., list[Tensor]] = _train) -> Make:
    """Return a context under which saved values of `Dropped` are recomputed, once steps under it are known and were exact."""
    make = steady(partial(train, model), TAG, device, of=lambda _, module: module.endswith(_DROPPED), num_steps=2)
    ops = budget_states[TAG].traces.latest.learned.steady.ops
    assert {op.is_skipped for op in ops} == {True, False}
    return make


def _recurses(quiet: Kept, y: Tensor) -> Tensor:
    act, quiet.act = quiet.act, lambda _, y: y.exp()
    try:
        return quiet(y)
    finally:
        quiet.act = act


def _runs_backward(_: Kept, y: Tensor) -> Tensor:
    leaf = torch.ones_like(y).requires_grad_()
    (grad,) = torch.autograd.grad((leaf * y.detach()).sin().sum(), leaf)
    return (y + grad).exp()


def _fails_and_catches(quiet: Kept, y: Tensor) -> Tensor:
    quiet.beside[0].add_(0.5)
    with contextlib.suppress(RuntimeError):
        functional.linear(y, quiet.table)
    return (y * 2).exp()


def _in_a_mode(_: Kept, y: Tensor) -> Tensor:
    with Seeing():
        return y.exp().sin()


def _halve_and_exp(y: Tensor, table: Tensor) -> Tensor:
    table.data.mul_(0.5)
    return y.exp()


@functools.cache
def _scripted() -> Callable[[Tensor, Tensor], Tensor]:
    return torch.jit.script(_halve_and_exp)  # type: ignore[no-any-return]  # it has no types


def _runs_a_script(quiet: Kept, y: Tensor) -> Tensor:
    return _scripted()(y, quiet.table)


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.save_for_backward(y, y * 2)
        return y.exp()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        y, doubled = ctx.saved_tensors
        return grad * y.exp() + 0 * doubled


def _has_hooks_that_write(quiet: Kept, y: Tensor) -> Tensor:
    def pack(tensor: Tensor) -> Tensor:
        quiet.table.data.mul_(0.5)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return y.exp()


def _maps(quiet: Kept, y: Tensor) -> Tensor:
    """Over tensors that wrap others, which have no storage."""
    return torch.vmap(lambda row: (row * 2).sin() + functional.linear(row, quiet.layer.weight))(y) + y.exp()


def _counts_flops_and_writes(quiet: Kept, y: Tensor) -> Tensor:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False):
        z = quiet.layer(y).exp()
    with torch.no_grad():
        quiet.table.mul_(0.9).add_(0.1)
    quiet.average.data.mul_(0.5)
    return z


ACTS: dict[str, Act] = {
    "saves more": lambda _, y: y.exp().sin(),
    "another op": lambda _, y: y.sigmoid(),  # its result is saved, as that of `exp` is
    "writes to what it has made": lambda _, y: (y + 0).mul_(0.5).exp(),
    # the sum is not saved: it is read before and after, and recomputed by its op
    "writes to what was recorded": lambda quiet, y: [quiet.beside[0].add_(0.5), y.exp()][-1],
    "writes to data": lambda _, y: [z := y + 0, z.data.mul_(0.5), z.exp()][-1],  # no counter tells
    "returns what was there": lambda quiet, y: quiet.beside[1] * y.exp().sum(),
    "other data in a buffer": lambda quiet, y: [setattr(quiet.table, "data", quiet.table * 0.5), y.exp()][-1],
    "writes by index": lambda quiet, y: [quiet.table.__setitem__(3, 5.0), y.exp()][-1],
    # recorded ops have read it, and read it again: no counter tells
    "data of a buffer": lambda quiet, y: [quiet.table.data.mul_(0.5), quiet.average.data.mul_(0.5), y.exp()][-1],
    "recurses": _recurses,
    "runs backward": _runs_backward,
    "fails, and catches it": _fails_and_catches,
    "in a mode": _in_a_mode,
    "runs a function of its own": lambda _, y: _Doubled.apply(y),
    "runs a script": _runs_a_script,
    "has hooks that write": _has_hooks_that_write,
    "maps": _maps,
    "counts FLOPs and writes": _counts_flops_and_writes,
}
_FIRST = ("another op", "maps", "data of a buffer")
"""The ones of a short test run."""


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in _FIRST else _SLOW) for name in ACTS])
def test_call_that_does_something_else_is_exact(name: str, device: Device) -> None:
    model = _model(device)
    make, plain = _steady(model, device), _train(model, nullcontext)
    usual, model[1].quiet.act = model[1].quiet.act, ACTS[name]
    departed = _train(model, nullcontext)

    for _ in range(2):
        assert_same_bits(_train(model, make), departed)
        gc.collect()
        stats = memkit.stats(TAG)
        assert (stats.live_records, stats.live_bytes) == (0, 0)
        assert torch_private.num_dispatch_modes() == 0
    model[1].quiet.act = usual
    for _ in range(2):
        assert_same_bits(_train(model, make), plain)


class Varied(nn.Module):
    """All its values are recomputed, by ops that each step may replace."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[str, Any] = {"factor": 0.0, "swaps": False, "place": 0, "power": 2, "twice": False}
        self.given["dtype"] = torch.float32

    def forward(self, x: Tensor, total: Tensor, quiet: Kept) -> Tensor:
        given = self.given
        one, other = (total, x) if given["swaps"] else (x, total)
        first = (one - other * 2).pow(given["power"]).sin()  # ahead of the op that saves the two and would tell them apart
        part = torch.cat([one, other], dim=-1).narrow(-1, given["place"], 16)
        near = (part * 0.0).add(given["factor"])  # a zero, whose sign tells
        first = first + (part * 0.5).cos() + torch.atan2(near, -torch.ones_like(near)) * one
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=given["dtype"] is not torch.float32):
            product = one.matmul(quiet.layer.weight)
        return first + product.float().sin() + (first * 2 if given["twice"] else first + first).cos()


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "changed",
    [{"factor": -0.0}, {"swaps": True}, *(pytest.param(each, marks=_SLOW) for each in (
        {"factor": 1.5}, {"place": 3}, {"dtype": torch.bfloat16}, {"power": 2.0}, {"power": 3}, {"twice": True},
        {"factor": 1.0, "swaps": True, "place": 1, "power": True},
    ))],
)  # fmt: skip
def test_recorded_op_that_is_given_something_else_is_exact(changed: dict[str, Any], device: Device) -> None:
    model = _model(device)
    for block in model:
        block.first = Varied()
    make, plain = _steady(model, device), _train(model, nullcontext)
    usual = dict(model[1].first.given)

    for given in (changed, usual, changed, changed, usual):
        model[1].first.given.update(given)
        plain = _train(model, nullcontext)
        assert_same_bits(_train(model, make), plain)


@pytest.mark.parametrize("kind", ["relu", "dropout", "norm"])
@_SLOW
def test_flag_that_has_an_op_write_is_seen(kind: str, device: Device) -> None:
    model = _model(device)
    flags = {"inplace": False, "training": False}
    statistics = torch.zeros(2, 2**17, device=device.torch_device)

    def act(quiet: Kept, y: Tensor) -> Tensor:
        z = quiet.beside[0] + 0 if kind == "norm" else quiet.beside[0]
        if kind == "relu":
            z = functional.relu(z, inplace=flags["inplace"])
        elif kind == "dropout":
            z = functional.dropout(z, 0.0, training=True, inplace=flags["inplace"])
        else:
            wide = z.flatten()[:1].expand(2, 2**17)
            z = functional.batch_norm(wide, *statistics, training=flags["training"]).sum() + z
        return z * y.detach() + y.exp()

    for block in model:
        block.quiet.act = act
    make = _steady(model, device)
    flags.update(inplace=True, training=True)
    statistics.zero_()
    departed = [*_train(model, nullcontext), statistics.clone()]

    for _ in range(2):
        statistics.zero_()
        assert_same_bits([*_train(model, make), statistics], departed)


def test_call_that_raises_leaves_nothing(device: Device) -> None:
    model = _model(device)
    make, plain = _steady(model, device), _train(model, nullcontext)

    def fail(quiet: Kept, y: Tensor) -> Tensor:
        raise KeyboardInterrupt

    usual, model[2].quiet.act = model[2].quiet.act, fail
    with pytest.raises(KeyboardInterrupt):
        _train(model, make)
    model[2].quiet.act = usual
    for block in model:
        block.quiet.beside = []

    assert torch_private.num_dispatch_modes() == 0
    gc.collect()
    assert memkit.stats(TAG).live_records == 0
    for _ in range(3):
        assert_same_bits(_train(model, make), plain)


class Wired(nn.Module):
    """A random program: modules that read any of the last results, some of which write in place."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw, kinds = random.Random(seed), ["linear", "norm", *self.WITHOUT_WEIGHTS]
        self.steps = [(draw.choice(kinds), draw.randrange(3), draw.randrange(3)) for _ in range(14)]
        made = {"linear": lambda: nn.Sequential(nn.Linear(16, 16), nn.GELU()), "norm": lambda: nn.LayerNorm(16)}
        self.parts = nn.ModuleList(made.get(kind, nn.Identity)() for kind, _, _ in self.steps)

    WITHOUT_WEIGHTS: ClassVar[dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
        "gate": lambda a, b: torch.sigmoid(a) * b,
        "outside": lambda a, b: (a + b).tanh(),
        "in place": lambda a, b: (a + b).relu_().mul(2),
        "view": lambda a, b: a.view(4, 2, 16).transpose(0, 1).reshape(8, 16) + b,
    }

    def forward(self, x: Tensor) -> Tensor:
        made = [x, x.sin(), x.cos()]
        for part, (kind, one, other) in zip(self.parts, self.steps, strict=True):
            a, b = made[-1 - one], made[-1 - other]
            made.append(self.WITHOUT_WEIGHTS[kind](a, b) if kind in self.WITHOUT_WEIGHTS else part(a) + b)
        return made[-1] + made[-2]


@pytest.mark.covering(1)
@pytest.mark.parametrize("every", [1, pytest.param(2, marks=_SLOW), pytest.param(3, marks=_SLOW)])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=_SLOW) for seed in range(1, 12))])
def test_random_programs(seed: int, every: int) -> None:
    device = ReferenceDevice()
    torch.manual_seed(seed)
    model = nn.Sequential(Wired(seed), Wired(seed + 100), Wired(seed + 200))

    def train(make: Make) -> list[Tensor]:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with make():
            loss = model(x).square().mean()
        loss.backward()
        found = [loss.detach(), x.grad, *(own.grad for own in model.parameters() if own.grad is not None)]
        model.zero_grad(set_to_none=True)
        return found

    for action in (Action.RECOMPUTE, Action.OFFLOAD):
        steady(train, TAG, device, action, every, min_bytes=1, num_steps=4)
        assert memkit.stats(TAG).follows_plan
        assert memkit.stats(TAG).num_deviations == 0


class Routed(nn.Module):
    """Makes one value from either of two by the same op; the graph of another result holds both."""

    def __init__(self) -> None:
        super().__init__()
        self.loud = _Choosing()
        self.one, self.other = nn.Parameter(torch.linspace(0, 1, 128).view(8, 16)), nn.Parameter(torch.ones(8, 16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = (x * 3).exp(), (x * 2).exp()
        return self.one * a + (self.one + 1) * b, self.loud(self.other * 1.5, a, b)


class _Choosing(nn.Module):
    takes_first = True

    def forward(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return (x.detach() + (a if self.takes_first else b)).mul(x.mean()).sin()


def test_op_that_reads_another_value_than_before_holds_that(device: Device) -> None:
    model = Routed().to(device.torch_device)

    def train(make: Make) -> list[Tensor]:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).to(device.torch_device)
        with make():
            first, second = model(x)
            losses = [first.tanh().sum(), second.square().sum()]
        del first, second
        for some in [losses] if at_once else [[loss] for loss in losses]:
            torch.autograd.backward(some)
        found = [*(loss.detach() for loss in losses), model.one.grad, model.other.grad]
        model.zero_grad(set_to_none=True)
        return found

    at_once = True
    follow = steady(train, TAG, device, of=lambda _, module: module.endswith(_DROPPED), num_steps=4)
    assert memkit.stats(TAG).num_dropped
    at_once = model.loud.takes_first = False
    other = train(nullcontext)
    for _ in range(2):
        assert_same_bits(train(follow), other)


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize("at", [4, 5])
def test_a_save_that_ends_the_plan(at: int, device: Device) -> None:
    """The first layer also saves its weight if its input requires grad."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), *(_Residual() for _ in range(3))).to(device.torch_device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    make = functools.partial(memkit.MemoryBudget, 0.2, TAG, min_bytes=0, device=device)

    for number in range(8):
        x = torch.randn(5, 16).to(device.torch_device).requires_grad_(number == at)
        leaves = [*net.parameters(), *([x] if number == at else [])]
        found = []
        for used in (nullcontext, make):
            optimizer.zero_grad()
            x.grad = None
            with used():
                loss = net(x).square().sum()
            loss.backward()
            found.append([loss.detach(), *(leaf.grad for leaf in leaves)])
        assert_same_bits(*found)
        optimizer.step()
