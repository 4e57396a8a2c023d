"""Measures a host beside its GPU: optimizer updates on its cores, alone and during copies, and its disk."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from memkit.device import Device
from memkit.terminal import TextColumn, table_text
from memkit.transfer import Arena, Disk
from memkit.transfer.link import measure_beside_copies

_UPDATE_THREADS = (1, 4, 8, 16)
_DISK_THREADS = (1, 4, 8)
_BOTH_S = 1.0
"""Copies and updates run at once for about this many seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSizes:
    """Sizes of the measurement."""

    block_numel: int
    """Parameters that are updated at once."""
    num_blocks: int
    """Number of blocks: with their states, larger than the processor's cache."""
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
    """Parameters with AdamW's states in host memory: in float32, with bfloat16 copies for the device."""

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
        """Return the parameters per second with the most threads, while copies run in both directions, and the bytes per second
        of these, in each direction.

        Args:
            device: the device of the copies.
            both_bytes_per_s: estimated speed of copies in both directions, which determines their number.

        Raises:
            HostMemoryError: there is not enough host memory for the copies.
            torch.OutOfMemoryError: there is not enough device memory.
        """
        num_bytes = self._sizes.copied_bytes
        num_copies = max(2, min(round(_BOTH_S * both_bytes_per_s / num_bytes), 400))
        blocks = itertools.cycle(self._blocks)
        with _threads(update_threads()[-1]):
            self._round(_Block.update)
            updates_per_s, bytes_per_s = measure_beside_copies(
                device, lambda: next(blocks).update(), num_bytes=num_bytes, num_copies=num_copies
            )
        return updates_per_s * self._sizes.block_numel, bytes_per_s


def measure_disk(disk: Disk, device: Device, sizes: HostSizes) -> tuple[dict[str, float], dict[str, float]]:
    """Return the bytes per second that 1, 4 and 8 threads read and write, bypassing the system's cache where possible.

    Everything is written once before it is timed, since the first write to a place may take longer.

    Raises:
        DiskError: the disk has too little space, or fails.
        HostMemoryError: there is not enough host memory for the buffers.
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
