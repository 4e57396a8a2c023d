"""Regions are left where a step is another than the planned ones: hooks that were set later, more calls, a forward that is not
the same when it runs again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.errors import ReplayMismatchError
from tests.activations.cases import assert_same_bits
from tests.activations.remat.conftest import NO_PLAN_FITS

Context = Callable[[], AbstractContextManager[object]]
pytestmark = [pytest.mark.filterwarnings(NO_PLAN_FITS), pytest.mark.usefixtures("dear_ops", "quick_plans")]
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
"""Has the blocks do something else while it is not empty."""


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
    """What reads its statistics in a way that is not known."""


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


def test_single_ops_alone_are_run_again_where_that_is_asked_for() -> None:
    model = _model()
    plain = _step(model, nullcontext)
    for _ in range(6):
        found = _step(model, lambda: memkit.Rematerialize(0.4, TAG, min_bytes=0, policy="ops"))
        assert_same_bits(found, plain)
        stats = memkit.stats(TAG)
        assert stats.is_recorded
    assert stats.follows_plan
    assert stats.num_dropped > 0
