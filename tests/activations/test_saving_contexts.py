"""A context may be copied and pickled, used or not: what is made of it does the same, and nobody is in it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import memkit
from memkit.device import CpuDevice, ReferenceDevice
from tests.activations.remat.conftest import NO_PLAN_FITS

pytestmark = pytest.mark.filterwarnings("ignore:.*no memory apart from the host", NO_PLAN_FITS)

CONTEXTS: dict[str, Callable[[], Any]] = {
    "CPUOffload": lambda: memkit.CPUOffload(0.5, "saved", min_bytes=0),
    "CPUOffload by a schedule": lambda: memkit.CPUOffload(
        memkit.schedules.linear(0, 1, num_iterations=3), "saved", min_bytes=0
    ),
    "CPUOffload on a device": lambda: memkit.CPUOffload(0.5, "saved", min_bytes=0, device=CpuDevice()),
    "Rematerialize": lambda: memkit.Rematerialize(0.5, "saved", min_bytes=0),
    "Rematerialize with pure ops": lambda: memkit.Rematerialize(0.5, "saved", min_bytes=0, pure_ops=["mylib::*"]),
    "MemoryBudget": lambda: memkit.MemoryBudget(0.5, "saved", min_bytes=0),
    "MemoryBudget on a device": lambda: memkit.MemoryBudget("1GiB", "saved", min_bytes=0, device=CpuDevice()),
    "no_offload": memkit.no_offload,
}
WAYS: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda context: pickle.loads(pickle.dumps(context)),
    "oldest pickle": lambda context: pickle.loads(pickle.dumps(context, protocol=0)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}


def _step(context: Any) -> None:
    x = torch.ones(8, requires_grad=True)
    with context:
        y = torch.batch_norm(x.sin().view(4, 2), None, None, None, None, True, 0.1, 1e-5, False).exp()
    y.sum().backward()


@pytest.mark.core(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CONTEXTS)
def test_what_is_made_of_a_context_does_the_same(name: str, way: str) -> None:
    for is_used in (False, True):
        context = CONTEXTS[name]()
        if is_used:
            _step(context)
        made = WAYS[way](context)
        _step(made)

        assert type(made) is type(context)
        assert repr(made) == repr(context)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CONTEXTS)
def test_nobody_is_in_what_is_made_of_a_context_that_somebody_is_in(name: str, way: str) -> None:
    context = CONTEXTS[name]()
    with context:
        made = WAYS[way](context)
    _step(made)

    assert not made.is_entered


@pytest.mark.parametrize("name", ["CPUOffload", "Rematerialize", "MemoryBudget"])
def test_reference_device_is_copied_with_a_context_and_is_not_pickled(name: str) -> None:
    device = ReferenceDevice()
    context = getattr(memkit, name)(0.5, "saved", min_bytes=0, device=device)
    _step(copy.deepcopy(context))

    assert copy.deepcopy(device) is device
    with pytest.raises(
        TypeError, match="what is pickled needs a device that another process can open; found a ReferenceDevice"
    ):
        pickle.dumps(context)
