"""A forgotten wait of any kind does not go unnoticed on the reference device: the tests that pass on it mean something. Also
storages that several streams use, or that have several version counters."""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager, nullcontext, suppress

import pytest
import torch
from torch import Tensor

import memkit
from memkit.activations.saved.state import offload_states
from memkit.device import Device, Event, ReferenceDevice, Stream
from memkit.device.reference import ReferenceEvent, ReferenceStream
from memkit.errors import RaceError
from tests.activations.cases import assert_same_bits
from tests.activations.conftest import Offload


class Forgetful(ReferenceDevice):
    """Leaves out every wait of one stream for another."""

    def __init__(self, waiting: str, awaited: str) -> None:
        super().__init__()
        self._forgotten = (waiting, awaited)
        self.num_forgotten = 0

    def wait_event(self, stream: Stream, event: Event) -> None:
        assert isinstance(stream, ReferenceStream)
        assert isinstance(event, ReferenceEvent)
        if (stream.name, event.stream.name) == self._forgotten:
            self.num_forgotten += 1
        else:
            super().wait_event(stream, event)


def _train(device: ReferenceDevice) -> None:
    """Three steps after a graph that was left in the middle of its backward, then a forward on another stream."""
    x = torch.randn(64, requires_grad=True)
    for kind in ("abandoned", "whole", "whole", "whole"):
        with memkit.CPUOffload(1.0, "races", min_bytes=0, window_bytes=3 * x.nbytes, device=device):
            middle = x
            for _ in range(12):
                middle = middle.sin()
            y = middle
            for _ in range(4):
                y = y.exp().sin()
        if kind == "abandoned":
            torch.autograd.grad(y.sum(), middle)
            del middle, y
        else:
            y.sum().backward()
    with device.on_stream(device.new_stream("side")):
        first = _forward(device, x)
        forward_done = device.record_event()
        second = _forward(device, x)  # lets go of the first one's copies under way
        second_done = device.record_event()
    device.wait_event(device.current_stream(), forward_done)
    first.sum().backward()
    device.wait_event(device.current_stream(), second_done)
    second.sum().backward()
    device.synchronize()


def _forward(device: ReferenceDevice, x: Tensor) -> Tensor:
    with memkit.CPUOffload(1.0, "streams", min_bytes=0, window_bytes=3 * x.nbytes, device=device):
        for _ in range(8):
            x = x.sin()
    return x


def test_without_a_forgotten_wait_nothing_raises() -> None:
    _train(ReferenceDevice())


@pytest.mark.parametrize(
    ("waiting", "awaited", "message"),
    [
        ("D2H", "compute", '"D2H" reads a storage without waiting for its writer, "compute"'),  # a copy before its producer
        ("compute", "H2D", '"compute" reads a storage without waiting for its writer, "H2D"'),  # a consumer before its copy
        ("compute", "D2H", "."),  # bytes let go before their copy is done
        ("H2D", "compute", "."),  # a fetch into memory that others may still use
        ("H2D", "D2H", "."),  # a fetch before the bytes are in host memory
        ("D2H", "H2D", "."),  # a span of host memory reused before its reader
    ],
)
def test_forgotten_wait_raises(waiting: str, awaited: str, message: str) -> None:
    device = Forgetful(waiting, awaited)

    with pytest.raises(RaceError, match=message):
        _train(device)

    assert device.num_forgotten
    with suppress(RaceError):  # the forgotten wait may show once more
        memkit.reset("streams")
    with suppress(RaceError):
        memkit.reset("races")


# Streams and version counters


@pytest.mark.parametrize("window_bytes", [0, None])
def test_slices_of_one_storage_with_counters_of_their_own(
    window_bytes: int | None, device: Device, offloading: Offload
) -> None:
    def run(context: AbstractContextManager[object]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        first, second, weight = (torch.randn(64, generator=generator).to(device.torch_device) for _ in range(3))
        weight.requires_grad_()
        storage = torch.zeros(128, device=device.torch_device)
        with context:
            one = storage.data[:64]
            one.copy_(first)
            product = weight * one
            other = storage.data[64:]
            other.copy_(second)
            product = product + 2 * (weight * other)
            del one, other, storage
            product = product.exp()
        product.sum().backward()
        return [product.detach(), weight.grad]

    assert_same_bits(run(offloading(1.0, "counters", window_bytes=window_bytes)), run(nullcontext()))


def test_a_storage_saved_on_two_streams_is_let_go_when_both_are_done(device: Device, offloading: Offload) -> None:
    compute, other = device.current_stream(), device.new_stream("other")
    x, w = (torch.randn(64, 64, device=device.torch_device).requires_grad_() for _ in range(2))
    with offloading(1.0, "streams", window_bytes=0):
        device.wait_event(other, device.record_event(compute))
        with device.on_stream(other):
            hidden = (x * 2).exp()
        device.wait_event(compute, device.record_event(other))
        product = hidden * w
        device.note_read(hidden.untyped_storage())
        del hidden
        product = product.exp()

    device.wait_event(other, device.record_event(compute))  # as autograd does where a graph has several streams
    product.sum().backward()
    device.synchronize()  # raises if something was freed while a stream may still use it


def test_reset_while_copies_are_under_way_gives_host_memory_back_once_they_are_done(
    device: Device, offloading: Offload, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(64, 64, device=device.torch_device).requires_grad_()
    with offloading(1.0, "back", window_bytes=2**20):
        y = (x * 2).exp().exp()
    arena = offload_states["back"].windows()[0].arena

    del y
    with monkeypatch.context() as under_way:
        under_way.setattr(ReferenceEvent, "is_reached", lambda _: False)
        memkit.reset("back")
    gc.collect()
    device.synchronize()
    memkit.reset("another")

    assert arena.held_bytes == 0
