"""Ctrl-C at any line of memkit: the steps that follow are exact, and the weights are whole."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import memkit
from memkit.device import ReferenceDevice
from memkit.hooks import innermost_pack, stacked_owners
from memkit.owners import owner_of
from memkit.weights.stepped import SteppedGradient
from tests import interrupts as harness
from tests.activations.remat.conftest import NO_PLAN_FITS
from tests.interrupts import count_lines, hooks_around, interrupt, interrupted_after, interrupts, spread
from tests.weights.cases import RUNS, WIDTH, Stack, inputs, only_lora

pytestmark = pytest.mark.full

KINDS = ("frozen", "host", "fused")
TRAINED = [pytest.param("frozen", marks=pytest.mark.full), "host", "fused"]
"""Of layers that are trained more is begun and ended than of frozen ones."""


class NotingSGD(torch.optim.SGD):
    """Notes what it has stepped, and with which gradient."""

    stepped: list[tuple[nn.Parameter, Tensor]] = []  # noqa: RUF012  # of all, also the one that tells how much state it keeps

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        given = (parameter for group in self.param_groups for parameter in group["params"])
        NotingSGD.stepped += [(parameter, parameter.grad.clone()) for parameter in given if parameter.grad is not None]


class Case:
    """A model whose layers stream, and a plain one that is to be the same after each step."""

    def __init__(self, kind: str, *, run: str = "in order", is_large: bool = False, **options: Any) -> None:
        self.kind = kind
        self.device = ReferenceDevice()
        self.model = Stack(4, run=RUNS[run]) if is_large else Stack(3, run=RUNS[run], block=lambda: nn.Linear(WIDTH, WIDTH))
        if kind == "frozen":
            only_lora(self.model)
        self.plain = copy.deepcopy(self.model)
        self.before = [(id(parameter), parameter.stride()) for parameter in self.model.parameters()]
        self.hooks_before = set(_global_optimizer_pre_hooks)  # of what other tests have left for the collector
        self.names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        self.batch = inputs(self.device, 1)[0]
        self.plain_steps: dict[str, torch.optim.Optimizer] = {}
        self.context: Callable[[], Any] | None = None
        of_kind = {"frozen": {}, "host": {"train": "host"}, "fused": {"optimizer": partial(NotingSGD, lr=0.1, momentum=0.9)}}
        self._options = {**of_kind[kind], "offload_ratio": 1.0, "num_slots": 2, "device": self.device, **options}
        self.offload: memkit.LayerOffload

    def begin(self) -> None:
        NotingSGD.stepped.clear()
        self.plain_steps = {
            name: torch.optim.SGD([parameter], lr=0.1, momentum=0.9) for name, parameter in self.plain.named_parameters()
        }
        self.offload = memkit.LayerOffload(self.model, **self._options)
        NotingSGD.stepped.clear()  # the step that has told how much state it keeps

    def step(self) -> Tensor:
        """Run one step, as in the loop of a user who goes on after an interrupt."""
        self.model.zero_grad()
        if self.context is None:
            output = self.model(self.batch)
        else:
            with self.context():
                output = self.model(self.batch)
        output.square().mean().backward()
        return output

    def step_plain(self) -> Tensor:
        self.follow()
        return self._step_plain()

    def _step_plain(self) -> Tensor:
        self.plain.zero_grad()
        output = self.plain(self.batch)
        output.square().mean().backward()
        return output

    def follow(self, *, whole: bool = False) -> None:
        """Step of the plain model what was stepped of the other: each parameter once, and with its whole gradient."""
        parameters = dict(self.plain.named_parameters())
        stepped = [self.names[id(parameter)] for parameter, _ in NotingSGD.stepped]
        assert len(set(stepped)) == len(stepped)
        assert not whole or len(stepped) == len(parameters)
        for name, (_, gradient) in zip(stepped, NotingSGD.stepped, strict=True):
            expected = parameters[name].grad
            assert expected is not None
            assert torch.equal(gradient, expected), name
            self.plain_steps[name].step()
        NotingSGD.stepped.clear()

    def assert_next_step_is_exact(self, place: str = "") -> None:
        if self.kind != "fused":
            with torch.no_grad():
                for parameter in (*self.model.parameters(), *self.plain.parameters()):
                    parameter.mul_(1.01)
        self.follow()
        output = self.step()  # first: until then, hooks for saved tensors of the user's may still be on since the interrupt
        expected = self._step_plain()

        assert torch.equal(output, expected), place
        for (name, found), wanted in zip(self.model.named_parameters(), self.plain.parameters(), strict=True):
            if self.kind == "fused":
                assert isinstance(found.grad, SteppedGradient), (name, place)
            elif wanted.grad is None:
                assert found.grad is None, (name, place)
            else:
                assert found.grad is not None, (name, place)
                assert torch.equal(found.grad, wanted.grad), (name, place)
        if self.kind == "fused":
            self.follow(whole=True)
        assert innermost_pack() is None
        assert not stacked_owners()
        self.assert_weights_are_whole(place)

    def assert_weights_are_whole(self, place: str = "") -> None:
        for (name, found), expected in zip(self.model.named_parameters(), self.plain.parameters(), strict=True):
            assert torch.equal(found, expected), (name, place)
            assert owner_of(found.untyped_storage()) is None, (name, place)

    def assert_nothing_is_left(self, place: str = "") -> None:
        self.assert_weights_are_whole(place)
        assert [(id(parameter), parameter.stride()) for parameter in self.model.parameters()] == self.before
        assert hooks_around(self.model) == hooks_around(self.plain), place
        assert _global_optimizer_pre_hooks.keys() <= self.hooks_before, place
        self.device.synchronize()
        assert not self.device.races

    def assert_interrupts_are_survived(self, lines: list[int]) -> None:
        """Interrupt steps of one model at some lines, by their numbers, and see that the steps in between are exact."""
        for line in lines:
            self.step_plain()
            place = interrupt(self.step, line)
            if place is None:  # the step has come to be shorter
                continue
            if self.kind == "fused":
                groups = self.offload.optimizer.param_groups  # type: ignore[union-attr]
                assert [len(group["params"]) for group in groups] == [len(self.names)], place
                self.follow()
                self.assert_weights_are_whole_at_rest(place)
            self.assert_next_step_is_exact(place)
        self.follow()
        self.offload.close()
        self.assert_nothing_is_left()

    def assert_weights_are_whole_at_rest(self, place: str) -> None:
        """An interrupt within a layer leaves that in its slot, with weights that are right there."""
        for (name, found), expected in zip(self.model.named_parameters(), self.plain.parameters(), strict=True):
            assert torch.equal(found, expected), (name, place)


class _Noting(harness._Lines):
    """Notes in which function and file each line is."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[tuple[str, str, int]] = []

    def on_line(self, frame: Any, event: str, arg: Any) -> Any:
        num_lines = self.num_lines
        super().on_line(frame, event, arg)
        if self.num_lines > num_lines:
            self.places.append((frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno))
        return self.on_line


def _lines_in(step: Callable[[], object], *functions: str) -> list[int]:
    """Return of each line of some functions the number in the step with which it comes first."""
    found: dict[tuple[str, str, int], int] = {}
    for number, place in enumerate(_places(step)):
        if place[0] in functions:
            found.setdefault(place, number)
    assert {place[0] for place in found} == set(functions), set(functions) - {place[0] for place in found}
    return sorted(found.values())


def _places(step: Callable[[], object]) -> list[tuple[str, str, int]]:
    """Return of each line that a step runs the function, the file, and where in that."""
    noting, before = _Noting(), sys.gettrace()
    gc.disable()
    sys.settrace(noting.on_call)
    try:
        step()
    finally:
        sys.settrace(before)
        gc.enable()
    return noting.places


def _begun(kind: str, **options: Any) -> Case:
    case = Case(kind, **options)
    case.begin()
    for _ in range(3):  # the second is timed, and the third notes it
        case.assert_next_step_is_exact()
    return case


_ENDS = {
    "host": ("_tell", "_end_backward", "_forget_parts", "_take_left", "_finish", "_await", "_put_back", "rest", "leave"),
    "fused": ("_tell", "_end_backward", "_forget_parts", "_take_left", "_finish", "_say_consumed", "rest", "leave"),
}


@pytest.mark.parametrize(("kind", "every"), [("host", 2), *(pytest.param(kind, 1, marks=pytest.mark.full) for kind in _ENDS)])
def test_interrupt_at_the_end_of_a_backward_leaves_nothing_stale(kind: str, every: int) -> None:
    case = _begun(kind)
    case.step_plain()

    case.assert_interrupts_are_survived(_lines_in(case.step, *_ENDS[kind])[::every])


_FILL = "_fetch", "fill", "copy_parts"
_COPIES = {
    "frozen": _FILL,
    "host": (*_FILL, "start", "_open", "_collect", "_take_whole", "_start", "_fly", "_await_oldest", "lend"),
    "fused": (*_FILL, "copy", "copy_out", "_take", "claim", "note_written", "write_back", "_write_back"),
}


@pytest.mark.parametrize(("kind", "every"), [("host", 2), *(pytest.param(kind, 1, marks=pytest.mark.full) for kind in _COPIES)])
def test_interrupt_between_issuing_a_copy_and_noting_it(kind: str, every: int) -> None:
    case = _begun(kind)
    case.step_plain()

    case.assert_interrupts_are_survived(_lines_in(case.step, *_COPIES[kind])[::every])


def test_interrupt_while_a_parameter_is_stepped_leaves_the_optimizer_its_groups() -> None:
    case = _begun("fused")
    case.step_plain()

    case.assert_interrupts_are_survived(_lines_in(case.step, "_step", "_only", "_regroup", "after", "_consume"))


@pytest.mark.parametrize("kind", ["frozen", pytest.param("host", marks=pytest.mark.full), "fused"])
def test_steps_after_interrupts_are_exact(kind: str) -> None:
    case = _begun(kind)
    case.step_plain()

    case.assert_interrupts_are_survived(spread(count_lines(case.step), 12))


def _runs() -> Iterator[tuple[str, str]]:
    for kind in KINDS:
        yield from ((kind, run) for run in ("in order", "reused", "checkpoint"))
        yield kind, "segments" if kind == "fused" else "reentrant checkpoint"


@pytest.mark.full
@pytest.mark.parametrize(("kind", "run"), [*_runs()][2::3])
def test_steps_after_60_interrupts_are_exact(kind: str, run: str) -> None:
    case = _begun(kind, run=run, is_large=True)
    case.step_plain()

    case.assert_interrupts_are_survived(spread(count_lines(case.step), 60))


def _offloaded(device: ReferenceDevice) -> Any:
    return memkit.CPUOffload(1.0, "interrupted", min_bytes=0, device=device)


def _rematerialized(device: ReferenceDevice) -> Any:
    return memkit.Rematerialize("1B", "interrupted", min_bytes=0, device=device)


CONTEXTS = {"offloaded": _offloaded, "rematerialized": _rematerialized}


def _within(context: str, kind: str, count: int) -> None:
    """Interrupt steps within another context at lines of this room; those of the other have tests of their own."""
    case = Case(kind)
    case.context = partial(CONTEXTS[context], case.device)
    case.begin()
    for _ in range(3):
        case.assert_next_step_is_exact()
    case.step_plain()
    lines = [number for number, (_, file, _) in enumerate(_places(case.step)) if "/weights/" in file]

    case.assert_interrupts_are_survived([lines[at] for at in spread(len(lines), count)])


@pytest.mark.core(1)
@pytest.mark.filterwarnings(NO_PLAN_FITS)
@pytest.mark.parametrize("kind", TRAINED)
@pytest.mark.parametrize("context", CONTEXTS)
def test_steps_within_another_context_are_exact_after_interrupts(context: str, kind: str) -> None:
    _within(context, kind, 6)


@pytest.mark.full
@pytest.mark.filterwarnings(NO_PLAN_FITS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("context", CONTEXTS)
def test_steps_within_another_context_are_exact_after_60_interrupts(context: str, kind: str) -> None:
    _within(context, kind, 60)


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    memkit.reset("interrupted")


class _FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError("the model's")


@pytest.mark.parametrize("kind", ["host", pytest.param("fused", marks=pytest.mark.full)])
def test_interrupt_of_what_a_failed_backward_ends_with_is_mended_by_the_next_forward(kind: str) -> None:
    case = _begun(kind)
    run = case.model._run
    is_failing = False

    def fails_in_the_middle(layers: nn.ModuleList, x: Tensor) -> Tensor:
        x = layers[1](layers[0](x))
        return layers[2](_FailsBackward.apply(x) if is_failing else x)

    def step() -> None:
        with pytest.raises(RuntimeError, match="the model's"):
            case.step()

    case.model._run, is_failing = fails_in_the_middle, True
    last = ("_reset", "flush") if kind == "fused" else ("_put_back",)
    case.step_plain()
    lines = _lines_in(step, "_tell", "_end_backward", "_forget_parts", "_finish", *last)
    for line in lines:
        case.step_plain()
        case.model._run, is_failing = fails_in_the_middle, True
        place = interrupt(step, line)
        case.model._run, is_failing = run, False

        case.assert_next_step_is_exact(str(place))
    case.offload.close()
    case.assert_nothing_is_left()


@pytest.mark.parametrize("kind", TRAINED)
@pytest.mark.full
def test_closing_again_after_an_interrupted_close_leaves_the_model_whole(kind: str) -> None:
    case = Case(kind)
    case.begin()
    case.assert_next_step_is_exact()
    num_lines = count_lines(case.offload.close)

    for line in spread(num_lines, 12):
        case.begin()
        case.assert_next_step_is_exact()
        state = case.model.state_dict()
        expected = {name: tensor.clone() for name, tensor in state.items()}
        place = interrupt(case.offload.close, line)
        case.offload.close()

        assert all(torch.equal(tensor, expected[name]) for name, tensor in state.items()), place
        case.assert_nothing_is_left(str(place))
        assert not case.device._pinned, place


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind == "fused" else pytest.mark.full) for kind in KINDS])
def test_interrupted_construction_leaves_the_model_as_it_was(kind: str) -> None:
    case = Case(kind)
    case.step_plain()
    case.step()
    grads = [None if parameter.grad is None else parameter.grad.clone() for parameter in case.model.parameters()]

    for place in interrupts(case.begin, 12, prepare=lambda: case.offload.close() if hasattr(case, "offload") else None):
        assert not hasattr(case, "offload") or case.offload._is_closed, place
        case.assert_nothing_is_left(place)
        for parameter, grad in zip(case.model.parameters(), grads, strict=True):
            assert (parameter.grad is None) if grad is None else torch.equal(parameter.grad, grad), place


@pytest.mark.parametrize("method", ["take", "take_pinned_as_one"])
def test_host_memory_whose_taker_an_interrupt_kept_from_hearing_of_it_is_given_back(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a gradient that is added to another, and of one that somebody has kept from the step before."""
    case = _begun("host")
    arena, parameters = case.offload._arena, [*case.model.parameters()]

    def step_again() -> None:
        kept = [parameter.grad for parameter in parameters] if method == "take_pinned_as_one" else []
        if kept:
            case.model.zero_grad()
        case.model(case.batch).square().mean().backward()
        kept.clear()

    before = arena.in_use_bytes
    with monkeypatch.context() as patch:
        patch.setattr(arena, method, interrupted_after(getattr(arena, method)))
        with pytest.raises(KeyboardInterrupt):
            step_again()
    case.step_plain()
    case.assert_next_step_is_exact()

    assert arena.in_use_bytes == before
    case.offload.close()
    case.assert_nothing_is_left()


def test_memory_for_gradients_of_what_comes_to_be_trained_is_not_lost_by_an_interrupt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case("host")
    case.model.layers[0].requires_grad_(False)
    case.plain.layers[0].requires_grad_(False)
    case.begin()
    for _ in range(3):
        case.assert_next_step_is_exact()
    arena = case.offload._arena
    needed_bytes = sum(-(-parameter.nbytes // 512) * 512 for parameter in case.model.layers[0].parameters())
    before = arena.in_use_bytes
    for model in case.model, case.plain:
        model.layers[0].requires_grad_(True)

    with monkeypatch.context() as patch:
        patch.setattr(arena, "take_pinned_as_one", interrupted_after(arena.take_pinned_as_one))
        with pytest.raises(KeyboardInterrupt):
            case.step()
    case.step_plain()
    case.assert_next_step_is_exact()

    assert arena.in_use_bytes == before + needed_bytes
    case.offload.close()
    case.assert_nothing_is_left()


@pytest.mark.parametrize("kind", KINDS)
def test_construction_that_was_interrupted_at_its_end_leaves_the_model_as_it_was(kind: str) -> None:
    case = Case(kind)

    for place in interrupts(case.begin, 100, prepare=_detach_all(case.model), within="note_attached"):
        case.assert_nothing_is_left(place)
        with pytest.raises(ValueError, match="found none"):
            memkit.detach(case.model)


@pytest.mark.core(1)
@pytest.mark.parametrize("kind", TRAINED)
@pytest.mark.parametrize("function", ["note_detached", "close"])
def test_close_that_was_interrupted_at_its_end_is_over_or_done_by_detach(function: str, kind: str) -> None:
    case = Case(kind)
    prepare = _detach_all(case.model)

    def begin() -> None:
        prepare()
        case.begin()

    for place in interrupts(lambda: case.offload.close(), 100, prepare=begin, within=function):
        prepare()
        case.assert_nothing_is_left(place)
        with pytest.raises(ValueError, match="found none"):
            memkit.detach(case.model)


def _detach_all(model: nn.Module) -> Callable[[], None]:
    def detach_all() -> None:
        with suppress(ValueError):
            memkit.detach(model)

    return detach_all


@pytest.mark.full
def test_interrupt_while_layers_come_to_stay_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("host", offload_ratio="auto")
    case.begin()
    chosen = memkit.plan.plan_resident  # two of three stay

    def choose(layers: Any, times: Any, plan: Any, **options: Any) -> Any:
        return chosen([*_costs(layers)], 2, num_slots=options["num_slots"])

    from memkit.weights import choice as module
    from memkit.weights.shares import costs_of as _costs

    monkeypatch.setattr(module, "plan_measured", choose)

    def begin() -> None:
        case.offload.close()
        case.begin()
        for _ in range(2):
            case.assert_next_step_is_exact()
        case.step_plain()

    begin()
    lines = _lines_in(case.step, "_before_pass", "_choose", "_stream_anew", "_release_leaving")
    assert len(case.offload.plan.streamed) == 1
    for line in lines:
        begin()
        place = interrupt(case.step, line)
        for _ in range(2):
            case.assert_next_step_is_exact(str(place))

        assert len(case.offload.plan.streamed) == 1, place
    case.offload.close()
    case.assert_nothing_is_left()
