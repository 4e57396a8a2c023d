"""What a GPU and its link can do: from the work of an op to seconds, and to JSON and back."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

from memkit.errors import ReportFormatError
from memkit.plan.step_trace import OpWork
from memkit.schemas import read_json

SCHEMA = "memkit.GpuSpec"
SCHEMA_VERSION = 1

_BY_THREADS = ("host_updates_per_s", "host_cast_updates_per_s", "disk_read_bytes_per_s", "disk_write_bytes_per_s")

_ASK = "`memkit bench machine --save FILE` writes a whole one."


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """One kind of GPU, with the link to its host. Speeds are per second, alone, unless said.

    Bytes and FLOPs per second are those that a large copy and a large matrix product reach, not those that a datasheet names.

    Raises:
        ValueError: a figure is missing, not a number, or not above 0 (latency, launch and factors may be 0).
    """

    name: str
    """As in `--gpu NAME`, or what the device calls itself."""
    memory_bytes: int
    """What a process can use of its memory."""
    bytes_per_s: float
    """Of its own memory, read or written."""
    flops_per_s: Mapping[str, float]
    """For each dtype, of matrix products: dense, and with TF32 for float32 where the GPU has it (as PyTorch computes
    convolutions, and matrix products once `torch.set_float32_matmul_precision("high")` says so)."""
    d2h_bytes_per_s: float
    """Of the link, from the device to the host."""
    h2d_bytes_per_s: float
    """Of the link, from the host to the device."""
    both_bytes_per_s: float
    """Each way, while both go on. No plan goes by it yet: in a step nothing comes back before all has left."""
    copy_latency_s: float = 15e-6
    """What a copy takes beside its bytes."""
    launch_s: float = 4e-6
    """The least that an op takes."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """By kind of op ("convolution") or by op ("aten.native_layer_norm"), and for backward ops apart ("convolution_backward"):
    how much longer one takes than its bytes or FLOPs at full speed. 1 where none is given."""
    host_updates_per_s: Mapping[str, float] = field(default_factory=dict)
    """By number of threads ("16"): parameters that the host's cores update in a second, by fused AdamW in float32, in blocks.
    This and all below: none where it was not measured."""
    host_cast_updates_per_s: Mapping[str, float] = field(default_factory=dict)
    """The same with gradients that come as bfloat16, and weights that go as such."""
    shared_updates_per_s: float | None = None
    """What the cores update while copies go both ways, with the most threads that were measured."""
    shared_bytes_per_s: float | None = None
    """What copies reach meanwhile, each way."""
    disk_read_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    """By number of threads, of a disk."""
    disk_write_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    """The same for writes."""
    source: str
    """Where the figures are from."""
    is_measured: bool = False
    """Whether predictions for it were compared with steps on it."""

    def __post_init__(self) -> None:
        for name in ("name", "source"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} must be text; found {getattr(self, name)!r}")
        for name in ("memory_bytes", "bytes_per_s", "d2h_bytes_per_s", "h2d_bytes_per_s", "both_bytes_per_s"):
            _check(name, getattr(self, name))
        for name in ("copy_latency_s", "launch_s"):
            _check(name, getattr(self, name), may_be_zero=True)
        for name in ("flops_per_s", "factors", *_BY_THREADS):
            _check_each(name, getattr(self, name), may_be_zero=name == "factors")
        for name in ("shared_updates_per_s", "shared_bytes_per_s"):
            if getattr(self, name) is not None:
                _check(name, getattr(self, name))
        if not isinstance(self.memory_bytes, int):
            raise ValueError(f"memory_bytes must be a whole number; found {self.memory_bytes!r}")
        if not isinstance(self.is_measured, bool):
            raise ValueError(f"is_measured must be true or false; found {self.is_measured!r}")

    def seconds(self, op: OpWork, *, is_backward: bool) -> float:
        """Return what an op takes: its bytes or its FLOPs, whichever take longer, times the factor of its kind, and at least a
        launch. One that reads and writes nothing (a view) takes no time.

        A dtype that the spec does not name computes as fast as the slowest that it names; if it names none, only bytes count.
        """
        if not op.num_bytes and not op.flops:
            return 0.0
        flops_per_s = self.flops_per_s.get(op.dtype) or min(self.flops_per_s.values(), default=math.inf)
        at_full_speed_s = max(op.num_bytes / self.bytes_per_s, op.flops / flops_per_s)
        return max(self.launch_s, at_full_speed_s * self._factor(op, is_backward))

    def _factor(self, op: OpWork, is_backward: bool) -> float:
        for name in (op.name.rpartition(".")[0], op.kind.value):
            for key in (f"{name}_backward", name) if is_backward else (name,):
                if key in self.factors:
                    return self.factors[key]
        return 1.0

    def to_json(self) -> str:
        """Return it as JSON, for `from_json`."""
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
        try:
            return _spec_from(content)
        except ValueError as error:
            raise ReportFormatError(f"{where} is not the whole spec of a GPU: {error}. {_ASK}") from error


def _spec_from(content: Mapping[str, Any]) -> GpuSpec:
    known = {item.name: item for item in fields(GpuSpec)}
    for name, item in known.items():
        if name not in content and item.default is MISSING and item.default_factory is MISSING:
            raise ValueError(f'it has no "{name}"')
    if not content["flops_per_s"]:
        raise ValueError('flops_per_s must name at least one dtype, such as {"float32": 1e13}; found none')
    return GpuSpec(**{name: value for name, value in content.items() if name in known})


def _check(name: str, value: object, *, may_be_zero: bool = False) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not isinstance(value, (int, float)) or not is_number:
        raise ValueError(f"{name} must be a number; found {value!r}")
    if value < 0 or (value == 0 and not may_be_zero):
        raise ValueError(f"{name} must be {'0 or more' if may_be_zero else 'above 0'}; found {value!r}")


def _check_each(name: str, values: object, *, may_be_zero: bool) -> None:
    if not isinstance(values, Mapping):
        raise ValueError(f"{name} must be numbers by name; found {values!r}")
    for key, value in values.items():
        _check(f"{name}[{key!r}]", value, may_be_zero=may_be_zero)
