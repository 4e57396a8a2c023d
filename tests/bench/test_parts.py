"""Each script of `examples/bench` runs in small, in this process: each part tells what it is to tell, and no error."""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from memkit.device import CpuDevice, ReferenceDevice
from memkit.plan import plan_ratio
from tests.bench.cases import BENCHES, bench_module, layers, lines_of, printed_by, tiny_setting

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("no_compiled_code_is_left"),
]


@pytest.fixture(autouse=True)
def _needs() -> None:
    pytest.importorskip("transformers")


def _lines_of(script: str, part: str, **options: Any) -> list[dict[str, Any]]:
    """Return what a part of a script tells; none of it is an error."""
    module = bench_module(script)
    parts = {name: found.run for name, found in module.PARTS.items()} if hasattr(module, "PARTS") else module.BENCHES
    lines = [{**line, "part": part} for line in lines_of(parts[part], tiny_setting(**options))]
    assert [line for line in lines if "error" in line] == []
    return lines


def _of(lines: list[dict[str, Any]], *names: str) -> list[Any]:
    """Return some figures of each line; of one name, the figure alone."""
    return [line[names[0]] if len(names) == 1 else tuple(line[name] for name in names) for line in lines]


_BENCHES_OF_REMAT = {
    "supernet": [f"remat_supernet{what}" for what in ("_plain", "_plain_steps", "", "_steps", "_larger", "_largest")],
    "planning": ["remat_planning"] * 3,
    "recorder_host": ["remat_recorder_host"] * 4,
    "resnet50": ["remat", "remat_fit"],
}
_COMPILED = [(way, f"compiled_{kind}") for way in ("forward", "call") for kind in ("plain", "offload", "remat")]
_RATIOS = {"forward": ((), [0.0, 0.5, 1.0]), "host": ((0.5, 1.0), [0.5, 1.0]), "unpinned": ((), [1.0, 1.0])}


@pytest.mark.parametrize(
    ("script", "part", "figures", "found"),
    [
        ("bench_steady", "flat", ("num_storages",), [10, 100]),
        ("bench_steady", "offload_whisper", ("ratio",), [0.0, 0.1, 0.2, 0.5, 1.0]),
        (
            "bench_steady",
            "remat_llama",
            ("bench",),
            ["remat_keep_all", "remat_spaced_peaks", *["remat_spaced"] * 4, "remat_rises"],
        ),
        ("bench_steady", "compiled", ("way", "bench"), _COMPILED),
        *(("bench_remat", part, ("bench",), benches) for part, benches in _BENCHES_OF_REMAT.items()),
        ("bench_layers", "dit", ("ratio", "num_streamed", "overflows"), [(0.5, 3, 0)]),
    ],
)
def test_lines_of_a_part(script: str, part: str, figures: tuple[str, ...], found: list[Any]) -> None:
    options: dict[str, Any] = {"device": CpuDevice(), "fast": True} if script == "bench_remat" else {}

    lines = _lines_of(script, part, **options)

    assert _of([line for line in lines if all(name in line for name in figures)], *figures) == found
    assert all(line["to_spaced"] == line["step_s"] / line["spaced_s"] for line in lines if "to_spaced" in line)
    assert not any(line.get("new_graphs", 0) + line.get("new_graph_breaks", 0) for line in lines[:2])


def test_steady_chain_and_region() -> None:
    (_, one) = (line for line in _lines_of("bench_steady", "chain") if line["bench"] == "host_chain")
    regions = [line for line in _lines_of("bench_steady", "region") if line["bench"] == "host_region"]

    assert one["num_moved"] == 37
    assert {line["name"] for line in regions} == {"norm_gelu", "norm_dropout"}
    assert all(line["is_equal"]["torch"] for line in regions if "is_equal" in line)


# Budgets and states


@pytest.mark.parametrize("part", ["llama", "gpt2", "fits", "cap", "others", "compiled_llama", "changes"])
def test_budget(part: str) -> None:
    lines = _lines_of("bench_budget", part)

    assert any("follows_plan" in line for line in lines) == (part != "changes")
    assert bench_module("budget_tables").tables(lines).keys() > {"machine"}


@pytest.mark.parametrize("model", bench_module("budget_models").OTHERS)
def test_other_models_of_budgets_run(model: str) -> None:
    models = bench_module("budget_models")

    workload = models.built(models.OTHERS[model], tiny_setting())

    assert workload.loss(workload.forward()).requires_grad


@pytest.mark.parametrize(
    ("part", "num_rows"),
    [
        *(("states", 8), ("micro", 2), ("nothing", 3), ("streamed", 3), ("capped", 1), ("compared", 3), ("disk", 2)),
        *(("peer_by_hand", 2), ("peer_fsdp", 1)),
    ],
)
def test_states(part: str, num_rows: int) -> None:
    lines = [line for line in _lines_of("bench_states", part) if line["bench"] != "states_machine"]

    assert len(lines) == num_rows
    assert all(line["step_s"] > 0 and line["numel"] > 0 for line in lines)
    assert all(line["to_r"] > 0 for line in lines if line.get("row") == "all streams")
    assert all(line["are_losses_equal"] for line in lines if line["bench"] == "states_compared")


# Recomputing, offloading, streaming, splitting


def test_host(capsys: pytest.CaptureFixture[str]) -> None:
    *lines, stays = printed_by("bench_host", ["--steps", "1", "--only", "llama"], capsys)

    assert [line["engine"] for line in lines] == ["offload 0.0", "offload 0.1", "offload 1.0", "remat 1.0", "remat 0.5"]
    assert [bool(line["num_moved"]) for line in lines] == [False, True, True, False, False]
    assert [bool(line["num_dropped"]) for line in lines] == [False, False, False, False, True]
    assert stays["num_stay"] == lines[1]["num_saves"] - lines[1]["num_moved"]


def test_ratios_move_what_their_plan_says_and_are_set_beside_the_roofline(monkeypatch: pytest.MonkeyPatch) -> None:
    script = bench_module("bench_offload")
    monkeypatch.setattr(script, "_on_gpu", lambda make: make())
    options = argparse.Namespace(ratios=[0, 0.5, 1], steps=1, fast=False, peers=False)

    line, close = script.against_roofline(lambda: layers(torch.randn(512, 512), num_layers=3), options, ReferenceDevice())

    sizes = [2**20] * (2 * 3 - 1)  # each GELU's input and each Linear's, the model's own input apart
    assert line["saved_bytes"] == sum(sizes)
    for row in line["rows"]:
        assert row["moved_bytes"] == plan_ratio(sizes, row["ratio"], window_bytes=row["window_bytes"]).offload_bytes
        assert row["roofline_s"] >= max(line["plain"]["forward_s"], line["plain"]["backward_s"])
        assert row["to_roofline"] == row["memkit_s"] / row["roofline_s"]
    assert [row["synchronous_s"] is None for row in line["rows"]] == [True, False, False]
    assert close["bench"] == "offload_close_to_plain"


@pytest.mark.parametrize("part", _RATIOS)
def test_layers_of_each_ratio(part: str) -> None:
    given, ratios = _RATIOS[part]

    lines = _lines_of("bench_layers", part, device=CpuDevice(), ratios=given)

    assert _of(lines, "ratio", "num_streamed") == [(ratio, 4 * ratio) for ratio in ratios]
    assert all(line["to_plain"] > 0 and line["to_roofline"] > 0 and line["plain"]["step_s"] > 0 for line in lines)
    assert bool(lines[-1]["grads_bytes"]) == (part == "host")


def test_layers_beside_peers() -> None:
    lines = _lines_of("bench_layers", "peers_forward", device=CpuDevice())

    found = {line["engine"]: line for line in lines}
    assert [*found] == ["plain", "memkit", *(peer.name for peer in bench_module("layers_adaptors").PEERS)]
    assert found["memkit"]["num_streamed"] == 4
    assert all(found[name]["to_memkit"] > 0 for name in ("block swap", "FSDP2 CPUOffloadPolicy"))
    assert all(("step_s" in line) != ("left_out" in line) for line in lines)


def test_layers_in_training() -> None:
    (capped,), (turns,), (auto,) = (_lines_of("bench_layers", part) for part in ("capped", "alternate", "auto"))

    assert (capped["cap_bytes"], capped["num_streamed"]) == (capped["weight_bytes"] // 2, 4)
    assert capped["losses"] == capped["plain_losses"][0]
    assert (len(set(capped["losses"])), capped["plain_spread"], capped["difference"]) == (3, 0.0, 0.0)
    assert (turns["num_different"], turns["after_3"]) == (0, turns["after_all"])
    assert turns["after_all"]["peak_allocated_bytes"] > 0 < turns["after_all"]["num_pins"]
    assert auto["num_layers"] == 4
    assert auto["predicted_s"] >= auto["compute_s"] > 0 < auto["actual_s"]


def test_streamed_tokens_per_second() -> None:
    bench = bench_module("bench_streamed")

    lines = lines_of(lambda setting: bench.lines(setting, "tiny", [(2, 32), (3, 16)], ["plain", "streamed"]))

    found = [(line["way"], line["tokens"], line.get("num_streamed"), line.get("error")) for line in lines]
    assert found == [(way, tokens, num, None) for way, num in (("plain", None), ("streamed", 3)) for tokens in ("2x32", "3x16")]
    for line, num_tokens in zip(lines, [64, 48, 64, 48], strict=True):
        assert line["tokens_per_s"] == pytest.approx(num_tokens / line["step_s"])
        assert line["model_tflops"] == pytest.approx(6 * line["numel"] * line["tokens_per_s"] / 1e12)


@pytest.mark.integrations
def test_families(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed_by("bench_families", ["--tiny", "--steps", "2"], capsys)

    assert [line["family"] for line in lines] == [*bench_module("families").FAMILIES]
    assert [(line["family"], line.get("error")) for line in lines if "error" in line] == []
    assert all(line["unequal_losses"] == [] and line["are_gradients_equal"] == [True, True] for line in lines)


@pytest.mark.integrations
def test_first_steps_of_families(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench_module("families").FAMILIES, "vit", lambda is_tiny: 1 / 0)

    failed, *lines = printed_by("bench_families", ["--tiny", "--first", "--only", "vit", "gnn", "lengths"], capsys)

    assert (failed["family"], failed["error"]) == ("vit", "ZeroDivisionError: division by zero")
    assert [(line["family"], line["way"]) for line in lines] == [
        (name, way) for name in ("gnn", "lengths") for way in ("with", "attach")
    ]
    assert all(len(line["peaks_to_budget"]) == 3 for line in lines)


@pytest.mark.integrations
def test_ratios_of_steps_that_vary(capsys: pytest.CaptureFixture[str]) -> None:
    *offloaded, remat = printed_by("bench_varying", ["--tiny", "--steps", "5"], capsys)

    assert [line["way"] for line in offloaded] == ["CPUOffload(0.1)", "CPUOffload(0.3)", "CPUOffload(1)"]
    assert all(line["later_to_roofline"] <= line["later_to_plain"] for line in offloaded)
    assert offloaded[-1]["shares_moved"][:2] == [1.0] * 2  # later ones stay within the window
    assert (remat["num_checkpointed"], remat["num_layers"]) == (0, 4)  # their peaks are counted on a GPU alone


@pytest.mark.parametrize(
    ("part", "num_rows"),
    [
        *(("full", 2), ("lora", 2), ("acting", 8), ("states", 3), ("host_params", 14), ("ends", 4), ("profiled", 2)),
        ("bits", 13),
    ],
)
def test_shard(part: str, num_rows: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On one rank: bits on two are those of FSDP2 by the tests of tests/distributed."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")  # so that they are set back
    bench = bench_module("bench_shard")

    bench.run_rank(0, 1, 0, argparse.Namespace(tiny=True, steps=1, only=[part]))

    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == num_rows
    assert all(line["step_s"] > 0 for line in lines)
    assert all(line["num_differing"] == 0 and line["of"] > 1000 for line in lines if part == "bits")
    assert sum("of_roofline" in line for line in lines) == {"states": 2, "host_params": 11}.get(part, 0)
    assert all(line["profiled_peak_bytes"] > line["gathered_bytes"] > 0 for line in lines if part == "profiled")


def test_profile(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = printed_by("bench_profile", ["--meta", "--models", "resnet50"], capsys)

    assert line["activation_bytes"] == 21993045504


# How scripts run their parts


def test_nothing_is_measured_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    no_gpu = bench_module("shared").NO_GPU
    script = bench_module("bench_steady").SCRIPT
    assert printed_by("bench_remat", ["--here", "--only", "cap"], capsys) == [{"bench": "cap", "skipped": no_gpu}]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["bench_steady.py"])
        patch.setitem(type(script).main.__globals__, "cuda_is_available", lambda: False)
        script.main()

    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [{"part": part, "skipped": no_gpu} for part in bench_module("bench_steady").PARTS]


_SCRIPT = f"""
import sys, time
sys.path.insert(0, {str(BENCHES)!r})
import parts
parts.IMPORTED_AHEAD = ()

def quick(setting):
    yield {{"took": setting.ends_s > time.perf_counter()}}

def fails(setting):
    raise KeyError("mine")
    yield

def sleeps(setting):
    time.sleep(600)
    yield {{}}

PARTS = {{
    "quick": parts.Part(run=quick, limit_s=100, environment={{"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}),
    "fails": parts.Part(run=fails, limit_s=100),
    "sleeps": parts.Part(run=sleeps, limit_s=0.1),
}}
SCRIPT = parts.Script(path=__file__, parts=PARTS, about="", minutes=1)
if __name__ == "__main__":
    sys.exit(SCRIPT.main())
"""


def test_parts_run_one_after_the_other_in_processes_of_their_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "script.py"
    path.write_text(_SCRIPT)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHES)
        script = runpy.run_path(str(path))["SCRIPT"]

    status = script.run_parts(["quick", "fails", "sleeps"], ["--tiny", "--steps=1"], 5.0)

    told, quick, mine, fails, sleeps = (json.loads(line) for line in capfd.readouterr().out.splitlines())
    assert status == 1
    assert (told["part"], told["took"], told["allocator"]) == ("quick", True, "expandable_segments:True")
    assert quick.keys() == {"part", "taken_s"}
    assert mine["error"] == "KeyError: 'mine'"
    assert (fails["part"], fails["error"]) == ("fails", "ended with status 1")
    assert (sleeps["part"], sleeps["error"]) == ("sleeps", "took longer than 0 s")
    assert script.run_parts(["quick"], ["--tiny", "--steps=1"], 0.0) == 0
    assert "no time was left" in json.loads(capfd.readouterr().out)["skipped"]


def test_benches_run_one_after_the_other_in_processes_of_their_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "script.py"
    path.write_text("import sys, time\nprint(sys.argv[1:], flush=True)\ntime.sleep(600 * ('late' in sys.argv))\n")
    run_each = partial(bench_module("shared").run_each, str(path))

    assert run_each(["one"], ["--tiny"], patience_s=100) == 0
    assert capfd.readouterr().out == "['--tiny', '--here', '--only', 'one']\n"
    assert run_each(["late"], [], patience_s=0.1) == 1
    assert "took longer than 0.1 s" in capfd.readouterr().out


@pytest.mark.parametrize("script", ["bench_budget", "bench_states", "bench_steady"])
def test_names_of_parts_are_those_that_are_described(script: str) -> None:
    module = bench_module(script)
    described = {name: "peer_*" if name.startswith("peer_") else name for name in module.PARTS}

    assert [name for name, text in described.items() if f"\n    {text} " not in module.__doc__] == []
