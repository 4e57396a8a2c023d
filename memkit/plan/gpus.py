"""The GPUs that memkit knows by name, each with where its figures are from."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from memkit.plan.gpu import GpuSpec

_GIB = 2**30

FACTORS: Mapping[str, float] = {
    "convolution": 1.45,
    "convolution_backward": 3.0,
    "convolution_of_few": 10.4,
    "norm": 2.45,
    "pool": 2.17,
    "matmul": 1.23,
    "matmul_backward": 1.14,
    "attention": 1.17,
    "attention_backward": 1.1,
    "pointwise": 1.03,
    "aten.native_layer_norm": 1.0,
    "aten.native_layer_norm_backward": 1.0,
    "aten._fused_rms_norm": 1.0,
    "aten._fused_rms_norm_backward": 1.0,
}
"""By how much the ops of a ResNet-50 in float32 (channels first, TF32) and of a Llama in bfloat16 miss the H200's full speed.
Nobody has measured others: they are taken for every GPU. That of a convolution of few channels is of the ResNet's first."""

_OF_MEMORY, _OF_FLOPS = 4.0 / 4.8, 0.7075
"""What a large copy and a large matrix product reach on an H200 of what its datasheet names. Taken for every GPU."""


def _from_datasheet(
    name: str,
    *,
    memory_gib: float,
    memory_gb_per_s: float,
    tflops: tuple[float, float, float],
    link_gb_per_s: tuple[float, float, float],
    source: str,
    is_measured: bool = False,
) -> GpuSpec:
    """Return a spec from what a datasheet says.

    Args:
        memory_gib: what CUDA reports as total, rounded down.
        tflops: dense ones of matrix products: of 16-bit dtypes summed in float32, of TF32, of float64.
        link_gb_per_s: to the host, back, and each way with both at once.
    """
    half, tf32, double = (1e12 * _OF_FLOPS * figure for figure in tflops)
    out, back, both = (1e9 * figure for figure in link_gb_per_s)
    return GpuSpec(
        name=name,
        memory_bytes=int(memory_gib * _GIB),
        bytes_per_s=1e9 * _OF_MEMORY * memory_gb_per_s,
        flops_per_s={"bfloat16": half, "float16": half, "float32": tf32, "float64": double},
        d2h_bytes_per_s=out,
        h2d_bytes_per_s=back,
        both_bytes_per_s=both,
        factors=FACTORS,
        source=source,
        is_measured=is_measured,
    )


_PCIE4 = (25.0, 25.0, 21.0)
"""GB/s of PCIe 4 x16 from pinned memory. Source: about 25 each way by nvbandwidth on many machines; both at once is taken for
worse in the way of PCIe 5, and differs from board to board."""
_PCIE5 = (55.3, 55.5, 50.8)
"""The same of PCIe 5 x16, as measured by memkit beside an H200."""

GPUS: Mapping[str, GpuSpec] = {
    spec.name: spec
    for spec in (
        _from_datasheet(
            "H200",
            memory_gib=139,
            memory_gb_per_s=4800,
            tflops=(989.4, 494.7, 66.9),
            link_gb_per_s=_PCIE5,
            source="NVIDIA H200 datasheet (SXM); speeds reached and link (PCIe 5) as measured by memkit",
            is_measured=True,
        ),
        _from_datasheet(
            "H100",
            memory_gib=79,
            memory_gb_per_s=3350,
            tflops=(989.4, 494.7, 66.9),
            link_gb_per_s=_PCIE5,
            source="NVIDIA H100 datasheet and Hopper whitepaper (SXM5, 80 GB); link as of an H200",
        ),
        _from_datasheet(
            "A100-80",
            memory_gib=79,
            memory_gb_per_s=2039,
            tflops=(312.0, 156.0, 19.5),
            link_gb_per_s=_PCIE4,
            source="NVIDIA A100 datasheet (SXM4, 80 GB); link: PCIe 4 x16",
        ),
        _from_datasheet(
            "A100-40",
            memory_gib=39,
            memory_gb_per_s=1555,
            tflops=(312.0, 156.0, 19.5),
            link_gb_per_s=_PCIE4,
            source="NVIDIA A100 datasheet (SXM4, 40 GB); link: PCIe 4 x16",
        ),
        _from_datasheet(
            "L40S",
            memory_gib=44,
            memory_gb_per_s=864,
            tflops=(362.05, 183.0, 1.43),
            link_gb_per_s=_PCIE4,
            source="NVIDIA L40S datasheet (48 GB); link: PCIe 4 x16",
        ),
        _from_datasheet(
            "RTX 4090",
            memory_gib=23.5,
            memory_gb_per_s=1008,
            tflops=(165.2, 82.6, 1.29),
            link_gb_per_s=_PCIE4,
            source="NVIDIA Ada architecture whitepaper (24 GB); link: PCIe 4 x16",
        ),
        _from_datasheet(
            "RTX 3090",
            memory_gib=23.5,
            memory_gb_per_s=936,
            tflops=(71.0, 35.6, 0.56),
            link_gb_per_s=_PCIE4,
            source="NVIDIA Ampere GA102 architecture whitepaper (24 GB); link: PCIe 4 x16",
        ),
        _from_datasheet(
            "RTX 3060",
            memory_gib=11.6,
            memory_gb_per_s=360,
            tflops=(25.5, 12.7, 0.2),
            link_gb_per_s=_PCIE4,
            source="28 SMs at 1.777 GHz, each as of the GA102 whitepaper, and 360 GB/s (12 GB); link: PCIe 4 x16",
        ),
        _from_datasheet(
            "GH200",
            memory_gib=94,
            memory_gb_per_s=4000,
            tflops=(989.4, 494.7, 66.9),
            link_gb_per_s=(290.0, 370.0, 250.0),
            source="NVIDIA GH200 datasheet (96 GB); link: NVLink-C2C, 450 GB/s each way, of which copies reach less: a guess",
        ),
    )
}
"""By name."""


def find_gpu(gpu: str | os.PathLike[str] | GpuSpec) -> GpuSpec:
    """Return the spec of a GPU.

    Args:
        gpu: the spec itself; a name such as "RTX 4090", whatever the case, blanks and hyphens in it ("rtx-4090", "4090"); or a
            file that `memkit bench machine --save` wrote (a `pathlib.Path`, or text that ends in ".json" or names a file).

    Raises:
        TypeError: it is none of these.
        ValueError: memkit knows no such GPU, or several of that name ("A100").
        ReportFormatError: the file holds no spec.
        OSError: the file cannot be read.

    Example:
        >>> find_gpu("rtx-4090").name
        'RTX 4090'
    """
    if isinstance(gpu, GpuSpec):
        return gpu
    if isinstance(gpu, os.PathLike):
        return GpuSpec.from_json(Path(gpu))
    if not isinstance(gpu, str):
        raise TypeError(f'gpu is a name such as "RTX 4090", a file with a spec, or a memkit.plan.GpuSpec; found {gpu!r}')
    asked, known = _plain(gpu), {_plain(name): name for name in GPUS}
    if asked in known:
        return GPUS[known[asked]]
    if gpu.endswith(".json") or os.path.isfile(gpu):
        return GpuSpec.from_json(Path(gpu))
    variants = [name for name in GPUS if asked == _plain(name.partition("-")[0])]
    near = variants or [known[name] for name in difflib.get_close_matches(asked, known, n=2, cutoff=0.5)]
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise ValueError(
        f"memkit knows {', '.join(GPUS)}; found {gpu!r}.{hint} For another GPU, run `memkit bench machine --save FILE` on it "
        "and give FILE"
    )


def _plain(name: str) -> str:
    """Return a name as it is compared: no case, blanks or hyphens, and without the words that change nothing."""
    words = re.sub(r"\b(nvidia|geforce|rtx|sxm\d?|tensor core|gpu)(?![a-z])", "", name.casefold())
    return re.sub(r"[^a-z0-9]", "", words).removesuffix("gb").removesuffix("gib")
