"""`GpuSpec`: predicts the seconds of ops; and the GPUs that memkit knows by name."""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path

from memkit.core.schemas import read_json
from memkit.errors import ReportFormatError
from memkit.plan.step import OpWork

SCHEMA = "memkit.GpuSpec"
SCHEMA_VERSION = 1
_BY_THREADS = ("host_updates_per_s", "host_cast_updates_per_s", "disk_read_bytes_per_s", "disk_write_bytes_per_s")
_ASK = "`memkit bench machine --save FILE` writes a whole one."


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Speed of the link each way while the other is idle: n bytes take about `latency_s + n / bytes_per_s`."""

    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    latency_s: float = 0.0  # of a copy of no bytes

    def __str__(self) -> str:
        return (
            f"{self.d2h_bytes_per_s / 1e9:.1f} GB/s to the host, {self.h2d_bytes_per_s / 1e9:.1f} GB/s back, "
            f"{self.latency_s * 1e6:.0f} us each"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """One kind of GPU, with the link to its host. Speeds are per second, with nothing else running, unless noted.

    Bytes and FLOPs per second are those that a large copy and a large matrix product reach, not those of a datasheet.

    Raises:
        ValueError: a figure is missing, not a number, or not above 0 (latency, launch and factors may be 0).
    """

    name: str
    """The name for `--gpu NAME`, or the device's own name."""
    memory_bytes: int
    """Device memory that a process can use."""
    bytes_per_s: float
    """Bandwidth of device memory, read or written."""
    flops_per_s: Mapping[str, float]
    """For each dtype, of matrix products: dense, and with TF32 for float32 where the GPU has it (as PyTorch computes
    convolutions, and matrix products after `torch.set_float32_matmul_precision("high")`)."""
    d2h_bytes_per_s: float
    """Bandwidth of the link from the device to the host."""
    h2d_bytes_per_s: float
    """Bandwidth of the link from the host to the device."""
    both_bytes_per_s: float
    """Bandwidth each way while both directions are busy. No plan uses it yet: in a step nothing comes back before all has
    left."""
    copy_latency_s: float = 15e-6
    """Fixed seconds of a copy."""
    launch_s: float = 4e-6
    """The least seconds of an op."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """How much longer an op takes than its bytes or FLOPs at full speed, by kind ("convolution") or op
    ("aten.native_layer_norm"), and for backward ops apart ("convolution_backward"). 1 where none is given."""
    host_updates_per_s: Mapping[str, float] = field(default_factory=dict)
    """By number of threads ("16"): parameters that the host's cores update per second, by fused AdamW in float32, in blocks.
    This and all fields below are empty or None if they were not measured."""
    host_cast_updates_per_s: Mapping[str, float] = field(default_factory=dict)
    """The same with gradients that arrive, and weights that leave, as bfloat16."""
    shared_updates_per_s: float | None = None
    """Parameters that the cores update per second while copies go both ways, with the most threads that were measured."""
    shared_bytes_per_s: float | None = None
    """Bandwidth of these copies, each way."""
    disk_read_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    """Read bandwidth of a disk, by number of threads."""
    disk_write_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    """Write bandwidth of a disk, by number of threads."""
    source: str
    is_measured: bool = False
    """Whether its predictions were compared with real steps."""

    def __post_init__(self) -> None:
        for name in ("name", "source"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} must be text; found {getattr(self, name)!r}")
        for name in ("memory_bytes", "bytes_per_s", "d2h_bytes_per_s", "h2d_bytes_per_s", "both_bytes_per_s"):
            _check(name, getattr(self, name))
        for name in ("copy_latency_s", "launch_s"):
            _check(name, getattr(self, name), may_be_zero=True)
        for name in ("flops_per_s", "factors", *_BY_THREADS):
            values = getattr(self, name)
            if not isinstance(values, Mapping):
                raise ValueError(f"{name} must be numbers by name; found {values!r}")
            for key, value in values.items():
                _check(f"{name}[{key!r}]", value, may_be_zero=name == "factors")
        for name in ("shared_updates_per_s", "shared_bytes_per_s"):
            if getattr(self, name) is not None:
                _check(name, getattr(self, name))
        if not isinstance(self.memory_bytes, int):
            raise ValueError(f"memory_bytes must be a whole number; found {self.memory_bytes!r}")
        if not isinstance(self.is_measured, bool):
            raise ValueError(f"is_measured must be true or false; found {self.is_measured!r}")

    def seconds(self, op: OpWork, *, is_backward: bool) -> float:
        """Return the seconds of an op: its bytes or its FLOPs, whichever take longer, times the factor of its kind, and at
        least a launch. An op that reads and writes nothing (a view) takes no time.

        A dtype that the spec does not name computes as fast as the slowest that it names; if it names none, only bytes count.
        """
        if not op.num_bytes and not op.flops:
            return 0.0
        flops_per_s = self.flops_per_s.get(op.dtype) or min(self.flops_per_s.values(), default=math.inf)
        at_full_speed_s = max(op.num_bytes / self.bytes_per_s, op.flops / flops_per_s)
        names = (op.name.rpartition(".")[0], op.kind.value)
        keys = (key for name in names for key in ((f"{name}_backward", name) if is_backward else (name,)))
        return max(self.launch_s, at_full_speed_s * next((self.factors[key] for key in keys if key in self.factors), 1.0))

    def to_json(self) -> str:
        """Return the spec as JSON, for `from_json`."""
        mappings = {name: dict(getattr(self, name)) for name in ("flops_per_s", "factors", *_BY_THREADS)}
        content = {name: value for name, value in (asdict(self) | mappings).items() if value is not None}
        return json.dumps({"schema": SCHEMA, "schema_version": SCHEMA_VERSION, **content}, indent=1)

    @classmethod
    def from_json(cls, source: str | os.PathLike[str]) -> GpuSpec:
        """Read a spec that `to_json` or `memkit bench machine` wrote: its text, or (as a `pathlib.Path`) its file.

        Raises:
            ReportFormatError: it is no spec, a field of it is missing or wrong, or it was written by a newer memkit.
            OSError: the file cannot be read.
        """
        content, where = read_json(
            source, schema=SCHEMA, version=SCHEMA_VERSION, what="the spec of a GPU", error=ReportFormatError, do=_ASK
        )
        known = {item.name: item for item in fields(cls)}
        try:
            for name, item in known.items():
                if name not in content and item.default is MISSING and item.default_factory is MISSING:
                    raise ValueError(f'it has no "{name}"')
            if not content["flops_per_s"]:
                raise ValueError('flops_per_s must name at least one dtype, such as {"float32": 1e13}; found none')
            return cls(**{name: value for name, value in content.items() if name in known})
        except ValueError as error:
            raise ReportFormatError(f"{where} is not the whole spec of a GPU: {error}. {_ASK}") from error


def _check(name: str, value: object, *, may_be_zero: bool = False) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{name} must be a number; found {value!r}")
    if value < 0 or (value == 0 and not may_be_zero):
        raise ValueError(f"{name} must be {'0 or more' if may_be_zero else 'above 0'}; found {value!r}")


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
}  # how far ops of a ResNet-50 (float32, TF32) and a Llama (bfloat16) stay below an H200's full speed: taken for every GPU
_OF_MEMORY, _OF_FLOPS = 4.0 / 4.8, 0.7075  # of an H200's datasheet figures, what a large copy and product reach


def _from_datasheet(
    name: str,
    memory_gib: float,
    memory_gb_per_s: float,
    tflops: tuple[float, float, float],
    link_gb_per_s: tuple[float, float, float],
    source: str,
) -> GpuSpec:
    """Return a spec from CUDA's memory and a datasheet: TFLOPS of 16 bit, TF32, float64; GB/s out, back and both at once."""
    half, tf32, double = (1e12 * _OF_FLOPS * figure for figure in tflops)
    out, back, both = (1e9 * figure for figure in link_gb_per_s)
    return GpuSpec(
        name=name,
        memory_bytes=int(memory_gib * 2**30),
        bytes_per_s=1e9 * _OF_MEMORY * memory_gb_per_s,
        flops_per_s={"bfloat16": half, "float16": half, "float32": tf32, "float64": double},
        d2h_bytes_per_s=out,
        h2d_bytes_per_s=back,
        both_bytes_per_s=both,
        factors=FACTORS,
        source=source,
        is_measured=name == "H200",
    )


_PCIE4 = (25.0, 25.0, 21.0)  # GB/s of x16 from pinned memory. Source: nvbandwidth, many machines; both scaled as on PCIe 5
_PCIE5 = (55.3, 55.5, 50.8)  # GB/s of PCIe 5 x16, as measured by memkit beside an H200
_C2C = (290.0, 370.0, 250.0)
_HOPPER = (989.4, 494.7, 66.9)
_AMPERE = (312.0, 156.0, 19.5)
_4X16 = "link: PCIe 4 x16"
_OF_H200 = "NVIDIA H200 datasheet (SXM); speeds reached and link (PCIe 5) as measured by memkit"
_OF_3060 = f"28 SMs at 1.777 GHz, each as of the GA102 whitepaper, and 360 GB/s (12 GB); {_4X16}"
_OF_GH200 = "NVIDIA GH200 datasheet (96 GB); link: NVLink-C2C, 450 GB/s each way, of which copies reach less: a guess"
_ROWS = (
    ("H200", 139, 4800, _HOPPER, _PCIE5, _OF_H200),
    ("H100", 79, 3350, _HOPPER, _PCIE5, "NVIDIA H100 datasheet and Hopper whitepaper (SXM5, 80 GB); link as of an H200"),
    ("A100-80", 79, 2039, _AMPERE, _PCIE4, f"NVIDIA A100 datasheet (SXM4, 80 GB); {_4X16}"),
    ("A100-40", 39, 1555, _AMPERE, _PCIE4, f"NVIDIA A100 datasheet (SXM4, 40 GB); {_4X16}"),
    ("L40S", 44, 864, (362.05, 183.0, 1.43), _PCIE4, f"NVIDIA L40S datasheet (48 GB); {_4X16}"),
    ("RTX 4090", 23.5, 1008, (165.2, 82.6, 1.29), _PCIE4, f"NVIDIA Ada architecture whitepaper (24 GB); {_4X16}"),
    ("RTX 3090", 23.5, 936, (71.0, 35.6, 0.56), _PCIE4, f"NVIDIA Ampere GA102 architecture whitepaper (24 GB); {_4X16}"),
    ("RTX 3060", 11.6, 360, (25.5, 12.7, 0.2), _PCIE4, _OF_3060),
    ("GH200", 94, 4000, _HOPPER, _C2C, _OF_GH200),
)
GPUS: Mapping[str, GpuSpec] = {row[0]: _from_datasheet(*row) for row in _ROWS}


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
    words = re.sub(r"\b(nvidia|geforce|rtx|sxm\d?|tensor core|gpu)(?![a-z])", "", name.casefold())
    return re.sub(r"[^a-z0-9]", "", words).removesuffix("gb").removesuffix("gib")
