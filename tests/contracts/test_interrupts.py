"""A training loop goes on after Ctrl-C at any line of memkit: no later step has a wrong number, every context has ended, no
hook, mode or lock is left, and nothing was freed under a copy."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memkit
from memkit.activations.budgeting.state import budget_states
from memkit.activations.offloading.scheduled import Schedule
from memkit.activations.recomputing import region_plan
from memkit.activations.saved.state import offload_states, remat_states
from memkit.device import Device
from tests.activations.cases import assert_same_bits
from tests.activations.compiled_blocks import OF_DYNAMO
from tests.activations.conftest import open_test_device
from tests.activations.remat.conftest import NO_PLAN_FITS
from tests.contracts.contexts import KINDS, MORE_KINDS
from tests.interrupts import count_lines, hooks_around, interrupted_after, interrupts

TAG = "interrupted"
NUM_LINES = [pytest.param(3, id="few"), pytest.param(24, id="many", marks=pytest.mark.slow)]

pytestmark = [
    pytest.mark.filterwarnings(
        NO_PLAN_FITS,
        "ignore:.*was exceeded",
        *OF_DYNAMO,
    ),
    pytest.mark.usefixtures("quick_plans"),
]


class Model(nn.Module):
    """Layers with ops that write in place, draw random numbers and keep statistics, and an output that no loss reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = functional.dropout(functional.gelu(layer(x)), 0.2)
        y = torch.relu_(self.norm(x)).sin()
        self.aux = y.exp().sin()
        return y


class Blocks(nn.Module):
    """Blocks whose calls are recomputed as a whole."""

    def __init__(self, *, is_compiled: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 16), nn.Tanh()) for _ in range(4)
        )
        self.norm = nn.BatchNorm1d(16)
        for block in self.blocks if is_compiled else ():
            block.compile(backend="aot_eager")

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x)  # type: ignore[no-any-return]


def flat() -> nn.Sequential:
    """Return layers that are recomputed in spans."""
    layers = (it for _ in range(4) for it in (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.ReLU(inplace=True)))
    return nn.Sequential(*layers, nn.Linear(16, 16))


@dataclass(frozen=True)
class Subject:
    """A feature around a model, to be interrupted. `contexts` makes the contexts of each step, the outermost first; from
    `num_steps` on, all steps do the same."""

    contexts: Callable[[Device], list[AbstractContextManager[Any]]]
    model: Callable[[], nn.Module] = Model
    is_attached: bool = False
    num_steps: int = 3


def _of_kind(name: str) -> Callable[[Device], list[AbstractContextManager[Any]]]:
    if " around " in name:  # each by a `with` statement of its own
        return lambda device: [
            memkit.CPUOffload(1.0, TAG, min_bytes=0, window_bytes=0, device=device),
            memkit.Rematerialize(0.5, TAG, min_bytes=0, device=device),
        ]
    return lambda device: [(KINDS | MORE_KINDS)[name].make(device, TAG)]


def _remat(device: Device) -> list[AbstractContextManager[Any]]:
    return [memkit.Rematerialize(0.6, TAG, min_bytes=0, device=device)]


SUBJECTS = {
    **{name: Subject(_of_kind(name)) for name in (*KINDS, "offload all ahead", "remat plan of nothing", "budget half")},
    "attached": Subject(_of_kind("offload all"), is_attached=True),
    "regions": Subject(_remat, Blocks, num_steps=5),
    "spans": Subject(_remat, flat, num_steps=5),
    "compiled blocks": Subject(_remat, lambda: Blocks(is_compiled=True), num_steps=5),
}
SLOW = ("regions", "spans", "compiled blocks", "remat dtr", "remat plan of nothing", "offload all ahead", "budget half")


class Loop:
    """A training loop on a device of its own. All its steps begin in the same state, so that all must end in the same state."""

    def __init__(self, subject: Subject, *, device: str = "late", is_made_once: bool = False) -> None:
        self.subject, self.device_name, self.is_made_once = subject, device, is_made_once
        torch.manual_seed(0)
        self.model = subject.model().to(open_test_device(device).torch_device)
        self._weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        self._x = torch.randn(8, 16).to(next(self.model.parameters()).device)
        self._handle: memkit.activations.Attachment | None = None
        self.plain = self.step()
        self.begin()
        self.hooks = hooks_around(self.model)

    def begin(self) -> None:
        """Forget all that earlier steps have taught, as in a new process."""
        if self._handle is not None:
            self._handle.remove()
        memkit.reset(TAG)
        self.device = open_test_device(self.device_name)
        self._made = self.subject.contexts(self.device)
        if self.subject.is_attached:
            self._handle = memkit.attach(self.model, *self._made)
        self.generator_state: Tensor | None = None
        """The generator's state after the last forward: the backward keeps it."""

    def step(self) -> list[Tensor]:
        """Return the loss, the gradients and the buffers of a step."""
        self.model.load_state_dict(self._weights)
        self.model.zero_grad()
        torch.manual_seed(1)
        self.generator_state = None
        loss = self._forward().square().sum()
        self.generator_state = torch.get_rng_state()
        loss.backward()
        grads = [parameter.grad for parameter in self.model.parameters()]
        return [loss.detach(), *(grad for grad in grads if grad is not None), *map(Tensor.clone, self.model.buffers())]

    def _forward(self) -> Tensor:
        if not hasattr(self, "device") or self.subject.is_attached:
            return self.model(self._x)  # type: ignore[no-any-return]
        return self._forward_in([*self._made] if self.is_made_once else self.subject.contexts(self.device))

    def _forward_in(self, contexts: list[AbstractContextManager[Any]]) -> Tensor:
        if not contexts:
            return self.model(self._x)  # type: ignore[no-any-return]
        with contexts.pop(0):
            return self._forward_in(contexts)

    def held_bytes(self) -> tuple[int, ...]:
        """Return the bytes that are held between steps, on the host and on the device."""
        gc.collect()
        self.device.synchronize()
        assert not getattr(self.device, "races", None)
        stats = memkit.stats(TAG)
        return stats.host_held_bytes, stats.host_in_use_bytes, stats.live_bytes, stats.live_records

    def check(self, count: int, *, prepare: Callable[[], object] = lambda: None, within: str | None = None) -> None:
        """Interrupt steps at so many lines, and check the steps that follow each."""
        for place in interrupts(self.step, count, prepare=prepare, within=within):
            if self.generator_state is not None:
                assert torch.equal(self.generator_state, torch.get_rng_state()), place
            for _ in range(2):
                assert_same_bits(self.step(), self.plain)
            assert hooks_around(self.model) == self.hooks, place
            states = (*offload_states.values(), *remat_states.values(), *budget_states.values())
            assert not any(state.lock._is_owned() for state in states), f"a lock is held; interrupted at {place}"


@pytest.fixture(autouse=True)
def ops_are_dear(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Have regions chosen wherever they fit, and leave nothing compiled behind."""
    if any(name in request.node.name for name in ("regions", "spans", "compiled")):
        monkeypatch.setattr(region_plan, "_seconds_of_ops", lambda *_: 1e9)
    yield
    if "compiled" in request.node.name:
        torch._dynamo.reset()


def _params(slow: tuple[str, ...] = SLOW) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.slow] if name in slow else []) for name in SUBJECTS]


@pytest.mark.parametrize("count", NUM_LINES)
@pytest.mark.parametrize("name", _params())
def test_steady_step(name: str, count: int) -> None:
    loop = Loop(SUBJECTS[name])
    for _ in range(SUBJECTS[name].num_steps):
        loop.step()
    before = loop.held_bytes()

    loop.check(count)

    for _ in range(SUBJECTS[name].num_steps):
        loop.step()
    if not name.startswith("budget"):  # which may go another way from then on
        assert loop.held_bytes() == before
    assert loop.held_bytes()[-1] == before[-1]


@pytest.mark.parametrize("count", NUM_LINES)
@pytest.mark.parametrize("name", _params((*SLOW, "offload half", "attached")))
def test_first_step(name: str, count: int) -> None:
    loop = Loop(SUBJECTS[name])

    loop.check(count, prepare=loop.begin)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_step_whose_copies_land_at_any_time(seed: int) -> None:
    loop = Loop(SUBJECTS["offload all"], device=f"seed {seed}")
    loop.step()

    loop.check(10)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SUBJECTS)
def test_step_on_a_gpu(name: str) -> None:
    """There the backward runs in another thread: only the main thread's work is interrupted."""
    loop = Loop(SUBJECTS[name], device="cuda")
    for _ in range(SUBJECTS[name].num_steps):
        loop.step()

    loop.check(30)


EDGES = ("enter_with", "claim", "_begin", "begin", "__enter__", "__exit__", "exit", "leave", "end_block", "end", "end_left")
COPIES = ("_pack", "keep_up", "start", "_release_next", "_unpack", "_fetch_next", "_serve_last", "settle", "close")


@pytest.mark.parametrize("name", _params((*SLOW, "budget")))
def test_begin_and_end_of_a_context(name: str) -> None:
    loop = Loop(SUBJECTS[name], is_made_once=name.startswith(("offload", "remat")))
    for _ in range(3):
        loop.step()

    draws = ["_draw"] if name == "remat plan of nothing" else []  # if such an op runs again, the generator is kept
    for function in (*EDGES, *draws):
        if count_lines(loop.step, function):
            loop.check(3, within=function)


@pytest.mark.parametrize("takes_turns", [False, True])
@pytest.mark.parametrize("name", ["offload all", pytest.param("offload half", marks=pytest.mark.slow)])
def test_copies_of_a_schedule(name: str, takes_turns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Schedule, "takes_turns", property(lambda _: takes_turns, lambda *_: None), raising=False)
    loop = Loop(SUBJECTS[name])
    for _ in range(3):
        loop.step()
    before = loop.held_bytes()

    for function in COPIES:
        if count_lines(loop.step, function):
            loop.check(3, within=function)

    loop.step()
    assert loop.held_bytes() == before


def test_step_that_leaves_its_schedule() -> None:
    loop = Loop(SUBJECTS["offload half"])
    for _ in range(3):
        loop.step()

    def go_another_way() -> None:
        with SUBJECTS["offload half"].contexts(loop.device)[0]:
            x = loop.model.layers[0](loop._x).sin().exp()  # type: ignore[index, operator]
        x.sum().backward()

    for _ in interrupts(go_another_way, 12):
        for _ in range(3):
            assert_same_bits(loop.step(), loop.plain)
        loop.held_bytes()


def test_host_memory_that_reached_nobody_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(SUBJECTS["offload all"])
    for _ in range(3):
        loop.step()
    before = loop.held_bytes()
    (window,) = offload_states[TAG].windows()
    with monkeypatch.context() as patch:
        patch.setattr(window.arena, "take", interrupted_after(window.arena.take))
        with pytest.raises(KeyboardInterrupt):
            loop.step()

    for _ in range(2):
        assert_same_bits(loop.step(), loop.plain)
    assert loop.held_bytes() == before
    loop.model.aux = None
    memkit.reset(TAG)
    assert window.arena.held_bytes == 0


def test_no_offload_that_was_interrupted_has_ended() -> None:
    device, x = open_test_device("late"), torch.ones(8, requires_grad=True)
    contexts = SUBJECTS["offload all"].contexts

    def save_without_offload() -> None:
        with contexts(device)[0], memkit.no_offload():
            (x * 2).exp()

    for place in interrupts(save_without_offload, 60):
        with contexts(device)[0]:
            loss = (x * 2).exp().sum()
        loss.backward()
        assert memkit.stats(TAG).moved_out_bytes == x.nbytes, place


def test_context_that_somebody_is_in_is_not_entered_again_after_an_interrupt() -> None:
    loop = Loop(SUBJECTS["offload all"], is_made_once=True)
    loop.step()
    list(interrupts(loop.step, 1, within="exit"))

    with loop._made[0], pytest.raises(ValueError, match="is already entered"):
        loop.step()

    assert_same_bits(loop.step(), loop.plain)
