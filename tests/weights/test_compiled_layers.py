"""Streamed layers that `torch.compile` runs: in as many graphs as without `LayerOffload`, and so bit for bit the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memkit
from memkit.device import ReferenceDevice
from tests.weights.cases import WIDTH

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # Dynamo looks at it
    pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning"),
]


class _Nested(nn.Module):
    """A layer with modules inside of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.part = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.part(self.norm(x))


class _Checkpointing(_Nested):
    """Its part runs outside of what is compiled, and again in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.again(self.norm(x))

    @torch.compiler.disable
    def again(self, x: Tensor) -> Tensor:
        return checkpoint(self.part, x, use_reentrant=False)  # type: ignore[no-any-return]


def _model(layer: Callable[[], nn.Module] = _Nested, num_layers: int = 10) -> nn.Sequential:
    """More layers than Dynamo would compile one by one."""
    torch.manual_seed(0)
    return nn.Sequential(*[layer() for _ in range(num_layers)])


def _compile(model: nn.Sequential, how: str) -> None:
    for number, layer in enumerate(model):
        if how == "call":
            layer.compile(backend="aot_eager")
        elif how == "forward":
            layer.forward = torch.compile(layer.forward, backend="aot_eager")
        elif how == "around":
            model[number] = torch.compile(layer, backend="aot_eager")  # type: ignore[assignment]


def _step(model: nn.Module) -> tuple[list[Tensor], int]:
    """Return the gradients of two steps, and how many graphs Dynamo has made for them."""
    torch._dynamo.utils.counters.clear()
    for _ in range(2):
        model(torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)).square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    return [parameter.grad for parameter in model.parameters()], torch._dynamo.utils.counters["stats"]["unique_graphs"]  # type: ignore[misc]


@pytest.fixture(autouse=True)
def _without_graphs() -> Iterator[None]:
    import torch._dynamo  # as whoever compiles anything has it

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("is_compiled_first", [True, False])
@pytest.mark.parametrize("how", ["call", "forward", "around"])
def test_compiled_layer_is_as_many_graphs_as_without(how: str, is_compiled_first: bool) -> None:
    model, plain = _model(), _model()
    _compile(plain, how)
    expected, num_graphs = _step(plain)
    torch._dynamo.reset()

    if is_compiled_first:
        _compile(model, how)
    with memkit.LayerOffload(model, offload_ratio=1.0, num_slots=2, device=ReferenceDevice()) as offload:
        if not is_compiled_first:
            _compile(model, how)
        found, num_found = _step(model)

        assert num_found == num_graphs
        assert offload.stats().num_fetches > 0
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("how", ["call", "none"])
def test_part_that_a_compiled_layer_checkpoints_finds_its_weights_in_a_slot_again(how: str) -> None:
    model, plain = _model(_Checkpointing, 3), _model(_Checkpointing, 3)
    _compile(plain, how)
    expected, _ = _step(plain)
    _compile(model, how)
    storages: list[torch.UntypedStorage] = []

    with memkit.LayerOffload(model, offload_ratio=1.0, num_slots=2, device=ReferenceDevice()) as offload:
        for layer in model:
            layer.part[0].register_forward_pre_hook(  # type: ignore[index]
                torch.compiler.disable(lambda module, _: storages.append(module.weight.untyped_storage()))
            )
        found, _ = _step(model)

        assert [offload._streams.ring.at(storage) is not None for storage in storages] == [True] * 2 * 2 * 3
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_part_of_a_compiled_layer_may_be_called_by_itself() -> None:
    model = _model(num_layers=3)
    _compile(model, "call")

    with memkit.LayerOffload(model, offload_ratio=1.0, num_slots=2, device=ReferenceDevice()) as offload:
        _step(model)
        before = offload.stats().num_fetches
        for layer in model:
            layer.part(torch.ones(2, WIDTH))  # type: ignore[operator]

        assert offload.stats().num_fetches > before


def test_hooks_inside_of_a_layer_are_back_after_a_forward_that_fails() -> None:
    model = _model(num_layers=3)

    with memkit.LayerOffload(model, offload_ratio=1.0, num_slots=2, device=ReferenceDevice()):
        before = [list(module._forward_pre_hooks) for module in model.modules()]
        with pytest.raises(RuntimeError):
            model(torch.ones(2, WIDTH + 1))

        assert [list(module._forward_pre_hooks) for module in model.modules()] == before
