"""Changes between the forward and the replay, and tensors that are no plain range of bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.device import Device
from tests.activations.cases import assert_same_bits
from tests.activations.remat.conftest import NO_PLAN_FITS, Remat

Context = Callable[[], AbstractContextManager[Any]]

pytestmark = [pytest.mark.filterwarnings(NO_PLAN_FITS), pytest.mark.usefixtures("quick_plans")]


def _same_as_plain(
    step: Callable[[Context], list[Tensor]], remat_on: Remat, *, budget: float | str = "1B", num_steps: int = 3
) -> None:
    plain = step(nullcontext)
    for _ in range(num_steps):
        assert_same_bits(step(lambda: remat_on(budget, "hazard")), plain)


@contextmanager
def _noticed_writes() -> Iterator[None]:
    """Accept autograd's in-place error as well as the gradient of the plain run."""
    try:
        yield
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise


@pytest.mark.parametrize("budget", ["1B", 0.4, 0.2])
def test_write_behind_the_back_to_what_a_plan_holds_raises_in_every_step(
    budget: float | str, torch_device: torch.device, remat_on: Remat
) -> None:
    for _ in range(3):
        x = torch.ones(4, device=torch_device, requires_grad=True)
        with remat_on(budget, "held"):
            held = torch.zeros(4, device=torch_device)
            held[:2] = torch.ones(2, device=torch_device)
            loss = sum(((held * scale).sin() * x).sum() for scale in range(6))
        held.add_(1)

        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("budget", [0.2, *[pytest.param(share, marks=pytest.mark.slow) for share in (0.5, 0.3, 0.1, 0.05)]])
def test_anchor_that_was_written_to_is_not_used(budget: float | str, torch_device: torch.device, remat_on: Remat) -> None:
    def step(context: Context) -> list[Tensor]:
        x = torch.linspace(0, 1, 64, device=torch_device).requires_grad_()
        with context():
            h = x * 1.0
            for _ in range(24):
                h = h + h.sin() * h.cos()
                h.add_(0.1)
        loss = h.sum()
        h.detach().mul_(2)
        loss.backward()
        return [x.grad]

    plain = step(nullcontext)
    for _ in range(3):
        with _noticed_writes():
            assert_same_bits(step(lambda: remat_on(budget, "anchors")), plain)


@pytest.mark.parametrize("is_read", [False, True], ids=["backward", "read outside"])
def test_default_dtype_that_has_changed(is_read: bool, torch_device: torch.device, remat_on: Remat) -> None:
    def step(context: Context) -> list[Tensor]:
        n, x = torch.arange(4, device=torch_device), torch.ones(4, device=torch_device, requires_grad=True)
        with context():
            loss = ((n / 7).cos() * x).sum()
        node = loss.grad_fn.next_functions[0][0]
        torch.set_default_dtype(torch.float64)
        try:
            if is_read:
                return [node._saved_self if node._saved_other is None else node._saved_other]
            loss.backward()
        finally:
            torch.set_default_dtype(torch.float32)
        return [x.grad]

    _same_as_plain(step, remat_on)


@contextmanager
def _without_onednn() -> Iterator[None]:
    with torch.backends.mkldnn.flags(enabled=False):
        yield


@contextmanager
def _medium_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("setting", [_without_onednn, _medium_precision])
def test_backend_settings_of_the_forward_hold_in_the_replay(
    setting: Context, torch_device: torch.device, remat_on: Remat
) -> None:
    def step(context: Context) -> list[Tensor]:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(2304, 256)).to(torch_device)
        with setting(), context():
            y = layers(torch.randn(16, 3, 16, 16, device=torch_device))
            loss = (y @ y.t()).sin().sum()
        loss.backward()
        return [param.grad for param in layers.parameters()]

    _same_as_plain(step, remat_on)
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.backends.mkldnn.enabled


class Named(Tensor):
    """A subclass that adds nothing to what ops do."""


@pytest.mark.parametrize("write", [lambda t: t.add_(1), lambda t: t.copy_(t.new_full((4,), 3.0)), lambda t: t.zero_()])
def test_writes_to_a_subclass_without_dispatch(
    write: Callable[[Tensor], object], torch_device: torch.device, remat_on: Remat
) -> None:
    def step(context: Context) -> list[Tensor]:
        x = torch.ones(4, device=torch_device, requires_grad=True)
        with context():
            named = (x * 1).as_subclass(Named)
            write(named)
            loss = (named * 2 * x).sin().sum()
        del named
        loss.backward()
        return [x.grad.as_subclass(Tensor)]

    _same_as_plain(step, remat_on)


@pytest.mark.parametrize("is_new", [True, False])
def test_parameter_that_is_given_other_data(is_new: bool, torch_device: torch.device, remat_on: Remat) -> None:
    def step(context: Context) -> list[Tensor]:
        scale = nn.Parameter(torch.ones(4, device=torch_device), requires_grad=False)
        x = torch.ones(4, device=torch_device, requires_grad=True)
        with context():
            y = scale * 2
            if is_new:
                scale.data = torch.full((4,), 5.0, device=torch_device)
            loss = (y * x).sum()
        scale.data = torch.full((4,), 7.0, device=torch_device)
        del y
        loss.backward()
        return [x.grad]

    _same_as_plain(step, remat_on)


@pytest.mark.parametrize("make", [lambda w: torch.tensor(1.5), lambda w: w.detach(), lambda w: w.data])
def test_values_made_from_a_root_that_has_died_can_be_dropped(make: Callable[[Tensor], Tensor], remat_on: Remat) -> None:
    w = torch.full((1,), 1.5)

    def step(context: Context) -> list[Tensor]:
        x = torch.linspace(0, 1, 256).requires_grad_()
        with context():
            y = x
            for _ in range(8):
                y = torch.sin(y * make(w)).exp().clamp(max=2)
        y.square().mean().backward()
        return [x.grad]

    _same_as_plain(step, remat_on, budget=0.35)
    stats = memkit.stats("hazard")
    assert stats.ledger_peak_bytes <= stats.budget_bytes + 2048


CONTEXTS: dict[str, Callable[[Device], AbstractContextManager[Any]]] = {
    "dtr": lambda device: memkit.Rematerialize("1B", "written", policy="dtr", device=device, min_bytes=0),
    "plan": lambda device: memkit.Rematerialize("1B", "written", device=device, min_bytes=0),
    "budget": lambda device: memkit.MemoryBudget("1B", "written", device=device, min_bytes=0),
}


@pytest.mark.filterwarnings("ignore:.*moving bytes to the host frees nothing")
@pytest.mark.parametrize("name", CONTEXTS)
@pytest.mark.parametrize("mark", [memkit.keep, memkit.offload])
@pytest.mark.parametrize("is_inside", [True, False])
@pytest.mark.parametrize("is_used_first", [True, False])
def test_values_made_from_what_is_written_to_later(
    name: str, mark: Callable[[Tensor], Tensor], is_inside: bool, is_used_first: bool, device: Device
) -> None:
    def step(context: AbstractContextManager[Any]) -> Tensor:
        x = torch.linspace(-1, 1, 16, device=device.torch_device).requires_grad_()
        with context:
            h = x.tanh() if is_used_first else mark(x.tanh())
            y = x * h.detach().sin()
            if is_used_first:
                mark(h)
            if is_inside:
                h.detach().add_(1)
        if not is_inside:
            h.detach().add_(1)
        y.sum().backward()
        return x.grad

    plain = step(nullcontext())
    for _ in range(3):
        assert_same_bits([step(CONTEXTS[name](device))], [plain])
