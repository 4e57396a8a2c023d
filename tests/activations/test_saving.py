"""A model with an offload attached can be copied and saved, without the attachment. So can contexts."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memkit
from memkit.core.hooks import innermost_pack
from memkit.device import CpuDevice, ReferenceDevice
from tests.activations.cases import assert_same_bits
from tests.activations.remat.conftest import NO_PLAN_FITS

pytestmark = pytest.mark.filterwarnings("ignore:.*no memory apart from the host", NO_PLAN_FITS)

# Models


def _saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "torch.save": _saved_and_loaded,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "oldest pickle": lambda model: pickle.loads(pickle.dumps(model, protocol=2)),
    "deepcopy": copy.deepcopy,
}


def _attached(**options: object) -> tuple[nn.Module, memkit.activations.Attachment]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    device = ReferenceDevice()
    return model, memkit.attach(model, memkit.CPUOffload(lambda iteration: 1.0, "saved", device=device, min_bytes=0, **options))


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    model(torch.linspace(0, 1, 16).view(2, 8)).sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("attach_to", ["model", "layer"])
def test_copy_works_and_has_nothing_attached(way: str, attach_to: str) -> None:
    model, handle = _attached()
    assert b"memkit" not in pickle.dumps(model)
    whole = model if attach_to == "model" else nn.Sequential(model, nn.Tanh())
    wanted = _gradients(whole)
    made = WAYS[way](whole)

    assert_same_bits(_gradients(made), wanted)
    assert memkit.stats("saved").num_iterations == 1
    assert_same_bits(_gradients(whole), wanted)
    assert memkit.stats("saved").num_iterations == 2
    handle.remove()
    assert_same_bits(_gradients(whole), wanted)
    assert memkit.stats("saved").num_iterations == 2
    assert innermost_pack() is None


@pytest.mark.parametrize("way", WAYS)
def test_copy_can_be_attached_and_copied_again(way: str) -> None:
    model, _ = _attached()
    wanted, made = _gradients(model), model
    for count in range(1, 4):
        made = WAYS[way](made)
        memkit.attach(made, memkit.CPUOffload(1.0, "again", device=ReferenceDevice(), min_bytes=0))

        assert_same_bits(_gradients(made), wanted)
        assert memkit.stats("again").num_iterations == count


@pytest.mark.parametrize("way", WAYS)
def test_handle_that_the_model_holds_is_one_of_nothing_in_the_copy(way: str) -> None:
    model, model.handle = _attached()
    made = WAYS[way](model)
    made.handle.remove()

    _gradients(model)
    _gradients(made)
    assert memkit.stats("saved").num_iterations == 1


def test_copy_that_is_made_within_a_forward_works() -> None:
    made: list[nn.Module] = []

    class CopiesItself(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not made:
                made.append(copy.deepcopy(self))
            return super().forward(x).sin()

    model = CopiesItself(8, 8)
    memkit.attach(model, memkit.CPUOffload(1.0, "within", device=ReferenceDevice(), min_bytes=0))
    wanted = _gradients(model)

    assert_same_bits(_gradients(made[0]), wanted)
    assert memkit.stats("within").num_iterations == 1
    assert innermost_pack() is None


# Contexts


CONTEXTS: dict[str, Callable[[], Any]] = {
    "CPUOffload": lambda: memkit.CPUOffload(0.5, "saved", min_bytes=0),
    "CPUOffload by a schedule": lambda: memkit.CPUOffload(
        memkit.schedules.linear(0, 1, num_iterations=3), "saved", min_bytes=0
    ),
    "CPUOffload on a device": lambda: memkit.CPUOffload(0.5, "saved", min_bytes=0, device=CpuDevice()),
    "Rematerialize": lambda: memkit.Rematerialize(0.5, "saved", min_bytes=0),
    "Rematerialize with pure ops": lambda: memkit.Rematerialize(0.5, "saved", min_bytes=0, pure_ops=["mylib::*"]),
    "MemoryBudget": lambda: memkit.MemoryBudget(0.5, "saved", min_bytes=0),
    "MemoryBudget on a device": lambda: memkit.MemoryBudget("1GiB", "saved", min_bytes=0, device=CpuDevice()),
    "no_offload": memkit.no_offload,
}
COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda context: pickle.loads(pickle.dumps(context)),
    "oldest pickle": lambda context: pickle.loads(pickle.dumps(context, protocol=0)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}


def _step(context: Any) -> None:
    x = torch.ones(8, requires_grad=True)
    with context:
        y = torch.batch_norm(x.sin().view(4, 2), None, None, None, None, True, 0.1, 1e-5, False).exp()
    y.sum().backward()


@pytest.mark.core(1)
@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("name", CONTEXTS)
def test_what_is_made_of_a_context_does_the_same(name: str, way: str) -> None:
    for is_used in (False, True):
        context = CONTEXTS[name]()
        if is_used:
            _step(context)
        made = COPIES[way](context)
        _step(made)

        assert type(made) is type(context)
        assert repr(made) == repr(context)
    with context:
        made = COPIES[way](context)
    _step(made)
    assert not made.is_entered


@pytest.mark.parametrize("name", ["CPUOffload", "Rematerialize", "MemoryBudget"])
def test_reference_device_is_copied_with_a_context_and_is_not_pickled(name: str) -> None:
    device = ReferenceDevice()
    context = getattr(memkit, name)(0.5, "saved", min_bytes=0, device=device)
    _step(copy.deepcopy(context))

    assert copy.deepcopy(device) is device
    with pytest.raises(
        TypeError, match="what is pickled needs a device that another process can open; found a ReferenceDevice"
    ):
        pickle.dumps(context)
