"""Roots in storages that another feature owns at times: they are lent, and never held."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from memkit.core.owners import StreamedWeights, disown, own
from memkit.device import Device
from memkit.recording.recording import Recording
from tests.activations.cases import assert_same_bits
from tests.activations.remat.conftest import NO_PLAN_FITS, Remat


class Slot:
    """Owns a storage that tensors use in turn, and lends each again."""

    def __init__(self, weight: Tensor) -> None:
        self.num_lent = 0
        self._weight = weight
        own(weight.untyped_storage(), self)

    def lend(self, tensor: Tensor) -> Callable[[], Tensor]:
        kept = self._weight.detach().clone()

        def again() -> Tensor:
            self.num_lent += 1
            return kept

        return again

    def streamed(self) -> StreamedWeights:
        return StreamedWeights()

    def fill(self, value: Tensor | float) -> None:
        with _disable_current_modes():  # it is no part of the forward
            self._weight.data.copy_(torch.as_tensor(value))


@pytest.fixture
def weight(torch_device: torch.device) -> Iterator[Tensor]:
    weight = torch.linspace(0, 1, 64, device=torch_device).view(8, 8)
    yield weight
    disown(weight.untyped_storage())


def test_lent_storage_is_known_where_another_was_that_is_gone(weight: Tensor, device: Device) -> None:
    slot, recording = Slot(weight), Recording(device)
    storage, gone = weight.untyped_storage(), weakref.ref(torch.empty(8).untyped_storage())
    recording.current[storage._cdata] = gone, 7  # addresses are given out again

    value = recording.value_of(weight)

    assert value != 7
    assert recording.was_there(storage)
    assert recording.value_of(weight) != value  # it may be another's by then
    assert slot.num_lent == 0


@pytest.mark.filterwarnings(NO_PLAN_FITS)
@pytest.mark.parametrize("use", [torch.clone, torch.Tensor.t, torch.dequantize], ids=["copy", "view", "itself"])
def test_what_is_made_from_a_lent_root_is_made_from_what_its_owner_gives(
    use: Callable[[Tensor], Tensor], weight: Tensor, torch_device: torch.device, remat_on: Remat
) -> None:
    x = torch.linspace(1, 2, 64, device=torch_device).view(8, 8).requires_grad_()
    first, second = weight.clone(), weight.flip(0)
    slot = Slot(weight)

    def loss_of(one: Tensor, other: Tensor, between: Callable[[], None] = lambda: None) -> Tensor:
        y = ((x * 2).detach() @ use(one)).sin()
        between()
        y = (y @ use(other) @ other).sin()
        return (y * x).exp().sum()

    for _ in range(3):
        slot.fill(first)
        with remat_on("1B", "lent"):
            loss = loss_of(weight, weight, lambda: slot.fill(second))
        slot.fill(float("nan"))
        (found,) = torch.autograd.grad(loss, x)
        (expected,) = torch.autograd.grad(loss_of(first, second), x)
        assert_same_bits([found], [expected])

    assert slot.num_lent > 0
