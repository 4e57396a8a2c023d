"""Dynamo and the hooks of a context: it compiles none of them, breaks no graph at them, and compiles nothing again."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.core.hooks import SavedTensorHooks
from memkit.device import Device
from tests.activations.cases import assert_same_bits
from tests.activations.conftest import Offload
from tests.compiling import WITH_COMPILED, Backend, forms_on, frames_of_memkit, in_form, may_be_compiled_here

pytestmark = WITH_COMPILED


class Block(nn.Module):
    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.first, self.norm, self.last, self.breaks = nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32), breaks

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.gelu(self.first(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return self.last(self.norm(x))


def _model(form: str, device: Device, backend: Backend, *, breaks: bool = False) -> nn.Sequential:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return nn.Sequential(*[in_form(form, Block(breaks).to(device.torch_device), backend) for _ in range(3)])


def _step(model: nn.Module, device: Device, context: AbstractContextManager[Any], *, amp: bool) -> list[Tensor]:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)).to(device.torch_device)
    autocast = torch.autocast(device.torch_device.type, torch.bfloat16) if amp else nullcontext()
    model.zero_grad()
    with context, autocast:
        loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), *[param.grad.clone() for param in model.parameters() if param.grad is not None]]


@pytest.mark.covering(1)
@pytest.mark.parametrize("breaks", [False, True], ids=["whole", "broken"])
@pytest.mark.parametrize("amp", [False, True], ids=["fp32", "bf16"])
@forms_on("seed 0", "seed 1")
def test_nothing_is_compiled_again_and_no_hook_is(
    form: str, amp: bool, breaks: bool, device: Device, offloading: Offload
) -> None:
    plain_backend, backend = Backend(), Backend()
    plain = _step(_model(form, device, plain_backend, breaks=breaks), device, nullcontext(), amp=amp)
    model = _model(form, device, backend, breaks=breaks)
    torch._dynamo.utils.counters.clear()
    found, counts, traced = list[list[Tensor]](), list[int](), list[int]()
    for step in range(6):
        # Entered first, left out, entered again: another object, under another tag, with other hooks.
        context = nullcontext() if step == 3 else offloading((0.5, 1.0)[step % 2], f"step {step % 4}", window_bytes=0)
        found.append(_step(model, device, context, amp=amp))
        counts.append(backend.num_graphs)
        traced.append(torch._dynamo.utils.counters["frames"]["total"])

    for one in found:
        assert_same_bits(one, plain)
    assert counts == [plain_backend.num_graphs] * 6
    assert len(set(traced)) == 1
    assert breaks or not torch._dynamo.utils.counters["graph_break"]
    assert frames_of_memkit() == []
    assert memkit.stats("step 1").moved_out_bytes > 0


def test_hooks_called_by_code_that_dynamo_may_still_compile(device: Device) -> None:
    """Dynamo does so if a frame is left uncompiled, and its ops save one by one."""
    were_compiling = list[bool]()

    class Hooks:
        def pack(self, tensor: Tensor) -> Tensor:
            were_compiling.append(may_be_compiled_here())
            return _leaf(tensor)

        def unpack(self, tensor: Tensor) -> Tensor:
            return _leaf(tensor)

    def _leaf(tensor: Tensor) -> Tensor:
        return tensor

    hooks = Hooks()
    x = torch.randn(4, requires_grad=True, device=device.torch_device)

    def run(inputs: Tensor) -> Tensor:
        torch._dynamo.skip_frame()
        return inputs.sin().cos()

    with SavedTensorHooks(hooks.pack, hooks.unpack):
        torch.compile(run, backend="eager")(x).sum().backward()

    seen = {reference() for reference in torch._dynamo.convert_frame.input_codes.seen}
    assert run.__code__ in seen
    assert were_compiling == [False, False, False][: len(were_compiling)]
    assert seen.isdisjoint({Hooks.pack.__code__, Hooks.unpack.__code__, _leaf.__code__})


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_context_that_is_entered_in_a_compiled_function(device: Device, offloading: Offload) -> None:
    model = nn.Sequential(*[Block(breaks=False) for _ in range(2)]).to(device.torch_device)
    context = offloading(1.0, "inside", window_bytes=0)

    def forward(x: Tensor) -> Tensor:
        with context:
            return model(x)

    x = torch.randn(16, 32, device=device.torch_device)
    torch.compile(forward, backend="aot_eager")(x).sum().backward()

    assert frames_of_memkit() == []
    assert memkit.stats("inside").moved_out_bytes > 0
