"""Steps without a plan: what ended calls have saved goes first, room for a loss, and the bytes that have to leave."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memkit
from memkit.activations.budgeting import learning
from memkit.device import Device, ReferenceDevice
from memkit.recording.replay import Replay
from memkit.transfer import Link
from tests.activations.budgeting.allocator import CountingDevice
from tests.activations.budgeting.plans import Make
from tests.activations.cases import assert_same_bits
from tests.activations.chains import UNIT_BYTES, UNIT_NUMEL, chain, leaf_on
from tests.activations.remat.conftest import NO_PLAN_FITS

pytestmark = pytest.mark.filterwarnings(NO_PLAN_FITS)


def _train(model: nn.Module, x: Tensor, make: Make = nullcontext) -> list[Tensor]:
    model.zero_grad()
    x.grad = None
    torch.manual_seed(1)
    with make():
        y = model(x)
    y.sum().backward()
    return [y.detach(), *(leaf.grad.clone() for leaf in (x, *model.parameters()) if leaf.grad is not None)]


def _budget(device: Device, units: int, tag: str, model: nn.Module) -> memkit.MemoryBudget:
    """Return a budget of so many units, for an optimizer that has no states."""
    optimizer = torch.optim.SGD(model.parameters())
    return memkit.MemoryBudget(f"{units * UNIT_BYTES}B", tag, optimizer=optimizer, min_bytes=UNIT_BYTES, device=device)


def _set_link(monkeypatch: pytest.MonkeyPatch, bytes_per_s: float) -> None:
    monkeypatch.setattr(learning, "_links", WeakKeyDictionary())
    link = Link(d2h_bytes_per_s=bytes_per_s, h2d_bytes_per_s=bytes_per_s, latency_s=0.0)
    monkeypatch.setattr(learning, "measure_link", lambda *_, **__: link)


# Calls of modules that have ended


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed = nn.Linear(32, 96), nn.Linear(32, 128)
        self.back, self.norm = nn.Linear(128, 32), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attention(self.norm(x)).chunk(3, -1)
        x = x + functional.dropout(torch.softmax(q @ k.transpose(-1, -2), -1), 0.1) @ v
        return self.norm(x + self.back(functional.gelu(self.feed(x))))


class Stack(nn.Module):
    def __init__(self, size: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(size))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Twice(nn.Module):
    """Two stacks, each called as a whole, with a head and a loss that takes more than a block."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.head = Stack(), Stack(), nn.Linear(32, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.decoder(self.encoder(x))).flatten(0, 1), torch.zeros(256).long())


@pytest.mark.parametrize("share", [0.5, 0.75])
@pytest.mark.parametrize(("is_attached", "bytes_per_s"), [(True, 1e15), (False, 1e15), (False, 3e8)])
def test_first_steps_keep_to_the_budget_and_the_plan_foretells_later_ones(
    is_attached: bool, bytes_per_s: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a slower link some values move, and others are made again from these."""
    _set_link(monkeypatch, bytes_per_s)
    torch.manual_seed(0)
    model, x, device = Twice(), torch.randn(4, 64, 32), CountingDevice()
    optimizer, replayed = torch.optim.SGD(model.parameters()), []

    def step(make: Make) -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(1)
        allocator.begin()
        with make():
            loss = model(x)
        loss.backward()
        return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]

    with device.counting(nn.Identity()) as allocator:
        step(nullcontext)
        plain = step(nullcontext)
        budget_bytes = int(share * allocator.step_peak_bytes)
        make = partial(memkit.MemoryBudget, f"{budget_bytes}B", "ended", optimizer=optimizer, min_bytes=0, device=device)
        handle = memkit.attach(model, make()) if is_attached else None
        for _ in range(4):
            assert_same_bits(step(nullcontext if is_attached else make), plain)
            assert allocator.step_peak_bytes <= budget_bytes
            replayed.append(memkit.stats("ended").num_replayed_ops / memkit.stats("ended").num_ops)
        stats = memkit.stats("ended")
        if handle is not None:
            handle.remove()

    assert 0 < max(replayed[:2]) < 1
    assert stats.follows_plan
    assert stats.predicted_peak_bytes == pytest.approx(allocator.step_peak_bytes, rel=0.01)


def test_what_a_layer_gives_to_the_next_is_not_dropped() -> None:
    """Else a layer would run again from the first one on. The share of a `Rematerialize` goes layer by layer as well."""
    torch.manual_seed(0)
    model, x = Stack(12), torch.randn(4, 64, 32, requires_grad=True)
    plain = _train(model, x)
    assert_same_bits(_train(model, x, partial(memkit.Rematerialize, 0.3, "given", min_bytes=0)), plain)

    stats = memkit.stats("given")
    assert stats.ledger_peak_bytes < 0.5 * stats.saved_bytes
    assert stats.num_replayed_ops < 1.2 * stats.num_ops


class Logits(nn.Module):
    """Saves a chain of units, and returns more than it saves last."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(UNIT_NUMEL, generator=torch.Generator().manual_seed(1)))

    def forward(self, x: Tensor) -> Tensor:
        return chain(x * self.weight, [1] * 40).expand(2, -1).clone()


@pytest.mark.parametrize("is_attached", [True, False])
def test_first_step_leaves_room_for_a_loss_behind_the_module(is_attached: bool) -> None:
    """The loss takes nine times the module's output."""
    device, x, model = ReferenceDevice(), torch.randn(UNIT_NUMEL), Logits()
    plain, counter = _train(model, x), device.memory_counter()
    budget = _budget(device, 30, "behind", model)
    if is_attached:
        memkit.attach(model, budget)
    model.zero_grad()
    with nullcontext() if is_attached else budget:
        y = model(x)
    allocated_bytes = counter.allocated_bytes()
    y.sum().backward()

    assert_same_bits([y.detach(), *(parameter.grad for parameter in model.parameters())], plain)
    assert allocated_bytes <= (0.9 * 30 - 9 * 2) * UNIT_BYTES


MIB_NUMEL = 2**18


def test_second_step_leaves_room_for_a_loss_as_the_first_one_has_shown() -> None:
    """A temporary of the loss behind the context, of which nothing is known at first."""
    device, peaks, loss, budget = CountingDevice(), [], 16, 36
    optimizer = torch.optim.SGD([torch.ones(1)])

    def train(x: Tensor, make: Make) -> list[Tensor]:
        x.grad = None
        with make():
            y = x
            for _ in range(40):
                y = y.sin()
        torch.ones(loss * x.numel())
        y.sum().backward()
        return [y.detach(), x.grad]

    with device.counting(nn.Identity()) as allocator:
        for _ in range(2):
            x = torch.randn(UNIT_NUMEL, requires_grad=True)
            plain = train(x, nullcontext)
            asked = f"{budget * UNIT_BYTES}B"
            make = partial(memkit.MemoryBudget, asked, "shown", optimizer=optimizer, min_bytes=1, device=device)
            allocator.begin()
            assert_same_bits(train(x, make), plain)
            peaks.append(allocator.step_peak_bytes)

    assert peaks[0] > budget * UNIT_BYTES
    assert peaks[-1] <= budget * UNIT_BYTES


# What has to leave


@torch.library.custom_op("memkit_first::sine", mutates_args=())
def sine(x: Tensor) -> Tensor:
    """An op of which memkit cannot know whether it does the same again."""
    return x.sin()


sine.register_autograd(
    lambda ctx, grad: grad * ctx.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


def _sines(x: Tensor, make: Make, length: int = 20) -> list[Tensor]:
    x.grad = None
    with make():
        y = x
        for _ in range(length):
            y = sine(y)
    y.sum().backward()
    return [y.detach(), x.grad]


@pytest.mark.parametrize("units", [16, 10])
def test_what_cannot_be_made_again_leaves(units: int, device: Device) -> None:
    """The reference device counts only saved tensors; on a GPU gradients and ops' results come on top."""
    x = torch.randn(MIB_NUMEL, device=device.torch_device, requires_grad=True)
    plain = _sines(x, nullcontext)
    counter, copies = device.memory_counter(), []
    x.grad = None
    most_bytes = counter.allocated_bytes() + (units << 20)
    room_bytes = 4096 if device.torch_device.type == "cuda" else 0  # of the sum behind the context
    make = partial(memkit.MemoryBudget, f"{most_bytes}B", "leaves", min_bytes=0, device=device)
    for _ in range(3):
        counter.reset_peak()
        assert_same_bits(_sines(x, make), plain)
        assert counter.peak_bytes() <= most_bytes + room_bytes
        copies.append(memkit.stats("leaves").num_copies_out)

    assert min(copies) > 0
    assert memkit.stats("leaves").live_records == 0
    assert memkit.stats("leaves").host_in_use_bytes == 0


def test_what_others_are_made_again_from_does_not_leave() -> None:
    """It stays on the device for these, and a copy would free nothing."""
    device = ReferenceDevice()
    x = torch.randn(MIB_NUMEL, requires_grad=True)
    for _ in range(2):
        with memkit.MemoryBudget("16MiB", "mixed", min_bytes=0, device=device):
            y = x
            for _ in range(20):
                y = sine(y).cos()
        y.sum().backward()
        stats = memkit.stats("mixed")

        assert stats.num_dropped
        assert stats.num_copies_out == stats.num_copies_in


@pytest.mark.parametrize("share", [0.2, 0.4])
@pytest.mark.parametrize("make_bias", [sine, torch.zeros_like, torch.randn_like], ids=["unknown op", "zeros", "drawn"])
def test_value_that_all_layers_save_and_no_op_makes_again_is_planned_for(
    make_bias: Callable[[Tensor], Tensor], share: float, device: Device
) -> None:
    """It is held once a value that is made from it is dropped, and is saved again after that."""
    x = torch.randn(MIB_NUMEL, device=device.torch_device, requires_grad=True)

    def train(make: Callable[[], AbstractContextManager[object]]) -> list[Tensor]:
        x.grad = None
        torch.manual_seed(0)
        with make():
            bias, y = make_bias(x.detach()), x
            for _ in range(12):
                y = (torch.tanh(y * bias) + 1).sin()
        y.sum().backward()
        return [y.detach(), x.grad]

    plain = train(nullcontext)
    counter = device.memory_counter()
    most_bytes = counter.allocated_bytes() + (int(share * 48) << 20)
    make = partial(memkit.MemoryBudget, f"{most_bytes}B", "shared", min_bytes=0, device=device)
    for _ in range(5):
        assert_same_bits(train(make), plain)

    assert memkit.stats("shared").follows_plan
    assert memkit.stats("shared").num_deviations == 0


@pytest.mark.parametrize("number", range(6))
def test_all_that_may_leave_does_where_a_replay_finds_no_room(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also once everything droppable was dropped."""
    device, x, repeat = ReferenceDevice(), leaf_on(torch.device("cpu")), Replay.run
    refused, moved = iter([False] * number + [True] * 2), list[int]()
    taken: list[weakref.ref[Tensor]] = []

    def refuse(replay: Replay, *args: Any) -> None:
        assert all(reference() is None for reference in taken)  # no try has less room for the ones before
        if next(refused, False):
            moved.append(memkit.stats("no room").num_copies_out)
            mine = torch.empty(1)
            taken.append(weakref.ref(mine))
            raise torch.OutOfMemoryError("injected: out of memory")
        repeat(replay, *args)

    def train(context: AbstractContextManager[object]) -> list[Tensor]:
        x.grad = None
        with context:
            y = x
            for _ in range(8):
                y = sine(y)
            y = chain(y, [1] * 12).sum()
        y.backward()
        return [y.detach(), x.grad]

    plain = train(nullcontext())
    monkeypatch.setattr(Replay, "run", refuse)
    found = train(memkit.MemoryBudget(f"{14 * UNIT_BYTES}B", "no room", min_bytes=UNIT_BYTES, device=device))

    assert_same_bits(found, plain)
    assert len(moved) == 2
    assert memkit.stats("no room").num_copies_out > moved[1]
    assert memkit.stats("no room").live_records == 0
