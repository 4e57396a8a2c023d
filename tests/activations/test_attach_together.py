"""Several contexts attached to one module, in any order; and what `attach` returns."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.core.hooks import innermost_pack
from memkit.device import ReferenceDevice
from tests.activations.cases import assert_same_bits
from tests.activations.remat.conftest import NO_PLAN_FITS

DEVICE = ReferenceDevice()

CONTEXTS: dict[str, Callable[[], Any]] = {
    "CPUOffload": lambda: memkit.CPUOffload(1.0, "together", min_bytes=0, window_bytes=0, device=DEVICE),
    "Rematerialize": lambda: memkit.Rematerialize(0.5, "together", min_bytes=0, device=DEVICE),
    "no_offload": memkit.no_offload,
}


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Tanh()) for _ in range(4)))


def _gradients(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    model(torch.linspace(-1, 1, 128).view(8, 16)).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.filterwarnings(NO_PLAN_FITS)
@pytest.mark.parametrize(
    "order", [*itertools.permutations(CONTEXTS), *itertools.permutations(("CPUOffload", "Rematerialize"))], ids=" ".join
)
def test_contexts_are_attached_in_any_order(order: tuple[str, ...]) -> None:
    plain, model = _gradients(_model()), _model()
    for name in order:
        memkit.attach(model, CONTEXTS[name]())

    for _ in range(3):
        assert_same_bits(_gradients(model), plain)
    stats = memkit.stats("together")
    assert stats.contexts == ("CPUOffload", "Rematerialize")
    assert stats.num_dropped > 0
    assert (stats.moved_out_bytes > 0) == ("no_offload" not in order)
    memkit.detach(model)
    assert_same_bits(_gradients(model), plain)
    assert innermost_pack() is None


@pytest.mark.filterwarnings(NO_PLAN_FITS)
@pytest.mark.parametrize("name", ["CPUOffload", "Rematerialize"])
def test_budget_is_attached_alone(name: str) -> None:
    model = _model()
    plain = _gradients(model)
    budget = memkit.attach(model, memkit.MemoryBudget(0.5, "alone", min_bytes=0, device=DEVICE))
    other = memkit.attach(model, CONTEXTS[name]())
    with pytest.raises(ValueError, match=rf'was entered inside a ({name} \(tag "together"\)|MemoryBudget \(tag "alone"\))'):
        _gradients(model)
    other.remove()

    for _ in range(4):
        assert_same_bits(_gradients(model), plain)
    budget.remove()
    assert_same_bits(_gradients(model), plain)
    assert innermost_pack() is None


def test_handle_is_removed_whichever_was_attached_first() -> None:
    model = _model()
    plain = _gradients(model)
    first = memkit.attach(model, CONTEXTS["CPUOffload"]())
    second = memkit.attach(model, CONTEXTS["Rematerialize"]())
    first.remove()
    second.remove()

    assert_same_bits(_gradients(model), plain)
    assert not any(len(value) for key, value in model.__dict__.items() if key.endswith("_hooks"))


@pytest.mark.parametrize("name", ["CPUOffload", "Rematerialize"])
def test_handle_has_the_plan_and_the_figures_of_its_context(name: str) -> None:
    model, context = _model(), CONTEXTS[name]()
    handle = memkit.attach(model, context)
    before = handle.plan
    for _ in range(2):
        _gradients(model)

    assert before is None
    assert handle.plan is not None
    assert handle.plan.offload_bytes == (memkit.stats("together").moved_out_bytes or 0)
    assert handle.stats() == memkit.stats("together") == context.stats()
    assert handle.stats().num_iterations == 2
    assert repr(handle) == f"<attached {context!r}>"
    handle.remove()
    assert repr(handle) == f"<attached no more {context!r}>"


def test_handle_of_what_plans_nothing_says_so() -> None:
    handle = memkit.attach(_model(), memkit.no_offload())

    assert handle.plan is None
    with pytest.raises(ValueError, match=r"stats needs a context with a tag; found <no_offload: .*Ask the CPUOffload"):
        handle.stats()


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning", "ignore:`torch.jit:DeprecationWarning")
def test_module_that_torchscript_has_compiled_takes_nothing() -> None:
    scripted = torch.jit.script(_model())

    with pytest.raises(ValueError, match=r"needs a module that takes hooks; found Sequential as torch\.jit\.script has"):
        memkit.attach(scripted, memkit.no_offload())
