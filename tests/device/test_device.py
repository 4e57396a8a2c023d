"""The contract of `memkit.device.base`, for every device that this machine has."""

from __future__ import annotations

import statistics
import threading
import time

import pytest
import torch

import memkit
from memkit.device import CudaDevice, Device, ReferenceDevice, open_device
from memkit.errors import DeviceUnavailableError
from tests.gpus import ON_GPU


@pytest.fixture(params=["cpu", *ON_GPU])
def device(request: pytest.FixtureRequest) -> Device:
    return open_device(torch.device(request.param))


def test_device_knows_where_it_is(device: Device) -> None:
    x = torch.zeros(1, device=device.torch_device)

    assert x.device == device.torch_device
    assert device.name


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
def test_time_between_events_is_that_of_the_work_between(device: Device) -> None:
    x = torch.randn(256, 256, device=device.torch_device)

    start = device.record_event()
    middle = device.record_event()
    for _ in range(200):
        x = x @ x
    end = device.record_event()
    device.synchronize()

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
def test_events_made_ahead_are_recorded_when_asked_for(device: Device) -> None:
    before = device.record_event()
    device.make_events(2)
    x = torch.randn(256, 256, device=device.torch_device)
    for _ in range(200):
        x = x @ x

    start = device.record_event()
    end = device.record_event()
    device.synchronize()

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
