"""What an optimizer keeps for its parameters is told by one function, before it is there, equal to what a step makes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.activations.budgeting.limits import coming_state_bytes
from memkit.core.tensors import parts_of, storage_bytes
from memkit.device import ReferenceDevice
from memkit.optimizers import kept_states
from memkit.plan.states import aligned
from memkit.weights.fused import state_bytes_of
from tests.states.cases import OPTIMIZERS, BeginsInEvalMode, EightBit

Make = Callable[[Any], torch.optim.Optimizer]


class Own(torch.optim.Optimizer):
    """One of a user's, which is not made of parameters alone."""

    def __init__(self, params: Any, *, rate: float) -> None:
        super().__init__(params, {"rate": rate})
        self.own = [parameter for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.step_one(parameter, parameter.grad, self.state[parameter])
                    parameter.sub_(parameter.grad, alpha=group["rate"])

    def step_one(self, parameter: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        state.setdefault("mean", torch.zeros_like(parameter)).add_(grad)


class Lazy(Own):
    """Makes states by the values of gradients, and none for vectors."""

    def step_one(self, parameter: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        if parameter.dim() > 1 and float(grad.norm()) > 0:
            super().step_one(parameter, grad, state)


class OfOtherDtypes(Own):
    """Keeps a byte for each element, with a scale for each row."""

    def step_one(self, parameter: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        state.setdefault("codes", torch.zeros_like(parameter, dtype=torch.uint8))
        state.setdefault("scales", torch.zeros(len(parameter), dtype=torch.float64, device=parameter.device))


class NeedsData(Own):
    """Does not step without data."""

    def step_one(self, parameter: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        if grad.is_meta:
            raise RuntimeError("no kernel for this")
        super().step_one(parameter, grad, state)


class KnowsParameters(Own):
    """Steps what it has noted itself, and not what is in its groups."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.own:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad)
                self.step_one(parameter, parameter.grad, self.state[parameter])


MAKERS: dict[str, Make] = {
    **{str(case): case.make for case in OPTIMIZERS},
    "SGD without momentum": lambda params: torch.optim.SGD(params, lr=0.1),
    "begins in eval mode": lambda params: BeginsInEvalMode(params, beta=0.9),
    "eight bits": EightBit,
    "needs an argument": lambda params: Own(params, rate=0.1),
    "lazy": lambda params: Lazy(params, rate=0.1),
    "other dtypes": lambda params: OfOtherDtypes(params, rate=0.1),
    "needs data": lambda params: NeedsData(params, rate=0.1),
    "knows its parameters": lambda params: KnowsParameters(params, rate=0.1),
}
STREAM = [name for name in MAKERS if name != "knows its parameters"]


def every_other(names: Iterable[str], first: int) -> list[Any]:
    """Return all names: pytest by itself runs every other, from one of the first two on."""
    return [pytest.param(name, marks=pytest.mark.slow if number % 2 != first else ()) for number, name in enumerate(names)]


class Net(nn.Module):
    """Matrices and vectors of two precisions, of which one is frozen."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        bias = name not in ("Muon", "eight bits")
        self.one, self.other, self.last = nn.Linear(76, 52, bias), nn.Linear(52, 9, bias), nn.Linear(9, 300, bias)
        self.other.to(torch.bfloat16)
        self.last.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.other(self.one(x).bfloat16())
        return torch.as_tensor(self.last(x.float()).sum())

    def groups(self) -> list[dict[str, Any]]:
        first, *others = self.parameters()
        return [{"params": [first]}, {"params": others}]


def _stepped(model: Net, optimizer: torch.optim.Optimizer) -> dict[Tensor, dict[str, Tensor]]:
    """Step, and return what is kept then for each parameter that is trained."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    getattr(optimizer, "train", lambda: None)()
    optimizer.step()
    return {
        parameter: {name: value for name, value in optimizer.state[parameter].items() if isinstance(value, Tensor)}
        for parameter in model.parameters()
        if parameter.requires_grad and parameter in optimizer.state
    }


def _device_bytes(kept: dict[Tensor, dict[str, Tensor]], name: str) -> int:
    """Return the bytes that would be on a GPU: most counts of steps are in host memory."""
    states = [value for entries in kept.values() for value in entries.values()]
    return storage_bytes(value for value in states if value.dim() or "fused" in name or "ASGD" in name)


@pytest.mark.parametrize("name", MAKERS)
def test_each_state_is_told_with_its_bytes_and_its_precision(name: str) -> None:
    model = Net(name)
    optimizer = MAKERS[name](model.groups())
    before, drawn = copy.deepcopy((optimizer.state_dict(), [*vars(optimizer)])), torch.get_rng_state()
    told = kept_states(optimizer).of

    assert str((optimizer.state_dict(), [*vars(optimizer)])) == str(before)
    assert torch.equal(drawn, torch.get_rng_state())
    for parameter, entries in _stepped(model, optimizer).items():
        expected = {
            key: (storage_bytes([value]), None if len(parts_of(value)) > 1 else value.dtype, not value.dim())
            for key, value in entries.items()
        }
        assert {each.name: (each.num_bytes, each.dtype, each.is_number) for each in told[id(parameter)]} == expected


@pytest.mark.parametrize("name", every_other(MAKERS, 0))
def test_features_tell_what_a_step_keeps_on_the_device(name: str) -> None:
    model = Net(name)
    optimizer = MAKERS[name](model.groups())
    comes_later = not optimizer.state
    report = memkit.profile_memory(model, torch.ones(2, 76), optimizer=optimizer, print_table=False, warmup=0, device="meta")
    told_for_budget = coming_state_bytes(optimizer)
    told_for_layers = state_bytes_of(MAKERS[name], [each for each in model.parameters() if each.requires_grad])

    expected = _device_bytes(_stepped(model, optimizer), name)
    assert report.optimizer is not None
    assert report.optimizer.state_bytes == told_for_layers == expected
    assert told_for_budget == (expected if comes_later else 0)


@pytest.mark.parametrize("name", every_other(STREAM, 1))
def test_a_state_offload_plans_what_a_step_keeps(name: str) -> None:
    model = Net(name)
    model.last.requires_grad_(True)  # what is frozen may be trained later
    optimizer = MAKERS[name](model.groups())
    with memkit.StateOffload(optimizer, device=ReferenceDevice()) as states:
        planned_bytes = sum(piece.state_bytes for piece in states.plan.pieces)

    kept = [value for entries in _stepped(model, optimizer).values() for value in entries.values() if value.dim()]
    assert planned_bytes == sum(aligned(sum(part.nbytes for part in parts_of(value))) for value in kept)


@pytest.mark.parametrize("shape", [(768, 512), (3, 5, 7), (20_000,), (1,), (300, 4, 1000), ()])
def test_shapes_make_no_difference_to_what_is_right(shape: tuple[int, ...]) -> None:
    makers: list[Make] = [torch.optim.Adafactor, torch.optim.Adadelta, lambda params: NeedsData(params, rate=0.1)]
    for make in makers:
        parameter = nn.Parameter(torch.ones(shape))
        optimizer = make([parameter])
        (told,) = kept_states(optimizer).of.values()
        parameter.grad = torch.ones(shape)
        optimizer.step()

        assert sum(each.num_bytes for each in told) == storage_bytes(
            value for value in optimizer.state[parameter].values() if isinstance(value, Tensor)
        )


def test_counts_of_a_capturable_step_are_on_the_device() -> None:
    optimizer = torch.optim.NAdam([nn.Parameter(torch.ones(16))], capturable=True)

    assert coming_state_bytes(optimizer) == 2 * 64 + 2 * 4


@pytest.mark.parametrize("make", [torch.optim.Adafactor, torch.optim.AdamW])
def test_layers_stay_where_the_budget_has_room_for_them_and_their_states(make: Any) -> None:
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(8)])
    state_bytes = 8 * (2 * 4 * 64 if make is torch.optim.Adafactor else 2 * 4 * 64 * 64)
    budget = state_bytes + 5 * (4 * 64 * 64 + 512)  # five layers: three slots, and two that stay

    with memkit.LayerOffload(model, budget=budget, num_slots=3, optimizer=make, device=ReferenceDevice()) as offload:
        assert len(offload.plan.streamed) == 6


def test_the_step_of_a_copy_touches_nothing_of_the_users() -> None:
    model = Net("")
    optimizer = KnowsParameters(model.groups(), rate=0.1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    kept_states(optimizer)

    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    assert not optimizer.state
    assert [*map(id, optimizer.own)] == [*map(id, model.parameters())]
