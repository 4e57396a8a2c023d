"""A measured step as a trace: against counts by hand, and against the trace of the same step without data."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.activations.budgeting import learning
from memkit.device import ReferenceDevice
from memkit.plan import StepTrace
from tests.activations.chains import UNIT_BYTES, leaf_on
from tests.contracts.test_interrupts import Blocks

U = UNIT_BYTES


@pytest.fixture
def observed(monkeypatch: pytest.MonkeyPatch) -> list[StepTrace]:
    """Return a list to which each measured step is added."""
    found: list[StepTrace] = []
    make_problem = learning.make_problem
    monkeypatch.setattr(
        learning, "make_problem", lambda trace, *args, **kwargs: found.append(trace) or make_problem(trace, *args, **kwargs)
    )
    return found


def _chain(x: Tensor) -> Tensor:
    x = x * 2  # saves nothing: 2 is a number
    x = x.sin()  # saves x * 2
    x = x.exp()  # saves its result
    return x.cos()  # saves that once more


def _train(x: Tensor, budget: str | float, count: int = 3) -> None:
    device = ReferenceDevice()
    for _ in range(count):
        with memkit.MemoryBudget(budget, "observed", min_bytes=0, device=device):
            loss = _chain(x)
        loss.sum().backward()
        del loss


def test_chain_by_hand(observed: list[StepTrace]) -> None:
    x = leaf_on(torch.device("cpu"))
    _train(x, "1GiB")
    (trace,) = observed

    assert [op.name for op in trace.ops[: trace.num_forward_ops]] == [
        "aten.mul.Tensor",
        "aten.sin.default",
        "aten.exp.default",
        "aten.cos.default",
    ]
    y, w = trace.step.saves[0], trace.step.saves[1]
    assert trace.step.saves == (y, w, w)
    assert [trace.step.lineage.num_bytes[value] for value in (y, w)] == [U, U]
    assert trace.step.uses == (w, w, y)
    assert trace.op_places == (0, 1, 2, 3)
    assert trace.save_places == (1, 3, 3)
    assert trace.use_places == (5, 6, 7)
    lifetime = trace.lifetimes[y]
    assert (lifetime.made_at, lifetime.released_at) == (0, 2)  # x * 2 is let go of when the sine is taken
    lifetime = trace.lifetimes[w]
    assert (lifetime.made_at, lifetime.released_at) == (2, 5)
    assert trace.lifetimes[w].freed_at < trace.lifetimes[y].freed_at <= len(trace.ops)
    assert len(trace.live_bytes) == len(trace.ops) == 4 + 1 + 3
    assert trace.base_bytes == 0
    # on the reference device a storage is counted from its save on: that of a sine before it runs, that of an exp after
    assert trace.live_bytes[:5] == (0, U, U, 2 * U, 2 * U)
    assert (trace.min_bytes, trace.target) == (0, "cpu")


@pytest.mark.parametrize("budget", ["1KiB", "2KiB", "1536B"])
@pytest.mark.filterwarnings("ignore:.*It is exceeded by as little as can be")
def test_step_that_is_measured_under_a_budget_is_told_as_the_plain_one(budget: str, observed: list[StepTrace]) -> None:
    """Dropped values are added, and values held to recompute them are left out."""
    x = leaf_on(torch.device("cpu"))
    _train(x, "1GiB")
    memkit.reset("observed")
    _train(x, budget)
    plain, held = observed

    assert held.step.saves == plain.step.saves
    assert held.step.uses == plain.step.uses
    assert held.lifetimes.keys() == plain.lifetimes.keys()
    assert held.live_bytes[: held.num_forward_ops] == plain.live_bytes[: plain.num_forward_ops]


def _convolutions() -> nn.Module:
    layers = (it for _ in range(3) for it in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1))


MODELS = {"blocks": (Blocks, (32, 16)), "convolutions": (_convolutions, (2, 4, 16, 16))}


@pytest.mark.parametrize("min_bytes", [0, 3000])
@pytest.mark.parametrize("name", MODELS)
def test_agrees_with_the_trace_of_the_step_without_data(name: str, min_bytes: int, observed: list[StepTrace]) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    device = ReferenceDevice()
    for _ in range(3):
        with memkit.MemoryBudget("1GiB", "agrees", min_bytes=min_bytes, device=device):
            loss = model(x).sum()
        loss.backward()
        del loss
    (trace,) = observed
    report = memkit.profile_memory(
        model, x, device="meta", backward=True, trace=True, target="cpu", min_bytes=min_bytes, print_table=False
    )
    meta = report.trace

    assert _saved(trace) == _saved(meta)
    assert _asked(trace) == _asked(meta)
    assert max(trace.live_bytes) >= sum(num_bytes for _, num_bytes in set(_saved(trace)))


def _saved(trace: StepTrace) -> list[tuple[int, int]]:
    """Return the number of each save's distinct value, and its bytes."""
    numbers: dict[int, int] = {}
    sizes = trace.step.lineage.num_bytes
    return [(numbers.setdefault(value, len(numbers)), sizes[value]) for value in trace.step.saves]


def _asked(trace: StepTrace) -> list[int]:
    """Return the number of each request's distinct saved value."""
    numbers = {value: number for number, value in enumerate(dict.fromkeys(trace.step.saves))}
    return [numbers[value] for value in trace.step.uses]
