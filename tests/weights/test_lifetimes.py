"""Slots come free again, layers are fetched ahead of their use and once, and nothing is kept alive."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer

import memkit
from memkit.core.tensors import storage_key
from memkit.device import Device
from tests.weights.cases import RUNS, TRAIN, Block, Stack, compare, in_order, inputs, only_lora, run_step, stack, streamed
from tests.weights.test_bits import STEPS


@pytest.mark.parametrize("step", ["backwards in order", "samples in between", "dropped", "double backward", "retained"])
def test_no_slot_stays_in_use(step: str, device: Device) -> None:
    with streamed(stack("frozen", 6), device, num_slots=2) as (model, _, batches, offload):
        for number in range(9):
            STEPS[step](model, batches)
            if number == 2:
                before = offload.stats()
        gc.collect()
        run_step(model, batches)
        after = offload.stats()

    per_step = (after.num_overflows - before.num_overflows) / 7
    assert per_step <= before.num_overflows / 3
    assert after.slot_bytes == before.slot_bytes == sum(offload.plan.slot_bytes)
    assert after.host_bytes == before.host_bytes


@pytest.mark.parametrize("train", [*TRAIN, "fused, states as well"])
def test_model_that_is_dropped_takes_all_that_streams_with_it(train: str, device: Device) -> None:
    way = train.split(",")[0]
    model = stack(way, 6).to(device.torch_device)
    gc.collect()
    hooks_before = list(torch_optimizer._global_optimizer_pre_hooks)
    offload = memkit.LayerOffload(model, offload_ratio=0.5, device=device, **TRAIN[way])
    states = memkit.StateOffload(offload.optimizer, when="backward", device=device) if "," in train else None
    run_step(model, inputs(device))
    dropped = [weakref.ref(model), weakref.ref(offload), weakref.ref(model.layers[1].up.weight)]

    del model, offload, states
    gc.collect()

    assert [ref() for ref in dropped] == [None, None, None]
    assert list(torch_optimizer._global_optimizer_pre_hooks) == hooks_before


def test_slot_that_somebody_reads_after_its_layer_is_not_filled_before(device: Device) -> None:
    """Whoever was given a tensor of a slot may put work on it that comes long after the layer."""
    model = only_lora(Stack()).to(device.torch_device)
    with memkit.LayerOffload(model, offload_ratio=1.0, num_slots=1, device=device) as offload, torch.no_grad():
        kept = []
        hook = model.layers[0].up.register_forward_hook(lambda module, *_: kept.append(module.weight.detach()))
        hidden = model.layers[0](model.stem(inputs(device)[0]))
        hook.remove()
        device.note_read(kept[0].untyped_storage())  # as an op does that runs now
        kept.clear()

        in_order(model.layers[1:], hidden)

        assert offload.stats().num_overflows == 0


def test_slot_is_read_until_the_outermost_forward_of_its_layer_is_over(device: Device) -> None:
    class Nested(Block):
        depth = 0

        def forward(self, x: Tensor) -> Tensor:
            if self.depth < 2:
                self.depth += 1
                x = self(x)
                self.depth -= 1
                device.note_read(self.up.weight.untyped_storage())
            return super().forward(x)

    compare(only_lora(Stack(4, block=Nested)), device, offload_ratio=1.0, num_slots=1)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_steps_make_the_host_wait_for_nothing(slots: int, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = only_lora(Stack()).to(device.torch_device), inputs(device)

    with memkit.LayerOffload(model, offload_ratio=1.0, num_slots=slots, device=device) as offload:
        synchronize = type(device).synchronize

        def refuse(*given: object) -> None:
            """Let the host wait for copies that read what is the caller's to write behind the forward, and nothing else."""
            if given[1:] and given[1] in [slot.ready for slot in offload._streams.ring.slots.values()]:
                synchronize(*given)
            else:
                raise AssertionError("the host waits, or the allocator is left to track a stream")

        for _ in range(3):  # one is timed, and waited for
            run_step(model, batches)
        with monkeypatch.context() as patch:
            patch.setattr(type(device), "synchronize", refuse)
            patch.setattr(Tensor, "record_stream", refuse)
            run_step(model, batches)

        assert offload.stats().num_overflows == 0


@pytest.mark.slow
@pytest.mark.parametrize("num_layers", [4, 5, 6])
def test_next_forward_begins_in_the_slots_that_are_free_first(num_layers: int, device: Device) -> None:
    model = only_lora(Stack(num_layers)).to(device.torch_device)
    with memkit.LayerOffload(model, offload_ratio=1.0, num_slots=3, device=device), torch.no_grad():
        slots = []
        for layer in model.layers:
            layer.register_forward_pre_hook(lambda layer, _: slots.append(storage_key(layer.up.weight.untyped_storage())))
        for _ in range(4):
            model(inputs(device)[0])

    assert len(set(slots)) == 3
    assert slots == slots[:3] * (len(slots) // 3) + slots[: len(slots) % 3]


@pytest.mark.slow
@pytest.mark.parametrize("run", ["reversed", "branching", "reused"])
def test_order_of_the_last_time_is_fetched_ahead(run: str, device: Device) -> None:
    model, batch = only_lora(Stack(8, run=RUNS[run])).to(device.torch_device), inputs(device)[0]
    found = []
    with memkit.LayerOffload(model, offload_ratio=1.0, device=device) as offload:
        for _ in range(3):
            before = offload.stats().num_demand_fetches
            model(batch).sum().backward()
            with torch.no_grad():
                model(batch)
            found.append(offload.stats().num_demand_fetches - before)

    assert found[0] > 0
    assert found[1:] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("train", ["frozen", "host"])
@pytest.mark.parametrize("run", ["in order", "checkpoint", "reentrant checkpoint"])
def test_nothing_is_left_to_the_garbage_collector(run: str, train: str, device: Device) -> None:
    model = stack(train, run=RUNS[run]).to(device.torch_device)
    left: list[int] = []
    with memkit.LayerOffload(model, device=device, offload_ratio=1.0, train=train):
        for _ in range(3):
            gc.collect()
            gc.disable()
            try:
                (batch,) = inputs(device, 1)
                seen = weakref.WeakSet[torch.UntypedStorage]()
                handle = model.get_submodule("layers.1").register_forward_pre_hook(
                    lambda _, args, seen=seen: seen.add(args[0].untyped_storage())
                )
                model(batch).square().mean().backward()
                handle.remove()
                left.append(len(seen))
            finally:
                gc.enable()

    assert left == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("train", ["frozen", "host"])
@pytest.mark.parametrize("run", ["checkpoint", "reentrant checkpoint"])
def test_checkpointed_layers_are_fetched_once_in_a_backward(run: str, train: str, device: Device) -> None:
    stats = compare(stack(train, 8, run=RUNS[run]), device, num_steps=3, train=train)

    assert stats.num_fetches == 3 * 2 * (8 + 8 - 3)
    assert stats.num_demand_fetches == 0
