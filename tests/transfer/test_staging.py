"""Copies from and to host memory that the system did not pin: through staging buffers, and without any."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from memkit.core.tensors import byte_view
from memkit.device import CpuDevice, CudaDevice, Device, Event, ReferenceDevice, Stream
from memkit.errors import HostMemoryError
from memkit.transfer import Arena, Lanes, host_memory
from memkit.transfer.host_memory import PromisedEvent, Span
from memkit.transfer.lanes import Transfer
from tests.gpus import ON_GPU
from tests.refusing import PinLimit

PAGE = 2 * 2**20
CHUNK = 4096
LIMITS = {"staged": 4 * PAGE, "pageable": 0}
"""How many bytes the system pins: four buffers of a page, or nothing."""


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "CHUNK_BYTES", CHUNK)


@pytest.fixture(params=["late", pytest.param("seed 0", marks=pytest.mark.slow), *ON_GPU])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    if request.param == "cuda":
        yield CudaDevice(torch.device("cuda"))
        return
    device = ReferenceDevice(seed=None if request.param == "late" else int(request.param.split()[1]))
    yield device
    device.synchronize()
    assert not device.races


@pytest.fixture(params=LIMITS)
def limit(request: pytest.FixtureRequest, device: Device, monkeypatch: pytest.MonkeyPatch) -> PinLimit:
    return PinLimit(device, monkeypatch, LIMITS[request.param])


class Case:
    """An arena that the system pins too little for, and spans of it."""

    def __init__(self, device: Device, *, num_bytes: int = 5 * CHUNK + 7) -> None:
        self.device, self.lanes = device, Lanes(device)
        self.arena = Arena(device, must_pin=False)
        self.spans = self.arena.take_pinned_as_one([num_bytes] * 5)
        assert self.arena.refusal is not None

    def fill(self, value: int) -> None:
        for number, span in enumerate(self.spans):
            span.whole.copy_(content(span, value + number))

    def new_storage(self, value: int | None = None) -> torch.UntypedStorage:
        """Return a storage as large as a span, with the content that `value` stands for."""
        storage = self.device.allocate(self.spans[0].num_bytes)
        if value is not None:
            byte_view(storage).copy_(content(self.spans[0], value))
            self.device.note_written(storage, 0)
        return storage

    def copy_back(self, span: Span, storage: torch.UntypedStorage, *after: Event) -> Transfer:
        return self.lanes.copy_back(span, storage, after=(self.device.record_event(), *after))

    def copy_out(self, storage: torch.UntypedStorage, span: Span) -> Transfer:
        return self.lanes.copy_out(storage, span, after=self.device.record_event())

    def assert_holds(self, storage: torch.UntypedStorage, value: int) -> None:
        self.device.note_read(storage)
        assert torch.equal(byte_view(storage).cpu(), content(self.spans[0], value))

    def wait(self, *transfers: Transfer) -> None:
        for transfer in transfers:
            self.device.wait_event(self.device.current_stream(), transfer.done)

    def close(self) -> None:
        self.arena.drain()
        self.device.synchronize()
        for span in self.spans:
            self.arena.give(span)
        self.arena.close()
        assert self.arena.held_bytes == 0
        assert not staging_threads()


def content(span: Span, value: int) -> Tensor:
    """Return bytes that differ from chunk to chunk, and for each value."""
    return (torch.arange(span.num_bytes) // 64 * 7 + value * 31).remainder(251).to(torch.uint8)


def staging_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "memkit-staging" in thread.name]


class Gate:
    """Holds back the copies of a device, which staging threads ask for."""

    def __init__(self, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.num_waiting = threading.Event(), threading.Semaphore(0)
        for name in ("copy", "copy_pageable"):
            monkeypatch.setattr(device, name, self._gated(getattr(device, name)))

    def _gated(self, copy: Any) -> Any:
        def gated(destination: Tensor, source: Tensor, stream: Stream) -> None:
            self.num_waiting.release()
            assert self.opened.wait(30)
            copy(destination, source, stream)

        return gated


@pytest.mark.usefixtures("limit")
def test_what_went_out_comes_back(device: Device) -> None:
    case = Case(device)
    back = []
    for number, span in enumerate(case.spans):
        source, target = case.new_storage(number), case.new_storage()
        out = case.copy_out(source, span)
        back.append((target, out, case.copy_back(span, target, out.done)))
        case.wait(out)
        del source

    for number, (target, _, transfer) in enumerate(back):
        case.wait(transfer)
        case.assert_holds(target, number)
    del target, back
    case.close()


@pytest.mark.usefixtures("limit")
def test_what_is_read_is_overwritten_only_then(device: Device) -> None:
    case = Case(device)
    case.fill(1)
    span, target, source = case.spans[0], case.new_storage(), case.new_storage(2)

    first = case.copy_back(span, target)
    second = case.lanes.copy_out(source, span, after=first.done)
    case.wait(first, second)

    case.assert_holds(target, 1)
    device.synchronize(second.done)
    assert torch.equal(span.whole, content(span, 2))
    del target
    case.close()


@pytest.mark.usefixtures("limit")
def test_copies_wait_for_the_work_before(device: Device) -> None:
    case = Case(device)
    storage = case.new_storage(1)

    if isinstance(device, CudaDevice):
        torch.cuda._sleep(200_000_000)
    byte_view(storage).add_(1)
    device.note_written(storage, 1)
    out = case.copy_out(storage, case.spans[0])
    device.synchronize(out.done)

    assert torch.equal(case.spans[0].whole, content(case.spans[0], 1) + 1)
    case.close()


@pytest.mark.slow
@pytest.mark.usefixtures("limit")
def test_several_pieces_are_one_copy(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "SMALLEST_SEGMENT_BYTES", PAGE)
    case = Case(device)
    span = case.arena.take(3 * PAGE + 5)
    source, target = device.allocate(span.num_bytes), device.allocate(span.num_bytes)
    byte_view(source).copy_(content(span, 1))
    device.note_written(source, 0)

    out = case.copy_out(source, span)
    back = case.copy_back(span, target, out.done)
    case.wait(out, back)

    assert len(span.pieces) > 1
    assert span.staging is not None
    device.note_read(target)
    assert torch.equal(byte_view(target).cpu(), content(span, 1))
    del source, target
    case.spans.append(span)
    case.close()


@pytest.mark.usefixtures("limit")
def test_asking_for_a_copy_does_not_wait_for_it(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(device)
    case.fill(1)
    storage, gate = case.new_storage(), Gate(device, monkeypatch)

    transfer = case.copy_back(case.spans[0], storage)
    gate.num_waiting.acquire()
    is_reached_before = transfer.done.is_reached()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(case.wait, transfer)
        assert not waiting.done()
        gate.opened.set()
        waiting.result(30)
    end = device.record_event()
    device.synchronize()

    assert (is_reached_before, transfer.done.is_reached()) == (False, True)
    assert transfer.started.elapsed_s(end) >= 0
    case.assert_holds(storage, 1)
    del storage
    case.close()


@pytest.mark.usefixtures("limit")
def test_host_waits_for_copies_that_were_asked_for(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(device)
    storages, gate = [case.new_storage(number) for number in range(len(case.spans))], Gate(device, monkeypatch)
    transfers = [case.copy_out(storage, span) for span, storage in zip(case.spans, storages, strict=True)]
    threading.Timer(0.05, gate.opened.set).start()

    case.arena.drain()
    device.synchronize()

    assert all(transfer.done.is_reached() for transfer in transfers)
    for number, span in enumerate(case.spans):
        assert torch.equal(span.whole, content(span, number))
    case.close()


def test_device_that_runs_at_once_waits_for_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    device = CpuDevice()
    PinLimit(device, monkeypatch, 0)
    case = Case(device)
    case.fill(5)
    storage = case.new_storage()

    case.wait(case.copy_back(case.spans[0], storage))

    case.assert_holds(storage, 5)
    out = case.copy_out(storage, case.spans[1])
    device.synchronize(out.done)
    assert torch.equal(case.spans[1].whole, content(case.spans[1], 5))
    case.close()


@pytest.mark.usefixtures("limit")
@pytest.mark.parametrize("is_out", [False, True])
def test_error_in_a_thread_is_raised_where_it_is_waited_for(is_out: bool, device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(device)
    case.fill(1)
    storage = case.new_storage(9)
    num_left, num_users = [2], torch._C._storage_Use_Count(storage._cdata)

    def failing(copy: Any) -> Any:
        def copy_twice(destination: Tensor, source: Tensor, stream: Stream) -> None:
            num_left[0] -= 1
            if num_left[0] < 0 or not device_is_staged:
                raise RuntimeError("the link is down")
            copy(destination, source, stream)

        return copy_twice

    device_is_staged = bool(case.arena._buffer_spans)
    with monkeypatch.context() as patch:
        for name in ("copy", "copy_pageable"):
            patch.setattr(device, name, failing(getattr(device, name)))
        failed = case.copy_out(storage, case.spans[0]) if is_out else case.copy_back(case.spans[0], storage)
        behind = case.copy_back(case.spans[1], storage, failed.done)
        for transfer in (failed, behind, failed):
            with pytest.raises(RuntimeError, match="the link is down"):
                case.wait(transfer)
        with pytest.raises(RuntimeError, match="the link is down"):
            device.synchronize(failed.done)
    assert failed.done.is_reached()
    assert torch._C._storage_Use_Count(storage._cdata) == num_users

    case.wait(case.copy_back(case.spans[2], storage))
    case.assert_holds(storage, 3)
    del storage
    case.close()


@pytest.mark.usefixtures("limit")
def test_storage_that_is_gone_is_an_error(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(device)
    gate = Gate(device, monkeypatch)
    kept = case.new_storage()
    first = case.copy_back(case.spans[0], kept)
    transfer = case.copy_back(case.spans[1], case.new_storage())
    gate.opened.set()

    with pytest.raises(AssertionError, match="freed before"):
        case.wait(transfer)
    case.wait(first)
    del kept
    case.close()


@pytest.mark.parametrize(
    ("options", "size", "message"),
    [
        ({}, 2, "the test's limit"),
        ({}, 40, "the test's limit"),
        ({"limit_bytes": 2 * PAGE, "must_pin": False}, 3, r"host_limit_bytes leaves 4\.00 MiB"),
    ],
)
def test_memory_that_must_be_pinned_or_is_too_short_is_not_replaced(
    options: dict[str, Any], size: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = ReferenceDevice()
    limit = PinLimit(device, monkeypatch, PAGE)
    host = Arena(device, **options)

    with pytest.raises(HostMemoryError, match=message):
        host.take(size * PAGE) if size > 10 else host.take_pinned_as_one([PAGE] * size)

    assert (host.refusal, host.held_bytes, limit.pinned) == (None, 0, {})


@pytest.mark.parametrize("is_pageable", [False, True])
def test_says_what_was_not_pinned(is_pageable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device = ReferenceDevice()
    PinLimit(device, monkeypatch, LIMITS["pageable" if is_pageable else "staged"])

    how = (
        "copies go straight from and to it, several times slower, since 4 buffers of 4.00 KiB could not be pinned either"
        if is_pageable
        else "copies go through 4 buffers of 4.00 KiB, and the host copies each byte once more"
    )
    assert Case(device, num_bytes=2**20).arena.refusal == (
        "the system did not pin 5.00 MiB of host memory (the test's limit on locked memory), so it is ordinary memory: "
        f"{how}. Raise the limit on locked memory (ulimit -l; a container's --ulimit memlock; memory= in .wslconfig), "
        "or offload less."
    )


def test_buffers_are_no_larger_than_what_goes_through_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "CHUNK_BYTES", 16 * PAGE)
    device = ReferenceDevice()
    limit = PinLimit(device, monkeypatch, LIMITS["staged"])

    case = Case(device, num_bytes=5000)

    assert sorted(limit.pinned.values()) == [PAGE] * 4
    case.close()


def test_buffers_are_made_for_the_largest_span(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "CHUNK_BYTES", 16 * PAGE)
    device = ReferenceDevice()
    limit = PinLimit(device, monkeypatch, 2 * PAGE)
    host = Arena(device, must_pin=False)
    large = host.take_pinned_as_one([2 * PAGE])

    small = host.take_pinned_as_one([5000])

    assert host.refusal is not None
    assert "pin 4.88 KiB of host memory" in host.refusal
    assert "4 buffers of 4.00 MiB could not be pinned" in host.refusal
    for span in (*large, *small):
        host.give(span)
    host.close()
    assert not limit.pinned


def test_buffers_yield_to_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    device = ReferenceDevice()
    limit = PinLimit(device, monkeypatch, LIMITS["staged"])
    host = Arena(device, limit_bytes=6 * PAGE, must_pin=False)

    host.take_pinned_as_one([PAGE] * 5)

    assert host.refusal is not None
    assert "could not be pinned either" in host.refusal
    assert limit.pinned == {}


def test_close_with_copies_under_way_waits_for_them(device: Device, limit: PinLimit, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(5):
        case = Case(device)
        case.fill(1)
        storages = [case.new_storage() for _ in case.spans]
        with monkeypatch.context() as patch:
            gate = Gate(device, patch)
            transfers = [case.copy_back(span, storage) for span, storage in zip(case.spans, storages, strict=True)]
            threading.Timer(0.01, gate.opened.set).start()
            case.close()

        case.wait(*transfers)
        for number, storage in enumerate(storages):
            case.assert_holds(storage, 1 + number)
        del storages, storage
        assert not limit.pinned


def test_event_is_not_taken_before_it_was_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    device = ReferenceDevice()
    PinLimit(device, monkeypatch, 0)
    case = Case(device)
    storage = case.new_storage()
    transfer = case.copy_back(case.spans[0], storage)

    monkeypatch.setattr(PromisedEvent, "recorded", lambda self: self)
    with pytest.raises(AssertionError):
        case.wait(transfer)

    monkeypatch.undo()
    case.wait(transfer)
    del storage
    case.close()
