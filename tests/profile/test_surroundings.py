"""A profile where something else sees what autograd saves: refused by name, on a device and without data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import memkit
from memkit.device import ReferenceDevice

Context = Callable[[], AbstractContextManager[object]]


def _offload() -> memkit.CPUOffload:
    return memkit.CPUOffload(1.0, "around", device=ReferenceDevice(), min_bytes=0)


def _remat() -> memkit.Rematerialize:
    return memkit.Rematerialize(0.5, "around", min_bytes=0)


AROUND: dict[str, tuple[Context, str]] = {
    "CPUOffload": (_offload, r'found CPUOffload \(tag "around"\) around it.*Profile the model outside of it'),
    "Rematerialize": (_remat, r'found Rematerialize \(tag "around"\) around it'),
    "save_on_cpu": (save_on_cpu, "found a pair of saved-tensor hooks .*save_on_cpu.* around it"),
    "hooks of the user's": (lambda: saved_tensors_hooks(lambda x: x, lambda x: x), "found a pair of saved-tensor hooks"),
}


class InItsForward(nn.Module):
    """Enters a context in its forward."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self.inner, self.context = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), context

    def forward(self, x: Tensor) -> Tensor:
        with self.context():
            return self.inner(x)


@pytest.fixture(params=[None, "meta"])
def profile(request: pytest.FixtureRequest) -> Callable[[nn.Module], memkit.profile.MemoryReport]:
    """Return a profile of a model, where it is or without data."""
    return lambda model: memkit.profile_memory(
        model, torch.randn(4, 8), backward=True, device=request.param, tag="found", print_table=False
    )


@pytest.fixture(autouse=True)
def _fresh_tags() -> Iterator[None]:
    yield
    for tag in ("around", "attached"):
        memkit.reset(tag)


@pytest.mark.parametrize("around", AROUND)
def test_inside_of_a_context_is_refused(around: str, profile: Callable[[nn.Module], memkit.profile.MemoryReport]) -> None:
    make, message = AROUND[around]
    with make(), pytest.raises(memkit.errors.ProfileError, match=message):
        profile(nn.Linear(8, 8))

    assert memkit.profile.find_report("found") is None


def test_inside_of_a_checkpointed_function_is_refused(profile: Callable[[nn.Module], memkit.profile.MemoryReport]) -> None:
    def profiles(x: Tensor) -> Tensor:
        profile(nn.Linear(8, 8))
        return x

    with pytest.raises(memkit.errors.ProfileError, match=r"found torch\.utils\.checkpoint around it"):
        checkpoint(profiles, torch.ones(1, requires_grad=True), use_reentrant=False)


@pytest.mark.parametrize("is_whole", [True, False])
def test_attached_model_is_refused_until_the_handle_is_removed(
    is_whole: bool, profile: Callable[[nn.Module], memkit.profile.MemoryReport]
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    handle = memkit.attach(
        model if is_whole else model[1], memkit.CPUOffload(1.0, "attached", device=ReferenceDevice(), min_bytes=0)
    )
    with pytest.raises(
        memkit.errors.ProfileError, match=r'CPUOffload \(tag "attached"\), which the model enters.*before memkit\.attach'
    ):
        profile(model)
    model(torch.randn(4, 8)).sum().backward()

    assert memkit.stats("attached").num_iterations == 1
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    handle.remove()
    assert profile(model).activation_bytes == 3 * 4 * 8 * 4


@pytest.mark.parametrize("context", [_offload, _remat])
def test_context_in_the_forward_is_refused(
    context: Context, profile: Callable[[nn.Module], memkit.profile.MemoryReport]
) -> None:
    model = nn.Sequential(InItsForward(context))
    with pytest.raises(memkit.errors.ProfileError, match=r'tag "around"\), which the model enters in its forward'):
        profile(model)
    with context():
        model[0].inner(torch.randn(4, 8)).sum().backward()  # it can be entered again


def test_context_that_does_nothing_without_grad_is_let_be(profile: Callable[[nn.Module], memkit.profile.MemoryReport]) -> None:
    class Frozen(InItsForward):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = super().forward(x)
            return self.inner(x)

    assert profile(Frozen(_offload)).activation_bytes == 2 * 4 * 8 * 4


def test_smallest_budget_is_refused_there_as_well() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8)
    with _offload(), pytest.raises(memkit.errors.ProfileError, match=r'found CPUOffload \(tag "around"\) around it'):
        memkit.Rematerialize.min_budget(model, x, min_bytes=0)
    memkit.attach(model, memkit.CPUOffload(1.0, "attached", device=ReferenceDevice(), min_bytes=0))
    with pytest.raises(memkit.errors.ProfileError, match=r'CPUOffload \(tag "attached"\), which the model enters'):
        memkit.Rematerialize.min_budget(model, x, min_bytes=0)
