"""Ctrl-C within memkit: what a loop that goes on computes afterwards is exact."""

from __future__ import annotations

import copy
import sys
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import memkit
from memkit.core import torch_private
from memkit.core.hooks import innermost_pack, stacked_owners
from memkit.device import ReferenceDevice
from memkit.weights.fused import FusedSteps
from memkit.weights.streaming import Streamer
from tests.interrupts import count_lines, hooks_around, interrupt, interrupted_after, interrupts, spread
from tests.weights.cases import RUNS, WIDTH, Stack, inputs, only_lora

pytestmark = pytest.mark.slow

KINDS = ("frozen", "host", "fused")


class NotingSGD(torch.optim.SGD):
    """Notes what it has stepped, and with which gradient."""

    stepped: list[tuple[nn.Parameter, Tensor]] = []  # noqa: RUF012  # of all, also the one that tells how much state it keeps

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        given = (parameter for group in self.param_groups for parameter in group["params"])
        NotingSGD.stepped += [(parameter, parameter.grad.clone()) for parameter in given if parameter.grad is not None]


class Case:
    """A model whose layers stream, and a plain one that takes the same steps."""

    def __init__(self, kind: str, run: str = "in order") -> None:
        self.kind = kind
        self.device = ReferenceDevice()
        self.model = Stack(3, run=RUNS[run], block=lambda: nn.Linear(WIDTH, WIDTH))
        if kind == "frozen":
            only_lora(self.model)
        self.plain = copy.deepcopy(self.model)
        self.hooks_before = set(_global_optimizer_pre_hooks)  # of what other tests have left for the collector
        self.names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        self.batch = inputs(self.device, 1)[0]
        self.plain_steps: dict[str, torch.optim.Optimizer] = {}
        of_kind = {"frozen": {}, "host": {"train": "host"}, "fused": {"optimizer": partial(NotingSGD, lr=0.1, momentum=0.9)}}
        self._options: dict[str, Any] = of_kind[kind] | {"offload_ratio": 1.0, "num_slots": 2, "device": self.device}
        self.offload: memkit.LayerOffload

    def begin(self) -> None:
        self.plain_steps = {
            name: torch.optim.SGD([parameter], lr=0.1, momentum=0.9) for name, parameter in self.plain.named_parameters()
        }
        self.offload = memkit.LayerOffload(self.model, **self._options)
        NotingSGD.stepped.clear()  # the step that has told how much state it keeps

    def step(self, model: nn.Module | None = None) -> Tensor:
        """Run one step, as in the loop of a user who goes on after an interrupt."""
        model = self.model if model is None else model
        model.zero_grad()
        output: Tensor = model(self.batch)
        output.square().mean().backward()
        return output

    def follow(self) -> None:
        """Step of the plain model what was stepped of the other: each parameter once, and with its whole gradient."""
        parameters = dict(self.plain.named_parameters())
        stepped = [self.names[id(parameter)] for parameter, _ in NotingSGD.stepped]
        assert len(set(stepped)) == len(stepped)
        for name, (_, gradient) in zip(stepped, NotingSGD.stepped, strict=True):
            expected = parameters[name].grad
            assert expected is not None
            assert torch.equal(gradient, expected), name
            self.plain_steps[name].step()
        NotingSGD.stepped.clear()

    def assert_next_steps_are_exact(self, place: object = "") -> None:
        """Run two steps of both models."""
        self.follow()
        for _ in range(2):
            if self.kind != "fused":
                with torch.no_grad():
                    for parameter in (*self.model.parameters(), *self.plain.parameters()):
                        parameter.mul_(1.01)
            output = self.step()  # first: until then, hooks for saved tensors of the user's may be on since the interrupt
            expected = self.step(self.plain)
            assert torch.equal(output, expected), place
            for (name, found), wanted in zip(self.model.named_parameters(), self.plain.parameters(), strict=True):
                if self.kind != "fused" and wanted.grad is not None:
                    assert found.grad is not None, (name, place)
                    assert torch.equal(found.grad, wanted.grad), (name, place)
            self.follow()
        self.assert_state_is_of_one_step(place)
        assert innermost_pack() is None
        assert not stacked_owners()

    def assert_state_is_of_one_step(self, place: object) -> None:
        for (name, found), expected in zip(self.model.state_dict().items(), self.plain.state_dict().values(), strict=True):
            assert torch.equal(found, expected), (name, place)
        if self.kind == "fused":
            states = sorted(self.offload.optimizer.state_dict()["state"].items())  # type: ignore[union-attr]
            for (_, found), stepped in zip(states, self.plain_steps.values(), strict=True):
                for wanted in stepped.state.values():
                    assert torch.equal(found["momentum_buffer"], wanted["momentum_buffer"]), place

    def assert_nothing_is_left(self, place: object = "") -> None:
        for (name, found), expected in zip(self.model.named_parameters(), self.plain.parameters(), strict=True):
            assert torch.equal(found, expected), (name, place)
        assert hooks_around(self.model) == hooks_around(self.plain), place
        assert _global_optimizer_pre_hooks.keys() <= self.hooks_before, place
        self.device.synchronize()
        assert not self.device.races
        assert not self.device._pinned, place


def _begun(kind: str, run: str = "in order") -> Case:
    case = Case(kind, run)
    case.begin()
    case.assert_next_steps_are_exact()  # the second is timed, which the next one notes
    case.assert_next_steps_are_exact()
    return case


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("run", ["in order", "reused", "checkpoint"])
def test_steps_after_an_interrupt_are_exact(run: str, kind: str) -> None:
    case = _begun(kind, run)
    case.step(case.plain)

    for line in spread(count_lines(case.step), 60 if run == "in order" else 20):
        case.follow()
        case.step(case.plain)
        place = interrupt(case.step, line)
        case.assert_next_steps_are_exact(place)
    case.follow()
    case.offload.close()
    case.assert_nothing_is_left()


_CLEANING = {
    "frozen": [(Streamer, "rest"), (Streamer, "leave")],
    "host": [(Streamer, "rest"), (Streamer, "leave")],
    "fused": [(FusedSteps, "_reset"), (FusedSteps, "_forget_parts"), (Streamer, "rest"), (Streamer, "flush")],
}


@pytest.mark.parametrize(("kind", "owner", "name"), [(kind, *one) for kind in KINDS for one in _CLEANING[kind]])
def test_second_interrupt_while_the_first_is_cleaned_up(
    kind: str, owner: type[Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody reads weights of one step beside states of another: also not ahead of the next forward."""
    case = _begun(kind)
    case.step(case.plain)
    method = getattr(owner, name)

    for line in spread(count_lines(case.step), 40):
        case.follow()
        case.step(case.plain)
        with monkeypatch.context() as patch:
            is_due = [True]

            def again(*args: Any, method: Any = method, is_due: list[bool] = is_due, **kwargs: Any) -> Any:
                if is_due[0] and sys.gettrace() is None:  # the first interrupt has come: it ends the tracing
                    is_due[0] = False
                    raise KeyboardInterrupt
                return method(*args, **kwargs)

            patch.setattr(owner, name, again)
            place = interrupt(case.step, line)
        case.follow()
        case.assert_state_is_of_one_step((place, name))
        case.assert_next_steps_are_exact((place, name))
    case.offload.close()
    case.assert_nothing_is_left()


@pytest.mark.parametrize("kind", KINDS)
def test_closing_again_after_an_interrupted_close_leaves_the_model_whole(kind: str) -> None:
    case = Case(kind)
    case.begin()
    num_lines = count_lines(case.offload.close)

    for line in spread(num_lines, 12):
        case.begin()
        case.assert_next_steps_are_exact()
        place = interrupt(case.offload.close, line)
        with suppress(ValueError):  # it was at its end
            memkit.detach(case.model)

        case.assert_nothing_is_left(place)


@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_construction_leaves_the_model_as_it_was(kind: str) -> None:
    case = Case(kind)

    def close() -> None:
        with suppress(ValueError):
            memkit.detach(case.model)

    for within in (None, *["leave_mode"] * (kind == "fused")):  # the kind that looks at the optimizer in a mode of its own
        for place in interrupts(case.begin, 20, prepare=close, within=within):
            assert not torch_private.num_dispatch_modes(), place
            close()
            case.assert_nothing_is_left(place)


@pytest.mark.parametrize("method", ["take", "take_pinned_as_one"])
def test_host_memory_whose_taker_an_interrupt_kept_from_hearing_of_it_is_given_back(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a gradient that is added to another, and of one that somebody has kept from the step before."""
    case = _begun("host")
    arena, parameters = case.offload._arena, [*case.model.parameters()]
    before = arena.in_use_bytes
    kept = [parameter.grad for parameter in parameters] if method == "take_pinned_as_one" else []

    with monkeypatch.context() as patch:
        patch.setattr(arena, method, interrupted_after(getattr(arena, method)))
        if kept:
            case.model.zero_grad()
        with pytest.raises(KeyboardInterrupt):
            case.model(case.batch).square().mean().backward()
    kept.clear()
    case.step(case.plain)
    case.assert_next_steps_are_exact()

    assert arena.in_use_bytes == before
