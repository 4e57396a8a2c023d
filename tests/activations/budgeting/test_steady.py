"""Steps that follow an earlier plan: the work that they leave out, and the fate of steps that depart from it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.activations.budgeting.state import budget_states
from memkit.device import Device
from memkit.plan import Action
from tests.activations.budgeting.plans import Make, plan_of_some, steady
from tests.activations.cases import Seeing, assert_same_bits
from tests.activations.remat.conftest import NO_PLAN_FITS
from tests.activations.remat.conftest import without_collector as without_collector
from tests.threads import run_in_threads

pytestmark = pytest.mark.filterwarnings(NO_PLAN_FITS)

Change = Callable[[int, Tensor], Tensor]
TAG = "steady"
NUM_BLOCKS = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(self.norm(x)).chunk(2, 1)
        return x + self.down(torch.cat([torch.sigmoid(gate) * value, gate.exp().tanh()], 1))


def _blocks(device: Device) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Block() for _ in range(NUM_BLOCKS)).to(device.torch_device)


def _train(blocks: nn.ModuleList, make: Make, change: Change = lambda _, x: x) -> list[Tensor]:
    device = next(blocks.parameters()).device
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    with make():
        y = x
        for place, block in enumerate(blocks):
            y = change(place, block(y))
        loss = y.square().sum()
    loss.backward()
    grads = [parameter.grad for parameter in blocks.parameters() if parameter.grad is not None]
    blocks.zero_grad(set_to_none=True)
    return [loss.detach(), x.grad, *grads]


def _steady(device: Device, action: Action, every: int = 2) -> tuple[nn.ModuleList, Make]:
    """Return a model whose next step is a steady one, and its context."""
    blocks = _blocks(device)
    return blocks, steady(partial(_train, blocks), TAG, device, action, every, num_steps=2)


ACTIONS = [Action.OFFLOAD, Action.RECOMPUTE]


def often(action: Action) -> list[object]:
    """Return both actions; one always runs, the other is left to `slow`."""
    return [each if each is action else pytest.param(each, marks=pytest.mark.slow) for each in ACTIONS]


@pytest.mark.parametrize("action", ACTIONS)
def test_only_what_the_plan_needs_is_recorded(action: Action, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, make = _steady(device, action, every=6)
    num_calls = []
    from memkit.recording.recording import Recording

    close = Recording.close
    monkeypatch.setattr(Recording, "close", lambda self, **_: (num_calls.append(len(self.calls)), close(self)))
    _train(blocks, make)

    stats = memkit.stats(TAG)
    assert stats.follows_plan
    assert stats.num_deviations == 0
    assert stats.is_recorded == (action is Action.RECOMPUTE)
    assert stats.num_dropped + stats.num_copies_out > 0
    assert num_calls == [0] if action is Action.OFFLOAD else 0 < num_calls[0] < stats.num_ops // 2


@pytest.mark.parametrize("action", often(Action.RECOMPUTE))
def test_figures_are_those_of_a_step_that_is_recorded_whole(action: Action, device: Device) -> None:
    blocks, make = _steady(device, action)
    found = []
    for _ in range(2):
        _train(blocks, make)
        found.append(memkit.stats(TAG))
    budget_states[TAG].traces.latest.learned.steady = None  # as if nothing were known
    _train(blocks, make)
    found.append(memkit.stats(TAG))

    names = ("num_saved", "saved_bytes", "num_kept", "num_dropped", "dropped_bytes", "num_copies_out", "moved_out_bytes")
    figures = [[getattr(stats, name) for name in (*names, "num_ops")] for stats in found]
    assert figures[0] == figures[1] == figures[2]


def _longer(place: int, x: Tensor) -> Tensor:
    return x.sin() if place == 3 else x


def _marked(place: int, x: Tensor) -> Tensor:
    words = {1: memkit.keep, 3: memkit.offload, 4: memkit.recompute}
    return words[place](x.exp()).log1p() if place in words else x


def _in_a_mode(place: int, x: Tensor) -> Tensor:
    """Depart while another mode is on, which is left again."""
    with Seeing() if place == 2 else nullcontext():
        return x.sin().cos() if place == 2 else x


CHANGES: dict[str, Change] = {
    "longer": _longer,
    "in place": lambda place, x: x.mul_(0.5) if place == 3 else x,
    "of another kind": lambda place, x: x.double().sin().float() if place == 2 else x,
    "of parts": lambda place, x: torch.cat([part.cos() for part in x.chunk(2)]) if place == 4 else x,
    "marked": _marked,
    "in a mode": _in_a_mode,
}


@pytest.mark.covering(2)
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("action", often(Action.OFFLOAD))
def test_step_that_departs_is_exact(action: Action, name: str, device: Device) -> None:
    change, (blocks, make) = CHANGES[name], _steady(device, action)
    trace = budget_states[TAG].traces.latest
    plain = _train(blocks, nullcontext)
    departed = _train(blocks, nullcontext, change)

    assert_same_bits(_train(blocks, make, change), departed)
    stats = memkit.stats(TAG)
    assert stats.follows_plan == (name == "in place" and action is Action.OFFLOAD)  # which saves what was expected
    assert (stats.live_records, stats.live_bytes, stats.host_in_use_bytes) == (0, 0, 0)
    if budget_states[TAG].traces.latest is trace:
        assert_same_bits(_train(blocks, make), plain)
        assert memkit.stats(TAG).follows_plan


@pytest.mark.parametrize("action", often(Action.OFFLOAD))
def test_first_step_of_a_plan_may_end_as_another_one(action: Action, device: Device) -> None:
    """Its notes belong to neither."""
    blocks, make = _blocks(device), partial(memkit.MemoryBudget, 1.0, TAG, min_bytes=0, device=device)
    fewer = nn.ModuleList(blocks[:4])
    plain, plain_of_fewer = _train(blocks, nullcontext), _train(fewer, nullcontext)
    for _ in range(3):
        _train(blocks, make)
    follow = partial(make, plan=plan_of_some(TAG, action, 1))

    assert_same_bits(_train(fewer, follow), plain_of_fewer)
    assert memkit.stats(TAG).live_records == 0
    assert_same_bits(_train(blocks, make), plain)
    for _ in range(3):
        assert_same_bits(_train(blocks, follow), plain)
    assert memkit.stats(TAG).follows_plan


@pytest.mark.parametrize("action", ACTIONS)
def test_another_thing_at_the_same_op_is_never_taken_for_what_was_planned(action: Action, device: Device) -> None:
    """The ops and shapes are as planned, but their inputs are not."""
    blocks, make = _steady(device, action, every=1)
    kept: list[Tensor] = []

    def change(place: int, x: Tensor) -> Tensor:
        kept.append(x)
        return kept[-2] if place in (2, 4) else x  # nothing reads the block's result

    expected = _train(blocks, nullcontext, change)
    kept.clear()
    assert_same_bits(_train(blocks, make, change), expected)


@pytest.mark.parametrize("action", often(Action.OFFLOAD))
def test_steps_that_leave_time_and_again_are_recorded_whole(action: Action, device: Device) -> None:
    blocks, make = _steady(device, action)
    trace = budget_states[TAG].traces.latest
    plain, departed = _train(blocks, nullcontext), _train(blocks, nullcontext, _longer)
    for _ in range(3):
        while not memkit.stats(TAG).follows_plan or trace.learned.steady is None:
            assert_same_bits(_train(blocks, make), plain)
            if trace.learned.num_left >= 2:
                break
        assert_same_bits(_train(blocks, make, _longer), departed)
        if budget_states[TAG].traces.latest is not trace:
            break

    assert trace.learned.num_left == 2
    assert trace.learned.steady is None


# Steps whose ops and saves are as planned, and whose inputs, writes or backwards are not


class Own:
    """What the steps of one program read."""

    def __init__(self, device: Device) -> None:
        torch.manual_seed(0)
        self.layer = nn.Linear(16, 16).to(device.torch_device)
        self.x, self.v = (torch.randn(16, 16).to(device.torch_device) for _ in range(2))
        self.w, self.first, self.second = (torch.randn(16, 16).to(device.torch_device).requires_grad_() for _ in range(3))


def another_root_of_the_same_shape_is_read(own: Own, context: Make, departs: bool) -> list[Tensor]:
    with context():
        made = own.x.sin()
        other = torch.mul(own.w, own.v if departs else made)
        out = (other @ own.first).square().sum()
        del made, other
    return list(torch.autograd.grad(out, [own.w, own.first]))


def another_thread_writes(own: Own, context: Make, departs: bool) -> list[Tensor]:
    with context():
        y = own.layer(own.x)
        a = y + 1
        if departs:
            run_in_threads(partial(y.detach().mul_, 2))
        out = ((y * own.w).sin() + (a @ own.first).cos().exp()).sum()
        del y, a
    return list(torch.autograd.grad(out, [own.w, own.first, own.layer.weight]))


def each_step_writes_to_what_others_are_made_from(own: Own, context: Make, departs: bool) -> list[Tensor]:
    """Its own saves are never asked for."""
    with context():
        y = own.layer(own.x)
        unused = y.sin()
        a = y.exp()
        loss = (a @ own.first).cos().exp().sum()
        y.mul_(2 + departs)
        buffer = torch.ones_like(a)
        buffer.copy_(own.x)
        del y, a, unused
    return [*torch.autograd.grad(loss, [own.first, own.layer.weight]), buffer]


def what_dropped_values_are_made_from_is_written_to(own: Own, context: Make, departs: bool, view: bool = False) -> list[Tensor]:
    """The backward asks for the value made from it, and not for its own save."""
    with context():
        y = own.layer(own.x)
        unused = y.sin()
        z = y.exp()
        if departs:
            (y.view(-1) if view else y).mul_(2.0)
        z = z.cos().exp().sum()
        loss = z if departs else z + unused.sum()
    return list(torch.autograd.grad(loss, list(own.layer.parameters())))


def parts_are_let_go_of_before_others_ask_twice(own: Own, context: Make, departs: bool) -> list[Tensor]:
    with context():
        y = own.layer(own.x)
        m, a = y * own.w, y + 1
        ones, twos = (a @ own.first).sin().sum(), (a @ own.second).sin().sum()
        del y, a
    if not departs:
        return list(torch.autograd.grad(m.sum() + ones + twos, [own.w, own.first, own.second, own.layer.weight]))
    return [
        *torch.autograd.grad(m.sum(), [own.w]),
        *torch.autograd.grad(ones, [own.first]),
        *torch.autograd.grad(twos, [own.second], retain_graph=True),
        *torch.autograd.grad(twos, [own.second]),
    ]


def parts_are_asked_for_alone(own: Own, context: Make, departs: bool) -> list[Tensor]:
    """The graph may let go of a dropped value's inputs before the value is asked for."""
    with context():
        y = own.layer(own.x).exp().tanh()
        z = y.sin().exp()
        first, second = (z @ own.first).cos().sum(), (z * own.second).square().sum() + y.cos().sum()
    leaves = [own.first, own.second, own.layer.weight]
    if not departs:
        return list(torch.autograd.grad(first + second, leaves))
    return [*torch.autograd.grad(second, leaves[1:], retain_graph=True), *torch.autograd.grad(first, [leaves[0], leaves[2]])]


PROGRAMS = [
    another_root_of_the_same_shape_is_read,
    another_thread_writes,
    each_step_writes_to_what_others_are_made_from,
    what_dropped_values_are_made_from_is_written_to,
    partial(what_dropped_values_are_made_from_is_written_to, view=True),
    parts_are_let_go_of_before_others_ask_twice,
    parts_are_asked_for_alone,
]


@pytest.mark.parametrize("action", often(Action.RECOMPUTE))
@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: getattr(program, "__name__", "by a view"))
def test_step_with_other_inputs_or_backwards_is_exact(
    program: Callable[..., list[Tensor]], every: int, action: Action, device: Device
) -> None:
    run = partial(program, Own(device))
    follow = steady(lambda make: run(make, False), TAG, device, action, every)
    stats = memkit.stats(TAG)
    assert stats.num_dropped > 0 or action is Action.OFFLOAD
    assert stats.num_deviations == 0

    assert_same_bits(run(follow, True), run(nullcontext, True))


@pytest.mark.usefixtures("without_collector")
def test_bytes_that_are_kept_go_with_the_graph_at_once(device: Device) -> None:
    """After an error of memory the user lets go of the loss, and there is room."""
    blocks, make = _steady(device, Action.RECOMPUTE)
    saved: list[weakref.ref[torch.UntypedStorage]] = []
    with make():
        y = torch.randn(8, 16).to(device.torch_device).requires_grad_()
        for block in blocks:
            y = block(y)
            saved.append(weakref.ref(y.untyped_storage()))
        loss = y.square().sum()
    del y, loss
    assert [reference() for reference in saved] == [None] * NUM_BLOCKS


class Small(nn.Module):
    """Makes a large value from one that is too small to count, and that is saved once more behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(-1, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        small = (self.scale * 2).exp()
        large = (x * small.repeat(4)).sin()
        return large + small.sin().sum()


@pytest.mark.parametrize("every", [1, 2])
def test_large_value_is_made_from_a_small_one_that_is_saved_again(every: int, device: Device) -> None:
    """The backward has let go of the later save by then."""
    blocks = nn.ModuleList(Small() for _ in range(4)).to(device.torch_device)
    steady(partial(_train, blocks), TAG, device, every=every, min_bytes=64, num_steps=4)

    assert memkit.stats(TAG).num_dropped > 0
    assert memkit.stats(TAG).num_deviations == 0


@pytest.mark.filterwarnings("ignore:.*moving bytes to the host frees nothing")
def test_on_the_cpu_values_are_recomputed() -> None:
    device = memkit.device.CpuDevice()
    blocks, make = _steady(device, Action.RECOMPUTE)

    assert_same_bits(_train(blocks, make), _train(blocks, nullcontext))
    assert memkit.stats(TAG).num_dropped > 0
