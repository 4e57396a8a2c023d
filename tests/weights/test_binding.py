"""Parts of a layer that streams: whether its parameters are what they were, and hooks on the modules in it."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import nn

import memkit
from memkit.core import torch_private
from memkit.device import ReferenceDevice
from memkit.plan.chunks import Residency
from memkit.weights.chunks import LayerChunk
from memkit.weights.forwards import InnerHooks


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


HOST, IN_FLIGHT, DEVICE, DIRTY = Residency.HOST, Residency.IN_FLIGHT, Residency.DEVICE, Residency.DIRTY


class _Overlapping(nn.Module):
    """One of its parameters is a part of another, and its counter says nothing of writes to that. A backward writes to it."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Parameter(torch.linspace(-1, 1, 256).view(16, 16), requires_grad=False)
        self.part = nn.Parameter(self.whole.data[:1].view(16), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return [batch, 16]."""
        y = x @ self.whole
        y.register_hook(self._write)
        return y * 2.0

    def _write(self, _: object) -> None:
        with torch.no_grad():
            self.part.mul_(1.5)


def test_weight_that_is_written_to_through_another_parameter_in_the_backward_is_that_of_the_plain_run() -> None:
    device, model = ReferenceDevice(), nn.Sequential(*[_Overlapping() for _ in range(4)])
    plain = nn.Sequential(*[_Overlapping() for _ in range(4)])
    with memkit.LayerOffload(model, offload_ratio=1.0, device=device):
        for _ in range(3):
            found, expected = (torch.linspace(-1, 1, 64).view(4, 16).requires_grad_() for _ in range(2))
            model(found).sum().backward()
            plain(expected).sum().backward()
            assert found.grad is not None
            assert expected.grad is not None
            assert torch.equal(found.grad, expected.grad)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)
    device.synchronize()
    assert not device.races


class _Watched:
    """A module with such hooks, and what was called in which order."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.order, self.hooks = module, list[str](), InnerHooks()
        self.hooks.around_inner(module, before=self._before, after=self._after)

    def _before(self, *_: object) -> None:
        self.order.append("before")

    def _after(self, *_: object) -> None:
        self.order.append("after")

    def run(self) -> list[str]:
        """Call the module; return what was called."""
        self.order.clear()
        self.module(torch.zeros(1))
        return list(self.order)


def test_shallow_copy_shares_the_hooks() -> None:
    watched = _Watched(nn.Identity())
    watched.module = copy.copy(watched.module)

    for _ in range(2):
        assert watched.run() == ["before", "after"]


def test_hooks_that_are_set_aside_are_not_called_until_they_are_back_outside_of_the_users_own() -> None:
    watched = _Watched(nn.Identity())
    watched.hooks.set_aside()
    watched.module.register_forward_pre_hook(lambda *_: watched.order.append("user before"))
    watched.module.register_forward_hook(lambda *_: watched.order.append("user after"))

    assert watched.run() == ["user before", "user after"]

    watched.hooks.put_back()
    watched.hooks.put_back()

    assert watched.run() == ["before", "user before", "user after", "after"]


def test_hooks_that_the_caller_has_removed_do_not_come_back() -> None:
    watched = _Watched(nn.Identity())
    watched.module._forward_pre_hooks.clear()
    watched.module._forward_hooks.clear()

    watched.hooks.set_aside()
    watched.hooks.put_back()

    assert watched.run() == []


def test_module_that_is_no_more_is_left_out() -> None:
    watched = _Watched(nn.Identity())
    watched.hooks.around_inner(nn.Identity(), before=lambda *_: None, after=lambda *_: None)
    gc.collect()

    watched.hooks.set_aside()
    assert watched.run() == []

    watched.hooks.put_back()
    assert watched.run() == ["before", "after"]
