"""Compiled blocks in a `Rematerialize`: each runs as in the plain run, compiled once; the ops around it are recorded."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.device import CpuDevice, Device
from tests.activations.cases import assert_same_bits
from tests.activations.compiled_blocks import MLP, Shift, model_of, train
from tests.activations.conftest import Offload
from tests.compiling import WITH_COMPILED, Backend, forms_on, frames_of_memkit, in_form

pytestmark = [
    *WITH_COMPILED,
    pytest.mark.filterwarnings("ignore:.*cannot be kept to"),  # what blocks save stays
]


def _remat(budget: float, tag: str, device: Device) -> memkit.Rematerialize:
    return memkit.Rematerialize(budget, tag, min_bytes=1, device=device)


@pytest.mark.covering(1)
@forms_on("cpu", "seed 0")
@pytest.mark.parametrize(("seed", "budget", "amp"), [(0, 1.0, False), (1, 0.7, True), (2, 0.4, False), (3, 0.1, True)])
def test_bits_are_those_of_the_compiled_blocks(seed: int, form: str, budget: float, amp: bool, device: Device) -> None:
    backend = Backend()
    plain = train(model_of(seed, form, device, backend), device, nullcontext, amp=amp)
    again = Backend()
    found = train(model_of(seed, form, device, again), device, lambda: _remat(budget, "zoo", device), amp=amp)

    assert_same_bits(found, plain)
    assert again.num_graphs == backend.num_graphs > 0
    assert frames_of_memkit() == []
    assert memkit.stats("zoo").live_records == 0


@pytest.mark.covering(1)
@forms_on("cpu", "seed 0")
def test_what_was_compiled_before_is_used_and_nothing_is_compiled_again(form: str, device: Device) -> None:
    backend = Backend()
    model = model_of(5, form, device, backend)
    train(model, device, nullcontext, num_steps=2)
    num_graphs, num_frames = backend.num_graphs, torch._dynamo.utils.counters["frames"]["total"]
    train(model, device, lambda: _remat(0.5, "warm", device), num_steps=4)
    train(model, device, nullcontext, num_steps=2)

    assert backend.num_graphs == num_graphs
    assert torch._dynamo.utils.counters["frames"]["total"] == num_frames


@pytest.mark.covering(1)
@forms_on("cpu", "seed 0")
def test_attached(form: str, device: Device) -> None:
    plain = train(model_of(6, form, device, Backend()), device, nullcontext)
    model = model_of(6, form, device, Backend())
    before = [dict(vars(module)) for module in model.modules()]
    attachment = memkit.attach(model, _remat(0.5, "attached", device))

    assert_same_bits(train(model, device, nullcontext), plain)
    stats = memkit.stats("attached")
    assert (stats.num_dropped > 0, stats.num_replayed_ops > 0) == (True, True)
    attachment.remove()
    assert [set(vars(module)) for module in model.modules()] == [set(own) for own in before]
    assert not nn.modules.module._global_forward_pre_hooks
    assert not nn.modules.module._global_forward_hooks


def test_what_blocks_save_leaves_by_a_context_outside(device: Device, offloading: Offload) -> None:
    if isinstance(device, CpuDevice):
        pytest.skip("there is nowhere to move to")
    plain = train(model_of(7, "call", device, Backend()), device, nullcontext)
    model = model_of(7, "call", device, Backend())
    memkit.attach(model, offloading(1.0, "outside", window_bytes=0))
    memkit.attach(model, _remat(0.5, "inside", device))

    assert_same_bits(train(model, device, nullcontext), plain)
    assert memkit.stats("outside").moved_out_bytes > 0


def test_error_in_a_block_leaves_nothing_on(device: Device) -> None:
    class Failing(MLP):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                raise ValueError("as asked")
            return super().forward(x)

    model = nn.Sequential(Shift(), Failing(), Shift()).to(device.torch_device)
    model[1].compile(backend="aot_eager")
    train(model, device, lambda: _remat(0.5, "failing", device), num_steps=2)
    model[1].fails = False
    before = dict(vars(model[1]))
    model[1].fails = True
    with pytest.raises(ValueError, match="as asked"):
        train(model, device, lambda: _remat(0.5, "failing", device))
    model[1].fails = False

    assert vars(model[1]) == before
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []
    assert not nn.modules.module._global_forward_pre_hooks
    train(model, device, lambda: _remat(0.5, "failing", device))


# What is refused


@pytest.mark.covering(2)
@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("form", ["call", "forward"])
@pytest.mark.parametrize("is_attached", [False, True])
def test_model_that_is_compiled_as_a_whole_is_refused(form: str, is_attached: bool, is_warm: bool, device: Device) -> None:
    model = in_form(form, nn.Sequential(MLP(), MLP()).to(device.torch_device), Backend())
    if is_warm:
        train(model, device, nullcontext, num_steps=1)
    context = nullcontext if is_attached else lambda: _remat(0.5, "whole", device)
    if is_attached:
        memkit.attach(model, _remat(0.5, "whole", device))

    with pytest.raises(RuntimeError, match=r"compiled as a whole, was called in the context\. Compile each block"):
        train(model, device, context)
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []


@pytest.mark.parametrize("is_warm", [False, True])
def test_compiled_function_inside_of_a_model_is_refused(is_warm: bool, device: Device) -> None:
    function = torch.compile(lambda x: (x.sin() * x).exp(), backend="aot_eager")

    class Calling(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return function(super().forward(x)).cos()

    model = nn.Sequential(Calling()).to(device.torch_device)
    if is_warm:
        train(model, device, nullcontext, num_steps=1)

    with pytest.raises(RuntimeError, match="found that a compiled function was called in the context"):
        train(model, device, lambda: _remat(0.5, "function", device))
