"""Roots in storages that are another feature's at times: they are lent, and never held."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from memkit.owners import StreamedWeights, disown, own
from tests.activations.cases import assert_same_bits
from tests.activations.remat.conftest import NO_PLAN_FITS, Remat


class Slot:
    """Owns a storage, overwrites it, and has what was there in another place."""

    def __init__(self, weight: Tensor, *, can_lend: bool = True) -> None:
        self.can_lend = can_lend
        self.num_lent = 0
        self._weight = weight
        self._master = weight.detach().clone()
        own(weight.untyped_storage(), self)

    def lend(self, tensor: Tensor) -> Callable[[], Tensor]:
        def again() -> Tensor:
            self.num_lent += 1
            return self._master

        return again

    def streamed(self) -> StreamedWeights:
        return StreamedWeights()

    def overwrite(self) -> None:
        self._weight.data.fill_(float("nan"))

    def give_back(self) -> None:
        self._weight.data.copy_(self._master)


@pytest.fixture
def weight(torch_device: torch.device) -> Iterator[Tensor]:
    weight = torch.linspace(0, 1, 64, device=torch_device).view(8, 8)
    yield weight
    disown(weight.untyped_storage())


@pytest.mark.filterwarnings(NO_PLAN_FITS)
def test_what_is_made_from_a_lent_root_is_made_from_what_its_owner_gives(
    weight: Tensor, torch_device: torch.device, remat_on: Remat
) -> None:
    x = torch.linspace(1, 2, 64, device=torch_device).view(8, 8).requires_grad_()
    slot = Slot(weight)

    for _ in range(3):
        with remat_on(1, "lent"):
            y = ((x * 2).detach() @ weight).sin()
            loss = (y * x).exp().sum()
        del y
        slot.overwrite()
        (found,) = torch.autograd.grad(loss, x)
        slot.give_back()
        y = ((x * 2).detach() @ weight).sin()
        (expected,) = torch.autograd.grad((y * x).exp().sum(), x)
        assert_same_bits([found], [expected])

    assert slot.num_lent > 0


def test_owner_that_cannot_lend_is_refused_at_the_entry(weight: Tensor, remat_on: Remat) -> None:
    slot = Slot(weight, can_lend=False)

    with pytest.raises(ValueError, match="what Slot owns cannot be had again in the backward"), remat_on(0.5, "refused"):
        pass
    slot.can_lend = True
    with remat_on(0.5, "refused"):
        pass
