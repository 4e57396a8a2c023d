"""`memkit bench machine`: what it measures, and that `memkit plan` can read it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from memkit.cli import machine
from memkit.cli.machine import REHEARSAL, HostUpdates, _Block, measure_machine, spec_text, update_threads
from memkit.device import CudaDevice, ReferenceDevice
from memkit.errors import ReportFormatError
from memkit.plan.gpu import GPUS, GpuSpec
from tests.bench.cases import assert_fails, run_command

_THREADS = machine._UPDATE_THREADS


def test_rehearsal_writes_a_spec(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "machine.json"

    status, out, _ = run_command(capsys, "bench", "machine", "--device", "cpu", "--save", str(path))

    spec = GpuSpec.from_json(path)
    assert status == 0
    assert out.startswith("reference: ")
    assert "GB/s each way at once" in out
    assert (spec.name, spec.is_measured) == ("reference", False)
    assert {"float32", "bfloat16"} <= spec.flops_per_s.keys()
    assert "disk" not in out
    assert spec.disk_read_bytes_per_s == {}


def test_host_and_disk_are_measured_and_saved(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, directory = tmp_path / "machine.json", tmp_path / "scratch"
    directory.mkdir()

    status, out, _ = run_command(capsys, "bench", "machine", "--device", "cpu", "--disk", str(directory), "--save", str(path))

    spec = GpuSpec.from_json(path)
    assert status == 0
    assert list(directory.iterdir()) == []
    assert max(map(len, out.splitlines())) <= 80
    assert [int(number) for number in spec.host_updates_per_s] == update_threads()
    assert spec.host_cast_updates_per_s.keys() == spec.host_updates_per_s.keys()
    assert spec.disk_read_bytes_per_s.keys() == spec.disk_write_bytes_per_s.keys() == {"1", "4", "8"}
    assert spec.shared_updates_per_s is not None
    assert spec.shared_bytes_per_s is not None
    assert "copies both ways and AdamW on the host at once" in out
    for number, read_bytes_per_s in spec.disk_read_bytes_per_s.items():
        (row,) = (line.split() for line in out.splitlines() if line.split()[:1] == [number])
        assert row[-2:] == [f"{read_bytes_per_s / 1e9:.2f}", f"{spec.disk_write_bytes_per_s[number] / 1e9:.2f}"]


def test_files_of_before_are_read(tmp_path: Path) -> None:
    """Those have nothing of the host; those of a newer memkit are refused by name."""
    path = tmp_path / "machine.json"
    whole = json.loads(measure_machine(ReferenceDevice()).to_json())
    before = {name: value for name, value in whole.items() if not name.startswith(("host_", "shared_", "disk_"))}
    assert len(before) == len(whole) - 6

    path.write_text(json.dumps(before))
    spec = GpuSpec.from_json(path)

    assert (spec.host_updates_per_s, spec.shared_updates_per_s, spec.disk_write_bytes_per_s) == ({}, None, {})
    assert GpuSpec.from_json(spec.to_json()) == spec
    assert "None" not in spec_text(spec)
    path.write_text(json.dumps({**whole, "schema_version": 2}))
    with pytest.raises(ReportFormatError, match="has schema version 2; this memkit reads versions up to 1"):
        GpuSpec.from_json(path)


@pytest.mark.parametrize("casts", [False, True])
def test_updates_are_those_of_adamw(casts: bool) -> None:
    block = _Block(1000)
    gradient = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    block.gradient.copy_(gradient)
    block.parameter.grad.copy_(gradient)
    plain = torch.nn.Parameter(torch.zeros(1000))
    plain.grad = gradient.float()
    optimizer = torch.optim.AdamW([plain], lr=1e-4, fused=True)

    for _ in range(3):
        (block.update_with_casts if casts else block.update)()
        optimizer.step()

    assert torch.equal(block.parameter, plain)
    assert torch.equal(block.weight, plain.detach().bfloat16()) == casts


def test_threads_precision_and_random_numbers_are_left_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, multiply = set(), Tensor.__matmul__
    monkeypatch.setattr(Tensor, "__matmul__", lambda a, b: (seen.add(torch.get_float32_matmul_precision()), multiply(a, b))[1])
    monkeypatch.setattr(machine, "update_threads", lambda: [2])
    before = torch.get_num_threads()
    assert before == 1  # or it may be left as it is found
    random = torch.get_rng_state()

    measure_machine(ReferenceDevice())
    HostUpdates(REHEARSAL).measure(casts=True)

    assert torch.get_num_threads() == before
    assert seen == {"high"}
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cpu", "--disk", "/no/such/place"], "--disk: Disk needs a directory"),
        (["--device", "card"], "such as \"cuda:1\"; found 'card'"),
        (["--device", "cpu", "--save", "/"], "Is a directory"),  # it looks before it measures
        ([], "--device cpu rehearses without one"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert_fails(capsys, ["bench", "machine", *arguments], message)


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


@pytest.mark.parametrize(("num_cores", "found"), [(1, [1]), (6, [1, 4, 6]), (64, [1, 4, 8, 16])])
def test_updates_are_timed_with_no_more_threads_than_cores(
    num_cores: int, found: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_UPDATE_THREADS", _THREADS)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(num_cores)), raising=False)

    assert update_threads() == found
