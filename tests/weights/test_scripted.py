"""Modules that TorchScript has compiled take no hooks: layers that are such are refused by name, others run as they do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.device import ReferenceDevice
from tests.weights.cases import Stack, assert_same, inputs, run_step

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning", "ignore:`torch.jit:DeprecationWarning")


def _trace(module: nn.Module) -> nn.Module:
    return torch.jit.trace(module, torch.randn(2, 16))


def _with_scripted_layers(compiled: Callable[[nn.Module], nn.Module]) -> nn.Module:
    model = Stack(3, block=lambda: nn.Linear(16, 16))
    model.layers = nn.ModuleList(compiled(layer) for layer in model.layers)
    return model


def _with_scripted_part() -> nn.Module:
    model = Stack(3)
    model.layers[1].up = torch.jit.script(model.layers[1].up)
    return model


class _Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


CASES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "scripted": (lambda: _with_scripted_layers(torch.jit.script), r'jit.trace has compiled "layers.0"\.'),
    "traced": (lambda: _with_scripted_layers(_trace), r'jit.trace has compiled "layers.0"\.'),
    "a part": (_with_scripted_part, r'jit.trace has compiled "layers.1.up", which is in "layers.1"\.'),
    "the model": (lambda: torch.jit.script(_Listed()), r'jit.trace has compiled the model, with "layers.0" in it\.'),
    "around": (lambda: nn.Sequential(torch.jit.script(_Listed())), r'jit.trace has compiled "0", with "0.layers.0" in it\.'),
}


@pytest.mark.parametrize("case", CASES)
def test_layers_that_torchscript_has_compiled_are_refused_by_name(case: str) -> None:
    make, message = CASES[case]
    model, (batch,) = make(), inputs(ReferenceDevice(), 1)
    expected, storages = model(batch), [parameter.untyped_storage()._cdata for parameter in model.parameters()]

    def is_layer(name: str, _: nn.Module) -> bool:
        return name.rsplit(".", 1)[-1].isdigit() and "layers" in name

    with pytest.raises(ValueError, match=message + r".*name other layers by layers="):
        memkit.LayerOffload(model, layers=is_layer, offload_ratio=1.0, train="host", device=ReferenceDevice())

    assert [parameter.untyped_storage()._cdata for parameter in model.parameters()] == storages
    assert torch.equal(model(batch), expected)


@pytest.mark.parametrize("train", ["host", "frozen"])
def test_module_that_torchscript_has_compiled_runs_beside_layers_that_stream(train: str) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        model = Stack(3)
        model.layers.requires_grad_(train == "host")
        model.stem = torch.jit.script(model.stem)
        return model

    device, model, plain = ReferenceDevice(), make(), make()
    batches = inputs(device)
    expected = [run_step(plain, batches) for _ in range(2)]

    with memkit.LayerOffload(model, offload_ratio=1.0, train=train, device=device):
        for want in expected:
            assert_same(run_step(model, batches), want)


def test_trained_module_that_torchscript_has_compiled_is_not_stepped_within_the_backward() -> None:
    model = Stack(3)
    model.stem = torch.jit.script(model.stem)
    make = partial(torch.optim.SGD, lr=0.1)

    with pytest.raises(ValueError, match=r'has compiled "stem", which is trained\. .*use train="host"'):
        memkit.LayerOffload(model, offload_ratio=1.0, optimizer=make, device=ReferenceDevice())


NOT_FOUND: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "the model": (lambda: torch.jit.script(_linears()), "found none, and the model compiled by torch.jit.script"),
    "an element": (lambda: nn.Sequential(torch.jit.script(nn.Linear(4, 4)), *_linears()), 'found none, and "0" compiled by'),
}


def _linears() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))


@pytest.mark.parametrize("case", NOT_FOUND)
def test_layers_that_are_not_found_because_of_torchscript_say_so(case: str) -> None:
    make, message = NOT_FOUND[case]

    with pytest.raises(ValueError, match=message + r".*name other layers by layers="):
        memkit.LayerOffload(make(), offload_ratio=1.0, device=ReferenceDevice())
