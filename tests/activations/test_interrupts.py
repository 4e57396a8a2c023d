"""A training loop goes on after Ctrl-C: whatever line of memkit that came ahead of, the steps that follow are exact."""

from __future__ import annotations

import gc
import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memkit
from memkit.activations.budgeting.state import budget_states
from memkit.activations.offloading.schedule import Schedule
from memkit.activations.recomputing import region_plan
from memkit.activations.saved.state import offload_states, remat_states
from memkit.device import Device
from tests.activations.cases import assert_same_bits
from tests.activations.conftest import open_test_device
from tests.activations.remat.conftest import NO_PLAN_FITS, quick_plans
from tests.interrupts import count_lines, hooks_around, interrupted_after, interrupts

__all__ = ["quick_plans"]

TAG = "interrupted"
NUM_LINES = 30
MANY_LINES = [pytest.param(3), pytest.param(NUM_LINES, marks=pytest.mark.full)]

pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings(NO_PLAN_FITS, "ignore:.*was exceeded"),
    pytest.mark.usefixtures("quick_plans"),
]

Contexts = Callable[[Device], list[AbstractContextManager[object]]]


SLOW = (
    *("offload half", "offload all in a window", "offload half in a window", "rematerialize all"),
    *("rematerialize by the score", "budget of bytes"),
)
"""What does the same as others, or takes long: left to `full`."""


class Model(nn.Module):
    """Layers with ops that write in place, draw random numbers, and keep statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = functional.dropout(functional.gelu(layer(x)), 0.2)
        return torch.relu_(self.norm(x)).sin()


class TwoHeads(Model):
    """Keeps an output that the loss does not reach."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.aux = y.exp().sin()
        return y


class Blocks(nn.Module):
    """Blocks of which calls are recomputed as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 16), nn.Tanh()) for _ in range(4)
        )
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x)  # type: ignore[no-any-return]


def compiled_blocks() -> nn.Module:
    model = Blocks()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


class Loop:
    """A training loop on a device of its own. All its steps begin alike, so that all must end alike."""

    def __init__(self, contexts: Contexts, *, device: str = "late", make: Callable[[], nn.Module] = Model) -> None:
        self.make = make
        self.device_name = device
        self.device = open_test_device(device)
        torch.manual_seed(0)
        self.model = make().to(self.device.torch_device)
        self._weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        self._x = torch.randn(8, 16).to(self.device.torch_device)
        self._contexts = contexts
        self.generator_state: Tensor | None = None
        """Of the last step, once its forward is over: the backward is to leave that as it is."""

    def begin(self) -> None:
        """Forget what earlier steps have taught, as a new process."""
        memkit.reset(TAG)
        self.device = open_test_device(self.device_name)

    def step(self) -> list[Tensor]:
        """Return the loss, the gradients and the buffers of a step."""
        self.model.load_state_dict(self._weights)
        self.model.zero_grad()
        torch.manual_seed(1)
        self.generator_state = None
        loss = self.forward().square().sum()
        self.generator_state = torch.get_rng_state()
        loss.backward()
        grads = [parameter.grad for parameter in self.model.parameters()]
        return [loss.detach(), *(grad for grad in grads if grad is not None), *map(Tensor.clone, self.model.buffers())]

    def forward(self) -> Tensor:
        return self._forward_in(self._contexts(self.device))

    def _forward_in(self, contexts: list[AbstractContextManager[object]]) -> Tensor:
        if not contexts:
            return self.model(self._x)  # type: ignore[no-any-return]
        with contexts.pop(0):
            return self._forward_in(contexts)

    def held_bytes(self) -> tuple[int, ...]:
        """Return what is held between steps, on the host and on the device."""
        self.device.synchronize()
        assert not getattr(self.device, "races", None)
        stats = memkit.stats(TAG)
        return stats.host_held_bytes, stats.host_in_use_bytes, stats.live_bytes, stats.live_records


FIGURES = operator.attrgetter(
    *("seen_bytes", "unique_bytes", "kept_bytes", "moved_out_bytes", "moved_in_bytes", "served_bytes"),
    *("num_ops", "num_saved", "num_dropped", "dropped_bytes"),
    *("live_records", "live_bytes", "host_in_use_bytes"),
)
"""What is the same of each step once a plan is followed, where copies always take the same time."""


def _offload(ratio: float = 1.0, window_bytes: int | None = 0) -> Contexts:
    return lambda device: [memkit.CPUOffload(ratio, TAG, min_bytes=0, window_bytes=window_bytes, device=device)]


def _budget(budget: float | str) -> Contexts:
    return lambda device: [memkit.MemoryBudget(budget, TAG, min_bytes=0, device=device)]


def _remat(budget: float | str = 0.5, policy: str = "plan") -> Contexts:
    return lambda device: [memkit.Rematerialize(budget, TAG, policy=policy, min_bytes=0, device=device)]


FEATURES: dict[str, Contexts] = {
    "offload all": _offload(),
    "offload all in a window": _offload(window_bytes=None),
    "offload half": _offload(0.5),
    "offload half in a window": _offload(0.5, None),
    "rematerialize": _remat(),
    "rematerialize all": _remat("100B"),
    "rematerialize by the score": _remat(0.3, "dtr"),
    "offload around rematerialize": lambda device: [*_offload()(device), *_remat()(device)],
    "budget": _budget(0.5),
    "budget of bytes": _budget("2KiB"),
}


def _plain(device: str = "late", make: Callable[[], nn.Module] = Model) -> list[Tensor]:
    return Loop(lambda _: [], device=device, make=make).step()


def _locks() -> list[Any]:
    """Return the locks that a step takes. On a GPU the backward runs in another thread, and would wait for one for ever."""
    return [state.lock for state in (*offload_states.values(), *remat_states.values(), *budget_states.values())]


def _check(
    loop: Loop,
    count: int,
    *,
    prepare: Callable[[], object] = lambda: None,
    within: str | None = None,
    repeats: bool = False,
) -> None:
    """Interrupt steps, and see that those that follow are exact.

    Args:
        repeats: whether they also do what the step has done that came last before.
    """
    plain, hooks = _plain(loop.device_name, loop.make), hooks_around(loop.model)
    before = FIGURES(memkit.stats(TAG)) if repeats else None
    for place in interrupts(loop.step, count, prepare=prepare, within=within):
        if loop.generator_state is not None:
            assert torch.equal(loop.generator_state, torch.get_rng_state()), place
        for _ in range(2):
            assert_same_bits(loop.step(), plain)
        if repeats and FIGURES(memkit.stats(TAG)) != before:
            gc.collect()  # a context that was kept from its end may hold itself, and count as one that is going on
            loop.step()
            assert FIGURES(memkit.stats(TAG)) == before, place
        assert hooks_around(loop.model) == hooks, place
        assert not any(lock._is_owned() for lock in _locks()), f"a lock is held; interrupted at {place}"


@pytest.mark.parametrize("count", MANY_LINES)
@pytest.mark.parametrize("feature", [pytest.param(name, marks=[pytest.mark.full] if name in SLOW else []) for name in FEATURES])
def test_steps_after_an_interrupt_are_exact(feature: str, count: int) -> None:
    loop = Loop(FEATURES[feature])
    for _ in range(3):
        loop.step()
    before = loop.held_bytes()

    _check(loop, count, repeats=not feature.startswith("budget"))  # which plans anew while an error holds what was broken off

    assert loop.held_bytes() == before


@pytest.mark.parametrize("count", MANY_LINES)
@pytest.mark.parametrize(
    "feature",
    [
        *(pytest.param(name, marks=pytest.mark.full) for name in ("offload half", "rematerialize")),
        *("offload around rematerialize", "budget of bytes"),
    ],
)
def test_steps_after_an_interrupt_of_the_first_step_are_exact(feature: str, count: int) -> None:
    loop = Loop(FEATURES[feature])

    _check(loop, count, prepare=loop.begin)


OF_DYNAMO = "ignore:.*script_method:DeprecationWarning", "ignore:The .grad attribute of a Tensor that is not a leaf"
"""It imports code that warns, and looks at what warns."""
REGIONS: dict[str, tuple[Callable[[], nn.Module], Contexts]] = {
    "regions": (Blocks, _remat(0.6)),
    "regions in an offload": (Blocks, lambda device: [*_offload()(device), *_remat(0.6)(device)]),
    "compiled blocks": (compiled_blocks, _remat(0.6)),
}


@pytest.fixture
def ops_are_dear(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have regions chosen wherever they fit, and leave nothing that was compiled."""
    monkeypatch.setattr(region_plan, "_seconds_of_ops", lambda *_: 1e9)
    yield
    torch._dynamo.reset()


@pytest.mark.full
@pytest.mark.parametrize("within", [None, "_before", "_after", "_keep", "begin", "take_off", "recompute", "run", "_put_back"])
@pytest.mark.parametrize("name", REGIONS)
@pytest.mark.filterwarnings(*OF_DYNAMO)
@pytest.mark.usefixtures("ops_are_dear")
def test_steps_after_an_interrupt_of_a_step_with_regions_are_exact(name: str, within: str | None) -> None:
    make, contexts = REGIONS[name]
    loop = Loop(contexts, make=make)
    for _ in range(5):
        loop.step()
    before, settled = loop.held_bytes(), remat_states[TAG].settled
    assert settled is not None
    assert settled.regions is not None

    _check(loop, NUM_LINES, within=within, repeats=True)

    assert loop.held_bytes() == before
    assert remat_states[TAG].settled is not None


@pytest.mark.full
@pytest.mark.parametrize("within", [None, "_run", "_timed", "_note", "_stand_around"])
@pytest.mark.filterwarnings(*OF_DYNAMO)
@pytest.mark.usefixtures("ops_are_dear")
def test_steps_after_an_interrupt_of_a_step_with_compiled_blocks_are_exact(within: str | None) -> None:
    """Each is the second of its tag: recorded, and timed."""
    loop = Loop(_remat(0.6), make=compiled_blocks)
    loop.step()

    def begin() -> None:
        loop.begin()
        loop.step()

    _check(loop, NUM_LINES, within=within, prepare=begin)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("count", MANY_LINES)
def test_steps_after_an_interrupt_are_exact_where_copies_land_at_any_time(count: int, seed: int) -> None:
    loop = Loop(_offload(), device=f"seed {seed}")
    loop.step()

    _check(loop, count)


@pytest.mark.gpu
@pytest.mark.parametrize("feature", FEATURES)
def test_steps_after_an_interrupt_are_exact_on_a_gpu(feature: str) -> None:
    """There the backward runs in another thread: only what the main thread does is interrupted."""
    loop = Loop(FEATURES[feature], device="cuda")
    for _ in range(3):
        loop.step()
    before = loop.held_bytes()

    _check(loop, NUM_LINES)

    assert loop.held_bytes() == before


@pytest.mark.parametrize("count", MANY_LINES)
def test_steps_of_an_attached_model_after_an_interrupt_are_exact(count: int) -> None:
    loop = Loop(lambda _: [])
    handle = memkit.attach(loop.model, memkit.CPUOffload(1.0, TAG, min_bytes=0, window_bytes=0, device=loop.device))
    for _ in range(3):
        loop.step()
    before = loop.held_bytes()

    _check(loop, count, repeats=True)

    assert loop.held_bytes() == before
    handle.remove()


@pytest.mark.parametrize("count", MANY_LINES)
@pytest.mark.parametrize("function", ["leave", "fetch", "_release", "hand_out", "close", "copy"])
def test_what_a_copy_touches_is_held_before_the_copy_is_issued(function: str, count: int) -> None:
    loop = Loop(FEATURES["offload all"])

    _check(loop, count, within=function, prepare=loop.begin)


SCHEDULED = [
    *("follow_schedule", "take", "place", "_pack", "_hold", "keep_up", "start", "_release_next", "end_forward"),
    *("_unpack", "_turn", "_note_request", "_fetch_next", "_await", "_serve_last", "end_backward", "settle", "close"),
]


def _scheduled(feature: str, function: str) -> object:
    """Without a window all is done as with one, but what is served last."""
    is_core = feature == "offload half in a window" or function == "_serve_last"
    return pytest.param(feature, function, marks=() if is_core else pytest.mark.full)


@pytest.mark.parametrize("count", MANY_LINES)
@pytest.mark.parametrize(
    ("feature", "function"),
    [_scheduled(feature, function) for feature in ("offload all", "offload half in a window") for function in SCHEDULED],
)
def test_what_a_schedule_copies_is_held_before_the_copy_is_issued(feature: str, function: str, count: int) -> None:
    loop = Loop(FEATURES[feature])
    for _ in range(3):
        loop.step()
    before = loop.held_bytes()

    if not count_lines(loop.step, function):
        pytest.skip(f"nothing is done in {function} here")
    _check(loop, count, within=function, repeats=True)

    assert loop.held_bytes() == before


@pytest.mark.parametrize("count", MANY_LINES)
@pytest.mark.parametrize("function", ["keep_up", "start", "end_forward"])
def test_copies_that_take_turns_are_waited_for_after_an_interrupt(
    function: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Schedule, "takes_turns", property(lambda _: True, lambda *_: None), raising=False)
    loop = Loop(FEATURES["offload all"])
    for _ in range(3):
        loop.step()
    before = loop.held_bytes()

    _check(loop, count, within=function, repeats=True)

    assert loop.held_bytes() == before


@pytest.mark.core(1)
@pytest.mark.parametrize("count", MANY_LINES)
@pytest.mark.parametrize("function", ["stop", "_send_alone", "start", "end_forward"])
@pytest.mark.parametrize("takes_turns", [True, False])
def test_steps_after_an_interrupt_of_one_that_leaves_its_schedule_are_exact(
    takes_turns: bool, function: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Schedule, "takes_turns", property(lambda _: takes_turns, lambda *_: None), raising=False)
    loop, plain = Loop(FEATURES["offload half in a window"]), _plain()
    for _ in range(3):
        loop.step()

    def go_another_way() -> None:
        with loop._contexts(loop.device)[0]:
            x = loop.model.layers[0](loop._x).sin().exp()  # type: ignore[index, operator]
        x.sum().backward()

    for _ in interrupts(go_another_way, count, within=function):
        for _ in range(3):
            assert_same_bits(loop.step(), plain)
        loop.held_bytes()  # no race


@pytest.mark.parametrize("count", MANY_LINES)
@pytest.mark.parametrize("function", ["settle_scheduled", "put_by", "_give_back", "_spans_for", "is_spent", "_turn"])
def test_steps_after_one_that_leaves_what_no_backward_asks_for_are_exact(function: str, count: int) -> None:
    loop = Loop(FEATURES["offload all"], make=TwoHeads)
    for _ in range(4):
        loop.step()
    before = loop.held_bytes()

    assert count_lines(loop.step, function)
    _check(loop, count, within=function)

    loop.step()
    assert loop.held_bytes() == before


def test_host_memory_whose_taker_an_interrupt_kept_from_hearing_of_it_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(FEATURES["offload all"])
    for _ in range(3):
        loop.step()
    before = loop.held_bytes()
    (window,) = offload_states[TAG].windows()
    with monkeypatch.context() as patch:
        patch.setattr(window.arena, "take", interrupted_after(window.arena.take))
        with pytest.raises(KeyboardInterrupt):
            loop.step()

    for _ in range(2):
        assert_same_bits(loop.step(), _plain())
    assert loop.held_bytes() == before
    memkit.reset(TAG)
    assert window.arena.held_bytes == 0


class LoopWithOneContext(Loop):
    """Enters one and the same context in each step, by a `with` statement."""

    def __init__(self, contexts: Contexts) -> None:
        super().__init__(contexts)
        (self._context,) = contexts(self.device)

    def forward(self) -> Tensor:
        with self._context:
            return self.model(self._x)  # type: ignore[no-any-return]


def test_generator_is_left_as_it_is_where_an_op_that_draws_is_run_again() -> None:
    x, states = torch.randn(64, requires_grad=True), list[Tensor]()

    def step() -> None:
        with memkit.Rematerialize("1B", TAG, min_bytes=0):
            loss = functional.dropout(x.sin(), 0.5).cos().sum()
        torch.rand(1)
        states[:] = [torch.get_rng_state()]
        loss.backward()

    for place in interrupts(step, 100, within="_draw"):
        assert torch.equal(torch.get_rng_state(), states[0]), place


EDGES = ["enter_with", "claim", "_begin", "begin", "__enter__", "__exit__", "exit", "leave", "end_block", "end", "end_left"]


@pytest.mark.parametrize("count", MANY_LINES)
@pytest.mark.parametrize("kind", [LoopWithOneContext, pytest.param(Loop, marks=pytest.mark.full)])
@pytest.mark.parametrize("feature", ["offload half", pytest.param("rematerialize", marks=pytest.mark.full)])
def test_context_that_an_interrupt_kept_from_being_left_is_left_by_the_next(feature: str, kind: type[Loop], count: int) -> None:
    loop = kind(FEATURES[feature])
    for _ in range(3):
        loop.step()

    for function in EDGES:
        if count_lines(loop.step, function):
            _check(loop, count, within=function, repeats=True)


def test_no_offload_that_was_interrupted_is_over() -> None:
    device, x = open_test_device("late"), torch.ones(8, requires_grad=True)

    def save_without_offload() -> None:
        with _offload()(device)[0], memkit.no_offload():
            (x * 2).exp()

    def moved_bytes() -> int:
        with _offload()(device)[0]:
            loss = (x * 2).exp().sum()
        loss.backward()
        return memkit.stats(TAG).moved_out_bytes

    assert moved_bytes() == x.nbytes
    for place in interrupts(save_without_offload, 200):
        assert moved_bytes() == x.nbytes, place


def test_rest_of_a_context_is_offloaded_after_an_interrupted_no_offload_in_it() -> None:
    x = torch.ones(8, requires_grad=True)

    def pass_by() -> None:
        with memkit.no_offload():
            pass

    with _offload()(open_test_device("late"))[0]:
        list(interrupts(pass_by, 1, within="end_block"))
        loss = (x * 2).exp().sum()
    loss.backward()

    assert memkit.stats(TAG).moved_out_bytes == x.nbytes


def test_context_that_somebody_is_in_is_not_entered_again_after_an_interrupt() -> None:
    loop = LoopWithOneContext(FEATURES["offload all"])
    loop.step()
    list(interrupts(loop.step, 1, within="exit"))

    with loop._context, pytest.raises(ValueError, match="is already entered"):
        loop.step()

    assert_same_bits(loop.step(), _plain())
