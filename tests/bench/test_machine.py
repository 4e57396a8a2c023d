"""`memkit bench machine`: what it measures, and that `memkit plan` can read it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from memkit.bench.machine import measure_machine
from memkit.device import CudaDevice, ReferenceDevice
from memkit.plan.gpu import GpuSpec
from memkit.plan.gpus import GPUS
from tests.bench.cases import assert_fails, run_command


def test_rehearsal_writes_a_spec(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "machine.json"

    status, out, _ = run_command(capsys, "bench", "machine", "--device", "cpu", "--save", str(path))

    spec = GpuSpec.from_json(path)
    assert status == 0
    assert out.startswith("reference: ")
    assert "GB/s each way at once" in out
    assert (spec.name, spec.is_measured) == ("reference", False)
    assert {"float32", "bfloat16"} <= spec.flops_per_s.keys()


def test_precision_and_random_numbers_are_left_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    multiply = Tensor.__matmul__
    monkeypatch.setattr(Tensor, "__matmul__", lambda a, b: (seen.add(torch.get_float32_matmul_precision()), multiply(a, b))[1])
    random = torch.get_rng_state()

    measure_machine(ReferenceDevice())

    assert seen == {"high"}
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one here")
def test_without_a_gpu_it_is_told_how_to_rehearse(capsys: pytest.CaptureFixture[str]) -> None:
    assert_fails(capsys, ["bench", "machine"], "--device cpu rehearses without one")


def test_a_device_that_is_none_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert_fails(capsys, ["bench", "machine", "--device", "card"], "such as \"cuda:1\"; found 'card'")


def test_where_it_writes_is_looked_at_first(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert_fails(capsys, ["bench", "machine", "--device", "cpu", "--save", str(tmp_path)], "Is a directory")


@pytest.mark.gpu
def test_a_gpu_is_about_what_is_known_of_it() -> None:
    spec = measure_machine(CudaDevice(torch.device("cuda")))

    assert spec.flops_per_s["bfloat16"] > spec.flops_per_s["float32"]
    assert spec.both_bytes_per_s < 1.05 * min(spec.d2h_bytes_per_s, spec.h2d_bytes_per_s)
    assert 1e-6 < spec.launch_s < 30e-6
    if "H200" in spec.name:
        known = GPUS["H200"]
        assert spec.bytes_per_s == pytest.approx(known.bytes_per_s, rel=0.1)
        assert spec.flops_per_s["bfloat16"] == pytest.approx(known.flops_per_s["bfloat16"], rel=0.15)
        assert spec.flops_per_s["float32"] == pytest.approx(known.flops_per_s["float32"], rel=0.2)
        assert spec.d2h_bytes_per_s == pytest.approx(known.d2h_bytes_per_s, rel=0.1)
