"""A forgotten wait of any kind does not go unnoticed on the reference device: the tests that pass on it mean something."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from torch import Tensor

import memkit
from memkit.device import Event, ReferenceDevice, Stream
from memkit.device.clocks import ReferenceEvent, ReferenceStream
from memkit.errors import RaceError


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
    ("waiting", "awaited"),
    [
        ("D2H", "compute"),  # a copy before its producer
        ("compute", "H2D"),  # a consumer before the copy that it needs
        ("compute", "D2H"),  # bytes let go before their copy is done
        ("H2D", "compute"),  # a fetch into memory that others may still use
        ("H2D", "D2H"),  # a fetch before the bytes are in host memory
        ("D2H", "H2D"),  # a span of host memory reused before its reader
    ],
)
def test_forgotten_wait_raises(waiting: str, awaited: str) -> None:
    device = Forgetful(waiting, awaited)

    with pytest.raises(RaceError):
        _train(device)

    assert device.num_forgotten
    with suppress(RaceError):  # the forgotten wait may show once more
        memkit.reset("streams")
    with suppress(RaceError):
        memkit.reset("races")
