"""Outputs and gradients with streamed weights are those of the plain run, bit for bit."""

from __future__ import annotations

import pytest

from memkit.device import Device
from tests.weights.cases import RUNS, Stack, compare, only_lora


@pytest.mark.parametrize("slots", [1, 2, 3, 6])
@pytest.mark.parametrize("run", RUNS)
def test_frozen_layers_with_lora(run: str, slots: int, device: Device) -> None:
    model = only_lora(Stack(run=RUNS[run]))

    stats = compare(model, device, offload_fraction=1.0, slots=slots)

    assert stats.num_streamed == 6
    assert stats.num_fetches > 0


@pytest.mark.parametrize("run", ["in order", "reversed", "skipping", "checkpoint", "reentrant checkpoint"])
def test_no_more_slots_are_taken_than_planned(run: str, device: Device) -> None:
    stats = compare(only_lora(Stack(run=RUNS[run])), device, offload_fraction=1.0, slots=2)

    assert stats.num_overflows == 0


def test_layers_are_fetched_ahead_once_the_order_is_known(device: Device) -> None:
    model, num_steps = only_lora(Stack(8)), 3
    stats = compare(model, device, offload_fraction=1.0, num_steps=num_steps)

    # Two passes in a step, each of 8 layers; what the slots hold at the turn is not fetched again.
    assert stats.num_fetches == num_steps * 2 * (8 + 8 - 3)
    assert stats.num_demand_fetches == 0
    assert stats.h2d_bytes == stats.num_fetches * stats.streamed_bytes // 8
