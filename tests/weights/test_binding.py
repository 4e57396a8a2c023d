"""Whether the parameters of a layer are what they were."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import nn

from memkit.core import torch_private
from memkit.weights.chunks import LayerChunk


def _chunk(layer: nn.Module) -> LayerChunk:
    chunk = LayerChunk("layer", layer, layer.parameters(), 0)
    chunk.mapped = memoryview(bytearray(chunk.num_bytes))
    chunk.move_to_host()
    return chunk


def _layer() -> nn.Sequential:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    return layer.requires_grad_(False)


def _transpose(layer: nn.Sequential) -> None:
    layer[0].weight.data = layer[0].weight.data.t()


def _narrow(layer: nn.Sequential) -> None:
    layer[1].bias.data = layer[1].bias.data[:2]


def _cast(layer: nn.Sequential) -> None:
    layer[1].weight.data = layer[1].weight.data.view(torch.int32)


def _move(layer: nn.Sequential) -> None:
    layer[0].bias.data = layer[0].bias.data.clone()


def _replace(layer: nn.Sequential) -> None:
    layer[0].weight = nn.Parameter(layer[0].weight.data, requires_grad=False)


def _double(layer: nn.Sequential) -> None:
    layer.double()


CHANGES = [_transpose, _narrow, _cast, _move, _replace, _double]
MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "plain": nullcontext,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference mode": torch.inference_mode,
}


@pytest.mark.parametrize("has_guards", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", CHANGES)
def test_each_change_is_seen(
    change: Callable[[nn.Sequential], None], mode: str, has_guards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = _layer()
    binding = _chunk(layer).binding
    if not has_guards:  # as in a torch that has no such thing
        monkeypatch.setattr(torch_private, "known", lambda *_: ())
    for enter in (*MODES.values(), MODES[mode]):
        with enter():
            assert binding.check_unchanged()
            assert binding.is_frozen

    change(layer)

    with MODES[mode]():
        assert not binding.check_unchanged()


def test_gradient_is_of_the_host_also_while_a_parameter_lies_elsewhere() -> None:
    (streamed, *_) = _chunk(_layer().requires_grad_()).parameters
    parameter, gradient = streamed.parameter, torch.ones(4, 4)
    other = parameter.data = torch.zeros(4, 4, dtype=torch.float64)  # torch asks for its device, and its dtype
    with pytest.raises(RuntimeError, match="assign"):
        parameter.grad = gradient

    streamed.set_gradient_at_rest(gradient)

    assert parameter.data_ptr() == other.data_ptr()
    streamed.unbind()
    assert parameter.grad is gradient
