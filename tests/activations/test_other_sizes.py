"""Steps of sizes that were never seen follow the schedule of others: which saves leave, and when, is the same."""

from __future__ import annotations

import itertools
import random
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memkit
from memkit.activations.offloading.scheduled import ScheduledForward, ScheduledSaves
from memkit.activations.saved.state import offload_states
from memkit.device import Device, ReferenceDevice
from memkit.errors import HostMemoryError
from memkit.transfer.host_memory import Arena
from tests.activations.cases import assert_same_bits
from tests.activations.chains import UNIT_BYTES, UNIT_NUMEL, chain, leaf_on, step
from tests.activations.scheduled_steps import TAG, Offloads, batch_bytes, gradient_of, offloads
from tests.calls import num_calls
from tests.interrupts import interrupts

__all__ = ["batch_bytes", "offloads"]

LENGTHS = (24, 31, 9, 40, 16, 31, 1, 24)


class Layer(nn.Module):
    """Attention and two products, with dropout: bytes that grow with the length, and with its square."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(self.norm(x)).chunk(3, dim=-1)
        x = x + functional.dropout(self.out((q @ k.mT).softmax(-1) @ v), 0.2)
        return x + self.down(functional.gelu(self.up(x)))


def follows() -> bool:
    """Tell whether a forward that has just ended has followed a schedule to its end."""
    (window,) = offload_states[TAG].windows()
    return window.scheduled is not None and window.scheduled.is_complete


followed = list[bool]()


def make_model(device: Device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(4))).to(device.torch_device)


def train(model: nn.Module, length: int, context: Any, *, batch: int = 2) -> list[Tensor]:
    device = next(model.parameters()).device
    torch.manual_seed(length)
    x = torch.randn(batch, length, 16, device=device)
    model.zero_grad(set_to_none=True)
    with context:
        loss = model(x).square().mean()
    followed.append(TAG in offload_states and follows())
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]


def compare(model: nn.Module, lengths: Sequence[int], make: Callable[[], Any], **options: Any) -> None:
    for length in lengths:
        wanted = train(model, length, nullcontext(), **options)
        assert_same_bits(train(model, length, make(), **options), wanted)


@pytest.mark.parametrize("ratio", [1.0, 0.5, 0.1])
@pytest.mark.usefixtures("batch_bytes")
def test_other_lengths_follow_one_schedule(ratio: float, offloads: Offloads) -> None:
    model = make_model(offloads.device)
    compare(model, [24] * 3, lambda: offloads(ratio, window_bytes=None))
    shares = list[float]()
    for length in LENGTHS:
        compare(model, [length], lambda: offloads(ratio, window_bytes=None))
        if length > 1:  # its scores have other shapes of memory
            assert followed[-1], length
            shares.append(memkit.stats(TAG).ratio_reached)
    assert max(shares) - min(shares) < 0.1
    assert len(offload_states[TAG].windows()[0].traces) <= 2


def test_lengths_that_never_repeat_follow_a_schedule_from_the_third_step_on(offloads: Offloads) -> None:
    model, first = make_model(offloads.device), len(followed)
    compare(model, range(30, 18, -2), lambda: offloads(0.5, window_bytes=None))
    assert followed[first + 1 :: 2] == [False] * 2 + [True] * 4


def test_what_others_hold_stays_and_does_not_count_at_any_size(offloads: Offloads) -> None:
    x, found = leaf_on(offloads.device.torch_device), list[tuple[float, float]]()

    def forward(units: int) -> tuple[Tensor, Tensor]:
        held = chain(x, [units] * 3)
        return held, chain(held.cos(), [units] * 6)

    for units in (1, 2, 3, 4, 4):
        wanted = gradient_of(forward(units)[1], x)
        with offloads(1.0, window_bytes=None):
            held, y = forward(units)
        assert_same_bits([gradient_of(y, x)], [wanted])
        found.append((offloads.moved_units / units, memkit.stats(TAG).unique_bytes / units / UNIT_BYTES))
        del held, y
    assert found == [(10, 10)] * 2 + [(7, 9)] * 3


@pytest.mark.parametrize("ratio", [0.2, 0.5])
def test_share_that_leaves_is_that_of_the_ratio_whichever_of_two_lengths_is_longer(ratio: float, offloads: Offloads) -> None:
    x, shares = leaf_on(offloads.device.torch_device), list[float]()
    draw = random.Random(0)
    for _ in range(20):
        units = [draw.randint(1, 6)] * 12 + [draw.randint(1, 6)] * 12
        wanted = step(x, units)
        assert_same_bits(step(x, units, lambda: offloads(ratio, window_bytes=None)), wanted)
        shares.append(memkit.stats(TAG).ratio_reached)
    assert all(abs(share - ratio) < 0.06 for share in shares[-12:]), shares


def test_batch_sizes_vary(offloads: Offloads) -> None:
    model = make_model(offloads.device)
    for batch in (3, 3, 3, 1, 5, 2):
        compare(model, [20, 12], lambda: offloads(0.6, window_bytes=None), batch=batch)
    assert followed[-1]


@pytest.mark.parametrize("ratio", [1.0, 0.5, 0.1])
def test_a_new_length_costs_the_host_at_most_twice_as_much(ratio: float) -> None:
    offloads = Offloads(ReferenceDevice())
    model = make_model(offloads.device)

    def calls(length: int) -> int:
        return num_calls(lambda: train(model, length, offloads(ratio, window_bytes=None)))

    for _ in range(6):
        calls(24)
    known = calls(24)

    assert max(calls(length) for length in (25, 32, 23)) <= 2 * known
    for length in (25, 32, 23):  # their copies are prepared, once more for each place in host memory
        calls(length)
    assert max(calls(length) for length in (25, 32, 23)) <= 1.2 * known


class Late(nn.Module):
    """The size of its first saves tells nothing of the others'."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.rows = 6
        self.does_more = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).sin().exp().cos()
        z = torch.cat([y] * self.rows).tanh().sin()
        z = z.exp() if self.does_more else z
        return self.second(z).cos().sum()


@pytest.mark.parametrize("window_units", [None, 0])
@pytest.mark.usefixtures("batch_bytes")
def test_sizes_that_differ_behind_the_first_saves(window_units: int | None, offloads: Offloads) -> None:
    model = Late().to(offloads.device.torch_device)

    def step(context: Any) -> list[Tensor]:
        x = torch.linspace(-1, 1, 32, device=offloads.device.torch_device).view(4, 8).requires_grad_()
        with context:
            loss = model(x)
        loss.backward()
        return [loss.detach(), x.grad]

    for rows, does_more in ((6, False),) * 3 + (
        (9, False),
        (9, False),
        (6, False),
        (3, False),
        (5, True),
        (3, True),
        (6, False),
    ):
        model.rows, model.does_more = rows, does_more
        wanted = step(nullcontext())
        assert_same_bits(step(offloads(1.0, window_bytes=window_units)), wanted)


def test_sizes_that_differ_late_are_read_once(offloads: Offloads, monkeypatch: pytest.MonkeyPatch) -> None:
    x, sizes, num_read = leaf_on(offloads.device.torch_device), ([1, 2, 2, 2, 2], [1, 2, 2, 3, 1], [1, 2, 2, 1, 1]), [0]
    grow = ScheduledSaves._grow

    def count(saves: ScheduledSaves, save: Any, tensor: Tensor) -> bool:
        num_read[0] += 1
        return grow(saves, save, tensor)

    monkeypatch.setattr(ScheduledSaves, "_grow", count)
    for number in range(15):
        wanted = step(x, sizes[number % 3])
        assert_same_bits(step(x, sizes[number % 3], lambda: offloads(1.0, window_bytes=None)), wanted)
        if number == 8:
            num_read[0] = 0
    assert num_read[0] <= 6  # where each begins to differ


def test_a_first_shape_tells_which_of_two_schedules_to_follow(offloads: Offloads) -> None:
    x = leaf_on(offloads.device.torch_device)
    kinds = {"A": [2, 2, 2, 2], "B": [3, 3, 3, 3, 3, 3]}
    for number, kind in enumerate("AAAABBBBBBAABABBBAAAB"):
        wanted = step(x, kinds[kind])
        with offloads(1.0, window_bytes=None):
            y = chain(x, kinds[kind])
        if number > 8:
            (window,) = offload_states[TAG].windows()
            assert follows(), number
            assert window.scheduled is not None
            assert len(window.scheduled.tried) == 1, number
        x.grad = None
        y.sum().backward()
        assert_same_bits([y.detach(), x.grad], wanted)
        del y


def test_a_fixed_window_holds_at_each_size(offloads: Offloads) -> None:
    """Its bytes are those of other saves at another size: such a step is learned by itself."""
    model = make_model(offloads.device)
    compare(model, [24] * 3, lambda: offloads(1.0, window_bytes=4096))
    compare(model, [40], lambda: offloads(1.0, window_bytes=4096))
    assert not followed[-1]


def test_what_has_become_too_small_stays(offloads: Offloads) -> None:
    model, least = make_model(offloads.device), 2 * 24 * 16 * 4
    compare(model, [24] * 3, lambda: offloads(1.0, window_bytes=None, min_bytes=least))
    moved = memkit.stats(TAG).moved_out_bytes
    assert moved

    compare(model, [20] * 3, lambda: offloads(1.0, window_bytes=None, min_bytes=least))
    fewer = memkit.stats(TAG)
    assert fewer.moved_out_bytes < moved * 20 / 24
    compare(model, [48], lambda: offloads(1.0, window_bytes=None, min_bytes=least))  # more have become large enough


def test_values_that_are_saved_twice_are_followed_with_any_least_bytes(offloads: Offloads) -> None:
    model = make_model(offloads.device)
    compare(model, [24] * 3, lambda: offloads(0.7, window_bytes=None, min_bytes=64))
    for length in (30, 32, 24, 30):
        compare(model, [length], lambda: offloads(0.7, window_bytes=None, min_bytes=64))
        assert followed[-1], length


@pytest.mark.filterwarnings("ignore:.*it leaves")
def test_no_host_memory_for_a_longer_step(offloads: Offloads, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has no host memory stays, and shorter steps go on as before."""
    model = make_model(offloads.device)
    compare(model, [40] * 3, lambda: offloads(1.0, window_bytes=None))
    longer = memkit.stats(TAG)
    compare(model, [24], lambda: offloads(1.0, window_bytes=None))
    shorter = memkit.stats(TAG)
    limit_host_memory(monkeypatch, most_bytes := longer.moved_out_bytes * 3 // 4)
    monkeypatch.setattr(ScheduledForward, "_fetch_one", None)  # what has left is fetched ahead
    for _ in range(3):
        compare(model, [40], lambda: offloads(1.0, window_bytes=None))
        found = memkit.stats(TAG)
        assert followed[-1]
        assert most_bytes / 2 < found.moved_out_bytes <= most_bytes
        assert found.unique_bytes == longer.unique_bytes == found.moved_out_bytes + found.kept_bytes
        compare(model, [24], lambda: offloads(1.0, window_bytes=None))
        assert followed[-1]
        assert memkit.stats(TAG).moved_out_bytes == shorter.moved_out_bytes
    monkeypatch.undo()


@pytest.mark.filterwarnings("ignore:.*it leaves")
def test_backwards_of_a_graph_with_too_little_host_memory(offloads: Offloads, monkeypatch: pytest.MonkeyPatch) -> None:
    x, units = leaf_on(offloads.device.torch_device), [1, 3, 2, 1, 1, 2, 2, 1]

    def grads(y: Tensor) -> list[Tensor]:
        return [torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for _ in range(3)]

    for limit in (40, 40, 40, 4, 4):
        monkeypatch.undo()
        limit_host_memory(monkeypatch, limit * UNIT_BYTES)
        with offloads(1.0, window_bytes=None):
            y = chain(x, units)
        assert_same_bits(grads(y), grads(chain(x, units)))
        del y
    assert 0 < offloads.moved_units <= 4


def limit_host_memory(monkeypatch: pytest.MonkeyPatch, most_bytes: int) -> None:
    take = Arena.take

    def limited(arena: Arena, num_bytes: int) -> Any:
        if arena.in_use_bytes + num_bytes > most_bytes:
            raise HostMemoryError("injected: no room")
        return take(arena, num_bytes)

    monkeypatch.setattr(Arena, "take", limited)


def late_chain(x: Tensor, units: Sequence[int]) -> Tensor:
    """The first save has no value, and is the same at each size."""
    return chain(x * x, units)


def test_host_memory_of_one_size_is_enough_for_sizes_that_begin_alike(
    offloads: Offloads, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, sizes = leaf_on(offloads.device.torch_device), ([2] * 6, [3] * 6)
    for number in range(16):
        if number == 8:
            monkeypatch.undo()
            limit_host_memory(monkeypatch, 17 * UNIT_BYTES)
        wanted = gradient_of(late_chain(x, sizes[number % 2]), x)
        with offloads(1.0, window_bytes=None):
            y = late_chain(x, sizes[number % 2])
        assert number < 4 or offloads.follows, number
        assert_same_bits([gradient_of(y, x)], [wanted])
        del y


@pytest.mark.filterwarnings("ignore:.*it leaves")
def test_what_has_no_host_memory_is_freed_by_the_backward(offloads: Offloads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save by save as it goes on, or at its end if it was saved twice; what no backward asked for stays until one does."""
    x, saved, live = leaf_on(offloads.device.torch_device), list[Any](), list[int]()

    def forward(units: int) -> tuple[Tensor, Tensor]:
        y, aux = chain(x, [units]), (x * 2).sin()
        saved[:] = [weakref.ref(y.untyped_storage())]
        y = y * y
        for _ in range(6):
            y = y.repeat(units)[: units * UNIT_NUMEL].clone()
            y.register_hook(lambda _: live.append(num_live()))
            saved.append(weakref.ref(y.untyped_storage()))
            y = y.sin()
        return y, aux

    def num_live() -> int:
        return sum(reference() is not None for reference in saved)

    for units in (1, 1, 1, 2):
        if units == 2:
            limit_host_memory(monkeypatch, 0)
        with offloads(1.0, window_bytes=None):
            y, aux = forward(units)
        followed.append(follows())
        live.clear()
        found = torch.autograd.grad(y.sum(), x)
        del y

    assert followed[-1]
    assert live == [6, 5, 4, 3, 2, 1]
    assert num_live() == 0
    assert_same_bits([*found, gradient_of(aux, x)], [gradient_of(made, x) for made in forward(2)])
    del aux


def test_two_models_take_turns_at_all_lengths(offloads: Offloads) -> None:
    """Under one tag, they do not mix: the second saves other dtypes."""
    one, other = make_model(offloads.device), make_model(offloads.device).double()

    def step(model: nn.Module, length: int, context: Any) -> list[Tensor]:
        x = torch.linspace(-1, 1, length * 16, device=offloads.device.torch_device, dtype=next(model.parameters()).dtype)
        model.zero_grad(set_to_none=True)
        with context:
            torch.manual_seed(length)
            loss = model(x.view(1, length, 16)).square().mean()
        followed.append(TAG in offload_states and follows())
        loss.backward()
        return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]

    for number, length in enumerate((12, 12, 12, 12, 12, 12, 9, 21, 30, 7, 8)):
        model = (one, other)[number % 2]
        wanted = step(model, length, nullcontext())
        assert_same_bits(step(model, length, offloads(0.7, window_bytes=None)), wanted)
        assert number < 6 or followed[-1], (number, length)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
@pytest.mark.usefixtures("batch_bytes")
def test_random_sizes(seed: int, offloads: Offloads) -> None:
    """Each save has a size of its own in each step; some steps are shorter."""
    draw, x = random.Random(seed), leaf_on(offloads.device.torch_device)
    units = [1] * draw.randint(4, 12)
    ratio = draw.choice([1.0, 0.5, 0.3])
    for number in range(16):
        if number > 2 and draw.random() < 0.7:
            units = [draw.randint(1, 4) if draw.random() < 0.5 else size for size in units]
        taken = units[:-1] if number > 2 and draw.random() < 0.2 else units
        wanted = step(x, taken)
        assert_same_bits(step(x, taken, lambda: offloads(ratio, window_bytes=None)), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("within", [None, "resize", "_take_memory"])
def test_interrupts_of_a_step_of_another_size(within: str | None) -> None:
    offloads = Offloads(ReferenceDevice())
    model, lengths = make_model(offloads.device), itertools.count(10)
    for length in (24, 24, 24, 40, 24):
        train(model, length, offloads(0.7, window_bytes=None))

    def step() -> None:
        for length in (next(lengths), 40):
            train(model, length, offloads(0.7, window_bytes=None))

    for place in interrupts(step, 150, within=within):
        for length in (24, 12):
            wanted = train(model, length, nullcontext())
            found = train(model, length, offloads(0.7, window_bytes=None))
            assert all(map(torch.equal, found, wanted)), place
        offloads.assert_nothing_is_left()
    memkit.reset(TAG)
