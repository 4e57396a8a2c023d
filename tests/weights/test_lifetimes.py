"""Several graphs, partial and repeated backwards, changing orders: gradients stay exact, and slots come free again."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

import memkit
from memkit.device import Device
from tests.weights.cases import Block, Result, Stack, compare, in_order, inputs, only_lora, results, run_step

Step = Callable[[nn.Module, list[Tensor]], Result]


def _backwards_in_order(model: nn.Module, batches: list[Tensor]) -> Result:
    outputs = [model(batch) for batch in batches]
    for output in outputs:
        output.square().mean().backward()
    return results(model, outputs)


def _backwards_in_reverse(model: nn.Module, batches: list[Tensor]) -> Result:
    outputs = [model(batch) for batch in batches]
    for output in reversed(outputs):
        output.square().mean().backward()
    return results(model, outputs)


def _one_backward_of_two(model: nn.Module, batches: list[Tensor]) -> Result:
    outputs = [model(batch) for batch in batches]
    (outputs[0] * outputs[1]).mean().backward()
    return results(model, outputs)


def _part_of_the_outputs(model: nn.Module, batches: list[Tensor]) -> Result:
    output = model(batches[0])
    output[:2, 1].sum().backward()
    return results(model, [output])


def _part_of_the_layers(model: nn.Module, batches: list[Tensor]) -> Result:
    """The graph ends in the middle: what comes after has no backward."""
    hidden = in_order(model.layers[:3], model.stem(batches[0]))
    output = model.head(in_order(model.layers[3:], hidden.detach()))
    hidden.sum().backward()
    return results(model, [output])


def _retained(model: nn.Module, batches: list[Tensor]) -> Result:
    output = model(batches[0])
    for is_last in (False, False, True):
        output.square().mean().backward(retain_graph=not is_last)
    return results(model, [output])


def _retained_between_others(model: nn.Module, batches: list[Tensor]) -> Result:
    output = model(batches[0])
    output.square().mean().backward(retain_graph=True)
    other = model(batches[1])
    other.mean().backward()
    output.mean().backward()
    return results(model, [output, other])


def _grad_of_inputs(model: nn.Module, batches: list[Tensor]) -> Result:
    x = batches[0].clone().requires_grad_()
    output = model(x)
    return results(model, [output, *torch.autograd.grad(output.sum(), [x, model.stem.weight])])


def _double_backward(model: nn.Module, batches: list[Tensor]) -> Result:
    x = batches[0].clone().requires_grad_()
    output = model(x)
    grad = torch.autograd.grad(output.square().sum(), x, create_graph=True)[0]
    (grad.square().mean() + output.mean()).backward()
    return results(model, [output, grad, x.grad])


def _samples_in_between(model: nn.Module, batches: list[Tensor]) -> Result:
    outputs = []
    for batch in batches:
        outputs.append(model(batch))
        model.eval()
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                outputs.append(model(batch * 2).clone())
        model.train()
        outputs[-3].square().mean().backward()
    return results(model, outputs)


def _dropped(model: nn.Module, batches: list[Tensor]) -> Result:
    model(batches[1])
    output = model(batches[0])
    dropped = model(batches[1])
    dropped.sum().backward(retain_graph=True)
    del dropped
    output.sum().backward()
    return results(model, [output])


def _in_a_thread(model: nn.Module, batches: list[Tensor]) -> Result:
    """The backward runs in another thread than the forward."""
    output = model(batches[0])
    thread = threading.Thread(target=lambda: output.square().mean().backward())
    thread.start()
    thread.join()
    return results(model, [output])


def _anomalies(model: nn.Module, batches: list[Tensor]) -> Result:
    with torch.autograd.detect_anomaly(check_nan=True):
        return run_step(model, batches)


STEPS: dict[str, Step] = {
    "backwards in order": _backwards_in_order,
    "backwards in reverse": _backwards_in_reverse,
    "one backward of two": _one_backward_of_two,
    "part of the outputs": _part_of_the_outputs,
    "part of the layers": _part_of_the_layers,
    "retained": _retained,
    "retained between others": _retained_between_others,
    "grad of inputs": _grad_of_inputs,
    "double backward": _double_backward,
    "samples in between": _samples_in_between,
    "dropped": _dropped,
    "in a thread": _in_a_thread,
    "anomalies": _anomalies,
}


@pytest.mark.core(1)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("slots", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("step", STEPS)
def test_gradients(step: str, slots: int, device: Device) -> None:
    stats = compare(only_lora(Stack()), device, step=STEPS[step], offload_ratio=1.0, num_slots=slots)

    assert stats.slot_bytes == slots * stats.streamed_bytes // stats.num_streamed


def test_gradients_of_inputs_through_frozen_layers(device: Device) -> None:
    compare(Stack().requires_grad_(False), device, step=_grad_of_inputs_only, offload_ratio=1.0, num_slots=2)


def _grad_of_inputs_only(model: nn.Module, batches: list[Tensor]) -> Result:
    x = batches[0].clone().requires_grad_()
    output = model(x)
    output.sum().backward()
    return results(model, [output, x.grad])


@pytest.mark.parametrize("step", ["backwards in order", "samples in between", "dropped", "double backward", "retained"])
def test_no_slot_stays_in_use(step: str, device: Device) -> None:
    model = only_lora(Stack()).to(device.torch_device)
    batches = inputs(device)

    with memkit.LayerOffload(model, offload_ratio=1.0, num_slots=2, device=device) as offload:
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


@pytest.mark.parametrize("train", ["frozen", "host", "fused", "fused, states as well"])
def test_model_that_is_dropped_takes_all_that_streams_with_it(train: str, device: Device) -> None:
    model = (only_lora(Stack()) if train == "frozen" else Stack()).to(device.torch_device)
    options: dict[str, Any] = {"train": train.split(",")[0], "offload_ratio": 0.5, "device": device}
    gc.collect()
    hooks_before = list(torch_optimizer._global_optimizer_pre_hooks)
    if "fused" in train:
        options["optimizer"] = partial(torch.optim.AdamW, lr=1e-2)
    offload = memkit.LayerOffload(model, **options)
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
