"""Steps that follow a schedule and fail, find no room, are written to, or are dropped: nothing is left behind."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import memkit
from memkit.activations.saved.state import offload_states
from memkit.device import CudaDevice, ReferenceDevice
from memkit.errors import HostMemoryError
from tests.activations.cases import assert_same_bits
from tests.activations.chains import chain, leaf_on
from tests.activations.scheduled_steps import (
    IN_BATCHES,
    SETTINGS,
    TAG,
    Offloads,
    batch_bytes,
    gradient_of,
    learned,
    offloads,
)

__all__ = ["batch_bytes", "offloads"]

pytestmark = pytest.mark.usefixtures("batch_bytes")


# Without room


class Full(ReferenceDevice):
    """Has no room for some allocations.

    Attributes:
        refused: for each of the next ones, whether it is refused.
    """

    def __init__(self) -> None:
        super().__init__()
        self.refused: Iterator[bool] = iter(())

    def allocate(self, num_bytes: int) -> torch.UntypedStorage:
        if next(self.refused, False):
            raise torch.OutOfMemoryError("injected: out of memory")
        return super().allocate(num_bytes)


@pytest.mark.parametrize("number", range(10))
@pytest.mark.parametrize("window_units", [0, 8])
def test_device_without_room_once(window_units: int, number: int) -> None:
    """For what is fetched ahead, perhaps together with others, or for what is needed now."""
    offloads = Offloads(device := Full())
    x = leaf_on(device.torch_device)
    wanted = gradient_of(chain(x, IN_BATCHES), x)
    offloads.learn(lambda: chain(x, IN_BATCHES), window_units=window_units)
    with offloads(window_units=window_units):
        y = chain(x, IN_BATCHES)
    assert offloads.follows
    device.refused = iter([False] * number + [True])

    assert_same_bits([gradient_of(y, x)], [wanted])
    del y
    offloads.assert_nothing_is_left()


def test_device_without_any_room_raises_the_original_error_with_a_hint() -> None:
    offloads = Offloads(device := Full())
    x = leaf_on(device.torch_device)
    wanted = gradient_of(chain(x, [1] * 6), x)
    offloads.learn(lambda: chain(x, [1] * 6))
    with offloads():
        y = chain(x, [1] * 6)
    assert offloads.follows
    device.refused = iter([True] * 100)

    with pytest.raises(torch.OutOfMemoryError, match="injected: out of memory") as caught:
        y.sum().backward(retain_graph=True)
    (note,) = caught.value.__notes__
    assert f'no room on the device for 0.00 MiB that CPUOffload (tag "{TAG}") had moved to the host' in note
    device.refused = iter(())
    assert_same_bits([gradient_of(y, x)], [wanted])


def test_host_memory_that_is_short_for_a_moment(offloads: Offloads, monkeypatch: pytest.MonkeyPatch) -> None:
    x, follows = leaf_on(offloads.device.torch_device), []
    wanted = gradient_of(chain(x, [1] * 6), x)
    offloads.learn(lambda: chain(x, [1] * 6))
    (window,) = offload_states[TAG].windows()
    take = window.arena.take

    def refuse(num_bytes: int) -> Any:
        monkeypatch.setattr(window.arena, "take", take)
        raise HostMemoryError("injected: no room")

    monkeypatch.setattr(window.arena, "take", refuse)
    for _ in range(8):
        with offloads():
            y = chain(x, [1] * 6)
        follows.append(offloads.follows)
        assert_same_bits([gradient_of(y, x)], [wanted])
        del y
    assert follows == [False] * 3 + [True] * 5


def test_peek_ahead_of_the_backward(offloads: Offloads) -> None:
    """What is fetched for it is among what the schedule fetches later with others."""
    x = leaf_on(offloads.device.torch_device)
    wanted = gradient_of(chain(x, IN_BATCHES), x)
    for place in range(11):
        offloads.learn(lambda: chain(x, IN_BATCHES), window_units=8)
        with offloads(window_units=8):
            y = chain(x, IN_BATCHES)
        assert offloads.follows
        node = y.grad_fn
        for _ in range(place):
            while type(node).__name__ != "SinBackward0":
                node = node.next_functions[0][0]
            last, node = node, node.next_functions[0][0]
        if place:
            _ = last._saved_self
        assert_same_bits([gradient_of(y, x)], [wanted])
        del y, node
        memkit.reset(TAG)


# Writes


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("ratio", [1.0, 0.5, 0.0])
def test_write_to_what_was_saved_is_autograds_own_error(offloads: Offloads, ratio: float, place: int) -> None:
    x = leaf_on(offloads.device.torch_device)

    def forward(is_written: bool) -> Tensor:
        y, kept = x, []
        for _ in range(4):
            y = y.clone()
            kept.append(y)
            y = y.sin()
        if is_written:
            kept[place].add_(1)
        return y

    with pytest.raises(RuntimeError, match="modified by an inplace operation") as plain:
        forward(True).sum().backward()
    for _ in range(3):
        with offloads(ratio):
            y = forward(False)
        gradient_of(y, x)
        del y
    with offloads(ratio):
        y = forward(True)
    with pytest.raises(RuntimeError) as found:
        y.sum().backward()
    del y
    assert _unhinted(str(found.value)) == _unhinted(str(plain.value))
    del found, plain  # they hold the frames, and so the graph


def _unhinted(message: str) -> str:
    """Return autograd's message up to which output of which node it was, which hooks are not told."""
    return message.partition("]")[0]


# Ends


@pytest.mark.parametrize("options", SETTINGS)
def test_backward_fails_and_is_run_again(offloads: Offloads, options: dict[str, Any]) -> None:
    x = leaf_on(offloads.device.torch_device)
    wanted = gradient_of(chain(x, IN_BATCHES), x)
    for place in range(10):
        y = learned(offloads, lambda: chain(x, IN_BATCHES), **options)
        node = y.grad_fn
        for _ in range(2 * place):
            node = node.next_functions[0][0]

        def fail(_: Any) -> None:
            raise KeyError

        handle = node.register_prehook(fail)
        with pytest.raises(KeyError) as caught:
            y.sum().backward(retain_graph=True)
        handle.remove()
        caught.value.__traceback__ = None
        assert_same_bits([gradient_of(y, x)], [wanted])
        del y, node, handle
        offloads.assert_nothing_is_left()


@pytest.mark.parametrize("options", SETTINGS)
def test_host_memory_of_a_tag_that_was_reset_goes_back_with_the_backward(offloads: Offloads, options: dict[str, Any]) -> None:
    x = leaf_on(offloads.device.torch_device)
    y = learned(offloads, lambda: chain(x, IN_BATCHES), **options)
    (window,) = offload_states[TAG].windows()
    memkit.reset(TAG)
    assert window.arena.held_bytes > 0

    gradient_of(y, x)

    assert window.scheduled is None
    assert window.arena.in_use_bytes == 0
    if isinstance(offloads.device, CudaDevice):  # what its copies may still read goes with the next call
        offloads.device.synchronize()
        window.settle()
    assert window.arena.held_bytes == 0


def test_many_steps_leave_what_three_did(offloads: Offloads) -> None:
    x, left, num_objects = leaf_on(offloads.device.torch_device), [], []
    gc.collect()
    gc.disable()
    try:
        for number in range(60):
            with offloads(window_units=2):
                y = chain(x, IN_BATCHES)
            gradient_of(y, x)
            del y
            if number in (9, 59):
                offloads.assert_nothing_is_left()
                stats = memkit.stats(TAG)
                (window,) = offload_states[TAG].windows()
                left.append(
                    (
                        stats.host_held_bytes,
                        stats.num_pins,
                        stats.host_peak_bytes,
                        len(window.traces),
                        len(window.live()),
                    )
                )
                num_objects.append(len(gc.get_objects()))
    finally:
        gc.enable()
    assert left[0] == left[1]
    assert num_objects[1] - num_objects[0] < 25  # of fifty steps, each of which would leave one or more
