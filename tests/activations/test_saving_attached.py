"""A model with an offload attached can be copied and saved: the model alone, to which nothing is attached."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

import memkit
from memkit.core.hooks import innermost_pack
from memkit.device import ReferenceDevice
from tests.activations.cases import assert_same_bits


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


def test_what_is_saved_needs_no_memkit() -> None:
    model, _ = _attached()

    assert b"memkit" not in pickle.dumps(model)


def test_state_dict_is_that_of_the_model() -> None:
    model, handle = _attached()
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    handle.remove()

    assert list(saved) == list(model.state_dict())
    assert_same_bits(list(saved.values()), list(model.state_dict().values()))


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
