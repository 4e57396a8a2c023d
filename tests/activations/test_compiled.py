"""Beside `torch.compile`: block by block it is exact; a model compiled as a whole saves at its end, which is said once.
Dynamo compiles none of the hooks, breaks no graph at them, and compiles nothing again."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.activations.saved.state import RematState
from memkit.core.hooks import SavedTensorHooks, innermost_pack
from memkit.device import Device
from tests.activations.cases import assert_same_bits
from tests.activations.chains import Context
from tests.activations.conftest import Offload
from tests.activations.remat.conftest import NO_PLAN_FITS
from tests.compiling import WITH_COMPILED, Backend, forms_on, frames_of_memkit, in_form, may_be_compiled_here

pytestmark = WITH_COMPILED


class Block(nn.Module):
    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.first, self.norm, self.last, self.breaks = nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32), breaks

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.gelu(self.first(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return self.last(self.norm(x))


class Blocks(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:  # which Dynamo may compile, other than torch's own
        for block in self:
            x = block(x)
        return x


def _model(device: Device, num_blocks: int = 2) -> Blocks:
    torch.manual_seed(0)
    return Blocks(*[Block() for _ in range(num_blocks)]).to(device.torch_device)


def _by_block(device: Device) -> nn.Module:
    model = _model(device)
    for block in model:
        block.compile(backend="aot_eager")
    return model


def _as_a_whole(device: Device) -> nn.Module:
    model = _model(device, num_blocks=6)
    model.compile(backend="aot_eager")
    return model


def _train(
    model: nn.Module, device: Device, context: Context = nullcontext, *, num_steps: int = 3, amp: bool = False
) -> list[Tensor]:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)).to(device.torch_device)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(num_steps):
        optimizer.zero_grad()
        with context(), torch.autocast(device.torch_device.type, torch.bfloat16, enabled=amp):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *[param.detach().clone() for param in model.parameters()]]


def test_attached_to_compiled_blocks(device: Device) -> None:
    plain = _train(_by_block(device), device)
    model = _by_block(device)
    memkit.attach(model, memkit.CPUOffload(1.0, "attached", min_bytes=0, window_bytes=0, device=device))

    assert_same_bits(_train(model, device), plain)
    assert memkit.stats("attached").moved_out_bytes > 0


def test_whole_model_that_is_compiled_is_exact_and_warns_once(device: Device, offloading: Offload) -> None:
    plain = _train(_as_a_whole(device), device)
    with pytest.warns(UserWarning, match=r"\"whole\"\): one node .* tensors at once.*Compile each block") as caught:
        found = _train(_as_a_whole(device), device, lambda: offloading(1.0, "whole", window_bytes=0))

    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert_same_bits(found, plain)
    assert memkit.stats("whole").moved_out_bytes > 0


def test_whole_model_of_which_nothing_is_to_leave_does_not_warn(device: Device, offloading: Offload) -> None:
    _train(_as_a_whole(device), device, lambda: offloading(0.0, "nothing"))

    assert memkit.stats("nothing").unique_bytes > 0


def test_plain_model_beside_compiled_code_does_not_warn(device: Device, offloading: Offload) -> None:
    torch.compile(lambda x: x.sin(), backend="eager")(torch.zeros(3))
    found = _train(_model(device), device, lambda: offloading(1.0, "beside", window_bytes=0))

    assert_same_bits(found, _train(_model(device), device))
    assert innermost_pack() is None


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_offload_inside_a_compiled_function(device: Device, offloading: Offload) -> None:
    """Dynamo runs uncompilable code as plain Python."""
    model, context = _model(device), offloading(1.0, "inside", window_bytes=0)

    def forward(x: Tensor) -> Tensor:
        with context:
            return model(x)

    x = torch.randn(16, 32, device=device.torch_device)
    with pytest.warns(UserWarning, match="as it is when a model is compiled as a whole"):
        torch.compile(forward, backend="aot_eager")(x).sum().backward()
    found = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    torch.compile(model.forward, backend="aot_eager")(x).sum().backward()

    assert_same_bits(found, [param.grad for param in model.parameters()])
    assert memkit.stats("inside").moved_out_bytes > 0
    assert frames_of_memkit() == []


def test_writing_to_what_a_compiled_block_saved_raises(device: Device, offloading: Offload) -> None:
    block = Block().to(device.torch_device)
    block.compile(backend="aot_eager")
    with offloading(1.0, "written", window_bytes=0):
        x = torch.randn(16, 32, device=device.torch_device).requires_grad_().clone()
        y = block(x).sum() + block(x.cos()).sum()
    x.detach().mul_(2)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


class _Notes(nn.Module):
    """Notes how many copies have begun before its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(memkit.stats("leaves").num_copies_out)
        return x


@pytest.mark.filterwarnings(NO_PLAN_FITS)
@pytest.mark.parametrize("kind", ["offload", "budget"])
def test_what_a_compiled_block_saves_leaves_as_it_returns(kind: str, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """It doesn't wait for the next block's saves, which come at that block's end."""
    monkeypatch.setattr(RematState, "gives_up_plans", False)
    blocks, notes = _model(device, num_blocks=3), _Notes()
    for block in blocks:
        block.compile(backend="aot_eager")
    model, x = nn.Sequential(blocks[0], notes, *blocks[1:]), torch.randn(16, 32, device=device.torch_device)
    for _ in range(8):
        with (
            memkit.CPUOffload(1.0, "leaves", min_bytes=0, window_bytes=0, device=device)
            if kind == "offload"
            else memkit.MemoryBudget("1B", "leaves", min_bytes=0, device=device)
        ):
            loss = model(x).square().mean()
        loss.backward()
    assert memkit.stats("leaves").num_copies_out > 3
    assert min(notes.seen[-3:]) > 0


# Hooks


def _in_form(form: str, device: Device, backend: Backend, *, breaks: bool = False) -> nn.Sequential:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return nn.Sequential(*[in_form(form, Block(breaks=breaks).to(device.torch_device), backend) for _ in range(3)])


@pytest.mark.covering(1)
@pytest.mark.parametrize("breaks", [False, True], ids=["whole", "broken"])
@pytest.mark.parametrize("amp", [False, True], ids=["fp32", "bf16"])
@forms_on("seed 0", "seed 1")
def test_nothing_is_compiled_again_and_no_hook_is(
    form: str, amp: bool, breaks: bool, device: Device, offloading: Offload
) -> None:
    plain_backend, backend = Backend(), Backend()
    plain = _train(_in_form(form, device, plain_backend, breaks=breaks), device, num_steps=6, amp=amp)
    model = _in_form(form, device, backend, breaks=breaks)
    torch._dynamo.utils.counters.clear()
    seen: list[tuple[int, int]] = []

    def look() -> None:
        seen.append((backend.num_graphs, torch._dynamo.utils.counters["frames"]["total"]))

    def context() -> AbstractContextManager[Any]:
        """Enter one first, leave it out, enter it again: another object, under another tag, with other hooks."""
        look()
        step = len(seen) - 1
        return nullcontext() if step == 3 else offloading((0.5, 1.0)[step % 2], f"step {step % 4}", window_bytes=0)

    assert_same_bits(_train(model, device, context, num_steps=6, amp=amp), plain)
    look()
    assert set(seen[1:]) == {(plain_backend.num_graphs, seen[-1][1])}
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
