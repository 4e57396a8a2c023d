"""Copies that take turns on two streams, so that what else is copied to the host need not wait for all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import memkit
from memkit.activations.offloading.scheduled import ScheduledForward
from memkit.activations.saved.state import offload_states
from memkit.device import CudaDevice, Device, ReferenceDevice
from memkit.device.base import Piece
from memkit.errors import RaceError
from memkit.plan import copies
from tests.activations.chains import chain, leaf_on
from tests.activations.scheduled_steps import TAG, Offloads, assert_steps_are_plain, gradient_of, offloads

__all__ = ["offloads"]

SIZES = [1] * 8


@pytest.fixture(autouse=True)
def _one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each storage have a copy of its own."""
    monkeypatch.setattr(copies, "BATCH_BYTES", 1)


def _scheduled() -> ScheduledForward:
    (window,) = offload_states[TAG].windows()
    assert window.scheduled is not None
    return window.scheduled


def _waiting(device: Device, x: Tensor) -> Tensor:
    """A forward at whose end the host waits for the device, as `item()` has it do."""
    y = chain(x, SIZES)
    device.synchronize()
    return y


def _take_steps(offloads: Offloads, forward: Callable[[], Tensor], x: Tensor, window_units: int = 0) -> Tensor:
    """Return what the fourth forward has made."""
    for _ in range(3):
        with offloads(0.5, window_units):
            y = forward()
        gradient_of(y, x)
    with offloads(0.5, window_units):
        return forward()


def test_steps_of_copies_by_turns_are_plain(offloads: Offloads) -> None:
    x = leaf_on(offloads.device.torch_device)

    assert_steps_are_plain(offloads, lambda _: _waiting(offloads.device, x), x, ratio=0.5)


def test_copies_take_turns_once_they_were_over_when_the_forward_was(offloads: Offloads) -> None:
    x = leaf_on(offloads.device.torch_device)
    y = _take_steps(offloads, functools.partial(_waiting, offloads.device, x), x)

    made, (first, second) = _scheduled().placement, _window_streams()
    assert made is not None

    assert _scheduled().schedule.takes_turns
    assert len(made.out) > 2
    assert [batch.stream for batch in made.out] == [(first, second)[number % 2] for number in range(len(made.out))]
    assert [batch.ahead for batch in made.out] == [None, *made.out[:-1]]
    assert all(batch.ahead is None for back in made.back for batch in back)
    gradient_of(y, x)


def _window_streams() -> tuple[object, object]:
    (window,) = offload_states[TAG].windows()
    return window.lanes.out_by_turns


def test_copies_go_one_after_the_other_where_the_forward_ends_before_them() -> None:
    device = ReferenceDevice()  # where no copy lands before something waits for it
    offloads, x = Offloads(device), leaf_on(device.torch_device)
    y = _take_steps(offloads, lambda: chain(x, SIZES), x, window_units=4)  # so that the last copy may come later

    assert not _scheduled().schedule.takes_turns
    assert {batch.stream for batch in _scheduled().out} == {_window_streams()[0]}
    gradient_of(y, x)
    del y
    offloads.assert_nothing_is_left()


@pytest.mark.parametrize("waits", [True, False])
def test_a_batch_waits_for_the_one_ahead(waits: bool) -> None:
    device = ReferenceDevice()
    first, second = device.new_stream("first"), device.new_stream("second")
    storage, made, host = device.allocate(4), device.allocate(4), torch.empty(4, dtype=torch.uint8)
    storage.fill_(7)
    device.pin(host)
    piece = Piece(0, 0, host, host.data_ptr(), 4)
    out = device.copy_batch(first, [piece], is_out=True)
    back = device.copy_batch(second, [piece], is_out=False, ahead=out if waits else None)

    out.start([storage])
    if waits:
        back.start([made])
        back.wait()
        out.wait()
        assert list(made) == [7] * 4
        device.synchronize()
    else:
        with pytest.raises(RaceError):
            back.start([made])


@pytest.mark.gpu
def test_a_value_that_is_read_back_does_not_wait_for_all_copies() -> None:
    device = CudaDevice(torch.device("cuda"))
    x = torch.ones(2**24, device="cuda", requires_grad=True)  # 64 MiB
    done = 0

    def forward(*, follows: bool) -> Tensor:
        nonlocal done
        y = x
        for _ in range(20):  # what leaves
            y = y.sin()
        y[0].item()
        if follows:
            done = sum(batch.done.is_reached() for batch in _scheduled().out)
        for _ in range(20):
            y = y.sin()
        device.synchronize()  # so that copies are over when the forward is
        return y

    for step in range(6):
        with memkit.CPUOffload(0.5, TAG, min_bytes=0, device=device):
            y = forward(follows=step == 5)
        if step == 5:
            assert _scheduled().schedule.takes_turns
        gradient_of(y, x)

    assert done < 10  # of 20, which take 24 ms
