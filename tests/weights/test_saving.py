"""A model whose layers stream: its `state_dict` can be saved, and it itself once the offload is closed."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memkit
from memkit.device import ReferenceDevice
from tests.weights.cases import WIDTH, Stack

MODES: dict[str, dict[str, Any]] = {
    "frozen": {},
    "host": {"train": "host"},
    "fused": {"train": "fused", "optimizer": functools.partial(torch.optim.SGD, lr=0.1)},
}


def _after_a_step(mode: str) -> tuple[Stack, memkit.LayerOffload]:
    torch.manual_seed(0)
    model = Stack().requires_grad_(mode != "frozen")
    offload = memkit.LayerOffload(model, offload_ratio=1.0, device=ReferenceDevice(), **MODES[mode])
    model(torch.randn(2, WIDTH, requires_grad=True)).sum().backward()
    return model, offload


def _through_a_file(value: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


@pytest.mark.parametrize("mode", MODES)
def test_state_dict_that_was_saved_is_that_of_the_model(mode: str) -> None:
    model, _ = _after_a_step(mode)
    other, x = Stack(), torch.randn(2, WIDTH)
    other.load_state_dict(_through_a_file(model.state_dict()))
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in model.state_dict().values())  # written alone

    assert torch.equal(other(x), model(x))


@pytest.mark.parametrize("way", [_through_a_file, pickle.dumps, copy.deepcopy])
@pytest.mark.parametrize("mode", MODES)
def test_whole_model_is_refused_by_name(mode: str, way: Callable[[nn.Module], Any]) -> None:
    model, _ = _after_a_step(mode)
    for module in (model, model.layers[2]):
        with pytest.raises(
            memkit.errors.LayerOffloadError, match=r"while LayerOffload streams its weights.*use model.state_dict\(\)"
        ):
            way(module)


@pytest.mark.parametrize("mode", MODES)
def test_whole_model_can_be_saved_once_the_offload_is_closed(mode: str) -> None:
    model, offload = _after_a_step(mode)
    offload.close()
    x = torch.randn(2, WIDTH)

    assert torch.equal(_through_a_file(model, weights_only=False)(x), model(x))
    assert b"memkit." not in pickle.dumps(model.layers)
