"""The copies that CUDA is given by calls of its runtime: none goes on where one of these calls has failed."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memkit.core import torch_private
from memkit.device import cuda
from memkit.device.base import Piece


class Runtime:
    """Stands for `cuda.bindings.runtime`.

    Attributes:
        calls: the names of those made, in order.
        failing: which of them fails, by its place.
    """

    cudaMemcpyKind = SimpleNamespace(cudaMemcpyDeviceToHost=2, cudaMemcpyHostToDevice=1)  # noqa: N815
    cudaMemcpySrcAccessOrder = SimpleNamespace(cudaMemcpySrcAccessOrderStream=1)  # noqa: N815
    cudaError_t = SimpleNamespace(  # noqa: N815
        cudaErrorNotSupported=801, cudaErrorCallRequiresNewerDriver=36, cudaErrorStubLibrary=34
    )
    cudaStream_t = cudaEvent_t = staticmethod(lambda number: number)  # noqa: N815
    cudaMemcpyAttributes = SimpleNamespace  # noqa: N815

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failing = -1

    def __getattr__(self, name: str) -> Any:
        def call(*_: object) -> tuple[int]:
            self.calls.append(name)
            return (719 if len(self.calls) - 1 == self.failing else 0,)

        return call


class Event:
    """Stands for a `CudaEvent`."""

    def __init__(self) -> None:
        self.event = SimpleNamespace(record=lambda _: None, cuda_event=5)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    monkeypatch.setattr(cuda, "_bindings", lambda: made)
    monkeypatch.setattr(cuda, "_num_devices", lambda: 1)
    monkeypatch.setattr(cuda, "_batch_attributes", SimpleNamespace)
    monkeypatch.setattr(cuda, "_unsupported", lambda: (801,))
    monkeypatch.setattr(cuda, "CudaEvent", Event)
    return made


def batch_of(num_pieces: int, *, is_out: bool = True) -> cuda.CudaCopyBatch:
    device: Any = SimpleNamespace(raw_stream=lambda: 3, torch_device=torch.device("cuda", 0))
    stream: Any = SimpleNamespace(cuda_stream=7)
    host = torch.empty(16, dtype=torch.uint8)
    pieces = [Piece(index, 0, host, host.data_ptr(), 16) for index in range(num_pieces)]
    return cuda.CudaCopyBatch(device, cuda.CudaStream(stream), pieces, is_out=is_out)


def storages(number: int) -> list[torch.UntypedStorage]:
    return [torch.UntypedStorage(16) for _ in range(number)]


@pytest.mark.parametrize("num_pieces", [1, 2])
@pytest.mark.parametrize("place", range(5))
def test_call_that_fails_when_copies_start_is_said(runtime: Runtime, place: int, num_pieces: int) -> None:
    behind, batch = batch_of(1), batch_of(num_pieces)
    behind.start(storages(1))
    runtime.calls.clear()
    runtime.failing = place

    with pytest.raises(RuntimeError, match=f"a copy of {16 * num_pieces} bytes to host memory needs CUDA to .* CUDA gave 719"):
        batch.start(storages(num_pieces), behind)

    assert runtime.calls[place + 1 :] == ["cudaGetLastError"]  # nothing is put on behind it


@pytest.mark.parametrize("place", range(2))
def test_call_that_fails_when_a_stream_is_to_wait_is_said(runtime: Runtime, place: int) -> None:
    batch = batch_of(1, is_out=False)
    batch.start(storages(1))
    runtime.calls.clear()
    runtime.failing = place

    with pytest.raises(RuntimeError, match="a copy of 16 bytes to the device needs CUDA to have its other work wait"):
        batch.wait()


def test_copies_that_go_well_take_as_many_calls_as_ever(runtime: Runtime) -> None:
    batch = batch_of(1)
    batch.start(storages(1))
    batch.wait()

    assert runtime.calls == [
        *("cudaEventRecord", "cudaStreamWaitEvent", "cudaMemcpyAsync", "cudaEventRecord"),
        *("cudaEventRecord", "cudaStreamWaitEvent"),
    ]


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def copy_once() -> Tensor:
    """Copy some bytes as if they were on a device; return where to."""
    device: Any = object.__new__(cuda.CudaDevice)
    device.torch_device = torch.device("cuda", 0)
    destination, stream = torch.zeros(16, dtype=torch.uint8), cuda.CudaStream(STREAM)
    device.copy(destination, torch.ones(16, dtype=torch.uint8), stream)
    return destination


STREAM: Any = SimpleNamespace(cuda_stream=7)


@pytest.mark.parametrize("is_in_mode", [False, True])
def test_single_copy_takes_one_call_that_no_mode_is_to_see(runtime: Runtime, is_in_mode: bool) -> None:
    with Mode() if is_in_mode else nullcontext(), torch_private.without_python_dispatch():
        copy_once()

    assert runtime.calls == ["cudaMemcpyAsync"]


@pytest.mark.parametrize("why", ["a mode sees it", "another device is the current one"])
def test_single_copy_goes_through_torch(runtime: Runtime, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[Any] = []
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: (streams.append(stream), nullcontext())[1])
    if why == "a mode sees it":
        with Mode():
            destination = copy_once()
    else:
        monkeypatch.setattr(cuda, "_num_devices", lambda: 2)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        destination = copy_once()

    assert runtime.calls == []
    assert streams == [STREAM]
    assert destination.tolist() == [1] * 16


def test_single_copy_that_fails_is_said(runtime: Runtime) -> None:
    runtime.failing = 0

    with pytest.raises(RuntimeError, match="a copy of 16 bytes to the device needs CUDA to take it; CUDA gave 719"):
        copy_once()
