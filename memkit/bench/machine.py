"""Measures what plans need to know of a machine: its GPU, the link to it, its host and its disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from memkit._version import __version__
from memkit.bench.host import REHEARSAL, WHOLE, HostUpdates, host_text, measure_disk
from memkit.device import Device
from memkit.device.ceilings import measure_ceilings, measure_flops, measure_launch
from memkit.plan.gpu import FACTORS, GpuSpec
from memkit.terminal import wrapped
from memkit.transfer import Disk, measure_link
from memkit.transfer.link import measure_both_ways

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_COPIED_BYTES = {"cuda": 256 * 2**20}


def measure_machine(device: Device, *, disk: Disk | None = None) -> GpuSpec:
    """Measure a device, its link and its host; return them as a spec.

    Of the device: memory bandwidth by a large copy, matrix products in each dtype that it supports, the least time of an op. Of
    the link: copies in each direction alone and in both at once, and a copy's latency. Of the host: AdamW updates on its cores,
    alone and during such copies, and reads and writes of a disk. A disk takes up to a minute, the rest seconds.

    How much single kinds of ops deviate from that (`GpuSpec.factors`) is not measured: the factors are those of an H200.

    Raises:
        DiskError: the disk has too little space, or fails.
        HostMemoryError: there is not enough host memory for the copies.
        torch.OutOfMemoryError: there is not enough device memory.
    """
    num_bytes = _COPIED_BYTES.get(device.torch_device.type, 2**20)
    with torch.no_grad(), _tf32():
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
        memory_bytes=_memory_bytes(device),
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


@contextmanager
def _tf32() -> Iterator[None]:
    """Have matrix products in float32 use TF32 where there is any."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _memory_bytes(device: Device) -> int:
    """Return what this process can allocate now; on a device that doesn't say, the host's memory."""
    counter = device.memory_counter()
    found = None if counter is None else counter.capacity_bytes()
    return found if found is not None else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def spec_text(spec: GpuSpec, width: int = 80) -> str:
    """Return the measurements as text, in lines of at most `width` columns."""
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
    by_threads = host_text(
        spec.host_updates_per_s, spec.host_cast_updates_per_s, spec.disk_read_bytes_per_s, spec.disk_write_bytes_per_s, width
    )
    return wrapped("\n".join(lines), width) + (f"\n\n{by_threads}" if spec.host_updates_per_s else "")
