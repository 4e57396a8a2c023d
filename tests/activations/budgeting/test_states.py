"""The forecast of an optimizer's state bytes equals the states' actual bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memkit
from memkit.activations.budgeting.limits import UNKNOWN_STATE_BYTES, ComingStates, Limits, coming_state_bytes
from memkit.device import ReferenceDevice


def _parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((64, 32), (128,), (7, 3))]


def _step(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_states_that_are_yet_to_come() -> None:
    params, joined = _parameters(), torch.optim.AdamW(_parameters()[:1])
    params[0].requires_grad_(False)
    _step(joined)
    joined.add_param_group({"params": [nn.Parameter(torch.zeros(10))]})
    of_two_dtypes = torch.optim.AdamW([nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))])

    assert coming_state_bytes(torch.optim.Adagrad(_parameters())) == 0  # which has them from the start
    assert coming_state_bytes(torch.optim.AdamW(params)) == 2 * 4 * (128 + 21)
    assert coming_state_bytes(joined) == 2 * 4 * 10
    assert coming_state_bytes(of_two_dtypes) == 8 * 2 * (4 + 2)


def test_only_what_is_on_the_device_is_left_free_for() -> None:
    there, elsewhere = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(100, device="meta"))
    optimizer = torch.optim.AdamW([there, elsewhere])
    coming, untold = ComingStates(optimizer), ComingStates(None)
    untold.note_trained([there, elsewhere])

    assert coming_state_bytes(optimizer, "cpu") == coming.num_bytes("cpu") == untold.num_bytes("cpu") == 2 * 4 * 8
    assert coming_state_bytes(optimizer) == coming.num_bytes() == untold.num_bytes() == 2 * 4 * 108
    assert coming.num_bytes("cuda") == untold.num_bytes("cuda") == 0


@pytest.mark.parametrize("budget", [0, "1MiB"])
def test_of_states_that_a_state_offload_has_only_those_that_stay_come(budget: int | str) -> None:
    optimizer = torch.optim.AdamW(_parameters())
    needed = coming_state_bytes(optimizer)

    with memkit.StateOffload(optimizer, device_budget=budget, device=ReferenceDevice()) as states:
        assert coming_state_bytes(optimizer) == states.plan.resident_bytes
        assert needed <= states.plan.resident_bytes if budget else states.plan.resident_bytes == 0
        _step(optimizer)
        assert coming_state_bytes(optimizer) == 0
    later = torch.optim.AdamW(_parameters())
    memkit.StateOffload(later, device=ReferenceDevice()).close()
    assert coming_state_bytes(later) == needed > 0


class FailsAtItsStep(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("injected")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_cannot_be_tried_is_counted_as_eight_bytes_an_element(dtype: torch.dtype) -> None:
    numel = sum(parameter.numel() for parameter in _parameters())

    assert coming_state_bytes(FailsAtItsStep(_parameters(dtype), lr=0.1)) == UNKNOWN_STATE_BYTES * numel


# As they are left free for, step by step


def test_without_an_optimizer_eight_bytes_are_left_free_until_a_parameter_changes() -> None:
    params = _parameters()
    params[1].requires_grad_(False)
    coming = ComingStates(None)
    assert coming.num_bytes() == 0  # no forward has read any
    coming.note_trained(params)
    assert coming.num_bytes() == UNKNOWN_STATE_BYTES * (64 * 32 + 21)  # frozen ones have none
    with torch.no_grad():
        params[0].add_(1)  # an optimizer may have been given some of them only

    assert coming.num_bytes() == 0
    coming.note_trained(params)  # as those of another forward
    assert coming.num_bytes() == 0


def test_an_optimizer_counts_until_it_has_states() -> None:
    optimizer = torch.optim.AdamW(_parameters())
    coming = ComingStates(optimizer)
    assert coming.is_of(optimizer)
    assert not coming.is_of(None)
    assert not coming.is_of(torch.optim.AdamW(_parameters()))
    assert ComingStates(None).is_of(None)
    assert coming.num_bytes() == coming_state_bytes(optimizer) > 0
    coming.note_trained(_parameters())  # which it is asked for itself
    assert coming.num_bytes() == coming_state_bytes(optimizer)
    _step(optimizer)

    assert coming.num_bytes() == 0


def _limits(**options: Any) -> Limits:
    asked = {"budget": 1000, "is_of_reserved": False, "optimizer": None, "min_bytes": 0, "plan": None, "raises": False}
    return Limits(**{**asked, **options})


def test_shares_and_what_the_allocator_reserves() -> None:
    assert _limits(budget=0.5).budget_bytes(None) is None
    assert _limits(budget=0.5).budget_bytes(3001) == 1500
    assert _limits(budget=77).budget_bytes(None) == 77
    assert _limits().allocated_bytes(1101) == 1101
    assert _limits(is_of_reserved=True).allocated_bytes(2200) == 1999
