"""Which part of host memory a copy has touched, where copies of several sizes follow each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from memkit.device import ReferenceDevice, Stream
from memkit.errors import RaceError
from memkit.storages import byte_view


@pytest.fixture
def device() -> ReferenceDevice:
    return ReferenceDevice()


@pytest.fixture
def host(device: ReferenceDevice) -> Tensor:
    tensor = torch.zeros(8, dtype=torch.uint8)
    device.pin(tensor)
    return tensor


def _lane(device: ReferenceDevice, name: str) -> Stream:
    """Return a stream that comes after all that was done so far, and never waits again."""
    lane = device.new_stream(name)
    device.synchronize()
    return lane


def _write(device: ReferenceDevice, span: Tensor, lane: Stream) -> None:
    storage = device.allocate(span.nbytes)
    device.wait_event(lane, device.record_event())
    device.copy(span, byte_view(storage), lane)
    device.synchronize()


def _read(device: ReferenceDevice, span: Tensor, lane: Stream) -> torch.UntypedStorage:
    storage = device.allocate(span.nbytes)
    device.wait_event(lane, device.record_event())
    device.copy(byte_view(storage), span, lane)
    return storage


def _is_race(device: ReferenceDevice, span: Tensor, *, by: Stream) -> bool:
    """Tell whether a write on a stream that has waited for nothing is one."""
    storage = device.allocate(span.nbytes)
    device.wait_event(by, device.record_event())
    try:
        device.copy(span, byte_view(storage), by)
    except RaceError:
        return True
    finally:
        device.synchronize()
    return False


@pytest.mark.parametrize("span", [slice(0, 4), slice(2, 6), slice(4, 8)])
@pytest.mark.parametrize("position", range(8))
@pytest.mark.parametrize("is_written", [False, True])
def test_reader_of_a_part_is_waited_for_there_alone(
    device: ReferenceDevice, host: Tensor, span: slice, position: int, is_written: bool
) -> None:
    """As where a large span is freed, a small one takes a part of it, and others the rest."""
    _write(device, host, _lane(device, "first"))
    if is_written:
        _write(device, host[span], _lane(device, "second"))
    reader, writer = _lane(device, "reader"), _lane(device, "writer")
    held = _read(device, host[span], reader)

    assert _is_race(device, host[position : position + 1], by=writer) == (span.start <= position < span.stop)
    del held


@pytest.mark.parametrize("position", range(8))
def test_reader_of_all_is_waited_for_but_where_overwritten(device: ReferenceDevice, host: Tensor, position: int) -> None:
    _write(device, host, _lane(device, "first"))
    reader, second, writer = _lane(device, "reader"), _lane(device, "second"), _lane(device, "writer")
    held = _read(device, host, reader)
    device.wait_event(second, device.record_event(reader))
    source = device.allocate(4)
    device.wait_event(second, device.record_event())
    device.copy(host[2:6], byte_view(source), second)
    device.wait_event(writer, device.record_event(second) if 2 <= position < 6 else device.record_event())

    assert _is_race(device, host[position : position + 1], by=writer) == (position not in range(2, 6))
    del held, source


@pytest.mark.parametrize("is_asked", [True, False])
def test_what_the_host_has_seen_to_be_done_needs_no_wait(is_asked: bool, device: ReferenceDevice, host: Tensor) -> None:
    reader, writer = _lane(device, "reader"), _lane(device, "writer")
    _write(device, host[:4], writer)
    _storage = _read(device, host[:4], reader)
    done = device.record_event(reader)
    device._land(done.stream, done.position)  # which nobody has waited for
    if is_asked:
        assert done.is_reached()

    assert _is_race(device, host[:4], by=writer) is not is_asked
