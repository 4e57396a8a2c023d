"""Wrong arguments raise at once, say what was found and what to do, and leave nothing behind."""

from __future__ import annotations

import math

import pytest
import torch

import memkit


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"budget": 0}, ValueError, "budget must be more than 0 bytes; found"),
        ({"budget": -1}, ValueError, "budget must be more than 0 bytes; found -1"),
        ({"budget": 0.0}, ValueError, "above 0 and at most 1; found 0.0"),
        ({"budget": 1.5}, ValueError, 'above 0 and at most 1; found 1.5. For bytes write "1.5B" or "1.5GiB"'),
        ({"budget": math.nan}, ValueError, "above 0 and at most 1; found nan"),
        ({"budget": "much"}, ValueError, "budget is .*much"),
        ({"budget": "-2GiB"}, ValueError, "budget is .*-2GiB"),
        (
            {"budget": "0.5"},
            ValueError,
            r'budget="0.5" has no unit of bytes. For a share of the saved bytes that stays write the float 0.5',
        ),
        ({"budget": True}, TypeError, "found True"),
        ({"budget": None}, TypeError, "found None"),
        ({"budget": 1j}, TypeError, "found 1j"),
        ({"tag": 3}, TypeError, "tag is a string; found int"),
        ({"policy": "lru"}, ValueError, 'needs policy="plan", "ops" or "dtr"; found \'lru\'. Omit it to'),
        ({"plan": "all"}, TypeError, "plan is a memkit.plan.Plan, as Rematerialize.plan is; found str"),
        ({"score": 0.5}, TypeError, "score is a memkit.plan.DTRScore; found float"),
        ({"min_bytes": -1}, ValueError, "min_bytes is a number of bytes, 0 or more; found -1"),
        ({"min_bytes": 1.5}, TypeError, 'min_bytes is a number of bytes, or text such as "8GiB"; found 1.5'),
        ({"strict": "yes"}, TypeError, "strict is True or False; found 'yes'"),
        ({"verify": 3}, TypeError, "verify is True or False; found 3"),
        ({"device": 0}, TypeError, 'device is a name such as "cuda:1", a torch.device or a memkit.device.Device; found int'),
        ({"device": "gpu"}, ValueError, "device must be the name of a torch.device, such as \"cuda:1\"; found 'gpu'"),
        ({"device": torch.device("xpu")}, ValueError, 'memkit runs on "cpu" and "cuda"; found "xpu"'),
    ],
)
def test_argument(options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        memkit.Rematerialize(**{"budget": 0.5, **options})


@pytest.mark.parametrize(
    ("budget", "wanted"), [(4096, 4096), (1.0, 1.0), ("8GiB", 8 * 2**30), ("1.5 MiB", 3 * 2**19), (2**40, 2**40)]
)
def test_budgets(budget: float | str, wanted: float) -> None:
    assert memkit.Rematerialize(budget).budget == wanted


@pytest.mark.parametrize("name", ["keep", "recompute"])
@pytest.mark.parametrize("thing", [None, 3, (torch.ones(2), torch.ones(2))])
def test_words_are_about_tensors(name: str, thing: object) -> None:
    wanted = rf"memkit\.{name} takes one tensor; found {type(thing).__name__}"
    with pytest.raises(TypeError, match=wanted):
        getattr(memkit, name)(thing)
    with memkit.Rematerialize(0.5, "words"), pytest.raises(TypeError, match=wanted):
        getattr(memkit, name)(thing)


def test_context_that_raised_at_entry_can_be_entered_later() -> None:
    context = memkit.Rematerialize(0.5, "later")
    with memkit.Rematerialize(0.5, "other"), pytest.raises(ValueError, match="inside another"):
        context.__enter__()

    with context:
        pass
    assert torch._C._len_torch_dispatch_stack() == 0
