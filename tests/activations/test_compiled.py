"""Beside `torch.compile`: block by block it is exact; a model compiled as a whole saves at its end, which is said once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.activations.saved.state import RematState
from memkit.core.hooks import innermost_pack
from memkit.device import Device
from memkit.device.base import CopyBatch
from memkit.device.cuda import CudaCopyBatch
from memkit.transfer.lanes import Lanes, Transfer
from tests.activations.cases import assert_same_bits
from tests.activations.chains import Context
from tests.activations.conftest import Offload
from tests.activations.remat.conftest import NO_PLAN_FITS
from tests.compiling import WITH_COMPILED

pytestmark = WITH_COMPILED


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(nn.functional.gelu(self.first(x))))


class Model(nn.Module):
    def __init__(self, num_blocks: int, *, breaks: bool) -> None:
        super().__init__()
        self.blocks, self.breaks = nn.ModuleList([Block() for _ in range(num_blocks)]), breaks

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if self.breaks:
                torch._dynamo.graph_break()
        return x


def _model(device: Device, num_blocks: int = 2, *, breaks: bool = False) -> Model:
    torch.manual_seed(0)
    return Model(num_blocks, breaks=breaks).to(device.torch_device)


def _by_block(device: Device, backend: str) -> nn.Module:
    model = _model(device)
    for block in model.blocks:
        block.compile(backend=backend)
    return model


def _as_a_whole(device: Device, backend: str) -> nn.Module:
    model = _model(device, num_blocks=6)
    model.compile(backend=backend)
    return model


def _train(model: nn.Module, device: Device, context: Context = nullcontext, num_steps: int = 3) -> list[Tensor]:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)).to(device.torch_device)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(num_steps):
        optimizer.zero_grad()
        with context():
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *[param.detach().clone() for param in model.parameters()]]


@pytest.mark.parametrize(("backend", "ratio"), [("eager", 1.0), ("aot_eager", 0.5), ("aot_eager", 1.0)])
def test_blocks_that_are_compiled_one_by_one(backend: str, ratio: float, device: Device, offloading: Offload) -> None:
    plain = _train(_by_block(device, backend), device)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    found = _train(_by_block(device, backend), device, lambda: offloading(ratio, "blocks", window_bytes=0))

    assert_same_bits(found, plain)
    stats = memkit.stats("blocks")
    assert stats.moved_out_bytes >= ratio * stats.unique_bytes > 0
    assert stats.moved_in_bytes > 0
    assert stats.live_records == 0


def test_compiled_before_the_context_or_inside_of_it(device: Device, offloading: Offload) -> None:
    plain = _train(_by_block(device, "aot_eager"), device, num_steps=6)
    model = _by_block(device, "aot_eager")
    found = _train(model, device, num_steps=2)
    found += _train(model, device, lambda: offloading(1.0, "mixed", window_bytes=0), num_steps=2)[:2]
    found += _train(model, device, num_steps=2)

    parameters = list(model.parameters())
    assert_same_bits([*found[:2], *found[-len(parameters) :]], [*plain[:2], *plain[6:]])


def test_attached_to_compiled_blocks(device: Device) -> None:
    plain = _train(_by_block(device, "aot_eager"), device)
    model = _by_block(device, "aot_eager")
    memkit.attach(model, memkit.CPUOffload(1.0, "attached", min_bytes=0, window_bytes=0, device=device))

    assert_same_bits(_train(model, device), plain)
    assert memkit.stats("attached").moved_out_bytes > 0


def test_whole_model_that_is_compiled_is_exact_and_warns_once(device: Device, offloading: Offload) -> None:
    plain = _train(_as_a_whole(device, "aot_eager"), device)
    with pytest.warns(UserWarning, match=r"\"whole\"\): one node .* tensors at once.*Compile each block") as caught:
        found = _train(_as_a_whole(device, "aot_eager"), device, lambda: offloading(1.0, "whole", window_bytes=0))

    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert_same_bits(found, plain)
    assert memkit.stats("whole").moved_out_bytes > 0


def test_whole_model_of_which_nothing_is_to_leave_does_not_warn(device: Device, offloading: Offload) -> None:
    _train(_as_a_whole(device, "aot_eager"), device, lambda: offloading(0.0, "nothing"))

    assert memkit.stats("nothing").unique_bytes > 0


def test_graph_break_in_a_compiled_model_does_not_warn(device: Device, offloading: Offload) -> None:
    def make() -> nn.Module:
        torch._dynamo.reset()
        model = _model(device, breaks=True)
        model.compile(backend="aot_eager")
        return model

    plain = _train(make(), device)
    found = _train(make(), device, lambda: offloading(1.0, "broken", window_bytes=0))

    assert_same_bits(found, plain)


def test_plain_model_beside_compiled_code_does_not_warn(device: Device, offloading: Offload) -> None:
    torch.compile(lambda x: x.sin(), backend="eager")(torch.zeros(3))
    found = _train(_model(device), device, lambda: offloading(1.0, "beside", window_bytes=0))

    assert_same_bits(found, _train(_model(device), device))
    assert innermost_pack() is None


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_offload_inside_a_compiled_function(device: Device, offloading: Offload) -> None:
    """Dynamo runs uncompilable code as plain Python."""
    model = _model(device)

    def forward(x: Tensor) -> Tensor:
        with offloading(1.0, "inside", window_bytes=0):
            return model(x)

    x = torch.randn(16, 32, device=device.torch_device)
    with pytest.warns(UserWarning, match="as it is when a model is compiled as a whole"):
        torch.compile(forward, backend="aot_eager")(x).sum().backward()
    found = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    torch.compile(model.forward, backend="aot_eager")(x).sum().backward()

    assert_same_bits(found, [param.grad for param in model.parameters()])
    assert memkit.stats("inside").moved_out_bytes > 0


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

    def __init__(self, begun: list[object]) -> None:
        super().__init__()
        self.begun, self.seen = begun, list[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(self.begun))
        return x


@pytest.mark.filterwarnings(NO_PLAN_FITS)
@pytest.mark.parametrize("kind", ["offload", "budget"])
def test_what_a_compiled_block_saves_leaves_as_it_returns(kind: str, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """It doesn't wait for the next block's saves, which come at that block's end."""
    begun: list[object] = []
    copy_out = Lanes.copy_out

    def note_copy(lanes: Lanes, *args: Any, **kwargs: Any) -> Transfer:
        begun.append(None)
        return copy_out(lanes, *args, **kwargs)

    def noting(start: Callable[..., None]) -> Callable[..., None]:
        def note_start(batch: CopyBatch, storages: Sequence[torch.UntypedStorage], behind: CopyBatch | None = None) -> None:
            begun.extend(storages)
            start(batch, storages, behind)

        return note_start

    monkeypatch.setattr(RematState, "gives_up_plans", False)
    monkeypatch.setattr(Lanes, "copy_out", note_copy)
    for kind_of_batch in (CopyBatch, CudaCopyBatch):
        monkeypatch.setattr(kind_of_batch, "start", noting(kind_of_batch.start))
    blocks, notes = _model(device, num_blocks=3).blocks, _Notes(begun)
    for block in blocks:
        block.compile(backend="aot_eager")
    model = nn.Sequential(blocks[0], notes, *blocks[1:])

    def context() -> AbstractContextManager[object]:
        if kind == "offload":
            return memkit.CPUOffload(1.0, "leaves", min_bytes=0, window_bytes=0, device=device)
        return memkit.MemoryBudget("1B", "leaves", min_bytes=0, device=device)

    x = torch.randn(16, 32, device=device.torch_device)
    for _ in range(8):
        begun.clear()
        with context():
            loss = model(x).square().mean()
        loss.backward()
    assert memkit.stats("leaves").num_copies_out > 3
    assert min(notes.seen[-3:]) > 0
