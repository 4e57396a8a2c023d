"""The figures that scripts of `examples/bench` tell: what is timed, and with what it is compared."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import memkit
from memkit.device import CpuDevice, MemoryCounter, ReferenceDevice
from memkit.transfer import Link
from tests.bench.cases import BENCHMARKS, Workload, bench_module, cells, layers, measuring, tiny_setting

ABOUT = {"device": "NVIDIA H200", "cuda": "13.0", "torch": "2.11.0", "memkit": "0.1.0", "steps": 10}
STATES_NUMEL = 10**9
STATES_PLAIN = {"forward_s": 0.1, "backward_s": 0.3, "update_s": 0.05, "step_s": 0.5}
STATES_MACHINE = {
    "bench": "states_machine",
    "d2h_bytes_per_s": 50e9,
    "h2d_bytes_per_s": 50e9,
    "both_bytes_per_s": 40e9,
    "shared_bytes_per_s": 30e9,
    "host_updates_per_s": {"1": 1e9, "8": 4e9},
    "host_cast_updates_per_s": {"1": 1e9, "8": 2e9},
    "shared_updates_per_s": 3e9,
}


def by_hand(**steps: tuple[float, float]) -> dict[str, dict[str, Any]]:
    """Return lines of what was set by hand: its seconds and its peak."""
    found = {"bench": "budget_front_other", "model": "gpt2", "plain_s": 0.1, "updates_once": True, **ABOUT}
    return {
        which: {**found, "which": which, "step_s": step_s, "ratio": step_s / 0.1, "peak_allocated_mib": peak_mib}
        for which, (step_s, peak_mib) in steps.items()
    }


def _step(step_s: float, **figures: Any) -> Any:
    found = {"forward_s": step_s / 3, "backward_s": 2 * step_s / 3, "host_s": step_s, "forward_host_s": step_s / 4}
    found["peak_allocated_bytes"] = None
    return bench_module("alternating").Step(step_s=step_s, **{**found, **figures})


def _plain(backward_s: float) -> Any:
    others = {"num_steps": 1, "step_s": 9.0, "peak_allocated_bytes": None, "peak_reserved_bytes": None}
    return measuring.Measurement(forward_s=1.0, backward_s=backward_s, **others)


_LINK = Link(d2h_bytes_per_s=10.0, h2d_bytes_per_s=50.0)
_PEAKS = {0: 100, 1: 90, 2: 95, 3: 70, 4: 60}
_STATES = STATES_PLAIN, STATES_MACHINE, STATES_NUMEL
_HAND = by_hand(slow=(0.2, 900.0), least=(0.3, 100.0), half=(0.15, 500.0), quick=(0.09, 1000.0), most=(0.11, 990.0))


@pytest.mark.parametrize(
    ("script", "function", "given", "expected"),
    [
        ("layers_curves", "layers_roofline_s", (_plain(3.0), _LINK, 100, 0.0), 2.0 + 3.0),  # computes longer
        ("layers_curves", "layers_roofline_s", (_plain(3.0), _LINK, 100, 100.0), 2.0 + 10.0),  # copies longer
        ("layers_curves", "layers_roofline_s", (_plain(0.0), _LINK, 100, 0.0), 2.0),  # forward only
        ("states_tables", "bound_s", ("device", *_STATES), 0.45 + 0.3),
        ("states_tables", "bound_s", ("device, within the backward", *_STATES), 0.15 + 0.3),
        ("states_tables", "bound_s", ("device, beside the next forward", *_STATES), 0.35 + 0.3),
        ("states_tables", "bound_s", ("device, half stays", *_STATES), 0.45 + 0.15),
        ("states_tables", "bound_s", ("host", *_STATES), 0.45 + 0.25),
        ("states_tables", "bound_s", ("plain", *_STATES), None),
        ("remat_spaced", "evenly_spaced", (24, 4), [0, 6, 12, 18]),
        ("remat_spaced", "evenly_spaced", (16, 3), [0, 5, 10]),
        ("remat_spaced", "evenly_spaced", (4, 0), []),
        ("remat_spaced", "fewest_within", (_PEAKS, 99), 1),
        ("remat_spaced", "fewest_within", (_PEAKS, 80), 3),
        ("remat_spaced", "fewest_within", (_PEAKS, 59), None),
        ("remat_spaced", "fewest_within", (_PEAKS, None), 4),
        ("remat_spaced", "most_rise", ([(0.7, 1.2), (0.5, 1.0), (0.3, 1.1)],), 1.2),
        ("remat_spaced", "most_rise", ([(0.7, 1.0), (0.5, 2.0)],), 0.5),
        ("remat_spaced", "most_rise", ([],), 1.0),
        ("host_chains", "steps_within", (12.0, 2.0, 10), 5),
        ("host_chains", "steps_within", (1.0, 2.0, 10), 2),
        ("budget_steps", "of_plain", (0.5, 2**30), f"{2**29}B"),
        ("budget_steps", "of_plain", (0.5, None), 0.5),
        ("budget_steps", "of_plain", (1.1, None), "1GiB"),
        ("budget_fronts", "best_of", ({**_HAND, "failed": {"error": "x"}},), ["least", "half", "most"]),
        ("budget_fronts", "best_of", (_HAND, 2), ["least", "most"]),
    ],
)
def test_figure(script: str, function: str, given: tuple[Any, ...], expected: Any) -> None:
    found = getattr(bench_module(script), function)(*given)

    assert found == (pytest.approx(expected) if isinstance(expected, float) else expected)


# Steps


def test_steps_of_engines_take_turns_after_one_of_each() -> None:
    entered: list[str] = []

    def named(name: str) -> Callable[[], Any]:
        return lambda: (entered.append(name), measuring.plain())[1]

    alternating, engines = bench_module("alternating"), {"a": named("a"), "b": named("b")}
    found = alternating.alternate(layers(torch.randn(4, 16)), engines, ReferenceDevice(), num_steps=2)
    steps = [_step(seconds, peak_allocated_bytes=peak) for seconds, peak in ((1.0, 5), (9.0, 7), (2.0, 6))]
    median = alternating.median_of(steps)

    assert entered == ["a", "b"] * 3
    assert set(found) == {"a", "b"}
    assert found["a"].step_s >= max(found["a"].forward_s, found["a"].backward_s)
    assert (median.step_s, median.peak_allocated_bytes) == (2.0, 7)  # the largest peak


def test_roofline_is_the_longer_of_computing_and_copying_each_way() -> None:
    alone, found = _step(3.0, forward_s=1.0, backward_s=2.0), _step(9.0, peak_allocated_bytes=100)
    warm = bench_module("alternating").Warm(peak_allocated_bytes=110, peak_reserved_bytes=165, step_s=9.0)
    moved = {"moved_out_bytes": 400, "moved_in_bytes": 300, "unique_bytes": 800, "window_bytes": 10, "num_copies_out": 4}
    others = {"num_copies_in": 3, "d2h_bytes_per_s": None, "h2d_bytes_per_s": None, "stall_out_s": 0.0, "stall_in_s": 0.0}
    link = Link(d2h_bytes_per_s=100.0, h2d_bytes_per_s=300.0)

    line = bench_module("offload_ratios").row(alone, found, warm, SimpleNamespace(**moved, **others), link)

    assert line["roofline_s"] == max(1.0, 400 / 100) + max(2.0, 300 / 300)
    assert (line["to_roofline"], line["to_plain"], line["reserved_to_allocated"]) == (9.0 / 6.0, 3.0, 1.5)


def _flops_of_backward(kept_ops: Sequence[Any]) -> int:
    layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    mine = layer.forward = torch.compile(layer.forward, backend="eager")
    with measuring.checkpointed_each([layer], kept_ops=kept_ops):
        assert layer.forward is not mine
        loss = layer(torch.ones(2, 4)).sum()
    assert layer.forward is mine
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    return counter.get_total_flops()


def test_checkpointing_keeps_the_results_of_named_ops_and_gives_back_a_forward_of_the_modules_own() -> None:
    assert _flops_of_backward([]) == 2 * _flops_of_backward([torch.ops.aten.addmm.default]) > 0


def test_each_storage_and_each_call_takes_what_is_beyond_plain() -> None:
    line = bench_module("host_chains").per_storage(_step(1.0), _step(3.0, host_s=2.0), 10)
    assert (line["host_us_per_storage"], line["us_per_storage"]) == (pytest.approx(1e5), pytest.approx(2e5))

    line = bench_module("host_region").per_call({"plain": (1e-3, 3e-3), "torch": (2e-3, 9e-3)}, 5)
    assert (line["torch_us_beyond"], line["plain_forward_us"]) == (pytest.approx(1000.0), pytest.approx(200.0))

    tenth = {"num_saves": 110, "num_moved": 10, "step_s": 0.5e-3 + 1e-3, "plain_s": 1e-3}
    stays = bench_module("bench_host").what_stays(tenth, {"us_per_moved": 30.0})
    assert stays == {"num_stay": 100, "us_per_stay": pytest.approx(2.0)}


# Budgets and batches


def test_budget_is_the_largest_that_was_tried_within_a_peak() -> None:
    largest_within = bench_module("bench_compiled").largest_within

    assert largest_within(lambda budget: budget + 50, 100, first=80, most=200)[0] == 50
    budget, tries = largest_within(lambda budget: budget // 40 * 40 + 50, 100, first=150, most=200)
    assert (budget, len(tries)) == (max(b for b, peak in tries if peak <= 100), 4)
    assert largest_within(lambda _: 1000, 100, first=80, most=200)[0] is None
    assert largest_within(lambda _: None, 100, first=80, most=200)[0] == 80


def test_learned_budget_is_timed_by_turns_with_plain_steps_and_tells_whether_it_is_kept_to() -> None:
    budget_steps, setting = bench_module("budget_steps"), tiny_setting()

    line = budget_steps.measured(layers(torch.randn(64, 64)), 0.5, setting, {"again": measuring.plain})
    memkit.reset("bench")
    too_small = budget_steps.measured(layers(torch.randn(64, 64)), 0.01, setting)
    memkit.reset("bench")

    assert line["way"] in ("plan", "regions", "regions and copies")
    assert (line["ratio"], line["to_again"]) == (line["step_s"] / line["plain_s"], line["step_s"] / line["again_s"])
    assert line["num_plans"] == len(line["plan_each_s"]) >= 1
    assert budget_steps.NUM_LEARNING <= len(line["learning_host_s"]) == line["num_learning"]
    assert line["is_settled"] or line["num_learning"] >= budget_steps.NUM_LEARNING  # on this clock another way may be tried
    assert line["warned"] == []
    assert "cannot be kept to" in too_small["warned"][0]
    assert too_small["peak_to_budget"] > 1
    assert budget_steps.has_stepped(nn.Linear(8, 8)).state  # nothing is left free for what has stepped


# Steps that vary


def test_figures_are_those_of_later_steps_beside_checkpointed_ones() -> None:
    families = bench_module("bench_families")

    def steps(*seconds_and_peaks: tuple[float, int]) -> list[Any]:
        return [families.Seen(seconds, peak, 0, loss) for loss, (seconds, peak) in enumerate(seconds_and_peaks)]

    mine = steps((9.0, 12), (1.0, 8), (2.0, 9), (3.0, 10))
    mine[3] = mine[3]._replace(loss=7.0)
    others = {way: steps((1.0, 1), (1.0, 1), (2.0, 1), (2.0, 1)) for way in ("plain", "checkpointed")}

    line = families.figures({**others, "memkit": mine}, 10)

    assert (line["median_to_checkpointed"], line["sum_to_plain"], line["sum_of_first_to_checkpointed"]) == (1.25, 1.25, 5.0)
    assert [line[f"{which}_peak_to_budget"] for which in ("worst", "worst_later", "first")] == [1.2, 1.0, 1.2]
    assert (line["first_s"], line["plain_s"], line["unequal_losses"]) == (9.0, 1.5, [4])


@pytest.mark.parametrize(("budget", "count"), [(100, 0), (99, 1), (75, 3), (60, 4), (59, None)])
def test_fewest_layers_that_keep_to_a_budget_are_found(budget: int, count: int | None) -> None:
    family = SimpleNamespace(blocks=range(4))
    runs = bench_module("bench_families").Runs(
        name="", family=family, device=None, peak=None, is_tiny=True, peaks={layers: 100 - 10 * layers for layers in range(5)}
    )

    assert runs.fewest(budget) == count


def test_peak_is_seen_though_others_reset_the_counter() -> None:
    class Counter(MemoryCounter):
        most = now = 0
        allocated_bytes, peak_bytes = (lambda self: self.now), (lambda self: self.most)
        peak_reserved_bytes = int

        def reset_peak(self) -> None:
            self.most = self.now

    counter = Counter()
    peak = bench_module("bench_families").Peak(counter)
    with peak.watched():
        counter.most = 7
        counter.reset_peak()
        counter.most = 3
        assert peak.take() == (7, 0)
        counter.most = 2
        assert peak.take() == (2, 0)
    assert Counter.reset_peak.__name__ == "reset_peak"


# Models


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_loss_in_pieces_has_the_gradients_of_the_whole() -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, tokens = bench_module("bench_streamed").build("tiny").float(), torch.randint(128, (3, 17))

    loss = model(tokens)
    loss.backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    whole = nn.functional.cross_entropy(model.model(input_ids=tokens).logits.flatten(0, 1), tokens.flatten())
    whole.backward()

    torch.testing.assert_close(loss, whole)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, msg=name)


def _workload(seen: Callable[[], None] = lambda: None) -> Workload:
    return layers(torch.randn(4, 16), num_layers=3, seen=seen)


def test_measures_so_many_steps_in_contexts_of_their_own_after_the_warm_up() -> None:
    calls: list[str] = []
    workload = _workload(lambda: calls.append("step"))

    def engine() -> memkit.CPUOffload:
        calls.append("context")
        return memkit.CPUOffload(1.0, "engine", min_bytes=0, device=device)

    device = ReferenceDevice()
    found = measuring.measure(workload, engine, device, num_steps=3, num_warmup=2, after_warmup=lambda: calls.append("warm"))

    assert calls == ["context", "step"] * 2 + ["warm"] + ["context", "step"] * 3
    assert found.num_steps == 3
    assert found.step_s >= max(found.forward_s, found.backward_s) > 0
    assert all(param.grad is None for param in workload.model.parameters())
    assert memkit.stats("engine").num_iterations == 5
    assert measuring.measure(_workload(), measuring.plain, CpuDevice(), num_steps=1, num_warmup=0).peak_allocated_bytes is None


def test_steps_in_a_row_follow_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    device, calls = CpuDevice(), list[str]()
    monkeypatch.setattr(device, "synchronize", lambda: calls.append("wait"))
    workload = _workload(lambda: calls.append("step"))

    found = measuring.measure(workload, measuring.plain, device, num_steps=2, num_warmup=1, num_in_a_row=3)

    assert calls == ["wait", "step", "wait"] * 3 + ["step"] * 4 + ["wait"]
    assert found.num_steps == 2
    assert found.in_a_row_s > 0


def test_without_a_backward_there_is_no_grad_mode_and_no_loss() -> None:
    modes: list[bool] = []
    workload = _workload(lambda: modes.append(torch.is_grad_enabled()))
    forward_only = replace(workload, backward=False, loss=lambda _: pytest.fail("a loss"))

    found = measuring.measure(forward_only, measuring.plain, CpuDevice(), num_steps=2, num_warmup=0)

    assert modes == [False, False]
    assert found.backward_s == 0
    assert found.step_s == found.forward_s > 0


def _gradients(workload: Workload, context: object) -> list[Tensor]:
    workload.model.zero_grad()
    with context:
        result = workload.forward()
    workload.loss(result).backward()
    return [param.grad.clone() for param in workload.model.parameters()]


@pytest.mark.parametrize("name", ["save_on_cpu", "synchronous", "checkpointed"])
def test_engines_change_no_gradient(name: str) -> None:
    workload = _workload()
    given, options = {"synchronous": ((10**6,), {"min_bytes": 0}), "checkpointed": ((workload.model,), {})}.get(name, ((), {}))

    found = _gradients(workload, getattr(measuring, name)(*given, **options))

    assert all(map(torch.equal, found, _gradients(workload, nullcontext())))


def test_blocks_are_the_members_of_uniform_lists_and_checkpointing_is_taken_off_again() -> None:
    model = torchvision.models.resnet18()
    blocks = measuring.blocks_of(model)

    assert [type(block).__name__ for block in blocks] == ["BasicBlock"] * 8
    assert list(measuring.torch_baselines(model)) == ["torch save_on_cpu", "checkpoint per block"]
    with measuring.checkpointed(model):
        assert "forward" in vars(blocks[0])
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (nn.Sequential(nn.Sequential(*[nn.Sequential(nn.Linear(4, 4)) for _ in range(2)])), "checkpoint per block"),
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "checkpoint per child"),
        (nn.Linear(4, 4), "checkpoint of the whole"),
    ],
    ids=["blocks", "children", "leaf"],
)
def test_checkpointing_suits_the_model(model: nn.Module, name: str) -> None:
    batch = torch.randn(2, 4)
    workload = Workload(name="tiny", model=model, forward=lambda: model(batch), loss=Tensor.sum)

    ((found, engine),) = measuring.checkpointing(model).items()

    assert found == name
    assert all(map(torch.equal, _gradients(workload, engine()), _gradients(workload, nullcontext())))


PAGES = {name: BENCHMARKS / f"{name}_h200_2026-11.md" for name in ("budget", "states", "steady")}
MIB = 2**20
BUDGET = {
    "bench": "budget",
    "part": "resnet50",
    "model": "resnet50",
    "asked": "6396MiB",
    "budget_mib": 6396.0,
    "plain_s": 0.1,
    "step_s": 0.11,
    "ratio": 1.1,
    "predicted_ratio": 1.09,
    "peak_allocated_mib": 6380.4,
    "peak_to_budget": 0.9976,
    "peak_to_predicted": 1.002,
    "seconds_to_predicted": 1.01,
    "num_plans": 1,
    "way": "plan",
    "num_replayed_ops": 30,
    "moved_mib": 512.0,
    "stall_s": 0.001,
    "num_saved": 181,
    "plan_s": 0.5,
    "learning_s": 3.0,
    "num_deviations": 0,
    "plain_forward_host_s": 0.01,
    "forward_host_s": 0.02,
    "remat_share": 0.23,
    "remat_s": 0.12,
    "remat_peak_mib": 6400.0,
    "to_remat": 11 / 12,
    **ABOUT,
}
OFFLOAD = {
    "bench": "offload_ratios",
    "part": "offload_gpt2",
    "name": "gpt2_24x1280",
    "ratio": 0.1,
    "plain_s": 0.1,
    "plain_peak_bytes": 10 * MIB,
    "step_s": 0.12,
    "to_plain": 1.2,
    "roofline_s": 0.11,
    "to_roofline": 12 / 11,
    "moved_out_bytes": MIB,
    "num_copies_out": 3,
    "peak_allocated_bytes": 8 * MIB,
    "peak_reserved_bytes": 10 * MIB,
    "reserved_to_allocated": 1.25,
    **ABOUT,
}
KEEPS_ALL = {"bench": "remat_keep_all", "part": "remat_gpt2", "plain_s": 0.1, "plain_peak_bytes": MIB, "step_s": 0.1}
SPACED = {
    "bench": "remat_spaced",
    "part": "remat_gpt2",
    "budget": 0.5,
    "step_s": 0.11,
    "step_peak_bytes": MIB,
    "spaced_s": 0.12,
    "spaced_peak_bytes": MIB,
    "num_layers": 24,
    "num_checkpointed": 13,
    "spaced_reaches_peak": True,
    "to_spaced": 11 / 12,
    "peak_reserved_bytes": 2 * MIB,
    "recorder_s": 0.0,
    "least_bytes": None,
}
REGION = {
    "bench": "host_region",
    "name": "norm_gelu",
    "plain_us": 60.0,
    "torch_us_beyond": 250.0,
    "torch_bare_us_beyond": 180.0,
}


def _tables(name: str, *lines: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = bench_module(f"{name}_tables").tables(list(lines))
    return found


# Pages


@pytest.mark.parametrize("name", ["budget", "steady"])
def test_page_has_a_place_for_each_table(name: str) -> None:
    module = bench_module(f"{name}_tables")
    made = dict.fromkeys(module._TABLES, "| a |\n")

    page = module.filled(PAGES[name].read_text(), made)

    assert page.count("| a |\n<!-- end -->") == len(made) == page.count("<!-- end -->")
    assert module.filled(page, {}) == page
    assert module.filled(page, {next(iter(made)): "| b |\n"}).count("| b |") == 1
    with pytest.raises(ValueError, match="no place in the page for chain"):
        module.filled("# Page\n", {"chain": "| a |\n"})


def test_page_has_a_place_for_steps_of_states() -> None:
    about = {"bench": "states", "numel": STATES_NUMEL, **STATES_PLAIN, "memory": {"peak_allocated_bytes": 2**31}}
    lines = [STATES_MACHINE, {**about, "row": "plain"}, {**about, "row": "device", "step_s": 0.75}]

    made = _tables("states", *[json.loads(json.dumps(line)) for line in lines])

    row = "| device | 0.750 | 1.500 | 0.750 | **1.000** | 0.050 | 2.00 | - | - |"
    assert row in bench_module("markdown_tables").filled(PAGES["states"].read_text(), made)


# Budgets


# Steady steps


def test_budget_is_a_row_of_each_table_that_it_is_in() -> None:
    made = _tables("budget", BUDGET)

    assert set(made) == {"machine", "resnet50", "beside", "planning"}
    (row,) = cells(made["resnet50"])
    assert row[:5] == ["6396", "100.0", "110.0", "**1.100**", "1.090"]
    assert row[5:] == ["6380", "0.998", "**1.002**", "**1.010**", "1", "plan", "30", "512", "1.0"]
    assert cells(made["beside"]) == [["6396", "110.0", "6380", "0.23", "120.0", "6400", "**0.917**", "-", "-"]]


def test_ratios_stand_below_plain_and_lines_of_the_last_run_count() -> None:
    made = _tables("steady", {**OFFLOAD, "step_s": 0.2}, OFFLOAD)

    assert set(made) == {"machine", "offload_gpt2"}
    assert cells(made["offload_gpt2"]) == [
        ["plain", "-", "-", "100.0", "-", "-", "-", "10", "-", "-"],
        ["0.1", "3", "1", "120.0", "1.200", "110.0", "**1.091**", "8", "10", "1.250"],
    ]
    assert cells(made["machine"]) == [["NVIDIA H200", "2.11.0", "13.0", "0.1.0", "10"]]
    assert _tables("steady", {"part": "chain", "taken_s": 3.0}) == {}


# Pictures


def _texts(picture: Path) -> set[str]:
    return set(re.findall(r"<!-- (.*?) -->", picture.read_text()))


def test_pictures_are_drawn_from_the_same_lines(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lines = [{**OFFLOAD, "step_peak_bytes": 8 * MIB}, SPACED, {**SPACED, "budget": 0.3, "error": "x"}, KEEPS_ALL, REGION]
    (steady,) = bench_module("draw_steady").draw(lines, str(tmp_path / "steady_{model}.svg"))
    hands = by_hand(**{"1 of 2 blocks checkpointed": (0.15, 500.0), "CPUOffload(0.1)": (0.11, 900.0)}).values()
    mixed = {"bench": "budget_compiled_by_hand", "model": "llama", "step_s": 0.08, "eager_s": 0.1, "peak_allocated_mib": 700.0}
    budgets = bench_module("draw_budget").draw([*hands, {**BUDGET, "model": "gpt2"}, mixed], str(tmp_path / "{model}.svg"))

    words = {"plain", "CPUOffload, by ratio", "Rematerialize, by budget", "0.1", "0.5"}
    assert words | {"GPT-2 on NVIDIA H200: a step by its peak"} <= _texts(steady)
    assert [path.name for path in (steady, *budgets)] == ["steady_gpt2.svg", "gpt2.svg", "llama_compiled.svg"]
    assert all(path.stat().st_size > 1000 for path in budgets)


def test_picture_of_layers_is_drawn_from_lines_that_were_printed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw, path, name = bench_module("draw_layers").draw, tmp_path / "layers.svg", "llama_3.2b_lora16_checkpointed"
    line = {"name": name, "backward": True, "where": "a GPU", "step_s": 0.5, "peak_allocated_bytes": 2**33}
    lines = [{**line, "bench": "layers", "ratio": x, "offload_ratio": None} for x in (0.0, 1.0)]
    lines += [{**line, "bench": "layers_peers", "engine": engine} for engine in ("plain", "memkit", "block swap")]
    other = {**line, "bench": "layers", "ratio": 0.5, "offload_ratio": None, "name": "dit_8+16_lora16_checkpointed"}

    draw([*lines, other, {"bench": "layers_auto"}], path)

    assert {"LayerOffload", "block swap", "0 streamed", "1 streamed", f"{name} on a GPU"} <= _texts(path)
    assert not {"plain", "memkit", "0.5 streamed"} & _texts(path)
    with pytest.raises(ValueError, match="lora_checkpoint"):
        draw([other], tmp_path / "none.svg")


PICTURE = BENCHMARKS.parent / "pictures" / "ways_resnet50.svg"


def _drawn(picture: Path) -> set[str]:
    return set(re.findall(r'<g id="([^"]+ of plain)">', picture.read_text()))


def test_picture_of_all_ways_shows_what_the_page_tells(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_ways, page = bench_module("draw_ways"), PAGES["budget"].read_text()
    points = draw_ways.points_in(page)
    names = {draw_ways.name_of(point) for point in points}

    assert len(names) > 15
    assert _drawn(PICTURE) == names, "the page has changed: draw the picture again with draw_ways.py"
    assert {point.way for point in points} == {"plain PyTorch", *draw_ways.WAYS}
    draw_ways.draw(draw_ways.points_in(page.replace("| 17419 |", "| 17000 |")), tmp_path / "ways.svg")
    assert {"17000" in name for name in _drawn(tmp_path / "ways.svg") ^ names} == {True, False}


def test_figures_in_the_text_are_those_of_the_picture() -> None:
    draw_ways, text = bench_module("draw_ways"), " ".join((BENCHMARKS.parent / "start-here.md").read_text().split())
    points = draw_ways.points_in(PAGES["budget"].read_text())
    plain = next(point for point in points if point.way == "plain PyTorch")

    assert f"from {plain.peak_mib / 1024:.1f} GiB to" in text
    said = {(float(gib), float(percent)) for gib, percent in re.findall(r"to ([\d.]+) GiB for ([\d.]+) %", text)}
    budgets = [point for point in points if point.way == draw_ways.BUDGET]
    known = {(round(point.peak_mib / 1024, 1), round(100 * (point.over_plain - 1), 1)) for point in budgets}
    assert len(said & known) == 2
