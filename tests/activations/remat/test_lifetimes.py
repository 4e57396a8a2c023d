"""Nothing outlives its graph: not by cycles, not by errors, not in thirty steps."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import memkit
from memkit.activations import remat_state
from memkit.device import Device
from tests.activations.cases import assert_same_bits, inputs_on
from tests.activations.chains import UNIT_BYTES, Context, chain, leaf_on, step
from tests.activations.remat.cases import random_numbers
from tests.activations.remat.conftest import NO_PLAN_FITS, Remat

pytestmark = [pytest.mark.filterwarnings(NO_PLAN_FITS), pytest.mark.usefixtures("only_new_objects", "quick_plans")]

UNITS = (3, 1, 2, 5, 1, 1, 4, 2)


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _tensors() -> int:
    return sum(type(thing) is Tensor for thing in gc.get_objects())


def _same_step(x: Tensor, context: Context) -> None:
    step(x, UNITS, context)


def _two_micro_batches(x: Tensor, context: Context) -> None:
    for _ in range(2):
        with context():
            loss = chain(x, UNITS).sum()
        loss.backward()


def _two_graphs_alive(x: Tensor, context: Context) -> None:
    losses = []
    for _ in range(2):
        with context():
            losses.append(chain(x, UNITS).sum())
    for loss in losses:
        loss.backward()


def _two_shapes(x: Tensor, context: Context) -> None:
    step(x, UNITS, context)
    step(x, [2, *UNITS[:4]], context)


def _graph_dropped_unused(x: Tensor, context: Context) -> None:
    with context():
        chain(x, UNITS)
    step(x, UNITS, context)


def _graph_retained(x: Tensor, context: Context) -> None:
    with context():
        loss = chain(x, UNITS).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def _backward_inside(x: Tensor, context: Context) -> None:
    with context():
        for _ in range(2):
            chain(x, UNITS).sum().backward()


def _error_in_the_forward(x: Tensor, context: Context) -> None:
    def fail() -> None:
        with context():
            chain(x, UNITS[:4])
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    step(x, UNITS, context)


def _error_in_the_backward(x: Tensor, context: Context) -> None:
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


def _double_backward(x: Tensor, context: Context) -> None:
    with context():
        loss = chain(x, UNITS).sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    grad.sum().backward()
    x.grad = None


STEPS = [
    _same_step,
    _two_micro_batches,
    _two_graphs_alive,
    _two_shapes,
    _graph_dropped_unused,
    _graph_retained,
    _backward_inside,
    _error_in_the_forward,
    _error_in_the_backward,
    _double_backward,
]


def _held(tag: str) -> dict[str, int]:
    """What may not grow with the number of steps."""
    gc.collect()
    stats = memkit.stats(tag)
    state = remat_state.states[tag]
    return {
        "records": stats.live_records,
        "bytes": stats.live_bytes,
        "peak": stats.ledger_peak_bytes,
        "traces": len(state.traces),
        "timed": len(state._timed),
        "tensors": _tensors(),
        "objects": sum(type(thing).__module__.startswith("memkit") for thing in gc.get_objects()),
        "lists": max([len(value) for value in vars(state).values() if isinstance(value, list | dict | set)], default=0),
    }


@pytest.mark.parametrize("policy", ["plan", "dtr"])
@pytest.mark.parametrize("train", STEPS, ids=lambda train: train.__name__.strip("_"))
def test_thirty_steps(train: Callable[[Tensor, Context], None], policy: str, device: Device, remat_on: Remat) -> None:
    x = leaf_on(device.torch_device)
    for count in range(33):
        train(x, lambda: remat_on(8 * UNIT_BYTES, "thirty", policy=policy))
        if count == 4:
            before = _held("thirty")

    assert _held("thirty") == before
    assert (before["records"], before["bytes"]) == (0, 0)
    assert memkit.stats("thirty").num_replays > 0 or train is _two_shapes  # of which the last may just fit


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("train", STEPS, ids=lambda train: train.__name__.strip("_"))
def test_tensors_are_freed_without_the_collector(
    train: Callable[[Tensor, Context], None], device: Device, remat_on: Remat
) -> None:
    """Nothing that holds tensors is in a cycle: they go as soon as in the plain run."""
    x = leaf_on(device.torch_device)
    for _ in range(3):
        train(x, lambda: remat_on(8 * UNIT_BYTES, "cycles"))
    before = _tensors()
    train(x, lambda: remat_on(8 * UNIT_BYTES, "cycles"))

    assert _tensors() == before


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("num_steps", [1, 2, 3, 4])
def test_inputs_are_freed_with_the_graph(num_steps: int, device: Device, remat_on: Remat) -> None:
    """The step that is timed as well."""
    _, w = inputs_on(device.torch_device)
    for _ in range(num_steps):
        batch = torch.randn(8, 32, device=device.torch_device)
        with remat_on(0.2, "inputs"):
            loss = functional.linear(functional.linear(batch, w).sin(), w).exp().sum()
        loss.backward()
        gone = weakref.ref(batch.untyped_storage())
        del batch, loss

    assert gone() is None


@pytest.mark.usefixtures("without_collector")
def test_inputs_are_freed_when_the_graph_is_dropped_unused(device: Device, remat_on: Remat) -> None:
    _, w = inputs_on(device.torch_device)
    for _ in range(4):
        batch = torch.randn(8, 32, device=device.torch_device)
        with remat_on(0.2, "unused"):
            loss = functional.linear(functional.linear(batch, w).sin(), w).exp().sum()
        gone = weakref.ref(batch.untyped_storage())
        del batch, loss

        assert gone() is None
        assert memkit.stats("unused").live_bytes == 0


def test_retained_graph_lives_until_it_is_dropped(device: Device, remat_on: Remat) -> None:
    x = leaf_on(device.torch_device)
    for _ in range(3):
        with remat_on(8 * UNIT_BYTES, "retained"):
            loss = chain(x, UNITS).sum()
        loss.backward(retain_graph=True)
        assert memkit.stats("retained").live_records == len(UNITS)
        del loss

        stats = memkit.stats("retained")
        assert (stats.live_records, stats.live_bytes) == (0, 0)


def test_reset_with_a_graph_alive(device: Device, remat_on: Remat) -> None:
    x, w = inputs_on(device.torch_device)
    plain = random_numbers(x, w).sum()
    del plain
    torch.manual_seed(1)
    with remat_on(0.2, "reset"):
        loss = random_numbers(x, w).sum()
    memkit.reset("reset")
    loss.backward()
    found = [x.grad, w.grad]
    x.grad = w.grad = None
    torch.manual_seed(1)
    random_numbers(x, w).sum().backward()

    assert_same_bits(found, [x.grad, w.grad])


def test_step_after_an_error_is_like_any_other(device: Device, remat_on: Remat) -> None:
    x, plain = leaf_on(device.torch_device), step(leaf_on(device.torch_device), UNITS)
    for _ in range(3):
        _error_in_the_forward(x, lambda: remat_on(8 * UNIT_BYTES, "after"))
        _error_in_the_backward(x, lambda: remat_on(8 * UNIT_BYTES, "after"))

        assert_same_bits(step(x, UNITS, lambda: remat_on(8 * UNIT_BYTES, "after")), plain)
        assert torch._C._len_torch_dispatch_stack() == 0
