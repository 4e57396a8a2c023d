"""Measures what a host can do beside its GPU: optimizer updates on its cores, alone and beside copies, and its disk."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from memkit.device import Device
from memkit.terminal import TextColumn, table_text
from memkit.transfer import Arena, Disk, Lanes

_UPDATE_THREADS = (1, 4, 8, 16)
_DISK_THREADS = (1, 4, 8)
_BOTH_S = 1.0
"""For about so long copies and updates go on at once."""
_MOST_UPDATES = 10_000
"""On the reference device copies are over when they are waited for, so that updates beside them end by their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSizes:
    """How much is measured with."""

    block_numel: int
    """Parameters that are updated at once."""
    num_blocks: int
    """Different ones: with their states, more than the processor's cache."""
    copied_bytes: int
    disk_chunk_bytes: int
    num_disk_chunks: int


WHOLE = HostSizes(block_numel=2**22, num_blocks=16, copied_bytes=256 * 2**20, disk_chunk_bytes=128 * 2**20, num_disk_chunks=16)
REHEARSAL = HostSizes(block_numel=2**14, num_blocks=2, copied_bytes=2**20, disk_chunk_bytes=2**20, num_disk_chunks=4)


def update_threads() -> list[int]:
    """Return the numbers of threads that updates are timed with: 1, 4, 8 and 16, or as many as this process has cores."""
    has_affinity = hasattr(os, "sched_getaffinity")
    num_cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return sorted({min(num_threads, num_cores) for num_threads in _UPDATE_THREADS})


class _Block:
    """Some parameters with the states of AdamW, as they are on the host: in float32, with bfloat16 copies for the device."""

    def __init__(self, numel: int) -> None:
        self.parameter = torch.nn.Parameter(torch.zeros(numel))
        self.parameter.grad = torch.full((numel,), 1e-3)
        self.optimizer = torch.optim.AdamW([self.parameter], lr=1e-4, fused=True)
        self.gradient = torch.zeros(numel, dtype=torch.bfloat16)
        self.weight = torch.zeros(numel, dtype=torch.bfloat16)

    def update(self) -> None:
        self.optimizer.step()

    def update_with_casts(self) -> None:
        """Take the gradient from bfloat16, and leave the weight as bfloat16, while the block is in the cache."""
        assert self.parameter.grad is not None
        self.parameter.grad.copy_(self.gradient)
        self.optimizer.step()
        self.weight.copy_(self.parameter.detach())


@contextmanager
def _threads(num_threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class HostUpdates:
    """AdamW in float32 on the host's cores, block by block."""

    def __init__(self, sizes: HostSizes) -> None:
        self._sizes = sizes
        self._blocks = [_Block(sizes.block_numel) for _ in range(sizes.num_blocks)]

    def measure(self, *, casts: bool) -> dict[str, float]:
        """Return the parameters per second by number of threads: the median of three rounds, after one to warm up."""
        found = {}
        update = _Block.update_with_casts if casts else _Block.update
        for num_threads in update_threads():
            with _threads(num_threads):
                taken_s = [_seconds(lambda: self._round(update)) for _ in range(4)][1:]
            found[str(num_threads)] = len(self._blocks) * self._sizes.block_numel / statistics.median(taken_s)
        return found

    def _round(self, update: Callable[[_Block], None]) -> None:
        for block in self._blocks:
            update(block)

    def measure_beside_copies(self, device: Device, both_bytes_per_s: float) -> tuple[float, float]:
        """Return the parameters per second, with as many threads as are timed at most, while copies go both ways, and the
        bytes per second of these, each way.

        Args:
            device: from and to which bytes are copied.
            both_bytes_per_s: of copies both ways, as far as is known: says how many there are to be.

        Raises:
            HostMemoryError: there is no room in host memory for what is copied.
            torch.OutOfMemoryError: there is too little on the device.
        """
        num_bytes = self._sizes.copied_bytes
        num_copies = max(2, min(round(_BOTH_S * both_bytes_per_s / num_bytes), 400))
        arena, lanes = Arena(device), Lanes(device)
        storages = device.allocate(num_bytes), device.allocate(num_bytes)
        try:
            spans = arena.take(num_bytes), arena.take(num_bytes)
            lanes.copy_out(storages[1], spans[1], after=device.record_event())
            with _threads(update_threads()[-1]):
                self._round(_Block.update)
                device.synchronize()
                ready = device.record_event()
                out = back = None
                for _ in range(num_copies):
                    out = lanes.copy_out(storages[0], spans[0], after=ready)
                    back = lanes.copy_back(spans[1], storages[1], after=(ready,))
                assert out is not None
                assert back is not None
                num_updated, begin = 0, time.perf_counter()
                while num_updated < _MOST_UPDATES:
                    self._blocks[num_updated % len(self._blocks)].update()
                    num_updated += 1
                    if out.done.is_reached() and back.done.is_reached():
                        break
                updated_s = time.perf_counter() - begin
            device.synchronize()
            copied_s = max(ready.elapsed_s(out.done), ready.elapsed_s(back.done), 1e-9)
        finally:
            device.synchronize()
            arena.give_all()
            arena.close()
        return num_updated * self._sizes.block_numel / updated_s, num_copies * num_bytes / copied_s


def measure_disk(disk: Disk, device: Device, sizes: HostSizes) -> tuple[dict[str, float], dict[str, float]]:
    """Return the bytes per second that are read and written by 1, 4 and 8 threads, past the system's cache where that can be.

    All is written once before it is timed: the first write to a place may take longer.

    Raises:
        DiskError: the disk has too little room, or fails.
        HostMemoryError: there is no room in host memory for what is read.
    """
    read, written = {}, {}
    for num_threads in _DISK_THREADS:
        read[str(num_threads)], written[str(num_threads)] = _disk_speeds(disk, device, sizes, num_threads)
    return read, written


def _disk_speeds(disk: Disk, device: Device, sizes: HostSizes, num_threads: int) -> tuple[float, float]:
    """Return the bytes per second that some threads read, and that they write."""
    num_bytes = sizes.num_disk_chunks * sizes.disk_chunk_bytes
    arena = Arena(device, must_pin=False)
    store = disk.open(num_bytes + sizes.disk_chunk_bytes, device, num_threads=num_threads)
    try:
        (span,) = arena.take_pinned_as_one([sizes.disk_chunk_bytes])
        span.pieces[0].random_(generator=torch.Generator())
        copies = [store.add(f"chunk {number}", sizes.disk_chunk_bytes) for number in range(sizes.num_disk_chunks)]

        def go(begin: Callable[..., None]) -> None:
            for copy in copies:
                begin(copy, span)
            for copy in copies:
                store.wait(copy)

        go(store.write)
        written_s = _seconds(lambda: go(store.write))
        return num_bytes / _seconds(lambda: go(store.read)), num_bytes / written_s
    finally:
        store.close()
        arena.give_all()
        arena.close()


def _seconds(act: Callable[[], None]) -> float:
    begin = time.perf_counter()
    act()
    return max(time.perf_counter() - begin, 1e-9)


def host_text(
    updates: Mapping[str, float],
    cast_updates: Mapping[str, float],
    read: Mapping[str, float],
    written: Mapping[str, float],
    width: int = 80,
) -> str:
    """Return speeds by number of threads as a table."""
    threads = sorted({*updates, *cast_updates, *read, *written}, key=int)

    def column(heading: str, speeds: Mapping[str, float]) -> TextColumn:
        return TextColumn(
            heading=heading, cells=[f"{speeds[key] / 1e9:.2f}" if key in speeds else "-" for key in threads], goes=0
        )

    return table_text(
        [
            TextColumn(heading="threads", cells=threads),
            column("AdamW (1e9/s)", updates),
            column("with casts", cast_updates),
            column("disk read (GB/s)", read),
            column("written", written),
        ],
        width,
    )
