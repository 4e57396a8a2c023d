"""What optimizers keep, counted without data, against what they keep after a step with data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.core.tensors import storage_bytes
from memkit.errors import ProfileError
from memkit.profile import MemoryCategory, MemoryReport, OptimizerMemory, Phase
from memkit.profile.optimizer_states import optimizer_names

NAMES = sorted(optimizer_names())


def two_matrices() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, 8, bias=False))


def counted(model: nn.Module, optimizer: Any, **options: Any) -> MemoryReport:
    report: MemoryReport = memkit.profile_memory(
        model, torch.ones(2, 32), optimizer=optimizer, print_table=False, warmup=0, **options
    )
    return report


def stepped(optimizer: torch.optim.Optimizer, model: nn.Module) -> int:
    """Return the bytes of the states after a step, without counters: those are on the host."""
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
        if isinstance(optimizer, torch.optim.SparseAdam):
            parameter.grad = parameter.grad.to_sparse(1)
    optimizer.step(lambda: torch.ones(()))  # type: ignore[arg-type, return-value]
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return storage_bytes(value for value in states if value.dim())


@pytest.mark.parametrize("name", sorted({*NAMES} - {"lbfgs", "asgd"}))
def test_states_are_those_of_a_step_with_data(name: str) -> None:
    model = two_matrices()
    options = {"momentum": 0.9} if name == "momentum" else {}
    optimizer = optimizer_names()[name](model.parameters(), **options)

    by_name = counted(model, name, device="meta", target="cpu").optimizer
    by_instance = counted(model, optimizer, device="meta", target="cpu").optimizer
    real_bytes = stepped(optimizer, model)

    assert by_name == by_instance
    assert by_name is not None
    assert replace(by_name, room_bytes=None) == OptimizerMemory(name=type(optimizer).__name__, state_bytes=real_bytes)


def test_history_of_lbfgs_is_counted_in_full() -> None:
    model = nn.Linear(32, 64)
    optimizer = torch.optim.LBFGS(model.parameters(), history_size=5, line_search_fn="strong_wolfe")
    x = torch.randn(8, 32)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(x).sin() - 0.5).pow(2).sum()
        loss.backward()
        return loss

    found = counted(model, optimizer).optimizer
    for _ in range(3):
        optimizer.step(closure)

    state = next(iter(optimizer.state.values()))
    tensors = [state["d"], state["prev_flat_grad"], *state["old_dirs"], *state["old_stps"]]
    assert len(state["old_dirs"]) == 5
    assert found.state_bytes == storage_bytes(tensors)


def test_counters_of_some_optimizers_are_on_the_device() -> None:
    model = two_matrices()
    fused, asgd = torch.optim.AdamW(model.parameters(), fused=True), torch.optim.ASGD(model.parameters())

    found = [counted(model, fused, device="meta").optimizer.state_bytes, counted(model, asgd).optimizer.state_bytes]

    assert found == [2 * storage_bytes(model.parameters()) + 2 * 4, stepped(asgd, model) + 2 * 3 * 4]


def test_groups_and_frozen_parameters() -> None:
    model = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 8), nn.Linear(8, 4))
    model[0].requires_grad_(False)
    plain, adaptive = model[1].parameters(), model[2].parameters()
    optimizer = torch.optim.SGD([{"params": plain}, {"params": adaptive, "momentum": 0.9}], lr=0.1)

    by_group, by_name = counted(model, optimizer), counted(model, "adamw")

    assert by_group.optimizer.state_bytes == storage_bytes(model[2].parameters())
    assert by_name.optimizer.state_bytes == 2 * storage_bytes([*model[1].parameters(), *model[2].parameters()])
    assert by_name.grad_bytes == storage_bytes([*model[1].parameters(), *model[2].parameters()])


def test_states_are_there_all_along_and_named() -> None:
    model = two_matrices()
    param_bytes = storage_bytes(model.parameters())

    memory = counted(model, "adamw", device="meta").step_memory

    assert set(memory.levels[MemoryCategory.OPTIMIZER_STATE]) == {2 * param_bytes}
    named = {(item.module, item.what) for item in memory.alive_at(0) if item.category is MemoryCategory.OPTIMIZER_STATE}
    assert named == {(module, f"weight.{state}") for module in ("0", "2") for state in ("exp_avg", "exp_avg_sq")}
    assert (memory.moments[-1].phase, memory.moments[-1].op) == (Phase.OPTIMIZER_STEP, "AdamW.step")
    assert memory.category_bytes(len(memory.moments) - 1) == {
        MemoryCategory.OPTIMIZER_STATE: 2 * param_bytes,
        MemoryCategory.PARAM: param_bytes,
        MemoryCategory.GRAD: param_bytes,
        MemoryCategory.INPUT: 512,  # 256, rounded up
    }


def test_sizes_are_rounded_up_as_the_allocator_does() -> None:
    memory = counted(nn.Linear(32, 1), "momentum", device="meta").step_memory

    assert memory.levels[MemoryCategory.OPTIMIZER_STATE][0] == 2 * 512


def test_nothing_of_the_optimizer_changes() -> None:
    model = two_matrices()
    optimizer = torch.optim.AdamW(model.parameters())
    calls: list[Any] = []
    optimizer.register_step_pre_hook(lambda *given: calls.append(given))
    before, bits = optimizer.state_dict(), [parameter.detach().clone() for parameter in model.parameters()]

    counted(model, optimizer)

    assert optimizer.state_dict() == before
    assert calls == []
    assert all(torch.equal(parameter, kept) for parameter, kept in zip(model.parameters(), bits, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_optimizer_inside_of_another_and_states_that_are_there() -> None:
    class Wrapping(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

    model = two_matrices()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    stepped(sgd, model)

    found, known = (counted(model, it).optimizer for it in (Wrapping(torch.optim.Adam(model.parameters())), sgd))

    assert (found.name, found.state_bytes) == ("Adam", 2 * storage_bytes(model.parameters()))
    assert known.there_bytes == known.state_bytes == storage_bytes(model.parameters())


class Asking(torch.optim.SGD):
    def __init__(self, params: Any, *, rate: float) -> None:
        super().__init__(params, lr=rate)


class Odd(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("no kernel for this")


OF_ANOTHER = r"found 2 of 2 that are not the model's, the first of shape \(64, 32\)"


@pytest.mark.parametrize(
    ("optimizer", "error", "message"),
    [
        (torch.optim.AdamW(two_matrices().parameters()), ValueError, OF_ANOTHER),
        ("adamW2", ValueError, r"optimizer must be one of adadelta, adafactor, .*; found 'adamW2'"),
        (3, TypeError, 'a name such as "adamw"; found int'),
        (Asking, TypeError, r"Asking needs arguments beside the parameters: .*'rate'. Pass an instance"),
        (Odd, ProfileError, r"the states of Odd cannot be counted: .* RuntimeError: no kernel for this"),
    ],
)
def test_optimizer_that_cannot_be_counted(optimizer: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        counted(two_matrices(), optimizer)


# Room for states on their way


@pytest.mark.parametrize("name", ["adamw", "momentum", "adagrad"])
def test_room_for_states_on_their_way_is_that_of_a_state_offload(name: str) -> None:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    options = {"momentum": 0.9} if name == "momentum" else {}
    optimizer = optimizer_names()[name](model.parameters(), lr=0.1, **options)  # type: ignore[call-arg]

    report = memkit.profile_memory(model, torch.randn(2, 64), optimizer=optimizer, print_table=False, warmup=0)

    with memkit.StateOffload(optimizer, device=memkit.device.ReferenceDevice()) as states:
        assert report.optimizer.room_bytes == states.stats().room_bytes > 0


def test_large_parameters_need_room_for_a_part_of_their_states_or_for_all() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(16384, 8192, bias=False)), torch.empty(1, 16384)

    rooms = {}
    for name in ("adamw", "muon", "sgd", "lbfgs"):
        found = memkit.profile_memory(model, x, optimizer=name, print_table=False).optimizer
        rooms[name] = None if found.room_bytes is None else found.room_bytes / found.state_bytes

    assert rooms["adamw"] < 0.5
    assert rooms["muon"] > 1  # beside them the parameter, as it was before the step
    assert rooms["sgd"] is rooms["lbfgs"] is None  # which have no states that could leave
