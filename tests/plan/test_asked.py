"""`memkit.plan_memory`: what it takes, and what it refuses."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import memkit
from memkit.plan import MemoryPlan
from memkit.plan.asked import budget_bytes_of, problem_of
from memkit.plan.gpu import find_gpu
from memkit.plan.step import StepTrace
from tests.plan.budget.steps import MIB, gpu, layers

GPU = gpu()
TRACE = replace(layers(4), trainable_numel=3 * MIB, trainable_bytes=6 * MIB)


@dataclass(frozen=True)
class Report:
    trace: StepTrace | None


def plan(**changes: Any) -> MemoryPlan:
    asked: dict[str, Any] = {"source": TRACE, "budget": 0.7, "gpu": GPU, **changes}
    return memkit.plan_memory(asked.pop("source"), **asked)


@pytest.mark.parametrize(
    ("budget", "num_bytes"),
    [
        (0.7, int(0.7 * TRACE.peak_bytes)),
        (1.0, TRACE.peak_bytes),
        ("300MiB", 300 * MIB),
        (300 * MIB, 300 * MIB),
        ("0.25 GiB", 256 * MIB),
    ],
)
def test_budgets_are_shares_or_bytes(budget: float | str, num_bytes: int) -> None:
    planned = plan(budget=budget)

    assert planned.budget_bytes == num_bytes
    assert planned.predicted_peak_bytes <= num_bytes
    assert planned.predicted_s >= planned.plain_s


def test_gpus_are_named_or_read(tmp_path: Path) -> None:
    assert plan(source=Report(TRACE)) == plan()
    path = tmp_path / "mine.json"
    path.write_text(replace(find_gpu("H100"), name="mine").to_json())

    much_work = replace(TRACE, ops=tuple(replace(op, flops=1e9 * op.flops) for op in TRACE.ops))

    named, read = plan(source=much_work, gpu="h100"), plan(source=much_work, gpu=str(path))

    assert read.predicted_s == named.predicted_s < plan(source=much_work, gpu="RTX 3060").predicted_s


@pytest.mark.parametrize(("optimizer", "num_states"), [(None, 0), ("sgd", 0), ("momentum", 1), ("adam", 2), ("adamw", 2)])
def test_states_of_the_optimizer_are_there_all_along(optimizer: str | None, num_states: int) -> None:
    report = SimpleNamespace(trace=TRACE, optimizer=SimpleNamespace(state_bytes=12345))
    problem = problem_of(TRACE, GPU, optimizer)

    assert problem.plain_peak_bytes == TRACE.peak_bytes + num_states * 6 * MIB
    assert budget_bytes_of(0.5, problem) == int(0.5 * problem.plain_peak_bytes)  # shares count it
    reported = problem_of(report, GPU, optimizer).base_bytes - TRACE.base_bytes
    assert reported == (12345 if optimizer is None else num_states * 6 * MIB)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"budget": 12}, ValueError, 'budget=12 reads as 12 bytes or as 12 GiB. Write "12B" or "12GiB"'),
        (
            {"budget": 5000},
            ValueError,
            'budget=5000 reads as 4.88 KiB or as 5000 MiB. Write "5000B" or "5000MiB"; an int is bytes',
        ),
        ({"budget": 1.5}, ValueError, "a float is the share of the plain step's peak, above 0 and at most 1; found 1.5"),
        ({"budget": 0.0}, ValueError, "above 0 and at most 1; found 0.0"),
        ({"budget": "0.5"}, ValueError, "For a share of the plain step's peak write the float 0.5"),
        *(({"budget": text}, ValueError, f'found "{text}"') for text in ("much", "-1GiB")),
        ({"budget": -1}, ValueError, "budget must be more than 0 bytes; found -1"),
        (
            {"budget": "1000GiB", "gpu": "RTX 3060"},
            ValueError,
            "a budget must be within what the RTX 3060 has, 11.60 GiB; found '1000GiB', which is 1000.00 GiB. Lower the budget",
        ),
        ({"gpu": "RTX 9999"}, ValueError, "memkit knows H200, H100"),
        ({"optimizer": "lion"}, ValueError, "optimizer must be one of adamw, adam, momentum, sgd, or None; found 'lion'"),
        ({"source": Report(None)}, ValueError, 'profile_memory(model, ..., device="meta", backward=True, trace=True)'),
        ({"budget": None}, TypeError, "budget is bytes (an int), text such as"),
        ({"budget": True}, TypeError, "found True"),
        ({"gpu": None}, TypeError, "gpu is a name such as"),
        ({"source": "report.json"}, TypeError, "a plan is made from a memkit.profile.MemoryReport or its trace; found str"),
    ],
)
def test_what_is_wrong_says_what_to_give(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        plan(**changes)
