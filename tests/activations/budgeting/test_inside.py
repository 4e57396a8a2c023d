"""Recomputes inside compiled blocks: chosen ahead of their compile, exact, and never a reason to compile again."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import pytest
import torch
from functorch.compile import config
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager

import memkit
from memkit.activations.budgeting import inside
from memkit.activations.budgeting.inside import Room, best_partition, num_like
from memkit.activations.budgeting.learning import Learning
from memkit.activations.budgeting.planned_forward import PlannedForward
from memkit.activations.budgeting.state import budget_states
from memkit.core.torch_state import num_compiled
from memkit.device import Device, ReferenceDevice
from memkit.profile.partitions import Partition, partitions
from tests.activations.budgeting.conftest import Blind
from tests.activations.budgeting.plans import planner_of, random_plan
from tests.activations.cases import assert_same_bits
from tests.activations.compiled_blocks import OF_DYNAMO
from tests.activations.remat.conftest import NO_PLAN_FITS
from tests.clock import set_clock
from tests.contracts.test_interrupts import Blocks

pytestmark = pytest.mark.filterwarnings(NO_PLAN_FITS, *OF_DYNAMO)

# Which is best


CUTS = (  # a block saves 10 bytes, or 4 for one second more, or 2 for three; it is given 1, and its forward takes 6 seconds
    Partition(budget=1.0, saved_bytes=10, given_bytes=1, forward_flops=6.0, backward_flops=12.0),
    Partition(budget=0.5, saved_bytes=4, given_bytes=1, forward_flops=6.0, backward_flops=13.0),
    Partition(budget=0.3, saved_bytes=2, given_bytes=1, forward_flops=6.0, backward_flops=15.0),
)


@pytest.mark.parametrize(
    ("room_bytes", "bytes_per_s", "memory_bytes_per_s", "budget"),
    [
        (100, 0.1, 1e9, 1.0),  # all fits
        (97, 0.1, 1e9, 1.0),  # what does not leaves for nothing: three bytes in the half of sixty seconds
        (91, 0.1, 1e9, 1.0),  # and one block is recomputed, for six seconds
        (91, 0.05, 2.0, 0.5),  # for ten more where memory is slow
        (40, 0.1, 1e9, 0.5),  # six blocks for 36 seconds, or one second for each of the ten
        (40, 10.0, 1e9, 1.0),  # a fast link
        (20, 0.1, 1e9, 0.3),  # 54 seconds for nine blocks, ten and thirty for five, or thirty for all
        (0, 0.001, 1e9, 0.3),  # nothing is enough but to wait for the link
    ],
)
def test_best_partition(room_bytes: float, bytes_per_s: float, memory_bytes_per_s: float, budget: float) -> None:
    room = Room(num_bytes=room_bytes, bytes_per_s=bytes_per_s, flops_per_s=1.0, memory_bytes_per_s=memory_bytes_per_s)
    assert best_partition(CUTS, 10, room).budget == budget


def test_blocks_of_later_stages_count_for_less() -> None:
    """As in a ResNet: half as much is saved at twice the width."""
    stages = [nn.Linear(width, width, bias=False) for width in (8, 8, 16, 32)]

    assert num_like(stages[0], [*stages, nn.GELU()]) == 1 + 1 + 0.5 + 0.25
    assert num_like(stages[-1], stages) == 4
    assert num_like(nn.GELU(), [nn.GELU(), *stages]) == 0  # it has none, and is chosen nothing for


# What the compiler would do


class Block(nn.Module):
    """Two matrix products with ops between them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(32)
        self.first, self.second, self.third = nn.Linear(32, 128), nn.Linear(128, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
        y = self.second(torch.nn.functional.gelu(self.first(self.norm(x))))
        y = self.third(torch.nn.functional.gelu(y))
        return x + (y if scale is None else y * scale)


class CalledItsOwnWay(Block):
    """Has a `__call__` of its own, as the layers of transformers' models have."""

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        return super().__call__(*args, **kwargs)


class Counts(Block):
    """Draws random numbers as well."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
        self.num_calls += 1
        return torch.nn.functional.dropout(super().forward(x, scale=scale)) * torch.rand(32)


def _inputs() -> Tensor:
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(3)).requires_grad_()


@pytest.mark.slow
def test_smaller_budgets_save_less_and_compute_more() -> None:
    block, x = Block(), _inputs()
    found = partitions(block, (x,), {"scale": torch.ones(32)}, (1.0, 0.5, 0.0))

    assert [each.budget for each in found] == [1.0, 0.5, 0.0]
    assert found[0].saved_bytes > found[1].saved_bytes > found[2].saved_bytes >= found[2].given_bytes == x.nbytes
    assert found[0].backward_flops < found[2].backward_flops
    assert {each.forward_flops for each in found} == {2.0 * 16 * (32 * 128 + 128 * 128 + 128 * 32)}


@pytest.mark.parametrize("is_compiled", [pytest.param(False, marks=pytest.mark.slow), True])
def test_block_is_left_as_it_was(is_compiled: bool, no_compiled_code_is_left: None) -> None:
    block, x = Counts(), _inputs()
    if is_compiled:
        block.compile(backend="aot_eager")
    before = {name: value.clone() for name, value in block.state_dict().items()}
    torch.manual_seed(0)
    drawn = torch.rand(4)
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(_fail, _fail):
        (found,) = partitions(block, (x,), {}, (1.0,))

    assert found.saved_bytes != partitions(block, (x,), {}, (1.0,))[0].saved_bytes  # it is that of a block in bfloat16
    assert block.num_calls == 0
    assert {name: value.tolist() for name, value in block.state_dict().items()} == {
        name: value.tolist() for name, value in before.items()
    }
    assert all(parameter.grad is None for parameter in block.parameters())
    assert torch.equal(torch.rand(4), drawn)


def _fail(_: object) -> None:
    raise AssertionError("nothing is saved here")


def test_block_that_reads_a_value_raises() -> None:
    class Reads(Block):
        def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
            return super().forward(x) * x.sum().item()

    with pytest.raises(Exception, match=r"item|local_scalar|data-dependent"):
        partitions(Reads(), (_inputs(),), {}, (1.0,))


# In steps


def _model(how: str) -> nn.Sequential:
    torch.manual_seed(0)
    kind = CalledItsOwnWay if how == "own call" else Block
    model = nn.Sequential(*[kind() for _ in range(4)])
    for number, block in enumerate(model):
        if how in ("forward", "own call"):
            block.forward = torch.compile(block.forward, backend="aot_eager")
        elif how == "module":
            model[number] = torch.compile(block, backend="aot_eager")
        else:
            block.compile(backend="aot_eager")
    return model


def _step(model: nn.Module, context: AbstractContextManager[object], x: Tensor | None = None) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with context:
        loss = model(_inputs() if x is None else x).square().sum()
    loss.backward()
    found = [loss.detach(), *[parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]]
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
    return found


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the second of the partitions the best."""

    def take_second(found: Sequence[Partition], *_: object) -> Partition:
        return found[1]

    monkeypatch.setattr(inside, "best_partition", take_second)


def _budget(
    device: Device, budget: str | float = "24KiB", optimizer: torch.optim.Optimizer | None = None
) -> memkit.MemoryBudget:
    return memkit.MemoryBudget(budget, "inside", optimizer=optimizer, min_bytes=1, device=device)


@pytest.mark.slow
@pytest.mark.usefixtures("no_compiled_code_is_left", "second")
@pytest.mark.parametrize("how", ["call", "own call", "forward", "module"])
def test_steps_are_those_of_the_same_blocks_with_the_value_that_was_chosen(how: str) -> None:
    model = _model(how)
    with config.patch(activation_memory_budget=0.5):
        plain = _step(model, nullcontext())
    torch._dynamo.reset()
    device, model, compiled = ReferenceDevice(), _model(how), []
    for _ in range(6):
        assert_same_bits(_step(model, _budget(device)), plain)
        compiled.append(num_compiled())
        assert config.activation_memory_budget == 1.0

    assert budget_states["inside"].inside.chosen == {CalledItsOwnWay if how == "own call" else Block: 0.5}
    assert len(set(compiled[2:])) == 1
    stats = memkit.stats("inside")
    assert stats.follows_plan


class Full(Blind):
    """Says that the device is full."""

    def allocated_bytes(self) -> int:
        return 2**40


@pytest.mark.usefixtures("no_compiled_code_is_left", "second")
@pytest.mark.parametrize("budget", ["24KiB", "1GiB"])
@pytest.mark.slow
def test_larger_step_where_nothing_is_recorded_compiles_as_was_chosen_and_keeps_to_the_budget(
    budget: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that only move, or do nothing, are not recorded, and so nothing wraps the blocks."""
    compiled_with: list[float] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        compiled_with.append(config.activation_memory_budget)
        return aot_eager(graph, inputs)

    monkeypatch.setattr(Learning, "note_link", lambda *_: None)  # how fast copies are here differs from step to step
    monkeypatch.setattr(Learning, "ways_of", lambda *_: None)
    torch.manual_seed(0)
    model, device = nn.Sequential(*[Block() for _ in range(4)]), ReferenceDevice()
    for block in model:
        block.compile(backend=backend, dynamic=False)
    optimizer = torch.optim.SGD(model.parameters()) if budget == "1GiB" else None  # it has no states to come
    recorded = []
    for _ in range(8):
        _step(model, _budget(device, budget, optimizer))
        recorded.append(memkit.stats("inside").is_recorded)
    assert recorded == [True] * 3 + [False] * 5
    assert (memkit.stats("inside").num_copies_out > 0) == (budget == "24KiB")
    monkeypatch.setattr(device, "memory_counter", Full)
    larger = torch.randn(24, 32).requires_grad_()
    found = _step(model, _budget(device, budget, optimizer), larger)

    assert compiled_with == [0.5, 0.5]
    assert config.activation_memory_budget == 1.0
    assert memkit.stats("inside").num_replays == 4
    assert_same_bits(found, _step(model, nullcontext(), larger))


@pytest.mark.usefixtures("no_compiled_code_is_left", "second")
@pytest.mark.parametrize("what", ["compiled before", "chosen by the user", "a share", "not to be traced"])
@pytest.mark.slow
def test_nothing_is_chosen(what: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO, logger="memkit")
    model = _model("call")
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    if what == "compiled before":
        _step(model, nullcontext())
    if what == "chosen by the user":
        around = partial(config.patch, activation_memory_budget=0.7)
    if what == "not to be traced":
        monkeypatch.setattr("memkit.profile.partitions._partition", _fail)
    with around():
        _step(model, _budget(ReferenceDevice(), 0.5 if what == "a share" else "24KiB"))

    assert budget_states["inside"].inside.chosen == {Block: None}
    told = {"compiled before": "was compiled before", "not to be traced": "no activation_memory_budget is chosen"}
    assert told.get(what, "") in caplog.text


# Bits are those of the same blocks run plain, whatever the plan


_blocks_step = partial(_step, x=torch.linspace(-1, 1, 128).view(8, 16))


@pytest.mark.usefixtures("no_compiled_code_is_left")
@pytest.mark.slow
def test_waiting_for_room_is_no_part_of_what_a_block_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a step is measured, its saved tensors leave and are waited for, so that the step keeps to the budget."""
    make_room, calls, waits = PlannedForward.make_room, itertools.count(), list[float]()

    def wait_and_make_room(forward: PlannedForward) -> bool:
        if next(calls) % 4 == 0:  # each block waits more often than that
            waits.append(0.05)
            clock.sleep(0.05)
        return make_room(forward)

    monkeypatch.setattr(PlannedForward, "make_room", wait_and_make_room)
    clock = set_clock(monkeypatch, tick_s=1e-5)
    device, model = ReferenceDevice(), Blocks(is_compiled=True)
    _blocks_step(model, nullcontext())  # it compiles
    for _ in range(3):
        _blocks_step(model, memkit.MemoryBudget("2KiB", "waits", min_bytes=0, device=device))

    assert len(waits) >= 4
    assert planner_of("waits").problem.plain_s < 0.05


@pytest.mark.usefixtures("no_compiled_code_is_left")
@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 0])
def test_compiled_blocks_are_exact_under_budgets_and_any_plan(seed: int | None) -> None:
    device = ReferenceDevice(seed=seed)
    torch.manual_seed(0)
    model = Blocks(is_compiled=True)
    plain = _blocks_step(model, nullcontext())
    for budget in (0.7, 0.4, "2KiB"):
        for _ in range(4):
            assert_same_bits(_blocks_step(model, memkit.MemoryBudget(budget, f"{budget}", min_bytes=0, device=device)), plain)
        assert memkit.stats(f"{budget}").follows_plan
    for number in range(10):
        plan = random_plan(planner_of("0.7"), number)
        assert_same_bits(_blocks_step(model, memkit.MemoryBudget(0.7, "0.7", min_bytes=0, device=device, plan=plan)), plain)
        assert memkit.stats("0.7").follows_plan
    device.synchronize()
    assert memkit.stats("0.7").host_in_use_bytes == 0


@pytest.mark.usefixtures("no_compiled_code_is_left")
def test_model_that_is_compiled_is_told_of_the_budget() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    model.compile(backend="aot_eager")

    with (
        memkit.MemoryBudget("1MiB", "whole", min_bytes=0, device=ReferenceDevice()),
        pytest.raises(RuntimeError, match=r'^MemoryBudget \(tag "whole"\) needs a model that is not compiled itself'),
    ):
        model(torch.randn(4, 8))
