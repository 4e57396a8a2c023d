"""From the work of an op to seconds; the GPUs that are known; specs in files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memkit.errors import ReportFormatError
from memkit.plan.gpu import GPUS, GpuSpec, find_gpu
from memkit.plan.step import OpKind, OpWork

SPEC = GpuSpec(
    name="one",
    memory_bytes=2**30,
    bytes_per_s=1e9,
    flops_per_s={"float32": 1e10, "bfloat16": 4e10},
    d2h_bytes_per_s=1e8,
    h2d_bytes_per_s=1e8,
    both_bytes_per_s=0.5e8,
    launch_s=1e-6,
    factors={"convolution": 1.5, "convolution_backward": 3.0, "norm": 2.0, "aten.native_layer_norm": 1.0},
    source="made up",
)


def op(kind: OpKind, *, flops: float = 0.0, num_bytes: int = 0, dtype: str = "float32", name: str = "aten.x.default") -> OpWork:
    return OpWork(name=name, kind=kind, flops=flops, num_bytes=num_bytes, dtype=dtype)


@pytest.mark.parametrize(
    ("work", "is_backward", "seconds"),
    [
        (op(OpKind.MATMUL, flops=1e8, num_bytes=10**6), False, 1e-2),  # bound by FLOPs
        (op(OpKind.MATMUL, flops=1e8, num_bytes=10**6, dtype="bfloat16"), False, 2.5e-3),
        (op(OpKind.MATMUL, flops=1e8, num_bytes=10**6, dtype="complex64"), False, 1e-2),  # as the slowest that is named
        (op(OpKind.POINTWISE, flops=1e6, num_bytes=10**6), False, 1e-3),  # bound by bytes
        (op(OpKind.CONVOLUTION, num_bytes=10**6), False, 1.5e-3),
        (op(OpKind.CONVOLUTION, num_bytes=10**6), True, 3e-3),
        (op(OpKind.NORM, num_bytes=10**6), True, 2e-3),  # none of its own for the backward
        (op(OpKind.NORM, num_bytes=10**6, name="aten.native_layer_norm.default"), False, 1e-3),
        (op(OpKind.POINTWISE, num_bytes=4), False, 1e-6),  # a launch
        (op(OpKind.POINTWISE), False, 0.0),  # a view
    ],
)
def test_an_op_takes_its_bytes_or_its_flops(work: OpWork, is_backward: bool, seconds: float) -> None:
    assert SPEC.seconds(work, is_backward=is_backward) == pytest.approx(seconds)


@pytest.mark.parametrize("name", GPUS)
def test_known_gpus_are_found_by_their_names(name: str) -> None:
    spec = find_gpu(name)

    assert spec is GPUS[name]
    assert find_gpu(name.lower().replace(" ", "-")) is spec
    assert spec.is_measured == (name == "H200")
    assert spec.source
    assert 1.5e11 < spec.bytes_per_s < 5e12
    assert spec.flops_per_s["float64"] < spec.flops_per_s["float32"] < spec.flops_per_s["bfloat16"]
    assert spec.both_bytes_per_s <= min(spec.d2h_bytes_per_s, spec.h2d_bytes_per_s)


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        *(("RTX 4090", asked) for asked in ("rtx 4090", "4090", "rtx4090")),
        *(("RTX 3090", "RTX-3090"), ("A100-80", "A100 80GB"), ("A100-40", "NVIDIA A100-SXM4-40GB")),
        *(("H100", "NVIDIA H100 SXM5"), ("H200", "h200"), ("RTX 3060", "NVIDIA GeForce RTX 3060")),
    ],
)
def test_names_are_read_forgivingly(name: str, asked: str) -> None:
    assert find_gpu(asked).name == name


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("a100", r"found 'a100'\. Did you mean A100-80 or A100-40\?"),
        ("RTX 4080", "found 'RTX 4080'. Did you mean RTX 4090.*memkit bench machine --save FILE"),
        *((part, f"found '{part}'") for part in ("A10", "L40", "H20", "80", "G", "30", "", "tpu", "rtx")),
    ],
)
def test_what_names_no_gpu_or_several_lists_the_known(asked: str, message: str) -> None:
    with pytest.raises(
        ValueError, match=f"(?s)H200, H100, A100-80, A100-40, L40S, RTX 4090, RTX 3090, RTX 3060, GH200.*{message}"
    ):
        find_gpu(asked)


def test_what_is_no_name_raises() -> None:
    with pytest.raises(TypeError, match="gpu is a name such as"):
        find_gpu(4090)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match=r"no_such\.json"):
        find_gpu("no_such.json")


def test_specs_are_read_from_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(SPEC.to_json())

    assert GpuSpec.from_json(SPEC.to_json()) == SPEC
    assert GpuSpec.from_json(json.dumps({**json.loads(SPEC.to_json()), "colour": "green"})) == SPEC
    assert find_gpu(path) == find_gpu(str(path)) == SPEC
    assert find_gpu(SPEC) is SPEC


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bytes_per_s": None}, "bytes_per_s must be a number; found None"),
        ({"bytes_per_s": "fast"}, "bytes_per_s must be a number; found 'fast'"),
        ({"bytes_per_s": True}, "bytes_per_s must be a number; found True"),
        ({"h2d_bytes_per_s": 0}, "h2d_bytes_per_s must be above 0; found 0"),
        ({"both_bytes_per_s": -1}, "both_bytes_per_s must be above 0; found -1"),
        ({"memory_bytes": 1.5}, "memory_bytes must be a whole number; found 1.5"),
        ({"launch_s": -1e-6}, "launch_s must be 0 or more; found -1e-06"),
        ({"d2h_bytes_per_s": float("nan")}, "d2h_bytes_per_s must be a number; found nan"),
        ({"flops_per_s": {"float32": -2}}, "flops_per_s['float32'] must be above 0; found -2"),
        ({"flops_per_s": 1e12}, "flops_per_s must be numbers by name"),
        ({"factors": {"norm": "2"}}, "factors['norm'] must be a number; found '2'"),
        ({"name": 7}, "name must be text; found 7"),
        ({"is_measured": "yes"}, "is_measured must be true or false; found 'yes'"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], message: str) -> None:
    content = json.dumps({**json.loads(SPEC.to_json()), **change})

    with pytest.raises(ReportFormatError) as raised:
        GpuSpec.from_json(content)
    with pytest.raises(ValueError) as made:
        replace(SPEC, **change)

    assert str(raised.value).startswith(f"this text is not the whole spec of a GPU: {message}")
    assert "memkit bench machine --save FILE" in str(raised.value)
    assert message in str(made.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no json", "it is not JSON"),
        (replace(SPEC, flops_per_s={}).to_json(), "flops_per_s must name at least one dtype"),
        ("[]", 'it has no "schema": "memkit.GpuSpec"'),
        ('{"schema": "memkit.MemoryReport"}', 'it has no "schema": "memkit.GpuSpec"'),
        ('{"schema": "memkit.GpuSpec"}', '"schema_version" must be a whole number from 1 on; found None'),
        ('{"schema": "memkit.GpuSpec", "schema_version": 2}', "schema version 2; this memkit reads versions up to 1. Update"),
        *(
            (SPEC.to_json().replace(f'"{name}"', '"other"'), f'it has no "{name}"')
            for name in ("name", "memory_bytes", "bytes_per_s", "flops_per_s", "both_bytes_per_s", "source")
        ),
    ],
)
def test_what_is_no_spec_is_told(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ReportFormatError, match=message):
        GpuSpec.from_json(text)
    (tmp_path / "mine.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ReportFormatError, match=r"mine\.json' is not the spec of a GPU: it is not JSON"):
        find_gpu(tmp_path / "mine.json")
