"""Bandwidth and latency between a device and the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from memkit.device.base import Device
from memkit.plan.gpu import Link
from memkit.transfer.arena import Arena
from memkit.transfer.host_memory import Span
from memkit.transfer.lanes import Lanes

_SMALL_BYTES = 4096
_NUM_SMALL = 32
_MOST_ACTS = 10_000


def measure_link(device: Device, *, num_bytes: int = 256 * 2**20, repeats: int = 5) -> Link:
    """Return the speed of copies between a device and pinned host memory, one at a time: the median of `repeats` timed copies
    of each size and direction, after one that is not timed. Copies of `num_bytes` tell the bandwidth, much smaller ones the
    latency. Raises ValueError for an argument that is not positive, HostMemoryError or torch.OutOfMemoryError without room."""
    if num_bytes <= 0 or repeats <= 0:
        raise ValueError(f"num_bytes and repeats must be positive; found {num_bytes} and {repeats}")
    big_out_s, big_back_s = _seconds(device, num_bytes, repeats, num_copies=1)
    small_out_s, small_back_s = _seconds(device, _SMALL_BYTES, repeats, num_copies=_NUM_SMALL)
    return Link(
        d2h_bytes_per_s=num_bytes / max(big_out_s, 1e-9),
        h2d_bytes_per_s=num_bytes / max(big_back_s, 1e-9),
        latency_s=max(small_out_s, small_back_s),
    )


def measure_both_ways(device: Device, *, num_bytes: int) -> float:
    lanes, both_s = Lanes(device), []
    with _memory(device, num_bytes, num_pairs=2) as (storages, spans):
        lanes.copy_out(storages[1], spans[1], after=device.record_event())
        device.synchronize()
        for _ in range(6):  # the first is to warm up
            ready = device.record_event()
            out = lanes.copy_out(storages[0], spans[0], after=ready)
            back = lanes.copy_back(spans[1], storages[1], after=(ready,))
            device.synchronize()
            both_s.append(max(ready.elapsed_s(out.done), ready.elapsed_s(back.done)))
    return num_bytes / max(statistics.median(both_s[1:]), 1e-9)


def measure_beside_copies(device: Device, act: Callable[[], object], *, num_bytes: int, num_copies: int) -> tuple[float, float]:
    lanes = Lanes(device)
    with _memory(device, num_bytes, num_pairs=2) as (storages, spans):
        out = lanes.copy_out(storages[1], spans[1], after=device.record_event())
        device.synchronize()
        ready = device.record_event()
        for _ in range(num_copies):
            out = lanes.copy_out(storages[0], spans[0], after=ready)
            back = lanes.copy_back(spans[1], storages[1], after=(ready,))
        num_done, begin = 0, time.perf_counter()
        while num_done < _MOST_ACTS:
            act()
            num_done += 1
            if out.done.is_reached() and back.done.is_reached():
                break
        acted_s = max(time.perf_counter() - begin, 1e-9)
        device.synchronize()
        copied_s = max(ready.elapsed_s(out.done), ready.elapsed_s(back.done), 1e-9)
    return num_done / acted_s, num_copies * num_bytes / copied_s


@contextmanager
def _memory(device: Device, num_bytes: int, *, num_pairs: int = 1) -> Iterator[tuple[list[torch.UntypedStorage], list[Span]]]:
    arena, storages = Arena(device), [device.allocate(num_bytes) for _ in range(num_pairs)]
    try:
        yield storages, [arena.take(num_bytes) for _ in range(num_pairs)]
    finally:
        device.synchronize()  # also after an interrupt nothing is under way when the storages go
        arena.give_all()
        arena.close()


def _seconds(device: Device, num_bytes: int, repeats: int, *, num_copies: int) -> tuple[float, float]:
    lanes, out_s, back_s = Lanes(device), [], []
    with _memory(device, num_bytes) as ((storage,), (span,)):
        for _ in range(1 + repeats):  # the first is to warm up
            ready = device.record_event()
            out = [lanes.copy_out(storage, span, after=ready) for _ in range(num_copies)]
            device.synchronize()
            back = [lanes.copy_back(span, storage, after=(out[-1].done,)) for _ in range(num_copies)]
            device.synchronize()
            out_s.append(out[0].started.elapsed_s(out[-1].done) / num_copies)
            back_s.append(back[0].started.elapsed_s(back[-1].done) / num_copies)
    return statistics.median(out_s[1:]), statistics.median(back_s[1:])
