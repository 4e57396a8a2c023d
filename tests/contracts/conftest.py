"""Fixtures of the contract tests: every saved-tensor context on every device, and streamed layers beside them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.activations.offloading import moving_stage
from memkit.activations.recomputing import recording_stage
from memkit.device import CpuDevice, Device, ReferenceDevice
from tests.activations.cases import COMPUTATIONS, inputs_on
from tests.activations.conftest import deterministic, only_new_objects, open_test_device
from tests.activations.remat.cases import COMPUTATIONS as ALL_COMPUTATIONS
from tests.activations.remat.conftest import quick_plans, without_collector
from tests.contracts.contexts import KINDS, MORE_KINDS, Kind
from tests.engine import let_go_of_last_backward

__all__ = ["deterministic", "only_new_objects", "quick_plans", "without_collector"]

DEVICES = ("late", "seed 0", *(["cuda"] if torch.cuda.is_available() else []))
"""Also "cpu" for contexts that work where device memory is host memory."""


@dataclass(frozen=True)
class Context:
    """A saved-tensor context; each call makes one, under the same `tag`."""

    name: str
    kind: Kind
    device: Device
    tag: str = "contract"

    def __call__(self) -> AbstractContextManager[object]:
        return self.kind.make(self.device, self.tag)

    @property
    def torch_device(self) -> torch.device:
        return self.device.torch_device

    @property
    def num_live(self) -> int:
        """Records and bytes that graphs still hold, once copies under way have arrived, and backwards are over."""
        let_go_of_last_backward(self.torch_device)
        self.device.synchronize()
        return self.kind.num_live(self.tag)

    @property
    def num_acts(self) -> int:
        return self.kind.num_acts(self.tag)


def _param(name: str, device: str, *marks: pytest.MarkDecorator) -> object:
    if device == "cuda":
        marks = (*marks, pytest.mark.gpu)
    if device == "seed 0" or (device == "cpu" and name != "remat plan"):  # which the others repeat
        marks = (*marks, pytest.mark.slow)
    return pytest.param((name, device), id=f"{name}-{device}", marks=marks)


_LIKE_OTHERS = ("offload half", "remat dtr")
"""The others behave as these do: they run only in full runs."""


def _params(kinds: dict[str, Kind]) -> list[object]:
    marks = {name: (pytest.mark.slow,) if name in _LIKE_OTHERS else () for name in kinds}
    return [_param(name, device, *marks[name]) for name, kind in kinds.items() for device in (*DEVICES, *["cpu"] * kind.on_cpu)]


def open_found_late(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Put tensors on the CPU on a device of their own, which contexts find as one saves them."""
    device = ReferenceDevice()
    for stage in (recording_stage, moving_stage):
        monkeypatch.setattr(stage, "open_device", lambda _: device)
    return device


def _open(name: str) -> Device:
    return CpuDevice() if name == "cpu" else open_test_device(name)


def _made(request: pytest.FixtureRequest) -> Iterator[Context]:
    name, device = request.param
    found = Context(name, (KINDS | MORE_KINDS)[name], _open(device))
    yield found
    found.device.synchronize()  # raises the finalizers' findings


@pytest.fixture(params=_params(KINDS))
def context(request: pytest.FixtureRequest) -> Iterator[Context]:
    """Return each saved-tensor context on each device; fail in the end if there were races."""
    yield from _made(request)


_MORE = [_param(name, device, pytest.mark.slow) for name in MORE_KINDS for device in DEVICES if device != "seed 0"]


@pytest.fixture(params=[*_params(KINDS), *_MORE])
def any_context(request: pytest.FixtureRequest) -> Iterator[Context]:
    """Return each in further settings as well."""
    yield from _made(request)


class Case:
    """Something to train in any order of forwards and backwards: a call by name runs a computation on x [8, 32]. Forwards run
    in `context()`; `leaves` has all tensors that require grad, such as `x`."""

    def __init__(self, device: Device, context: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        self.device, self.context = device, context
        self.x, self.weight = inputs_on(device.torch_device)
        self.leaves = [self.x, self.weight]

    def compute(self, name: str, x: Tensor) -> Tensor:
        x = x.add(1).mul_(2).add_(x.neg()).sub(2)  # ops ahead of all that saves anything, which write
        return {**COMPUTATIONS, **ALL_COMPUTATIONS}[name](x, self.weight)

    def __call__(self, name: str, x: Tensor) -> Tensor:
        with self.context():
            return self.compute(name, x)

    def gradients(self) -> list[Tensor]:
        return [leaf.grad for leaf in self.leaves]


class FrozenLayers(nn.Module):
    """Layers that are not trained, between two that are."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(32, 32), nn.Linear(32, 32)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()) for _ in range(4))
        self.layers.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x) + x
        return self.head(x)


class LayersCase(Case):
    """The same frozen layers for every computation, streamed or not."""

    def __init__(self, device: Device, model: nn.Module) -> None:
        super().__init__(device)
        model.zero_grad()
        self.model = model
        self.leaves = [self.x, *[param for param in model.parameters() if param.requires_grad]]

    def compute(self, name: str, x: Tensor) -> Tensor:
        return self.model(x)


@dataclass(frozen=True)
class Training:
    """Makes the same case plain, and with the tested feature."""

    plain: Callable[[], Case]
    tested: Callable[[], Case]
    num_acts: Callable[[], int]


_FOUND_LATE = [(name, "found late") for name in KINDS]


@pytest.fixture(params=[*_params(KINDS), *_FOUND_LATE, *[_param("frozen layers", device) for device in DEVICES]])
def training(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    """Return cases for each saved-tensor context, also on a device that it finds; and for frozen layers that stream."""
    name, opened = request.param
    device = open_found_late(monkeypatch) if opened == "found late" else _open(opened)
    named = None if opened == "found late" else device
    if name in KINDS:
        kind = KINDS[name]
        yield Training(
            lambda: Case(device), lambda: Case(device, lambda: kind.make(named, "training")), lambda: kind.num_acts("training")
        )
    else:
        torch.manual_seed(0)
        model = FrozenLayers().to(device.torch_device)
        plain = copy.deepcopy(model)
        with memkit.LayerOffload(model, offload_ratio=1.0, num_slots=2, device=device) as offload:
            yield Training(
                lambda: LayersCase(device, plain), lambda: LayersCase(device, model), lambda: offload.stats().num_streamed
            )
    device.synchronize()
