"""If all saved tensors are smaller than `min_bytes`, nothing is done, and one warning says so."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit import schedules
from memkit.activations.saved.state import remat_states
from memkit.device import ReferenceDevice

DEVICE = ReferenceDevice()
Context = Callable[..., Any]


@pytest.fixture(autouse=True)
def _fresh_remat_tags() -> Iterator[None]:
    yield
    for tag in list(remat_states):
        memkit.reset(tag)


def _net() -> tuple[nn.Module, Tensor]:
    """Return a model that saves eight hidden states of 2 KiB beside its input of the same size."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Sigmoid()) for _ in range(8))), torch.randn(16, 32)


def _step(context: Context, *args: Any, **options: Any) -> None:
    model, x = _net()
    with context(*args, device=DEVICE, **options):
        out = model(x)
    out.sum().backward()


@pytest.mark.parametrize(
    ("context", "did", "num_saved", "kib"),
    [(memkit.CPUOffload, "moved", 9, "18.00"), (memkit.Rematerialize, "dropped", 8, "16.00")],
)
def test_nothing_large_enough_warns_once_for_a_tag_at_the_users_line(
    context: Context, did: str, num_saved: int, kib: str
) -> None:
    message = (
        rf'{context.__name__} \(tag "(one|other)"\): nothing was {did}: only tensors of at least min_bytes \(1.00 MiB\) are, '
        rf"and the {num_saved} saved tensors have {kib} KiB in all, and the largest 2.00 KiB. Pass a smaller min_bytes \(min_"
    )
    for tag in ("one", "other", "one"):
        with pytest.warns(UserWarning, match=message) as caught:
            _step(context, 0.5, tag)
        for _ in range(2):
            _step(context, 0.5, tag)

        assert [warning.filename for warning in caught] == [__file__]
        if tag == "other":
            memkit.reset("one")  # which warns again


@pytest.mark.parametrize(
    ("context", "args", "options"),
    [
        (memkit.CPUOffload, (0.0,), {}),
        (memkit.CPUOffload, (schedules.constant(0.0),), {}),
        (memkit.CPUOffload, (0.5,), {"min_bytes": 2048}),
        (memkit.Rematerialize, (1.0,), {}),
        (memkit.Rematerialize, (8 * 2048,), {}),
        (memkit.Rematerialize, ("1MiB",), {}),
        (memkit.Rematerialize, (0.5,), {"min_bytes": 2048}),
    ],
)
def test_what_does_all_that_was_asked_for_does_not_warn(context: Context, args: tuple[Any, ...], options: Any) -> None:
    for _ in range(2):
        _step(context, *args, **options)


@pytest.mark.parametrize("context", [memkit.CPUOffload, memkit.Rematerialize])
def test_small_steps_after_a_large_one_and_parameters_alone_do_not_warn(context: Context) -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    with context(0.5, "parameters", device=DEVICE):
        loss = (weight * weight).sum()
    loss.backward()
    _step(context, 0.5, "mixed", min_bytes=1)
    _step(context, 0.5, "mixed")


@pytest.mark.parametrize("context", [memkit.CPUOffload, memkit.Rematerialize])
def test_forward_that_fails_leaves_the_warning_to_the_next(context: Context) -> None:
    model, x = _net()
    with pytest.raises(RuntimeError, match="cannot be multiplied"), context(0.5, "fails", device=DEVICE):
        model(x) @ x

    with pytest.warns(UserWarning, match="nothing was"):
        _step(context, 0.5, "fails")


def test_schedule_that_begins_at_zero_warns_when_something_is_to_move() -> None:
    ratio = schedules.linear(0, 1, num_iterations=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _step(memkit.CPUOffload, ratio)

    with pytest.warns(UserWarning, match="nothing was moved"):
        _step(memkit.CPUOffload, ratio)


def test_attached_model_warns_without_its_parameters_and_inputs() -> None:
    model, x = _net()
    memkit.attach(model, memkit.CPUOffload(0.5, "attached", device=DEVICE))
    with pytest.warns(UserWarning, match=r"the 8 saved tensors have 16.00 KiB in all"):
        model(x).sum().backward()


def test_one_small_tensor_is_named_as_one() -> None:
    with (
        pytest.warns(UserWarning, match=r"and the only saved tensor has 64 bytes\. Pass"),
        memkit.CPUOffload(0.5, device=DEVICE),
    ):
        torch.ones(16, requires_grad=True).mul(2).sigmoid()
