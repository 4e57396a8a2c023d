"""The small steps at the beginning find how the optimizer steps, and write to nothing of the user's."""

from __future__ import annotations

import copy
import re
import warnings
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from memkit.device import ReferenceDevice
from memkit.plan.states import aligned
from memkit.states.device_steps import DeviceSteps
from tests.states.cases import assert_same, offload
from tests.states.test_overlap import Drawing


class Momentum(torch.optim.Optimizer):
    """Steps with a momentum."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            self.step_group(group)
        return None

    def step_group(self, group: dict[str, Any]) -> None:
        for index, parameter in enumerate(group["params"]):
            if parameter.grad is not None:
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                mean.mul_(0.9).add_(parameter.grad)
                parameter.sub_(mean, alpha=0.1 * self.scale(group, index)).add_(self.noise(parameter))

    def scale(self, group: dict[str, Any], index: int) -> float:
        return 1.0

    def noise(self, parameter: Tensor) -> Any:
        return 0.0


class _StepsAll(Momentum):
    """Steps by the momentum also without a gradient."""

    def step_group(self, group: dict[str, Any]) -> None:
        super().step_group(group)
        for parameter in group["params"]:
            if parameter.grad is None and parameter in self.state:
                parameter.sub_(self.state[parameter]["mean"], alpha=0.1)


class _NeedsAll(Momentum):
    """Fails without a gradient, with or without memkit."""

    def step_group(self, group: dict[str, Any]) -> None:
        for parameter in group["params"]:
            assert bool(parameter.grad.isfinite().all())
        super().step_group(group)


class _Parallel(Momentum):
    """Has a number for each parameter, in a list."""

    def scale(self, group: dict[str, Any], index: int) -> float:
        return float(group["scales"][index])


class _Counting(Momentum):
    """Counts its steps in place."""

    def __init__(self, params: Any, count: Any) -> None:
        super().__init__(params)
        self.count = count

    def step_group(self, group: dict[str, Any]) -> None:
        super().step_group(group)
        if isinstance(self.count, Tensor):
            self.count += 1
        elif isinstance(self.count, list):
            self.count.append(1)
        else:
            self.count.number += 1


class _Number:
    number = 0


def _parameters(number: int = 4) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(4, 4)) for _ in range(number)]


def test_one_that_steps_parameters_without_gradient() -> None:
    _refused(_StepsAll(_parameters()), "_StepsAll does something with those that have none: they gave another parameter")


def _refused(optimizer: torch.optim.Optimizer, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        offload(optimizer, ReferenceDevice())


def test_one_that_needs_all_gradients() -> None:
    optimizer = _NeedsAll(parameters := _parameters())
    with offload(optimizer, ReferenceDevice()):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert len(optimizer.state) == 4


@pytest.mark.parametrize("scales", [[1.0, 1.0, 2.0, 3.0], (1.0, 1.0, 1.0, 1.0), [1, 1, 1, 5]])
def test_a_list_beside_the_parameters(scales: Any) -> None:
    optimizer = _Parallel([{"params": _parameters(), "scales": scales}])

    _refused(optimizer, "_Parallel is not separable: stepped one by one, small tensors gave another parameter")

    assert optimizer.param_groups[0]["scales"] is scales
    assert scales[0] == 1


def test_as_many_options_as_parameters() -> None:
    optimizer = torch.optim.AdamW(_parameters(2), betas=(0.9, 0.9))
    offload(optimizer, ReferenceDevice()).close()
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.9)


@pytest.mark.parametrize("count", [torch.zeros(()), [0], _Number()], ids=["tensor", "list", "object"])
def test_a_count_that_is_written_in_place(count: Any) -> None:
    before = copy.deepcopy(count)
    optimizer = _Counting(_parameters(), count)

    _refused(optimizer, '_Counting is not separable: stepped one by one, small tensors gave another attribute ("count")')

    assert optimizer.count is count
    if isinstance(count, _Number):
        assert count.number == 0
    else:
        assert_same(count, before)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("num_groups", [1, 12])
def test_states_of_two_precisions_in_one_group_are_loaded_in_their_own(dtypes: Any, num_groups: int) -> None:
    def trained(streams: bool) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
        generator = torch.Generator().manual_seed(0)
        sizes = [(16, 16), (8,)] * 12
        values = [torch.randn(size, generator=generator).to(dtypes[len(size) == 1]) for size in sizes]
        parameters = [torch.nn.Parameter(value) for value in values]
        groups = [{"params": parameters[start::num_groups]} for start in range(num_groups)]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, foreach=False)
        states = offload(optimizer, ReferenceDevice()) if streams else None
        for step in range(4):
            sum((parameter * (step + 1)).float().square().sum() for parameter in parameters).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if states is not None:
            states.close()
        return parameters, optimizer

    (plain, plain_optimizer), (parameters, optimizer) = trained(False), trained(True)

    assert_same(plain, parameters)
    assert_same(plain_optimizer.state_dict(), optimizer.state_dict())


class _BySize(Momentum):
    """Keeps the momentum of large parameters in 8 bits, as low-bit optimizers do."""

    def step_group(self, group: dict[str, Any]) -> None:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            is_large = parameter.numel() >= 4096
            start = torch.full_like(parameter, 128 if is_large else 0, dtype=torch.uint8 if is_large else None)
            mean = self.state[parameter].setdefault("mean", start)
            now = (mean.float() - 128) / 64 if is_large else mean
            now = now * 0.9 + parameter.grad
            mean.copy_((now * 64 + 128).round().clamp(0, 255) if is_large else now)
            parameter.sub_(now, alpha=0.1)


def test_what_is_kept_of_large_parameters_otherwise_than_of_small_ones_is_planned_and_loaded() -> None:
    def trained(streams: bool) -> list[torch.nn.Parameter]:
        generator = torch.Generator().manual_seed(0)
        sizes = (300, 400), (16, 16), (70, 70), (5000,)
        parameters = [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in sizes]
        optimizer = _BySize(parameters)
        with offload(optimizer, ReferenceDevice()) if streams else nullcontext() as states:
            if states is not None:
                own = sum(piece.state_bytes for piece in states.plan.pieces)
                assert own == aligned(120_000) + aligned(4 * 256) + aligned(4900) + aligned(5000)
            for step in range(4):
                sum((parameter * (step + 1)).square().sum() for parameter in parameters).backward()
                optimizer.step()
                optimizer.zero_grad()
                if streams and step == 1:
                    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                    assert optimizer.state[parameters[0]]["mean"].dtype == torch.uint8
        return parameters

    assert_same(trained(False), trained(True))


class _ForSizes(Momentum):
    """Takes no other matrices than the user's, and small ones."""

    def step_group(self, group: dict[str, Any]) -> None:
        for parameter in group["params"]:
            if parameter.dim() == 2 and 24 < parameter.size(1) != 300:
                raise ValueError("rows have 300 elements")
        super().step_group(group)


def test_larger_parameters_that_the_class_does_not_take() -> None:
    """They only tell about the states: the small steps have shown that the class can be stepped in pieces."""
    parameters = [torch.nn.Parameter(torch.ones(300, 300))]
    optimizer = _ForSizes(parameters)
    with offload(optimizer, ReferenceDevice()) as states:
        parameters[0].grad = torch.ones(300, 300)
        optimizer.step()
        assert sum(piece.state_bytes for piece in states.plan.pieces) == aligned(4 * 300 * 300)


# The order of pieces in a step: those on the device between those that move, unless steps draw random numbers


class _DrawsForLarge(Momentum):
    """Draws random numbers only for large parameters, as optimizers do that keep those in 8 bits."""

    def noise(self, parameter: Tensor) -> Any:
        return torch.rand(()).item() if parameter.numel() > 2**10 else 0.0


class _HasGenerator(Momentum):
    """Draws from a generator of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.generator = torch.Generator().manual_seed(0)

    def noise(self, parameter: Tensor) -> Any:
        return torch.rand((), generator=self.generator).item()


class _HasNumpys(_HasGenerator):
    """Draws from a NumPy generator."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.generator = numpy.random.default_rng(0)

    def noise(self, parameter: Tensor) -> Any:
        return self.generator.random()


class _DrawsLate(Momentum):
    """Draws once it is told to."""

    draws = False

    def noise(self, parameter: Tensor) -> Any:
        return torch.rand(()).item() if self.draws else 0.0


def _rows_and_optimizers(kind: Any) -> tuple[list[list[nn.Parameter]], list[Any]]:
    rows = [[nn.Parameter(torch.ones(size, 32)) for size in (64, 64, 64, 64, 512)] for _ in range(2)]
    return rows, [kind(row) for row in rows]


def _step_alike(rows: list[list[nn.Parameter]], optimizers: list[Any], number: int) -> None:
    for row, optimizer in zip(rows, optimizers, strict=True):
        torch.manual_seed(number)
        for parameter in row:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()


@pytest.mark.parametrize("draws", [False, True])
def test_what_stays_comes_between_what_moves_unless_steps_draw(draws: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, optimizers = _rows_and_optimizers(partial(Drawing, lr=0.1, momentum=0.9) if draws else torch.optim.AdamW)
    stepped, step = list[str](), DeviceSteps.step
    monkeypatch.setattr(DeviceSteps, "step", lambda self, piece, run: (stepped.append(piece.names), step(self, piece, run))[1])
    with offload(optimizers[1], ReferenceDevice(), device_budget=512 * 32 * (4 if draws else 8)) as states:
        assert [piece.is_resident for piece in states.plan.pieces] == [False] * 4 + [True]
        for number in range(3):
            _step_alike(rows, optimizers, number)

        order = (0, 1, 2, 3, 4) if draws else (0, 1, 4, 2, 3)
        assert stepped[-5:] == [f"parameter 0.{index}" for index in order]
        assert all(map(torch.equal, *rows))


@pytest.mark.parametrize("kind", [_DrawsForLarge, _HasGenerator, _HasNumpys])
def test_random_numbers_are_drawn_in_the_order_of_the_groups(kind: Any) -> None:
    rows, optimizers = _rows_and_optimizers(kind)
    with offload(optimizers[1], ReferenceDevice(), device_budget=512 * 32 * 4) as states:
        assert [piece.is_resident for piece in states.plan.pieces] == [False] * 4 + [True]
        for number in range(3):
            _step_alike(rows, optimizers, number)

        assert all(map(torch.equal, *rows))


def test_steps_that_draw_later_are_told_of_and_keep_the_order_from_then_on() -> None:
    rows, optimizers = _rows_and_optimizers(_DrawsLate)
    with offload(optimizers[1], ReferenceDevice(), device_budget=512 * 32 * 4):
        _step_alike(rows, optimizers, 0)
        for optimizer in optimizers:
            optimizer.draws = True
        with pytest.warns(UserWarning, match="drawn during a step of _DrawsLate.*keep to the order of the groups"):
            _step_alike(rows, optimizers, 1)
        with torch.no_grad():
            for mine, others in zip(*rows, strict=True):
                others.copy_(mine)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for number in range(2, 4):
                _step_alike(rows, optimizers, number)

        assert all(map(torch.equal, *rows))
