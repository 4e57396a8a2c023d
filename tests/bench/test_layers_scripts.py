"""The parts of `examples/bench/bench_layers.py`, each as it runs in small: what they print, and that it holds."""

from __future__ import annotations

import importlib
import math
import re
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

from memkit.device import CpuDevice, Device, ReferenceDevice
from memkit.transfer import Link
from tests.bench.cases import BENCHES, measuring

KEYS = {
    "name",
    "backward",
    "offload_ratio",
    "options",
    "h2d_bytes_per_s",
    "d2h_bytes_per_s",
    "step_s",
    "forward_s",
    "backward_s",
    "streamed_bytes",
    "slot_bytes",
    "roofline_s",
    "to_roofline",
    "to_plain",
    "fetches_per_step",
    "demand_fetches_per_step",
    "overflows",
    "stall_s_per_step",
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers", "ignore:.*no memory apart from"),
]


class Scripts(NamedTuple):
    curves: ModuleType
    peers: ModuleType
    training: ModuleType
    setting: ModuleType


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Scripts:
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(BENCHES)
    names = "layers_curves", "layers_peers", "layers_training", "setting"
    return Scripts(*(importlib.import_module(name) for name in names))


def _setting(scripts: Scripts, device: Device, **options: Any) -> Any:
    return scripts.setting.Setting(device=device, steps=1, fast=False, tiny=True, ends_s=math.inf, **options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*the system did not pin")
@pytest.mark.parametrize(
    ("name", "given", "ratios"),
    [("forward", (), [0.0, 0.5, 1.0]), ("host", (0.5, 1.0), [0.5, 1.0]), ("unpinned", (), [1.0, 1.0])],
)
def test_curve_has_a_line_for_each_ratio(scripts: Scripts, name: str, given: tuple[float, ...], ratios: list[float]) -> None:
    lines = list(scripts.curves.BENCHES[name](_setting(scripts, CpuDevice(), ratios=given)))

    assert [line["ratio"] for line in lines] == ratios
    for line in lines:
        assert "error" not in line
        assert set(line) >= KEYS
        assert set(line["plain"]) == {
            "step_s",
            "forward_s",
            "backward_s",
            "peak_allocated_bytes",
            "peak_reserved_bytes",
            "in_a_row_s",
        }
    assert [line["num_streamed"] for line in lines] == [4 * ratio for ratio in ratios]
    assert bool(lines[-1]["grads_bytes"]) == (name == "host")


@pytest.mark.slow
def test_dit_streams_blocks_of_two_sizes(scripts: Scripts) -> None:
    (line,) = scripts.curves.dit(_setting(scripts, ReferenceDevice()))

    assert "error" not in line
    assert (line["ratio"], line["num_streamed"], line["overflows"]) == (0.5, 3, 0)
    assert line["slot_bytes"] <= line["streamed_bytes"]
    assert line["to_roofline"] > 0
    assert "peak_over_expected_bytes" in line


def test_dit_trains_lora_on_the_projections_of_attention(scripts: Scripts) -> None:
    dit = importlib.import_module("dit")
    workload = dit.dit(2, 32, 8, width=64, num_heads=4, num_double=2, num_single=4, rank=2)

    workload.loss(workload.forward()).backward()

    grads = {name for name, parameter in workload.model.named_parameters() if parameter.grad is not None}
    assert grads == {name for name, parameter in workload.model.named_parameters() if parameter.requires_grad}
    assert {name.rsplit(".", 3)[1] for name in grads} == {"qkv", "proj"}
    assert len(grads) == 2 * (2 * 2 * 2 + 4 * 2)


@pytest.mark.slow
def test_peers_are_told_one_by_one_beside_plain_and_memkit(scripts: Scripts) -> None:
    lines = list(scripts.peers.peers_forward(_setting(scripts, CpuDevice())))

    assert [line["engine"] for line in lines] == ["plain", "memkit", "memkit", *(peer.name for peer in scripts.peers.PEERS)]
    found = {line["engine"]: line for line in lines}
    assert found["memkit"]["num_streamed"] == 4
    for name in ("block swap", "FSDP2 CPUOffloadPolicy"):
        assert found[name]["to_plain"] > 0
        assert found[name]["to_memkit"] > 0
    assert all(("step_s" in line) != ("left_out" in line) for line in lines)


@pytest.mark.parametrize(
    ("backward_s", "d2h_bytes", "expected_s"),
    [(3.0, 0.0, 2.0 + 3.0), (3.0, 100.0, 2.0 + 10.0), (0.0, 0.0, 2.0)],
    ids=["computes longer", "copies longer", "forward only"],
)
def test_roofline_is_the_longer_of_compute_and_transfer_in_each_pass(
    scripts: Scripts, backward_s: float, d2h_bytes: float, expected_s: float
) -> None:
    found = {"num_steps": 1, "step_s": 9.0, "peak_allocated_bytes": None, "peak_reserved_bytes": None}
    plain = measuring.Measurement(forward_s=1.0, backward_s=backward_s, **found)
    link = Link(d2h_bytes_per_s=10.0, h2d_bytes_per_s=50.0)

    assert scripts.curves.layers_roofline_s(plain, link, 100, d2h_bytes) == expected_s


def test_capped_run_has_the_losses_of_the_plain_one(scripts: Scripts) -> None:
    (line,) = scripts.training.capped(_setting(scripts, ReferenceDevice()))

    assert "error" not in line
    assert line["cap_bytes"] == line["weight_bytes"] // 2
    assert line["num_streamed"] == 4
    assert line["losses"] == line["plain_losses"][0]
    assert len(set(line["losses"])) == 3
    assert (line["plain_spread"], line["difference"]) == (0.0, 0.0)


def test_nothing_grows_while_training_and_sampling_take_turns(scripts: Scripts) -> None:
    (line,) = scripts.training.alternate(_setting(scripts, ReferenceDevice()))

    assert line["num_different"] == 0
    assert line["after_3"] == line["after_all"]
    assert line["after_all"]["peak_allocated_bytes"] > 0
    assert line["after_all"]["num_pins"] > 0


def test_share_that_is_found_out_is_told_with_what_was_predicted(scripts: Scripts) -> None:
    (line,) = scripts.training.auto(_setting(scripts, ReferenceDevice()))

    assert "error" not in line
    assert line["num_layers"] == 4
    assert line["compute_s"] > 0
    assert line["predicted_s"] >= line["compute_s"]
    assert line["actual_s"] > 0
    assert line["predicted_peak_bytes"] > 0


def test_lora_begins_at_the_base_model(scripts: Scripts) -> None:
    lora = importlib.import_module("lora")
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    batch = torch.randn(2, 4)
    expected = model(batch)

    trained = lora.add_lora(model, ("1",), rank=2)

    assert torch.equal(model(batch), expected)
    assert [tuple(parameter.shape) for parameter in trained] == [(2, 4), (4, 2)]


def test_picture_is_drawn_from_lines_that_were_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(BENCHES)
    draw = importlib.import_module("draw_layers").draw
    name = "llama_3.2b_lora16_checkpointed"
    line = {"name": name, "backward": True, "where": "a GPU", "step_s": 0.5, "peak_allocated_bytes": 2**33}
    lines = [{**line, "bench": "layers", "ratio": x, "offload_ratio": None} for x in (0.0, 1.0)]
    lines += [{**line, "bench": "layers_peers", "engine": engine} for engine in ("plain", "memkit", "block swap")]
    other = {**line, "bench": "layers", "ratio": 0.5, "offload_ratio": None, "name": "dit_8+16_lora16_checkpointed"}

    draw([*lines, other, {"bench": "layers_auto"}], tmp_path / "layers.svg")

    texts = re.findall(r"<!-- (.*?) -->", (tmp_path / "layers.svg").read_text())
    assert {"LayerOffload", "block swap", "0 streamed", "1 streamed", f"{name} on a GPU"} <= set(texts)
    assert not {"plain", "memkit", "0.5 streamed"} & set(texts)
    with pytest.raises(ValueError, match="lora_checkpoint"):
        draw([other], tmp_path / "none.svg")
