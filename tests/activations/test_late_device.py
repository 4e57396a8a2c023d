"""Without `device=` the device is that of the first saved tensor: known only within a forward, after some ops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.activations.saved.state import remat_states
from tests.activations.cases import assert_same_bits
from tests.contracts.conftest import open_found_late

pytestmark = pytest.mark.filterwarnings("ignore:.*as little as can be")


def _remat(device: str | None = None) -> memkit.Rematerialize:
    return memkit.Rematerialize(0.2, "late", min_bytes=0, device=device)


@pytest.mark.parametrize("is_found_late", [False, True])
def test_device_is_known_once_a_step_saves(is_found_late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier steps have saved nothing: the first was not recorded, the second failed."""
    if is_found_late:
        open_found_late(monkeypatch)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 1))

    def gradients(x: Tensor, context: object) -> list[Tensor]:
        with context:  # type: ignore[attr-defined]  # either is a context
            loss = net(x.add(1).mul_(2)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return [parameter.grad for parameter in net.parameters()]

    plain = gradients(torch.ones(6, 4), torch.enable_grad())
    net.zero_grad()
    with _remat(), torch.no_grad():
        net(torch.ones(6, 4))
    with _remat():
        torch.ones(4).add(1)
    with pytest.raises(ZeroDivisionError), _remat():
        1 / 0  # noqa: B018

    assert_same_bits(gradients(torch.ones(6, 4), _remat()), plain)


def test_later_contexts_share_one_window_of_the_cpu() -> None:
    for _ in range(2):
        with _remat("cpu"):
            loss = nn.Sequential(nn.Linear(4, 8), nn.Tanh())(torch.ones(6, 4)).sum()
        loss.backward()

    assert len(remat_states["late"].windows()) == 1
