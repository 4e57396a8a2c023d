"""Steps that follow an earlier plan: the work that they leave out, and the fate of steps that depart from it."""

from __future__ import annotations

import gc
import threading
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
from tests.activations.cases import assert_same_bits
from tests.activations.remat.conftest import NO_PLAN_FITS

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
    assert x.grad is not None
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

    names = (
        "num_saved",
        "saved_bytes",
        "num_kept",
        "num_dropped",
        "dropped_bytes",
        "num_copies_out",
        "moved_out_bytes",
        "num_ops",
    )
    figures = [tuple(getattr(stats, name) for name in names) for stats in found]
    assert figures[0] == figures[1] == figures[2]


def _longer(place: int, x: Tensor) -> Tensor:
    return x.sin() if place == 3 else x


def _in_place(place: int, x: Tensor) -> Tensor:
    return x.mul_(0.5) if place == 3 else x


def _of_other_kind(place: int, x: Tensor) -> Tensor:
    return x.double().sin().float() if place == 2 else x


def _of_parts(place: int, x: Tensor) -> Tensor:
    return torch.cat([part.cos() for part in x.chunk(2)]) if place == 4 else x


def _marked(place: int, x: Tensor) -> Tensor:
    words = {1: memkit.keep, 3: memkit.offload, 4: memkit.recompute}
    return words[place](x.exp()).log1p() if place in words else x


def _in_a_mode(place: int, x: Tensor) -> Tensor:
    """Depart while another mode is on, which is left again."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Passing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    if place != 2:
        return x
    with Passing():
        return x.sin().cos()


CHANGES = [_longer, _in_place, _of_other_kind, _of_parts, _marked, _in_a_mode]


@pytest.mark.covering(2)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("action", often(Action.OFFLOAD))
def test_step_that_departs_is_exact(action: Action, change: Change, device: Device) -> None:
    blocks, make = _steady(device, action)
    trace = budget_states[TAG].traces.latest
    plain = _train(blocks, nullcontext)
    departed = _train(blocks, nullcontext, change)

    assert_same_bits(_train(blocks, make, change), departed)
    stats = memkit.stats(TAG)
    assert stats.follows_plan == (change is _in_place and action is Action.OFFLOAD)  # which saves what was expected
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
    trace, plain, departed = (
        budget_states[TAG].traces.latest,
        _train(blocks, nullcontext),
        _train(blocks, nullcontext, _longer),
    )
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


@pytest.mark.parametrize("action", ACTIONS)
def test_parts_of_a_steady_graph_may_be_asked_for_alone(action: Action, device: Device) -> None:
    """The graph may let go of a dropped value's inputs before the value is asked for."""
    blocks = _blocks(device)

    def train(context: Make, *, parts: bool = False) -> list[Tensor]:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).to(device.torch_device).requires_grad_()
        with context():
            y = blocks[0](x)
            z = y.sin().exp()
            first, second = blocks[1](z).sum(), blocks[2](z).square().sum() + y.cos().sum()
        if parts:
            second.backward(retain_graph=True)
            first.backward()
        else:
            (first + second).backward()
        grads = [x.grad, *[parameter.grad for parameter in blocks[:3].parameters()]]
        blocks.zero_grad(set_to_none=True)
        return grads

    follow = steady(train, TAG, device, action)
    for _ in range(2):
        assert_same_bits(train(follow, parts=True), train(nullcontext, parts=True))


@pytest.mark.parametrize("read", ["first", "second"])
def test_write_to_what_a_dropped_value_is_made_from_is_no_harm(read: str, device: Device) -> None:
    """The backward asks for the value made from it, and not for its own save."""
    torch.manual_seed(0)
    layer = nn.Linear(16, 16).to(device.torch_device)
    x = torch.randn(8, 16).to(device.torch_device)

    def train(context: Make, *, writes: bool = False) -> list[Tensor]:
        with context():
            y = layer(x)
            unused = y.sin()
            z = y.exp()
            if writes:
                (y if read == "first" else y.view(-1)).mul_(2.0)
            z = z.cos().exp().sum()
            loss = z if writes else z + unused.sum()
        loss.backward()
        grads = [parameter.grad for parameter in layer.parameters()]
        layer.zero_grad(set_to_none=True)
        return grads

    follow = steady(train, TAG, device, every=2)
    assert memkit.stats(TAG).num_dropped > 0
    assert_same_bits(train(follow, writes=True), train(nullcontext, writes=True))


def _hold_departing(run: Callable[[Make, bool], list[Tensor]], device: Device, every: int = 1) -> None:
    """Compare steady steps, and one that departs behind them, to the plain run."""
    follow = steady(lambda make: run(make, False), TAG, device, every=every)
    assert memkit.stats(TAG).num_dropped > 0
    assert_same_bits(run(follow, True), run(nullcontext, True))


def test_no_number_of_a_value_is_ever_that_of_two(device: Device) -> None:
    """An op reads another root than before, of the same shape."""
    generator = torch.Generator().manual_seed(0)
    w, x, v, weight = (torch.randn(16, 16, generator=generator).to(device.torch_device).requires_grad_() for _ in range(4))

    def run(context: Make, departs: bool) -> list[Tensor]:
        with context():
            first = x.detach().sin()
            second = torch.mul(w, v.detach() if departs else first)
            out = (second @ weight).square().sum()
            del first, second
        return list(torch.autograd.grad(out, [w, weight]))

    for every in (1, 2):
        memkit.reset(TAG)
        _hold_departing(run, device, every)


def test_write_of_another_thread_is_told_apart(device: Device) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(16, 16).to(device.torch_device), torch.randn(8, 16).to(device.torch_device)
    w, weight = (torch.randn(16, 16).to(device.torch_device).requires_grad_() for _ in range(2))

    def run(context: Make, departs: bool) -> list[Tensor]:
        with context():
            y = layer(x)
            a = y + 1
            if departs:
                thread = threading.Thread(target=y.detach().mul_, args=(2,))
                thread.start()
                thread.join()
            out = ((y * w[:8]).sin() + (a @ weight).cos().exp()).sum()
            del y, a
        return list(torch.autograd.grad(out, [w, weight, layer.weight]))

    for every in (1, 2, 3):
        memkit.reset(TAG)
        _hold_departing(run, device, every)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_write_in_each_step_to_what_others_are_made_from_is_exact(every: int, device: Device) -> None:
    """Its own saves are never asked for."""
    torch.manual_seed(0)
    layer, x = nn.Linear(16, 16).to(device.torch_device), torch.randn(8, 16).to(device.torch_device)
    weight = torch.randn(16, 16).to(device.torch_device).requires_grad_()

    def run(context: Make, departs: bool) -> list[Tensor]:
        with context():
            y = layer(x)
            unused = y.sin()
            a = y.exp()
            loss = (a @ weight).cos().exp().sum()
            y.mul_(2 + departs)
            buffer = torch.ones_like(a)
            buffer.copy_(x)
            del y, a, unused
        return [*torch.autograd.grad(loss, [weight, layer.weight]), buffer]

    _hold_departing(run, device, every)
    assert memkit.stats(TAG).num_deviations == 0


@pytest.mark.parametrize("every", [1, 2, 3])
def test_parts_of_a_graph_may_be_let_go_of_before_others_ask_twice(every: int, device: Device) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(16, 16).to(device.torch_device), torch.randn(16, 16).to(device.torch_device)
    w, first, second = (torch.randn(16, 16).to(device.torch_device).requires_grad_() for _ in range(3))

    def run(context: Make, departs: bool) -> list[Tensor]:
        with context():
            y = layer(x)
            m, a = y * w, y + 1
            ones, twos = (a @ first).sin().sum(), (a @ second).sin().sum()
            del y, a
        if not departs:
            return list(torch.autograd.grad(m.sum() + ones + twos, [w, first, second, layer.weight]))
        return [
            *torch.autograd.grad(m.sum(), [w]),
            *torch.autograd.grad(ones, [first]),
            *torch.autograd.grad(twos, [second], retain_graph=True),
            *torch.autograd.grad(twos, [second]),
        ]

    _hold_departing(run, device, every)


def test_bytes_that_are_kept_go_with_the_graph_at_once(device: Device) -> None:
    """After an error of memory the user lets go of the loss, and there is room."""
    blocks, make = _steady(device, Action.RECOMPUTE)
    saved: list[weakref.ref[torch.UntypedStorage]] = []
    gc.disable()
    try:
        with make():
            y = torch.randn(8, 16).to(device.torch_device).requires_grad_()
            for block in blocks:
                y = block(y)
                saved.append(weakref.ref(y.untyped_storage()))
            loss = y.square().sum()
        del y, loss
        assert [reference() for reference in saved] == [None] * NUM_BLOCKS
    finally:
        gc.enable()


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
