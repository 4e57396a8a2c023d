"""Measures what `memkit plan` has to know of a machine: its GPU, and the link to it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from memkit._version import __version__
from memkit.device import Device
from memkit.device.ceilings import measure_ceilings, measure_flops, measure_launch
from memkit.plan.gpu import GpuSpec
from memkit.plan.gpus import FACTORS
from memkit.transfer import measure_link
from memkit.transfer.link import measure_both_ways

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_COPIED_BYTES = {"cuda": 256 * 2**20}


def measure_machine(device: Device) -> GpuSpec:
    """Return what a device and its link can do, measured: its memory by a large copy, matrix products in each dtype that it
    knows, copies each way alone and both ways at once, a copy's latency, and the least that an op takes. It takes seconds.

    By how much single kinds of ops miss that (`GpuSpec.factors`) is not measured: it is taken from an H200.

    Raises:
        HostMemoryError: there is no room in host memory for what is copied.
        torch.OutOfMemoryError: there is too little on the device.
    """
    num_bytes = _COPIED_BYTES.get(device.torch_device.type, 2**20)
    with torch.no_grad(), _tf32():
        bytes_per_s = measure_ceilings(device).bytes_per_s
        measured = {str(dtype).removeprefix("torch."): measure_flops(device, dtype) for dtype in _DTYPES}
        launch_s = measure_launch(device)
    link = measure_link(device, num_bytes=num_bytes)
    return GpuSpec(
        name=device.name,
        memory_bytes=_memory_bytes(device),
        bytes_per_s=bytes_per_s,
        flops_per_s={dtype: flops_per_s for dtype, flops_per_s in measured.items() if flops_per_s is not None},
        d2h_bytes_per_s=link.d2h_bytes_per_s,
        h2d_bytes_per_s=link.h2d_bytes_per_s,
        both_bytes_per_s=measure_both_ways(device, num_bytes=num_bytes),
        copy_latency_s=link.latency_s,
        launch_s=launch_s,
        factors=FACTORS,
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
    """Return what this process can allocate now; on a device that does not say, what the host has."""
    counter = device.memory_counter()
    found = None if counter is None else counter.capacity_bytes()
    return found if found is not None else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def spec_text(spec: GpuSpec) -> str:
    """Return what was measured, for people."""
    flops = ", ".join(f"{dtype} {flops_per_s / 1e12:.3g}" for dtype, flops_per_s in spec.flops_per_s.items())
    return (
        f"{spec.name}: {spec.memory_bytes / 2**30:.1f} GiB of {spec.bytes_per_s / 1e9:.4g} GB/s\n"
        f"matrix products, TFLOPs per second: {flops}\n"
        f"link: {spec.d2h_bytes_per_s / 1e9:.1f} GB/s to the host, {spec.h2d_bytes_per_s / 1e9:.1f} GB/s back, "
        f"{spec.both_bytes_per_s / 1e9:.1f} GB/s each way at once, {spec.copy_latency_s * 1e6:.0f} us a copy\n"
        f"an op takes at least {spec.launch_s * 1e6:.1f} us"
    )
