"""Does a step fit in some memory, with what, and at which price."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import memkit
from memkit.plan import find_gpu
from memkit.profile import MemoryReport

MIB = 2**20


def step(num_layers: int, width: int, batch: int, *, has_gelu: bool = False, **options: Any) -> MemoryReport:
    with torch.device("meta"):
        layers = [nn.Sequential(nn.Linear(width, width), *[nn.GELU()] * has_gelu) for _ in range(num_layers)]
        model, x = nn.Sequential(*layers), torch.empty(batch, width)
    return memkit.profile_memory(model, x, print_table=False, **{"optimizer": "adamw", **options})


def large_step(**options: Any) -> MemoryReport:
    return step(8, 1024, 65536, has_gelu=True, **options)


@pytest.fixture(scope="module")
def traced() -> MemoryReport:
    return large_step(trace=True)


def test_step_that_fits_as_it_is(traced: MemoryReport) -> None:
    fit = traced.fit_in("12GiB")

    assert (fit.fits_as_it_is, fit.fits, fit.slowdown, fit.feature, fit.features) == (True, True, 1.0, None, ())
    assert str(fit) == f"This fits in 12 GiB as it is, with {(12 * 2**30 - fit.plain_peak_bytes) / 2**30:.1f} GiB to spare."
    assert fit.plain_peak_bytes == traced.step_peak_bytes


def test_step_that_fits_barely_is_told_to_be_close(traced: MemoryReport) -> None:

    fit = traced.fit_in(traced.step_peak_bytes + MIB)

    assert "1 MiB to spare: little for workspaces and fragmentation; to be on the safe side, use memkit." in str(fit)


def test_step_that_fits_with_a_budget(traced: MemoryReport) -> None:
    fit = traced.fit_in("3GiB")

    plan = memkit.plan_memory(traced, budget="3GiB", gpu="H200", optimizer="adamw")
    assert (fit.fits_as_it_is, fit.fits) == (False, True)
    assert fit.feature.feature == 'memkit.MemoryBudget("3GiB")'
    assert fit.feature.step_s == plan.predicted_s
    assert fit.feature.peak_bytes == plan.predicted_peak_bytes <= 3 * 2**30
    assert fit.slowdown == plan.predicted_s / plan.plain_s
    assert str(fit).startswith(
        f'This would fit in 3 GiB with memkit.MemoryBudget("3GiB"), about {fit.slowdown:.2f} times as slow (predicted for an '
        "H200). By comparison: "
    )
    assert [feature.feature for feature in fit.features[1:]] == ["memkit.Rematerialize", "memkit.CPUOffload"]
    assert all(feature.step_s is None or feature.step_s >= plan.predicted_s for feature in fit.features)


def test_step_that_cannot_fit_says_what_is_least(traced: MemoryReport) -> None:
    fit = traced.fit_in("600MiB")

    assert (fit.fits, fit.slowdown, fit.feature) == (False, None, None)
    least = min(feature.least_bytes for feature in fit.features if not feature.link_bytes)
    assert memkit.plan_memory(traced, budget=least, gpu="H200", optimizer="adamw").predicted_peak_bytes <= least
    said = re.search(r"does not fit in 600 MiB: the least that memkit.MemoryBudget can keep to is ([\d.]+) GiB", str(fit))
    assert least <= float(said[1]) * 2**30 <= least + 0.1 * 2**30


def test_weights_that_fill_the_memory_are_told() -> None:
    fit = step(8, 4096, 16, fit="1GiB").fit

    assert "2.0 GiB are parameters, gradients, optimizer states and inputs: memkit.LayerOffload streams" in str(fit)


# States of the optimizer


@pytest.fixture(scope="module")
def stateful() -> MemoryReport:
    """A step whose states take more than anything else: 1 GiB of parameters, as much of gradients, and 2 GiB of states."""
    return step(16, 4096, 4096, has_gelu=True, trace=True)


def test_states_that_do_not_fit_may_leave(stateful: MemoryReport) -> None:
    fit, states = stateful.fit_in("4GiB"), stateful.optimizer

    found = fit.feature

    assert found.feature == "memkit.StateOffload(optimizer)"
    assert found.peak_bytes == found.least_bytes == fit.plain_peak_bytes - states.state_bytes + states.room_bytes
    assert (found.link_bytes, found.room_bytes) == (states.state_bytes, states.room_bytes)
    link_s = states.state_bytes / find_gpu("H200").both_bytes_per_s
    assert found.step_s == fit.plain_s + link_s
    assert str(fit).startswith(
        f"This would fit in 4 GiB with memkit.StateOffload(optimizer), about {fit.slowdown:.2f} times as slow (predicted for "
        f"an H200). Each step of the optimizer moves 2.0 GiB of states to the GPU and back, {link_s:.2g} s of its link; "
        "288 MiB of the GPU are room for those on their way. By comparison: recomputing and offloading alone "
        '(memkit.MemoryBudget("4GiB")) does not reach it'
    )


def test_part_of_the_states_may_stay_where_there_is_room() -> None:
    fit = step(8, 8192, 16, fit="7.5GiB").fit

    said = re.search(r'With device_budget="([\d.]+)GiB" a part of them stays there\.', str(fit))

    assert 0 <= 0.9 * 7.5 - fit.feature.peak_bytes / 2**30 - float(said[1]) < 0.01


def test_states_and_activations_leave_where_nothing_else_is_enough(stateful: MemoryReport) -> None:
    fit = stateful.fit_in("3GiB")

    found = fit.feature

    assert found is fit.features[-1]
    assert found.feature == 'memkit.StateOffload(optimizer) and memkit.MemoryBudget("3GiB")'
    assert found.how == "moving optimizer states, recomputing and offloading"
    assert found.least_bytes <= found.peak_bytes <= 3 * 2**30
    assert [feature.step_s for feature in fit.features[:-1]] == [None] * 3
    assert fit.fits
    assert "device_budget" not in str(fit)


def test_least_is_told_with_states_and_without(stateful: MemoryReport) -> None:
    fit = stateful.fit_in("1GiB")

    assert re.search(
        r"does not fit in 1 GiB: the least that memkit.MemoryBudget can keep to is 4\.\d GiB, together with "
        r"memkit.StateOffload\(optimizer\) 2\.\d GiB \(predicted",
        str(fit),
    )
    assert not fit.fits


@pytest.mark.parametrize("optimizer", ["sgd", "adafactor", None])
def test_states_that_are_few_or_none_are_not_told_of(optimizer: str | None) -> None:
    assert "StateOffload" not in str(step(4, 1024, 16, optimizer=optimizer, fit="16MiB").fit)


def test_answer_with_states_goes_with_the_report_and_one_of_before_is_read(stateful: MemoryReport) -> None:
    report = replace(stateful, fit=stateful.fit_in("4GiB"))
    assert MemoryReport.from_json(report.to_json()) == report
    content = json.loads(report.to_json())
    del content["optimizer"]["room_bytes"], content["fit"]["link_bytes_per_s"]
    for feature in content["fit"]["features"]:
        del feature["link_bytes"], feature["room_bytes"]

    again = MemoryReport.from_json(json.dumps(content))

    assert again.optimizer.room_bytes is None
    assert again.fit.feature.link_bytes == 0
    assert "StateOffload" not in str(again.fit_in("4GiB"))


def test_gpu_decides_what_is_predicted(traced: MemoryReport) -> None:
    slow, fast = traced.fit_in("3GiB", gpu="RTX 3060"), traced.fit_in("3GiB", gpu="H200")

    assert slow.plain_s > fast.plain_s
    assert "(predicted for an RTX 3060, not measured on one)" in str(slow)


def test_without_a_budget_it_is_that_of_the_gpu_which_has_no_more(traced: MemoryReport) -> None:
    fit = traced.fit_in(None, gpu="RTX 4090")

    assert (fit.budget_bytes, fit.budget) == (find_gpu("RTX 4090").memory_bytes, "23.5GiB")
    with pytest.raises(ValueError, match=r"the RTX 4090 has 23\.5 GiB that can be allocated; found '30GiB'"):
        traced.fit_in("30GiB", gpu="RTX 4090")


def test_share_of_the_peak(traced: MemoryReport) -> None:
    fit = traced.fit_in(0.5)

    assert fit.budget_bytes == int(0.5 * fit.plain_peak_bytes)
    assert fit.features[0].feature == f'memkit.MemoryBudget("{fit.budget}")'
    assert float(fit.budget.removesuffix("GiB")) * 2**30 <= fit.budget_bytes


def test_profile_answers_at_once() -> None:
    report = large_step(fit="3GiB")

    assert report.fit == report.fit_in("3GiB")
    assert f". {report.fit}\n" in str(report)
    assert report.run.backward
    with pytest.raises(ValueError, match="a plan needs a report with a trace; found one without"):
        large_step().fit_in("2GiB")


def test_run_with_data_is_fitted_by_a_trace_without() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh()), torch.randn(512, 64)

    report = memkit.profile_memory(model, x, fit="1GiB", min_bytes=1, print_table=False, warmup=0)

    assert report.run.device == "cpu"
    assert report.forward_s > 0
    assert report.fit.fits_as_it_is


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"fit": "much"}, ValueError, "budget is a number of bytes"),
        ({"fit": 12}, ValueError, "reads as"),
        ({"fit": "1GiB", "gpu": "H20x"}, ValueError, "memkit knows"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(options: dict[str, Any], error: type[Exception], message: str) -> None:
    class Never(nn.Module):
        def forward(self, x: Any) -> Any:
            pytest.fail("it ran")

    with pytest.raises(error, match=message):
        memkit.profile_memory(Never(), torch.ones(1), print_table=False, **options)
