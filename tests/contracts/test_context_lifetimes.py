"""Nothing outlives its graph: not by cycles, not by errors, not in thirty steps."""

from __future__ import annotations

import gc
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import memkit
from memkit.activations.budgeting.learning import Planned
from memkit.activations.offloading.scheduled import PlacedCopies
from tests.activations.cases import assert_same_bits, inputs_on, skips
from tests.activations.chains import chain, leaf_on, step
from tests.activations.remat.cases import random_numbers
from tests.activations.remat.conftest import NO_PLAN_FITS
from tests.contracts.conftest import Case, Context
from tests.contracts.test_context_orders import ORDERS
from tests.engine import let_go_of_last_backward

pytestmark = [pytest.mark.filterwarnings(NO_PLAN_FITS), pytest.mark.usefixtures("only_new_objects", "quick_plans")]

UNITS = (3, 1, 2, 5, 1, 1, 4, 2)


def same_step(case: Case) -> None:
    step(leaf_on(case.device.torch_device), UNITS, case.context)


def two_shapes(case: Case) -> None:
    for units in (UNITS, [2, *UNITS[:4]]):
        step(leaf_on(case.device.torch_device), units, case.context)


def graph_dropped_unused(case: Case) -> None:
    case("skips", case.x)
    same_step(case)


def error_in_the_forward(case: Case) -> None:
    def fail() -> None:
        with case.context():
            case.compute("skips", case.x)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    same_step(case)


def error_in_the_backward(case: Case) -> None:
    def fail(_: Tensor) -> None:
        raise KeyError("mine")

    with case.context():
        middle = case.compute("mlp", case.x)
        y = case.compute("skips", middle)
    middle.register_hook(fail)
    with pytest.raises(KeyError, match="mine"):
        y.sum().backward()
    del middle, y
    same_step(case)


STEPS: dict[str, Callable[[Case], object]] = {
    **{
        made.__name__: made
        for made in (same_step, two_shapes, graph_dropped_unused, error_in_the_forward, error_in_the_backward)
    },
    **{name: ORDERS[name] for name in ("shared_between_two_backwards", "double_backward", "interleaved", "backward_inside")},
}
_CORE = ("same_step", "interleaved", "graph_dropped_unused", "error_in_the_backward")

each_step = pytest.mark.parametrize(
    "name", [name if name in _CORE else pytest.param(name, marks=pytest.mark.slow) for name in STEPS]
)


def _num_tensors(context: Context) -> int:
    let_go_of_last_backward(context.torch_device)
    return sum(type(thing) is Tensor for thing in gc.get_objects())


def _values_of(thing: object) -> Iterator[object]:
    slots = {name for owner in type(thing).__mro__ for name in getattr(owner, "__slots__", ())}
    names = slots | getattr(thing, "__dict__", {}).keys()
    for name in names - {"ratios"}:  # which stats show for every step there was
        yield getattr(thing, name, None)


_BY_CHANCE = (PlacedCopies, Planned)
"""Objects whose number is up to chance on a GPU, the first's on all devices. A schedule of offloading keeps a few placements,
by the free host memory when forwards began; a budget has one more plan, with its followers, after a step with more bytes beside
it."""
_MOST_PLANS = 8


def _held(context: Context) -> dict[str, Any]:
    """Return counts that may not grow with the number of steps."""
    gc.collect()
    figures: dict[str, Any] = {"live": context.num_live}
    for name in ("ledger_peak_bytes", "host_held_bytes", "num_pins"):
        figures[name] = getattr(memkit.stats(context.tag), name)
    gc.collect()
    ours = [thing for thing in gc.get_objects() if type(thing).__module__.startswith("memkit.activations")]
    by_chance = _BY_CHANCE[:1] if context.torch_device.type == "cpu" else _BY_CHANCE
    figures["objects"] = Counter(type(thing).__name__ for thing in ours if type(thing) not in by_chance)
    figures["longest"] = max(
        len(value) for thing in ours for value in _values_of(thing) if type(value) in (list, dict, set, deque)
    )
    figures["tensors"] = _num_tensors(context)
    return figures


@pytest.mark.slow
@pytest.mark.covering(1)
@each_step
def test_thirty_steps(name: str, context: Context) -> None:
    for count in range(33):
        STEPS[name](Case(context.device, context))
        context.device.synchronize()  # the next step finds timed events reached, however busy the device is
        if count == 8:  # by then there are copies to all places that are used
            before = _held(context)

    after = _held(context)
    assert after.pop("ledger_peak_bytes") <= before.pop("ledger_peak_bytes")  # a budget learns to take less
    assert after == before
    assert before["live"] == 0
    assert (memkit.stats(context.tag).num_plans or 0) <= _MOST_PLANS
    assert context.num_acts > 0 or name == "two_shapes"  # of which the last may just fit


@pytest.mark.core(1)
@pytest.mark.covering(2)
@pytest.mark.usefixtures("without_collector")
@each_step
def test_tensors_are_freed_without_the_collector(name: str, context: Context) -> None:
    """No cycle holds tensors: they go as soon as in the plain run."""
    for _ in range(6):
        STEPS[name](Case(context.device, context))
    assert context.num_live == 0  # copies that have arrived are let go
    before = _num_tensors(context)
    STEPS[name](Case(context.device, context))
    assert context.num_live == 0

    assert _num_tensors(context) == before


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("is_used", [True, False])
def test_inputs_and_saved_tensors_are_freed_with_the_graph(is_used: bool, context: Context) -> None:
    """In each of the first steps, whether recorded, timed, or planned; also if the graph is dropped unused."""
    _, w = inputs_on(context.torch_device)
    for _ in range(4):
        batch = torch.randn(8, 32, device=context.torch_device)
        storages = [weakref.ref(batch.untyped_storage())]
        with context():
            y = functional.linear(batch, w)
            for _ in range(6):
                y = y.clone()
                storages.append(weakref.ref(y.untyped_storage()))
                y = y.sin()
            loss = functional.linear(y, w).exp().sum()
        if is_used:
            loss.backward()
        del batch, y, loss

        assert context.num_live == 0
        assert [storage() for storage in storages] == [None] * len(storages)


@pytest.mark.usefixtures("without_collector")
def test_objects_of_a_step_die_with_it(context: Context) -> None:
    x, made = leaf_on(context.torch_device), []

    def make() -> AbstractContextManager[object]:
        made.append(weakref.ref(one := context()))
        return one

    for _ in range(3):
        step(x, UNITS, make)

        assert [one() for one in made] == [None] * len(made)


def test_retained_graph_lives_until_it_is_dropped(context: Context) -> None:
    x = leaf_on(context.torch_device)
    for _ in range(3):
        with context():
            loss = chain(x, UNITS).sum()
        loss.backward(retain_graph=True)
        assert context.num_live >= len(UNITS)
        del loss

        assert context.num_live == 0


# Resets


def test_reset_with_a_graph_alive(context: Context) -> None:
    x, w = inputs_on(context.torch_device)
    torch.manual_seed(1)
    with context():
        loss = random_numbers(x, w).sum()
    memkit.reset(context.tag)
    with context():
        other = skips(x, w).sum()
    found = torch.autograd.grad(loss, (x, w))
    found_of_other = torch.autograd.grad(other, (x, w))

    torch.manual_seed(1)
    assert_same_bits(found, torch.autograd.grad(random_numbers(x, w).sum(), (x, w)))
    assert_same_bits(found_of_other, torch.autograd.grad(skips(x, w).sum(), (x, w)))
    del loss, other
    assert context.num_live == 0


def test_reset_inside_a_context(context: Context) -> None:
    x = leaf_on(context.torch_device)
    with context():
        y = chain(x, [1] * 3)
        memkit.reset(context.tag)
        y = chain(y, [1] * 3)
    y.sum().backward()

    plain = step(leaf_on(context.torch_device), [1] * 6)
    assert_same_bits([y.detach(), x.grad], plain)
    assert_same_bits(step(x, [1] * 6, context), plain)
