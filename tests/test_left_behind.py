"""A feature that has ended has nothing left on the user's model, optimizer or torch: no weak reference, hook or attribute."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

import memkit
from memkit.device import ReferenceDevice
from tests.weights.cases import WIDTH, Stack

pytestmark = pytest.mark.filterwarnings("ignore:.*(cannot be kept to|can't be kept to|as little as can be|whole of its budget)")


class Program:
    """A model, its optimizer, and steps with them, of which the last may fail in its forward."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails
        self.device = ReferenceDevice()
        self.model = Stack(4)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_("norm" not in name)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)

    def train(self, num_steps: int = 4, optimizer: Any = None, around: Callable[[], Any] = nullcontext) -> None:
        optimizer = optimizer or self.optimizer
        for _ in range(num_steps):
            x = torch.randn(8, WIDTH)
            with around():
                loss = self.model(x).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if self.fails:
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), around():
                self.model(torch.randn(8, WIDTH + 1))


def _tensors(program: Program) -> dict[str, Any]:
    """Return what is on the user's tensors."""
    found: dict[str, Any] = {}
    for name, tensor in program.model.named_parameters():
        found[f"weak references on {name}"] = weakref.getweakrefcount(tensor)  # torch swaps no tensor that has one
        found[f"attributes of {name}"] = list(vars(tensor)), type(tensor)
        found[f"hooks on {name}"] = [hooks for hooks in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks) if hooks]
        found[f"place of {name}"] = tensor._base, tensor.device, tensor.untyped_storage().nbytes() == tensor.nbytes
    return found


def _hooks(program: Program) -> dict[str, Any]:
    """Return what is called, and the attributes of the user's other objects."""
    found: dict[str, Any] = {}
    for name, it in (("optimizer", program.optimizer), *program.model.named_modules()):
        for attribute, value in vars(it).items():
            found[f"{attribute} of {name}"] = list(value) if attribute.endswith("_hooks") else type(value)
    for where in (torch_module, torch_optimizer):
        for name, value in vars(where).items():
            if name.startswith("_global") and isinstance(value, dict):
                found[f"torch's {name}"] = list(value)
    found["torch's modes"] = torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()
    return found


def _references(program: Program) -> dict[str, Any]:
    """Return how many weak references to the user's other objects there are."""
    named = ("optimizer", program.optimizer), *program.model.named_modules()
    return {f"weak references to {name}": weakref.getweakrefcount(it) for name, it in named}


def _with(make: Callable[[Program], Any]) -> Callable[[Program], None]:
    def run(program: Program) -> None:
        program.train(around=lambda: make(program))

    return run


def _attached(make: Callable[[Program], Any]) -> Callable[[Program], None]:
    def run(program: Program) -> None:
        memkit.attach(program.model, make(program))
        program.train()
        memkit.detach(program.model)

    return run


def _layers(train: str) -> Callable[[Program], None]:
    def run(program: Program) -> None:
        if train == "frozen":
            for parameter in program.model.layers.parameters():
                parameter.requires_grad_(False)
        told: dict[str, Any] = {"offload_ratio": 0.5, "num_slots": 1, "train": train, "device": program.device}
        if train == "fused":
            told["optimizer"] = lambda params: torch.optim.SGD(params, lr=0.1)
        offload = memkit.LayerOffload(program.model, list(program.model.layers), **told)
        program.train(2, offload.optimizer if train == "fused" else program.optimizer)
        offload.close()

    return run


def _states(**told: Any) -> Callable[[Program], None]:
    def run(program: Program) -> None:
        states = memkit.StateOffload(program.optimizer, device=program.device, **told)
        program.train(3)
        states.close()

    return run


def _profile(program: Program) -> None:
    told: dict[str, Any] = {"loss_fn": torch.sum, "optimizer": program.optimizer, "print_table": False, "tag": "left"}
    memkit.profile_memory(program.model, torch.randn(8, WIDTH), **told)


def _context(kind: Any, share: float, has_optimizer: bool = False) -> Callable[[Program], Any]:
    def make(program: Program) -> Any:
        told = {"optimizer": program.optimizer} if has_optimizer else {}
        return kind(share, "left", min_bytes=0, device=program.device, **told)

    return make


CONTEXTS = {
    "CPUOffload": _context(memkit.CPUOffload, 0.5),
    "Rematerialize": _context(memkit.Rematerialize, 0.5),
    "budget": _context(memkit.MemoryBudget, 0.7),
    "budget, optimizer": _context(memkit.MemoryBudget, 0.7, has_optimizer=True),
}
FEATURES = {
    **{f"with {name}": _with(make) for name, make in CONTEXTS.items()},
    **{f"attached {name}": _attached(make) for name, make in CONTEXTS.items()},
    **{f"layers, {train}": _layers(train) for train in ("frozen", "host", "fused")},
    "states": _states(),
    "states on the host": _states(update="host"),
    "states in the backward": _states(when="backward"),
    "states beside the forward": _states(overlap_forward=True),
    "profile": _profile,
}


IN_DEFAULT = {*(f"with {name}" for name in CONTEXTS), "layers, fused", "states in the backward", "profile"}


@pytest.fixture
def without_collector() -> Iterator[None]:
    """Let nothing be freed but by the count of its references."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("fails", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "fails"])
@pytest.mark.parametrize(
    "feature", [pytest.param(name, marks=() if name in IN_DEFAULT else pytest.mark.slow) for name in FEATURES]
)
def test_nothing_is_left_on_the_users_objects(feature: str, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program(fails=fails)
    program.optimizer.zero_grad()
    tensors, hooks, references = _tensors(program), _hooks(program), _references(program)

    FEATURES[feature](program)

    assert _tensors(program) == tensors
    assert _hooks(program) == hooks
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    program.model.to(torch.float64)  # swaps each parameter, or raises
    memkit.reset("left")
    gc.collect()
    assert _references(program) == references
