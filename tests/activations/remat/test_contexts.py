"""Beside other contexts: with `CPUOffload`, with the user's marks and plans, and with nothing to do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

import memkit
from memkit.device import Device
from tests.activations.cases import assert_same_bits
from tests.activations.chains import UNIT_BYTES, Context, leaf_on, step
from tests.activations.remat.conftest import NO_PLAN_FITS, Remat

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings(NO_PLAN_FITS), pytest.mark.usefixtures("quick_plans")]

UNITS = [1] * 10


def test_offload_or_another_inside_raises(device: Device, remat_on: Remat) -> None:
    with remat_on(0.5, "outer"):
        with pytest.raises(ValueError, match=r'"inner".* was entered inside another Rematerialize'):
            remat_on(0.5, "inner").__enter__()
        with pytest.raises(ValueError, match="inside"):
            memkit.CPUOffload(1.0, "inside", device=device).__enter__()
    step(leaf_on(device.torch_device), UNITS, lambda: remat_on(0.5, "outer"))


# The user's word


def _marked(x: Tensor, mark: object, at: int) -> Tensor:
    for number in range(8):
        x = x.clone()
        if number == at:
            mark(x)
        x = x.sin()
    return x


@pytest.mark.parametrize("budget", [2 * UNIT_BYTES, 0.4])
def test_what_is_to_be_kept_stays(budget: float | str, device: Device, remat_on: Remat) -> None:
    x = leaf_on(device.torch_device)
    for _ in range(3):
        with remat_on(budget, "kept"):
            y = x
            for _ in range(8):
                y = memkit.keep(y.clone()).sin()
        assert memkit.stats("kept").num_dropped == 0
        y.sum().backward()
        assert memkit.stats("kept").num_replays == 0


def test_the_last_word_counts(device: Device, remat_on: Remat) -> None:
    x = leaf_on(device.torch_device)
    with remat_on("1GiB", "words"):
        y = memkit.keep(memkit.recompute(x.clone())).sin() + memkit.recompute(memkit.keep(x.cos())).sin()
    assert memkit.stats("words").num_dropped == 1
    y.sum().backward()


def test_words_after_the_save(device: Device, remat_on: Remat) -> None:
    x = leaf_on(device.torch_device)
    with remat_on("1GiB", "late"):
        y = x.clone()
        z = y.sin()
        memkit.recompute(y)
        assert memkit.stats("late").num_dropped == 1
        memkit.keep(y)
    del y
    z.sum().backward()

    assert memkit.stats("late").num_replays == 0
    assert torch.equal(x.grad, x.detach().cos())


def test_words_without_a_context_and_about_what_is_no_range_of_bytes_do_nothing() -> None:
    sparse = torch.eye(4).to_sparse()
    for context in (nullcontext(), memkit.Rematerialize(0.5, "sparse", min_bytes=0)):
        with context:
            assert memkit.keep(sparse) is sparse
            assert memkit.recompute(sparse) is sparse


def _num_dropped_with(word: Callable[[Tensor], Tensor] | None, x: Tensor, context: Context, *, is_late: bool = False) -> int:
    """Return how many values a step drops whose fourth of eight saved values is marked, before or after its save."""
    given: list[Tensor] = []

    def say(y: Tensor) -> None:
        if word is not None:
            given.append(y)
            if not is_late:
                word(y)

    with context() as entered:
        y = _marked(x, say, 3)
        if is_late:
            for value in given:
                word(value)
        given.clear()
    num_dropped = memkit.stats(entered.tag).num_dropped
    y.sum().backward()
    return num_dropped


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("wanted", [[1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1]], ids=["once", "later"])
def test_wish_is_one_of_its_step(wanted: list[int], is_late: bool, device: Device, remat_on: Remat) -> None:
    x, context = leaf_on(device.torch_device), lambda: remat_on("1GiB", "wish")

    found = [_num_dropped_with(memkit.recompute if wish else None, x, context, is_late=is_late) for wish in wanted]

    assert found == wanted


def test_what_one_step_keeps_another_may_drop(device: Device, remat_on: Remat) -> None:
    x = leaf_on(device.torch_device)
    dropped = []
    for number in range(5):
        with remat_on(2 * UNIT_BYTES, "kept once"):
            y = x
            for _ in range(8):
                y = y.clone()
                y = (memkit.keep(y) if number == 0 else y).sin()
        dropped.append(memkit.stats("kept once").num_dropped)
        y.sum().backward()

    assert dropped[0] == 0
    assert all(num_dropped >= 5 for num_dropped in dropped[1:])


# Plans


def test_edited_plan_is_followed(device: Device, remat_on: Remat) -> None:
    x, plain = leaf_on(device.torch_device), step(leaf_on(device.torch_device), UNITS)
    for _ in range(2):
        step(x, UNITS, lambda: remat_on("1GiB", "edited"))
    plan = (
        memkit.Rematerialize(1.0, "edited")
        .plan.with_action(2, memkit.plan.Action.RECOMPUTE)
        .with_action(5, memkit.plan.Action.RECOMPUTE)
    )

    assert_same_bits(step(x, UNITS, lambda: remat_on("1GiB", "edited", plan=plan)), plain)
    stats = memkit.stats("edited")
    assert (stats.num_dropped, stats.num_replays, stats.follows_plan) == (2, 2, True)
    assert memkit.Rematerialize(1.0, "edited").plan == plan


def test_plan_of_another_step_warns_and_is_not_followed(device: Device, remat_on: Remat) -> None:
    x = leaf_on(device.torch_device)
    for _ in range(2):
        step(x, UNITS, lambda: remat_on(0.5, "one"))
    plan, other = memkit.Rematerialize(1.0, "one").plan, [1] * 6
    wanted = step(leaf_on(device.torch_device), other)
    step(x, other, lambda: remat_on(0.5, "other", plan=plan))

    with pytest.warns(
        UserWarning, match=r'"other"\): the plan that was given is of another step: it has 10 values, and 6 were'
    ):
        assert_same_bits(step(x, other, lambda: remat_on(0.5, "other", plan=plan)), wanted)
    assert_same_bits(step(x, other, lambda: remat_on(0.5, "other", plan=plan)), wanted)
    assert memkit.Rematerialize(1.0, "other").plan != plan
