"""How many Python functions of memkit, apart from its devices, each feature calls in a steady step: each is time of the host.

The numbers are those of today: a change may lower them, and then writes the lower ones here.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import memkit
from memkit.activations.recomputing import region_plan
from memkit.activations.recomputing.regions import Regions, RegionSpec
from memkit.device import ReferenceDevice
from memkit.plan import Action
from tests.activations.budgeting.plans import plan_of_some
from tests.activations.remat.conftest import NO_PLAN_FITS
from tests.calls import is_counted, num_calls

Context = Callable[[], AbstractContextManager[object]]
pytestmark = pytest.mark.filterwarnings(NO_PLAN_FITS)
_NUM_BLOCKS = 12


class Calls(NamedTuple):
    """Of one step: what making and entering the context takes, what leaving it takes, and each unit of what it moves."""

    enter: int
    leave: int
    forward: float
    backward: float

    def is_within(self, most: Calls) -> bool:
        return all(found <= bound for found, bound in zip(self, most, strict=True))


def _blocks(num_blocks: int = _NUM_BLOCKS) -> nn.Sequential:
    layers = (lambda: nn.LayerNorm(32), lambda: nn.Linear(32, 64), nn.GELU, lambda: nn.Linear(64, 32))
    return nn.Sequential(*[nn.Sequential(*[make() for make in layers]) for _ in range(num_blocks)])


def _calls_of_a_step(model: nn.Module, context: Context, num_steps: int, num_units: Callable[[], int]) -> Calls:
    x, losses = torch.randn(8, 32), []
    for _ in range(num_steps):
        with context():
            loss = model(x).sum()
        loss.backward()
    with ExitStack() as stack:
        enter = num_calls(lambda: stack.enter_context(context()))
        forward = num_calls(lambda: losses.append(model(x).sum()))
        leave = num_calls(stack.close)
    backward = num_calls(losses[0].backward)
    units = num_units()
    return Calls(enter, leave, round(forward / units, 1), round(backward / units, 1))


def test_calls_of_a_moved_storage() -> None:
    device = ReferenceDevice()
    found = _calls_of_a_step(
        _blocks(),
        lambda: memkit.CPUOffload(1.0, "moved", min_bytes=1, window_bytes=0, device=device),
        5,
        lambda: memkit.stats("moved").num_copies_out,
    )

    assert found.is_within(Calls(60, 30, 20.9, 13.4)), found


def test_calls_of_what_stays() -> None:
    device = ReferenceDevice()
    found = _calls_of_a_step(
        _blocks(),
        lambda: memkit.CPUOffload(0.01, "stays", min_bytes=1, window_bytes=0, device=device),
        5,
        lambda: _NUM_BLOCKS,
    )

    assert found.is_within(Calls(60, 30, 26.5, 16.4)), found


def _calls_of_a_plan(action: Action, every: int, num_blocks: int = _NUM_BLOCKS) -> Calls:
    """Of each value that leaves."""
    device, plans, model = ReferenceDevice(), list[Any](), _blocks(num_blocks)

    def context() -> memkit.MemoryBudget:
        plan = plans[0] if plans else None
        return memkit.MemoryBudget(1.0, "budget", min_bytes=1, device=device, plan=plan)

    memkit.reset("budget")
    _calls_of_a_step(model, context, 4, lambda: 1)
    plans.append(plan_of_some("budget", action, every))
    units = {
        Action.OFFLOAD: lambda: memkit.stats("budget").num_copies_out,
        Action.RECOMPUTE: lambda: memkit.stats("budget").num_dropped,
    }
    found = _calls_of_a_step(model, context, 9, units[action])
    stats = memkit.stats("budget")
    assert (stats.follows_plan, stats.num_deviations) == (True, 0)
    return found


@pytest.mark.parametrize(
    ("action", "every", "most"),
    [
        (Action.OFFLOAD, 1, Calls(239, 45, 11.5, 13.5)),
        (Action.OFFLOAD, 10, Calls(239, 45, 39.7, 35.9)),  # about 3 for each of the others, which stay
        (Action.RECOMPUTE, 10, Calls(212, 50, 200, 187)),
    ],
)
def test_calls_of_a_known_plan(action: Action, every: int, most: Calls) -> None:
    """By single ops, where it recomputes."""
    found = _calls_of_a_plan(action, every)

    assert found.is_within(most), found


@pytest.mark.slow
def test_calls_of_a_chain_of_drops_are_as_many_whatever_its_length() -> None:
    short, long = (_calls_of_a_plan(Action.RECOMPUTE, 1, num_blocks) for num_blocks in (4, 16))

    assert long.forward <= 1.1 * short.forward
    assert long.backward <= 1.1 * short.backward


def test_calls_of_a_budget_that_everything_fits_in() -> None:
    """In each step the shapes of the inputs are looked at."""
    model, device = _blocks(), ReferenceDevice()
    optimizer = torch.optim.SGD(model.parameters())
    context = lambda: memkit.MemoryBudget("1GiB", tag="fits", optimizer=optimizer, min_bytes=1, device=device)  # noqa: E731
    found = _calls_of_a_step(model, context, 6, lambda: _NUM_BLOCKS)

    assert not memkit.stats("fits").is_recorded
    assert found.is_within(Calls(80, 17, 0.8, 0)), found


@pytest.mark.parametrize("budget", [1.0, "1GiB", 0.5])
def test_calls_of_rematerialize(budget: float | str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_plan, "_seconds_of_ops", lambda *_: 1e9)  # regions pay, whatever this machine takes for an op
    device, most = ReferenceDevice(), {1.0: Calls(56, 14, 0, 0), "1GiB": Calls(63, 15, 20, 10), 0.5: Calls(302, 36, 8.1, 12.8)}
    found = _calls_of_a_step(
        _blocks(),
        lambda: memkit.Rematerialize(budget, tag="remat", min_bytes=1, device=device),
        6,
        lambda: _NUM_BLOCKS,
    )
    stats = memkit.stats("remat")

    assert not stats.is_recorded
    assert (stats.num_replays > 0) == (budget == 0.5)
    assert found.is_within(most[budget]), found


def test_calls_of_a_region() -> None:
    model = _blocks()
    regions = {block: RegionSpec() for block in model}
    found = _calls_of_a_step(model, lambda: Regions(regions), 2, lambda: _NUM_BLOCKS)

    assert found.is_within(Calls(539, 5, 19.2, 28.2)), found


@pytest.mark.parametrize(("train", "most"), [("frozen", 59), ("host", 101.6), ("fused", 518.4)])
def test_calls_of_a_streamed_layer(train: str, most: float) -> None:
    device, blocks = ReferenceDevice(), _blocks()
    model = nn.Sequential(nn.Linear(32, 32), blocks.requires_grad_(train != "frozen"))
    options: dict[str, Any] = {"optimizer": torch.optim.SGD} if train == "fused" else {}
    x = torch.randn(8, 32)

    def step() -> None:
        model(x).sum().backward()
        model.zero_grad()

    with memkit.LayerOffload(model, list(blocks), num_resident=0, train=train, device=device, **options):
        for _ in range(6):
            step()
        found = num_calls(step) / _NUM_BLOCKS

    assert found <= most, found


@pytest.mark.parametrize(
    ("update", "when", "most", "in_thread"),
    [("device", "step", 100.5, 0), ("host", "step", 96, 32), ("device", "backward", 142.8, 0)],
)
def test_calls_of_a_piece_of_states(update: str, when: str, most: float, in_thread: float) -> None:
    """In the thread of the caller, and in that of steps on the host."""
    device, parameters = ReferenceDevice(), [nn.Parameter(torch.ones(32, 32)) for _ in range(_NUM_BLOCKS)]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, fused=True)
    found, is_steady = Counter[bool](), False

    def profile(frame: FrameType, event: str, _: object) -> None:
        if is_steady and event == "call" and is_counted(frame):
            found[threading.current_thread() is threading.main_thread()] += 1

    def step() -> None:
        torch.stack([parameter.square().sum() for parameter in parameters]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    threading.setprofile(profile)  # for threads to come
    try:
        with memkit.StateOffload(optimizer, update=update, when=when, device=device):
            for _ in range(5):
                step()
            is_steady = True
            sys.setprofile(profile)
            step()
            sys.setprofile(None)
            is_steady = False
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    found_calls = found[True] / _NUM_BLOCKS, found[False] / _NUM_BLOCKS
    assert found_calls[0] <= most, found_calls
    assert found_calls[1] <= in_thread, found_calls
