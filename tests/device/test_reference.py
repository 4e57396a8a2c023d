"""Each way to forget a wait is seen by the reference device, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memkit.core.tensors import byte_view
from memkit.device import ReferenceDevice, Stream
from memkit.errors import RaceError


@pytest.fixture
def device() -> ReferenceDevice:
    return ReferenceDevice()


@pytest.fixture
def host(device: ReferenceDevice) -> Tensor:
    tensor = torch.zeros(8, dtype=torch.uint8)
    device.pin(tensor)
    return tensor


def _made(device: ReferenceDevice, value: int = 1) -> torch.UntypedStorage:
    storage = device.allocate(8)
    byte_view(storage).fill_(value)
    return storage


def _out(device: ReferenceDevice, storage: torch.UntypedStorage, host: Tensor) -> Stream:
    lane = device.new_stream("D2H")
    device.wait_event(lane, device.record_event())
    device.copy(host, byte_view(storage), lane)
    return lane


def test_copy_lands_only_when_something_waits(device: ReferenceDevice, host: Tensor) -> None:
    storage = _made(device)
    lane = _out(device, storage, host)

    before = host.tolist()
    device.wait_event(device.current_stream(), device.record_event(lane))

    assert before == [255] * 8
    assert host.tolist() == [1] * 8


def test_event_recorded_before_the_copy_does_not_cover_it(device: ReferenceDevice, host: Tensor) -> None:
    storage, lane = _made(device), device.new_stream("D2H")
    device.wait_event(lane, device.record_event())
    early = device.record_event(lane)
    device.copy(host, byte_view(storage), lane)

    device.wait_event(device.current_stream(), early)

    assert host.tolist() == [255] * 8
    device.synchronize()


def test_lane_that_waits_for_a_lane_drags_it_along(device: ReferenceDevice, host: Tensor) -> None:
    storage = _made(device, 3)
    out = _out(device, storage, host)
    back, destination = device.new_stream("H2D"), device.allocate(8)
    device.wait_event(back, device.record_event())
    device.wait_event(back, device.record_event(out))
    device.copy(byte_view(destination), host, back)

    device.wait_event(device.current_stream(), device.record_event(back))

    assert byte_view(destination).tolist() == [3] * 8


def test_fetch_into_memory_that_was_just_allocated_raises(device: ReferenceDevice, host: Tensor) -> None:
    lane, early = device.new_stream("H2D"), device.record_event()
    device.wait_event(lane, early)
    destination = device.allocate(8)

    with pytest.raises(RaceError, match='"H2D" writes to a storage'):
        device.copy(byte_view(destination), host, lane)


def test_fetch_before_its_own_copy_out_raises(device: ReferenceDevice, host: Tensor) -> None:
    storage = _made(device)
    out, back = _out(device, storage, host), device.new_stream("H2D")
    destination = device.allocate(8)
    device.wait_event(back, device.record_event())

    with pytest.raises(RaceError, match='"H2D" reads host memory without waiting for its writer, "D2H"'):
        device.copy(byte_view(destination), host, back)

    device.wait_event(device.current_stream(), device.record_event(out))


def test_span_reused_before_its_reader_raises(device: ReferenceDevice, host: Tensor) -> None:
    first, second = _made(device, 1), _made(device, 2)
    out, back = _out(device, first, host), device.new_stream("H2D")
    destination = device.allocate(8)
    device.wait_event(back, device.record_event(out))
    device.wait_event(back, device.record_event())
    device.copy(byte_view(destination), host, back)

    with pytest.raises(RaceError, match='"D2H" writes to host memory without waiting for its reader, "H2D"'):
        device.copy(host[:4], byte_view(second)[:4], out)

    device.synchronize()


def test_storage_freed_while_a_lane_reads_it_is_a_race(device: ReferenceDevice, host: Tensor) -> None:
    storage = _made(device)
    _out(device, storage, host)

    del storage

    with pytest.raises(RaceError, match='freed while "D2H" may still use it'):
        device.record_event()


def test_freed_span_is_poisoned(device: ReferenceDevice, host: Tensor) -> None:
    device.note_host_free(host)

    assert host.tolist() == [255] * 8


def test_freed_span_that_a_copy_still_reads_keeps_its_bytes(device: ReferenceDevice, host: Tensor) -> None:
    destination, lane = device.allocate(8), device.new_stream("H2D")
    device.wait_event(lane, device.record_event())
    device.copy(byte_view(destination), host, lane)

    device.note_host_free(host)
    device.wait_event(device.current_stream(), device.record_event(lane))

    assert byte_view(destination).tolist() == [0] * 8


def test_both_ends_on_one_side_are_refused(device: ReferenceDevice) -> None:
    with pytest.raises(ValueError, match="between the device and pinned host memory"):
        device.copy(byte_view(_made(device)), byte_view(_made(device)), device.current_stream())


def test_seed_lands_copies_by_chance(host: Tensor) -> None:
    landed = set()
    for seed in range(20):
        device = ReferenceDevice(seed=seed)
        device.pin(host)
        storage = _made(device)
        lane = _out(device, storage, host)
        device.record_event()
        landed.add(tuple(host.tolist()))
        device.wait_event(device.current_stream(), device.record_event(lane))

    assert landed == {(1,) * 8, (255,) * 8}


def test_a_stream_that_becomes_current_catches_up(device: ReferenceDevice, host: Tensor) -> None:
    storage = _made(device)
    lane = _out(device, storage, host)

    with device.on_stream(lane):
        assert host.tolist() == [1] * 8
    device.wait_event(device.current_stream(), device.record_event(lane))


def test_landing_is_not_seen_by_modes(device: ReferenceDevice, host: Tensor) -> None:
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            device.record_event()  # as who is asked for an op's time does
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []
    storage = _made(device)
    _out(device, storage, host)
    with Seen():
        device.synchronize()

    assert host.tolist() == [1] * 8
    assert seen == []


# Which part of host memory a copy has touched, where copies of several sizes follow each other


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
