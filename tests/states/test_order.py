"""In which order pieces are given out, by a clock: the link and the thread that steps are busy until the end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memkit.plan import ParameterCosts, StateRates, Update, plan_states
from tests.states.clocked import bound_s, clocked


def _costs(numels: list[int]) -> list[ParameterCosts]:
    """Return what bfloat16 parameters with float32 copies take, stepped by AdamW."""
    return [
        ParameterCosts(
            name=str(number), numel=n, parameter_bytes=2 * n, state_bytes=12 * n, has_master=True, is_elementwise=True
        )
        for number, n in enumerate(numels)
    ]


WIDTH = 3072
LAYER = [WIDTH * WIDTH] * 2 + [WIDTH * 8192] * 3 + [WIDTH * 1024] * 2 + [WIDTH] * 2
MODELS = {
    "a Llama": [128256 * WIDTH, *LAYER * 28],
    "alike": [14 * 2**20] * 240,
    "an embedding": [256 * 2**20, *[2**20] * 400],
}
RATES = [(48e9, 3.7e9), (48e9, 2.8e9), (40e9, 2.4e9), (48e9, 1e9), (24e9, 4e9), (12e9, 1e9)]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("link", "host"), RATES)
def test_both_sides_are_busy_until_the_end(model: str, link: float, host: float) -> None:
    rates = StateRates(link_bytes_per_s=link, host_numel_per_s=host)
    plan = plan_states(_costs(MODELS[model]), update="both", rates=rates)
    clock, (link_s, host_s) = clocked(plan, rates), bound_s(plan, rates)

    assert {piece.update for piece in plan.pieces} == set(Update)
    assert clock.end_s <= 1.06 * max(link_s, host_s)
    assert clock.end_s < 0.98 * bound_s(plan_states(_costs(MODELS[model])), rates)[0]
    assert clock.idle_s <= 0.06 * clock.thread_s


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("times", [0.5, 0.8, 1.25, 2.0])
def test_neither_side_waits_where_the_other_takes_longer_than_planned(model: str, times: float) -> None:
    planned = StateRates(link_bytes_per_s=48e9, host_numel_per_s=3e9)
    plan = plan_states(_costs(MODELS[model]), update="both", rates=planned)
    rates = replace(planned, host_numel_per_s=times * planned.host_numel_per_s)

    assert clocked(plan, rates).end_s <= 1.02 * max(bound_s(plan, rates))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("update", ["device", "host"])
def test_one_side_alone_is_busy(model: str, update: str) -> None:
    rates = StateRates(link_bytes_per_s=48e9, host_numel_per_s=3.7e9)
    plan = plan_states(_costs(MODELS[model]), update=update)
    clock = clocked(plan, rates)

    assert clock.end_s <= 1.01 * max(bound_s(plan, rates))
    assert not clock.idle_s
