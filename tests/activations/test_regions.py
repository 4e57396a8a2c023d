"""Regions against the plain run and torch's checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import memkit
from memkit.activations.recomputing.regions import Regions, RegionSpec, why_not_region
from memkit.device import ReferenceDevice
from memkit.recording.module_calls import ModuleTrail
from memkit.recording.recording import Recording
from tests.activations.cases import COMPUTATIONS, assert_same_bits, inputs_on
from tests.gpus import ON_GPU
from tests.models import CASES, NAMES

ALL = RegionSpec()


class Run(nn.Module):
    """A computation as a module."""

    def __init__(self, computation: Callable[..., Any]) -> None:
        super().__init__()
        self.computation = computation

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.computation(*args, **kwargs)


def step(
    module: nn.Module, context: Callable[[], AbstractContextManager[Any]], call: Callable[..., Tensor] | None = None
) -> list[Tensor]:
    """Return all that a step leaves: loss, gradients, and the random state."""
    inputs = inputs_on(torch.device("cpu"))
    losses = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with context():
            loss = (call or module)(*inputs).square().mean()
        torch.rand(3)
        loss.backward()
        losses.append(loss.detach())
    return [*losses, *[x.grad for x in inputs], torch.get_rng_state()]


@pytest.mark.parametrize("name", COMPUTATIONS)
def test_region_has_the_bits_of_the_plain_run(name: str) -> None:
    module = Run(COMPUTATIONS[name])
    plain = step(module, nullcontext)

    assert_same_bits(step(module, lambda: Regions({module: ALL})), plain)


class Net(nn.Module):
    """Blocks with all that a block may have."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.first = nn.Linear(32, 32)

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        x = functional.linear(self.first(x), w)
        for block in self.blocks:
            x = x + block(x)
        return x


class Counting(nn.Module):
    """Writes to buffers: in place, by putting another in its place, and reads what was in them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.register_buffer("mean", torch.zeros(32))
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("table", torch.randn(32))
        self.register_buffer("last", None)

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        self.steps = self.steps + 1
        y = self.linear(x * self.steps - self.mean).sin() * self.table
        if self.last is not None:
            y = y + self.last.cos()
        self.last = y.detach().mean(0)
        return y.tanh()


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 32)),
    "inplace": lambda: nn.Sequential(
        nn.Linear(32, 32), nn.ReLU(inplace=True), nn.Linear(32, 32), nn.Dropout(0.2, inplace=True)
    ),
    "batch_norm": lambda: nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.BatchNorm1d(32, momentum=None)),
    "batch_norm_eval": lambda: nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32).eval(), nn.ReLU()),
    "batch_norm_untracked": lambda: nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32, track_running_stats=False)),
    "instance_norm": lambda: nn.Sequential(
        nn.Linear(32, 32), nn.Unflatten(1, (4, 8)), nn.InstanceNorm1d(4, track_running_stats=True), nn.Flatten()
    ),
    "counting": Counting,
    "spectral_norm": lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(32, 32)), nn.GELU()),
    "no_grad_inside": lambda: Run(lambda x: x.sin() * torch.no_grad()(torch.exp)(x)),
    "attention": lambda: nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True),
    "output_saved": lambda: nn.Softmax(-1),
    "input_returned": lambda: Run(lambda x: (x.sin() * x, x)[1]),
    "view_returned": lambda: Run(lambda x: x.sin().t().exp().t()),
    "no_saves": nn.Identity,
    "checkpoint_inside": lambda: Run(lambda x: checkpoint(lambda y: (y.sin() * y).tanh(), x, use_reentrant=False).exp()),
    "reentrant_checkpoint_inside": lambda: Run(lambda x: checkpoint(lambda y: y.sin().tanh(), x, use_reentrant=True).exp()),
}


def leavings(net: nn.Module, context: Callable[[], AbstractContextManager[Any]], num_steps: int = 3) -> list[Tensor]:
    """Return all that steps leave: losses, gradients, buffers, and the random state."""
    inputs, left = inputs_on(net.first.weight.device), []
    torch.manual_seed(1)
    for _ in range(num_steps):
        with context():
            loss = net(*inputs).square().mean()
        left += [loss.detach(), torch.get_rng_state()]
        torch.rand(3, device=loss.device)
        loss.backward()
        left += [x.grad.clone() for x in (*inputs, *net.parameters()) if x.grad is not None]
        left += [buffer.clone() for buffer in net.buffers()]
    return [*left, torch.get_rng_state(), torch.rand(3, device=loss.device)]


def nets(name: str, device: str = "cpu") -> list[Net]:
    torch.manual_seed(0)
    net = Net(*[BLOCKS[name]() for _ in range(3)]).to(device)
    net.blocks.append(net.blocks[0])  # called twice
    return [net, copy.deepcopy(net), copy.deepcopy(net)]


def regions_of(net: Net) -> Regions:
    return Regions(dict.fromkeys({*net.blocks}, ALL))


DEVICES = ["cpu", *ON_GPU]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_have_the_bits_of_the_plain_run(name: str, device: str) -> None:
    plain, net, other = nets(name, device)
    wanted = leavings(plain, nullcontext)
    once = regions_of(net)

    assert_same_bits(leavings(net, lambda: once), wanted)
    assert_same_bits(leavings(other, lambda: regions_of(other)), wanted)


def nested_regions_of(net: Net) -> Regions:
    """The blocks, and all that is in them."""
    return Regions({part: ALL for block in net.blocks for part in block.modules()})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [name for name in BLOCKS if name != "inplace"])
def test_regions_in_regions_have_the_bits_of_the_plain_run(name: str, device: str) -> None:
    plain, net, other = nets(name, device)
    wanted = leavings(plain, nullcontext)
    once = nested_regions_of(net)

    assert_same_bits(leavings(net, lambda: once), wanted)
    assert_same_bits(leavings(other, lambda: nested_regions_of(other)), wanted)


# Which modules may be regions


def linear_with(setting: Callable[[nn.Module], object]) -> nn.Module:
    module = nn.Linear(4, 4)
    setting(module)
    return module


UNFIT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "container": (lambda: nn.ModuleList([nn.Linear(4, 4)]), "a ModuleList has no forward"),
    "forward hook": (lambda: linear_with(lambda it: it.register_forward_hook(print)), "it has hooks"),
    "pre-hook": (lambda: linear_with(lambda it: it.register_forward_pre_hook(print)), "it has hooks"),
    "backward hook": (lambda: linear_with(lambda it: it.register_full_backward_hook(print)), "it has hooks"),
    "hook inside": (
        lambda: nn.Sequential(linear_with(lambda it: it.register_forward_hook(print))),
        "a Linear in it: it has hooks",
    ),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(4)), "a LazyLinear in it: its parameters are made by its first call"),
    "scripted": (lambda: torch.jit.trace(nn.Linear(4, 4), torch.ones(1, 4)), "it is scripted"),
    "sync batch norm": (lambda: nn.Sequential(nn.SyncBatchNorm(4)), "a SyncBatchNorm in it: its forward talks to other"),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", UNFIT)
def test_says_why_a_module_cannot_be_a_region(name: str) -> None:
    build, wanted = UNFIT[name]

    assert why_not_region(build()).startswith(wanted)


def test_says_that_hooks_of_all_modules_are_set() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert why_not_region(nn.Linear(4, 4)).startswith("hooks of all modules are set")
    finally:
        handle.remove()


def test_hooks_that_record_are_no_hindrance() -> None:
    with ModuleTrail(Recording(ReferenceDevice())):
        assert why_not_region(nn.Linear(4, 4)) == ""


@pytest.mark.filterwarnings("ignore:LayerOffload frees no memory on the device")
def test_says_that_weights_stream() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    offload = memkit.LayerOffload(net, ["0", "1"], num_resident=0, device=ReferenceDevice())
    try:
        assert why_not_region(net[0]) == "LayerOffload streams its weights"
    finally:
        offload.close()


@pytest.mark.parametrize("name", BLOCKS)
def test_other_modules_may_be_regions(name: str) -> None:
    block = BLOCKS[name]()
    with Regions({block: ALL}):
        assert why_not_region(block) == ""


# Beside torch's checkpoint


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["dropout", "attention", "batch_norm_eval", "output_saved", "no_grad_inside"])
def test_blocks_have_the_bits_of_checkpointed_ones(name: str, device: str) -> None:
    checkpointed, net, _ = nets(name, device)
    for block in {*checkpointed.blocks}:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)

    assert_same_bits(leavings(net, lambda: regions_of(net)), leavings(checkpointed, nullcontext))


@pytest.mark.parametrize("name", NAMES)
def test_models_have_the_bits_of_the_plain_run(name: str) -> None:
    case = CASES[name]

    def leave(context: Callable[[nn.Module], AbstractContextManager[Any]]) -> list[Tensor]:
        model, left = case.model(), []
        regions = context(model)
        for _ in range(2):
            with regions:
                out = model(*case.inputs())
            out = next(iter(out.values())) if isinstance(out, dict) else out
            out = out if isinstance(out, Tensor) else out[0]
            out.square().mean().backward()
            left += [out.detach(), *[buffer.clone() for buffer in model.buffers()], torch.get_rng_state()]
        return [*left, *[p.grad for p in model.parameters() if p.grad is not None]]

    assert_same_bits(leave(lambda model: Regions(dict.fromkeys(candidates(model), ALL))), leave(lambda _: nullcontext()))


def candidates(model: nn.Module) -> list[nn.Module]:
    """Return the children of a model, and the modules without any, that may be regions: what writes in place is none."""
    writes = {part for part in model.modules() if any(getattr(inner, "inplace", False) for inner in part.modules())}
    parts = [part for part in model.modules() if part not in writes and part is not model and not why_not_region(part)]
    return [part for part in parts if part in model.children() or next(part.children(), None) is None]


@pytest.mark.filterwarnings("ignore:CPUOffload", "ignore:Rematerialize")
@pytest.mark.parametrize("context", [memkit.CPUOffload, memkit.Rematerialize])
def test_context_within_a_region(context: Callable[..., AbstractContextManager[Any]]) -> None:
    def computation(x: Tensor) -> Tensor:
        with context(0.5, "within", device=ReferenceDevice(), min_bytes=0):
            y = (x.sin() * x).exp()
        return y.cos()

    region, x = Run(computation), torch.randn(8, 8, requires_grad=True)
    wanted = torch.autograd.grad(region(x).sum(), x)
    with Regions({region: ALL}):
        loss = region(x).sum()

    assert_same_bits(torch.autograd.grad(loss, x), wanted)
