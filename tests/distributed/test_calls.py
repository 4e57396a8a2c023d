"""How many calls of memkit's functions, and of its device, a sharded layer takes in a steady step: each is time of the host.
FSDP2 keeps that busy by itself."""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager
from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

import memkit
from memkit.activations.recomputing import region_plan
from memkit.activations.recomputing.regions import Regions, RegionSpec
from memkit.device import ReferenceDevice
from memkit.distributed import sharding
from tests.calls import CallsOfDevice, num_calls
from tests.distributed.cases import make, step
from tests.distributed.groups import fake_group, group_of_one

NUM_LAYERS = 12
NUM_GATHERS = 2 * NUM_LAYERS + 1
"""In a step: those of all layers, twice, and that of what is in none."""


def _on_host(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, CallsOfDevice]:
    device = CallsOfDevice()
    monkeypatch.setattr(sharding, "open_device", lambda _: device)
    model = memkit.shard(model, offload_policy=CPUOffloadPolicy())
    for number in range(2):
        step(model, 0, number)
    device.counts.clear()
    return model, device


@pytest.mark.parametrize("num_ranks", [1, 8])
def test_gather_from_the_host_costs_few_calls(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with group_of_one() if num_ranks == 1 else fake_group(num_ranks):
        model, device = _on_host(make(lora=True, num_layers=NUM_LAYERS), monkeypatch)
        found = num_calls(lambda: step(model, 0, 2))
        counts = device.counts

    assert found <= 24 * NUM_GATHERS, found / NUM_GATHERS
    assert counts["timed"] == 0, counts
    # one of each ahead of the copy, and one behind it; where one rank reads on another stream than packs, FSDP2's waits for it
    assert counts["untimed"] <= 2 * NUM_GATHERS, counts
    assert counts["waits"] <= 2 * NUM_GATHERS, counts
    assert counts["stops"] == 1, counts


# Contexts within sharded layers


@pytest.mark.parametrize("is_whole", [False, True])
def test_region_in_a_sharded_model_costs_few_calls_more_than_in_one_that_is_not(is_whole: bool) -> None:
    """Parameters are there only while the layer runs, and are looked up then, not when the context is entered. Of a layer as a
    whole it is seen as well whether it has other hooks by now than those of FSDP2."""
    found = []
    for shard in (lambda model: model, memkit.shard):
        with fake_group(8):
            model = shard(make(num_layers=NUM_LAYERS))
            regions = {
                module: RegionSpec()
                for block in model.blocks
                for module in ((block,) if is_whole else (block.norm, block.down))
            }

            def run(model: nn.Module = model, regions: Any = regions) -> None:
                step(model, 0, 0, lambda: Regions(regions))

            run()
            found.append(num_calls(run))

    assert found[1] - found[0] <= (12 if is_whole else 8) * len(regions), (found[1] - found[0]) / len(regions)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [0.25, pytest.param(0.5, marks=pytest.mark.slow)])
def test_as_many_calls_are_recomputed_as_in_a_model_that_is_not_sharded(budget: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_plan, "_seconds_of_ops", lambda *_: 1e9)  # whatever this machine takes for an op
    device, found = ReferenceDevice(), []
    for tag, shard in (("alone", lambda model: model), ("sharded", memkit.shard)):
        with group_of_one():
            model = shard(make(num_layers=NUM_LAYERS))
            for number in range(6):
                step(model, 0, number, lambda tag=tag: memkit.Rematerialize(budget, tag=tag, min_bytes=0, device=device))  # type: ignore[misc]
            stats = memkit.stats(tag)
            assert not stats.is_recorded
            found.append((stats.num_replays, stats.dropped_bytes))
            memkit.reset(tag)

    assert found[1] == found[0]


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [0.2, pytest.param(1.0, marks=pytest.mark.slow)])
def test_saved_tensor_that_leaves_costs_as_many_calls_as_in_a_model_that_is_not_sharded(ratio: float) -> None:
    found, device = [], ReferenceDevice()
    for tag, shard in (("alone", lambda model: model), ("sharded", memkit.shard)):
        with fake_group(8):
            model = shard(make(num_layers=NUM_LAYERS))

            def context(tag: str = tag) -> AbstractContextManager[object]:
                return memkit.CPUOffload(ratio, tag=tag, device=device, min_bytes=0)

            for number in range(5):
                step(model, 0, number, context)
            found.append(num_calls(lambda model=model, context=context: step(model, 0, 5, context)))  # type: ignore[misc]
            assert memkit.stats(tag).moved_out_bytes > 0
            memkit.reset(tag)
        gc.collect()  # a graph that still lives has a window on the same device, which the other model's copies ask

    assert found[1] == found[0]
