"""Measures a machine for plans: its GPU, the link to it, its host and its disk."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from memkit._version import __version__
from memkit.core.terminal import TextColumn, table_text, wrapped
from memkit.device import Device
from memkit.device.ceilings import measure_ceilings, measure_flops, measure_launch
from memkit.plan.gpu import FACTORS, GpuSpec
from memkit.transfer import Arena, Disk, measure_link
from memkit.transfer.lanes import measure_beside_copies, measure_both_ways

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_UPDATE_THREADS = (1, 4, 8, 16)
_BOTH_S = 1.0  # copies and updates run at once for about this many seconds
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSizes:
    block_numel: int
    num_blocks: int  # with their states, all blocks are larger than the processor's cache
    copied_bytes: int
    disk_chunk_bytes: int
    num_disk_chunks: int


WHOLE = HostSizes(block_numel=2**22, num_blocks=16, copied_bytes=256 * 2**20, disk_chunk_bytes=128 * 2**20, num_disk_chunks=16)
REHEARSAL = HostSizes(block_numel=2**14, num_blocks=2, copied_bytes=2**20, disk_chunk_bytes=2**20, num_disk_chunks=4)


def update_threads() -> list[int]:
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
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
        assert self.parameter.grad is not None
        self.parameter.grad.copy_(self.gradient)
        self.optimizer.step()
        self.weight.copy_(self.parameter.detach())


@contextmanager
def _within(read: Callable[[], _Value], put: Callable[[_Value], None], value: _Value) -> Iterator[None]:
    before = read()
    put(value)
    try:
        yield
    finally:
        put(before)


def _threads(num_threads: int) -> AbstractContextManager[None]:
    return _within(torch.get_num_threads, torch.set_num_threads, num_threads)


class HostUpdates:
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
        """Return the updates per second while copies run both ways, and the bytes per second of these copies each way."""
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
    """Return the bytes per second that 1, 4 and 8 threads read and write, bypassing the system's cache where possible."""
    speeds = {str(num_threads): _disk_speeds(disk, device, sizes, num_threads) for num_threads in (1, 4, 8)}
    return {number: read for number, (read, _) in speeds.items()}, {number: written for number, (_, written) in speeds.items()}


def _disk_speeds(disk: Disk, device: Device, sizes: HostSizes, num_threads: int) -> tuple[float, float]:
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

        go(store.write)  # the first write to a place may take longer
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


def _host_text(spec: GpuSpec, width: int) -> str:
    speeds = {
        "AdamW (1e9/s)": spec.host_updates_per_s,
        "with casts": spec.host_cast_updates_per_s,
        "disk read (GB/s)": spec.disk_read_bytes_per_s,
        "written": spec.disk_write_bytes_per_s,
    }
    threads = sorted(set().union(*speeds.values()), key=int)
    columns = [TextColumn(heading="threads", cells=threads)]
    for heading, found in speeds.items():
        cells = [f"{found[number] / 1e9:.2f}" if number in found else "-" for number in threads]
        columns.append(TextColumn(heading=heading, cells=cells, goes=0))
    return table_text(columns, width)


def measure_machine(device: Device, *, disk: Disk | None = None) -> GpuSpec:
    """Measure a device, its link and its host; return them as a spec, with an H200's factors of single kinds of ops."""
    counter, num_bytes = device.memory_counter(), 256 * 2**20 if device.torch_device.type == "cuda" else 2**20
    memory_bytes = None if counter is None else counter.capacity_bytes()
    with torch.no_grad(), _within(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"):
        bytes_per_s = measure_ceilings(device).bytes_per_s
        measured = {str(dtype).removeprefix("torch."): measure_flops(device, dtype) for dtype in _DTYPES}
        launch_s = measure_launch(device)
    link = measure_link(device, num_bytes=num_bytes)
    both_bytes_per_s = measure_both_ways(device, num_bytes=num_bytes)
    sizes = WHOLE if device.torch_device.type == "cuda" else REHEARSAL
    updates = HostUpdates(sizes)
    alone, with_casts = updates.measure(casts=False), updates.measure(casts=True)
    shared_updates_per_s, shared_bytes_per_s = updates.measure_beside_copies(device, both_bytes_per_s)
    read, written = ({}, {}) if disk is None else measure_disk(disk, device, sizes)
    return GpuSpec(
        name=device.name,
        memory_bytes=memory_bytes if memory_bytes is not None else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        bytes_per_s=bytes_per_s,
        flops_per_s={dtype: flops_per_s for dtype, flops_per_s in measured.items() if flops_per_s is not None},
        d2h_bytes_per_s=link.d2h_bytes_per_s,
        h2d_bytes_per_s=link.h2d_bytes_per_s,
        both_bytes_per_s=both_bytes_per_s,
        copy_latency_s=link.latency_s,
        launch_s=launch_s,
        factors=FACTORS,
        host_updates_per_s=alone,
        host_cast_updates_per_s=with_casts,
        shared_updates_per_s=shared_updates_per_s,
        shared_bytes_per_s=shared_bytes_per_s,
        disk_read_bytes_per_s=read,
        disk_write_bytes_per_s=written,
        source=f"memkit {__version__} bench machine, torch {torch.__version__}; factors as of an H200",
    )


def spec_text(spec: GpuSpec, width: int = 80) -> str:
    flops = ", ".join(f"{dtype} {flops_per_s / 1e12:.3g}" for dtype, flops_per_s in spec.flops_per_s.items())
    lines = [
        f"{spec.name}: {spec.memory_bytes / 2**30:.1f} GiB of {spec.bytes_per_s / 1e9:.4g} GB/s",
        f"matrix products, TFLOPs per second: {flops}",
        f"link: {spec.d2h_bytes_per_s / 1e9:.1f} GB/s to the host, {spec.h2d_bytes_per_s / 1e9:.1f} GB/s back, "
        f"{spec.both_bytes_per_s / 1e9:.1f} GB/s each way at once, {spec.copy_latency_s * 1e6:.0f} us a copy",
        f"an op takes at least {spec.launch_s * 1e6:.1f} us",
    ]
    if spec.shared_updates_per_s is not None and spec.shared_bytes_per_s is not None:
        lines.append(
            f"copies both ways and AdamW on the host at once: {spec.shared_bytes_per_s / 1e9:.1f} GB/s each way, "
            f"{spec.shared_updates_per_s / 1e9:.2f}e9 parameters/s"
        )
    return wrapped("\n".join(lines), width) + (f"\n\n{_host_text(spec, width)}" if spec.host_updates_per_s else "")
