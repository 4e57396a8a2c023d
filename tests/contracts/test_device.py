"""The promises of `memkit.device.Device` about streams, events and copies, on the reference device and on CUDA; and what each
real device tells of itself."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import memkit
from memkit.core.tensors import byte_view
from memkit.device import CudaDevice, Device, Event, ReferenceDevice, Stream, open_device
from memkit.errors import DeviceUnavailableError
from tests.activations.conftest import DEVICES, open_test_device
from tests.gpus import ON_GPU

MIB = 2**20


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Device:
    return open_test_device(request.param)


@pytest.fixture
def host(device: Device) -> Iterator[Tensor]:
    tensor = torch.zeros(4 * MIB, dtype=torch.uint8)
    device.pin(tensor)
    yield tensor
    device.synchronize()
    device.unpin(tensor)


def _filled(device: Device, value: int, num_bytes: int = 4 * MIB) -> torch.UntypedStorage:
    storage = device.allocate(num_bytes)
    byte_view(storage).fill_(value)
    device.note_written(storage, 0)
    return storage


def _delay(device: Device, stream: Stream) -> None:
    """Keep a stream of a real device busy, so that work that does not wait for it comes too early."""
    if isinstance(device, CudaDevice):
        with device.on_stream(stream):
            torch.cuda._sleep(200_000_000)


@pytest.mark.parametrize("is_pinned", [True, False])
def test_bytes_go_out_and_come_back(is_pinned: bool, device: Device, host: Tensor) -> None:
    """The host itself may use pageable memory as soon as the copy is made."""
    compute, out, back = device.current_stream(), device.new_stream("D2H"), device.new_stream("H2D")
    memory, copy = (host, device.copy) if is_pinned else (torch.zeros_like(host), device.copy_pageable)
    source = _filled(device, 7)

    _delay(device, compute)
    byte_view(source).add_(1)
    device.note_written(source, 1)
    device.wait_event(out, device.record_event(timed=False))
    copy(memory, byte_view(source), out)
    left = device.record_event(out, timed=False)
    if not is_pinned:
        assert memory.eq(8).all()
        memory.add_(1)
    device.wait_event(compute, left)
    del source
    destination = device.allocate(4 * MIB)
    device.wait_event(back, device.record_event(timed=False))
    device.wait_event(back, left)
    _delay(device, back)
    copy(byte_view(destination), memory, back)
    device.wait_event(compute, device.record_event(back, timed=False))
    device.note_read(destination)

    assert byte_view(destination).eq(8 if is_pinned else 9).all()


def test_lanes_run_in_order(device: Device, host: Tensor) -> None:
    lane = device.new_stream("D2H")
    first, second = _filled(device, 1), _filled(device, 2)

    device.wait_event(lane, device.record_event())
    device.copy(host, byte_view(first), lane)
    device.copy(host, byte_view(second), lane)
    device.wait_event(device.current_stream(), device.record_event(lane))
    device.synchronize()

    assert host.eq(2).all()


def test_equal_streams_are_the_same_queue(device: Device) -> None:
    stream = device.new_stream("side")

    assert device.current_stream() == device.current_stream()
    assert device.current_stream() != stream
    with device.on_stream(stream):
        assert device.current_stream() == stream
        assert hash(device.current_stream()) == hash(stream)
    assert device.current_stream() != stream


def test_work_of_another_current_stream_is_ordered_by_events_too(device: Device, host: Tensor) -> None:
    side, lane = device.new_stream("side"), device.new_stream("D2H")
    with device.on_stream(side):
        _delay(device, side)
        source = _filled(device, 5)
        made = device.record_event()

    device.wait_event(lane, made)
    device.copy(host, byte_view(source), lane)
    left = device.record_event(lane)
    device.wait_event(side, left)
    del source
    device.wait_event(device.current_stream(), left)
    device.synchronize()

    assert host.eq(5).all()


def test_allocated_storages_are_counted(device: Device) -> None:
    counter = device.memory_counter()
    assert counter is not None
    before = counter.allocated_bytes()

    storage = device.allocate(4 * MIB)
    during = counter.allocated_bytes()
    del storage
    peak = counter.peak_bytes()
    counter.reset_peak()

    assert (during - before, counter.allocated_bytes()) == (4 * MIB, before)
    assert peak >= during
    assert counter.peak_bytes() == before
    assert (counter.peak_reserved_bytes() or before) >= before


def test_host_waits_for_an_event_and_for_nothing_else(device: Device, host: Tensor) -> None:
    out, other = device.new_stream("D2H"), device.new_stream("other")
    source = _filled(device, 7)
    device.wait_event(out, device.record_event(timed=False))

    device.copy(host, byte_view(source), out)
    left = device.record_event(out, timed=False)
    _delay(device, other)
    behind = device.record_event(other, timed=False)
    device.synchronize(left)

    assert left.is_reached()
    assert (host == 7).all()
    if isinstance(device, CudaDevice):
        assert not behind.is_reached()
    device.wait_event(device.current_stream(), left)


def test_work_comes_after_what_the_host_has_waited_for(device: Device, host: Tensor) -> None:
    out, back = device.new_stream("D2H"), device.new_stream("H2D")
    source = _filled(device, 7)
    device.wait_event(out, device.record_event(timed=False))
    device.copy(host, byte_view(source), out)

    device.synchronize(device.record_event(out, timed=False))
    host.fill_(9)
    device.copy(byte_view(source), host, back)
    device.wait_event(device.current_stream(), device.record_event(back, timed=False))
    device.note_read(source)

    assert (byte_view(source) == 9).all()


def test_event_that_another_thread_is_yet_to_record(device: Device, host: Tensor) -> None:
    class Later(Event):
        def elapsed_s(self, end: Event) -> float:
            return self.recorded().elapsed_s(end)

        def is_reached(self) -> bool:
            return False

        def recorded(self) -> Event:
            return recording.result()

    def copy() -> Event:
        assert is_asked_for.wait(30)
        device.wait_event(lane, filled)
        device.copy(host, byte_view(source), lane)
        return device.record_event(lane)

    lane, source, is_asked_for = device.new_stream("D2H"), _filled(device, 5), threading.Event()
    filled = device.record_event()
    with ThreadPoolExecutor(1) as threads:
        recording = threads.submit(copy)
        threading.Timer(0.05, is_asked_for.set).start()
        device.wait_event(device.current_stream(), Later())
        device.synchronize(Later())

    assert host.eq(5).all()
    assert filled.elapsed_s(Later()) >= 0


@pytest.fixture(params=["cpu", *ON_GPU])
def real(request: pytest.FixtureRequest) -> Device:
    return open_device(torch.device(request.param))


def test_threads_that_wait_for_a_gpu_use_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each process of several would take memory of the first one."""
    chosen = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    for torch_device in (torch.device("cpu"), torch.device("cuda", 1)):
        there = ReferenceDevice()
        there.torch_device = torch_device
        there.enter_thread()

    assert chosen == [torch.device("cuda", 1)]


@pytest.mark.parametrize("kind", ["gradients", "steps"])
def test_a_thread_of_memkits_enters_its_device(kind: str) -> None:
    device, entered = ReferenceDevice(), []

    def enter() -> None:
        entered.append(threading.current_thread().name)

    device.enter_thread = enter  # type: ignore[method-assign]
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(5)))
    if kind == "gradients":
        with memkit.LayerOffload(model, layers=["0", "1", "2", "3"], offload_ratio=1.0, train="host", device=device):
            for _ in range(2):
                model(torch.ones(2, 4)).sum().backward()
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
        model(torch.ones(2, 4)).sum().backward()
        with memkit.StateOffload(optimizer, update="host", device=device):
            optimizer.step()

    assert entered == [{"gradients": "memkit-grad_0", "steps": "memkit-step_0"}[kind]]


@pytest.mark.usefixtures("own_clock")
def test_time_between_events_is_that_of_the_work_between(real: Device) -> None:
    x = torch.randn(256, 256, device=real.torch_device)

    start = real.record_event()
    middle = real.record_event()
    for _ in range(200):
        x = x @ x
    end = real.record_event()
    real.synchronize()

    assert 0 <= start.elapsed_s(middle) <= start.elapsed_s(end)
    assert middle.elapsed_s(end) > 0


@pytest.mark.gpu
def test_what_the_host_takes_between_ops_is_not_timed() -> None:
    """Each op is enqueued some hundred times slower than it is computed."""
    device = open_device("cuda")
    x = torch.ones(16, device="cuda")
    events = []
    for _ in range(50):
        begin = device.record_begin(2e-3)
        time.sleep(5e-4)
        x.add_(1)
        events.append((begin, device.record_event()))
    device.synchronize()

    assert statistics.median(begin.elapsed_s(end) for begin, end in events) < 1e-4


@pytest.mark.usefixtures("own_clock")
def test_events_made_ahead_are_recorded_when_asked_for(real: Device) -> None:
    before = real.record_event()
    real.make_events(2)
    x = torch.randn(256, 256, device=real.torch_device)
    for _ in range(200):
        x = x @ x

    start = real.record_event()
    end = real.record_event()
    real.synchronize()

    assert before.elapsed_s(start) > 0
    assert start.elapsed_s(end) >= 0


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match='found "mps"'):
        open_device(torch.device("mps"))


def test_missing_cuda_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(DeviceUnavailableError, match=r'"cuda" was asked for, but torch .* finds no CUDA device here\. Run on'):
        CudaDevice(torch.device("cuda"))


@pytest.mark.gpu
def test_missing_index_is_said() -> None:
    with pytest.raises(DeviceUnavailableError, match="this machine has"):
        CudaDevice(torch.device("cuda", 99))
