"""CUDA devices: the one file that names `torch.cuda`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import Tensor

from memkit.core import torch_private
from memkit.core.torch_state import is_seen_by_modes
from memkit.device.base import CopyBatch, Device, Event, MemoryCounter, Piece, Stream
from memkit.errors import DeviceUnavailableError, HostMemoryError

_CYCLES_PER_S = 1.8e9
_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context, whichever made it


def cuda_is_available() -> bool:
    return torch.cuda.is_available()


def is_capturing() -> bool:
    """Tell whether the work of the current stream of the current device is being captured into a graph instead of run."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def default_generator(torch_device: torch.device) -> torch.Generator:
    if torch_device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if torch_device.index is None else torch_device.index
    generator: torch.Generator = torch.cuda.default_generators[index]
    return generator


class CudaStream(Stream):
    __slots__ = ("raw", "stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self.raw = None if _bindings() is None else _bindings().cudaStream_t(stream.cuda_stream)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CudaStream) and bool(self.stream == other.stream)

    def __hash__(self) -> int:
        return hash(self.stream)


class CudaEvent(Event):
    __slots__ = ("event",)

    def __init__(self, *, timed: bool = True) -> None:
        self.event = torch.cuda.Event(enable_timing=timed)

    def elapsed_s(self, end: Event) -> float:
        end = end.recorded()
        assert isinstance(end, CudaEvent)
        return float(self.event.elapsed_time(end.event)) / 1e3

    def is_reached(self) -> bool:
        return bool(self.event.query())


@functools.cache
def _bindings() -> Any:
    """Return CUDA's runtime for direct calls, at a fraction of the cost of torch's objects; None without `cuda.bindings`."""
    try:
        from cuda.bindings import runtime  # type: ignore[import-untyped]
    except ImportError:
        return None
    return runtime


@functools.cache
def _copy_kind(is_out: bool) -> Any:
    return getattr(_bindings().cudaMemcpyKind, "cudaMemcpyDeviceToHost" if is_out else "cudaMemcpyHostToDevice")


class CudaCopyBatch(CopyBatch):
    """Copies by `cudaMemcpyAsync` or one batched call; by torch in a dispatch mode, or while another device is current."""

    _takes_batches = True

    def __init__(
        self, device: CudaDevice, stream: Stream, pieces: Sequence[Piece], *, is_out: bool, ahead: CopyBatch | None = None
    ) -> None:
        super().__init__(device, stream, pieces, is_out=is_out, ahead=ahead)
        assert isinstance(stream, CudaStream)
        self._runtime, self._kind, self._lane = _bindings(), _copy_kind(is_out), stream.raw
        self._raw_stream = device.raw_stream
        self._events: tuple[CudaEvent, CudaEvent, CudaEvent] | None = None  # `started`, `done`, `waited`
        self._hosts, self._sizes_bytes = [piece.address for piece in pieces], [piece.num_bytes for piece in pieces]
        self._is_one = len(pieces) == 1

    def start(self, storages: Sequence[torch.UntypedStorage], behind: CopyBatch | None = None) -> None:
        if torch_private.num_dispatch_modes() or not _is_current(self.device.torch_device):
            self._events = None
            super().start(storages, behind)
            return
        if self._events is None:
            events, handle_of = (CudaEvent(), CudaEvent(), CudaEvent()), self._runtime.cudaEvent_t
            for event in events:
                event.event.record(_of(self.stream))  # CUDA makes it now
            self._on_started, self._on_done, self._on_waited = (handle_of(event.event.cuda_event) for event in events)
            self.started, self.done, _ = self._events = events
        self.waited = None
        runtime, lane, on_started = self._runtime, self._lane, self._on_started
        error = runtime.cudaEventRecord(on_started, self._raw_stream())[0]
        error = error or runtime.cudaStreamWaitEvent(lane, on_started, 0)[0]
        for batch in (self.ahead, behind):
            if batch is not None and not error:
                error = runtime.cudaStreamWaitEvent(lane, batch.done.event.cuda_event, 0)[0]  # type: ignore[attr-defined]  # CUDA's
        if error:
            raise _refused(self.num_bytes, self.is_out, "wait for what comes before it", error)
        if self._is_one:
            address = storages[self.pieces[0].index].data_ptr() + self.pieces[0].start
            destination, source = (self._hosts[0], address) if self.is_out else (address, self._hosts[0])
            error = runtime.cudaMemcpyAsync(destination, source, self._sizes_bytes[0], self._kind, lane)[0]
        else:
            error = self._copy_all([storages[piece.index].data_ptr() + piece.start for piece in self.pieces])
        if error := error or runtime.cudaEventRecord(self._on_done, lane)[0]:
            raise _refused(self.num_bytes, self.is_out, "take it, and tell when it is done", error)

    def _copy_all(self, addresses: list[int]) -> Any:
        runtime, lane, sizes_bytes = self._runtime, self._lane, self._sizes_bytes
        destinations, sources = (self._hosts, addresses) if self.is_out else (addresses, self._hosts)
        if CudaCopyBatch._takes_batches and (attributes := _batch_attributes()) is not None:
            error = runtime.cudaMemcpyBatchAsync(
                destinations, sources, sizes_bytes, len(sizes_bytes), [attributes], [0], 1, lane
            )[0]
            if error not in _unsupported():
                return error
            CudaCopyBatch._takes_batches = False
            runtime.cudaGetLastError()  # which the next kernel's launch check would else raise as its own
        for destination, source, num_bytes in zip(destinations, sources, sizes_bytes, strict=True):
            error = runtime.cudaMemcpyAsync(destination, source, num_bytes, self._kind, lane)[0]
            if error:
                return error
        return 0

    def wait(self) -> None:
        if self._events is None or torch_private.num_dispatch_modes() or not _is_current(self.device.torch_device):
            super().wait()
            return
        runtime, stream = self._runtime, self._raw_stream()
        self.waited = self._events[2]
        error = runtime.cudaEventRecord(self._on_waited, stream)[0] or runtime.cudaStreamWaitEvent(stream, self._on_done, 0)[0]
        if error:
            raise _refused(self.num_bytes, self.is_out, "have its other work wait for it", error)


def _refused(num_bytes: int, is_out: bool, what: str, error: Any) -> RuntimeError:
    _bindings().cudaGetLastError()  # which the next kernel's launch check would else raise as its own
    return RuntimeError(
        f"a copy of {num_bytes} bytes to {'host memory' if is_out else 'the device'} needs CUDA to {what}; CUDA gave {error!r}"
        ". What this step computes is not to be used. Mostly a kernel before it has failed: CUDA_LAUNCH_BLOCKING=1 shows which"
    )


_num_devices = functools.cache(torch.cuda.device_count)


def _is_current(torch_device: torch.device) -> bool:
    return _num_devices() == 1 or torch.cuda.current_device() == torch_device.index


@functools.cache
def _batch_attributes() -> Any:
    runtime = _bindings()
    if not hasattr(runtime, "cudaMemcpyBatchAsync"):
        return None
    attributes = runtime.cudaMemcpyAttributes()
    attributes.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
    return attributes


@functools.cache
def _unsupported() -> tuple[Any, ...]:
    errors = _bindings().cudaError_t
    return errors.cudaErrorNotSupported, errors.cudaErrorCallRequiresNewerDriver, errors.cudaErrorStubLibrary


class CudaMemoryCounter(MemoryCounter):
    """The counters of PyTorch's caching allocator: `reset_peak` also resets `torch.cuda.max_memory_allocated`."""

    def __init__(self, torch_device: torch.device) -> None:
        self._torch_device = torch_device

    def _current_and_peak(self, what: str) -> tuple[int, int]:
        # Straight from the allocator: `memory_stats` flattens and sorts it, which costs more than all else at a border.
        stats = torch.cuda.memory_stats_as_nested_dict(self._torch_device)[what]["all"]
        return int(stats["current"]), int(stats["peak"])

    def allocated_bytes(self) -> int:
        return self._current_and_peak("allocated_bytes")[0]

    def peak_bytes(self) -> int:
        return self._current_and_peak("allocated_bytes")[1]

    def peak_reserved_bytes(self) -> int:
        return self._current_and_peak("reserved_bytes")[1]

    def capacity_bytes(self) -> int:
        """Return the free bytes and this process's own, up to the share of `set_per_process_memory_fraction`."""
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._torch_device)
        cap_bytes = int(torch.cuda.get_per_process_memory_fraction(self._torch_device) * total_bytes)
        return min(free_bytes + self._current_and_peak("reserved_bytes")[0], cap_bytes)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._torch_device)


class CudaDevice(Device):
    """One CUDA device, by default the current one. Raises DeviceUnavailableError, with `advice`, if there is none. See
    `Device`."""

    def __init__(self, torch_device: torch.device, *, advice: str = "Run on a machine with a GPU") -> None:
        if not cuda_is_available():
            raise DeviceUnavailableError(
                f'"{torch_device}" was asked for, but torch {torch.__version__} finds no CUDA device here. {advice}.'
            )
        index = torch.cuda.current_device() if torch_device.index is None else torch_device.index
        if index >= torch.cuda.device_count():
            raise DeviceUnavailableError(
                f'"{torch_device}" was asked for; this machine has {torch.cuda.device_count()} CUDA device(s), from cuda:0 on.'
            )
        self.torch_device = torch.device("cuda", index)
        self._spare_events: list[CudaEvent] = []
        self._streams: dict[int, CudaStream] = {}  # those that were current, by number: CUDA gives none of torch's objects back
        self._runtime: Any = torch.cuda.cudart()  # a module made in C++: torch has no types for it
        self.has_own_memory = not torch.cuda.get_device_properties(self.torch_device).is_integrated

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CudaDevice) and self.torch_device == other.torch_device

    def __hash__(self) -> int:
        return hash(self.torch_device)

    def __reduce__(self) -> tuple[type[CudaDevice], tuple[torch.device]]:
        return CudaDevice, (self.torch_device,)

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.torch_device)

    def current_stream(self) -> CudaStream:
        number = torch_private.raw_stream(self.torch_device.index)
        stream = self._streams.get(number)
        if stream is None:  # to ask torch takes the host 6 us
            stream = self._streams[number] = CudaStream(torch.cuda.current_stream(self.torch_device))
        return stream

    def stream_number(self) -> int:
        return torch_private.raw_stream(self.torch_device.index)

    def raw_stream(self) -> Any:
        return self.current_stream().raw

    def new_stream(self, name: str) -> CudaStream:
        return CudaStream(torch.cuda.Stream(self.torch_device))

    def on_stream(self, stream: Stream) -> AbstractContextManager[object]:
        return torch.cuda.stream(_of(stream))

    def make_events(self, num_events: int) -> None:
        while len(self._spare_events) < num_events:
            event = CudaEvent()
            event.event.record(torch.cuda.current_stream(self.torch_device))  # CUDA makes it now
            self._spare_events.append(event)

    def record_event(self, stream: Stream | None = None, *, timed: bool = True) -> CudaEvent:
        event = self._spare_events.pop() if timed and self._spare_events else CudaEvent(timed=timed)
        event.event.record(_of(self.current_stream() if stream is None else stream))
        return event

    def wait_event(self, stream: Stream, event: Event) -> None:
        event = event.recorded()
        assert isinstance(event, CudaEvent)
        _of(stream).wait_event(event.event)

    def synchronize(self, event: Event | None = None) -> None:
        if event is None:
            torch.cuda.synchronize(self.torch_device)
        else:
            event = event.recorded()
            assert isinstance(event, CudaEvent)
            event.event.synchronize()

    def record_begin(self, ahead_s: float = 3e-4) -> Event:
        for sleep in torch_private.known("sleep_on_device") if torch.version.cuda else ():  # another maker's clock is another
            with torch.cuda.device(self.torch_device):
                sleep(int(_CYCLES_PER_S * ahead_s))
        return self.record_event()

    def allocate(self, num_bytes: int) -> torch.UntypedStorage:
        return torch.UntypedStorage(num_bytes, device=self.torch_device)

    def allocate_tensor(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        if torch_private.num_dispatch_modes():  # a mode is not to take this for an op of the user's
            return super().allocate_tensor(size, stride, dtype)
        return torch.empty_strided(size, stride, dtype=dtype, device=self.torch_device)

    def copy(self, destination: Tensor, source: Tensor, stream: Stream) -> None:
        assert isinstance(stream, CudaStream)
        # through torch, which costs the host far more, if a mode is to see it
        if stream.raw is None or is_seen_by_modes() or not _is_current(self.torch_device):
            with torch.cuda.stream(stream.stream):
                destination.copy_(source, non_blocking=True)
            return
        runtime, is_out, ends = _bindings(), source.is_cuda, (destination.data_ptr(), source.data_ptr())
        if error := runtime.cudaMemcpyAsync(*ends, source.nbytes, _copy_kind(is_out), stream.raw)[0]:
            raise _refused(source.nbytes, is_out, "take it", error)

    def copy_batch(self, stream: Stream, pieces: Sequence[Piece], *, is_out: bool, ahead: CopyBatch | None = None) -> CopyBatch:
        made = CopyBatch if _bindings() is None else CudaCopyBatch
        return made(self, stream, pieces, is_out=is_out, ahead=ahead)

    def copy_pageable(self, destination: Tensor, source: Tensor, stream: Stream) -> None:
        _of(stream).synchronize()  # else CUDA would wait itself, and might have other threads wait as well
        with torch.cuda.stream(_of(stream)):
            destination.copy_(source)

    def pin(self, host: Tensor) -> None:
        # cudaHostRegister belongs to a context, which a thread of ours has not made current yet.
        with torch.cuda.device(self.torch_device):
            status = self._runtime.cudaHostRegister(host.data_ptr(), host.nbytes, _REGISTER_PORTABLE)
        if int(status) != 0:
            self._clear_error()
            raise HostMemoryError(
                f"CUDA could not pin {host.nbytes} bytes of host memory: cudaHostRegister gave {status}. "
                "The system limits locked memory (ulimit -l, or the container)."
            )

    def unpin(self, host: Tensor) -> None:
        with torch.cuda.device(self.torch_device):
            status = self._runtime.cudaHostUnregister(host.data_ptr())
        if int(status) != 0:  # it was not pinned
            self._clear_error()

    def _clear_error(self) -> None:
        """Take up CUDA's noted error, which the next kernel's launch check would else raise as its own."""
        with suppress(RuntimeError):
            torch.zeros(1, device=self.torch_device)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def is_capturing(self) -> bool:
        return bool(torch.cuda.is_current_stream_capturing())

    def memory_counter(self) -> CudaMemoryCounter:
        return CudaMemoryCounter(self.torch_device)


def _of(stream: Stream) -> torch.cuda.Stream:
    assert isinstance(stream, CudaStream)
    return stream.stream
