"""Nothing outlives its graph: not by cycles, not by errors, not in thirty steps."""

from __future__ import annotations

import gc
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import memkit
from memkit.activations.budgeting.learning import Planned, PlannedMoments
from memkit.activations.offloading.schedule import PlacedCopies
from tests.activations.cases import assert_same_bits, inputs_on, mlp, skips
from tests.activations.chains import chain, leaf_on, step
from tests.activations.remat.cases import random_numbers
from tests.activations.remat.conftest import NO_PLAN_FITS
from tests.contracts.conftest import Context
from tests.engine import let_go_of_last_backward

pytestmark = [pytest.mark.filterwarnings(NO_PLAN_FITS), pytest.mark.usefixtures("only_new_objects", "quick_plans")]

UNITS = (3, 1, 2, 5, 1, 1, 4, 2)

Train = Callable[[Tensor, Callable[[], AbstractContextManager[object]]], None]


def same_step(x: Tensor, context: Context) -> None:
    step(x, UNITS, context)


def two_micro_batches(x: Tensor, context: Context) -> None:
    for _ in range(2):
        with context():
            loss = chain(x, UNITS).sum()
        loss.backward()


def two_graphs_alive(x: Tensor, context: Context) -> None:
    losses = []
    for _ in range(2):
        with context():
            losses.append(chain(x, UNITS).sum())
    for loss in losses:
        loss.backward()


def two_shapes(x: Tensor, context: Context) -> None:
    step(x, UNITS, context)
    step(x, [2, *UNITS[:4]], context)


def graph_dropped_unused(x: Tensor, context: Context) -> None:
    with context():
        chain(x, UNITS)
    step(x, UNITS, context)


def graph_retained(x: Tensor, context: Context) -> None:
    with context():
        loss = chain(x, UNITS).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def backward_inside(x: Tensor, context: Context) -> None:
    with context():
        for _ in range(2):
            chain(x, UNITS).sum().backward()


def error_in_the_forward(x: Tensor, context: Context) -> None:
    def fail() -> None:
        with context():
            chain(x, UNITS[:4])
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    step(x, UNITS, context)


def error_in_the_backward(x: Tensor, context: Context) -> None:
    def fail(_: Tensor) -> None:
        raise KeyError("mine")

    with context():
        middle = chain(x, UNITS[:4])
        y = chain(middle, UNITS)
    middle.register_hook(fail)
    with pytest.raises(KeyError, match="mine"):
        y.sum().backward()
    del middle, y
    step(x, UNITS, context)


def double_backward(x: Tensor, context: Context) -> None:
    with context():
        loss = chain(x, UNITS).sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    grad.sum().backward()
    x.grad = None


STEPS: list[Train] = [
    same_step,
    two_micro_batches,
    two_graphs_alive,
    two_shapes,
    graph_dropped_unused,
    graph_retained,
    backward_inside,
    error_in_the_forward,
    error_in_the_backward,
    double_backward,
]
_CORE = (same_step, two_graphs_alive, graph_dropped_unused, error_in_the_backward)

each_step = pytest.mark.parametrize(
    "train",
    [train if train in _CORE else pytest.param(train, marks=pytest.mark.slow) for train in STEPS],
    ids=lambda train: train.__name__,
)


def _num_tensors(context: Context) -> int:
    let_go_of_last_backward(context.torch_device)
    return sum(type(thing) is Tensor for thing in gc.get_objects())


def _values_of(thing: object) -> Iterator[object]:
    slots = {name for owner in type(thing).__mro__ for name in getattr(owner, "__slots__", ())}
    names = slots | getattr(thing, "__dict__", {}).keys()
    for name in names - {"ratios"}:  # which stats show for every step there was
        yield getattr(thing, name, None)


_BY_CHANCE = (PlacedCopies, Planned, PlannedMoments)
"""What of a GPU is up to chance, the first on all devices. A schedule of offloading keeps a few placements, by which host
memory was free when forwards began; a budget has one more plan, with what is followed of it, where more bytes were beside a
step."""
_MOST_PLANS = 8


def _held(context: Context) -> dict[str, object]:
    """Return what may not grow with the number of steps."""
    gc.collect()
    figures: dict[str, object] = {"live": context.num_live}
    for number, stats in enumerate(context.kind.stats):
        found = stats(context.tag)
        for name in ("peak_live_bytes", "ledger_peak_bytes", "host_held_bytes", "num_pins"):
            if name != "peak_live_bytes" or context.lands_late:  # when a copy lands is up to the GPU, or to chance
                figures[f"{name} {number}"] = getattr(found, name, None)
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
def test_thirty_steps(train: Train, context: Context) -> None:
    x = leaf_on(context.torch_device)
    for count in range(33):
        train(x, context)
        context.device.synchronize()  # what is timed has been reached by the next step, however busy the device is
        if count == 8:  # by then there are copies to all places that are used
            before = _held(context)

    assert _held(context) == before
    assert before["live"] == 0
    assert all(getattr(stats(context.tag), "num_plans", 0) <= _MOST_PLANS for stats in context.kind.stats)
    assert context.num_acts > 0 or train is two_shapes  # of which the last may just fit


@pytest.mark.core(1)
@pytest.mark.covering(2)
@pytest.mark.usefixtures("without_collector")
@each_step
def test_tensors_are_freed_without_the_collector(train: Train, context: Context) -> None:
    """Nothing that holds tensors is in a cycle: they go as soon as in the plain run."""
    x = leaf_on(context.torch_device)
    for _ in range(6):
        train(x, context)
    assert context.num_live == 0  # what has arrived by then is let go
    before = _num_tensors(context)
    train(x, context)
    assert context.num_live == 0

    assert _num_tensors(context) == before


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("is_used", [True, False])
def test_inputs_are_freed_with_the_graph(is_used: bool, context: Context) -> None:
    """In each of the first steps, whether it is recorded, timed, or follows a plan; also where the graph is dropped unused."""
    _, w = inputs_on(context.torch_device)
    for _ in range(4):
        batch = torch.randn(8, 32, device=context.torch_device)
        with context():
            loss = functional.linear(functional.linear(batch, w).sin(), w).exp().sum()
        if is_used:
            loss.backward()
        gone = weakref.ref(batch.untyped_storage())
        del batch, loss

        assert context.num_live == 0
        assert gone() is None


@pytest.mark.usefixtures("without_collector")
def test_saved_tensors_die_with_the_graph(context: Context) -> None:
    x, storages = leaf_on(context.torch_device), []
    for _ in range(3):
        with context():
            y = x.clone()
            for _ in range(6):
                y = y.clone()
                storages.append(weakref.ref(y.untyped_storage()))
                y = y.sin()
        y.sum().backward()
        del y

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


def test_graph_dropped_unused_leaves_nothing(context: Context) -> None:
    x, w = inputs_on(context.torch_device)
    for _ in range(3):
        with context():
            mlp(x, w)

        assert context.num_live == 0


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
