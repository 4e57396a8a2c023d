"""Wrong arguments raise at once, say what was found and what to do, and leave nothing behind."""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

import memkit
from memkit.activations.context import ForwardContext
from memkit.device import ReferenceDevice
from memkit.errors import BudgetInfeasible
from tests.activations.cases import assert_same_bits
from tests.activations.chains import leaf_on, step
from tests.activations.remat.conftest import NO_PLAN_FITS
from tests.interrupts import hooks_around


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"budget": 12}, ValueError, r'budget=12 reads as 12 bytes or as 12 GiB\. Write "12B" or "12GiB"'),
        ({"budget": 0}, ValueError, "budget must be more than 0 bytes; found"),
        ({"budget": 0.0}, ValueError, "above 0 and at most 1; found 0.0"),
        ({"budget": 1.5}, ValueError, 'above 0 and at most 1; found 1.5. For bytes write "1.5B" or "1.5GiB"'),
        ({"budget": math.nan}, ValueError, "above 0 and at most 1; found nan"),
        ({"budget": "12"}, ValueError, "budget='12' reads as 12 bytes or as 12 GiB"),
        ({"budget": "much"}, ValueError, "budget is .*much"),
        ({"budget": "-2GiB"}, ValueError, "budget is .*-2GiB"),
        ({"budget": "0.5"}, ValueError, "has no unit of bytes. For a share of the plain step's peak write the float 0.5"),
        ({"budget": True}, TypeError, "found True"),
        ({"budget": None}, TypeError, "found None"),
        ({"tag": 3}, TypeError, "tag is a string; found int"),
        ({"limit": "used"}, ValueError, 'limit is "allocated" or "reserved"; found \'used\''),
        ({"limit": None}, ValueError, "limit is .*; found None"),
        ({"plan": "all"}, TypeError, "plan is a MemoryPlan, as MemoryBudget.plan is; found str"),
        (
            {"plan": memkit.plan.plan_ratio([8], 0.5, window_bytes=0)},
            TypeError,
            "plan is a MemoryPlan, as MemoryBudget.plan is; found Plan",
        ),
        ({"optimizer": "adamw"}, TypeError, r"optimizer is a torch.optim.Optimizer, or None; found str"),
        ({"optimizer": torch.optim.AdamW}, TypeError, r"optimizer is a torch.optim.Optimizer, or None; found type"),
        ({"min_bytes": -1}, ValueError, "min_bytes is a number of bytes, 0 or more; found -1"),
        ({"min_bytes": 1.5}, TypeError, 'min_bytes is a number of bytes, or text such as "8GiB"; found 1.5'),
        ({"strict": "yes"}, TypeError, "strict is True or False; found 'yes'"),
        ({"device": 0}, TypeError, 'device is a name such as "cuda:1", a torch.device or a memkit.device.Device; found int'),
        ({"device": "gpu"}, ValueError, "device must be the name of a torch.device, such as \"cuda:1\"; found 'gpu'"),
    ],
)
def test_argument(options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        memkit.MemoryBudget(**{"budget": 0.5, **options})


Make = Callable[[str], ForwardContext]
DEVICE = ReferenceDevice()
KINDS: dict[str, Make] = {
    "CPUOffload": lambda tag: memkit.CPUOffload(0.5, tag, min_bytes=0, device=DEVICE),
    "Rematerialize": lambda tag: memkit.Rematerialize(0.5, tag, min_bytes=0, device=DEVICE),
    "MemoryBudget": lambda tag: memkit.MemoryBudget(0.5, tag, min_bytes=0, device=DEVICE),
}


@pytest.mark.filterwarnings("ignore:.*no memory apart from the host")
@pytest.mark.parametrize(
    ("outer", "inner", "message"),
    [
        ("CPUOffload", "MemoryBudget", r'inside a CPUOffload \(tag "out"\), which plans for .*Use one of the two'),
        ("Rematerialize", "MemoryBudget", r'inside a Rematerialize \(tag "out"\), which plans.*Use one of the two'),
        ("MemoryBudget", "MemoryBudget", r'inside another MemoryBudget \(tag "out"\), which plans'),
        ("MemoryBudget", "CPUOffload", r'inside a MemoryBudget \(tag "out"\), which plans.*memkit\.offload'),
        ("MemoryBudget", "Rematerialize", r'inside a MemoryBudget \(tag "out"\), which .*one budget.*memkit\.keep'),
        ("Rematerialize", "CPUOffload", r'inside a Rematerialize \(tag "out"\), .*Put CPUOffload around it'),
        ("Rematerialize", "Rematerialize", r'inside another Rematerialize \(tag "out"\): one budget'),
    ],
)
def test_nested(outer: str, inner: str, message: str) -> None:
    """The error names both; the steps after it are exact."""
    x, plain = leaf_on(torch.device("cpu")), step(leaf_on(torch.device("cpu")), [1] * 6)
    for _ in range(5):
        step(x, [1] * 6, lambda: KINDS[outer]("out"))
    hooks = hooks_around()
    with KINDS[outer]("out"), pytest.raises(ValueError, match=rf'^{inner} \(tag "in"\) .*{message}'):
        KINDS[inner]("in").__enter__()

    assert hooks_around() == hooks
    for tag, kind in (("in", inner), ("out", outer)):
        assert_same_bits(step(x, [1] * 6, lambda: KINDS[kind](tag)), plain)  # noqa: B023
    DEVICE.synchronize()


# Budgets that cannot be kept to


def test_more_than_the_device_has() -> None:
    device = ReferenceDevice()
    device.capacity_bytes = 2**20
    context = memkit.MemoryBudget("2MiB", "more", device=device)
    with pytest.raises(
        ValueError, match=r"within what this process can have of the device, 1\.00 MiB; found 2\.00 MiB\. Lower"
    ):
        context.__enter__()

    with memkit.MemoryBudget("1MiB", "as much", device=device):
        pass


LEAST = (
    r"a budget of .* cannot be kept to: the smallest that a plan was found for is 2\.00 KiB, .*"
    r"Most is there while .* runs: .* of gradients and temporaries, .* of saved values"
)


def test_below_the_floor_raises_if_strict() -> None:
    device = ReferenceDevice()
    x = leaf_on(device.torch_device)
    for _ in range(2):
        step(x, [1] * 8, lambda: memkit.MemoryBudget("1KiB", "strict", min_bytes=0, strict=True, device=device))

    with pytest.raises(BudgetInfeasible, match=LEAST) as caught:
        step(x, [1] * 8, lambda: memkit.MemoryBudget("1KiB", "strict", min_bytes=0, strict=True, device=device))

    assert caught.value.smallest_bytes > 2**10
    asked = caught.value.smallest_bytes
    plain = step(leaf_on(device.torch_device), [1] * 8)
    for _ in range(2):
        context = memkit.MemoryBudget(f"{asked}B", "strict", min_bytes=0, strict=True, device=device)
        assert_same_bits(step(x, [1] * 8, lambda: context), plain)  # noqa: B023
    stats = memkit.stats("strict")
    assert stats.follows_plan
    assert stats.step_peak_bytes <= asked


def test_below_the_floor_warns_once_if_not() -> None:
    device = ReferenceDevice()
    x, plain = leaf_on(device.torch_device), step(leaf_on(device.torch_device), [1] * 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(6):
            context = memkit.MemoryBudget("1KiB", "warned", min_bytes=0, device=device)
            assert_same_bits(step(x, [1] * 8, lambda: context), plain)  # noqa: B023

    (warning,) = caught
    assert str(warning.message).startswith('MemoryBudget (tag "warned"): a budget of 1.00 KiB cannot be kept to')
    assert str(warning.message).endswith(". It is exceeded by as little as can be.")
    stats = memkit.stats("warned")
    assert stats.predicted_peak_bytes == stats.min_budget_bytes


def test_module_that_fills_most_is_named() -> None:
    device = ReferenceDevice()
    wide = nn.Sequential(nn.Linear(16, 1024), nn.GELU(), nn.Tanh(), nn.Linear(1024, 16))
    model = nn.Sequential(OrderedDict(narrow=nn.Linear(16, 16), wide=wide, last=nn.GELU()))
    x = torch.randn(64, 16, requires_grad=True)
    for _ in range(2):
        with memkit.MemoryBudget("1KiB", "named", min_bytes=0, strict=True, device=device):
            loss = model(x).sum()
        loss.backward()
    with pytest.raises(BudgetInfeasible, match=r"Most is there in wide\.\d, while .* runs"):
        memkit.MemoryBudget("1KiB", "named", min_bytes=0, strict=True, device=device).__enter__()


@pytest.mark.filterwarnings(NO_PLAN_FITS)
@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ([1] * 6, "its ops read or make other values"),
        ([1] * 4, "it has 6 saves, this one 4"),
        ([1, 1, 2, 1, 1, 1], r"save 2 is value \d+ of 1\.00 KiB there, and value \d+ of 2\.00 KiB here"),
    ],
)
def test_plan_of_another_step(other: list[int], difference: str) -> None:
    device = ReferenceDevice()
    x = leaf_on(device.torch_device)
    for units, tag in (([1] * 6, "one"), (other, "other")):
        for _ in range(3):
            step(x, units, lambda: memkit.MemoryBudget("1MiB", tag, min_bytes=0, device=device))  # noqa: B023
    plan = memkit.MemoryBudget("1MiB", "one").plan
    if other == [1] * 6:
        plan = replace(plan, step=replace(plan.step, ops_digest="of others"))

    with pytest.raises(ValueError, match=f"this plan is for another step: {difference}. Plan this step anew"):
        step(x, other, lambda: memkit.MemoryBudget("1MiB", "other", plan=plan, min_bytes=0, device=device))
    assert_same_bits(
        step(x, other, lambda: memkit.MemoryBudget("1MiB", "other", min_bytes=0, device=device)),
        step(leaf_on(device.torch_device), other),
    )
