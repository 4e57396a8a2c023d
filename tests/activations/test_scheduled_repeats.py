"""Training loops that repeat exactly, but not as alternating forwards and backwards: they follow schedules too."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

import memkit
from memkit.activations.offloading import moving_stage as steady
from memkit.activations.offloading.scheduled import ScheduledForward
from tests.activations.cases import assert_same_bits
from tests.activations.chains import UNIT_BYTES, chain, leaf_on
from tests.activations.scheduled_steps import IN_BATCHES, SETTINGS, TAG, Offloads, batch_bytes, gradient_of, offloads
from tests.contracts.conftest import Case
from tests.contracts.test_context_orders import ORDERS

__all__ = ["batch_bytes", "offloads"]

pytestmark = pytest.mark.usefixtures("batch_bytes")


class Followed:
    """Counts forwards that follow a schedule; `made` has all that have begun to."""

    def __init__(self) -> None:
        self.made: list[ScheduledForward] = []

    def take(self) -> list[bool]:
        """Return, for each one since the last call, whether it and its backwards followed the schedule to the end."""
        found = [made.is_complete and not made._has_left for made in self.made]
        self.made.clear()
        return found


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Followed]:
    counted, follow_schedule = Followed(), steady.follow_schedule

    def follow(*args: object) -> ScheduledForward | None:
        found = follow_schedule(*args)  # type: ignore[arg-type]  # as they come
        if found is not None:
            counted.made.append(found)
        return found

    monkeypatch.setattr(steady, "follow_schedule", follow)
    yield counted
    counted.made.clear()


def test_step_on_the_cpu_alone_among_steady_ones_warns_of_nothing(offloads: Offloads, followed: Followed) -> None:
    if offloads.device.torch_device.type == "cpu":
        pytest.skip("everything is on the CPU here")
    x, on_cpu = leaf_on(offloads.device.torch_device), torch.randn(8, requires_grad=True)
    for number in range(6):
        with memkit.CPUOffload(1.0, TAG, min_bytes=0, window_bytes=0, device=offloads.device):
            y = on_cpu.sin().cos() if number == 3 else chain(x, IN_BATCHES)
        y.sum().backward()
        del y
    assert followed.take()[-2:] == [True] * 2


# Orders of forwards and backwards

STEADY = ("retained", "double_backward", "double_backward_outside", "partial", "backward_inside", "interleaved", "in_a_thread")


@pytest.mark.parametrize("options", SETTINGS)
@pytest.mark.parametrize("name", STEADY)
def test_orders_that_repeat_follow_schedules(
    name: str, offloads: Offloads, followed: Followed, options: dict[str, float]
) -> None:
    """The contracts promise their bits."""
    moved = []
    for number in range(5):
        torch.manual_seed(7)
        ORDERS[name](Case(offloads.device, functools.partial(offloads, **options)))
        found = followed.take()
        assert number < 2 or (found and all(found))
        stats = memkit.stats(TAG)
        moved.append((stats.moved_out_bytes, stats.moved_in_bytes, stats.seen_bytes, stats.unique_bytes, stats.kept_bytes))
    assert moved[2:] == [moved[2]] * 3


# Shapes that come in turns

BUCKETS = {"A": (3, IN_BATCHES), "B": (2, [2, 1, 2, 1]), "C": (2, [2, 1, 2, 3])}
"""A multiple of the first save, and the later units; the last two begin alike."""


@pytest.mark.core(1)
@pytest.mark.parametrize("options", SETTINGS)
@pytest.mark.parametrize("turns", ["AB", "AAB", "BC", "ABC", "BBCC"])
def test_shapes_in_turns(offloads: Offloads, followed: Followed, turns: str, options: dict[str, float]) -> None:
    x, done = leaf_on(offloads.device.torch_device), ""
    found: list[bool] = []
    for kind in turns * 6:
        first, units = BUCKETS[kind]
        wanted = gradient_of(chain(x, [first, *units]), x)
        with offloads(**options):
            y = chain(x, [first, *units])
        assert_same_bits([gradient_of(y, x)], [wanted])
        del y
        done += kind
        found.append(followed.take()[-1:] == [True])
    steady = found[-len(turns) * 2 :]
    if turns in ("AB", "AAB"):
        assert found[len(turns) * 2 :] == [True] * (len(turns) * 4)
    else:  # among equal beginnings, the one is expected that followed the same two last time
        assert steady == [True] * len(steady)


@pytest.mark.parametrize("options", SETTINGS)
def test_forwards_that_go_another_way_for_good_follow_a_schedule_of_their_own(
    offloads: Offloads, followed: Followed, options: dict[str, float]
) -> None:
    """They begin as the others did, so at first each is taken for one of those."""
    x = leaf_on(offloads.device.torch_device)
    for sizes in [(*IN_BATCHES, 1, 1), (*IN_BATCHES, 2, 3, 1), (*IN_BATCHES, 2, 1)]:
        plain = gradient_of(chain(x, sizes), x)
        for _ in range(6):
            followed.made.clear()
            with offloads(**options):
                y = chain(x, sizes)
            assert_same_bits([gradient_of(y, x)], [plain])
            del y
        assert followed.take() == [True]


def test_first_save_that_lies_otherwise_costs_the_other_shapes_nothing(offloads: Offloads, followed: Followed) -> None:
    """A forward that differs at its first save is examined as a whole."""
    x = leaf_on(offloads.device.torch_device)

    def forward(kind: str) -> Tensor:
        y = x.reshape(16, 16).clone()
        y = (y.t() if kind == "B" else y).sin()
        return chain(y.flatten(), [1, 2] if kind == "B" else [2, 2, 1])

    steady = ""
    for kind in "AAAABBABBABAB":
        wanted = gradient_of(forward(kind), x)
        with offloads():
            y = forward(kind)
        assert_same_bits([gradient_of(y, x)], [wanted])
        del y
        steady += "sd"[followed.take()[-1:] != [True]]
    assert steady[:2] == "dd"
    assert steady[2:4] == "ss"
    assert steady[6] == "s"  # the others left its schedule
    assert steady[-4:] == "ssss"


# Saves that no backward asks for


@pytest.mark.covering(2)
@pytest.mark.core(1)
@pytest.mark.parametrize("options", SETTINGS)
@pytest.mark.parametrize("lives", ["until the backward", "until the next step", "through the next step"])
@pytest.mark.parametrize("aux_units", [[2, 1, 1], [1] * 6])
def test_output_that_the_loss_does_not_reach(
    offloads: Offloads, followed: Followed, aux_units: list[int], lives: str, options: dict[str, float]
) -> None:
    x = leaf_on(offloads.device.torch_device)

    def forward() -> tuple[Tensor, Tensor]:
        trunk = chain(x, [1, 2, 1])
        return chain(trunk, IN_BATCHES), chain(trunk, aux_units)

    wanted, aux, held = gradient_of(forward()[0], x), None, []
    for number in range(7):
        with offloads(**options):
            y, next_aux = forward()
            if lives == "through the next step":
                aux = next_aux
        aux = next_aux
        del next_aux
        if lives == "until the backward":
            aux = None
        assert_same_bits([torch.autograd.grad(y.sum(), x)[0]], [wanted])
        del y
        if lives == "until the next step":
            aux = None
        assert followed.take() == [True] * (number >= 2)
        held.append(memkit.stats(TAG).host_held_bytes)
    del aux
    assert held[3:] == [held[3]] * 4


def test_what_the_loss_does_not_reach_takes_no_more_host_memory_than_itself(offloads: Offloads) -> None:
    x = leaf_on(offloads.device.torch_device)
    aux, in_use = None, []
    for _ in range(6):
        with offloads():
            trunk = chain(x, [4, 4])
            y, aux = chain(trunk, [8] * 4), chain(trunk, [2, 2])
        del trunk
        gradient_of(y, x)
        del y
        memkit.stats(TAG)
        in_use.append(memkit.stats(TAG).host_in_use_bytes)
    assert in_use == [4 * UNIT_BYTES] * 6
    del aux


@pytest.mark.parametrize("options", SETTINGS)
def test_output_that_a_later_backward_reaches_after_all(
    offloads: Offloads, followed: Followed, options: dict[str, float]
) -> None:
    x = leaf_on(offloads.device.torch_device)
    head = chain(x, [1, 2]).detach().requires_grad_()

    def forward() -> tuple[Tensor, Tensor]:
        return chain(x, IN_BATCHES), chain(head, [2, 1, 1])

    made = forward()
    wanted, wanted_aux = gradient_of(made[0], x), gradient_of(made[1], head)
    kept: list[Tensor] = []
    for number in range(9):
        with offloads(**options):
            y, aux = forward()
            if kept and number > 5:  # while the next forward runs
                assert_same_bits([gradient_of(kept.pop(), head)], [wanted_aux])
        kept.append(aux)
        del aux
        assert_same_bits([gradient_of(y, x)], [wanted])
        del y
        if number > 4:  # when it is over
            assert_same_bits([gradient_of(kept.pop(0), head)], [wanted_aux])
    while kept:
        assert_same_bits([gradient_of(kept.pop(0), head)], [wanted_aux])


def test_forward_that_leaves_the_schedule_of_another_trace_for_the_latest(offloads: Offloads) -> None:
    """Its saves so far are of two traces: it goes by the plan of the trace that it turns out to follow."""
    weight = torch.ones(16).to(offloads.device.torch_device).requires_grad_()

    for number, is_cut in ((2, False), (6, False), (6, False), (4, True), (3, True), (4, True)):
        found = []
        for context in (nullcontext, offloads):
            y = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).to(weight.device) * weight
            with context():
                y = y * weight
                for _ in range(number):
                    y = y.sin()
                if is_cut:
                    y = y[:5].exp()
            found.append(gradient_of(y, weight))
        assert_same_bits(found[:1], found[1:])
