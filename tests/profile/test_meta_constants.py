"""Constants that a forward makes count as often, and for as much, as with data."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from memkit import profile_memory
from memkit.errors import DataDependentError
from tests.profile.calls import CONSTANT_CALLS
from tests.profile.cases import Calls, Function, both, saved


@pytest.mark.parametrize("name", CONSTANT_CALLS)
def test_constants_are_saved_as_with_data(name: str) -> None:
    real, meta = both(Calls(CONSTANT_CALLS[name]), torch.randn(4, 4), backward=True)

    assert saved(meta) == saved(real)
    assert meta.param_cast_bytes == real.param_cast_bytes


@pytest.mark.parametrize("name", CONSTANT_CALLS)
def test_constants_are_saved_as_with_data_under_autocast(name: str) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        real, meta = both(Calls(CONSTANT_CALLS[name]), torch.randn(4, 4))

    assert saved(meta) == saved(real)


@pytest.mark.parametrize(
    ("make", "storages"),
    [
        (lambda device: torch.arange(4, device=device).float(), 1),  # it is there already
        (lambda device: torch.linspace(0, 1, 4), 2),  # it is in the memory of the host: moving it makes another
        (lambda device: torch.tensor([1.0, 2.0, 3.0, 4.0]).mul(2), 2),
        (lambda device: torch.arange(4).float(), 2),
    ],
)
def test_on_cuda_a_constant_moves_if_it_was_made_on_the_host(make: Callable[[torch.device], Tensor], storages: int) -> None:
    x = torch.randn(4, requires_grad=True)

    def call(x: Tensor) -> Tensor:
        constant = make(x.device)
        return x * constant + x * constant.to(x.device)

    report = profile_memory(Function(call), x, device="meta", target="cuda", print_table=False)

    assert [record.storage_bytes for record in report.saved] == [16] * storages


def test_a_constant_keeps_its_value_when_it_is_moved() -> None:
    model = Function(lambda x: x.exp() if torch.linspace(0, 1, 3).to(x.device)[1].item() == 0.5 else x)

    report = profile_memory(model, torch.randn(4, requires_grad=True), device="meta", target="cpu", print_table=False)

    assert report.activation_bytes == 16


def test_a_gradient_that_flows_into_a_tensor_made_on_the_cpu_is_refused() -> None:
    model = Calls(lambda x, w, _: torch.zeros(4, 4).add_(x @ w).exp())

    with pytest.raises(DataDependentError, match="something that torch cannot do on the meta device"):
        profile_memory(model, torch.randn(4, 4), backward=True, device="meta", print_table=False)


def test_values_written_into_a_constant_flow_back() -> None:
    def write(x: Tensor, w: Tensor, _: object) -> Tensor:
        rows = torch.zeros(4, 4)
        rows[0] = (x @ w)[0]
        return rows.exp()

    real, meta = both(Calls(write), torch.randn(4, 4), backward=True)

    assert saved(meta) == saved(real)
