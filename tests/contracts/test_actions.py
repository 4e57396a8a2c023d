"""Any mix of keep, offload and recompute over the saves of a step: exact, without a race, and with the expected bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

import memkit
from memkit.activations.recomputing.recorded_forward import RecordedForward
from memkit.activations.saved.records import Ledger, Record
from memkit.device import CpuDevice, Device
from memkit.plan import Action
from tests.activations.cases import assert_same_bits
from tests.activations.chains import UNIT_BYTES, UNIT_NUMEL, leaf_on
from tests.activations.conftest import DEVICES, open_test_device
from tests.activations.remat.conftest import NO_PLAN_FITS
from tests.contracts.contexts import KINDS, MORE_KINDS, Around

pytestmark = pytest.mark.filterwarnings(NO_PLAN_FITS)

WORDS = {Action.KEEP: memkit.keep, Action.OFFLOAD: memkit.offload, Action.RECOMPUTE: memkit.recompute}
ALL_KINDS = KINDS | MORE_KINDS
UNITS = [1, 2, 1, 3, 1, 2, 1, 1]

marks = st.lists(st.sampled_from([None, *Action]), min_size=len(UNITS), max_size=len(UNITS))
plans = st.lists(st.sampled_from(list(Action)), min_size=len(UNITS), max_size=len(UNITS))


def _marked_chain(x: Tensor, actions: list[Action | None]) -> Tensor:
    """Let autograd save one storage for each action, of so many units, and nothing else."""
    for num_units, action in zip(UNITS, actions, strict=True):
        x = x.repeat(num_units)[: num_units * UNIT_NUMEL].clone()
        if action is not None:
            WORDS[action](x)
        x = x.sin()
    return x


def _step(x: Tensor, actions: list[Action | None], context: AbstractContextManager[object]) -> list[Tensor]:
    x.grad = None
    with context:
        y = _marked_chain(x, actions)
    y.sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad]


def _bytes(actions: list[Action | None] | list[Action], action: Action) -> int:
    return UNIT_BYTES * sum(units for units, asked in zip(UNITS, actions, strict=True) if asked is action)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """Return each device on which something can move."""
    found = open_test_device(request.param)
    yield found
    found.synchronize()
    memkit.reset("actions")


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=marks, name=st.sampled_from(sorted(ALL_KINDS)))
def test_marks_are_exact_in_every_context(device: Device, actions: list[Action | None], name: str) -> None:
    x = leaf_on(device.torch_device)
    wanted = _step(x, actions, nullcontext())

    for _ in range(4):
        assert_same_bits(_step(x, actions, ALL_KINDS[name].make(device, "actions")), wanted)
    memkit.reset("actions")


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=plans)
def test_plan_of_all_actions_moves_and_drops_what_it_says(device: Device, actions: list[Action]) -> None:
    x = leaf_on(device.torch_device)
    wanted = _step(x, [None] * len(UNITS), nullcontext())

    def run(plan: memkit.plan.Plan | None) -> list[Tensor]:
        context = memkit.Rematerialize(1.0, "actions", plan=plan, min_bytes=0, device=device)
        return _step(x, [None] * len(UNITS), context)

    for _ in range(2):
        run(None)
    plan = memkit.Rematerialize(1.0, "actions").plan
    assert plan is not None
    for index, action in enumerate(actions):
        plan = plan.with_action(index, action)

    for _ in range(3):
        assert_same_bits(run(plan), wanted)
        stats = memkit.stats("actions")
        assert (stats.moved_out_bytes or 0) == plan.offload_bytes
        assert plan.offload_bytes == _bytes(actions, Action.OFFLOAD)
        assert stats.num_dropped == actions.count(Action.RECOMPUTE)
        assert stats.num_replays <= stats.num_dropped  # one may make several
        assert (stats.moved_in_bytes or 0) <= plan.offload_bytes
    memkit.reset("actions")


def test_marks_of_rematerialize_move_and_drop_what_they_say(device: Device) -> None:
    actions: list[Action | None] = [Action.OFFLOAD, None, Action.RECOMPUTE, Action.OFFLOAD, None, Action.RECOMPUTE, None, None]
    x = leaf_on(device.torch_device)
    for _ in range(3):
        _step(x, actions, memkit.Rematerialize(1.0, "actions", min_bytes=0, device=device))

        stats = memkit.stats("actions")
        assert stats.moved_out_bytes == _bytes(actions, Action.OFFLOAD)
        assert stats.dropped_bytes >= _bytes(actions, Action.RECOMPUTE)  # a plan also drops values that others bring along
    plan = memkit.Rematerialize(1.0, "actions").plan
    assert plan is not None
    for planned, asked in zip(plan.saves, actions, strict=True):
        assert planned.action is asked or asked is None


def test_marks_of_an_offload_move_and_keep_what_they_say(device: Device) -> None:
    actions: list[Action | None] = [Action.KEEP, None, Action.KEEP, None, None, Action.OFFLOAD, None, None]
    x = leaf_on(device.torch_device)
    for ratio, wanted in (
        (0.0, _bytes(actions, Action.OFFLOAD)),
        (1.0, UNIT_BYTES * sum(UNITS) - _bytes(actions, Action.KEEP)),
    ):
        for _ in range(3):
            _step(x, actions, memkit.CPUOffload(ratio, "actions", min_bytes=0, window_bytes=0, device=device))

        assert memkit.stats("actions").moved_out_bytes == wanted
        memkit.reset("actions")


@pytest.mark.parametrize("is_saved", [False, True])
def test_what_is_marked_to_leave_is_let_go_where_the_ratio_moves_nothing(is_saved: bool, device: Device) -> None:
    """Also if the mark comes after the save. Tensors marked to stay are not counted twice."""
    for _ in range(3):
        x = leaf_on(device.torch_device)
        with memkit.CPUOffload(0.0, "actions", min_bytes=0, window_bytes=0, device=device):
            for word in (memkit.offload, memkit.offload, memkit.keep, memkit.keep):
                x = x.mul(2)
                made = x
                if not is_saved:
                    word(made)
                x = x.sin()
                if is_saved:
                    word(made)
                del made
        device.synchronize()

        assert memkit.stats("actions").live_bytes == 2 * UNIT_BYTES
        assert memkit.stats("actions").moved_out_bytes == 2 * UNIT_BYTES
        x.sum().backward()


def test_offload_makes_again_what_it_is_asked_to_from_the_next_forward_on(device: Device) -> None:
    actions: list[Action | None] = [None, None, Action.RECOMPUTE, None, None, Action.RECOMPUTE, None, None]
    x = leaf_on(device.torch_device)
    for number in range(3):
        _step(x, actions, memkit.CPUOffload(1.0, "actions", min_bytes=0, window_bytes=0, device=device))

        stats = memkit.stats("actions")
        dropped_bytes = _bytes(actions, Action.RECOMPUTE) if number else 0
        assert (stats.dropped_bytes or 0) == dropped_bytes
        assert stats.moved_out_bytes == UNIT_BYTES * sum(UNITS) - dropped_bytes


def test_recorded_offload_gives_way_to_a_context_of_the_users(device: Device) -> None:
    x = leaf_on(device.torch_device)
    wanted = _step(x, [None] * len(UNITS), nullcontext())
    with memkit.CPUOffload(1.0, "actions", min_bytes=0, device=device):
        memkit.recompute(x.clone())

    for _ in range(3):
        outer = memkit.CPUOffload(0.5, "actions", min_bytes=0, device=device)
        inner = memkit.Rematerialize(0.5, "inside", min_bytes=0, device=device)
        assert_same_bits(_step(x, [None] * len(UNITS), Around(outer, inner)), wanted)
    memkit.reset("inside")


def test_nothing_moves_where_there_is_no_other_memory() -> None:
    x = leaf_on(torch.device("cpu"))
    context = memkit.Rematerialize(1.0, "actions", min_bytes=0, device=CpuDevice())

    with pytest.warns(UserWarning, match="saved tensors stay: the CPU has no memory apart from"):
        _step(x, [Action.OFFLOAD] * len(UNITS), context)

    assert not memkit.stats("actions").moved_out_bytes
    memkit.reset("actions")


@pytest.mark.parametrize("budget", [0.8, 0.5])
def test_each_byte_crosses_once_each_way_around_a_rematerialize(budget: float, device: Device) -> None:
    """Bytes that a replay reads from host memory serve the later request as well."""
    x = leaf_on(device.torch_device)
    plain = _step(x, [None] * len(UNITS), nullcontext())
    for _ in range(4):
        outer = memkit.CPUOffload(0.5, "actions", min_bytes=0, window_bytes=0, device=device)
        inner = memkit.Rematerialize(budget, "inside", min_bytes=0, device=device)
        assert_same_bits(_step(x, [None] * len(UNITS), Around(outer, inner)), plain)

        stats, inside = memkit.stats("actions"), memkit.stats("inside")
        assert 0 < stats.moved_out_bytes <= UNIT_BYTES * sum(UNITS) - inside.dropped_bytes
        assert stats.moved_in_bytes <= stats.moved_out_bytes
    plan = memkit.Rematerialize(budget, "inside").plan
    assert plan is not None
    assert plan.offload_bytes == stats.moved_out_bytes
    assert "the context outside moves it" in plan.explain()
    memkit.reset("inside")


@pytest.mark.parametrize(("ratio", "word"), [(0.0, memkit.offload), (1.0, memkit.keep)])
def test_marks_count_for_what_a_tensor_wraps(ratio: float, word: Callable[[Tensor], Tensor], device: Device) -> None:
    """Of two saved tensors one is marked, and goes against the ratio."""
    for _ in range(3):
        parts = [torch.linspace(0, 1, UNIT_NUMEL, device=device.torch_device) for _ in range(2)]
        x = TwoTensor(*parts).requires_grad_()
        with memkit.CPUOffload(ratio, "actions", min_bytes=0, window_bytes=0, device=device):
            loss = x.mul(2).sin().sum() + word(x.mul(3)).sin().sum()
        loss.backward()

    assert memkit.stats("actions").moved_out_bytes == 2 * UNIT_BYTES


@pytest.mark.parametrize("outside", [True, False])
def test_what_a_replay_reads_from_host_memory_is_fetched_ahead_of_it(
    outside: bool, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second backward on: the first shows the order of the replays' reads. Its own request comes much later."""
    events: list[str] = []
    make, fetch = RecordedForward.make, Ledger.fetch

    def watched_make(forward: RecordedForward, record: Record) -> None:
        events.append("replay begins")
        make(forward, record)
        events.append("replay ends")

    def watched_fetch(ledger: Ledger, record: Record) -> None:
        fetch(ledger, record)
        events.append("fetched")

    def run(context: AbstractContextManager[object]) -> list[Tensor]:
        x.grad = None
        with context:
            early = memkit.offload(x.exp())
            y = early
            for _ in range(8):
                y = memkit.offload(y.clone()).sin()
            late = memkit.recompute((early * 1.5).exp())
            y = y + late.sin()
            for _ in range(6):
                y = (memkit.keep if outside else memkit.offload)(y.clone()).sin()
        del early, late  # else they are there anyway
        y.sum().backward()
        return [y.detach(), x.grad]

    monkeypatch.setattr(RecordedForward, "make", watched_make)
    monkeypatch.setattr(Ledger, "fetch", watched_fetch)
    x = leaf_on(device.torch_device)
    plain = run(nullcontext())
    for _ in range(4):
        inner = memkit.Rematerialize(1.0, "actions", policy="dtr", min_bytes=0, device=device)  # a plan may hold the product
        outer = memkit.CPUOffload(0.0, "outside", min_bytes=0, window_bytes=4 * UNIT_BYTES, device=device)
        events.clear()
        assert_same_bits(run(Around(outer, inner) if outside else inner), plain)

    assert memkit.stats("actions").num_replayed_ops == 2  # the product and the exponential
    begin, end = events.index("replay begins"), events.index("replay ends")
    assert "fetched" in events[:begin]
    assert "fetched" not in events[begin:end]
    memkit.reset("outside")
