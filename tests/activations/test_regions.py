"""Regions against the plain run and torch's checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import memkit
from memkit.activations.recomputing import region_calls
from memkit.activations.recomputing.regions import Regions, why_not_region
from memkit.activations.saved.counts import Counts
from memkit.device import ReferenceDevice
from memkit.recording.module_calls import ModuleTrail
from memkit.recording.recording import Recording
from tests.activations.cases import COMPUTATIONS as COMMON
from tests.activations.cases import assert_same_bits, inputs_on
from tests.activations.remat.cases import COMPUTATIONS, custom_function_saving_more
from tests.activations.test_region_semantics import ALL, Run, leaf
from tests.gpus import ON_GPU
from tests.models import CASES, NAMES


def step(
    module: nn.Module, context: Callable[[], AbstractContextManager[Any]], call: Callable[..., Tensor] | None = None
) -> list[Tensor]:
    """Return a step's results: loss, gradients, and the random state."""
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


@pytest.mark.parametrize("name", [*COMMON, custom_function_saving_more.__name__])
def test_region_has_the_bits_of_the_plain_run(name: str) -> None:
    module = Run(COMPUTATIONS[name])
    plain = step(module, nullcontext)

    assert_same_bits(step(module, lambda: Regions({module: ALL})), plain)


class Net(nn.Module):
    """Its blocks have all that blocks may have."""

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
    """Writes to buffers in place, replaces them, and reads their content."""

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
    """Return the results of steps: losses, gradients, buffers, and the random state."""
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


DEVICES = ["cpu", *ON_GPU]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_have_the_bits_of_the_plain_run(name: str, is_nested: bool, device: str) -> None:
    """Also where all modules in the blocks are regions as well."""

    def regions_of(net: Net) -> Regions:
        inner = [] if not is_nested or name == "inplace" else [part for block in net.blocks for part in block.modules()]
        return Regions(dict.fromkeys([*net.blocks, *inner], ALL))

    plain, net, other = nets(name, device)
    wanted = leavings(plain, nullcontext)
    once = regions_of(net)

    assert_same_bits(leavings(net, lambda: once), wanted)
    assert_same_bits(leavings(other, lambda: regions_of(other)), wanted)


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
    """Return the children and leaf modules of a model that may be regions: modules that write in place may not."""
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


# Generators


class Elsewhere(Tensor):
    """A tensor that says it is on a CUDA device."""

    is_cuda = True
    device = torch.device("cuda:1")


class Drops(nn.Module):
    """Draws random numbers, and has no parameters."""

    def forward(self, x: Tensor, others: Sequence[Tensor] = (), more: dict[str, Tensor] | None = None) -> Tensor:
        return sum([functional.dropout(y) for y in (*others, *(more or {}).values())], functional.dropout(x)).sin()


@pytest.mark.parametrize("place", ["keyword", "list", "dict", "buffer"])
def test_generators_are_those_of_all_tensors(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(region_calls, "states_on", lambda devices: asked.extend(devices) or ())
    region, x, there = nn.Identity(), leaf(), torch.ones(2).as_subclass(Elsewhere)
    region.forward = lambda x, *args, **kwargs: x.sin().exp()  # type: ignore[method-assign]
    if place == "buffer":
        region.register_buffer("there", there)
    calls: dict[str, Callable[[], Tensor]] = {
        "keyword": lambda: region(x, y=there),
        "list": lambda: region(x, [there]),
        "dict": lambda: region(x, y={"z": there}),
        "buffer": lambda: region(x),
    }
    with Regions({region: ALL}):
        calls[place]()

    assert asked == [torch.device("cuda:1")]


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["keyword", "list", "dict"])
def test_recompute_draws_the_same_on_a_device_of_any_input(place: str) -> None:
    region, x = Drops(), leaf(64, 64).detach().cuda().requires_grad_()
    calls: dict[str, Callable[[], Tensor]] = {
        "keyword": lambda: region(x=x),
        "list": lambda: region(torch.ones(()), [x]),
        "dict": lambda: region(torch.ones(()), more={"x": x}),
    }

    def gradients() -> list[Tensor]:
        torch.manual_seed(0)
        loss = calls[place]().sum()
        torch.rand(7, device="cuda")
        return [loss.detach(), *torch.autograd.grad(loss, x), torch.rand(3, device="cuda")]

    wanted = gradients()
    regions = Regions({region: ALL})
    with regions:
        found = gradients()

    assert_same_bits(found, wanted)
    assert not regions.not_taken


# Parameters


def block() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def test_call_with_other_parameters_is_no_region() -> None:
    region, x = block(), leaf()
    others = {name: (parameter.detach() * 1.5).requires_grad_() for name, parameter in region.named_parameters()}

    def gradients() -> list[Tensor]:
        loss = torch.func.functional_call(region, others, (x,)).sum()
        return [loss.detach(), *torch.autograd.grad(loss, [x, *others.values()])]

    wanted = gradients()
    regions = Regions({region: ALL, region[0]: ALL})
    with regions:
        found = gradients()

    assert_same_bits(found, wanted)
    assert "other parameters" in regions.not_taken[region]
    assert "other parameters" in regions.not_taken[region[0]]


def test_call_after_a_parameter_was_replaced_is_no_region() -> None:
    region, x = block(), leaf()
    regions = Regions({region: ALL})
    with regions:
        region[0].weight = nn.Parameter(torch.ones(4, 4))
        loss = region(x).sum()

    assert_same_bits(torch.autograd.grad(loss, x), torch.autograd.grad(region(x).sum(), x))
    assert "other parameters" in regions.not_taken[region]


def test_requires_grad_is_that_of_the_call() -> None:
    region, x = block(), leaf()
    with Regions({region: ALL}):
        region[0].weight.requires_grad_(False)
        loss = region(x).sum()

    assert_same_bits(torch.autograd.grad(loss, x), torch.autograd.grad(region(x).sum(), x))


# Statistics


class Folded(nn.BatchNorm1d):
    """Reads its statistics itself."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def _gradients(region: nn.Module, norm: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the bits of a call that reads statistics, updated by another call before the backward."""
    norm.reset_running_stats()
    region.train()
    region(x * 2 - 1)
    region.eval()
    loss = region(x).sum()
    region.train()
    region(x * 3 + 1)
    leaves = [x, *(parameter for parameter in region.parameters() if parameter.requires_grad)]
    found = [torch.autograd.grad(loss, leaves, retain_graph=True) for _ in range(2)]
    return [loss.detach(), *found[0], *found[1], *norm.buffers()]


@pytest.mark.parametrize("norm", [nn.InstanceNorm1d(4, track_running_stats=True), Folded(4)])
def test_call_that_reads_statistics_is_no_region(norm: nn.Module) -> None:
    region, x = nn.Sequential(nn.Conv1d(4, 4, 1), nn.Tanh(), norm, nn.Tanh()), leaf(3, 4, 5)
    wanted = _gradients(region, norm, x)
    regions = Regions({region: ALL})
    with regions:
        found = _gradients(region, norm, x)

    assert_same_bits(found, wanted)
    assert f"reads the statistics of a {type(norm).__name__}" in regions.not_taken[region]


class ByHand(nn.Module):
    """Normalizes by the statistics of a batch norm, read as a view."""

    def __init__(self, norm: nn.BatchNorm1d) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) if self.training else x * self.norm.running_var[:, None] - self.norm.running_mean[:, None]


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_call_that_reads_statistics_of_a_batch_norm_is_a_region(affine: bool, by_hand: bool) -> None:
    norm, x = nn.BatchNorm1d(4, affine=affine), leaf(3, 4, 5)
    region = nn.Sequential(nn.Conv1d(4, 4, 1), nn.Tanh(), ByHand(norm) if by_hand else norm, nn.Tanh())
    if affine and by_hand:
        norm.requires_grad_(False)
    wanted = _gradients(region, norm, x)
    counts = Counts()
    regions = Regions({region: ALL}, counts=counts)
    with regions:
        found = _gradients(region, norm, x)

    assert_same_bits(found, wanted)
    assert not regions.not_taken
    assert counts.num_replays > 0


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False).eval()])
def test_call_that_reads_no_statistics_is_a_region(norm: nn.Module) -> None:
    region = nn.Sequential(norm, nn.Tanh())
    regions = Regions({region: ALL})
    with regions:
        region(leaf()).sum().backward()

    assert not regions.not_taken


class Scaled(nn.Module):
    """Reads a plain attribute, counts in one, and keeps its output in one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.num_calls = 0
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self.last = (x.sin() * self.scale).exp()
        return self.last * self.num_calls


def test_plain_attributes_are_those_of_the_call_and_are_put_back() -> None:
    region, x = nn.Sequential(Scaled(), nn.Tanh()), leaf()

    def gradients() -> list[Tensor]:
        region[0].num_calls, losses = 0, []
        for scale in (1.0, 0.5):
            region[0].scale = scale
            losses.append(region(x).sum())
        last = region[0].last
        region[0].scale = 0.25
        found = torch.autograd.grad(losses[0] + losses[1], x)
        assert (region[0].scale, region[0].num_calls) == (0.25, 2)
        assert region[0].last is last
        return [*losses, *found]

    wanted = gradients()
    region[0].last = None
    regions = Regions({region: ALL})
    with regions:
        found = gradients()

    assert_same_bits(found, wanted)
    assert not regions.not_taken
