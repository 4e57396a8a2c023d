"""In known steps, calls of modules are recomputed as a whole where that takes less time than single values."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.activations.offloading import moving_stage as offloading
from memkit.activations.offloading.scheduled import ScheduledForward
from memkit.device import CpuDevice, Device
from memkit.errors import ReplayMismatchError
from memkit.plan import Action
from tests.activations.cases import assert_same_bits
from tests.activations.remat.conftest import NO_PLAN_FITS, Remat
from tests.activations.remat.test_steady import blocks, train
from tests.contracts.contexts import Around

Context = Callable[[], AbstractContextManager[object]]
pytestmark = [pytest.mark.filterwarnings(NO_PLAN_FITS), pytest.mark.usefixtures("dear_ops", "quick_plans")]


class Residual(nn.Module):
    """Adds the result of some layers."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + scale * self.layers(x)


def with_dropout() -> nn.Module:
    parts = (Residual(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 32)) for _ in range(8))
    return nn.Sequential(nn.Linear(32, 32), *parts)


def with_batch_norm() -> nn.Module:
    parts = (
        Residual(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(inplace=True), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Tanh())
        for _ in range(8)
    )
    return nn.Sequential(nn.Linear(32, 32), *parts)


def with_recurrence() -> nn.Module:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = Residual(nn.Linear(32, 32), nn.Sigmoid(), nn.Linear(32, 32), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(8):
                x = self.cell(x, scale=0.5)
            return x

    return Recurrent()


def with_attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.2, batch_first=True, norm_first=True)
    return nn.Sequential(*(copy.deepcopy(layer) for _ in range(6)))


MODELS = {
    "dropout": with_dropout,
    "batch norm": with_batch_norm,
    "recurrence": with_recurrence,
    "attention": with_attention,
    "blocks": blocks,
}


def run(
    make: Callable[[], nn.Module], device: Device, context: Context, num_steps: int, *, size: int = 8
) -> Iterator[list[Tensor]]:
    """Yield the bits of each step, and the state of the random number generator behind it."""
    torch.manual_seed(0)
    model = make().to(device.torch_device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(num_steps):
        torch.manual_seed(number)
        random.seed(number)
        x = torch.randn(size, 4, 32, device=device.torch_device)
        x = x if make is with_attention else x.flatten(0, 1)
        yield [*train(model, x, context), torch.get_rng_state()]
        optimizer.step()


def _bits_at(name: str, budget: float) -> object:
    is_core = (budget == 0.4 and name in tuple(MODELS)[:3]) or (name, budget) == ("dropout", 0.2)  # blocks are in other tests
    return pytest.param(name, budget, marks=() if is_core else pytest.mark.slow)


@pytest.mark.covering(1)
@pytest.mark.parametrize(("name", "budget"), [_bits_at(name, budget) for name in MODELS for budget in (0.7, 0.4, 0.2)])
def test_bits_are_those_of_the_plain_run(name: str, budget: float, device: Device, remat_on: Remat) -> None:
    plain = run(MODELS[name], device, nullcontext, 7)
    found = run(MODELS[name], device, lambda: remat_on(budget, "bits"), 7)

    for wanted, step in zip(plain, found, strict=True):
        assert_same_bits(step, wanted)
    assert memkit.stats("bits").live_records == 0


def test_steady_step_has_regions(device: Device, remat_on: Remat) -> None:
    model, x = blocks().to(device.torch_device), torch.randn(8, 32, device=device.torch_device)
    plain = train(model, x, nullcontext)
    recorded = []
    for _ in range(6):
        assert_same_bits(train(model, x, lambda: remat_on(0.5, "steady", min_bytes=1)), plain)
        recorded.append(memkit.stats("steady").is_recorded)
    stats = memkit.stats("steady")

    assert recorded == [True, True, True, False, False, False]
    assert stats.follows_plan
    assert stats.num_deviations == 0
    assert stats.ledger_peak_bytes <= stats.budget_bytes
    assert stats.dropped_bytes > 0.45 * stats.saved_bytes
    assert 4 <= stats.num_replays <= 30  # of one block, or of several together
    assert 15 * 5 <= stats.num_replayed_ops <= 30 * 6
    assert stats.num_replayed_ops > 3 * stats.num_replays

    plan = remat_on(0.5, "steady").plan
    dropped = [save for save in plan.saves if save.action is Action.RECOMPUTE]
    assert (len(dropped), sum(save.num_bytes for save in dropped)) == (stats.num_dropped, stats.dropped_bytes)
    assert all(save.reason.endswith("runs again") for save in dropped)


def compare(model: nn.Module, x: Tensor, context: Context) -> None:
    """Compare the bits of a step to the plain one's."""
    with torch.random.fork_rng([0] if x.is_cuda else []):
        wanted = train(model, x, nullcontext)
    assert_same_bits(train(model, x, context), wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "is_recorded"),
    [((16, 16, 16, 16, 16, 6, 16, 16, 16), "111000000"), ((16, 16, 16, *[16, 6] * 10), "111" + "?" * 12 + "0" * 8)],
    ids=["once", "always"],
)
def test_smaller_batch_has_the_same_regions_and_bits(
    sizes: tuple[int, ...], is_recorded: str, device: Device, remat_on: Remat
) -> None:
    model = with_dropout().to(device.torch_device)
    for size, recorded in zip(sizes, is_recorded, strict=True):
        compare(model, torch.randn(size, 32, device=device.torch_device), lambda: remat_on(0.4, "smaller"))
        assert recorded in ("?", str(int(memkit.stats("smaller").is_recorded)))
    assert memkit.stats("smaller").num_deviations == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*no memory apart from the host")
@pytest.mark.parametrize("budget", [0.4, "1GiB", 1.0])
def test_offload_outside_follows_a_schedule(
    budget: float | str, device: Device, remat_on: Remat, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(device, CpuDevice):
        pytest.skip("nothing is moved there")
    followed, follow_schedule = list[ScheduledForward](), offloading.follow_schedule

    def follow(*args: Any) -> ScheduledForward | None:
        found = follow_schedule(*args)
        followed.extend(() if found is None else (found,))
        return found

    def context() -> Around:
        offload = memkit.CPUOffload(1.0, "outside", min_bytes=0, window_bytes=0, device=device)
        return Around(offload, remat_on(budget, "inside"))

    monkeypatch.setattr(offloading, "follow_schedule", follow)
    plain = run(with_dropout, device, nullcontext, 14)
    for wanted, step in zip(plain, run(with_dropout, device, context, 14), strict=True):
        assert_same_bits(step, wanted)

    assert not memkit.stats("inside").is_recorded
    assert len(followed) >= 4
    assert all(forward.is_complete and not forward._has_left for forward in followed[-4:])
    assert (memkit.stats("inside").num_replays > 0) == (budget == 0.4)
    assert memkit.stats("outside").num_copies_in > 0


@pytest.mark.slow
@pytest.mark.parametrize("word", [memkit.keep, memkit.recompute])
def test_word_of_the_users_has_the_next_steps_recorded(
    word: Callable[[Tensor], Tensor], device: Device, remat_on: Remat
) -> None:
    model, x = with_dropout().to(device.torch_device), torch.randn(16, 32, device=device.torch_device)
    recorded = []
    for number in range(9):
        torch.manual_seed(number)
        wanted = train(model, x, nullcontext)
        torch.manual_seed(number)
        model.zero_grad()
        with remat_on(0.4, "word"):
            y = model[:4](x)
            loss = model[4:](word(y) if number >= 5 else y).sum()
        loss.backward()
        assert_same_bits([loss.detach(), *(param.grad for param in model.parameters())], wanted)
        recorded.append(memkit.stats("word").is_recorded)

    assert recorded == [True] * 3 + [False] * 3 + [True] * 3


@pytest.mark.slow
def test_verify_and_single_ops_and_dtr_and_given_plans_are_recorded(device: Device, remat_on: Remat) -> None:
    model, x = blocks().to(device.torch_device), torch.randn(8, 32, device=device.torch_device)
    for _ in range(2):
        train(model, x, lambda: remat_on(0.5, "given"))
    plan = remat_on(0.5, "given").plan
    for options in ({"verify": True}, {"policy": "ops"}, {"policy": "dtr"}, {"plan": plan}, {"strict": True}):
        for _ in range(5):
            compare(model, x, lambda: remat_on(0.5, "recorded", **options))  # noqa: B023
        stats = memkit.stats("recorded")
        assert (stats.is_recorded, stats.num_dropped > 0) == (True, True)
        assert stats.follows_plan == (options != {"policy": "dtr"})


@pytest.mark.parametrize("budget", [1.0, 0.4])
def test_context_that_was_never_left_is_ended_by_the_next(budget: float, device: Device, remat_on: Remat) -> None:
    model, x = with_dropout().to(device.torch_device), torch.randn(16, 32, device=device.torch_device)
    for _ in range(4):
        train(model, x, lambda: remat_on(budget, "left"))
    lost = remat_on(budget, "left")
    lost.__enter__()
    model(x)
    del lost

    compare(model, x, lambda: remat_on(budget, "left"))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert memkit.stats("left").num_iterations == 6


def test_what_is_known_of_a_step_holds_no_module(device: Device, remat_on: Remat) -> None:
    model, x = with_dropout().to(device.torch_device), torch.randn(16, 32, device=device.torch_device)
    for _ in range(5):
        train(model, x, lambda: remat_on(0.4, "holds"))
    parts = [weakref.ref(module) for module in model.modules()]
    assert not memkit.stats("holds").is_recorded
    del model
    gc.collect()

    assert [part() for part in parts] == [None] * len(parts)


# Where a step is another than the planned ones


TAG = "given up"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        if MORE:
            x = x.exp().log1p()
        return x + self.down(torch.tanh(self.up(x)).sin())


MORE: list[bool] = []
"""While it is not empty, the blocks do something else."""


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(6)])


def _remat() -> memkit.Rematerialize:
    return memkit.Rematerialize(0.4, TAG, min_bytes=0)


def _step(model: nn.Module, context: Context, num_calls: int = 1) -> list[Tensor]:
    x = torch.linspace(0, 1, 8 * 32).reshape(8, 32).requires_grad_()
    model.zero_grad()
    with context():
        y = x
        for _ in range(num_calls):
            y = model(y)
    y.square().mean().backward()
    return [y.detach(), x.grad, *[p.grad for p in model.parameters()]]


def _settled() -> nn.Sequential:
    model = _model()
    for _ in range(5):
        _step(model, _remat)
    stats = memkit.stats(TAG)
    assert not stats.is_recorded
    assert stats.num_replays > 0
    return model


@pytest.mark.parametrize("where", ["region", "inside", "everywhere"])
@pytest.mark.parametrize("kind", ["before", "behind"])
def test_hooks_that_are_set_later_keep_their_effect(where: str, kind: str) -> None:
    model = _settled()
    module = {"region": model[0], "inside": model[0].up}.get(where)
    if module is None:
        before = nn.modules.module.register_module_forward_pre_hook
        behind = nn.modules.module.register_module_forward_hook
    else:
        before, behind = module.register_forward_pre_hook, module.register_forward_hook
    handle = before(lambda _, args: (args[0] * 2,)) if kind == "before" else behind(lambda _, args, output: output * 2)
    try:
        assert_same_bits(_step(model, _remat), _step(model, nullcontext))
        assert memkit.stats(TAG).is_recorded
    finally:
        handle.remove()

    assert_same_bits(_step(model, _remat), _step(model, nullcontext))


def test_more_calls_than_planned_are_a_deviation() -> None:
    model = _settled()

    assert_same_bits(_step(model, _remat, 3), _step(model, nullcontext, 3))

    assert memkit.stats(TAG).num_deviations == 1
    assert_same_bits(_step(model, _remat, 3), _step(model, nullcontext, 3))
    assert memkit.stats(TAG).is_recorded


class Folded(nn.BatchNorm1d):
    """Reads its statistics in an unknown way."""


def _with_norms() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(Block(), Folded(32)) for _ in range(6)])


def test_call_that_was_planned_as_a_region_and_is_none_is_told_once_and_is_a_deviation() -> None:
    model, plain = _with_norms(), _with_norms()
    for _ in range(5):
        assert_same_bits(_step(model, _remat), _step(plain, nullcontext))
    assert memkit.stats(TAG).num_replays > 0
    for changed in (model, plain):
        changed.eval()

    with pytest.warns(UserWarning, match="a Sequential was to be recomputed as a whole, and was not: it reads the") as warned:
        assert_same_bits(_step(model, _remat), _step(plain, nullcontext))
    assert len(warned) == 1
    assert memkit.stats(TAG).num_deviations == 1
    for _ in range(8):
        assert_same_bits(_step(model, _remat), _step(plain, nullcontext))
    stats = memkit.stats(TAG)
    assert not stats.is_recorded  # others are regions now
    assert stats.num_replays > 0
    assert stats.ledger_peak_bytes <= stats.budget_bytes


def test_a_region_that_is_not_the_same_again_is_the_last() -> None:
    model = _settled()
    with _remat():
        loss = model(torch.ones(8, 32, requires_grad=True)).sum()
    MORE.append(True)
    try:
        with pytest.raises(ReplayMismatchError):
            loss.backward()
    finally:
        MORE.clear()
    del loss

    for _ in range(6):
        assert_same_bits(_step(model, _remat), _step(model, nullcontext))
        assert memkit.stats(TAG).is_recorded
